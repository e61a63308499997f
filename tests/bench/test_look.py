"""The look at a GPU starts on a CPU, too, with tiny models."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.peers import build_peer, peer_of
from bench.gpu.turns import MIXTURES, TINY, TINY_LLAMA
from hpc_gpt.core.settings.experiment import Model
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.trainer.model.gpt import Gpt
from tests.conftest import REPOSITORY


@pytest.mark.long
def test_each_part_writes_what_it_measured(tmp_path: Path) -> None:
    own = {"PYTHON": sys.executable, "NO_TESTS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["bench/gpu/look.sh", str(tmp_path), "240"]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | own, capture_output=True, text=True, check=False)
    ended = dict(line.split() for line in (tmp_path / "ended.txt").read_text().splitlines())
    parts = ("trial", "pieces", "muon", "ddp-gpt2", "ddp-llama", "sharded-gpt2", "ddp-gpt2-xl")
    assert ended == dict.fromkeys(parts, "0"), done.stdout
    lines = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    found = {(line["engine"], line["variant"]) for line in lines}
    settings = ("block", "one_pass_loss", "all")
    assert found == {
        *((engine, variant) for engine in ("ddp", "fsdp", "deepspeed-zero:1") for variant in settings),
        ("ddp", "all, fp8"),
        ("ddp", "peer"),
        ("fsdp", "all, fp8"),
    }
    assert all(line["ratio"] > 0 and line["loss"] > 0 for line in lines)
    assert all((line["plan_gib"] is None) is (line["variant"] == "peer") for line in lines)
    pieces = [json.loads(line) for line in (tmp_path / "pieces.jsonl").read_text().splitlines()]
    kinds = {piece["piece"].rpartition(" ")[2] for piece in pieces}
    assert (len(pieces), kinds) == (2 * 4 * 3, {"bf16", "casts", "fp8"})
    assert all(min(piece["ms"]) > 0 for piece in pieces)


@pytest.mark.long
def test_experts_are_measured_by_rows_and_beside_a_peer(tmp_path: Path) -> None:
    own = {
        "PYTHON": sys.executable,
        "NO_TESTS": "1",
        "EXPERTS": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = ["bench/gpu/look.sh", str(tmp_path), "120"]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | own, capture_output=True, text=True, check=False)
    ended = dict(line.split() for line in (tmp_path / "ended.txt").read_text().splitlines())
    assert ended == {"trial": "0", "experts": "0", "ddp-mixture": "0"}, done.stdout
    assert done.stdout.count("equal to the loop; ") == 9
    products = [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    assert {(product["rows"], product["outputs"]) for product in products} == {
        (rows, outputs) for rows in (16, 64) for outputs in (64, 128)
    }
    assert all(min(*product["ms"], *product["plain_ms"], product["ratio"]) > 0 for product in products)
    lines = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert {line["variant"] for line in lines} == {"block", "all", "peer"}


@pytest.mark.parametrize("keys", [TINY, {**TINY, **TINY_LLAMA}, MIXTURES["tiny"]], ids=["gpt2", "llama", "experts"])
def test_a_peer_has_our_models_size_and_learns(keys: dict[str, Any]) -> None:
    """As many weights, and it learns: the two do the same work."""
    if "experts" in keys:
        pytest.importorskip("transformers")
    shape = resolve_shape(Model(**keys))
    torch.manual_seed(3)
    ours, peer = Gpt(shape, 1), build_peer(shape)
    assert sum(one.numel() for one in peer.parameters()) == sum(one.numel() for one in ours.parameters())
    tokens = torch.randint(0, shape.vocab, (2, shape.seq + 1))
    step = peer_of(shape, torch.device("cpu"))
    losses = [step([(tokens[:, :-1], tokens[:, 1:])]) for _ in range(30)]
    assert losses[0] == pytest.approx(math.log(shape.padded_vocab), rel=0.05)
    assert losses[-1] < 0.97 * losses[0]
