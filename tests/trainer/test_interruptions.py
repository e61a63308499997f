"""Whatever interrupts a run, it saves, says how it ended, and goes on to the same figures, to the last digit."""

import signal
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.trainer.launch import Launch, figures, lines, new_run, settings, train

pytestmark = pytest.mark.xdist_group("train-interruptions")

STEPS = 20
KEYS = (
    "step loss loss_eval bpb grad_norm lr step_s tokens_per_s tokens skipped memory_allocated_gib memory_reserved_gib "
    "save_s eval_s time"
)
LAYOUTS = {"fp32": {"tp": 2, "pp": 2, "dp": 1}, "bf16": {"tp": 1, "pp": 1, "dp": 2}}
RANKS = {"fp32": 4, "bf16": 2}


@pytest.fixture(scope="module", params=[pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, tokens: Path, dtype: str) -> RunFolder:
    """A run that nobody interrupts; its layout and the number of its ranks differ with the arithmetic."""
    run = new_run(tmp_path_factory.mktemp("unbroken"), resolved(tokens, dtype))
    launch = train(run, RANKS[dtype])
    assert launch.ended == ("done", STEPS, False), launch.log
    return run


def resolved(tokens: Path, dtype: str):
    return settings(tokens, LAYOUTS[dtype], dtype=dtype, steps=STEPS, eval_every=7, save_every=10, warmup_steps=5)


def test_every_step_has_its_line(unbroken: RunFolder) -> None:
    found = lines(unbroken)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert {" ".join(line) for line in found} == {KEYS}
    assert [line["step"] for line in found if line["loss_eval"] is not None] == [*range(7, STEPS + 1, 7), STEPS]
    # A save in the background is told with the first step after it is over; the last one is waited for.
    told = [line["step"] for line in found if line["save_s"] is not None]
    assert told[-1] == STEPS
    assert [step for step in told if step < 10] == []
    assert {int(path.name[5:]) for path in unbroken.checkpoints.iterdir()} == {10, 20}
    tokens = unbroken.resolved().batch.global_batch * 32
    assert {line["tokens"] for line in found} == {tokens}
    assert all(line["step_s"] > 0 and line["tokens_per_s"] > 0 for line in found)
    assert found[-1]["loss"] < found[0]["loss"] < 6


def test_interrupted_twice_and_resumed(tmp_path: Path, tokens: Path, unbroken: RunFolder, dtype: str) -> None:
    """SIGUSR2 on one rank, SIGTERM without Slurm, a damaged and a half-written checkpoint: three attempts."""
    run = new_run(tmp_path, resolved(tokens, dtype))
    everyone = range(RANKS[dtype])
    ends = []
    # What a single rank has seen, all agree upon.
    for number, told in ((signal.SIGUSR2, everyone[-1:]), (signal.SIGTERM, everyone)):
        done = len(lines(run))
        # Rank 0 stands still after three steps and the others wait for it in the fourth, so the signal comes to that
        # one, however late the test comes to send it.
        launch = Launch(run, RANKS[dtype], HOLD_AT_LINE="3")
        launch.await_hold()
        launch.signal(number, told)
        launch.await_words(f"rank {told[-1]} has {number.name}")
        launch.signal(signal.SIGCONT, [0])
        assert launch.wait() == [0] * RANKS[dtype], launch.log
        ends.append(launch.ended)
        assert lines(run)[-1]["step"] == launch.ended[1] <= done + 5
    assert [(end, requeue) for end, _, requeue in ends] == [
        ("walltime", False),  # the profile has no queue to go back to
        ("cancelled", False),
    ]
    assert ends[0][1] < ends[1][1] < STEPS

    newest, before = sorted(run.checkpoints.glob("step-*"), reverse=True)[:2]
    damaged = next(newest.glob("states-*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"scribbled")
    (half := run.checkpoints / ".writing-step-00000099").mkdir()
    last = train(run, RANKS[dtype])
    assert last.ended == ("done", STEPS, False), last.log
    assert f"skipping checkpoint {newest}: " in last.log
    assert "CRC-32" in last.log
    assert f"skipping {half}: it was never completed" in last.log
    resumed = int(before.name.removeprefix("step-"))
    assert f"resumed after step {resumed} of {STEPS}" in last.log
    assert not half.exists()

    # Up to the damaged checkpoint every step was done once; those it held were done again, to the same figures.
    again = int(newest.name.removeprefix("step-")) - resumed
    steps = [line["step"] for line in lines(run)]
    assert steps == [*range(1, resumed + again + 1), *range(resumed + 1, STEPS + 1)]
    expected = figures(unbroken)
    found = figures(run)
    assert found == [expected[one[0] - 1] for one in found]
