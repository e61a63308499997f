# bash -c, beside a rank of a run: NAME RANK PID [COMMAND…]. Runs the command, or a shell, with the environment with which
# the rank's process was started. It leaves out the rank's number and world size: a process that has them would join the
# rendezvous of the ranks. The Slurm variables are those of this step.
# shellcheck shell=bash disable=SC2034
trap '' USR2 # it is for the ranks, which save before the time limit
rank=$1 pid=$2 clean=-i environment=() device=0 devices=() of_rocr=()
shift 2
mapfile -d "" -t theirs 2>/dev/null <"/proc/$pid/environ"
for entry in "${theirs[@]}"; do
  case $entry in
  LOCAL_RANK=*) device=${entry#*=} ;;
  RANK=* | WORLD_SIZE=* | LOCAL_WORLD_SIZE=* | MASTER_* | SLURM_* | SLURMD_* | PMI* | SUBMITIT_*) ;;
  HPC_GPT_ATTEMPT=* | TERM=*) ;;
  *) environment+=("$entry") ;;
  esac
  case $entry in
  CUDA_VISIBLE_DEVICES=* | HIP_VISIBLE_DEVICES=*) IFS=, read -ra devices <<<"${entry#*=}" ;;
  ROCR_VISIBLE_DEVICES=*) IFS=, read -ra of_rocr <<<"${entry#*=}" ;; # HIP's numbers count from the first of these
  esac
done
for entry in "${!SLURM_@}" "${!SLURMD_@}"; do environment+=("$entry=${!entry}"); done
[ -z "${SLURM_STEP_GPUS:-}" ] || environment+=("CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES") # all of the job's, not the rank's
[ ${#of_rocr[@]} = 0 ] || devices=("${of_rocr[@]}")
[ ${#devices[@]} != 1 ] || device=0 # srun gave the rank this one
device=${devices[device]:-$device}
[ -e /dev/nvidiactl ] || [ -e /dev/kfd ] || device=cpu
environment+=("TERM=${TERM:-dumb}" "HPC_GPT_RANK=$rank" "HPC_GPT_RANK_PID=$pid" "HPC_GPT_DEVICE=$device")
if [ ${#theirs[@]} = 0 ]; then
  clean=--
  echo "rank $rank has no process $pid on ${SLURMD_NODENAME:-$HOSTNAME} any more: this is not its environment" >&2
elif ! { : <"/proc/$pid/mem"; } 2>/dev/null; then # the kernel checks the same rights as for a debugger
  scope=$(cat /proc/sys/kernel/yama/ptrace_scope 2>/dev/null)
  echo "no debugger can attach to process $pid: this site forbids ptrace${scope:+, with ptrace_scope $scope}" >&2
fi
cd -- "$(readlink "/proc/$pid/cwd")" 2>/dev/null || :
if [ $# = 0 ]; then
  echo "rank $rank on ${SLURMD_NODENAME:-$HOSTNAME}: \$HPC_GPT_RANK_PID is $pid, \$HPC_GPT_DEVICE is $device" >&2
  environment+=("PS1=rank $rank \\h:\\w\\$ ")
  set -- bash --norc -i
fi
exec env "$clean" "${environment[@]}" "$@"
