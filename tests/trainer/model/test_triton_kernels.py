"""The Triton kernels: their values in Triton's interpreter, and what they are compiled to for an H200."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import marked
from tests.chosen import asked
from tests.distributed.ranks import launch_ranks
from tests.trainer.model import triton_worker

# One worker runs the interpreter for all.
pytestmark = pytest.mark.xdist_group("triton")


def need_triton() -> None:
    if not triton_worker.has_triton():
        assert os.environ.get("CI") != "true", "Triton is missing; .ci/make-venv test installs it"
        pytest.skip("Triton is not installed: .ci/make-venv test")


@pytest.fixture(scope="module")
def in_triton(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    need_triton()
    folder: Path = tmp_path_factory.mktemp("triton")
    # In the order of CASES: those of each rank alone come before those of both.
    names = [name for name in triton_worker.CASES if name in asked(request, "name")]
    (folder / "asked.json").write_text(json.dumps(names))
    launch_ranks("tests.trainer.model.triton_worker", 2, folder)
    found: dict[str, float] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("name", marked(triton_worker.CASES, triton_worker.TOO_LONG))
def test_the_kernels_compute_the_plain_path(in_triton: dict[str, float], name: str) -> None:
    # A unit in the last place of a slope up to 1: Triton's interpreter cuts bf16 off.
    assert in_triton[name] <= (2**-8 if "bfloat16" in name else 1e-6)


@pytest.fixture(scope="module")
def on_sm90() -> dict[str, dict[str, int]]:
    need_triton()
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.model.sm90"], capture_output=True, text=True, check=True
    )
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.long
def test_for_an_h200_rows_move_in_16_bytes_at_once(on_sm90: dict[str, dict[str, int]]) -> None:
    for name, kernel in on_sm90.items():
        assert kernel["16-byte loads"] >= 2, name
        assert "2-byte stores" not in kernel, name
        assert kernel.get("2-byte loads", 0) <= 1, name  # the target's logit


@pytest.mark.long
def test_five_rows_of_the_loss_fit_and_load_their_next_ahead(on_sm90):
    for name in ("whole", "whole fp32", "evaluated", "statistics", "gradients", "wide"):
        kernel = on_sm90[name]
        assert kernel["programs"] >= 5, name
        assert kernel["stack"] == 0, name  # nothing is spilled
        assert kernel["threads"] == 128, name
        assert kernel["loads ahead"] >= 8, name
        assert kernel["loads ahead"] == kernel["16-byte loads"], name
