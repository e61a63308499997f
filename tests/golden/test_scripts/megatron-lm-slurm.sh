#!/bin/bash
# demo: 4 layers of 128, 842,496 parameters, tp2-pp2-dp1 on 4 GPUs
# Rendered by hpc-gpt 0.0.0. It is complete: hand it to sbatch as it is.
#SBATCH --job-name=demo
#SBATCH --qos=qos_gpu-t3
#SBATCH --constraint=v100-32g
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=10
#SBATCH --time=02:00:00
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --output=%x-%j.out
#SBATCH --hint=nomultithread

# Texts of the experiment and the profile stand in single quotes, as they are.
# shellcheck disable=SC2016,SC1003
set -o pipefail

# --- environment ---------------------------------------------------------------------------------------------------
# What an enclosing job or a login shell has left would rank or bind our tasks wrongly.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT
unset "${!TORCHELASTIC_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
# shellcheck disable=SC1091
. /opt/venv/bin/activate || {
  printf 'Error: no virtual environment on %s: %s\n' "$HOSTNAME" /opt/venv >&2
  exit 1
}
python=python
export HPC_GPT_PYTHON="${HPC_GPT_PYTHON:-$python}"
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
# The checkout of Megatron-LM whose pretrain_gpt.py the ranks run.
[ -n "${MEGATRON_LM:-}" ] || MEGATRON_LM='/opt/it'"'"'s/Megatron-LM'
export MEGATRON_LM="${MEGATRON_LM:-}"

[ -n "${SLURM_JOB_ID:-}" ] || {
  printf 'Error: this script runs inside a Slurm job\n\nhint: sbatch %q\n' "$0" >&2
  exit 2
}
# An array's element goes by the array's id and its number: its own id may be the array's, which names every element.
job="${HPC_GPT_ELEMENT:-$SLURM_JOB_ID}"
unset HPC_GPT_ELEMENT
export HPC_GPT_JOB="$job"
HPC_GPT_RUN="${HPC_GPT_RUN:-${HPC_GPT_LOGS:-${SLURM_SUBMIT_DIR:-$PWD}/logs}/demo/$SLURM_JOB_ID}"
# --- the run folder ------------------------------------------------------------------------------------------------
die() { # die MESSAGE HINT
  printf 'Error: %s\n\nhint: %s\n' "$1" "$2" >&2
  exit 1
}
keep() { # keep NAME: stdin becomes the file NAME of the run folder, whole, unless it is there
  local aside="$HPC_GPT_RUN/.$1.$$"
  cat >"$aside" || return
  ln -- "$aside" "$HPC_GPT_RUN/$1" 2>/dev/null || [ -e "$HPC_GPT_RUN/$1" ] || mv -n -- "$aside" "$HPC_GPT_RUN/$1"
  rm -f -- "$aside"
  [ -e "$HPC_GPT_RUN/$1" ]
}
{ mkdir -p -- "$HPC_GPT_RUN/attempts" && HPC_GPT_RUN=$(cd -- "$HPC_GPT_RUN" && pwd); } ||
  die "cannot make the run folder $HPC_GPT_RUN" "set HPC_GPT_LOGS to a folder that $HOSTNAME can write"
export HPC_GPT_RUN
keep job.sh <"${BASH_SOURCE[0]}" || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
cmp -s "${BASH_SOURCE[0]}" "$HPC_GPT_RUN/job.sh" ||
  die "HPC_GPT_RUN names the run of another script: $HPC_GPT_RUN" "unset HPC_GPT_RUN, or submit that run's own job.sh"
keep resolved.json <<'HPC_GPT_RESOLVED' || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
{
 "name": "demo",
 "preset": null,
 "model": {
  "hidden": 128,
  "layers": 4,
  "heads": 4,
  "vocab": 256,
  "seq": 128,
  "tied": true,
  "vocab_multiple": 64
 },
 "data": {
  "source": "megatron",
  "path": "stdlib",
  "eval_fraction": 0.05,
  "tokenizer": "byte",
  "workers": 0,
  "on_bad_shard": "stop"
 },
 "engine": {
  "name": "megatron-lm",
  "zero_stage": 0,
  "recompute": "none",
  "attention": "auto",
  "compile": "none",
  "compile_backend": "inductor",
  "sequence_parallel": false,
  "partition": "layers",
  "offload": "none",
  "offload_path": null,
  "offload_ratio": 1.0,
  "tiles": 1,
  "activation_offload": false,
  "loss_chunks": 1,
  "sharded_optimizer": false,
  "prefetch": true,
  "reshard": true,
  "megatron_args": []
 },
 "layout": {
  "tp": 2,
  "pp": 2,
  "dp": 1
 },
 "batch": {
  "micro_batch": 8,
  "micro_batches": 4,
  "global_batch": 32
 },
 "gpus": 4,
 "nodes": 1,
 "ranks_per_node": 4,
 "train": {
  "steps": 200,
  "minutes": null,
  "dtype": "fp32",
  "seed": 1,
  "deterministic": false,
  "tf32": false,
  "optimizer": "adamw",
  "optimizer_mode": "fused",
  "lr": 0.001,
  "min_lr": 0.0,
  "warmup_steps": 20,
  "decay": "cosine",
  "weight_decay": 0.1,
  "beta1": 0.9,
  "beta2": 0.95,
  "eps": 1e-08,
  "clip": 1.0,
  "log_every": 10,
  "eval_every": 50,
  "eval_batches": 4,
  "save_every": 100,
  "max_bad_steps": 20
 },
 "job": {
  "name": "demo",
  "time": "02:00:00",
  "partition": null,
  "account": null,
  "qos": "qos_gpu-t3",
  "constraint": "v100-32g",
  "reservation": null,
  "nodelist": null,
  "exclude": null,
  "comment": null,
  "mem": null,
  "cpus_per_task": null,
  "dependency": null,
  "exclusive": true,
  "signal_lead_s": 120,
  "sbatch": [
   "--hint=nomultithread"
  ],
  "srun": []
 },
 "cluster": {
  "name": "jean-zay-v100-32g",
  "description": "Jean Zay, nodes of 4 V100 SXM2 32 GB, 40 cores, Omni-Path",
  "scheduler": "slurm",
  "device": "v100-32g",
  "gpus_per_node": 4,
  "cpus_per_node": 40,
  "gpu_flag": "gres",
  "gpu_type": null,
  "partition": null,
  "account": null,
  "qos": "qos_gpu-t3",
  "constraint": "v100-32g",
  "reservation": null,
  "time": "02:00:00",
  "mem": null,
  "exclusive": true,
  "requeue": true,
  "signal_lead_s": 120,
  "modules": [],
  "venv": "/opt/venv",
  "python": null,
  "megatron_lm": "/opt/it's/Megatron-LM",
  "container": null,
  "environment": {},
  "node_suffix": "",
  "sbatch": [
   "--hint=nomultithread"
  ],
  "srun": []
 },
 "sweep": null,
 "row": null,
 "version": "0.0.0",
 "schema": 1
}
HPC_GPT_RESOLVED

n=1
until mkdir -- "$HPC_GPT_RUN/attempts/$n" 2>/dev/null; do
  [ -d "$HPC_GPT_RUN/attempts/$n" ] || die "cannot write in $HPC_GPT_RUN/attempts" "is the disk full or read-only?"
  n=$((n + 1))
done
export HPC_GPT_ATTEMPT=$n
attempt="$HPC_GPT_RUN/attempts/$n"
printf '{"attempt": %d, "job_id": "%s", "restart": %d, "node_list": "%s", "started": %d}\n' \
  "$n" "$job" "${SLURM_RESTART_COUNT:-0}" "$SLURM_JOB_NODELIST" "$(date +%s)" >"$attempt/attempt.json"
echo "run folder $HPC_GPT_RUN, attempt $n, output in attempts/$n/log"
exec >>"$attempt/log" 2>&1
# This shell outlives signals that are meant for the ranks: the epilogue has the last word.
trap : TERM INT USR2

say_ended() { # say_ended FOLDER CLASS CAUSE: ended.json, unless the trainer has had the first word
  [ ! -e "$1/ended.json" ] || return 0
  local step cause="${3//\\/\\\\}"
  step=$(tail -n 1 "$1/metrics.jsonl" 2>/dev/null | sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p')
  printf '{"ended": "%s", "cause": "%s", "step": %d, "time": %d, "requeue": false}\n' \
    "$2" "${cause//\"/\\\"}" "${step:-0}" "$(date +%s)" >"$1/.ended.json" && mv -n -- "$1/.ended.json" "$1/ended.json"
}
# An earlier attempt that left no word was ended from outside; accounting, where there is one, knows how.
before="$HPC_GPT_RUN/attempts/$((n - 1))"
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -d "$before" ] && [ ! -e "$before/ended.json" ]; then
  how=$(timeout 20 sacct -D -X -n -P -o State -j "$job" 2>/dev/null | tail -n 2 | head -n 1)
  if [ "$how" = NODE_FAIL ] || grep -qs 'Node failure on' "$before/log"; then
    say_ended "$before" node_failure 'a node of the job died'
  elif [ "$how" = PREEMPTED ]; then
    say_ended "$before" preempted 'preempted before it had saved'
  fi
  say_ended "$before" requeued 'requeued by Slurm or by hand'
fi

# --- preflight -----------------------------------------------------------------------------------------------------
fail() { # fail CAUSE HINT: ends the attempt before a rank has started
  say_ended "$attempt" user_error "$1"
  die "$1" "$2"
}
command -v -- "$HPC_GPT_PYTHON" >/dev/null ||
  fail "no $HPC_GPT_PYTHON on $HOSTNAME" "name one: HPC_GPT_PYTHON, or modules, venv or python in the cluster profile"
"$HPC_GPT_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("hpc_gpt") is None)' ||
  fail "$HPC_GPT_PYTHON on $HOSTNAME cannot import hpc_gpt" "pip install hpc-gpt there, or set venv in the profile"
[ -n "$MEGATRON_LM" ] || fail "MEGATRON_LM is not set" \
  'export MEGATRON_LM=/path/to/Megatron-LM, or megatron_lm = "/path/to/Megatron-LM" in the cluster profile'

# --- launch --------------------------------------------------------------------------------------------------------
# Rank 0 is on the first node of the list. An empty list is an error: localhost would make a world of every node.
MASTER_ADDR="${HPC_GPT_MASTER_ADDR:-}"
if [ -z "$MASTER_ADDR" ]; then
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  [ -n "${hosts[0]:-}" ] || fail "scontrol names no host of '$SLURM_JOB_NODELIST'" "set HPC_GPT_MASTER_ADDR by hand"
  MASTER_ADDR="${hosts[0]}"
  if type getent >/dev/null 2>&1 && ! getent ahosts "$MASTER_ADDR" >/dev/null; then
    fail "the host $MASTER_ADDR has no address" "set node_suffix in the cluster profile, or HPC_GPT_MASTER_ADDR by hand"
  fi
fi
# The port follows from the job id, so two jobs on a node differ; below the ports that connections take by
# themselves; and nobody listens on it (0A in /proc/net/tcp).
read -r low _ 2>/dev/null </proc/sys/net/ipv4/ip_local_port_range
[ "${low:-0}" -gt 12000 ] || low=32768
for ((try = 0; try < 100; try++)); do
  MASTER_PORT=$((10000 + (SLURM_JOB_ID + 7919 * try) % (low - 10000)))
  printf -v hex ':%04X ' "$MASTER_PORT"
  grep -qsE "^ *[0-9]+: [0-9A-F]+${hex}[0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6 || break
done
export MASTER_ADDR MASTER_PORT
# srun no longer takes the job's CPUs a task by itself (Slurm 22.05).
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# A hang becomes an error, with the flight recorder's account of every rank's last collectives.
mkdir -p -- "$attempt/flight"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE="$attempt/flight/rank-"

command=("$HPC_GPT_PYTHON" -m hpc_gpt.train)
echo "4 ranks on $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), rendezvous $MASTER_ADDR:$MASTER_PORT"
# exec leaves no shell between slurmstepd and the trainer: a signal reaches python itself. USR2 and TERM are ignored
# until the trainer listens: a preemption that comes while ranks start would end the job as failed, not requeue it.
srun --export=ALL --kill-on-bad-exit=1 --ntasks=4 --ntasks-per-node=4 \
  bash -c 'trap "" USR2 TERM
export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE=4
exec "$@"' rank "${command[@]}"
rc=$?

# --- epilogue ------------------------------------------------------------------------------------------------------
rmdir -- "$attempt/flight" 2>/dev/null
# When one rank fails srun ends the others and gives their 143: the first one's own code is in its message.
cause=$(grep -m 1 -oE 'tasks? [0-9,-]+: (Exited with exit code [0-9]+|Killed|Aborted|Segmentation fault|Bus error).*' "$attempt/log")
case "$cause" in
*'exit code '*) rc=${cause##*exit code } ;;
esac
cause="${cause:-exit code $rc}"
# A controller that is being restarted is asked again.
for ((try = 0; try < 20; try++)); do
  state=$(timeout 20 scontrol --oneliner show job "$job" 2>/dev/null | grep -o -m 1 'JobState=[A-Z_]*') && break
  sleep 3
done
# A running job whose signal is still being handed out.
[ "$state" = JobState=SIGNALING ] && state=JobState=RUNNING
if [ -e "$HPC_GPT_RUN/cancelled.$job" ]; then
  say_ended "$attempt" cancelled "hpc-gpt cancel, $cause"
elif grep -qs 'Node failure on' "$attempt/log"; then
  say_ended "$attempt" node_failure "a node of the job died, $cause"
elif [ -z "$state" ] || [ "$state" = JobState=RUNNING ]; then
  say_ended "$attempt" error "$cause"
else
  say_ended "$attempt" cancelled "${state#JobState=}, $cause"
fi
# Back to the queue, once, and only when the trainer asks for it, nobody has cancelled the job and it still runs:
# a requeue under scancel would revive it.
if [ -e "$attempt/requeue" ] && [ ! -e "$HPC_GPT_RUN/cancelled.$job" ]; then
  case "$state" in
  JobState=RUNNING)
    echo "back to the queue: scontrol requeue $job"
    scontrol requeue "$job" ||
      die "Slurm will not requeue job $job" "hpc-gpt submit --resume $(printf %q "$HPC_GPT_RUN")"
    ;;
  '')
    die "Slurm does not answer, so job $job is not requeued" \
      "hpc-gpt submit --resume $(printf %q "$HPC_GPT_RUN")"
    ;;
  esac
fi
exit "$rc"
