"""`job.slow_ranks = "restart"`: ranks of which one is slow save and end, so that the run goes on without its node."""

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_gpt.core.ends.slow_restart import BY_KEY, why_not
from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.checkpoints import list_complete
from hpc_gpt.core.runs.heartbeats import RankHeartbeat
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.slow_ranks import slow_ranks
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.launcher.attempts.decisions import ShownJob, classify, conclude
from hpc_gpt.trainer.measurements import DeviceProbe
from tests.trainer.launch import Launch, new_run, settings

NOW = 1_800_000_000.0
SHOWN = "JobId=4711 JobState=RUNNING EndTime=Unknown NodeList=n[1-3]"
# Rank 1 computes at half the rate.
COMMAND = """[ "$RANK" = 1 ] && echo '{"probe_s": 0.02}' || echo '{"probe_s": 0.01}'"""


def with_key(tokens: Path, limit: str | None = "20:00:00", bad_node_hours: float = 24.0, **train: Any) -> Resolved:
    resolved = settings(tokens, {"tp": 1, "pp": 1, "dp": 3}, **train)
    cluster = replace(resolved.cluster, chain="requeue", bad_node_hours=bad_node_hours)
    job = replace(resolved.job, slow_ranks="restart", time=limit)
    return replace(resolved, job=job, cluster=cluster)


def started(run: RunFolder, at: float, **keys: Any) -> Attempt:
    attempt = run.new_attempt()
    start = {"job_id": "4711", "started": at, "node_list": "n[1-3]", **keys}
    write_once(attempt.folder / "attempt.json", json.dumps(start))
    return attempt


@pytest.mark.long
@pytest.mark.parametrize("save_last", [True, False])
def test_a_slow_rank_saves_and_ends_and_goes_on_elsewhere(tokens: Path, tmp_path: Path, save_last: bool) -> None:
    resolved = with_key(tokens, steps=1_000_000, save_last=save_last)
    run = new_run(tmp_path, resolved)
    attempt = started(run, time.time(), gpus=3)
    launch = Launch(run, 3, attempt, HPC_GPT_PROBE_COMMAND=COMMAND, HPC_GPT_SLOW_S="2", OMP_NUM_THREADS="1")
    launch.wait()
    end = attempt.ended()
    # The median is of two ranks if one of the others has too few probes yet.
    assert end["ended"] == "node_failure"
    assert end["cause"] in {f"{named(end, share)}{BY_KEY}" for share in ("0.50", "0.67")}
    assert [path.name for path in list_complete(run.checkpoints)] == [f"step-{end['step']:08d}"]
    verdict, exclude = conclude(
        run, attempt, resolved, classify(attempt, "error", "exit code 1"), time.time(), attempt.number,
        ShownJob(shown=SHOWN),
    )  # fmt: skip
    assert (verdict.go_on, verdict.attempt_ended, exclude) == (True, "node_failure", [end["node"]])


def named(end: dict[str, Any], share: str = "0.50") -> str:
    return f"rank 1 on {end['node']} computes at {share} of the median of all ranks"


@pytest.mark.parametrize(
    ("keys", "start", "why"),
    [
        ({}, {}, ""),
        ({"limit": None}, {}, ""),
        ({"bad_node_hours": 0.0}, {}, "no spare node, and bad_node_hours = 0 leaves no node out"),
        ({"bad_node_hours": 0.0}, {"node_list": "n[1-2]"}, ""),
        ({"limit": "01:00:00"}, {}, "less than an hour is left before the time limit"),
        ({"limit": "01:00:30"}, {}, ""),
    ],
)
def test_when_a_slow_rank_may_end_an_attempt(
    tokens: Path, tmp_path: Path, keys: dict[str, Any], start: dict[str, Any], why: str
) -> None:
    resolved = on_slurm(with_key(tokens, **keys))
    run = new_run(tmp_path, resolved)
    attempt = started(run, NOW - 10, **{"node_list": "n1", **start})
    assert why_not(run, attempt, resolved, NOW) == why


def on_slurm(resolved: Resolved, **keys: Any) -> Resolved:
    """One node of a cluster."""
    return replace(resolved, cluster=replace(resolved.cluster, scheduler="slurm", **keys))


@pytest.mark.parametrize(
    ("start", "restart_in_job", "why"),
    [
        ({"node_list": "n1"}, None, 'chain = "none" in profile local'),
        ({"node_list": "n[1-2]"}, None, ""),
        ({"node_list": "n[1-2]"}, False, 'chain = "none" in profile local'),
        ({"node_list": "n[1-2]", "job_id": "4711_2"}, None, 'chain = "none" in profile local'),
        ({"node_list": "n[2-3]", "in_job": 1}, None, 'chain = "none" in profile local'),
        ({"node_list": "n[2-4]", "in_job": 1}, None, ""),
    ],
)
def test_without_a_queue_a_slow_rank_needs_a_spare(
    tokens: Path, tmp_path: Path, start: dict[str, Any], restart_in_job: bool | None, why: str
) -> None:
    """An earlier attempt of the job has left out n3."""
    resolved = on_slurm(with_key(tokens), chain="none")
    resolved = replace(resolved, job=replace(resolved.job, restart_in_job=restart_in_job))
    run = new_run(tmp_path, resolved)
    before = started(run, NOW - 100, **{**start, "in_job": 0})
    write_once(before.folder / "next.json", json.dumps({"go_on": True, "cause": "a crash", "exclude": ["n3"]}))
    assert why_not(run, started(run, NOW - 10, **start), resolved, NOW) == why


@pytest.mark.parametrize(("left_s", "why"), [(3599, "less than an hour is left before the time limit"), (3601, "")])
def test_in_an_allocation_its_own_limit_counts(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: int, why: str
) -> None:
    monkeypatch.setenv("HPC_GPT_START", "4711-5")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW) + left_s))
    resolved = on_slurm(with_key(tokens, limit="00:10:00"), chain="none")
    run = new_run(tmp_path, resolved)
    assert why_not(run, started(run, NOW - 10, node_list="n[1-2]"), resolved, NOW) == why


@pytest.mark.parametrize(("hours_ago", "why"), [(23.9, "attempt 1 ended so less than a day ago"), (24.1, "")])
def test_at_most_once_a_day(tokens: Path, tmp_path: Path, hours_ago: float, why: str) -> None:
    resolved = with_key(tokens, limit=None)
    run = new_run(tmp_path, resolved)
    before = started(run, NOW - 200_000, gpus=3)
    note = {"go_on": True, "cause": f"rank 1 on n1 is slow{BY_KEY}", "time": NOW - 3600 * hours_ago}
    write_once(before.folder / "next.json", json.dumps(note))
    assert why_not(run, started(run, NOW - 10, gpus=3), resolved, NOW) == why


def test_the_hour_before_the_limit_is_of_the_job(tokens: Path, tmp_path: Path) -> None:
    resolved = with_key(tokens, limit="02:00:00")
    run = new_run(tmp_path, resolved)
    started(run, NOW - 4000, gpus=3)
    later = started(run, NOW - 10, gpus=3, in_job=1)
    assert why_not(run, later, resolved, NOW) == "less than an hour is left before the time limit"


# A rank's probe: the mean time of a product over a second, on the core that CORES gives for the rank.
PRODUCT = """
import json, os, time
import numpy as np
os.sched_setaffinity(0, {json.loads(os.environ["CORES"])[int(os.environ["RANK"])]})
a, count, began = np.ones((192, 192), np.float32), 0, time.perf_counter()
while time.perf_counter() < began + 1:
    a @ a
    count += 1
print(json.dumps({"probe_s": (time.perf_counter() - began) / count}))
"""
LOAD = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() == int(sys.argv[2]): pass"


@pytest.mark.long
def test_a_rank_beside_a_load_on_its_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share one core in turns, and the third has one with many loads: its product gets a part of it."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("CORES", json.dumps([first, first, second]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setenv("HPC_GPT_SLOW_S", "600")
    monkeypatch.setenv("HPC_GPT_PROBE_COMMAND", f"{shlex.quote(sys.executable)} -c {shlex.quote(PRODUCT)}")
    line = [sys.executable, "-c", LOAD, str(second), str(os.getpid())]
    # Each in a session of its own: Linux shares a core between sessions first.
    loads = [subprocess.Popen(line, start_new_session=True) for _ in range(16)]
    try:
        probes = [DeviceProbe(torch.device("cpu")) for _ in range(3)]
        for _ in range(3):
            for rank, probe in enumerate(probes):
                monkeypatch.setenv("RANK", str(rank))
                probe._ask()
    finally:
        for load in loads:
            load.kill()
            load.wait()
    beats = [
        RankHeartbeat(rank, f"n{rank}", 1, 1, 1, "training", 0.0, 0.0, 0.0, probe_s=probe.result.probe_s)
        for rank, probe in enumerate(probes)
    ]
    assert [slow.rank for slow in slow_ranks(beats).ranks][:1] == [2], [probe.result for probe in probes]
