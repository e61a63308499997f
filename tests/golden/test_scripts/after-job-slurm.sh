#!/bin/bash
#SBATCH --job-name=after-20260102-030405-abcd-20
#SBATCH '--output=/scratch/my 100%% logs/demo/20260102-030405-abcd/after/step-20/log'
#SBATCH --open-mode=append
#SBATCH --account=abc@v100
#SBATCH --gpus=1
#SBATCH '--comment=a '"'"'b'"'"''
# A job of [after], started by hpc_gpt.launcher.after for step 20 of a run.
# shellcheck disable=SC2016,SC1003
set -o pipefail
HPC_GPT_RUN='/scratch/my 100% logs/demo/20260102-030405-abcd'
after='/scratch/my 100% logs/demo/20260102-030405-abcd/after/step-20'
[ -n "${HPC_GPT_PYTHON:-}" ] || HPC_GPT_PYTHON=python3
trap : TERM # at the time limit the program ends, and this script records its end
me="${SLURM_JOB_ID:-$$}"
if ! (set -C && echo "$me" >"$after/started") 2>/dev/null && [ "$(cat -- "$after/started")" != "$me" ]; then
  echo "job $(cat -- "$after/started") has already run for this step"
  exit 0
fi
# PYTHONPATH has our code only for our own programs.
PYTHONPATH=":${PYTHONPATH:-}:"
PYTHONPATH="${PYTHONPATH//":$HPC_GPT_RUN/code.zip:"/:}"
PYTHONPATH="${PYTHONPATH#:}"
PYTHONPATH="${PYTHONPATH%:}"
[ -n "$PYTHONPATH" ] || unset PYTHONPATH
rc=0
python=(env "PYTHONPATH=$HPC_GPT_RUN/code.zip${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 "$HPC_GPT_PYTHON")

[ "$rc" != 0 ] || [ -e "$after/export" ] || "${python[@]}" -m hpc_gpt.trainer.export "$HPC_GPT_RUN" "$after/export" fp32 20 || rc=$?
if [ "$rc" = 0 ]; then
  (
    exec python3 evaluate.py '/scratch/my 100% logs/demo/20260102-030405-abcd/after/step-20/export'
  )
  rc=$?
fi
printf '{"code": %d, "time": %d}\n' "$rc" "$(date +%s)" >"$after/.ended.json" && mv -f -- "$after/.ended.json" "$after/ended.json"
"${python[@]}" -m hpc_gpt.launcher.after "$HPC_GPT_RUN" left 20
exit "$rc"
