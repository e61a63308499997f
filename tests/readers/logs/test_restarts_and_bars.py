"""Bars of something else, lines that change their form, and banners of restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_gpt.readers.runs.foreign_run import read_foreign
from hpc_gpt.readers.runs.grouping import group_logs
from tests.readers.made_logs import run_of
from tests.readers.reading import read_lines

BARS = " 33%|███▎      | 1/3 [00:03<00:06,  3.1s/it]", "100%|██████████| 3/3 [00:09<00:00,  3.0s/it]"
HEADER = "  Total optimization steps = 97", "  Total train batch size (w. parallel, distributed & accumulation) = 64"


@pytest.mark.parametrize("lines", [(*BARS, *HEADER), (*HEADER, *BARS)], ids=["before", "after"])
def test_a_bar_with_another_goal_than_the_steps_is_none_of_training(lines):
    """Checkpoint shards before, an evaluation's batches after."""
    record = run_of(*lines).record
    assert record.settings["steps_planned"] == 97
    assert (record.attempts[0]["last_step"], record.ended) == (None, "unknown")
    own = run_of(*lines, " 19%|█▊        | 18/97 [01:50<08:31,  6.39s/it]").record
    assert own.attempts[0]["last_step"] == 18


@pytest.mark.parametrize("lines", [BARS[1:], ("100%|██████████| 20000/20000 [00:41<00:00, 483.2it/s]",)])
def test_a_bar_alone_is_no_end(lines):
    """Samples turned into tokens, shards loaded: neither a step nor a total says that anything was trained."""
    assert run_of(*lines).record.ended == "unknown"


def test_the_bar_of_an_epoch_counts_none_of_the_runs_steps():
    """LLaVA's fork and others: `[Epoch 5 / Train]`, from 0 in each."""
    record = run_of(*HEADER, "[Epoch 5 / Train]:  36%|███▋      | 35/97 [00:30<00:50,  1.2it/s]").record
    assert record.attempts[0]["last_step"] is None


def test_a_banner_after_a_bar_on_one_line_begins_another_attempt():
    """A bar has no end of its own: what a Trainer prints next follows on the same line."""
    header = "==((====))==  Unsloth - 2x faster free finetuning | Num GPUs = 1"
    form = " {:2d}%|██        | {}/60 [00:{}<00:50,  1.2it/s]"
    record = run_of(header, form.format(50, 30, 30) + header, form.format(10, 6, 10)).record
    assert [attempt["last_step"] for attempt in record.attempts] == [30, 6]


def test_lines_that_change_their_form_are_one_table():
    """modded-nanogpt's form after lines by a hand-written loop: the steps go on."""
    early = [f"step: {n}, loss: {10 - n:.3f}, lr: 3.0e-4" for n in range(1, 5)]
    late = [f"step:{n}/60 train_loss:{9 - n / 10:.3f} train_time:{n * 50}ms step_avg:50.00ms" for n in range(5, 61)]
    record = run_of(*early, *late).record
    assert (record.dialect, record.loss_first, record.step_s) == ("modded_nanogpt", 9.0, pytest.approx(0.05))
    (attempt,) = record.attempts
    assert (attempt["first_step"], attempt["last_step"]) == (1, 60)


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


def test_a_cut_bar_alone_shows_no_program():
    """Before its first whole line it may be NeMo's, whose `loss` is another."""
    (part,) = read_lines("a.log", CUT["lightning"][1:])
    assert not part.steps
    assert not part.dialects


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


def titan(second: int, text: str) -> str:
    return f"[rank0]:[titan] 2025-07-21 15:{second // 60:02d}:{second % 60:02d},242 - root - INFO - {text}"


def test_each_banner_is_an_attempt_and_its_gpu_hours_count_once():
    """A log to which a restart was appended; it resumes after the last step, so the step numbers do not go back."""
    form = (
        "step: {:2d}  loss:  4.6671  grad_norm:  2.5457  memory:  1.00GiB(1.00%)  tps: 16,384  tflops: 3.59  mfu: 0.36%"
    )
    begin = "Trainer is initialized with local batch size 8, global batch size 16, gradient accumulation steps 1, "
    begin += "sequence length 2048, total steps 100 (warmup 2)"
    lines = []
    for start, first in ((0, 1), (1800, 11)):
        lines += [titan(start, "Starting job: llama3 training"), titan(start, begin)]
        lines += [titan(start + 10 + n, form.format(first + n)) for n in range(10)]
    record = run_of("+ torchrun --nproc_per_node=2 --nnodes=1 train.py", *lines).record
    assert [each["first_step"] for each in record.attempts] == [1, 11]
    assert record.gpu_hours == pytest.approx(2 * 2 * 19 / 3600, rel=0.1)


def test_the_mean_of_heavy_steps_gives_the_rates():
    """An optimizer that refreshes its preconditioner every fourth step: SOAP in modded-nanogpt."""
    lines = ["total desired batch size: 524288"]
    for n in range(80):
        ms = 900 if n % 4 == 0 else 300
        rate = 524288 / ms * 1000
        lines.append(
            f"step {n:5d} | loss: {9 - n / 50:.4f} | lr 3e-4 | norm: 1.2 | dt: {ms:.2f}ms | tok/sec: {rate:.1f}"
        )
    record = run_of(*lines, "sequence length 1024").record
    assert record.step_s == pytest.approx(0.3)
    assert record.step_s_mean == pytest.approx(0.45, rel=0.02)
    assert [flag for flag in record.flags if "some steps are heavy: the mean step takes" in flag]


def test_runs_one_after_the_other_in_a_file_are_no_epochs_of_one():
    """modded-nanogpt, records/track_3_optimization: twenty seeds in one log, lines at evaluations only."""
    line = "step:{}/500 val_loss:{:.4f} train_time:{:.3f}s step_avg:150.00ms"
    seeds = [line.format(n, 10.8 - n / 70, n * 0.15) for _ in range(3) for n in range(0, 501, 125)]
    runs = group_logs([(Path("a.log"), read_lines("a.log", seeds))])
    records = [read_foreign(run, str(number)).record for number, run in enumerate(runs)]
    assert [(each.ended, each.attempts[-1]["last_step"], each.step_s) for each in records] == [
        ("done", 500, pytest.approx(0.15))
    ] * 3
