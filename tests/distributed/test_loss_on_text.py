"""200 steps on real text in bf16: every engine's loss stays within 0.5 % of a plain fp32-master autocast run's; with
products in FP8 the last 20 steps' is within 1 % of the same engine's without."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.loss_on_text import CONTROL, PLAIN, Row
from tests.distributed.ranks import HERE

pytestmark = [
    pytest.mark.long(launch="loss-on-text"),
    pytest.mark.xdist_group("loss-on-text"),
    pytest.mark.timeout(1800),
]

ENGINES = ["ddp", "ddp, compiled", "deepspeed-zero 1", "deepspeed-zero 3", "deepspeed-3d", "fsdp"]
LIMIT = 0.005
IN_FP8 = ["ddp, fp8", "ddp, compiled, fp8", "fsdp, fp8"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, data_folder: Path, table: Callable[[str], None]) -> dict[str, Row]:
    """One process trains all of them, one after the other; its table is printed at the end of the session."""
    folder = tmp_path_factory.mktemp("loss-on-text")
    compiler = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.loss_on_text", "--json", folder / "rows", *ENGINES, *IN_FP8, CONTROL],
        env={**os.environ, **compiler, "HPC_GPT_DATA": str(data_folder)},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ["loss on text, 200 steps, beside a plain autocast run:", *done.stdout.splitlines()]:
        table(line)
    return {row["name"]: Row(**row) for row in json.loads((folder / "rows").read_text())}


@pytest.mark.parametrize("name", ENGINES)
def test_the_loss_on_text_is_a_plain_autocast_runs(rows: dict[str, Row], name: str) -> None:
    if name == "ddp, compiled" and shutil.which("g++") is None:
        pytest.skip("Inductor compiles with g++, which is not here")
    row, plain = rows[name], rows[PLAIN]
    assert len(row.losses) == len(plain.losses) == 200
    assert row.deviation(plain) <= LIMIT
    # And they learn.
    assert row.means()[-1] < 0.6 * row.losses[0]


@pytest.mark.parametrize("name", IN_FP8)
def test_the_loss_on_text_in_fp8_is_that_in_bf16(rows: dict[str, Row], name: str) -> None:
    if "compiled" in name and shutil.which("g++") is None:
        pytest.skip("Inductor compiles with g++, which is not here")
    row, of_16 = rows[name], rows[name.removesuffix(", fp8")]
    # At the end; a mean on the way was 1.5 % off (why is not known), compiled 0.13 %.
    assert abs(row.means()[-1] / of_16.means()[-1] - 1) <= 2 * LIMIT
    assert row.losses != of_16.losses


def test_masters_in_bf16_would_be_seen(rows: dict[str, Row]) -> None:
    assert rows[CONTROL].deviation(rows[PLAIN]) > 2 * LIMIT
