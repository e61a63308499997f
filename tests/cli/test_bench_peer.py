"""`hpc-gpt bench --peer`: programs of the user's among our rows."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from hpc_gpt.launcher.bench import bench_run
from tests.cli.command import in_process
from tests.conftest import REPOSITORY
from tests.launcher.bench.test_measurement import good
from tests.waiting import LIMIT_S, wait_for

SMALL = ("--smoke", "--steps", "3", "--set", "engine.compile=none")
NANOGPT = """
print("tokens per iteration will be: 1,024")
for step in range(12):
    print(f"iter {step}: loss {9 - step / 10:.4f}, time {50 + step % 3:.2f}ms, mfu 30.00%")
"""
SECRET = "opensesame-1234"


def python(program):
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}"


@pytest.mark.long
def test_peers_are_rows_among_ours_and_a_failed_one_stops_none(tmp_path, monkeypatch):
    ours = bench_run.measure
    monkeypatch.setattr(bench_run, "measure", lambda cell, *rest: ours(cell, *rest) if cell.is_peer else good(0.05))
    words = [
        *("--peer", f"nano={python(NANOGPT)}"),
        *("--peer", f"broken={python('import os; raise ValueError(os.environ[chr(72) + chr(70)])')}"),
        *("--peer", "quiet=true"),
        *("--peer", r"own=for n in 1 2 3; do echo speed: 512 tok/s; done"),
        *("--peer-pattern", r"own=(\d+) tok/s"),
    ]
    done = in_process(
        "bench", *SMALL, "--rounds", "2", *words, "--json", environment={"HF_TOKEN": SECRET, "HF": SECRET}, code=3
    )
    assert "\nError: broken ended as error; quiet: no speed was found\n\nhint: hpc-gpt why " in done.stderr
    page = json.loads(done.stdout)
    rows = dict(zip([row["cell"] for row in page["rows"]], page["records"], strict=True))
    assert list(rows) == ["ddp", "nano", "broken", "quiet", "own"]
    assert {cell: row["rounds"] for cell, row in rows.items()} == {
        "ddp": 2,
        "nano": 2,
        "broken": 0,
        "quiet": 0,
        "own": 2,
    }
    assert (rows["nano"]["dialect"], rows["nano"]["name"]) == ("nanogpt", "nano")
    assert rows["nano"]["tokens_per_s"] == pytest.approx(1024 / 0.051, rel=0.03)
    assert rows["own"]["tokens_per_s"] == 512
    assert (rows["broken"]["ended"], rows["broken"]["tokens_per_s"]) == ("error", None)
    assert rows["broken"]["cause"].startswith("rank 0: ValueError: [removed]")
    assert any("give --peer-pattern" in flag for flag in rows["quiet"]["flags"])
    (folder,) = (tmp_path / "logs" / "gpt2-smoke-bench").iterdir()
    assert json.loads((folder / "bench.json").read_text())["records"] == page["records"]
    assert SECRET not in (folder / "bench.json").read_text() + done.stdout + done.stderr
    # A failed one is not started again.
    assert {name: len(list((folder / name).iterdir())) for name in ("nano", "broken", "quiet", "own")} == {
        "nano": 2,
        "broken": 1,
        "quiet": 1,
        "own": 2,
    }


@pytest.mark.long
def test_ctrl_c_ends_a_peers_group_and_keeps_finished_rows(tmp_path):
    line = [sys.executable, "-m", "hpc_gpt", "bench", *SMALL, "--rounds", "1", "--json"]
    line += [
        "--peer",
        "fast=echo 7 tok/s",
        "--peer",
        "slow=sleep 300 & echo $!; wait",
        "--peer-pattern",
        r"(\d+) tok/s",
    ]
    said = (tmp_path / "said").open("wb")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    bench = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=said)
    child = _child(tmp_path)
    bench.send_signal(signal.SIGINT)
    out, _ = bench.communicate(timeout=LIMIT_S)
    assert bench.returncode == 130, (tmp_path / "said").read_text()
    assert not _lives(child)
    page = json.loads(out)
    assert [row["cell"] for row in page["rows"]] == ["ddp", "fast"]
    (file,) = (tmp_path / "logs").rglob("bench.json")
    assert json.loads(file.read_text())["records"] == page["records"]


def _child(tmp_path):
    """The pid that the slow peer has printed."""

    def second_line():  # the first one is ours
        logs = (tmp_path / "logs").glob("*/*/slow/*/attempts/1/log")
        return next((lines[1] for log in logs if len(lines := log.read_text().splitlines()) > 1), None)

    return wait_for("the pid of the slow peer", second_line, (tmp_path / "said").read_text)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
