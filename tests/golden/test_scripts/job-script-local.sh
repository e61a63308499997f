#!/bin/bash
# mine: 0 GPUs
# Rendered by hpc-gpt 0.0.0. It is complete: hand it to bash as it is.

# What happens: `main`. Started by hand, this script makes a run folder and starts itself; started so, it runs the script
#   at its end, in the folder and with the environment of the shell that submitted it.
# shellcheck disable=SC2016,SC1003
set -o pipefail
exec 3<&0 </dev/null
[ -n "${HPC_GPT_GIVEN:-}" ] || HPC_GPT_GIVEN=$(gzip <"/proc/$$/environ" | base64 -w 0) # the script's environment
export HPC_GPT_GIVEN
export HPC_GPT_PYTHON="${HPC_GPT_PYTHON:-python3}" PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1

main() {
  if [ -z "${SUBMITIT_LOCAL_GLOBALID:-}" ]; then
    HPC_GPT_RUN="${HPC_GPT_RUN:-${HPC_GPT_LOGS:-$PWD/logs}/mine/$(date +%Y%m%d-%H%M%S)-$$}"
    make_run_folder
    command -v -- "$HPC_GPT_PYTHON" >/dev/null || die "no $HPC_GPT_PYTHON on $HOSTNAME" "set HPC_GPT_PYTHON"
    use_submitted_code
    exec "$HPC_GPT_PYTHON" -m hpc_gpt.launch.local.by_hand "$HPC_GPT_RUN" # starts this script once for each rank
  fi
  # The submitted code, whatever PYTHONPATH the profile sets.
  export PYTHONPATH="$HPC_GPT_RUN/code${PYTHONPATH:+:$PYTHONPATH}"
  n="$HPC_GPT_ATTEMPT" attempt="$HPC_GPT_RUN/attempts/$HPC_GPT_ATTEMPT"
  run_script
  "$HPC_GPT_PYTHON" -m hpc_gpt.chain.script_end "$HPC_GPT_RUN" "$n" "$rc"
  part_logs
  exit "$rc"
}

# === nothing below is for editing: the functions that main calls, then the settings, then the script ==================
within() { # within SECONDS COMMAND: a signal does not end it, the time limit does
  (trap '' TERM INT && exec timeout -s KILL "$1" bash -c 'trap "" TERM INT; exec "$@"' within "${@:2}")
}
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
# --- the script ----------------------------------------------------------------------------------------------------
signals="1 2 3 4 5 6 7 8 10 11 12 13 14 15 16 20 21 22 23 24 25 26 27 28 29 30 31 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64"
hear() { # hear NAME: notes each signal that this shell gets
  local each
  # shellcheck disable=SC2064
  for each in $signals; do trap "echo $each >>.signals/$1" "$each"; done
}
heard() { # heard NAME NUMBER: prints how often
  grep -cx -- "$2" "$attempt/.signals/$1" 2>/dev/null
}
the_script() { # becomes the script, with this shell's environment as it was given
  exec "$HPC_GPT_PYTHON" -ISs "$HPC_GPT_RUN/code/hpc_gpt/program/start.py" "$$" "$HPC_GPT_RUN" "$n" - \
    "$HPC_GPT_RUN/slurm_script" 'it'"'"'s' <&3 3<&- 2>>"$attempt/err"
}
hear_of_group() { # as long as the script runs, in the job's first process group
  cd -- "$attempt" || exit
  hear group
  while [ -d .signals ]; do
    sleep 1 &
    wait "$!"
  done
}
follow_script() { # the watch, again if something ends it: pkill python is for the script's processes
  local again watch
  local folder="$PWD" # in which the patterns of --output are read
  cd -- "$attempt" || exit
  hear all
  until [ -e body ] || [ -e .code ]; do sleep 0.05; done
  for again in {1..1000}; do
    (
      # shellcheck disable=SC2086
      trap '' $signals
      exec "$HPC_GPT_PYTHON" -m hpc_gpt.train.script_watch "$HPC_GPT_RUN" "$n" "$folder"
    ) &
    watch=$!
    while kill -0 "$watch" 2>/dev/null; do wait "$watch"; done 2>/dev/null
    if [ -e .followed ] || { [ -e .code ] && [ "$again" -gt 1 ]; }; then break; fi
    sleep 0.5
  done
}
run_script() { # sets $rc to the script's exit code
  local each keeper began ended file="$HPC_GPT_RUN/slurm_script"
  mkdir -p -- "$attempt/.signals" "$HPC_GPT_RUN/checkpoints"
  [ -e "$file" ] ||
    (umask 077 && tail -c 52 -- "$HPC_GPT_RUN/job.sh" >"$file.$n" && chmod 700 "$file.$n" && mv -f -- "$file.$n" "$file")
  # shellcheck disable=SC2064
  for each in $signals; do trap "pass_on $each" "$each"; done
  hear_of_group &
  read -r began _ </proc/uptime
  set -m # a background job then has a process group of its own and its input, and ignores no signal: as sbatch has it
  the_script &
  waits=$!
  follow_script &
  keeper=$!
  set +m
  exec 3<&-
  echo "$waits" >"$attempt/.body" && mv -f -- "$attempt/.body" "$attempt/body"
  # Not by `wait`: of two signals within one, as of a handler that requeues its job, bash can wait for ever.
  while kill -0 "$waits" 2>/dev/null; do sleep 0.5; done
  wait "$waits" 2>/dev/null # its exit code; bash's words on a killed job are none of the script's
  rc=$?
  echo "$rc" >"$attempt/.code" # the watch ends
  read -r ended _ </proc/uptime
  printf '{"code": %d, "seconds": %d}\n' "$rc" $((${ended%.*} - ${began%.*})) >"$attempt/exit.json"
  each=10
  [ -e "$attempt/trainer.json" ] || each=60 # a short script: its watch has not begun
  within "$each" tail --pid="$keeper" -f /dev/null
  {
    kill -KILL -- "-$keeper"
    wait "$keeper"
  } 2>/dev/null # bash's words on it, too
  rm -rf -- "$attempt/.signals" "$attempt/.followed" "$attempt/.code" "$attempt/body"
  rmdir -- "$attempt/flight" 2>/dev/null
  [ "$rc" != 0 ] || part_logs # before its end is known; else a requeue may be urgent
}
part_logs() { # the files of --output and --error are the user's alone from here on: gzip takes none with a second name
  find "$attempt/log" "$attempt/err" -links 2 -size -64M -exec cp -p {} {}.own \; -exec mv -f {}.own {} \; 2>/dev/null
  rm -f -- "$attempt/log.own" "$attempt/err.own" # of a full disk
  exec >>"$attempt/log" 2>&1
}
# shellcheck disable=SC2317,SC2329
pass_on() { # pass_on NUMBER: the controller's signals: USR2 before the time limit, INT for Ctrl-C, TERM for a cancel
  local body
  read -r body 2>/dev/null <"$attempt/body" || return 0
  case "$1" in
  12) : >"$attempt/.limit" ;;
  2) : >"$attempt/.interrupt" ;;
  *) kill -s "$1" -- "-$body" 2>/dev/null ;;
  esac
}
# --- settings: resolved.json of the run ----------------------------------------------------------------------------
settings() { cat; } <<'HPC_GPT_RESOLVED'
{
 "name": "mine",
 "preset": null,
 "model": null,
 "data": {
  "source": "random",
  "path": null,
  "eval_fraction": 0.05,
  "tokenizer": "byte",
  "workers": 0,
  "on_bad_shard": "stop"
 },
 "engine": {
  "name": "command",
  "zero_stage": 0,
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
  "tp": 1,
  "pp": 1,
  "dp": 1
 },
 "batch": null,
 "gpus": 1,
 "nodes": 1,
 "ranks_per_node": 1,
 "train": {
  "steps": 1000,
  "minutes": null,
  "dtype": "bf16",
  "seed": 1,
  "deterministic": false,
  "tf32": false,
  "optimizer": "adamw",
  "optimizer_mode": "fused",
  "lr": 0.0003,
  "min_lr": 0.0,
  "warmup_steps": 0,
  "decay": "cosine",
  "weight_decay": 0.1,
  "beta1": 0.9,
  "beta2": 0.95,
  "eps": 1e-08,
  "clip": 1.0,
  "log_every": 10,
  "eval_every": 0,
  "eval_batches": 4,
  "save_every": 0,
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
  "name": "mine",
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
  "signal_lead_s": null,
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
  "megatron_lm": null,
  "container": null,
  "environment": {},
  "node_suffix": "",
  "sbatch": [],
  "srun": []
 },
 "sweep": null,
 "row": null,
 "command": {
  "run": "",
  "per": "gpu",
  "workdir": "/home/me",
  "setup": [],
  "resume": null,
  "checkpoints": "out/step-*",
  "complete": null,
  "stop_signal": "TERM",
  "pattern": null,
  "hang_s": null,
  "snapshot": false,
  "script": "/home/me/train.slurm",
  "args": [
   "it's"
  ]
 },
 "notify": {
  "command": "mail -s GPT me"
 },
 "track": {
  "wandb": "gpt"
 },
 "script": {
  "body": "0000000000000000000000000000000000000000000000000000000000000000",
  "tasks": 1,
  "signal": null,
  "output": null,
  "error": "err.txt",
  "open_mode": null
 },
 "version": "0.0.0",
 "schema": 1
}
HPC_GPT_RESOLVED

main
exit
# === the script: the last 52 bytes ====================================================================
#!/bin/bash
#SBATCH -N 1
srun python3 train.py "$@"
