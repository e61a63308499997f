"""Bars of something else, lines that change their form, and banners of restarts."""

from pathlib import Path

import pytest

from hpc_gpt.reader.readers.runs.foreign_run import read_foreign
from hpc_gpt.reader.readers.runs.grouping import group_logs
from tests.readers.reading import read_lines

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


def test_runs_one_after_the_other_in_a_file_are_no_epochs_of_one():
    """modded-nanogpt, records/track_3_optimization: twenty seeds in one log, lines at evaluations only."""
    line = "step:{}/500 val_loss:{:.4f} train_time:{:.3f}s step_avg:150.00ms"
    seeds = [line.format(n, 10.8 - n / 70, n * 0.15) for _ in range(3) for n in range(0, 501, 125)]
    runs = group_logs([(Path("a.log"), read_lines("a.log", seeds))])
    records = [read_foreign(run, str(number)).record for number, run in enumerate(runs)]
    assert [(each.ended, each.attempts[-1]["last_step"], each.step_s) for each in records] == [
        ("done", 500, pytest.approx(0.15))
    ] * 3
