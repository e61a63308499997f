"""A bar within a step of another: an evaluation, whose total and steps are not the training's."""

from pathlib import Path

import pytest

from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.reader.runs.foreign import read_foreign
from hpc_gpt.reader.runs.grouping import group_logs
from tests.reader.reading import read_log_plainly

TRAINER = ["{'loss': 2.5, 'grad_norm': 1.1, 'learning_rate': 1e-05, 'epoch': 0.04}"]
LOOP = [f"step {step} | loss {3 - step / 100:.3f} | lr 1e-4" for step in range(1, 4)]
AXOLOTL = ["[2025-03-01 12:00:00,123] [INFO] [axolotl.train.train:210] [PID:4711] Starting trainer..."]


def bar(step: int, total: int, begun_s: float = 0, step_s: float = 2.0, name: str = "") -> str:
    seconds, left = int(begun_s + step * step_s), int((total - step) * step_s)
    clocks = f"{seconds // 60:02d}:{seconds % 60:02d}<{left // 60:02d}:{left % 60:02d}"
    return (
        f"{name}{100 * step // total:3d}%|{'█' * (10 * step // total):10}| {step}/{total} [{clocks},  {step_s:.2f}s/it]"
    )


def training(last: int, total: int, batches: int, every: int, name: str = "") -> list[str]:
    """A bar of a training in which a bar of an evaluation is drawn every so many steps."""
    lines, paused_s = [], 0.0
    for step in range(last + 1):
        lines.append(bar(step, total, paused_s))
        if step and step % every == 0:
            lines += [bar(batch, batches, step_s=0.1, name=name) for batch in range(0, batches + 1, 6)]
            paused_s += batches * 0.1
    return lines


def end_of(lines: list[str], folder: Path) -> tuple[int | None, int | None, str | None]:
    """(last step, planned steps, cause), of a log read in blocks and line by line."""
    log = folder / "a.log"
    log.write_text("\n".join(lines) + "\n", newline="")
    found = []
    for parts in (read_log(log).parts, read_log_plainly(log).parts):
        (run,) = group_logs([(log, parts)])
        record = read_foreign(run, "a").record
        cause = (record.cause or "").partition(" (")[0]
        found.append((record.attempts[-1]["last_step"], record.settings.get("steps_planned"), cause))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("program", [TRAINER, AXOLOTL, []])
@pytest.mark.parametrize(
    ("bars", "last", "planned"),
    [
        (training(110, 126, batches=474, every=25), 110, 126),
        (training(50, 126, batches=474, every=25), 50, 126),  # the log ends in an evaluation
        ([*training(126, 126, batches=474, every=25), *[bar(n, 474, step_s=0.1) for n in range(475)]], 126, 126),
        (training(60, 900, batches=60, every=20), 60, 900),
        (training(60, 126, batches=474, every=25, name="Evaluating: "), 60, 126),
        # Bars one after the other: of the data, then of the steps.
        ([*[bar(n, 5000, step_s=0.002) for n in range(0, 5001, 500)], *training(60, 126, 474, every=25)], 60, 126),
    ],
)
def test_a_bar_within_a_step_is_an_evaluation(
    program: list[str], bars: list[str], last: int, planned: int, tmp_path: Path
) -> None:
    last_step, total, cause = end_of([*program, *bars], tmp_path)
    assert (last_step, total) == (last, planned)
    assert last == planned or cause == f"the log ends at step {last} of {planned}"


def test_a_bar_of_epochs_is_not_that_of_the_steps(tmp_path: Path) -> None:
    lines = [
        line
        for epoch in range(3)
        for line in (bar(epoch, 3, step_s=1800.0), *(bar(step, 900) for step in range(0, 901, 9)))
    ]
    assert end_of([*TRAINER, *lines], tmp_path)[:2] == (900, 900)


def test_a_last_step_above_the_total_is_not_stated_with_it(tmp_path: Path) -> None:
    lines = ["  Total optimization steps = 126", *(line.replace("step ", "step 20") for line in LOOP)]
    assert " of 126" not in str(end_of([*TRAINER, *lines], tmp_path)[2])
