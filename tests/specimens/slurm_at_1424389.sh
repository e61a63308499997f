#!/bin/bash
# tiny: 4 layers of 32, 60,096 parameters, tp1-pp1-dp1 on 1 GPUs
# Rendered by hpc-gpt 0.1.0. It is complete: hand it to sbatch as it is.
#SBATCH --job-name=tiny
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@5
#SBATCH --output=%x-%j.out

# Texts of the experiment and the profile are in single quotes, unchanged.
# shellcheck disable=SC2016,SC1003
set -o pipefail

# --- environment ---------------------------------------------------------------------------------------------------
# Variables of an enclosing job or a login shell would give our tasks wrong ranks or bindings.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT
unset "${!TORCHELASTIC_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
export HPC_GPT_MASTER_ADDR=127.0.0.1
export GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=1
python=python3
export HPC_GPT_PYTHON="${HPC_GPT_PYTHON:-$python}"
# Python imports from PYTHONPATH, never from the job's current folder. It writes no caches: a cached file would run
# instead of the submitted one.
export PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

[ -n "${SLURM_JOB_ID:-}" ] || {
  printf 'Error: this script runs inside a Slurm job\n\nhint: sbatch %q\n' "$0" >&2
  exit 2
}
# An element of an array is named by the array's id and its number: its own id may be that of the whole array.
job="${HPC_GPT_ELEMENT:-$SLURM_JOB_ID}"
unset HPC_GPT_ELEMENT
export HPC_GPT_JOB="$job"
HPC_GPT_RUN="${HPC_GPT_RUN:-${HPC_GPT_LOGS:-${SLURM_SUBMIT_DIR:-$PWD}/logs}/tiny/$SLURM_JOB_ID}"
# --- the run folder ------------------------------------------------------------------------------------------------
die() { # die MESSAGE HINT
  printf 'Error: %s\n\nhint: %s\n' "$1" "$2" >&2
  exit 1
}
keep() { # keep NAME: writes stdin to the file NAME of the run folder, unless it exists
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
 "name": "tiny",
 "preset": null,
 "model": {
  "hidden": 32,
  "layers": 4,
  "heads": 4,
  "vocab": 256,
  "seq": 32,
  "tied": true,
  "vocab_multiple": 64
 },
 "data": {
  "source": "tokens",
  "path": "/tokens/are/here",
  "eval_fraction": 0.05,
  "tokenizer": "byte",
  "workers": 0,
  "on_bad_shard": "stop"
 },
 "engine": {
  "name": "ddp",
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
 "batch": {
  "micro_batch": 2,
  "micro_batches": 4,
  "global_batch": 8
 },
 "gpus": 1,
 "nodes": 1,
 "ranks_per_node": 1,
 "train": {
  "steps": 24,
  "minutes": null,
  "dtype": "fp32",
  "seed": 1,
  "deterministic": false,
  "tf32": false,
  "optimizer": "adamw",
  "optimizer_mode": "fused",
  "lr": 0.001,
  "min_lr": 0.0,
  "warmup_steps": 4,
  "decay": "cosine",
  "weight_decay": 0.1,
  "beta1": 0.9,
  "beta2": 0.95,
  "eps": 1e-08,
  "clip": 1.0,
  "log_every": 1,
  "eval_every": 0,
  "eval_batches": 4,
  "save_every": 10,
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
  "name": "tiny",
  "time": "00:10:00",
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
  "exclusive": true,
  "signal_lead_s": 5,
  "max_gpu_hours": null,
  "retry_pause_s": 30,
  "preflight": false,
  "spare_nodes": 0,
  "sbatch": [],
  "srun": []
 },
 "cluster": {
  "name": "site",
  "description": "",
  "scheduler": "slurm",
  "device": null,
  "gpus_per_node": 2,
  "cpus_per_node": 4,
  "gpu_flag": "gres",
  "gpu_type": null,
  "partition": null,
  "account": null,
  "qos": null,
  "constraint": null,
  "reservation": null,
  "time": "00:10:00",
  "mem": null,
  "exclusive": true,
  "chain": "requeue",
  "signal_lead_s": 5,
  "retry_pause_s": 30,
  "preflight": false,
  "spare_nodes": 0,
  "bad_node_hours": 24.0,
  "modules": [],
  "venv": null,
  "python": null,
  "megatron_lm": null,
  "container": null,
  "environment": {
   "HPC_GPT_MASTER_ADDR": "127.0.0.1",
   "GLOO_SOCKET_IFNAME": "lo",
   "OMP_NUM_THREADS": "1"
  },
  "node_suffix": "",
  "sbatch": [],
  "srun": []
 },
 "sweep": null,
 "row": null,
 "version": "0.1.0",
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
printf '{"attempt": %d, "job_id": "%s", "restart": %d, "node_list": "%s", "gpus": %d, "started": %d}\n' \
  "$n" "$job" "${SLURM_RESTART_COUNT:-0}" "$SLURM_JOB_NODELIST" $((SLURM_JOB_NUM_NODES * 1)) \
  "$(date +%s)" >"$attempt/attempt.json"
echo "run folder $HPC_GPT_RUN, attempt $n, output in attempts/$n/log"
exec >>"$attempt/log" 2>&1
# This shell ignores signals that are for the ranks: the epilogue must run.
trap : TERM INT USR2

say_ended() { # say_ended FOLDER CLASS CAUSE: writes ended.json, unless the trainer has
  [ ! -e "$1/ended.json" ] || return 0
  local step cause="${3//[[:cntrl:]]/ }"
  cause="${cause//\\/\\\\}"
  step=$(tail -n 1 "$1/metrics.jsonl" 2>/dev/null | sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p')
  printf '{"ended": "%s", "cause": "%s", "step": %d, "time": %d, "requeue": false}\n' \
    "$2" "${cause//\"/\\\"}" "${step:-0}" "$(date +%s)" >"$1/.ended.json" && mv -n -- "$1/.ended.json" "$1/ended.json"
}
# --- preflight -----------------------------------------------------------------------------------------------------
fail() { # fail CAUSE HINT: ends the attempt before a rank has started
  say_ended "$attempt" user_error "$1"
  die "$1" "$2"
}
command -v -- "$HPC_GPT_PYTHON" >/dev/null ||
  fail "no $HPC_GPT_PYTHON on $HOSTNAME" "name one: HPC_GPT_PYTHON, or modules, venv or python in the cluster profile"

# --- code ----------------------------------------------------------------------------------------------------------
# The job runs the submitted code: code.tar.gz in the run folder, which the first attempt unpacks. An edit after the
# submission changes nothing.
code="$HPC_GPT_RUN/code"
case "$HPC_GPT_RUN" in
*:*) fail "PYTHONPATH cannot carry the colon of $HPC_GPT_RUN" "set HPC_GPT_LOGS to a path without a colon" ;;
esac
if [ ! -e "$code.tar.gz" ]; then # plain sbatch: the run takes the code as it is here now
  "$HPC_GPT_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("hpc_gpt") is None)' ||
    fail "$HPC_GPT_PYTHON on $HOSTNAME cannot import hpc_gpt" \
      "pip install hpc-gpt there, or name another: HPC_GPT_PYTHON, or venv in the cluster profile"
  "$HPC_GPT_PYTHON" -m hpc_gpt.runs.snapshot "$HPC_GPT_RUN" || fail "cannot make $code.tar.gz" 'submit the experiment again; hpc-gpt verify says what differs'
fi
code_is_submitted() { # the archive is that of provenance.json, if that names one
  local sum
  sum=$(gzip -dc <"$code.tar.gz" | sha256sum) || return
  ! grep -qs '"code_sha256"' "$HPC_GPT_RUN/provenance.json" ||
    grep -qs "\"code_sha256\": \"${sum%% *}\"" "$HPC_GPT_RUN/provenance.json"
}
code_is_whole() { # code/ has the files of the archive and no others
  local sums count
  sums=$(tar -xOzf "$code.tar.gz" SHA256SUMS) &&
    (cd -- "$code" && sha256sum --status -c - <<<"$sums") 2>/dev/null &&
    count=$(find "$code" ! -type d ! -name '.nfs*' | wc -l) &&
    [ "$count" -eq $(($(wc -l <<<"$sums") + 1)) ]
}
unpack_code() { # completely or not at all, never over another: two starts may run at once
  local aside="$HPC_GPT_RUN/.code.$HOSTNAME.$$" rc=1
  if mkdir -- "$aside" && tar -xzmf "$code.tar.gz" --no-same-owner --no-same-permissions -C "$aside"; then
    mv -nT -- "$aside" "$code" 2>/dev/null
    code_is_whole || { mv -T -- "$code" "$code.changed-$(date +%s)" && mv -nT -- "$aside" "$code"; }
    code_is_whole && rc=0
  fi
  rm -rf -- "$aside"
  return "$rc"
}
if [ -e "$code.tar.gz" ]; then
  code_is_submitted || fail "$code.tar.gz is not what was submitted" 'submit the experiment again; hpc-gpt verify says what differs'
  code_is_whole || unpack_code || fail "cannot unpack $code" "is the disk full or read-only?"
  export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"
fi

# --- before --------------------------------------------------------------------------------------------------------
# Python decides, before the ranks start and after they have ended. Only this script gives commands to Slurm.
chain=("$HPC_GPT_PYTHON" -m)
firmly() { # firmly SECONDS COMMAND: the job's signals do not end it, the time limit does
  (trap '' TERM INT && exec timeout -s KILL "$@")
}
ask_chain() { # ask_chain before|after ARGUMENTS: sets $answer to python's line, empty without one
  local try
  for try in 1 2; do # after a signal within $(…) bash can lose its output
    answer=$(firmly "${patience_s:-120}" "${chain[@]}" "hpc_gpt.chain.$1" "${@:2}" | sed -n 's/^hpc-gpt-next //p')
    [ -z "$answer" ] || return 0
    echo "hpc_gpt.chain.$1 gave no answer, try $try"
  done
  return 1
}
ask_slurm() { # sets $shown to what Slurm says of the job; asks again while the controller restarts
  local try
  for ((try = 0; try < 20; try++)); do
    shown=$(firmly 20 scontrol --oneliner show job "$job" 2>/dev/null)
    [[ $shown != *JobState=* ]] || return 0
    sleep 3
  done
  shown=
}
shown_as() { # shown_as KEY: prints its value in $shown
  local pattern="(^| )$1=([^ ]*)"
  if [[ $shown =~ $pattern ]]; then printf %s "${BASH_REMATCH[2]}"; fi
}
words_of_slurm() { # prints what Slurm says of the jobs of earlier attempts that are not judged
  local each id words try ids=()
  for each in "$HPC_GPT_RUN"/attempts/*/; do
    if [ "$each" = "$attempt/" ] || [ -e "$each/next.json" ]; then continue; fi
    id=$(sed -n 's/.*"job_id": "\([0-9_]*\)".*/\1/p' "$each/attempt.json" 2>/dev/null)
    [ -z "$id" ] || ids+=("$id")
  done
  [ -n "${ids[*]}" ] || return 0
  for ((try = 0; try < 20; try++)); do
    words=$(firmly 20 squeue --noheader --array --states=all "--user=$UID" -o 'squeue %i %T' 2>/dev/null) && break
    sleep 3
  done
  printf '%s\n' "$words"
  firmly 20 sacct -D -X -n -P -o JobID,State -j "$(IFS=, && echo "${ids[*]}")" 2>/dev/null | sed 's/^/sacct /; s/|/ /'
}
cancel_waiting() { # cancel_waiting JOBS: the waiting jobs of the chain have nothing left to do
  return 0
}
for ((try = 0; try < 40; try++)); do
  ask_chain before "$HPC_GPT_RUN" "$n" < <(words_of_slurm)
  [ "$answer" = wait ] || break
  sleep 3
done
case "$answer" in
'go '[0-9]*) export HPC_GPT_STOP_AT="${answer#go }" ;;
'stop '*)
  read -r _ rc jobs <<<"$answer"
  cancel_waiting "$jobs"
  exit "$rc"
  ;;
wait)
  say_ended "$attempt" refused 'another job of the run is active and does not end'
  die 'another job of the run is active and does not end' "hpc-gpt status $(printf %q "$HPC_GPT_RUN")"
  ;;
esac

# --- launch --------------------------------------------------------------------------------------------------------
# Rank 0 is on the first node of the list. An empty list is an error: with localhost every node would form its own world.
MASTER_ADDR="${HPC_GPT_MASTER_ADDR:-}"
if [ -z "$MASTER_ADDR" ]; then
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  [ -n "${hosts[0]:-}" ] || fail "scontrol names no host of '$SLURM_JOB_NODELIST'" "set HPC_GPT_MASTER_ADDR by hand"
  MASTER_ADDR="${hosts[0]}"
  if type getent >/dev/null 2>&1 && ! getent ahosts "$MASTER_ADDR" >/dev/null; then
    fail "the host $MASTER_ADDR has no address" "set node_suffix in the cluster profile, or HPC_GPT_MASTER_ADDR by hand"
  fi
fi
# The port depends on the job id, so that two jobs on a node differ; it is below the system's ephemeral ports, and
# nobody listens on it (0A in /proc/net/tcp).
read -r low _ 2>/dev/null </proc/sys/net/ipv4/ip_local_port_range
[ "${low:-0}" -gt 12000 ] || low=32768
for ((try = 0; try < 100; try++)); do
  MASTER_PORT=$((10000 + (SLURM_JOB_ID + 7919 * try) % (low - 10000)))
  printf -v hex ':%04X ' "$MASTER_PORT"
  grep -qsE "^ *[0-9]+: [0-9A-F]+${hex}[0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6 || break
done
export MASTER_ADDR MASTER_PORT
# Since Slurm 22.05 srun does not take the job's CPUs per task by itself.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# A hang becomes an error, and the flight recorder writes every rank's last collectives.
mkdir -p -- "$attempt/flight"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE="$attempt/flight/rank-"

command=("$HPC_GPT_PYTHON" -m hpc_gpt.train)
echo "1 ranks on $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), rendezvous $MASTER_ADDR:$MASTER_PORT"
# KillWait seconds after the time limit's SIGTERM Slurm kills this script, too. Ranks that hang, or still save, have that
# time except its last part, which the epilogue needs to continue the run: this script then waits no longer.
kill_wait=$(firmly 20 scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
last_s=$((${kill_wait:-30} / 3))
[ "$last_s" -ge 3 ] || last_s=3
# shellcheck disable=SC2317,SC2329
be_in_time() {
  trap '' TERM # a later TERM must not end what starts now
  (
    for ((left = ${kill_wait:-30} - last_s; left > 0; left--)); do
      sleep 1
      kill -0 "$waits" 2>/dev/null || exit
    done
    ask_slurm
    [ "$(shown_as Reason)" = TimeLimit ] || exit
    echo "the ranks do not end at the time limit, and Slurm kills all in $last_s s: the run continues without them"
    kill -KILL "$waits"
  ) &
  trap be_in_time TERM
}
# exec leaves no shell between slurmstepd and the trainer: a signal reaches python itself. USR2 and TERM are ignored
# until the trainer listens: a preemption that comes while ranks start would end the job as failed, not requeue it.
{
trap : TERM INT USR2
srun --export=ALL --kill-on-bad-exit=1 --ntasks=1 --ntasks-per-node=1 \
  bash -c 'trap "" USR2 TERM
export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE=1
exec "$@"' rank "${command[@]}"
rc=$?
echo "$rc" >"$attempt/.code"
exit "$rc"
} &
waits=$!
trap be_in_time TERM
# A signal interrupts the wait, and bash may then have lost the exit code: the file has it.
rc=1
while kill -0 "$waits" 2>/dev/null; do
  wait "$waits" 2>/dev/null
  rc=$?
done
trap : TERM
if read -r code 2>/dev/null <"$attempt/.code"; then rc=$code; fi
rm -f -- "$attempt/.code"

# --- epilogue ------------------------------------------------------------------------------------------------------
rmdir -- "$attempt/flight" 2>/dev/null
# When one rank fails srun ends the others and returns their 143: the code of the first is in srun's message.
cause=$(grep -m 1 -oE 'tasks? [0-9,-]+: (Exited with exit code [0-9]+|Killed|Aborted|Segmentation fault|Bus error).*' "$attempt/log")
case "$cause" in
*'exit code '*) rc=${cause##*exit code } rc=${rc%%[!0-9]*} ;;
esac
cause="${cause:-exit code $rc}"
ask_slurm
state=$(shown_as JobState)
# Slurm has already requeued the job: by hand, after a preemption that did not wait, or after a node died.
restarts=$(shown_as Restarts)
put_back=
[ "${restarts:-0}" -le "${SLURM_RESTART_COUNT:-0}" ] || put_back=put-back
if [ -e "$HPC_GPT_RUN/cancelled.$job" ]; then
  ended=cancelled words="hpc-gpt cancel, $cause"
elif grep -qs 'Node failure on' "$attempt/log"; then
  ended=node_failure words="a node of the job died, $cause"
elif [ -z "$state" ] || [ "$state" = RUNNING ] || [ "$state" = SIGNALING ]; then
  ended=error words="$cause"
elif grep -qs 'CANCELLED AT .* DUE TO PREEMPTION' "$attempt/log"; then
  ended=preempted words="preempted before it had ended, $cause"
elif [ -n "$put_back" ]; then
  ended=requeued words="put back to the queue by Slurm or by hand"
elif [ "$(shown_as Reason)" = TimeLimit ]; then
  ended=walltime words="the time limit ended it, $cause"
else
  ended=cancelled words="$state, $cause"
fi
excluded=$(shown_as ExcNodeList)
case "$excluded" in
'' | '(null)') excluded=- ;;
*) excluded=$(firmly 20 scontrol show hostnames "$excluded" | tr '\n' ,) ;;
esac
# KillWait is running. If python does not judge in time, the next start does.
[ "$ended" != walltime ] || patience_s=$((${last_s:-10} / 3))
ask_chain after "$HPC_GPT_RUN" "$n" "$ended" "$words" "${excluded:--}" $put_back
say_ended "$attempt" "$ended" "$words"
read -r what pause nodes jobs <<<"$answer"
if [ -z "$answer" ]; then # without python the trainer's own request counts
  what=stop pause=0 nodes=- jobs=-
  [ ! -e "$attempt/requeue" ] || [ -e "$HPC_GPT_RUN/cancelled.$job" ] || what=again
  [ "$ended" != walltime ] || [ -e "$HPC_GPT_RUN/cancelled.$job" ] || what=again
fi
cleanly() { # cleanly SECONDS COMMAND: without the variables that a submitted job would inherit from this one
  (
    for name in "${!SLURM_@}" "${!SBATCH_@}" "${!SRUN_@}"; do
      case "$name" in SLURM_CONF | SLURM_CONF_SERVER | SLURM_JWT) ;; *) unset "$name" ;; esac
    done
    unset HPC_GPT_ATTEMPT HPC_GPT_JOB HPC_GPT_STOP_AT RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
    firmly "$@"
  )
}
change() { # change JOB KEY=VALUE of a job that waits, or is about to
  local try
  for ((try = 0; try < 10; try++)); do
    firmly 20 scontrol update "jobid=$1" "$2" && return
    sleep 1
  done
  echo "warning: Slurm does not take $2 for job $1"
}
requeue_job() { # asks again while the controller restarts, unless it got the request and only its answer was lost
  local try words
  for ((try = 0; try < 20; try++)); do
    words=$(firmly 60 scontrol requeue "$job" 2>&1) && return
    echo "$words"
    case "$words" in
    *'pending execution'*) return ;;
    *[Uu]'nable to contact'* | *'timed out'* | *'onnection'* | '') sleep 3 ;;
    *) return 1 ;;
    esac
    # A second requeue would end the next attempt at its start.
    shown=$(firmly 20 scontrol --oneliner show job "$job" 2>/dev/null)
    restarts=$(shown_as Restarts)
    [ "${restarts:-0}" -le "${SLURM_RESTART_COUNT:-0}" ] || return 0
  done
  return 1
}
resume="hpc-gpt submit --resume $(printf %q "$HPC_GPT_RUN")"
if [ "$what" = again ]; then
  # Slurm accepts a list that leaves too few nodes, and then the job waits for ever.
  if [[ $nodes = =?* ]] && ! cleanly 20 sbatch --quiet --test-only "--exclude=${nodes#=}" "$HPC_GPT_RUN/job.sh" 2>/dev/null &&
    cleanly 20 sbatch --quiet --test-only "$HPC_GPT_RUN/job.sh" 2>/dev/null; then
    echo "warning: without ${nodes#=} Slurm has too few nodes for the job, so it may get them again"
    nodes=-
  fi
  # Ask again: a requeue after scancel would revive a cancelled job.
  [ -n "$put_back" ] || ask_slurm
  state=$(shown_as JobState)
  next=
  if [ -n "$put_back" ]; then
    next="$job"
  elif [ -z "$state" ]; then
    die "Slurm does not answer, so job $job is not continued" "$resume"
  elif [ "$state" != RUNNING ] && [ "$state" != SIGNALING ] && [ "$(shown_as Reason)" != TimeLimit ]; then
    echo "job $job is $state, so the run does not continue by itself"
  else
    echo "back to the queue: scontrol requeue $job"
    requeue_job || die "Slurm will not requeue job $job" "$resume"
    next="$job"
  fi
  # A requeued job has only KillWait from here on.
  if [ -n "$next" ]; then
    [ "$pause" = 0 ] || change "$next" "StartTime=now+$pause"
    [ "$nodes" = - ] || change "$next" "ExcNodeList$nodes"
  fi
else
  cancel_waiting "$jobs"
fi
exit "$rc"
