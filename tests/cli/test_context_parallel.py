"""Context parallelism on the command line: what cannot run, and a plan of the longest sequences."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.command import error_of, in_process

QWEN = ("--model", "qwen2.5-7b", "--engine", "fsdp", "--gpus", "8", "--cluster", "h100-80g-8")
LONG = ("--model", "llama3.1-8b", "--seq", "131072", "--gpus", "8", "--cp", "8", "--cluster", "h100-80g-8")
REFUSED = {
    "heads": ((*QWEN, "--cp", "8"), "28 heads / tp 1 is no multiple of cp 8",
              'use --cp 4, or engine.cp_exchange = "keys"'),
    "sequence": ((*QWEN, "--cp", "4", "--seq", "4098"), "cp 4 does not divide model.seq 4098: 4098 / 4 = 1024.50",
                 "use --seq 4096"),
    "sequence by chunks": ((*QWEN, "--cp", "8", "--seq", "4104", "--set", "engine.cp_exchange=keys"),
                           "2 x cp 8 = 16 does not divide model.seq 4104: 4104 / 16 = 256.50", "use --seq 4096"),
    "transformers' model": (("gpt2-hf-ds", "--cp", "2", "--gpus", "4"),
                            "cp 2 cannot run on engine hf-deepspeed, which does not split over cp",
                            "use --cp 1, or --engine deepspeed-3d or deepspeed-zero or"),
    "no ring of ours": (("llama-tiny", "--cp", "2", "--set", "engine.cp_exchange=ring"),
                        "engine.cp_exchange is ring, which engine fsdp does not have",
                        'use engine.cp_exchange = "heads" or "keys"'),
    "GPUs": (("llama-tiny", "--cp", "4"), "layout tp1-pp1-cp4-dp1 needs 4 GPUs (1 x 1 x 4 x 1 = 4), but there are 2",
             "use --gpus 4"),
    "no size": (("llama-tiny", "--cp", "0"), "layout.cp is 0, but must be at least 1", ""),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["submit", "render"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_one_line_and_nothing_is_written(case, verb):
    words, message, hint = REFUSED[case]
    done = in_process(verb, *words, environment={"HPC_GPT_CLUSTER": "generic-slurm"})
    assert (done.code, done.stdout) == (2, "")
    said, advice = error_of(done)
    assert said.splitlines()[-1] == message
    assert advice.startswith(hint)
    logs = Path(os.environ["HPC_GPT_LOGS"])
    assert not logs.exists() or not list(logs.iterdir())


def test_llama_8b_at_128k_fits_8_gpus_by_plan_and_submit():
    found = json.loads(in_process("plan", *LONG, "--json").stdout)
    assert {each["layout"] for each in found["candidates"]} == {"tp1-pp1-cp8-dp1"}
    done = in_process("submit", *LONG, "--engine", "fsdp", "--dry-run", code=0)
    text = re.sub(r"\s+", " ", done.stdout + done.stderr)
    need, card = re.search(r"tp1-pp1-cp8-dp1 needs ([\d.]+) of ([\d.]+) GiB", text).groups()
    assert float(need) < float(card)
    small = in_process("submit", *LONG[:-2], "--engine", "fsdp", "--smoke", "--dry-run")
    assert "tp1-pp1-cp8-dp1 on 8 GPUs -> tp1-pp1-cp2-dp1 on 2 GPUs" in re.sub(r"\s+", " ", small.stderr + small.stdout)
