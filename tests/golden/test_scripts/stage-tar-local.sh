#!/bin/bash
# demo: 4 layers of 128, 842,496 parameters, tp2-pp2-dp1 on 4 GPUs
# Rendered by hpc-gpt 0.0.0. It is complete: hand it to bash as it is.

# What to edit: modules and variables below. The settings at the end are those of the training: to change one, render
#   again.
# What happens: `main`. Started by hand, this script makes a run folder and starts itself once for each rank; started so,
#   it becomes that rank.

# Texts of the experiment and the profile are in single quotes, unchanged.
# shellcheck disable=SC2016,SC1003
set -o pipefail

# --- environment ---------------------------------------------------------------------------------------------------
# Variables of an enclosing job or a login shell would give our tasks wrong ranks or bindings.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT
unset "${!TORCHELASTIC_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
[ -n "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
[ -n "${HPC_GPT_PYTHON:-}" ] || export HPC_GPT_PYTHON=python3
# Python imports from PYTHONPATH, never from the current folder; a cached file would run instead of the submitted one.
export PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
# Each rank has an even share of the CPUs that this process may use, by its affinity and its container's quota. The load
# does not count: with another number of threads sums round differently.
cpus=$(nproc)
cgroup=/sys/fs/cgroup
{
  read -r quota period <"$cgroup/cpu.max" ||
    { read -r quota <"$cgroup/cpu/cpu.cfs_quota_us" && read -r period <"$cgroup/cpu/cpu.cfs_period_us"; }
  if [ "$quota" -gt 0 ] && [ "$quota" -lt $((cpus * period)) ]; then cpus=$(((quota + period - 1) / period)); fi
} 2>/dev/null
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cpus > 4 ? cpus / 4 : 1))}"
# A thread that waits for others spins, by OpenMP's default for milliseconds: the fastest where nothing else runs. Where
# others run, spinning takes the CPUs from the threads that are waited for: there it is some 0.2 ms, then sleep. The
# least of three looks counts, as a short command beside is no load; this run's own ranks are none either.
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
    unset HPC_GPT_STAGED HPC_GPT_STAGE_SUM
    stage_environment die # the profile's stage: the environment is unpacked below $TMPDIR, and runs from there
    command -v -- "$HPC_GPT_PYTHON" >/dev/null || die "no $HPC_GPT_PYTHON on $HOSTNAME" "set HPC_GPT_PYTHON"
    use_submitted_code
    exec "$HPC_GPT_PYTHON" -m hpc_gpt.launch.local.by_hand "$HPC_GPT_RUN" # starts this script once for each rank
  fi
  attempt="$HPC_GPT_RUN/attempts/$HPC_GPT_ATTEMPT"
  stage_environment fail # the profile's stage, once for all ranks
  # The submitted code, whatever PYTHONPATH the profile sets.
  export PYTHONPATH="$HPC_GPT_RUN/code${PYTHONPATH:+:$PYTHONPATH}"
  # This process is one rank. With exec no shell is in between: signals reach python itself. USR2 is ignored until the
  # trainer handles it.
  # shellcheck disable=SC2153
  export RANK="$SUBMITIT_LOCAL_GLOBALID" WORLD_SIZE="$SUBMITIT_LOCAL_NTASKS" LOCAL_RANK="$SUBMITIT_LOCAL_LOCALID"
  export LOCAL_WORLD_SIZE="$SUBMITIT_LOCAL_NTASKS"
  trap "" USR2
  exec "$HPC_GPT_PYTHON" -m hpc_gpt.train
}

# === nothing below is for editing: the functions that main calls, then the settings ==================================
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
make_run_folder() { # its first start keeps this script and its settings in it; a folder of another script is refused
  { mkdir -p -- "$HPC_GPT_RUN/attempts" && HPC_GPT_RUN=$(cd -- "$HPC_GPT_RUN" && pwd); } ||
    die "cannot make the run folder $HPC_GPT_RUN" "set HPC_GPT_LOGS to a folder that $HOSTNAME can write"
  export HPC_GPT_RUN
  [ -e "$HPC_GPT_RUN/job.sh" ] || keep job.sh <"${BASH_SOURCE[0]}" || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
  cmp -s "${BASH_SOURCE[0]}" "$HPC_GPT_RUN/job.sh" ||
    die "HPC_GPT_RUN names the run of another script: $HPC_GPT_RUN" "unset HPC_GPT_RUN, or submit that run's own job.sh"
  [ -e "$HPC_GPT_RUN/resolved.json" ] || settings | keep resolved.json || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
}
say_ended() { # say_ended CLASS CAUSE: writes ended.json, unless the trainer has
  [ ! -e "$attempt/ended.json" ] || return 0
  local step cause="${2//[[:cntrl:]]/ }"
  cause="${cause//\\/\\\\}"
  step=$(tail -n 1 "$attempt/metrics.jsonl" 2>/dev/null | sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p')
  printf '{"ended": "%s", "cause": "%s", "step": %d, "time": %d, "requeue": false}\n' \
    "$1" "${cause//\"/\\\"}" "${step:-0}" "$(date +%s)" >"$attempt/.ended.json" &&
    mv -n -- "$attempt/.ended.json" "$attempt/ended.json"
}
fail() { # fail CAUSE HINT: ends the attempt before a rank has started
  say_ended user_error "$1"
  die "$1" "$2"
}
# --- the environment on each node ----------------------------------------------------------------------------------
seconds_of() { # seconds_of MS: prints them, with three digits
  printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000))
}
fault_of_stage() { # fault_of_stage CAUSE HINT: prints them, and keeps them for the others of this node
  printf 'stage-fault\t%s: %s\t%s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "${1//[[:cntrl:]]/ }" "$2" | tee -- "$folder/fault"
  exit 1
}
unpack_environment() { # unpack_environment FOLDER ARCHIVE: to FOLDER/environment
  local folder=$1 archive=$2 began other said sum at="$1/environment" shebang="^#!/.+/bin/python[0-9.]*$"
  began=$(date +%s%3N)
  for other in "${folder%/*}"/*; do # of an attempt that was killed
    [ "$other" = "$folder" ] || rm -rf -- "$other"
  done
  rm -rf -- "$folder/new" "$at"
  { [ -f "$archive" ] && [ -r "$archive" ] && sum=$(sha256sum <"$archive"); } ||
    fault_of_stage "cannot read $archive" "put it where every node can read it, or take stage out of the cluster profile"
  sum=${sum%% *}
  [ "$sum" = "${HPC_GPT_STAGE_SUM:-$sum}" ] ||
    fault_of_stage "$archive has SHA-256 ${sum:0:12}, but ${HPC_GPT_STAGE_SUM:0:12} on the batch host" \
      "do not change it while a job starts: give a new one a new name"
  if ! said=$(mkdir -- "$folder/new" 2>&1 && tar --force-local --no-same-owner -xf "$archive" -C "$folder/new" 2>&1); then
    rm -rf -- "$folder/new" # others need the space
    case "$said" in
    *'No space left'* | *'quota exceeded'*) fault_of_stage "no space for $archive below ${TMPDIR:-/tmp}" "set TMPDIR to a larger folder of the nodes" ;;
    *)
      # What tar only warns of comes first, and its last line sums up.
      said=$(printf '%s\n' "$said" | grep -vE 'Removing leading|Ignoring unknown|time ?stamp|Exiting with failure')
      fault_of_stage "cannot unpack $archive: ${said%%$'\n'*}" "is it a whole tar, and has each node the program that it is compressed with?"
      ;;
    esac
  fi
  other=("$folder/new"/*)
  [ -e "$folder/new/bin" ] || [ "${#other[@]}" != 1 ] || mv -- "${other[0]}" "$at"
  [ -e "$at" ] || mv -- "$folder/new" "$at"
  rm -rf -- "$folder/new"
  [ -e "$at/bin/python" ] || [ -L "$at/bin/python" ] ||
    fault_of_stage "$archive has no bin/python, neither at its top nor in its one folder" "tar -C ENVIRONMENT -cf NAME.tar ."
  # Of conda-pack, and after the last move: it writes this path into files.
  [ ! -e "$at/bin/conda-unpack" ] || said=$(PATH="$at/bin:$PATH" "$at/bin/conda-unpack" 2>&1) ||
    fault_of_stage "conda-unpack of $archive failed: ${said##*$'\n'}" "pack the environment again"
  said=$("$at/bin/python" -I -c "import sys; print('python', sys.version_info[0])" 2>&1) ||
    fault_of_stage "bin/python of $archive does not start: ${said%%$'\n'*}" \
      "a virtual environment needs its base Python on every node; conda-pack packs it, too"
  [ "${said##*$'\n'}" = "python 3" ] ||
    fault_of_stage "bin/python of $archive is no Python 3: it prints '${said:0:60}'" "pack an environment of Python"
  for other in "$at"/bin/*; do # scripts of a virtual environment, torchrun for one, name the original's Python
    [ -L "$other" ] || ! [ -f "$other" ] || ! IFS= read -r said <"$other" || ! [[ $said =~ $shebang ]] ||
      [[ $said = '#!/usr/bin/'* ]] || sed -i '1s|.*|#!/usr/bin/env python|' "$other"
  done 2>/dev/null
  echo "stage: $archive, SHA-256 $sum, is unpacked on ${SLURMD_NODENAME:-$HOSTNAME} in $(seconds_of $(($(date +%s%3N) - began))) s"
  echo "$sum" >"$folder/done"
}
stage_node() { # stage_node ARCHIVE: once a node. Who comes first unpacks it below $TMPDIR, the others wait
  local folder="${TMPDIR:-/tmp}/$HPC_GPT_STAGED"
  [[ $folder = *:* ]] || (umask 077 && mkdir -p -- "$folder") 2>/dev/null
  if [[ $folder = *:* ]] || [ -L "${folder%/*}" ] || ! [ -O "${folder%/*}" ] || ! [ -O "$folder" ]; then
    printf 'stage-fault\t%s: cannot use %s\t%s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$folder" \
      "set TMPDIR to a folder of the nodes that is yours to write, has space for the environment, and no colon for PATH"
    return 1
  fi
  (
    trap '' TERM INT USR2 # a preemption is no fault of the archive: the ranks hear of it next
    flock 9
    [ ! -e "$folder/fault" ] || { cat -- "$folder/fault" && exit 1; }
    [ -e "$folder/done" ] || unpack_environment "$folder" "$1"
  ) 9>"$folder/lock"
}
note_another() { # whether the environment is the submitted one, as far as that is known
  local submitted
  submitted=$(sed -n 's/^ "stage_sha256": "\([0-9a-f]*\)".*/\1/p' "$HPC_GPT_RUN/provenance.json" 2>/dev/null)
  [ "${submitted:-$HPC_GPT_STAGE_SUM}" = "$HPC_GPT_STAGE_SUM" ] ||
    printf 'note: %s is not what was submitted, of SHA-256 %s\n' /sw/environment.tar.zst "$submitted"
}
stage_environment() { # stage_environment die|fail: what to do with a fault
  local said began cause hint
  began=$(date +%s%3N)
  export HPC_GPT_STAGED="${HPC_GPT_STAGED:-hpc-gpt-$UID-by-hand-$$/0}"
  said=$(stage_node /sw/environment.tar.zst)
  IFS=$'\t' read -r _ cause hint < <(printf '%s\n' "$said" | grep -m 1 '^stage-fault')
  [ -z "$cause" ] || "$1" "$cause" "$hint"
  VIRTUAL_ENV="${TMPDIR:-/tmp}/$HPC_GPT_STAGED/environment"
  HPC_GPT_PYTHON="$VIRTUAL_ENV/bin/python" PATH="$VIRTUAL_ENV/bin:$PATH"
  HPC_GPT_STAGE_SUM=$(<"${TMPDIR:-/tmp}/$HPC_GPT_STAGED/done")
  export VIRTUAL_ENV PATH HPC_GPT_PYTHON HPC_GPT_STAGE_SUM
  unset PYTHONHOME
  [ "${SUBMITIT_LOCAL_GLOBALID:-}" != 0 ] || note_another
  HPC_GPT_STAGING="$(seconds_of $(($(date +%s%3N) - began))) $(date +%s.%N)"
  export HPC_GPT_STAGING
  [ -z "$said" ] || echo "$said"
}
# --- the submitted code --------------------------------------------------------------------------------------------
use_submitted_code() { # code.tar.gz, which the first attempt unpacks; without one the run takes the code as it is now
  local said code="$HPC_GPT_RUN/code"
  [[ $HPC_GPT_RUN != *:* ]] || die "PYTHONPATH cannot carry the colon of $HPC_GPT_RUN" "set HPC_GPT_LOGS to a path without a colon"
  if [ ! -e "$code.tar.gz" ]; then # plain bash
    "$HPC_GPT_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("hpc_gpt") is None)' ||
      die "$HPC_GPT_PYTHON on $HOSTNAME cannot import hpc_gpt" \
        "pip install hpc-gpt there, or name another: HPC_GPT_PYTHON, or venv in the cluster profile"
    "$HPC_GPT_PYTHON" -m hpc_gpt.runs.snapshot "$HPC_GPT_RUN" || die "cannot make $code.tar.gz" "is the disk full or read-only?"
  fi
  said=$(tar -xOzf "$code.tar.gz" hpc_gpt/runs/unpack.py | "$HPC_GPT_PYTHON" -I - "$HPC_GPT_RUN") ||
    die "${said:-cannot unpack $code.tar.gz}" 'submit the experiment again; hpc-gpt verify says what differs'
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
 "data": {
  "source": "stdlib",
  "path": null,
  "eval_fraction": 0.05,
  "tokenizer": "byte",
  "workers": 0,
  "on_bad_shard": "stop"
 },
 "engine": {
  "name": "deepspeed-3d",
  "zero_stage": 1,
  "recompute": "none",
  "attention": "auto",
  "compile": "none",
  "compile_backend": "inductor",
  "keep_residuals": false,
  "sequence_parallel": false,
  "partition": "layers",
  "offload": "none",
  "offload_path": null,
  "offload_ratio": 1.0,
  "tiles": 1,
  "activation_offload": false,
  "loss_chunks": 1,
  "one_pass_loss": false,
  "fused_bias_gradients": false,
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
  "save_last": true,
  "save_in_background": true,
  "keep_last": 0,
  "keep_every": 0,
  "max_failed_saves": 3,
  "max_bad_steps": 20,
  "until_loss": null,
  "matmul_rate": false,
  "hang_multiple": 20.0,
  "hang_floor_s": 300.0
 },
 "job": {
  "name": "demo",
  "time": null,
  "partition": null,
  "account": null,
  "qos": null,
  "constraint": null,
  "reservation": null,
  "nodelist": null,
  "exclude": null,
  "comment": null,
  "mem": null,
  "cpus_per_task": null,
  "dependency": null,
  "exclusive": false,
  "signal_lead_s": 30,
  "max_gpu_hours": null,
  "retry_pause_s": 30,
  "preflight": false,
  "spare_nodes": 0,
  "sbatch": [],
  "srun": []
 },
 "cluster": {
  "name": "local",
  "description": "this machine: one node of 8 slots, no scheduler; without a GPU every rank runs on CPU",
  "scheduler": "local",
  "device": null,
  "gpus_per_node": 8,
  "cpus_per_node": null,
  "gpu_flag": "none",
  "gpu_type": null,
  "partition": null,
  "account": null,
  "qos": null,
  "constraint": null,
  "reservation": null,
  "time": null,
  "mem": null,
  "exclusive": false,
  "chain": "none",
  "signal_lead_s": 30,
  "retry_pause_s": 30,
  "preflight": false,
  "spare_nodes": 0,
  "bad_node_hours": 24.0,
  "modules": [],
  "venv": null,
  "python": null,
  "stage": "/sw/environment.tar.zst",
  "megatron_lm": null,
  "container": null,
  "environment": {},
  "node_suffix": "",
  "sbatch": [],
  "srun": []
 },
 "sweep": null,
 "row": null,
 "version": "0.0.0",
 "schema": 1
}
HPC_GPT_RESOLVED

main
