"""The look at a GPU starts on a CPU, too, with tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.long
def test_each_part_writes_what_it_measured(tmp_path: Path) -> None:
    own = {"PYTHON": sys.executable, "NO_TESTS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["tests/benchmarks/gpu/look.sh", str(tmp_path), "60"]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | own, capture_output=True, text=True, check=False)
    ended = dict(line.split() for line in (tmp_path / "ended.txt").read_text().splitlines())
    assert ended == {"ddp-gpt2": "0", "sharded-gpt2": "0", "ddp-gpt2-xl": "0"}, done.stdout
    lines = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    found = {(line["engine"], line["variant"]) for line in lines}
    settings = ("block", "one_pass_loss", "fused_bias_gradients", "all")
    assert found == {
        *((engine, variant) for engine in ("ddp", "fsdp", "deepspeed-zero:1") for variant in settings),
        ("ddp", "all, fp8"),
        ("fsdp", "all, fp8"),
    }
    assert all(line["ratio"] > 0 and line["loss"] > 0 for line in lines)
