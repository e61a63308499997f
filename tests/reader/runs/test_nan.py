"""NaN steps: of which lines they are, what a report and `why` say of them, and what is none."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpc_gpt.reader.failures.live_lines import LiveLines
from hpc_gpt.reader.runs.attempt_cause import read_cause
from hpc_gpt.reader.runs.own_run import read_own
from hpc_gpt.report.gather import read_one
from hpc_gpt.report.why import Why, explain
from tests.cli.command import in_process
from tests.made_runs import add_attempt, make_run, metrics_line


def megatron(step: int, loss: str = "", norm: str = "1.130", skipped: int = 0, nan: int = 0, scale: float = 1.0) -> str:
    lost = f" lm loss: {loss} |" if loss else ""
    return (
        f" [2025-06-02 11:20:{step:02d}] iteration {step:8d}/     200 | consumed samples: {step * 32:12d} |"
        f" elapsed time per iteration (ms): 640.5 | learning rate: 2.000000E-04 | global batch size:    32 |{lost}"
        f" loss scale: {scale} | grad norm: {norm} | number of skipped iterations: {skipped:3d} |"
        f" number of nan iterations: {nan:3d} |"
    )


def sound(step: int) -> str:
    return megatron(step, f"{8 - step / 10:.6E}")


def titan(step: int, loss: str = "7.1020", norm: str = "2.1") -> str:
    return (
        f"[titan] 2025-06-02 11:20:{step:02d},100 - root - INFO - step: {step:2d}  loss:  {loss}  grad_norm:  {norm}"
        "  memory: 20.10GiB(25.31%)  tps: 8,010  tflops: 50.11  mfu: 16.21%"
    )


def hf(step: int, loss: str = "2.5", norm: str = "1.1") -> str:
    return f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 2e-05, 'epoch': {step / 50:.2f}}}"


OVERFLOW = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 32768, reducing to 16384"
TRACEBACK = "Traceback (most recent call last):\nRuntimeError: a tensor of the loss is odd"
LIMIT = "slurmstepd: error: *** JOB 4811 ON n12 CANCELLED AT 2025-06-02T11:30:00 DUE TO TIME LIMIT ***"
FEW = range(1, 8)

# name -> (lines, since which step or line, how many lines of NaN)
ENDS_WITH_NAN: dict[str, tuple[list[str], str, int]] = {
    "a loss of nan": ([*map(sound, FEW), *(megatron(step, "nan") for step in (8, 9))], "step 8", 2),
    "a loss of INF": ([*map(sound, FEW), megatron(8, "INF", "inf")], "step 8", 1),
    "an infinite loss": ([*map(titan, FEW), *(titan(step, "-Infinity") for step in (8, 9))], "step 8", 2),
    "a gradient norm alone": ([*map(titan, FEW), *(titan(step, norm="nan") for step in (8, 9, 10))], "step 8", 3),
    "no loss": ([*map(sound, FEW), *(megatron(step, norm="0.000") for step in (8, 9))], "step 8", 2),
    "no loss of a mixture": (
        [
            *(megatron(step, f"{8 - step / 10:.6E} | load_balancing_loss: 1.04E+00") for step in FEW),
            *(megatron(step, norm="0.000") for step in (8, 9)),
        ],
        "step 8",
        2,
    ),
    "no loss, and counted": ([sound(1), *(megatron(step, skipped=1, nan=1) for step in (2, 3))], "step 2", 2),
    "HF's loss of 0.0": ([*map(hf, FEW), *(hf(step, "0.0", "nan") for step in (8, 9))], "line 8", 2),
    "HF's, in quotes": ([*map(hf, FEW), *(hf(step, "'0.0'", "'nan'") for step in (8, 9))], "line 8", 2),
    "nanoGPT's": ([f"iter {step}: loss {'nan' if step > 5 else 3.5}, time 99.00ms" for step in FEW], "step 6", 2),
    "an unknown program's": ([f"step {step} | loss {'NaN' if step > 5 else 3.5}" for step in FEW], "step 6", 2),
    "from the first step": ([megatron(step, "nan") for step in FEW], "step 1", 7),
    "a step that the scaler skips after it": (
        [*map(sound, FEW), megatron(8, "nan"), megatron(9, skipped=1, scale=2048.0)],
        "step 8",
        1,
    ),
    "a NaN before a finite step, and one after it": (
        [*map(sound, (1, 2, 3)), megatron(4, "nan"), sound(5), megatron(6, "nan")],
        "step 6",
        2,
    ),
    "a traceback after it": ([*map(sound, FEW), megatron(8, "nan"), TRACEBACK], "step 8", 1),
    "a last step that is said to be the last": (
        [*map(titan, FEW), titan(8, "nan"), "[titan] 2025-06-02 11:20:59,100 - root - INFO - Training completed"],
        "step 8",
        1,
    ),
}
# name -> (lines, how many lines of NaN)
DOES_NOT: dict[str, tuple[list[str], int]] = {
    "skipped at the start": ([*(megatron(step, skipped=1) for step in (1, 2)), *map(sound, (3, 4, 5))], 0),
    "skipped in the middle": ([*map(sound, (1, 2, 3)), megatron(4, norm="inf", skipped=1), *map(sound, (5, 6))], 0),
    "skipped as the last line": ([*map(sound, FEW), megatron(8, skipped=1, scale=1024.0)], 0),
    "skipped, with a gradient norm": ([*map(sound, FEW), megatron(8, "7.1E+00", "nan", skipped=1)], 0),
    "DeepSpeed's overflow": ([*map(titan, FEW), OVERFLOW, titan(8, norm="inf")], 0),
    "one gradient norm alone, at the end": ([*map(titan, FEW), titan(8, norm="nan")], 1),
    "one gradient norm alone, of HF": ([*map(hf, FEW), hf(8, "2.4", "nan")], 1),
    "one gradient norm alone, of Megatron": ([*map(sound, FEW), megatron(8, "7.1E+00", "nan")], 1),
    "a finite step after it": ([*map(sound, FEW), megatron(8, "nan"), megatron(9, norm="nan"), sound(10)], 2),
    "a loss now and then": (
        [sound(1), *(megatron(step) for step in (2, 3)), sound(4), *(megatron(step) for step in (5, 6))],
        0,
    ),
    "a loss now and then, at first in all": ([*map(sound, (1, 2)), megatron(3), sound(4), megatron(5), megatron(6)], 0),
}


def read(lines: list[str], folder: Path) -> tuple[Why, dict]:
    (log := folder / "a.log").write_text("\n".join(lines) + "\n")
    return explain(str(log), folder), read_one(str(log), folder).record.to_tables()


@pytest.mark.parametrize("name", ENDS_WITH_NAN)
def test_a_log_that_ends_with_nan(name: str, tmp_path: Path) -> None:
    lines, since, count = ENDS_WITH_NAN[name]
    why, record = read(lines, tmp_path)
    assert (why.ended, record["ended"], record["nan_steps"]) == ("nan", "nan", count)
    assert why.text == f"nan since {since}"
    assert record["loss_last"] == (7.102 if name == "a gradient norm alone" else None)
    assert any("not a number" in flag for flag in record["flags"])


@pytest.mark.parametrize("name", DOES_NOT)
def test_a_log_that_does_not(name: str, tmp_path: Path) -> None:
    lines, count = DOES_NOT[name]
    why, record = read(lines, tmp_path)
    assert (why.ended, record["nan_steps"] or 0) == ("unknown", count)
    assert record["loss_last"] is not None
    assert any("not a number" in flag for flag in record["flags"]) is bool(count)


@pytest.mark.parametrize("line", [titan, hf, megatron])
def test_a_gradient_norm_of_nan_takes_no_loss(line: Callable[..., str], tmp_path: Path) -> None:
    losses = {1: "9.25", 2: "8.5", 3: "8.0", 4: "7.5"}
    lines = [line(step, loss, *(["nan"] if step in (1, 4) else [])) for step, loss in losses.items()]
    _, record = read(lines, tmp_path)
    assert (record["loss_first"], record["loss_last"], record["nan_steps"]) == (9.25, 7.5, 2)


def test_another_known_end_keeps_its_class(tmp_path: Path) -> None:
    why, record = read([*map(sound, FEW), megatron(8, "nan"), LIMIT], tmp_path)
    assert (why.ended, record["loss_last"]) == ("walltime", None)


def test_the_table_shows_it(tmp_path: Path) -> None:
    read([*map(sound, FEW), megatron(8, "nan")], tmp_path)
    assert "7.900 -> nan" in in_process("report", tmp_path / "a.log").stdout


def nan_at_end(line: dict) -> None:
    line["loss"] = math.nan


def norm_at_end(line: dict) -> None:
    line["grad_norm"] = math.inf


def lost_at_end(line: dict) -> None:
    line.update(loss=None, skipped=True, nan=1)


@pytest.mark.parametrize("change", [nan_at_end, norm_at_end, lost_at_end])
def test_an_attempt_that_ends_with_nan(change: Callable[[dict], None], tmp_path: Path) -> None:
    lines = [metrics_line(step) for step in range(1, 12)]
    change(lines[-1]), change(lines[-2])
    run = make_run(tmp_path)
    attempt = add_attempt(run, lines, "nan")
    assert (read_cause(attempt).ended, read_cause(attempt).cause) == ("nan", "nan since step 10")
    read = read_own(run)
    assert read.record.nan_steps == 2
    assert (read.record.to_tables()["loss_last"] is None) is (change is not norm_at_end)
    assert np.flatnonzero(read.steps.nan).tolist() == [9, 10]
    assert str(read.record.cause).startswith("nan since step 10")


def test_a_programs_line_without_a_loss_is_no_nan_step(tmp_path: Path) -> None:
    lines = [metrics_line(step, loss=3.0 if step % 3 == 1 else None) for step in range(1, 12)]
    run = make_run(tmp_path, engine__name="megatron-lm")
    attempt = add_attempt(run, lines, "done")
    assert read_cause(attempt).ended == "unknown"
    record = read_own(run).record
    assert (record.nan_steps, record.loss_last, record.steps_used) == (0, 3.0, 10)


def test_live_lines_leave_a_skipped_step_to_the_next_row() -> None:
    live = LiveLines()
    found = [live.take(line) for line in (OVERFLOW, titan(8, norm="inf"), titan(9))]
    assert [row and row.get("skipped") for row in found] == [None, 1.0, None]


def test_a_job_script_that_ends_with_nan(tmp_path: Path) -> None:
    lines = "".join(f"echo 'step {step} loss {'nan' if step > 4 else 3.5}'\n" for step in range(1, 8))
    (tmp_path / "train.slurm").write_text(f"#!/bin/bash\n#SBATCH -N1\n{lines}")
    own = {"HPC_GPT_LOGS": str(tmp_path / "logs")}
    in_process("submit", "--cluster", "local", "--wait", "train.slurm", cwd=tmp_path, environment=own)
    found = json.loads(in_process("why", "--json", environment=own).stdout)
    assert (found["ended"], found["cause"]) == ("nan", "nan since step 5")
