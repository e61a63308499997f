"""A slow rank in all that shows a run: status, top, why, report and the event of [notify], by heartbeats alone."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.processes.heartbeats import RankHeartbeat, write_heartbeat
from hpc_gpt.core.processes.slow_ranks import slow_ranks
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.attempts.notify import main
from tests.cli.command import in_process
from tests.made_runs import add_attempt, make_run

BEAT = RankHeartbeat(0, "n1", 4711, 9, 40, "training", 0.5, 300.0, 0.0, probe_s=0.010)
LINE = "rank 3 on n2 computes at 0.80 of the median of the other ranks (1,005 MHz, power cap)"


def run_with_a_slow_rank(ended: str | None, told: Path) -> RunFolder:
    run = make_run(logs_dir(), "a100-80g-8", notify__command=f"cat >>{told}", notify__on=["slow"])
    attempt = add_attempt(run, 40, ended, started=time.time() - 100)
    attempt.heartbeats.mkdir()
    slow = {"probe_s": 0.0125, "clock_mhz": 1005.0, "throttle": "power cap"}
    for rank, more in enumerate([{}, {}, {}, slow]):
        beat = replace(BEAT, rank=rank, host=f"n{1 + rank // 2}", time=time.time(), **more)
        write_heartbeat(attempt.heartbeats, beat)
    return run


@pytest.mark.parametrize("ended", ["walltime", "error"])
def test_all_that_shows_a_run_names_its_slow_rank(tmp_path: Path, ended: str) -> None:
    run = run_with_a_slow_rank(ended, tmp_path / "told")
    (status,) = json.loads(in_process("status", run.path, "--json").stdout)["runs"]
    assert status["slow"] == LINE
    assert f"{run.run_id}: {LINE}" in " ".join(in_process("status", run.path).stdout.split())
    assert f"note     {LINE}\n" in in_process("why", run.path).stdout
    (record,) = json.loads(in_process("report", run.path, "--json").stdout)["records"]
    assert dict(zip(record["flags"], record["flag_kinds"], strict=True))[LINE] == "slow_rank"
    for _ in range(2):
        assert main([str(run.path), "1", "beside"]) == 0
    (line,) = (tmp_path / "told").read_text().splitlines()
    event = json.loads(line)
    named = {"event": "slow", "rank": 3, "node": "n2", "share": 0.8, "cause": LINE, "ended": None, "next": "it trains"}
    assert {key: event[key] for key in named} == named


def test_top_names_it_while_it_runs(tmp_path: Path) -> None:
    run = run_with_a_slow_rank(None, tmp_path / "told")
    shown = in_process("top", run.path, code=0).stdout
    assert "at 0.80 of the median of the other ranks" in shown
    assert LINE in shown


@pytest.mark.parametrize(("devices", "slow"), [("HHHL", []), ("HHHH", [3]), ("HLLL", [3]), ("LLHL", [3])])
def test_a_slower_kind_of_card_is_no_slow_rank(devices: str, slow: list[int]) -> None:
    beats = [replace(BEAT, rank=rank, host=f"n{rank}", device=device) for rank, device in enumerate(devices)]
    found = slow_ranks([*beats[:3], replace(beats[3], probe_s=0.0125)])
    assert ([one.rank for one in found.ranks], [*found.nodes]) == (slow, [f"n{rank}" for rank in slow])
