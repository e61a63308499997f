#!/bin/bash
# demo: 4 layers of 128, 842,496 parameters, tp2-pp2-dp1 on 4 GPUs
# Rendered by hpc-gpt 0.0.0. It is complete: give it to sbatch as it is.
#SBATCH --job-name=demo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --output=%x-%j.out

# To edit: the directives above; modules and variables below. The settings at the end belong to the training: to change
#   one, render again.
# The flow is in `main`. Every start of the job is an attempt of one run. Before its ranks start and after they have ended
#   Python (hpc_gpt.launcher.attempts, from the code in the run folder) decides what to do next; only this script commands Slurm.
#   120 s before the time limit Slurm sends USR2: the ranks save and end, and the job continues from the queue.

# Texts of the experiment and the profile are in single quotes, unchanged.
# shellcheck disable=SC2016,SC1003,SC2089,SC2090,SC2317,SC2329
set -o pipefail

# --- environment ---------------------------------------------------------------------------------------------------
# Variables of an enclosing job or a login shell would give our tasks wrong ranks or bindings.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT
unset "${!TORCHELASTIC_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
[ -n "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
[ -n "${HPC_GPT_PYTHON:-}" ] || export HPC_GPT_PYTHON=python3
# Python imports from PYTHONPATH, never from the current folder. Byte code in a cache would run instead of the submitted.
export PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # not by itself since Slurm 22.05
# NCCL turns a hang into an error, and the flight recorder writes every rank's last collectives.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_BUFFER_SIZE=2000

main() {
  make_run_folder    # $HPC_GPT_RUN, or with plain sbatch logs/demo/<job id>: it stores this script and its settings
  start_attempt      # its attempts/<n>: from here on all output is in attempts/<n>/log
  python=("$HPC_GPT_PYTHON")
  use_submitted_code # its code.zip: edits after the submission have no effect
  ask_to_start       # hpc_gpt.launcher.attempts.may_start: the script ends here if the run is done, or another job trains it

  while :; do # again for each restart in the job
  # Rendezvous: rank 0 is on the first node. The port follows from the job id, so that two jobs on a node differ.
  MASTER_ADDR="${HPC_GPT_MASTER_ADDR:-$(first_host "$SLURM_JOB_NODELIST")}" || exit
  export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}"
  echo "4 ranks on $SLURM_JOB_NODELIST, rendezvous $MASTER_ADDR:$MASTER_PORT"

  # exec leaves no shell between slurmstepd and the trainer, so signals reach python itself. USR2 and TERM are ignored
  # until the trainer handles them: a preemption while ranks start would end the job as failed, not requeue it.
  run_ranks srun --export=ALL --kill-on-bad-exit=1 "${overlap[@]:0:in_job}" --ntasks=4 --ntasks-per-node=4 \
    bash -c 'trap "" USR2 TERM
      export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE=4
      [ "$in_job" = 0 ] || "${@:1:$#-1}" hpc_gpt.trainer.preflight.left_over || exit # ends what is left on the node
      exec "$@"' rank "${python[@]}" -m hpc_gpt.trainer
  continue_or_end # hpc_gpt.launcher.attempts.what_next: classifies the end, and says whether another attempt follows
  restarts_here || exit "$rc"
  start_attempt
  ask_to_start
  done
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
use_allocation() { # one of the user's own, as this is not its batch script: nothing asks Slurm to requeue, cancel, update or queue a job
  export HPC_GPT_ALLOCATION=$$ SLURM_NNODES=1 SLURM_JOB_NUM_NODES=1 # it may have more nodes
  at_interrupt='mkdir -p -- "$attempt/asked" && : >"$attempt/asked/stop-1.json" >"$HPC_GPT_RUN/stop.$HPC_GPT_JOB"' # as hpc-gpt stop
  at_exit='printf "attempt %s has ended with exit code %d; unless the run is done, HPC_GPT_RUN=%q bash %q continues it in an allocation, hpc-gpt submit --resume %q in a job of its own\n" "${n:-0}" "$?" "$HPC_GPT_RUN" "$HPC_GPT_RUN/job.sh" "$HPC_GPT_RUN" >&4'
  exec 4>&2 && trap 'eval "$at_exit"' EXIT
}
make_run_folder() { # the first start stores this script and its settings there; the folder of another script is refused
  [ -n "${SLURM_JOB_ID:-}" ] || die "this script runs inside a Slurm job" "sbatch $(printf %q "$0")" 2
  # An element of an array has the array's id and its number as its name: its own job id may be that of the whole array.
  export HPC_GPT_JOB="${HPC_GPT_ELEMENT:-$SLURM_JOB_ID}"
  unset in_job HPC_GPT_ALLOCATION SBATCH_CLUSTERS SLURM_CLUSTERS # commands are for the cluster that the job is on
  # sbatch names its copy of a script slurm_script; the job of a sweep starts the job.sh of a run
  [ "${BASH_SOURCE[0]##*/}" = slurm_script ] || [ -n "${HPC_GPT_ELEMENT:-}" ] || use_allocation
  unset HPC_GPT_ELEMENT
  export HPC_GPT_RUN="${HPC_GPT_RUN:-${HPC_GPT_LOGS:-${SLURM_SUBMIT_DIR:-$PWD}/logs}/demo/$SLURM_JOB_ID${HPC_GPT_ALLOCATION:+-$(cksum <"${BASH_SOURCE[0]}" | cut -d " " -f 1)}}"
  { mkdir -p -- "$HPC_GPT_RUN/attempts" && HPC_GPT_RUN=$(cd -- "$HPC_GPT_RUN" && pwd); } ||
    die "cannot make the run folder $HPC_GPT_RUN" "set HPC_GPT_LOGS to a folder that $HOSTNAME can write"
  [ -e "$HPC_GPT_RUN/job.sh" ] || keep job.sh <"${BASH_SOURCE[0]}" || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
  cmp -s "${BASH_SOURCE[0]}" "$HPC_GPT_RUN/job.sh" ||
    die "HPC_GPT_RUN names the run of another script: $HPC_GPT_RUN" "unset HPC_GPT_RUN, or submit that run's own job.sh"
  [ -e "$HPC_GPT_RUN/resolved.json" ] || settings | keep resolved.json || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
}
start_attempt() { # makes attempts/<n>, $attempt, and redirects all output into it
  n=1 rc=1 in_job=$((${in_job:--1} + 1)) overlap=(--overlap) # at a restart: a step that has not ended keeps its GPUs
  until mkdir -- "$HPC_GPT_RUN/attempts/$n" 2>/dev/null; do
    [ -d "$HPC_GPT_RUN/attempts/$n" ] || die "cannot write in $HPC_GPT_RUN/attempts" "is the disk full or read-only?"
    n=$((n + 1))
  done
  attempt="$HPC_GPT_RUN/attempts/$n" && mkdir -- "$attempt/flight"
  export HPC_GPT_ATTEMPT=$n in_job TORCH_FR_DUMP_TEMP_FILE="$attempt/flight/rank-"
  printf '{"attempt": %d, "job_id": "%s", "restart": %d, "in_job": %d, %s"node_list": "%s", "gpus": %d, "started": %d, "boot": "%s", "uptime": %s}\n' \
    "$n" "$HPC_GPT_JOB" "${SLURM_RESTART_COUNT:-0}" "$in_job" "${HPC_GPT_ALLOCATION:+\"allocation\": true, }" "$SLURM_JOB_NODELIST" \
    $((SLURM_JOB_NUM_NODES * 4)) "$(date +%s)" \
    "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)" "$(cut -d ' ' -f 1 /proc/uptime 2>/dev/null || echo 0)" >"$attempt/attempt.json"
  echo "run folder $HPC_GPT_RUN, attempt $n, output in attempts/$n/log"
  exec >>"$attempt/log" 2>&1
  trap : TERM USR2 && trap 'eval "${at_interrupt:-:}"' INT # signals are for the ranks: this script continues the run after them
}
say_ended() { # say_ended CLASS CAUSE: writes ended.json, unless the trainer has written it
  [ ! -e "$attempt/ended.json" ] || return 0
  local step cause="${2//[[:cntrl:]]/ }"
  cause="${cause//\\/\\\\}"
  step=$(tail -n 1 "$attempt/metrics.jsonl" 2>/dev/null | sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p')
  printf '{"ended": "%s", "cause": "%s", "step": %d, "time": %d, "requeue": false}\n' \
    "$1" "${cause//\"/\\\"}" "${step:-0}" "$(date +%s)" >"$attempt/.ended.json" &&
    mv -n -- "$attempt/.ended.json" "$attempt/ended.json"
}
fail() { # fail CAUSE HINT: ends the attempt before a rank starts
  say_ended user_error "$1"
  die "$1" "$2"
}
# --- the submitted code --------------------------------------------------------------------------------------------
use_submitted_code() { # code.zip, from which Python imports; without one the run uses the present code
  local said code="$HPC_GPT_RUN/code.zip"
  command -v -- "$HPC_GPT_PYTHON" >/dev/null ||
    fail "no $HPC_GPT_PYTHON on $HOSTNAME" "name a Python: HPC_GPT_PYTHON, or modules, venv or python in the cluster profile"
  [[ $HPC_GPT_RUN != *:* ]] || fail "PYTHONPATH cannot carry the colon of $HPC_GPT_RUN" "set HPC_GPT_LOGS to a path without a colon"
  if [ ! -e "$code" ]; then # plain sbatch
    "$HPC_GPT_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("hpc_gpt") is None)' ||
      fail "$HPC_GPT_PYTHON on $HOSTNAME cannot import hpc_gpt" \
        "pip install hpc-gpt there, or name another Python: HPC_GPT_PYTHON, or venv in the cluster profile"
    "$HPC_GPT_PYTHON" -m hpc_gpt.core.runs.snapshot "$HPC_GPT_RUN" || fail "cannot make $code" "is the disk full or read-only?"
  fi
  said=$("${python[@]}" -I "$code" hpc_gpt.core.runs.code_archive "$HPC_GPT_RUN") ||
    fail "${said:-cannot read $code}" 'submit the experiment again'
  export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"
}
# --- questions to Slurm and to Python -------------------------------------------------------------------------------
within() { # within SECONDS COMMAND: ends the command after so many seconds; the job's signals do not end it
  { (trap '' TERM INT && exec timeout -s KILL "$1" bash -c 'trap "" TERM INT; exec "$@"' within "${@:2}" 2>&9 9>&-); } 9>&2 2>/dev/null
}
retry() { # retry TIMES PAUSE_S COMMAND: repeats it until it succeeds, as Slurm's controller may be restarting
  local left
  for ((left = $1; left > 0; left--)); do "${@:3}" && return; sleep "$2"; done
  return 1
}
ask_slurm() { # sets $shown to Slurm's description of the job, times in UTC; empty if it does not answer for some time
  local left=20
  until shown=$(trap '' TERM INT USR2; TZ=UTC0 within 20 scontrol --oneliner --local show job "$HPC_GPT_JOB" 2>/dev/null | grep JobState=) || ((--left == 0)); do sleep 3; done
}
shown_as() { # shown_as KEY: prints the value of the key in $shown
  local pattern="(^| )$1=([^ ]*)"
  if [[ $shown =~ $pattern ]]; then printf %s "${BASH_REMATCH[2]}"; fi
}
job_states() { # job_states JOBS: prints Slurm's states of the jobs, whoever submitted them
  retry 3 3 within 20 squeue --sibling --noheader --array --states=all "--jobs=$1,$HPC_GPT_JOB" -o 'squeue %i %T' 2>/dev/null && echo answered
  within 20 scontrol show config 2>/dev/null | sed -n 's/^PrivateData .*jobs.*/private/p'
  within 20 sacct --federation -D -X -n -P -o JobID,State -j "$1" 2>/dev/null | sed 's/^/sacct /; s/|/ /'
}
ask_chain() { # ask_chain may_start|what_next ARGUMENTS: sets $answer to Python's line, or to nothing; its stdin is $words
  for _ in 1 2; do # after a signal within $(…) bash can lose its output
    answer=$(trap '' TERM INT USR2; printf %s "${words:-}" | within "${patience_s:-120}" "${python[@]}" -m "hpc_gpt.launcher.attempts.$1" "$HPC_GPT_RUN" "$n" "${@:2}" |
      sed -n 's/^hpc-gpt-next //p')
    [ -z "$answer" ] || return 0
  done
  [ -n "${patience_s:-}" ] || echo "hpc_gpt.launcher.attempts.$1 gave no answer"
  return 1
}
ask_to_start() { # Python's line: ask JOBS, for Slurm's states of them | wait | go STOP_AT PORT | stop CODE JOBS
  local left words jobs=
  for ((left = 40; left > 0; left--)); do
    words=$(trap '' TERM INT USR2; [ -z "$jobs" ] || job_states "$jobs")
    ask_chain may_start "$left" "$jobs"
    case "$answer" in # without a here-string: on a full disk bash has no file for it
    'ask '*) jobs="${answer#ask }" ;;
    wait) sleep 3 ;;
    go\ *) answer="${answer#go }" && export HPC_GPT_STOP_AT="${answer% *}" MASTER_PORT="${answer##*[ -]}" && return ;;
    stop\ *) answer="${answer#stop }"; exit "${answer% *}" ;;
    *) return ;;
    esac
  done
}
# --- the ranks -----------------------------------------------------------------------------------------------------
first_host() { # first_host NODES: prints its name, or Slurm's address of it; with localhost every node would be a world of its own
  local host address
  host=$(scontrol show hostnames "$1" | head -n 1)
  [ -n "$host" ] || fail "scontrol names no host of '$1'" "set HPC_GPT_MASTER_ADDR by hand"
  ! type getent >/dev/null 2>&1 || getent ahosts "$host" >/dev/null ||
    address=$(scontrol show node "$host" 2>/dev/null | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p' | grep -vFx -- "$host") ||
    fail "the host $host has no address" "if $host-ib has one, set node_suffix in the profile; else export HPC_GPT_MASTER_ADDR"
  echo "${address:-$host}"
}
be_in_time() { # at the time limit, ranks that hang or still save have KillWait without its last $last_s seconds
  trap '' TERM # a later TERM must not end the processes that start now
  (
    within "$((kill_wait > last_s ? kill_wait - last_s : 1))" tail --pid="$waits" -f /dev/null && exit
    ask_slurm
    [ "$(shown_as Reason)" = TimeLimit ] || exit
    echo "the ranks do not end at the time limit, and Slurm kills the job in $last_s s: the run continues without them"
    put_back_in_time
    kill -KILL "$waits"
  ) &
  trap be_in_time TERM
}
run_ranks() { # run_ranks COMMAND: waits for its end; sets $rc to its exit code
  local code
  # KillWait seconds after the time limit's SIGTERM Slurm kills this script, too; it needs the last of them to continue.
  kill_wait=$(within 20 scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
  kill_wait=${kill_wait:-30} last_s=$((kill_wait > 9 ? kill_wait / 3 : 3))
  { trap : TERM INT USR2; "$@"; code=$?; echo "$code" >"$attempt/.code"; exit "$code"; } &
  waits=$!
  trap be_in_time TERM
  while kill -0 "$waits" 2>/dev/null; do wait "$waits" 2>/dev/null; rc=$?; done
  trap : TERM
  if read -r code 2>/dev/null <"$attempt/.code"; then rc=$code; fi # bash may lose it if a signal interrupts the wait
  rm -f -- "$attempt/.code"; rmdir -- "$attempt/flight" 2>/dev/null
}
# --- what comes next -----------------------------------------------------------------------------------------------
answer_without_python() { # back to the queue, where the next start judges this failure; the trainer's request, a verdict, a stop and a cancel come first
  local ended=error before="$HPC_GPT_RUN/attempts/$((n - 1))"
  answer="again 0 - - $rc" # but two in a row that nobody could judge are the last
  if [ "$rc" = 0 ] || [ -e "$HPC_GPT_RUN/stop.$HPC_GPT_JOB" ] || [ -e "$attempt/next.json" ] || { [ -e "$before" ] && [ ! -e "$before/next.json" ]; }; then answer="stop 0 - - $rc"; fi
  ! grep -qsE '"(requeue|go_on)": true' "$attempt/ended.json" "$attempt/next.json" || answer="again 0 - - $rc"
  [ "$(shown_as Reason)" != TimeLimit ] || ended=walltime answer="again 0 - - $rc"
  [ ! -e "$HPC_GPT_RUN/cancelled.$HPC_GPT_JOB" ] || ended=cancelled answer="stop 0 - - $rc"
  say_ended "$ended" "exit code $rc"
}
change() { # change JOB KEY=VALUE: changes a job that waits, or is about to wait
  retry 10 1 within 20 scontrol update "jobid=$1" "$2" || echo "warning: Slurm does not accept $2 for job $1"
}
# Whether Slurm has requeued the job: by hand, after a preemption that did not wait, or after a node died.
is_put_back() { [ "$(shown_as Restarts)" -gt "${SLURM_RESTART_COUNT:-0}" ] 2>/dev/null; }
requeue_job() { # asks again while the controller restarts, unless it got the request and only its answer was lost
  local try said
  [ ! -e "$attempt/requeue-refused" ] || return 1
  for ((try = 0; try < 20; try++)); do
    said=$(within 60 scontrol requeue "$HPC_GPT_JOB" 2>&1) && return
    echo "$said"
    [[ ! $said =~ 'pending execution' ]] || return 0
    [[ $said =~ [Uu]'nable to contact'|'timed out'|onnection|^$ ]] || { echo "$said" >"$attempt/requeue-refused"; return 1; }
    sleep 3; ask_slurm
    ! is_put_back || return 0 # a second requeue would end the next attempt at its start
  done
  return 1
}
put_back_in_time() { # KillWait is running, so it first requests another attempt. If Python does not judge in time, that attempt's start does
  [ -z "${HPC_GPT_ALLOCATION:-}" ] && [ "$(shown_as Reason)" = TimeLimit ] || return 0
  patience_s=$((${last_s:-10} / 3))
  [ ! -e "$HPC_GPT_RUN/cancelled.$HPC_GPT_JOB" ] && [ ! -e "$HPC_GPT_RUN/stop.$HPC_GPT_JOB" ] || return 0
  if [ -e "$attempt/ended.json" ]; then grep -qs '"requeue": true' "$attempt/ended.json"; else [ "${rc:-1}" != 0 ]; fi || return 0
  # Once, by the first caller; the attempt is judged by Slurm's present description. A refused requeue is tried again later.
  (set -C && printf '%s\n' "$shown" >"$attempt/put-back") 2>/dev/null || return 0
  is_put_back || requeue_job || rm -f -- "$attempt/put-back"
}
continue_run() { # continue_run PAUSE_S NODES JOBS: starts another attempt, in so many seconds, without the nodes after the =
  local pause=$1 nodes=$2 next="$HPC_GPT_JOB" state resume
  resume="hpc-gpt submit --resume $(printf %q "$HPC_GPT_RUN")"
  # Slurm accepts a list that leaves too few nodes; the job would then wait for ever.
  local test=(within 20 sbatch --quiet --test-only)
  if [[ $nodes = =?* ]] && ! "${test[@]}" "--exclude=${nodes#=}" "$HPC_GPT_RUN/job.sh" 2>/dev/null &&
    "${test[@]}" "$HPC_GPT_RUN/job.sh" 2>/dev/null; then
    echo "warning: without ${nodes#=} Slurm has too few nodes for the job, so it may get them again"
    nodes=-
  fi
  ask_slurm # again: a requeue after scancel would revive a cancelled job
  state=$(shown_as JobState)
  [ -n "$state" ] || die "Slurm does not answer, so job $HPC_GPT_JOB is not continued" "$resume"
  if [ ! -e "$attempt/put-back" ] && ! is_put_back; then
    if [ "$state" != RUNNING ] && [ "$state" != SIGNALING ] && [ "$(shown_as Reason)" != TimeLimit ]; then
      echo "job $HPC_GPT_JOB is $state, so the run does not continue by itself"; return
    fi
    [ -e "$attempt/next.json" ] || : >"$attempt/unjudged" # Slurm did not put it back by itself
    echo "back to the queue: scontrol requeue $HPC_GPT_JOB"
    requeue_job || die "Slurm does not requeue job $HPC_GPT_JOB" "chain = \"singleton\" in the profile does without requeues; $resume"
  fi
  [ "$pause" = 0 ] || change "$next" "StartTime=now+$pause" # a requeued job has only KillWait from here on
  [ "$nodes" = - ] || change "$next" "ExcNodeList$nodes"
}
continue_or_end() { # Python's line: again|restart|stop PAUSE_S NODES JOBS CODE. Its argument: how the pause before a restart ended
  shown=$(cat -- "$attempt/put-back" 2>/dev/null) || ask_slurm
  put_back_in_time
  ask_chain what_next "$rc" "$shown" "$@" || answer_without_python
  # shellcheck disable=SC2086
  set -- $answer && rc=${5:-$rc}
  if [ "$1" = again ] && [ -z "${HPC_GPT_ALLOCATION:-}" ]; then continue_run "$2" "$3" "$4"; fi
  [ ! -e "$attempt/bad-nodes" ] || [ -n "${HPC_GPT_ALLOCATION:-}" ] || within 20 "${python[@]}" -m hpc_gpt.launcher.attempts.siblings "$HPC_GPT_RUN" "$n" </dev/null || :
}
restarts_here() { # whether the next attempt starts in this job; after the pause Python looks at the job again
  [[ ! $answer =~ ^restart\ ([1-9][0-9]*) ]] || { sleep "${BASH_REMATCH[1]}" & wait "$!"; continue_or_end "$?"; }
  [[ $answer = restart\ * ]]
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
  "time": "01:00:00",
  "exclusive": false,
  "signal_lead_s": 120,
  "retry_pause_s": 30,
  "preflight": false,
  "spare_nodes": 0
 },
 "cluster": {
  "name": "generic-slurm",
  "description": "any Slurm cluster with 4 GPUs a node; nothing else assumed",
  "time": "01:00:00"
 },
 "sweep": null,
 "row": null,
 "version": "0.0.0",
 "schema": 2
}
HPC_GPT_RESOLVED

main
