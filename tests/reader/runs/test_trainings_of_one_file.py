"""A file to which several trainings wrote: each is a record, attempts and epochs of one are not."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.reader.runs.foreign import read_foreign
from hpc_gpt.reader.runs.grouping import group_logs
from tests.cli.command import in_process
from tests.reader.reading import read_log_plainly


def loss_at(step: float, begin: float = 10.8) -> float:
    return 3.0 + (begin - 3.0) * math.exp(-step / 700)


def nanogpt(last: int, first: int = 0) -> list[str]:
    lines = []
    for step in range(first, last + 1, 100):
        if step % 500 == 0:
            lines.append(f"step {step}: train loss {loss_at(step):.4f}, val loss {loss_at(step) + 0.1:.4f}")
        lines.append(f"iter {step}: loss {loss_at(step):.4f}, time {last / 10:.2f}ms, mfu 31.20%")
    return lines


def openpi(last: int, first: int = 0) -> list[str]:
    return [
        f"11:42:{step // 100 % 60:02d}.123 [I] Step {step}: grad_norm=0.2113, loss={loss_at(step) / 10:.4f}, "
        "param_norm=1802.3312 (4711:train.py:273)"
        for step in range(first, last + 1, 100)
    ]


def own_loop(last: int, first: int = 100, offset: int = 0) -> list[str]:
    return [
        f"step {step} | loss {loss_at(step + offset):.4f} | lr 3.0e-04 | {last / 10:.1f} ms/step"
        for step in range(first, last + 1, 100)
    ]


def megatron(last: int, first: int = 100) -> list[str]:
    return [
        f" iteration {step:8d}/   90000 | consumed samples: {step * 64:12d} | elapsed time per iteration (ms): 812.5 | "
        f"learning rate: 1.500E-04 | global batch size:    64 | lm loss: {loss_at(step):.6E} | loss scale: 1.0 | "
        "grad norm: 1.204 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        for step in range(first, last + 1, 100)
    ]


def epochs(*lengths: int, stated: bool = False) -> list[str]:
    lines, before = [], 0
    for epoch, length in enumerate(lengths, 1):
        named = f"Epoch {epoch}/{len(lengths)} " if stated else ""
        lines += [f"{named}step {n} loss {loss_at(before + n):.4f} time 0.25s" for n in range(50, length + 1, 50)]
        before += length
    return lines


def epochs_of_mmengine(*lengths: int) -> list[str]:
    return [
        f"2025/03/01 12:{epoch:02d}:{n // 50:02d} - mmengine - INFO - Epoch(train)  [{epoch}][{n:4d}/{length}]  "
        f"lr: 1.0000e-04  eta: 1:10:0{epoch}  time: 0.3120  data_time: 0.0041  memory: 9120  loss: {loss_at(n):.4f}"
        for epoch, length in enumerate(lengths, 1)
        for n in range(50, length + 1, 50)
    ]


def epochs_of_detectors(*lengths: int) -> list[str]:
    return [
        f"Epoch: [{epoch}]  [{n:4d}/{length}]  eta: 0:03:11  lr: 0.000100  loss: {loss_at(n):.4f} ({loss_at(n):.4f})  "
        "time: 0.4120  data: 0.0031  max mem: 9120"
        for epoch, length in enumerate(lengths)
        for n in range(0, length, 50)
    ]


FAILED = ["Traceback (most recent call last):", '  File "train.py", line 9, in <module>', "ValueError: bad sample 17"]
LIMIT = ["slurmstepd: error: *** JOB 4711 ON n17 CANCELLED AT 2025-03-01T12:00:00 DUE TO TIME LIMIT ***"]
LENGTHS = (3900, 4900, 5900, 6900)


def attempts_of(lines: list[str], folder: Path) -> list[list[int]]:
    """The last step of each attempt of each record, read in blocks and line by line."""
    log = folder / "a.log"
    log.write_text("\n".join(lines) + "\n")
    found = []
    for parts in (read_log(log).parts, read_log_plainly(log).parts):
        records = [read_foreign(run, str(n)).record for n, run in enumerate(group_logs([(log, parts)]))]
        found.append([[attempt["last_step"] for attempt in record.attempts] for record in records])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("program", [nanogpt, openpi, own_loop])
def test_trainings_one_after_the_other_are_records(program: Callable[[int], list[str]], tmp_path: Path) -> None:
    lines = [line for last in LENGTHS for line in program(last)]
    assert attempts_of(lines, tmp_path) == [[last] for last in LENGTHS]


@pytest.mark.parametrize(
    ("lines", "last_steps"),
    [
        (own_loop(200) + own_loop(15_300), [[200], [15_300]]),
        (megatron(200) + megatron(15_300), [[200], [15_300]]),
        # Trials of one length: the loss begins where the first one's began.
        (own_loop(2000) * 3, [[2000]] * 3),
        (nanogpt(2000) * 2 + nanogpt(1500), [[2000], [2000], [1500]]),
        # The loss goes on, but the lengths differ, and nothing names an epoch.
        (own_loop(2000) + own_loop(2600, offset=2000), [[2000], [2600]]),
    ],
)
def test_a_training_from_zero_without_a_failure_is_another(
    lines: list[str], last_steps: list[list[int]], tmp_path: Path
) -> None:
    assert attempts_of(lines, tmp_path) == last_steps


@pytest.mark.parametrize(
    ("lines", "last_steps"),
    [
        # The next start of a training that failed, was ended, resumes, or begins within what was trained.
        (megatron(1500) + LIMIT + megatron(5000, first=1100), [[1500, 5000]]),
        (megatron(1500) + megatron(5000, first=1100), [[1500, 5000]]),
        (own_loop(1500) + FAILED + own_loop(5000), [[1500, 5000]]),
        ([*nanogpt(1500), "Resuming training from out/ckpt.pt", *nanogpt(5000)], [[1500, 5000]]),
        (openpi(1500) + LIMIT + openpi(5000), [[1500, 5000]]),
        # Ranks whose lines came out of buffers one after the other.
        (["Distributed world size: 4", *own_loop(2000) * 4], [[2000]]),
        (["using world size: 4, data-parallel-size: 4", *megatron(1500) * 2], [[1500]]),
        # Epochs: with their number of any length, without it of one length, and the log may end within the last.
        (epochs(500, 500, 430, stated=True), [[1400]]),
        (epochs(500, 420, 610, stated=True), [[1500]]),
        (epochs_of_mmengine(500, 500, 450), [[1450]]),
        (epochs_of_detectors(500, 500, 400), [[1350]]),
        (epochs(500, 500, 500), [[1500]]),
        (epochs(500, 500, 150), [[1150]]),
    ],
)
def test_another_start_and_an_epoch_are_not_another_training(
    lines: list[str], last_steps: list[list[int]], tmp_path: Path
) -> None:
    assert attempts_of(lines, tmp_path) == last_steps


def test_each_training_has_its_own_figures(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("\n".join(line for last in LENGTHS for line in nanogpt(last)))
    log = tmp_path / "a.log"
    text = in_process("report", log, code=0).stdout
    assert [name in text for name in ("a#2", "a#3", "a#4", "a#5")] == [True, True, True, False]
    records = json.loads(in_process("report", log, "--json", code=0).stdout)["records"]
    for record, last in zip(records, LENGTHS, strict=True):
        # The evaluation before the first step of the next training is not this one's last.
        last_eval = loss_at(last - last % 500) + 0.1
        figures = (record["step_s"], record["loss_first"], record["loss_last"], record["loss_eval"])
        assert figures == pytest.approx((last / 10_000, loss_at(0), loss_at(last), last_eval), rel=1e-3)
    compared = in_process("compare", f"{log}#1", f"{log}#2", code=0).stdout
    assert "a#2" in compared
    lines = json.loads(in_process("why", f"{log}#2", "--json").stdout)["lines"]
    assert lines[-1]["text"].startswith(nanogpt(4900)[-1])
    pages = in_process("report", f"{log}#3", "--html", tmp_path / "page.html")
    assert pages.code == 0, pages.stderr
    assert "a#3" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("failed", [False, True])
def test_trainings_at_the_same_time_have_no_curve(failed: bool, tmp_path: Path) -> None:
    printed = [
        (seconds * step, f"step {step}/12 | loss {9 - step / 4 + seconds:.4f} | lr 1e-4")
        for seconds in (1.0, 1.2, 1.5)
        for step in range(1, 13)
    ]
    lines = [line for _, line in sorted(printed)]
    lines[20:20] = FAILED if failed else []
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    (run,) = group_logs([(tmp_path / "a.log", read_log(tmp_path / "a.log").parts)])
    read = read_foreign(run, "a")
    assert (len(read.steps), read.record.loss_last, read.record.step_s) == (0, None, None)
    assert any("several trainings at once" in str(flag) for flag in read.record.flags)
    assert read.record.ended == ("error" if failed else "unknown")
    assert ("ValueError: bad sample 17" if failed else "several trainings at once") in str(read.record.cause)
