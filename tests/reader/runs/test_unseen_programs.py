"""Logs of programs that no dialect knows, with several starts or an end: DiT, MindFormers, PaddleNLP, tf.estimator."""

from pathlib import Path

import pytest

from hpc_gpt.report.gather import gather_paths

# {program: a line, of a step, its loss and a second}
FORMS = {
    "DiT": "[2026-01-05 08:{2:02}:{3:02}] (step={0:07d}) Train Loss: {1:.4f}, Train Steps/Sec: 20.00",
    "MindFormers": "{{ step:[{0:5d}/ 6500], loss: {1:10.6f}, per_step_time:     50ms, lr: 1.000000e-05 }}",
    "PaddleNLP": "[2026-01-05 08:{2:02}:{3:02},459] [    INFO] - global step {0}, epoch: 0, batch: {0}, loss: {1:.9f},"
    " avg_reader_cost: 0.00024 sec, avg_batch_cost: 0.05000 sec, speed: 20.0 step/s, learning rate: 4.60000e-05",
    "tf.estimator": "INFO:tensorflow:loss = {1:.5f}, step = {0} (5.000 sec)",
}
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/w/train.py", line 205, in main',
    "    batch = next(loader)",
    "KeyError: 'input_ids'",
)
each_program = pytest.mark.parametrize("form", FORMS.values(), ids=[*FORMS])


def steps(form: str, first: int, last: int, minute: int = 0) -> list[str]:
    return [
        form.format(100 * number, 9 - number / 20, minute + number // 12, 5 * (number % 12))
        for number in range(first, last + 1)
    ]


def read(folder: Path, lines: list[str]) -> list[tuple[object, float | None, float | None, str | None, str]]:
    """(last step, first loss, last loss, end, its words) of each training."""
    (folder / "run.log").write_text("\n".join(lines) + "\n")
    found = [run.record for run in gather_paths([str(folder / "run.log")], folder / "logs").runs]
    return [
        (each.attempts[-1]["last_step"], each.loss_first, each.loss_last, each.ended, each.cause or "")
        for each in found
    ]


@each_program
def test_two_trainings_are_two_records(form: str, tmp_path: Path) -> None:
    lines = [*steps(form, 1, 20), "Training finished", "starting next configuration", *steps(form, 1, 40, 30)]
    first, second = read(tmp_path, lines)
    assert (first[:3], second[:3]) == ((2000, 8.95, 8.0), (4000, 8.95, 7.0))


@each_program
def test_a_resume_is_one(form: str, tmp_path: Path) -> None:
    lines = [*steps(form, 1, 20), *TRACEBACK, "Resuming from checkpoint at step 1800", *steps(form, 19, 40, 30)]
    assert [each[:3] for each in read(tmp_path, lines)] == [(4000, 8.95, 7.0)]


@each_program
def test_a_traceback_before_done_is_the_end(form: str, tmp_path: Path) -> None:
    (failed,) = read(tmp_path, [*steps(form, 1, 40), *TRACEBACK, "Done!"])
    assert failed[0] == 4000
    assert failed[3] in ("user_error", "error")
    assert "KeyError" in failed[4]
    (ended,) = read(tmp_path, [*steps(form, 1, 40), "Done!"])
    assert ended[3] == ("unknown" if "/ 6500" in form else "done"), "a total that was missed is no end"


@each_program
def test_a_plan_is_no_step_and_a_save_is_one(form: str, tmp_path: Path) -> None:
    assert read(tmp_path, ["Total steps: 15310", *steps(form, 1, 40)])[0][0] == 4000
    saved = [*steps(form, 1, 40), "Saved checkpoint to out/ckpt_step_4007.pt"]
    assert read(tmp_path, saved)[0][0] == 4007
