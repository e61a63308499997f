"""What looks like the field and is of something else: another batch, job, rank, program, set or unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_gpt.readers.logs.read_log import read_log
from hpc_gpt.report.gather import gather_paths
from hpc_gpt.runs.record import Record
from tests.readers.logs.comparable import comparable
from tests.readers.made_logs import dump, iteration, iterations, write_log
from tests.readers.reading import read_log_plainly

JOB_OVER = "slurmstepd: error: *** JOB {} ON node4 CANCELLED AT 2026-03-04T05:06:07 DUE TO TIME LIMIT ***"


def records(tmp_path: Path, *lines: str | list[str]) -> list[Record]:
    return gather_paths([str(write_log(tmp_path / "train.log", *lines))], tmp_path).records


def record(tmp_path: Path, *lines: str | list[str]) -> Record:
    (only,) = records(tmp_path, *lines)
    return only


def ramped(step: int, samples: int, batch: int | None = None) -> str:
    """A line of a step that ends at so many samples."""
    line = iteration(step, batch=batch or 0).replace(f"{16 * step:12d} ", f"{samples:12d} ")
    return line if batch else line.replace("| global batch size:     0 ", "")


def test_the_first_batch_of_a_ramp_is_not_that_of_the_steps_past_it(tmp_path: Path) -> None:
    """Megatron states the first one at its start, and old versions none on the lines of steps."""
    lines = [ramped(4000 + step, 700_000 + 96 * step) for step in range(6)]
    found = record(tmp_path, dump(global_batch_size=96, micro_batch_size=2), "setting global batch size to 32", lines)
    assert (found.global_batch, found.micro_batches) == (96, 24)
    assert any(flag.startswith("the batch was 32 (") for flag in found.flags)


def test_of_a_ramp_that_was_resumed_the_largest_batch_of_the_last_attempt_counts(tmp_path: Path) -> None:
    first, second = [16, 16, 32, 32, 48, 48, 64, 64], [48, 64, 64, 64, 64]
    attempts = []
    for begin, batches in ((1, first), (6, second)):
        total = 0
        for step, batch in enumerate(batches, begin):
            attempts.append(ramped(step, total := total + batch, batch))
    found = record(tmp_path, attempts)
    assert found.global_batch == 64
    assert any("grew during the run, from 16 to 64" in flag for flag in found.flags)


def test_a_batch_size_of_another_program_is_no_micro_batch(tmp_path: Path) -> None:
    """Of Megatron's versions only v1.1.5, with `model_parallel_size`, calls the micro-batch so."""
    arguments = [
        "  batch_size ...................................... 512",
        "  hidden_size ..................................... 768",
    ]
    assert record(tmp_path, arguments, iterations(1, 5)).micro_batch is None
    old = [
        "  model_parallel_size ............................. 2",
        "  world_size ...................................... 2",
    ]
    assert record(tmp_path, arguments, old, iterations(1, 5)).micro_batch == 512


def test_no_micro_batch_follows_from_a_number_of_gpus_that_is_itself_inferred(tmp_path: Path) -> None:
    header = [
        "Gradient Accumulation steps = 4",
        "Total train batch size (w. parallel, distributed & accumulation) = 64",
    ]
    assert record(tmp_path, "+ accelerate launch --num_processes 8 a.py", *header).micro_batch == 2
    assert record(tmp_path, "world size: 8", *header).micro_batch is None


@pytest.mark.parametrize("epoch", ["epoch=2", "epoch: 2", "'epoch': 2"])
def test_the_goal_of_a_bar_of_epochs_is_none_of_steps(tmp_path: Path, epoch: str) -> None:
    bars = [f" {20 * count}%|██   | {count}/5 [10:00<20:00, 300.00s/it, {epoch}, loss=3.125]" for count in (1, 2)]
    found = record(tmp_path, bars)
    assert (found.settings.get("steps_planned"), found.loss_first) == (None, 3.125)
    assert record(tmp_path, [bar.replace("poch", "pass") for bar in bars]).settings["steps_planned"] == 5


def test_two_programs_in_one_log_are_two_runs_each_with_its_memory(tmp_path: Path) -> None:
    titan = [
        f"[titan] 2026-03-04 05:06:{number:02d},123 - root - INFO - step: {number:2d}  loss:  {9 - number / 10:.4f}  "
        "memory: 61.25GiB(77.30%)  tps: 3,210  tflops: 41.00  mfu: 4.10%"
        for number in range(1, 7)
    ]
    memory = (
        "after 2 iterations memory (MB) | allocated: 10.0 | max allocated: 512.0 | reserved: 20.0 | max reserved: 768.0"
    )
    two, one = sorted(
        records(tmp_path, titan, dump()[0], iterations(1, 8), memory), key=lambda each: each.dialect or ""
    )
    assert (one.dialect, one.memory_reserved_gib) == ("torchtitan", [61.25])
    assert (two.dialect, two.memory_reserved_gib) == ("megatron", [0.75])


def test_of_ranks_that_all_print_their_loss_rank_0_is_read_whoever_was_first(tmp_path: Path) -> None:
    ranks = [
        f"[rank{rank}]: step {step} loss {6 - step / 10 + rank / 100:.4f}"
        for step in range(1, 9)
        for rank in (3, 0, 2, 1)
    ]
    found = record(tmp_path, ranks)
    assert (found.loss_first, found.loss_last, found.gpus) == (5.9, 5.2, 4)
    log = tmp_path / "train.log"
    assert [comparable(part) for part in read_log(log).parts] == [
        comparable(part) for part in read_log_plainly(log).parts
    ]


@pytest.mark.parametrize("said", [["JobId=812 "], dump(), ["> setting number of micro-batches to constant 2"]])
def test_in_an_appended_file_the_last_job_has_its_own_id_and_steps(tmp_path: Path, said: list[str]) -> None:
    lines = ["JobId=811 ", *iterations(1, 8), JOB_OVER.format(811), *said, "KeyError: 'x'"]
    found = record(tmp_path, lines)
    assert [(each["job_id"], each["last_step"], each["ended"]) for each in found.attempts] == [
        ("811", 8, "walltime"),
        ("812" if said == ["JobId=812 "] else None, None, "error"),
    ]
    assert found.job_id == found.attempts[-1]["job_id"]
    assert found.ended == "error"


def at(second: float, step: int) -> str:
    return f"2026-03-04 05:06:{second:06.3f} step {step} loss {5 - step / 100:.4f}".replace(".000 ", " ")


def test_times_of_day_that_are_too_coarse_or_held_back_time_no_step(tmp_path: Path) -> None:
    assert record(tmp_path, [at(2 * number, 10 * number) for number in range(6)]).step_s is None, "10 s, exact to 1 s"
    assert record(tmp_path, [at(5 * number, 10 * number) for number in range(6)]).step_s == pytest.approx(0.5)
    held = [at(1.5 + 8.25 * (number // 5), number) for number in range(1, 20)]
    assert record(tmp_path, held).step_s is None, "five lines are written at once"
    assert record(tmp_path, [at(1.5 + 1.25 * number, number) for number in range(1, 20)]).step_s == pytest.approx(1.25)


def test_an_evaluation_of_the_end_is_none_of_training(tmp_path: Path) -> None:
    step, middle = "{'loss': 3.1, 'learning_rate': 1e-4, 'epoch': 1.0}", "{'eval_loss': 2.9, 'epoch': 1.0}"
    summary = (
        "{'train_runtime': 91.5, 'train_samples_per_second': 1.088, 'train_steps_per_second': 0.017, 'epoch': 1.0}"
    )
    last = "{'eval_loss': 2.5, 'epoch': 1.0}"
    assert record(tmp_path, step, middle, summary, last).loss_eval == 2.9
    assert record(tmp_path, step, summary, last).loss_eval == 2.5, "it is the only one"
    subsets = "| epoch 009 | valid on '{}' subset | valid_loss {} | valid_ppl 35.44 | num_updates 24633 | best 6.37"
    fairseq = record(tmp_path, subsets.format("valid", "6.5"), subsets.format("test", "7.5"))
    assert fairseq.loss_eval == pytest.approx(6.5 * 0.6931472)
