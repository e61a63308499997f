"""The last step and the last losses: by any line that shows them, and not by a plan."""

from pathlib import Path

import pytest

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.reader.runs.foreign import read_foreign
from hpc_gpt.reader.runs.grouping import group_logs


def bar(step: int, total: int) -> str:
    left = total - step
    clocks = f"{step // 60:02d}:{step % 60:02d}<{left // 60:02d}:{left % 60:02d}"
    return f"{100 * step // total:3d}%|{'█' * (10 * step // total):10}| {step}/{total} [{clocks},  1.00s/it]"


def own(last: int, every: int = 100) -> list[str]:
    return [f"step {step} | loss {5 - step / 1000:.3f} | 250.0 ms/step" for step in range(every, last + 1, every)]


def megatron(last: int) -> list[str]:
    return [
        f" iteration {step:8d}/     500 | consumed samples: {step * 64:12d} | elapsed time per iteration (ms): 812.5 | "
        f"learning rate: 1.500E-04 | global batch size:    64 | lm loss: {5 - step / 1000:.6E} | loss scale: 1.0 | "
        "grad norm: 1.204 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        for step in range(10, last + 1, 10)
    ]


def nanogpt(last: int) -> list[str]:
    return [
        line
        for step in range(0, last + 1, 100)
        for line in (
            f"step {step}: train loss {5 - step / 1000:.4f}, val loss {5.1 - step / 1000:.4f}",
            f"iter {step}: loss {5 - step / 1000:.4f}, time 250.00ms, mfu 31.20%",
        )
    ]


def with_bar(last: int, total: int, every: int, of_bar: int = 1) -> list[str]:
    """Lines of every so many steps, and a bar that counts `of_bar` a step."""
    return [
        line
        for step in range(last + 1)
        for line in (bar(step * of_bar, total * of_bar), *(own(step, every)[-1:] if step % every == 0 else ()))
    ]


def record_of(lines: list[str], folder: Path) -> Record:
    log = folder / "a.log"
    log.write_text("\n".join(lines) + "\n", newline="")
    (run,) = group_logs([(log, read_log(log).parts)])
    return read_foreign(run, "a").record


@pytest.mark.parametrize(
    ("lines", "last_step", "ended"),
    [
        (["Total steps: 1531", *with_bar(1531, 1531, every=10)], 1531, "done"),
        (with_bar(127, 310, every=50), 127, "unknown"),
        ([*own(200), "Saved checkpoint at step 207 to out/step_207.pt"], 207, "unknown"),
        ([*own(200), "2025-03-01 12:00:00 [INFO] Saving model to out/checkpoint-207"], 207, "unknown"),
        ([*megatron(300), "saving checkpoint at iteration     307 to /ckpt in torch format"], 307, "unknown"),
        ([*nanogpt(300), "New best model saved to out/ckpt.pt at iter 350"], 350, "unknown"),
    ],
)
def test_the_furthest_step_by_any_line(lines: list[str], last_step: int, ended: str, tmp_path: Path) -> None:
    record = record_of(lines, tmp_path)
    assert (record.attempts[-1]["last_step"], record.ended) == (last_step, ended)


@pytest.mark.parametrize(
    ("lines", "last_step"),
    [
        # A plan, what is loaded, and a save that is to come.
        (["Total steps: 15310", "--max_steps 15310", *own(200)], 200),
        (["Loading checkpoint at step 900", *own(200)], 200),
        ([*own(200), "Will save the checkpoint at step 300", "Saving checkpoints every 250 steps"], 200),
        # A bar of micro-batches, one of another count, and a save of an earlier step or of other units.
        (with_bar(127, 310, every=10, of_bar=8), 120),
        ([*megatron(300), *[bar(n, 474) for n in range(475)]], 300),
        ([*own(200), "Saved checkpoint at step 100 to out/step_100.pt"], 200),
        ([*own(200), "Saved model to out/checkpoint-51200"], 200),
    ],
)
def test_a_plan_is_no_step_that_was_reached(lines: list[str], last_step: int, tmp_path: Path) -> None:
    assert record_of(lines, tmp_path).attempts[-1]["last_step"] == last_step


@pytest.mark.parametrize(
    ("lines", "loss_last", "loss_eval"),
    [
        ([*nanogpt(300), "final val_loss 2.2426"], 4.7, 2.2426),
        ([*own(300), "Final train loss: 2.1111", "Final val loss: 2.2426"], 2.1111, 2.2426),
        ([*megatron(300), "Training complete. Final validation loss: 2.2426, perplexity 9.42"], 4.7, 2.2426),
        # Not the last: the best one, one before a later step, a mean.
        ([*nanogpt(300), "Best val loss: 2.2426"], 4.7, 4.8),
        (["final val_loss 2.2426", *nanogpt(300)], 4.7, 4.8),
        ([*nanogpt(300), "Final average loss: 2.1111"], 4.7, 4.8),
    ],
)
def test_a_closing_figure_is_the_last(lines: list[str], loss_last: float, loss_eval: float, tmp_path: Path) -> None:
    record = record_of(lines, tmp_path)
    assert (record.loss_last, record.loss_eval) == pytest.approx((loss_last, loss_eval))
