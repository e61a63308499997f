#!/usr/bin/env bash
# A look at one GPU within fifteen minutes: each part has its own limit and writes what it has as it goes. See README.md.
#   bench/gpu/look.sh OUT [SECONDS of each part of figures]
set -u
out=${1:?a folder} seconds=${2:-120} python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
part() { # NAME LIMIT COMMAND...
    local name=$1 limit=$2
    shift 2
    echo "== $name, at most $limit s"
    timeout --kill-after 20 "$limit" "$@" >"$out/$name.txt" 2>&1
    echo "$name $?" >>"$out/ended.txt"
}
turns() { # NAME ENGINES MODEL MBS [OPTION...]
    local name=$1 engines=$2 model=$3 mbs=$4
    shift 4
    part "$name" $((seconds + 60)) "$python" -m bench.gpu.turns "$out/turns.jsonl" \
        --engines "$engines" --model "$model" --mbs "$mbs" --limit "$seconds" "$@"
}
[ -n "${NO_TESTS-}" ] || part tests 200 "$python" -m pytest -m gpu -q -x tests/trainer/model tests/trainer
part trial 60 "$python" -m bench.gpu.trial
cat "$out/trial.txt"
if [ -n "${EXPERTS-}" ]; then
    part experts $((seconds + 20)) "$python" -m bench.gpu.experts "$out/experts.jsonl" --limit "$seconds"
    turns ddp-mixture ddp mixture 4 --peer --only block,all
    cat "$out/ended.txt"
    exit
fi
part pieces 80 "$python" -m bench.gpu.pieces "$out/pieces.jsonl" --limit 60
part muon 40 "$python" -m bench.muon speed
turns ddp-gpt2 ddp gpt2 32 --peer
turns ddp-llama ddp llama3.2-1b 4 --peer --only block,all
turns sharded-gpt2 fsdp,deepspeed-zero:1 gpt2 32
turns ddp-gpt2-xl ddp gpt2-xl 8
cat "$out/ended.txt"
