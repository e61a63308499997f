"""Context parallelism on the command line: what cannot run, and a plan of the longest sequences."""

import json
import re

from tests.cli.command import in_process

LONG = ("--model", "llama3.1-8b", "--seq", "131072", "--gpus", "8", "--cp", "8", "--cluster", "h100-80g-8")


def test_llama_8b_at_128k_fits_8_gpus_by_plan_and_submit():
    found = json.loads(in_process("plan", *LONG, "--json").stdout)
    assert {each["layout"] for each in found["candidates"]} == {"tp1-pp1-cp8-dp1"}
    done = in_process("submit", *LONG, "--engine", "fsdp", "--dry-run", code=0)
    text = re.sub(r"\s+", " ", done.stdout + done.stderr)
    need, card = re.search(r"tp1-pp1-cp8-dp1 needs ([\d.]+) of ([\d.]+) GiB", text).groups()
    assert float(need) < float(card)
    small = in_process("submit", *LONG[:-2], "--engine", "fsdp", "--smoke", "--dry-run")
    assert "tp1-pp1-cp8-dp1 on 8 GPUs -> tp1-pp1-cp2-dp1 on 2 GPUs" in re.sub(r"\s+", " ", small.stderr + small.stdout)
