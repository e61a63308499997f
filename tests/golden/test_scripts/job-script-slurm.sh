#!/bin/bash
# mine: 1 GPU
# Rendered by hpc-gpt 0.0.0. It is complete: give it to sbatch as it is.
#SBATCH -N 1
#SBATCH --job-name=mine
#SBATCH --output=%x-%j.out

# The flow is in `main`. Every start of the job is an attempt of one run. The script at the end of this file runs as sbatch
#   would start it, with its environment, folder, input, limits and signals. hpc_gpt.trainer.program.script_watch follows
#   its output, and Python (hpc_gpt.launcher.attempts) decides what to do next; only this shell gives commands to Slurm.
# shellcheck disable=SC2016,SC1003
set -o pipefail
exec 3<&0 </dev/null # the script's own input
unset HPC_GPT_RUN HPC_GPT_ELEMENT
[ -z "${1:-}" ] || HPC_GPT_RUN="$1"
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  HPC_GPT_ELEMENT="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
  [ -z "${1:-}" ] || HPC_GPT_RUN=$(cd -P -- "$1/$SLURM_ARRAY_TASK_ID" && pwd) || exit 2
fi
[ -z "${2:-}" ] || HPC_GPT_PYTHON="$2"
export HPC_GPT_PYTHON="${HPC_GPT_PYTHON:-python3}" PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1

main() {
  make_run_folder    # the first argument, or with plain sbatch logs/mine/<job id>
  start_attempt      # its attempts/<n>: from here on all output is in attempts/<n>/log
  python=("$HPC_GPT_PYTHON")
  use_submitted_code # its code.tar.gz: edits after the submission have no effect
  ask_to_start       # hpc_gpt.launcher.attempts.may_start: the script ends here if the run is done, or another job trains it
  start_notifier     # [notify]: hpc_gpt.launcher.attempts.notify, beside the script
  start_follower     # [after]: hpc_gpt.launcher.after, beside the script
  start_tracker      # [track]: hpc_gpt.report.track, beside the script
  run_script         # the script, in its folder
  say_ranks_ended
  continue_or_end    # hpc_gpt.launcher.attempts.what_next: classifies the end, and says whether another attempt follows
  send_event after
  end_beside 30
  part_logs
  exit "$rc"
}

# === do not edit below: the functions that main calls, then the settings, then the script =============================
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
  [ -n "${SLURM_JOB_ID:-}" ] || die "this script runs inside a Slurm job" "sbatch $(printf %q "$0")" 2
  # An element of an array has the array's id and its number as its name: its own job id may be that of the whole array.
  export HPC_GPT_JOB="${HPC_GPT_ELEMENT:-$SLURM_JOB_ID}"
  unset in_job HPC_GPT_ELEMENT SBATCH_CLUSTERS SLURM_CLUSTERS # commands are for the cluster that the job is on
  HPC_GPT_RUN="${HPC_GPT_RUN:-${HPC_GPT_LOGS:-${SLURM_SUBMIT_DIR:-$PWD}/logs}/mine/$SLURM_JOB_ID}"
  { mkdir -p -- "$HPC_GPT_RUN/attempts" && HPC_GPT_RUN=$(cd -- "$HPC_GPT_RUN" && pwd); } ||
    die "cannot make the run folder $HPC_GPT_RUN" "set HPC_GPT_LOGS to a folder that $HOSTNAME can write"
  export HPC_GPT_RUN
  [ -e "$HPC_GPT_RUN/job.sh" ] || keep job.sh <"${BASH_SOURCE[0]}" || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
  cmp -s "${BASH_SOURCE[0]}" "$HPC_GPT_RUN/job.sh" ||
    die "HPC_GPT_RUN names the run of another script: $HPC_GPT_RUN" "unset HPC_GPT_RUN, or submit that run's own job.sh"
  [ -e "$HPC_GPT_RUN/resolved.json" ] || settings | keep resolved.json || die "cannot write in $HPC_GPT_RUN" "is the disk full or read-only?"
}
start_attempt() { # makes attempts/<n>, $attempt, and redirects all output into it
  n=1 rc=1 in_job=$((${in_job:--1} + 1))
  until mkdir -- "$HPC_GPT_RUN/attempts/$n" 2>/dev/null; do
    [ -d "$HPC_GPT_RUN/attempts/$n" ] || die "cannot write in $HPC_GPT_RUN/attempts" "is the disk full or read-only?"
    n=$((n + 1))
  done
  attempt="$HPC_GPT_RUN/attempts/$n"
  export HPC_GPT_ATTEMPT=$n TORCH_FR_DUMP_TEMP_FILE="$attempt/flight/rank-"
  mkdir -- "$attempt/flight"
  printf '{"attempt": %d, "job_id": "%s", "restart": %d, "in_job": %d, "node_list": "%s", "gpus": %d, "started": %d, "boot": "%s", "uptime": %s}\n' \
    "$n" "$HPC_GPT_JOB" "${SLURM_RESTART_COUNT:-0}" "$in_job" "$SLURM_JOB_NODELIST" \
    $((SLURM_JOB_NUM_NODES * 1)) "$(date +%s)" \
    "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)" "$(cut -d ' ' -f 1 /proc/uptime 2>/dev/null || echo 0)" >"$attempt/attempt.json"
  echo "run folder $HPC_GPT_RUN, attempt $n, output in attempts/$n/log"
  exec >>"$attempt/log" 2>&1
  trap : TERM INT USR2 # signals are for the ranks: this script continues the run after them
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
use_submitted_code() { # the first attempt unpacks code.tar.gz; without one the run uses the present code
  local said code="$HPC_GPT_RUN/code"
  command -v -- "$HPC_GPT_PYTHON" >/dev/null ||
    fail "no $HPC_GPT_PYTHON on $HOSTNAME" "name a Python: HPC_GPT_PYTHON, or modules, venv or python in the cluster profile"
  [[ $HPC_GPT_RUN != *:* ]] || fail "PYTHONPATH cannot carry the colon of $HPC_GPT_RUN" "set HPC_GPT_LOGS to a path without a colon"
  if [ ! -e "$code.tar.gz" ]; then # plain sbatch
    "$HPC_GPT_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("hpc_gpt") is None)' ||
      fail "$HPC_GPT_PYTHON on $HOSTNAME cannot import hpc_gpt" \
        "pip install hpc-gpt there, or name another Python: HPC_GPT_PYTHON, or venv in the cluster profile"
    "$HPC_GPT_PYTHON" -m hpc_gpt.core.runs.snapshot "$HPC_GPT_RUN" || fail "cannot make $code.tar.gz" "is the disk full or read-only?"
  fi
  said=$(tar -xOzf "$code.tar.gz" hpc_gpt/core/runs/unpack.py | "${python[@]}" -I - "$HPC_GPT_RUN") ||
    fail "${said:-cannot unpack $code.tar.gz}" 'submit the experiment again'
  export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"
}
# --- questions to Slurm and to Python -------------------------------------------------------------------------------
within() { # within SECONDS COMMAND: ends the command after so many seconds; the job's signals do not end it
  (trap '' TERM INT && exec timeout -s KILL "$1" bash -c 'trap "" TERM INT; exec "$@"' within "${@:2}")
}
retry() { # retry TIMES PAUSE_S COMMAND: repeats it until it succeeds, as Slurm's controller may be restarting
  local left
  for ((left = $1; left > 0; left--)); do "${@:3}" && return; sleep "$2"; done
  return 1
}
ask_slurm() { # sets $shown to Slurm's description of the job, times in UTC; empty if it does not answer for some time
  local left=20
  until shown=$(TZ=UTC0 within 20 scontrol --oneliner --local show job "$HPC_GPT_JOB" 2>/dev/null | grep JobState=) || ((--left == 0)); do sleep 3; done
}
shown_as() { # shown_as KEY: prints the value of the key in $shown
  local pattern="(^| )$1=([^ ]*)"
  if [[ $shown =~ $pattern ]]; then printf %s "${BASH_REMATCH[2]}"; fi
}
job_states() { # job_states JOBS: prints Slurm's states of the jobs
  [ -n "$1" ] || return 0
  retry 20 3 within 20 squeue --sibling --noheader --array --states=all "--user=$UID" -o 'squeue %i %T' 2>/dev/null
  within 20 sacct --federation -D -X -n -P -o JobID,State -j "$1" 2>/dev/null | sed 's/^/sacct /; s/|/ /'
}
ask_chain() { # ask_chain may_start|what_next ARGUMENTS: sets $answer to Python's line, or to nothing; its stdin is $words
  local try
  for try in 1 2; do # after a signal within $(…) bash can lose its output
    answer=$(printf %s "${words:-}" | within "${patience_s:-120}" "${python[@]}" -m "hpc_gpt.launcher.attempts.$1" "$HPC_GPT_RUN" "$n" "${@:2}" |
      sed -n 's/^hpc-gpt-next //p')
    [ -z "$answer" ] || return 0
    echo "hpc_gpt.launcher.attempts.$1 gave no answer, try $try"
  done
  return 1
}
ask_to_start() { # Python's line: ask JOBS, for Slurm's states of them | wait | go STOP_AT PORT | stop CODE JOBS
  local left words jobs=
  for ((left = 40; left > 0; left--)); do
    words=$(job_states "$jobs")
    ask_chain may_start "$left" "$jobs"
    case "$answer" in # without a here-string: on a full disk bash has no file for it
    'ask '*) jobs="${answer#ask }" ;;
    wait) sleep 3 ;;
    go\ *) answer="${answer#go }" && export HPC_GPT_STOP_AT="${answer% *}" MASTER_PORT="${answer##*[ -]}" && return ;;
    stop\ *) answer="${answer#stop }"; send_event refused; exit "${answer% *}" ;;
    *) return ;;
    esac
  done
}
# shellcheck disable=SC2317,SC2329
be_in_time() { # at the time limit, ranks that hang or still save have KillWait without its last $last_s seconds
  trap '' TERM # a later TERM must not end the processes that start now
  (
    within "$((kill_wait > last_s ? kill_wait - last_s : 1))" tail --pid="$waits" -f /dev/null && exit
    ask_slurm
    [ "$(shown_as Reason)" = TimeLimit ] || exit
    echo "the ranks do not end at the time limit, and Slurm kills the job in $last_s s: the run continues without them"
    put_back_in_time
    kill -KILL -- "-$waits"
  ) &
  trap be_in_time TERM
}
# --- the script ----------------------------------------------------------------------------------------------------
signals="1 2 3 4 5 6 7 8 10 11 12 13 14 15 16 20 21 22 23 24 25 26 27 28 29 30 31 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64"
hear() { # hear NAME: records each signal that this shell gets
  local number
  # shellcheck disable=SC2064
  for number in $signals; do trap "echo $number >>.signals/$1" "$number"; done
}
heard() { # heard NAME NUMBER: prints how often that shell got the signal
  grep -cx -- "$2" "$attempt/.signals/$1" 2>/dev/null
}
the_script() { # becomes the script, with the environment that this shell got at its start
  exec "$HPC_GPT_PYTHON" -ISs "$HPC_GPT_RUN/code/hpc_gpt/trainer/program/start.py" "$$" "$HPC_GPT_RUN" "$n" - \
    "$HPC_GPT_RUN/slurm_script" 'it'"'"'s' <&3 3<&- 2>>"$attempt/err"
}
record_group_id() { # records the signals of the job's first process group, as long as the script runs
  cd -- "$attempt" || exit
  hear group
  while [ -d .signals ] && kill -0 "$$" 2>/dev/null; do # or until job.sh is killed
    # Until the watch has begun: so it knows when its first lines came.
    [ -e trainer.json ] || { cat /proc/uptime; stat -Lc '%n %s' log err; } >>.signals/sizes 2>/dev/null
    sleep 1 &
    wait "$!"
  done
}
follow_script() { # runs the watch, again if something ends it, such as a pkill python for the script's processes
  local again watch
  local folder="$PWD" # the patterns of --output are relative to it
  cd -- "$attempt" || exit
  hear all
  until [ -e body ] || [ -e .code ] || [ ! -d "$attempt" ]; do sleep 0.05; done
  for again in {1..1000}; do
    (
      # shellcheck disable=SC2086
      trap '' $signals
      exec "$HPC_GPT_PYTHON" -m hpc_gpt.trainer.program.script_watch "$HPC_GPT_RUN" "$n" "$folder"
    ) &
    watch=$!
    while kill -0 "$watch" 2>/dev/null; do wait "$watch"; done 2>/dev/null
    if [ ! -d "$attempt" ] || [ -e .followed ] || { [ -e .code ] && [ "$again" -gt 1 ]; }; then break; fi
    sleep 0.5
  done
}
run_script() { # sets $rc to the script's exit code
  local each keeper began ended file="$HPC_GPT_RUN/slurm_script"
  mkdir -p -- "$attempt/.signals" "$HPC_GPT_RUN/checkpoints"
  [ -e "$file" ] ||
    (umask 077 && tail -c 52 -- "$HPC_GPT_RUN/job.sh" >"$file.$n" && chmod 700 "$file.$n" && mv -f -- "$file.$n" "$file")
  # KillWait seconds after the time limit's SIGTERM Slurm kills this script, too; it needs the last of them to continue.
  kill_wait=30 each=$(within 20 scontrol show config 2>/dev/null)
  [[ ! $each =~ KillWait\ *=\ *([0-9]+) ]] || kill_wait=${BASH_REMATCH[1]}
  last_s=$((kill_wait > 9 ? kill_wait / 3 : 3))
  [[ ! $each =~ JobFileAppend\ *=\ *1 ]] || export JOB_FILE_APPEND=1
  # shellcheck disable=SC2064
  for each in $signals; do trap "pass_on $each" "$each"; done
  record_group_id &
  read -r began _ </proc/uptime
  set -m # a background job then has a process group of its own and its input, and ignores no signal, as under sbatch
  the_script &
  waits=$!
  follow_script &
  keeper=$!
  exec 3<&-
  { # bash may print a line on a killed job after any command here; it is not the script's output
    set +m
    echo "$waits" >"$attempt/.body" && mv -f -- "$attempt/.body" "$attempt/body"
    # Not by `wait`: bash can wait for ever if two signals come during one, as with a handler that requeues its job.
    while kill -0 "$waits"; do sleep 0.5; done
    wait "$waits" # its exit code
  } 2>/dev/null
  rc=$?
  read -r ended _ </proc/uptime
  echo "$rc $ended" >"$attempt/.code" # the watch ends
  [ ! -s "$attempt/.signals/began" ] || read -r began <"$attempt/.signals/began" # without the start of Python
  each=$(sort -un "$attempt/.signals/shell" 2>/dev/null | paste -sd, -)
  ended=$((10#${ended/./} - 10#${began/./})) # hundredths of a second
  printf '{"code": %d, "seconds": %d.%02d, "signals": [%s]}\n' "$rc" $((ended / 100)) $((ended % 100)) "$each" >"$attempt/exit.json"
  each=$((last_s < 10 ? last_s : 10))
  [ -e "$attempt/trainer.json" ] || each=60 # a short script: its watch has not begun
  within "$each" tail --pid="$keeper" -f /dev/null
  {
    kill -KILL -- "-$keeper"
    wait "$keeper"
  } 2>/dev/null # hides bash's line on it, too
  rm -rf -- "$attempt/.signals" "$attempt/.followed" "$attempt/.code" "$attempt/body"
  rmdir -- "$attempt/flight" 2>/dev/null
  [ "$rc" != 0 ] || part_logs # before its end is reported; after a failure a requeue may be urgent
}
part_logs() { # from now on the files of --output and --error are the user's alone: gzip refuses a file with two names
  find "$attempt/log" "$attempt/err" -links 2 -size -64M -exec cp -p {} {}.own \; -exec mv -f {}.own {} \; 2>/dev/null
  rm -f -- "$attempt/log.own" "$attempt/err.own" # left on a full disk
  exec >>"$attempt/log" 2>&1
}
is_near_the_limit() { # whether a signal to this shell alone is the one that this script requested from Slurm
  return 1
}
# shellcheck disable=SC2317,SC2329
pass_on() { # pass_on NUMBER: forwards a signal to the processes that would have got it in sbatch's own script, but did not
  echo "$1" 2>/dev/null >>"$attempt/.signals/shell"
  if [ "$1" = 15 ]; then
    be_in_time
    trap "pass_on 15" 15
  fi
  forward_signal "$1" & # in the background, as it waits for programs
}
# shellcheck disable=SC2317,SC2329
forward_signal() (
  # shellcheck disable=SC2086
  trap '' $signals
  sleep 0.3 # the other processes have it by now
  before_group=0 before_all=0 of_group=$(heard group "$1") of_all=$(heard all "$1")
  read -r before_group before_all 2>/dev/null <"$attempt/.signals/before.$1"
  echo "${of_group:-0} ${of_all:-0}" 2>/dev/null >"$attempt/.signals/before.$1"
  read -r body 2>/dev/null <"$attempt/body" || exit 0
  if [ "${of_group:-0}" = "$before_group" ]; then # this shell alone got it: scancel --batch, --signal=B:
    if [ "$1" = 12 ] && is_near_the_limit; then
      : >"$attempt/.limit" # the watch asks the programs to end
    else
      kill -s "$1" "$body" 2>/dev/null
    fi
  elif [ "${of_all:-0}" = "$before_all" ]; then # its process group got it: scancel --full
    kill -s "$1" -- "-$body" 2>/dev/null
  fi # else every process of the job got it
)
# --- events for the user's command ---------------------------------------------------------------------------------
start_notifier() { # sets $notifier: sends the events that the attempt before could not send, and the first step; ends with the ranks
  (
    trap '' TERM INT USR2 # signals are for the ranks
    "${python[@]}" -m hpc_gpt.launcher.attempts.notify "$HPC_GPT_RUN" "$n" beside </dev/null
  ) &
  notifier=$!
}
send_event() { # send_event after|refused: the attempt is judged by now, and a job that continues is back in the queue
  local sender until=$((SECONDS + 40))
  (
    trap '' TERM INT USR2
    exec "${python[@]}" -m hpc_gpt.launcher.attempts.notify "$HPC_GPT_RUN" "$n" "$1" </dev/null
  ) &
  sender=$!
  # No `timeout`: the TERM of a requeue would end it. The command may still have the first step's event.
  while { kill -0 "$sender" || kill -0 "${notifier:-none}"; } 2>/dev/null && [ "$SECONDS" -lt "$until" ]; do sleep 0.2; done
  if kill -KILL "$sender" 2>/dev/null; then
    echo "notify: its process has not ended and is killed"
  else
    wait "$sender" || echo "notify: its process ended with exit code $?"
  fi
}
# --- processes beside the ranks ------------------------------------------------------------------------------------
say_ranks_ended() { # the processes beside the ranks look for this file
  ranks_ended=$SECONDS
  : >"$attempt/.ranks-ended"
}
end_beside() { # end_beside SECONDS: kills them after so many seconds, or after the last few of a requeued job
  local entry pid left=$1 # counted from now, as a follower may have waited for the verdict
  [[ ${answer:-} = stop\ * ]] || left=5
  left=$((SECONDS + left))
  for entry in "${beside[@]}"; do
    pid=${entry#* }
    # No `timeout`: the TERM of a requeue would end it.
    while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt "$left" ]; do sleep 0.2; done
    if kill -0 "$pid" 2>/dev/null; then
      echo "${entry% *}: its process has not ended $((SECONDS - ranks_ended)) s after the ranks, so it is killed"
      disown "$pid"
      kill -KILL -- "-$pid"
    fi 2>/dev/null
  done
  beside=()
  rm -f -- "$attempt/.ranks-ended"
}
start_follower() { # hpc_gpt.launcher.after decides which jobs to submit, until the ranks have ended
  local what of pid run=$HPC_GPT_RUN after after_PID
  set -m # a process group of its own
  (
    trap '' TERM INT USR2 # signals are for the ranks
    # It reads a line first, as bash forgets the descriptors and the number of a process that has ended.
    coproc after { read -r && exec "${python[@]}" -m hpc_gpt.launcher.after "$HPC_GPT_RUN" "$n" $$; }
    exec 8<&"${after[0]}" 9>&"${after[1]}" && pid=$after_PID && echo >&9
    while read -r what of <&8; do # a question: only this shell gives commands to Slurm
      case "$what" in
      unset) # the variables of this job alone
        # shellcheck disable=SC2086
        unset $of
        ;;
      sbatch) within 60 sbatch "$run/after/step-$of/job.sh" ;;
      named) within 60 squeue --noheader --states=all "--user=$UID" "--name=$of" --format=%i ;;
      squeue) within 60 squeue --noheader --states=all --array "--user=$UID" '--format=%i|%T|%r' ;;
      sacct) within 60 sacct --federation -n -X -P -o JobID,State -j "$of" ;;
      esac >&9 2>&1 </dev/null
      echo "hpc-gpt-end $?" >&9
    done
    wait "$pid" && exit
    echo "after: its process ended with exit code $?; the run continues without it"
  ) &
  beside+=("after $!")
  set +m
}
start_tracker() { # hpc_gpt.report.track sends the steps until the ranks have ended
  set -m # a process group of its own
  (
    trap '' TERM INT USR2 # signals are for the ranks
    "${python[@]}" -m hpc_gpt.report.track "$HPC_GPT_RUN" "$n" $$ </dev/null && exit
    echo "track: its process ended with exit code $?; the run continues without it"
  ) &
  beside+=("track $!")
  set +m
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
  [ "$(shown_as Reason)" = TimeLimit ] || return 0
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
  # A requeued job has only KillWait from here on.
  [ "$pause" = 0 ] || change "$next" "StartTime=now+$pause"
  [ "$nodes" = - ] || change "$next" "ExcNodeList$nodes"
}
continue_or_end() { # Python's line: again|restart|stop PAUSE_S NODES JOBS CODE. Its argument: how the pause before a restart ended
  shown=$(cat -- "$attempt/put-back" 2>/dev/null) || ask_slurm
  put_back_in_time
  ask_chain what_next "$rc" "$shown" "$@" || answer_without_python
  # shellcheck disable=SC2086
  set -- $answer && rc=${5:-$rc}
  if [ "$1" = again ]; then continue_run "$2" "$3" "$4"; fi
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
  "time": "04:00:00",
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
  "signal_lead_s": null,
  "max_gpu_hours": null,
  "retry_pause_s": 30,
  "retry_after_exit_0": false,
  "preflight": false,
  "spare_nodes": 0,
  "sbatch": [],
  "srun": []
 },
 "cluster": {
  "name": "h100-80g-8",
  "description": "nodes of 8 H100 SXM 80 GB with NVLink and InfiniBand",
  "scheduler": "slurm",
  "device": "h100-80g",
  "gpus_per_node": 8,
  "cpus_per_node": 96,
  "gpu_flag": "gpus-per-node",
  "gpu_type": null,
  "partition": null,
  "account": null,
  "qos": null,
  "constraint": null,
  "reservation": null,
  "time": "04:00:00",
  "mem": null,
  "exclusive": true,
  "chain": "requeue",
  "signal_lead_s": 120,
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
  "command": [
   "mail",
   "-s",
   "GPT",
   "me"
  ]
 },
 "after": {
  "run": "true"
 },
 "track": {
  "tensorboard": true
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
 "schema": 2
}
HPC_GPT_RESOLVED

main
exit
# === the script: the last 52 bytes ====================================================================
#!/bin/bash
#SBATCH -N 1
srun python3 train.py "$@"
