#!/bin/bash
# the__table_: 2 runs
# Rendered by hpc-gpt 0.0.0. Every element of the array is one run with its own job.sh.
#SBATCH --job-name='the '"'"'table'"'"''
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --output=%x-%j.out

# HPC_GPT_ARRAY is a folder with one link per element, named by its number, to the element's run folder.
run=$(cd -P -- "${HPC_GPT_ARRAY:-/nowhere}/$SLURM_ARRAY_TASK_ID" && pwd) || {
  printf 'Error: element %s of the array has no run\n\nhint: %s\n' "$SLURM_ARRAY_TASK_ID" \
    'hpc-gpt submit --sweep makes the folder that HPC_GPT_ARRAY names' >&2
  exit 2
}
unset HPC_GPT_ARRAY
export HPC_GPT_RUN="$run" HPC_GPT_ELEMENT="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
exec bash "$run/job.sh"
