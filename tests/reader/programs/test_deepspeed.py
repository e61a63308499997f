"""DeepSpeed's overflows: a line of its own says that the step of the next line was skipped."""

from hpc_gpt.reader.runs.log_steps import run_steps
from tests.reader.reading import read_lines

TIMER = (
    "[2023-07-25 21:03:17,269] [INFO] [timer.py:215:stop] epoch=0/micro_step=34/global_step=34,"
    " RunningAvgSamplesPerSec=7.864669709950182, CurrSamplesPerSec=8.00912418308922, MemAllocated=59.65GB,"
    " MaxMemAllocated=63.31GB"
)
OVERFLOW = (
    "[2023-07-25 21:03:18,000] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step."
    " Attempted loss scale: 65536, reducing to 32768"
)


def test_an_overflow_skips_the_step_of_the_next_line() -> None:
    later = TIMER.replace("step=34", "step=44").replace("21:03:17", "21:04:17")
    other_rank = OVERFLOW.replace("Rank 0", "Rank 3")
    steps = run_steps([read_lines("log", [TIMER, OVERFLOW, other_rank, OVERFLOW, later])])
    assert (steps.dialect, steps["skipped"].tolist()) == ("deepspeed_throughput", [0, 2])


def test_an_overflow_alone_is_no_step() -> None:
    (part,) = read_lines("log", [OVERFLOW])
    assert len(run_steps([[part]])) == 0
    assert part.steps["deepspeed_overflow"].totals["skipped"] == 1
