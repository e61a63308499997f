#!/bin/bash
# demo: 4 layers of 128, 842,496 parameters, tp2-pp2-dp1 on 4 GPUs
# Rendered by hpc-gpt 0.0.0. It is complete: give it to bash as it is.

# To edit: modules and variables below. The settings at the end belong to the training: to change one, render again.
# The flow is in `main`. Started by hand, this script makes a run folder and starts itself once per rank; such a start
#   becomes that rank.

# Texts of the experiment and the profile are in single quotes, unchanged.
# shellcheck disable=SC2016,SC1003
set -o pipefail

# --- environment ---------------------------------------------------------------------------------------------------
# Variables of an enclosing job or a login shell would give our tasks wrong ranks or bindings.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT
unset "${!TORCHELASTIC_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
[ -n "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
[ -n "${HPC_GPT_PYTHON:-}" ] || export HPC_GPT_PYTHON=python3
# Python imports from PYTHONPATH, never from the current folder. Byte code in a cache would run instead of the submitted.
export PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
# Each rank has an even share of the CPUs that this process may use, by its affinity and its container's quota. The
# machine's load does not count, as sums round differently with another number of threads.
cpus=$(nproc)
cgroup=/sys/fs/cgroup
{
  read -r quota period <"$cgroup/cpu.max" ||
    { read -r quota <"$cgroup/cpu/cpu.cfs_quota_us" && read -r period <"$cgroup/cpu/cpu.cfs_period_us"; }
  if [ "$quota" -gt 0 ] && [ "$quota" -lt $((cpus * period)) ]; then cpus=$(((quota + period - 1) / period)); fi
} 2>/dev/null
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cpus > 4 ? cpus / 4 : 1))}"
# A thread that waits for others spins, by OpenMP's default for milliseconds, which is fastest if nothing else runs. If
# other programs run, spinning takes the CPUs from the threads that it waits for: then it spins some 0.2 ms, and sleeps.
# The least of three readings counts, as a short command is not a load; nor are this run's own ranks.
if [ -z "${OMP_WAIT_POLICY:-}${GOMP_SPINCOUNT:-}" ]; then
  export GOMP_SPINCOUNT=5000
  for pause in 0 0.02 0.02; do
    sleep "$pause"
    IFS=" /" read -r _ _ _ runnable _ </proc/loadavg || continue
    if [ "$runnable" -le 4 ]; then
      unset GOMP_SPINCOUNT
      break
    fi
  done
fi

main() {
  if [ -z "${SUBMITIT_LOCAL_GLOBALID:-}" ]; then
    HPC_GPT_RUN="${HPC_GPT_RUN:-${HPC_GPT_LOGS:-$PWD/logs}/demo/$(date +%Y%m%d-%H%M%S)-$$}"
    make_run_folder
    command -v -- "$HPC_GPT_PYTHON" >/dev/null || die "no $HPC_GPT_PYTHON on $HOSTNAME" "set HPC_GPT_PYTHON"
    use_submitted_code
    exec "$HPC_GPT_PYTHON" -m hpc_gpt.launcher.local.by_hand "$HPC_GPT_RUN" # starts this script once per rank
  fi
  # The submitted code comes before any PYTHONPATH of the profile.
  export PYTHONPATH="$HPC_GPT_RUN/code.zip${PYTHONPATH:+:$PYTHONPATH}"
  # This process is one rank. With exec there is no shell in between, so signals reach python itself. USR2 is ignored
  # until the trainer handles it.
  # shellcheck disable=SC2153
  export RANK="$SUBMITIT_LOCAL_GLOBALID" WORLD_SIZE="$SUBMITIT_LOCAL_NTASKS" LOCAL_RANK="$SUBMITIT_LOCAL_LOCALID"
  export LOCAL_WORLD_SIZE="$SUBMITIT_LOCAL_NTASKS"
  trap "" USR2
  exec "$HPC_GPT_PYTHON" -m hpc_gpt.trainer
}

# === do not edit below: the functions that main calls, then the settings =============================================
die() { # die MESSAGE HINT [CODE]
  printf 'Error: %s\n\nhint: %s\n' "$1" "$2" >&2
  exit "${3:-1}"
}
keep() { # keep NAME: writes stdin to the file NAME of the run folder, unless it exists
  local aside="$HPC_GPT_RUN/.$1.$$"
  cat >"$aside" || return
  ln -- "$aside" "$HPC_GPT_RUN/$1" 2>/dev/null || [ -e "$HPC_GPT_RUN/$1" ] || mv -n -- "$aside" "$HPC_GPT_RUN/$1"
  rm -f -- "$aside"
  [ -e "$HPC_GPT_RUN/$1" ]
}
make_run_folder() { # the first start stores this script and its settings there; the folder of another script is refused
  { mkdir -p -- "$HPC_GPT_RUN/attempts" && HPC_GPT_RUN=$(cd -- "$HPC_GPT_RUN" && pwd); } ||
    die "cannot make the run folder $HPC_GPT_RUN" "set HPC_GPT_LOGS to a folder that $HOSTNAME can write"
  export HPC_GPT_RUN
  [ -e "$HPC_GPT_RUN/job.sh" ] || keep job.sh <"${BASH_SOURCE[0]}" || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
  cmp -s "${BASH_SOURCE[0]}" "$HPC_GPT_RUN/job.sh" ||
    die "HPC_GPT_RUN names the run of another script: $HPC_GPT_RUN" "unset HPC_GPT_RUN, or submit that run's own job.sh"
  [ -e "$HPC_GPT_RUN/resolved.json" ] || settings | keep resolved.json || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
}
# --- the submitted code --------------------------------------------------------------------------------------------
use_submitted_code() { # code.zip, from which Python imports; without one the run uses the present code
  local said code="$HPC_GPT_RUN/code.zip"
  [[ $HPC_GPT_RUN != *:* ]] || die "PYTHONPATH cannot carry the colon of $HPC_GPT_RUN" "set HPC_GPT_LOGS to a path without a colon"
  if [ ! -e "$code" ]; then # plain bash
    "$HPC_GPT_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("hpc_gpt") is None)' ||
      die "$HPC_GPT_PYTHON on $HOSTNAME cannot import hpc_gpt" \
        "pip install hpc-gpt there, or name another Python: HPC_GPT_PYTHON, or venv in the cluster profile"
    "$HPC_GPT_PYTHON" -m hpc_gpt.core.runs.snapshot "$HPC_GPT_RUN" || die "cannot make $code" "is the disk full or read-only?"
  fi
  said=$("$HPC_GPT_PYTHON" -I "$code" hpc_gpt.core.runs.code_archive "$HPC_GPT_RUN") ||
    die "${said:-cannot read $code}" 'submit the experiment again'
  export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"
}
# --- settings: resolved.json of the run ----------------------------------------------------------------------------
settings() { cat; } <<'HPC_GPT_RESOLVED'
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
 "data": {},
 "engine": {
  "zero_stage": 1
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
  "dtype": "fp32",
  "optimizer_mode": "fused",
  "lr": 0.001,
  "warmup_steps": 20,
  "eval_every": 50,
  "save_every": 100
 },
 "job": {
  "name": "demo",
  "exclusive": false,
  "signal_lead_s": 30,
  "retry_pause_s": 30,
  "preflight": false,
  "spare_nodes": 0
 },
 "cluster": {
  "name": "local",
  "description": "this machine: one node of 8 slots, no scheduler; without a GPU every rank runs on CPU",
  "scheduler": "local",
  "gpus_per_node": 8,
  "gpu_flag": "none",
  "chain": "none",
  "signal_lead_s": 30
 },
 "sweep": null,
 "row": null,
 "version": "0.0.0",
 "schema": 2
}
HPC_GPT_RESOLVED

main
