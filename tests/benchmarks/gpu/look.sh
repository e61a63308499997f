#!/usr/bin/env bash
# A look at one GPU within fifteen minutes: each part has its own limit and writes what it has as it goes. See README.md.
#   tests/benchmarks/gpu/look.sh OUT [SECONDS of each part of figures]
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
turns() { # NAME ENGINES MODEL MBS
    part "$1" $((seconds + 60)) "$python" -m tests.benchmarks.gpu.turns "$out/turns.jsonl" \
        --engines "$2" --model "$3" --mbs "$4" --limit "$seconds"
}
[ -n "${NO_TESTS-}" ] || part tests 200 "$python" -m pytest -m gpu -q -x tests/model tests/train
turns ddp-gpt2 ddp gpt2 32
turns sharded-gpt2 fsdp,deepspeed-zero:1 gpt2 32
turns ddp-gpt2-xl ddp gpt2-xl 8
cat "$out/ended.txt"
