"""A look inside a run on this machine: `top` on a terminal, a slow rank."""

import json
import re
from pathlib import Path

import pytest

from hpc_gpt.core.processes.heartbeats import read_heartbeats
from tests.cli.command import in_process
from tests.launcher.local.conftest import ENDLESS, RESTING, SMALL, status_of, submit, until
from tests.terminal import on_a_terminal
from tests.waiting import wait_for


@pytest.fixture
def endless():
    run = submit(*SMALL, *ENDLESS, "--set", "train.save_every=0", environment=RESTING)
    wait_for("some steps", lambda: (status_of(run).step or 0) > 2)
    return run


@pytest.mark.long
def test_top_ends_with_q(endless):
    run = endless
    code, shown = on_a_terminal("-m", "hpc_gpt", "top", run.run_id, type_in="q", after="heartbeat")
    assert code == 0
    assert re.search(r"running  step \d+/1000000", shown)
    assert status_of(run).state == "running"
    in_process("cancel", run.run_id, "--yes", code=0)
    until(run, "cancelled")


@pytest.mark.long
def test_a_slow_device_is_named_while_its_ranks_train(tmp_path: Path) -> None:
    """Three ranks whose probe command says 10 ms, but rank 2's 13 ms."""
    told = tmp_path / "told"
    command = """[ "$RANK" = 2 ] && echo '{"probe_s": 0.013}' || echo '{"probe_s": 0.010}'"""
    run = submit(
        "demo", "--cluster", "local", "--engine", "ddp", "--gpus", "3", "--tp", "1", "--pp", "1", *ENDLESS,
        *("--set", "data.source=random", "--set", "layout.micro_batches=1", "--set", "train.log_every=50"),
        *("--set", "train.hang_floor_s=20", "--set", f"notify.command=cat >>{told}", "--set", 'notify.on=["slow"]'),
        environment={"HPC_GPT_PROBE_COMMAND": command, "HPC_GPT_SLOW_S": "2", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for("the events are told", lambda: told.exists() and told.read_text().endswith("\n"))
    assert "2 on" in (status_of(run).slow or "")
    wait_for(
        "probes in all heartbeats",
        lambda: all(beat.probe_first_s for beat in read_heartbeats(run.attempt(1).heartbeats).values()),
    )
    in_process("cancel", run.run_id, "--yes", code=0)
    until(run, "cancelled")
    beats = read_heartbeats(run.attempt(1).heartbeats)
    seconds = {0: (0.010, 0.010), 1: (0.010, 0.010), 2: (0.013, 0.013)}
    assert {rank: (beat.probe_s, beat.probe_first_s) for rank, beat in beats.items()} == seconds
    (line,) = told.read_text().splitlines()
    assert (json.loads(line)["rank"], json.loads(line)["share"]) == (2, round(10 / 13, 4))
    (record,) = json.loads(in_process("report", run.path, "--json").stdout)["records"]
    assert record["flag_kinds"].count("slow_rank") == 1
