"""Bars of something else, lines that change their form, and banners of restarts."""

from pathlib import Path

import pytest

from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.reader.runs.foreign import read_foreign
from hpc_gpt.reader.runs.grouping import group_logs
from tests.reader.reading import read_lines, read_log_plainly

# The first line of each is whole. Lightning's issue 4225, NeMo's bar, Lightning's issue 12720 (rich), a loop's.
CUT = {
    "lightning": (
        "Epoch 0:  22%|██▏       | 4/18 [00:17<01:02,  4.47s/it, loss=9.926, v_num=193315]",
        "Epoch 0:  28%|██▊       | 5/18 [00:20<00:53,  4.14s/it, loss=9.847, v_n",
        "Epoch 0:  33%|███▎      | 6/18 [00:23<00:47,  4.01s/it, loss=9.7",
        "Epoch 0:  38%|███▎      | 7/18 [00:23<00:47,  3",
    ),
    "nemo": (
        "Epoch 0:   1%|          | 4/77225 [7:58<8:01:48, 41.36s/it, v_num=0, reduced_train_loss=9.926, lr=0.1]",
        "Epoch 0:   1%|          | 5/77225 [8:58<8:01:48, 41.36s/it, v_num=0, reduced_train_loss=9.847, l…",
        "Epoch 0:   1%|          | 6/77225 [9:58<8:01:48, 41.36s/it, v_num=0, reduced_train_loss=9.7…",
        "Epoch 0:   1%|          | 7/77225 [9:59<8:01:48, 41.36s/it, v_num=0, reduced_train_lo…",
    ),
    "lightning with rich": (
        "Epoch 0    ━━━━━╸━━━━ 4/291 0:00:33 • 0:00:09 7.00it/s loss: 9.926 ",
        "Epoch 0    ━━━━━╸━━━━ 5/291 0:00:33 • 0:00:09 7.00it/s loss: 9.847 v_nu…",
        "Epoch 0    ━━━━━╸━━━━ 6/291 0:00:33 • 0:00:09 7.00it/s loss: 9.7…",
        "Epoch 0    ━━━━━╸━━━━ 7/291 0:00:34 • 0:00:09 7.00it/s lo…",
    ),
    "tqdm": (
        " 12%|█▎        | 4/16 [02:00<13:54, 59.61s/it, loss=9.926, lr=0.001]",
        " 12%|█▎        | 5/16 [02:00<13:54, 59.61s/it, loss=9.847, lr=...",
        " 12%|█▎        | 6/16 [02:00<13:54, 59.61s/it, loss=9.7",
        " 12%|█▎        | 7/16 [02:00<13:54, 59.61s/it, loss=9.7...",
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_a_bar_cut_by_width_gives_its_whole_columns_and_no_other(name):
    """Its last column is another figure, or none: a cut number is never a value."""
    (part,) = read_lines("a.log", CUT[name])
    (steps,) = (part.steps[dialect] for dialect in part.steps)
    losses = {int(step): loss for step, loss in zip(steps["step"], steps["loss"], strict=True) if loss == loss}
    assert losses == {4: 9.926, 5: 9.847}
    seen = {step for step, _, _ in part.progress}
    assert seen >= ({4, 5, 6} if name == "nemo" else {4, 5, 6, 7})


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (" > number of parameters on (tensor, pipeline) model parallel rank (2, 1): 8055{}", "rank_params"),
        ("  hidden_size ..................................... 92{}", "arguments"),
        (" > total params: 20,556,201,9{}", "facts"),
        ("setting number of micro-batches to constant 2{}", "facts"),
    ],
)
@pytest.mark.parametrize("mark", ["…", "..."])
def test_a_value_that_runs_into_the_mark_of_a_cut_is_none(line, field, mark):
    assert getattr(read_lines("a.log", [line.format("")])[0], field)
    assert not getattr(read_lines("a.log", [line.format(mark)])[0], field)


def test_runs_one_after_the_other_in_a_file_are_no_epochs_of_one():
    """modded-nanogpt, records/track_3_optimization: twenty seeds in one log, lines at evaluations only."""
    line = "step:{}/500 val_loss:{:.4f} train_time:{:.3f}s step_avg:150.00ms"
    seeds = [line.format(n, 10.8 - n / 70, n * 0.15) for _ in range(3) for n in range(0, 501, 125)]
    runs = group_logs([(Path("a.log"), read_lines("a.log", seeds))])
    records = [read_foreign(run, str(number)).record for number, run in enumerate(runs)]
    assert [(each.ended, each.attempts[-1]["last_step"], each.step_s) for each in records] == [
        ("done", 500, pytest.approx(0.15))
    ] * 3


def hf(count: int, planned: int, *, banner: bool = True, total: bool = True) -> list[str]:
    """One training of the HF Trainer, a bar and a line of metrics a step."""
    header = ["***** Running training *****", f"  Total optimization steps = {planned}"] if banner else []
    steps = [
        f"\r{100 * n // planned:3d}%|###   | {n}/{planned} [00:{n * 2:02}<00:40,  2.00s/it]\r\n"
        f"{{'loss': {3 - n / 100:.2f}, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': {n / planned:.2f}}}"
        for n in range(1, count + 1)
    ]
    end = ["{'train_runtime': 40.5, 'train_samples_per_second': 2.0, 'train_loss': 2.9, 'epoch': 1.0}"]
    return "\n".join([*header, *steps, *(end if total else [])]).split("\n")


def rounded_hf(count: int) -> list[str]:
    """A Trainer's log of 561 steps in three epochs, a line each ten steps, that ends after `count` with its total."""
    header = ["***** Running training *****", "  Num Epochs = 3", "  Total optimization steps = 561"]
    line = "{{'loss': {:.4f}, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': {:.2f}}}"
    steps = [line.format(4 - n / 200, n / 187) for n in range(10, count + 1, 10)]
    return [*header, *steps, f"{{'train_runtime': 1203.5, 'train_loss': 2.9, 'epoch': {count / 187:.2f}}}"]


FAILED = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "KeyError: 'x'"]
BANNER = "==== run 2: wd=0.1 ===="


NO_STEPS = [
    "***** Running training *****",
    *(f"{{'loss': {3 - n / 10:.4f}, 'grad_norm': 1.1, 'epoch': {n / 10:.2f}}}" for n in range(1, 11)),
]


def loop(count: int, *, loss: float = 9.0) -> list[str]:
    return [f"step {n} loss {loss - n / 5:.4f} lr 0.0003" for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("lines", "runs"),
    [
        # HF trainings one after the other, with the banner or without it.
        (hf(20, 20) + hf(15, 15), [[(1, 20, "done")], [(1, 15, "done")]]),
        (hf(20, 20, banner=False) + hf(15, 15, banner=False), [[(1, 20, "done")], [(2, 15, "done")]]),
        # From zero, although nothing failed: another training, also with the same plan.
        (hf(9, 20, total=False) + hf(20, 20), [[(1, 9, "unknown")], [(1, 20, "done")]]),
        # Lines without a step and without a bar: by their epochs.
        (NO_STEPS + NO_STEPS, [[(None, None, "unknown")]] * 2),
        ([*NO_STEPS[:6], NO_STEPS[0], *NO_STEPS[5:]], [[(None, None, "unknown")] * 2]),
        # The first start's error is not the end of the second one.
        (
            hf(0, 20, total=False) + FAILED + hf(0, 20, total=False),
            [[(None, None, "user_error"), (None, None, "unknown")]],
        ),
        (hf(8, 20, total=False) + FAILED + hf(3, 20, total=False), [[(1, 8, "error"), (1, 3, "unknown")]]),
        # Two nodes print the banner of one training.
        (hf(0, 20, total=False) + hf(20, 20), [[(1, 20, "done")]]),
        # A framed line of words is between two trainings; one about an epoch is not.
        ([*loop(10), BANNER, *loop(7, loss=7.6)], [[(1, 10, "unknown")], [(1, 7, "unknown")]]),
        ([*loop(10), "==== epoch 2 ====", *loop(7, loss=7.6)], [[(1, 17, "unknown")]]),
        ([*loop(10), *FAILED, BANNER, *loop(7, loss=7.6)], [[(1, 10, "error"), (1, 7, "unknown")]]),
        # Notes: one line of each.
        (
            [f"## wd {n}\nstep:1750/1750 val_loss:3.2{n} train_time:18000ms step_avg:102.00ms" for n in range(3)],
            [[(1750, 1750, "done")]] * 3,
        ),
        # The Trainer says that it has finished: by epochs and a bar that are rounded, 559 of 561 steps; not 280 of 561.
        (rounded_hf(560), [[(9, 559, "done")]]),
        (rounded_hf(280), [[(9, 280, "unknown")]]),
        # Step 0 alone trained nothing.
        (["iter 0: loss 10.9886, time 49166.94ms", *FAILED], [[(None, None, "error")]]),
    ],
)
def test_trainings_one_after_the_other_are_told_apart(tmp_path, lines, runs):
    log = tmp_path / "a.log"
    log.write_text("\n".join(lines) + "\n", newline="")
    for parts in (read_log(log).parts, read_log_plainly(log).parts):
        found = [read_foreign(run, str(n)).record for n, run in enumerate(group_logs([(log, parts)]))]
        keys = ("first_step", "last_step", "ended")
        assert [[tuple(each[key] for key in keys) for each in record.attempts] for record in found] == runs


@pytest.mark.parametrize("failed", ["job-2.out", "train-b.out"])
def test_a_failed_run_stays_beside_another_of_its_program(tmp_path, failed):
    (tmp_path / "job-1.out").write_text("\n".join(hf(20, 20)), newline="")
    (tmp_path / failed).write_text("\n".join([*hf(0, 20, total=False), *FAILED]))
    logs = [(path, read_log(path).parts) for path in sorted(tmp_path.iterdir())]
    assert [read_foreign(run, "").record.ended for run in group_logs(logs)] == ["done", "user_error"]
