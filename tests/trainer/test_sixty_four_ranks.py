"""Sixty-four real ranks, of which one is killed, and which resume; 40 MB each, as all are forked from one process."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.network import files_of_first
from hpc_gpt.core.processes.heartbeats import read_heartbeats
from hpc_gpt.core.settings.experiment import Engine
from tests.trainer import launch
from tests.trainer.launch import Launch, lines, new_run, settings
from tests.waiting import patient

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
RANKS, STEPS = 64, 12


def test_they_train_lose_one_and_resume(tmp_path: Path, tokens: Path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "LOCAL", replace(launch.LOCAL, gpus_per_node=RANKS))
    sizes = {"tp": 2, "pp": 2, "dp": 16, "micro_batch": 1, "micro_batches": 1}
    run = new_run(tmp_path, settings(tokens, sizes, Engine("deepspeed-3d"), steps=STEPS, save_every=4))
    first = Launch(run, RANKS, RES_OPTIONS="timeout:1 attempts:1 use-vc")
    first.await_words("saved after step 4")
    first.signal(signal.SIGSTOP, [37])  # nobody trains on while their memory is read
    pid = first.ranks[0].pid
    files = len(os.listdir(f"/proc/{pid}/fd"))
    limits = next(line.split() for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "open files" in line)
    private = [memory_mib(rank.pid) for rank in first.ranks]
    print(f"rank 0 has {files} files open, limits {limits[3:5]}, {sum(private):.0f} MiB not shared")
    assert limits[3] == limits[4], "the soft limit is the hard one"
    assert 3 * RANKS < files < files_of_first(RANKS)
    first.signal(signal.SIGKILL, [37])
    codes = first.wait()
    assert codes[37] == -signal.SIGKILL
    assert 0 not in codes, "nobody is left, and nobody ends well"
    again = Launch(run, RANKS, RES_OPTIONS="timeout:1 attempts:1 use-vc")
    assert again.wait() == [0] * RANKS, again.log[-3000:]
    assert again.ended == ("done", STEPS, False)
    assert "resumed after step " in again.log
    assert sorted({line["step"] for line in lines(run)}) == list(range(1, STEPS + 1))


def test_one_on_eight_nodes_that_cannot_run_is_named(tmp_path: Path, tokens: Path, monkeypatch) -> None:
    """It is the first of its node, which wrote for the node's other ranks; they write themselves now."""
    monkeypatch.setattr(launch, "LOCAL", replace(launch.LOCAL, gpus_per_node=RANKS))
    sizes = {"tp": 1, "pp": 1, "dp": RANKS, "micro_batch": 1, "micro_batches": 1}
    run = new_run(tmp_path, settings(tokens, sizes, steps=10**6, hang_floor_s=patient(20.0)))
    nodes = {
        "LOCAL_RANK": "{local}",
        "SLURMD_NODENAME": "n{node}",
        "COUNT_OPENS_IN": f"{tmp_path}/calls-{{rank}}:{run.path}",
    }
    training = Launch(run, RANKS, RES_OPTIONS="timeout:1 attempts:1 use-vc", **nodes)
    training.await_words("step 12/")
    beats = training.attempt.heartbeats
    files = {int(path.stem) for path in beats.glob("*.json")}
    print(f"{len(files)} files with heartbeats")  # more than 8 if a first rank had not answered for some seconds
    assert set(range(0, RANKS, 8)) <= files
    assert sorted(read_heartbeats(beats)) == list(range(RANKS))
    training.signal(signal.SIGSTOP, [32])
    training.await_state(lambda: bool(training.attempt.ended()), "verdict")
    training.await_state(lambda: sum(rank.is_alive() for rank in training.ranks) == 1, "end of the others")
    training.ranks[32].kill()
    codes = training.wait()
    assert codes[:32] + codes[33:] == [1] * (RANKS - 1)
    end = training.attempt.ended()
    assert (end["ended"], end["rank"], end["node"]) == ("hang", 32, "n4"), end
    assert "; rank 32 on n4 is silent, last seen after step" in end["cause"]


def memory_mib(pid: int) -> float:
    found = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in found if line.startswith("Private")) / 1024
