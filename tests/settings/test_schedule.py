"""A schedule that contradicts itself is a fault of its file; one that a shorter run cannot hold is cut to it."""

from __future__ import annotations

import pytest

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.experiment import load_experiment
from hpc_gpt.settings.schedule import cut_warmup

SMALL = "[model]\nhidden = 64\nlayers = 2\nheads = 4\n"


@pytest.fixture
def write(tmp_path):
    def written(text: str) -> str:
        path = tmp_path / "own.toml"
        path.write_text(SMALL + text)
        return str(path)

    return written


@pytest.mark.parametrize(
    ("train", "overrides", "fault", "hint"),
    [
        ("min_lr = 1", {}, "own.toml: train.min_lr is 1, above train.lr, which is 0.0003", "0.0003 or less"),
        ("min_lr = 1e-5", {"train.lr": 1e-6}, "your options: train.min_lr is 1e-05, above train.lr", "1e-06 or less"),
        (
            "steps = 10\nwarmup_steps = 20",
            {},
            "own.toml: train.warmup_steps is 20, longer than the run of",
            "10 or less",
        ),
        ("warmup_steps = 1001", {}, "own.toml: train.warmup_steps is 1001, longer than the run of", "1000 or less"),
        ("steps = 10", {"train.warmup_steps": 20}, "your options: train.warmup_steps is 20, longer", "10 or less"),
    ],
)
def test_a_schedule_that_contradicts_itself(write, train, overrides, fault, hint):
    with pytest.raises(ConfigError) as refused:
        load_experiment(write(f"[train]\n{train}\n"), overrides)
    assert fault in str(refused.value)
    assert hint in refused.value.hint


def test_every_fault_of_a_file_at_once(write):
    path = write('[train]\nsteps = 10\nwarmup_steps = 20\nmin_lr = 1\nlog_every = "5"\n')
    with pytest.raises(ConfigError) as refused:
        load_experiment(path)
    faults = [line.removeprefix(f"{path}: ") for line in str(refused.value).splitlines()]
    assert [fault.partition(" ")[0].rstrip(":") for fault in faults] == [
        "train.log_every", "train.min_lr", "train.warmup_steps"
    ]  # fmt: skip


def test_a_row_may_be_at_fault_where_its_base_is_not(write):
    path = write(
        "[train]\nsteps = 100\nwarmup_steps = 20\n[rows]\na = { train.steps = 50 }\nb = { train.steps = 10 }\n"
    )
    load_experiment(path, row="a")
    with pytest.raises(ConfigError, match=r"train\.warmup_steps is 20, longer than the run of train\.steps = 10"):
        load_experiment(path, row="b")


@pytest.mark.parametrize(
    ("train", "steps", "kept", "line"),
    [
        ("steps = 100\nwarmup_steps = 20", 5, 5, ("train.warmup_steps is cut from 20 to 5",)),
        ("steps = 100\nwarmup_steps = 20", 20, 20, ()),
        ("steps = 10\nwarmup_steps = 20", 30, 20, ()),
    ],
)
def test_a_warm_up_is_cut_to_steps_that_come_from_elsewhere(write, train, steps, kept, line):
    experiment, lines = cut_warmup(load_experiment(write(f"[train]\n{train}\n"), {"train.steps": steps}))
    assert (experiment.train.steps, experiment.train.warmup_steps, lines) == (steps, kept, line)


def test_steps_of_a_file_that_extends_the_one_with_the_warm_up_cut_it(write, tmp_path):
    write("[train]\nsteps = 100\nwarmup_steps = 20\n")
    shorter, same = tmp_path / "shorter.toml", tmp_path / "same.toml"
    shorter.write_text('extends = "own"\n[train]\nsteps = 5\n')
    same.write_text('extends = "shorter"\n')
    for path in (shorter, same):
        assert cut_warmup(load_experiment(str(path)))[0].train.warmup_steps == 5
    same.write_text('extends = "shorter"\n[train]\nwarmup_steps = 20\n')
    with pytest.raises(ConfigError, match=r"same\.toml: train\.warmup_steps is 20, longer"):
        load_experiment(str(same))
    same.write_text('extends = "own"\n[rows]\na = { train.steps = 5 }\n')
    assert cut_warmup(load_experiment(str(same)))[0].train.warmup_steps == 5


def test_megatron_lm_keeps_a_step_behind_its_warm_up(write):
    path = write('[train]\nsteps = 100\nwarmup_steps = 20\n[engine]\nname = "megatron-lm"\n')
    assert cut_warmup(load_experiment(path, {"train.steps": 5}))[0].train.warmup_steps == 4
