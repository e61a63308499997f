#!/bin/bash
# A plain loop: counts, saves now and then and on a signal, and continues from the checkpoint that it is given.
step=0 stop=
[ -z "$1" ] || step=$(cat "$1/step")
trap 'stop=1' TERM USR1
save() {
  mkdir -p "out/ckpt-$step" && echo "$step" >"out/ckpt-$step/step" && touch "out/ckpt-$step/.done" || exit 1
}
while ((step < ${STEPS:-40})); do
  sleep "${STEP_S:-0.05}"
  step=$((step + 1))
  until loss=$(awk "BEGIN {print 4 / $step}"); do :; done # a signal to every process ends awk, too
  echo "step $step/${STEPS:-40} loss $loss"
  if ((step % ${SAVE_EVERY:-10} == 0)) || [ -n "$stop" ]; then save; fi
  while ((step == ${WAITS_AT:-0})) && [ -z "$1" ]; do sleep 0.1; done # for a test that kills its first start there
  if [ -n "$stop" ]; then
    echo "saved on a signal"
    exit 3
  fi
done
