"""Ranks that hang: a silent one, one in a loop, one that keeps Python's lock; and what only looks like a hang."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.processes.heartbeats import read_heartbeats
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Engine
from tests.trainer.launch import Launch, lines, new_run, settings
from tests.waiting import patient

LONG = 1_000_000
# Seconds without a step that are a hang here; the ranks are watched for five more.
FLOOR_S = patient(8.0)
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 32, "mlp": "swiglu", "bias": "none"}
LAYOUTS = {
    "deepspeed-3d": {"tp": 2, "pp": 2, "dp": 1},
    "ddp": {"tp": 1, "pp": 1, "dp": 2},
    "fsdp": {"tp": 1, "pp": 1, "dp": 2, "ep": 2},
}


def run_of(folder: Path, tokens: Path, engine: str, **train: Any) -> RunFolder:
    shape, train = EXPERTS if engine == "fsdp" else None, {"steps": LONG, "hang_floor_s": FLOOR_S, **train}
    return new_run(folder, settings(tokens, LAYOUTS[engine], Engine(engine), shape, **train))


def hang(launch: Launch) -> dict[str, Any]:
    """Waits until every rank that can has left with 1; ends the one that cannot, as srun and the controller do."""
    launch.await_state(
        lambda: launch.attempt.ended() and sum(rank.is_alive() for rank in launch.ranks) <= 1, "end of all but one"
    )
    left = [rank.exitcode for rank in launch.ranks if not rank.is_alive()]
    for rank in launch.ranks:
        rank.kill()
    launch.wait()
    assert set(left) == {1}, launch.log
    end = launch.attempt.ended()
    assert end["ended"] == "hang", end
    assert end["node"] == "n7"
    assert f"hang: {end['cause']}; stacks in {launch.attempt.stacks}" in launch.log
    return end


def stacks(launch: Launch, rank: int) -> str:
    path = launch.attempt.stacks / f"{rank}.txt"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("engine", "ranks", "silent"), [("ddp", 2, 0), pytest.param("deepspeed-3d", 4, 3, marks=pytest.mark.long)]
)
def test_a_rank_that_cannot_run_is_named_by_its_beat(tmp_path, tokens, engine, ranks, silent):
    """Rank 0 holds the store in which all meet: the others leave without it."""
    launch = Launch(run_of(tmp_path, tokens, engine), ranks, SLURMD_NODENAME="n7")
    launch.await_words("step 4/")
    launch.signal(signal.SIGSTOP, [silent])
    end = hang(launch)
    assert end["rank"] == silent
    words = rf"no rank made a step for \d+ s; rank {silent} on n7 is silent, last seen after step \d+"
    assert re.match(words, end["cause"]), end
    assert re.search(r"; ranks? [\d, -]+ waits? in (the )?(all_reduce|recv|send|broadcast|backward)", end["cause"]), end
    assert re.search(r"; flight recorder: gloo:\w.* is open on rank", end["cause"]), end
    for rank in range(ranks):
        dump = stacks(launch, rank)
        assert ("in train_step" in dump or "loop.py" in dump) is (rank != silent)
        assert f"rank {rank} on n7, pid {launch.ranks[rank].pid}: no step for" in dump or rank == silent


def test_a_rank_in_a_loop_is_named_by_its_stack(tmp_path: Path, tokens: Path) -> None:
    launch = Launch(run_of(tmp_path, tokens, "ddp"), 2, SLURMD_NODENAME="n7", HANG="1 loop")
    launch.await_state(lambda: not launch.ranks[1].is_alive(), "end of the rank by its own watchdog")
    end = hang(launch)
    assert launch.ranks[1].exitcode == 1
    assert end["rank"] == 1
    words = r"; rank 1 on n7 is (in no collective|behind), after step \d+.*, at .*in stand_still"
    assert re.search(words, end["cause"]), end
    assert "in stand_still" in stacks(launch, 1)


@pytest.mark.long
def test_a_rank_that_sends_no_rows_to_experts_is_named(tmp_path: Path, tokens: Path) -> None:
    launch = Launch(run_of(tmp_path, tokens, "fsdp"), 2, SLURMD_NODENAME="n7", HANG="1 rows")
    end = hang(launch)
    assert end["rank"] == 1
    assert "Warning" not in launch.log
    cause = end["cause"]
    assert re.search(r"; rank 1 on n7 is in no collective, after step \d+.*, at .*in keep_rows; ", cause), end
    assert re.search(r"; rank 0 waits in all_to_all_single after step \d+ \(dispatch.py:\d+ in route\)", cause), end
    assert re.search(r"; flight recorder: gloo:all_to_all \d+ of group ep, .* is open on rank 0", cause), end


@pytest.mark.long
def test_a_rank_that_keeps_pythons_lock_leaves_its_stack(tmp_path: Path, tokens: Path) -> None:
    launch = Launch(run_of(tmp_path, tokens, "ddp"), 2, SLURMD_NODENAME="n7", HANG="0 lock")
    end = hang(launch)
    assert end["rank"] == 0
    assert "rank 0 on n7 is silent" in end["cause"]
    assert "rank 0 holds Python's lock at" in end["cause"]
    assert "in stand_still" in end["cause"]
    assert "in stand_still" in stacks(launch, 0)


@pytest.mark.long
def test_a_long_evaluation_and_a_stopped_job_are_no_hang(tmp_path: Path, tokens: Path) -> None:
    run = run_of(tmp_path, tokens, "deepspeed-3d", eval_every=8)
    launch = Launch(run, 4, LONG_EVALUATION_S=str(FLOOR_S + 10), SLURMD_NODENAME="n7")
    launch.await_words("loss_eval")
    at = max(line["step"] for line in lines(run))
    launch.signal(signal.SIGSTOP)
    time.sleep(FLOOR_S + 10)  # longer than it takes to find a hang
    launch.signal(signal.SIGCONT)
    launch.await_state(lambda: max(line["step"] for line in lines(run)) > at + 4, "steps after the pause")
    beats = read_heartbeats(launch.attempt.heartbeats)
    assert sorted(beats) == [0, 1, 2, 3]
    assert {beat.host for beat in beats.values()} == {"n7"}
    assert [beat.pid for _, beat in sorted(beats.items())] == [rank.pid for rank in launch.ranks]
    launch.signal(signal.SIGINT)
    assert launch.wait() == [0] * 4, launch.log
    assert launch.ended[0] == "stopped"
    assert not launch.attempt.stacks.exists()
