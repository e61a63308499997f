#!/bin/bash
# demo: 4 layers of 128, 842,496 parameters, tp2-pp2-dp1 on 4 GPUs
# Rendered by hpc-gpt 0.0.0. It is complete: hand it to bash as it is.

# Texts of the experiment and the profile stand in single quotes, as they are.
# shellcheck disable=SC2016,SC1003
set -o pipefail

# --- environment ---------------------------------------------------------------------------------------------------
# What an enclosing job or a login shell has left would rank or bind our tasks wrongly.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT
unset "${!TORCHELASTIC_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
python=python3
export HPC_GPT_PYTHON="${HPC_GPT_PYTHON:-$python}"
export PYTHONUNBUFFERED=1
cores=$(($(nproc) / 4))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}"
# The checkout of Megatron-LM whose pretrain_gpt.py the ranks run.
export MEGATRON_LM="${MEGATRON_LM:-}"
[ -n "$MEGATRON_LM" ] || {
  printf 'Error: MEGATRON_LM is not set\n\nhint: %s\n' 'export MEGATRON_LM=/path/to/Megatron-LM, or megatron_lm = "/path/to/Megatron-LM" in the cluster profile' >&2
  exit 2
}

if [ -z "${SUBMITIT_LOCAL_GLOBALID:-}" ]; then
  # Started by hand: a run folder of its own, then one process of this script for each rank, and their end awaited.
  HPC_GPT_RUN="${HPC_GPT_RUN:-${HPC_GPT_LOGS:-$PWD/logs}/demo/$(date +%Y%m%d-%H%M%S)-$$}"
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
  "requeue": false,
  "signal_lead_s": 30,
  "modules": [],
  "venv": null,
  "python": null,
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
  command -v -- "$HPC_GPT_PYTHON" >/dev/null || die "no $HPC_GPT_PYTHON on $HOSTNAME" "set HPC_GPT_PYTHON"
  "$HPC_GPT_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("hpc_gpt") is None)' ||
    die "$HPC_GPT_PYTHON cannot import hpc_gpt" "activate the environment hpc-gpt is in, or set HPC_GPT_PYTHON"
  exec "$HPC_GPT_PYTHON" -m hpc_gpt.local.by_hand "$HPC_GPT_RUN"
fi

# --- launch: this process is one rank -------------------------------------------------------------------------------
# exec leaves no shell in between: a signal reaches python itself, and USR2 is ignored until the trainer listens.
# shellcheck disable=SC2153
export RANK="$SUBMITIT_LOCAL_GLOBALID" WORLD_SIZE="$SUBMITIT_LOCAL_NTASKS" LOCAL_RANK="$SUBMITIT_LOCAL_LOCALID"
export LOCAL_WORLD_SIZE="$SUBMITIT_LOCAL_NTASKS"
trap "" USR2
exec "$HPC_GPT_PYTHON" -m hpc_gpt.train
