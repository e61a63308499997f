#!/bin/bash
#SBATCH --job-name=after-20260102-030405-abcd-20
#SBATCH '--output=/scratch/my 100%% logs/demo/20260102-030405-abcd/after/step-20/log'
#SBATCH --open-mode=append
#SBATCH --account=abc@v100
#SBATCH --gpus=1
#SBATCH '--comment=a '"'"'b'"'"''
# A job of [after], which hpc_gpt.launch.after has started for step 20 of a run.
# shellcheck disable=SC2016,SC1003
set -o pipefail
HPC_GPT_RUN='/scratch/my 100% logs/demo/20260102-030405-abcd'
after='/scratch/my 100% logs/demo/20260102-030405-abcd/after/step-20'
[ -n "${HPC_GPT_PYTHON:-}" ] || HPC_GPT_PYTHON=python3
trap : TERM # at the time limit the program ends, and this script says how
me="${SLURM_JOB_ID:-$$}"
if ! (set -C && echo "$me" >"$after/started") 2>/dev/null && [ "$(cat -- "$after/started")" != "$me" ]; then
  echo "another job has run for this step: $(cat -- "$after/started")"
  exit 0
fi
# Our code is for our own parts alone.
PYTHONPATH=":${PYTHONPATH:-}:"
PYTHONPATH="${PYTHONPATH//":$HPC_GPT_RUN/code:"/:}"
PYTHONPATH="${PYTHONPATH#:}"
PYTHONPATH="${PYTHONPATH%:}"
[ -n "$PYTHONPATH" ] || unset PYTHONPATH
rc=0

# --- the environment on this node, as the training's ranks have it -------------------------------------------------
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
HPC_GPT_STAGED="hpc-gpt-$UID-after-$me/1"
unset HPC_GPT_STAGE_SUM PYTHONHOME
trap 'rm -rf -- "${TMPDIR:-/tmp}/${HPC_GPT_STAGED%/*}"' EXIT
stage_node '/images/an env.tar.gz' || rc=1
export VIRTUAL_ENV="${TMPDIR:-/tmp}/$HPC_GPT_STAGED/environment"
export PATH="$VIRTUAL_ENV/bin:$PATH"
HPC_GPT_PYTHON="$VIRTUAL_ENV/bin/python"
python=(env "PYTHONPATH=$HPC_GPT_RUN/code${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 "$HPC_GPT_PYTHON")

[ "$rc" != 0 ] || [ -e "$after/export" ] || "${python[@]}" -m hpc_gpt.train.export "$HPC_GPT_RUN" "$after/export" fp32 20 || rc=$?
if [ "$rc" = 0 ]; then
  (
    exec python3 evaluate.py '/scratch/my 100% logs/demo/20260102-030405-abcd/after/step-20/export'
  )
  rc=$?
fi
printf '{"code": %d, "time": %d}\n' "$rc" "$(date +%s)" >"$after/.ended.json" && mv -f -- "$after/.ended.json" "$after/ended.json"
"${python[@]}" -m hpc_gpt.launch.after "$HPC_GPT_RUN" left 20
exit "$rc"
