"""Files of experiments: a sweep's rows over their base, and warm-ups that are cut. Their faults: cli/refused."""

import pytest

from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import (
    cut_warmup,
    find_experiment,
    find_sweep,
    load_experiment,
)
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sweep_rows import SweepRow

BASE = """
[model]
preset = "gpt2"
[layout]
gpus = 8
pp = 2
[rows]
"too-much" = { layout.pp = 16, published.step_s = 90.5, impossible = "pp16 needs 16 GPUs, the row has 8" }
"pp2-1.5" = { layout.tp = 1, published.step_s = 0.661, published.notes = "05-26" }
"pp4" = { layout.pp = 4, train.steps = 7 }
"""


@pytest.fixture
def sweep_file(tmp_path):
    (folder := tmp_path / "ladder").mkdir()
    (folder / "a-first.toml").write_text("")
    (path := folder / "sweep.toml").write_text(BASE)
    return path


def test_the_folders_sweep_is_its_first_possible_row(sweep_file):
    assert find_experiment(str(sweep_file.parent)) == sweep_file
    experiment = load_experiment(str(sweep_file.parent))
    assert (experiment.name, experiment.layout.tp, experiment.layout.pp) == ("ladder-pp2-1.5", 1, 2)
    assert find_sweep(str(sweep_file.parent)).name == "ladder"


def test_base_then_row_then_overrides(sweep_file):
    row = load_experiment(str(sweep_file), {"train.steps": 9}, "pp4")
    assert (row.layout.gpus, row.layout.pp, row.train.steps) == (8, 4, 9)
    assert load_experiment(str(sweep_file), {}, "pp4").train.steps == 7
    assert load_experiment(str(sweep_file), {"layout.pp": None}, "pp4").layout.pp is None


def test_what_extends_a_sweep_takes_its_base_alone(sweep_file):
    (child := sweep_file.with_name("child.toml")).write_text('extends = "sweep"\n[train]\nsteps = 3\n')
    experiment = load_experiment(str(child))
    assert (experiment.name, experiment.layout.gpus, experiment.train.steps) == ("child", 8, 3)
    assert find_sweep(str(child)) is None


def test_old_runs_are_of_no_sweep():
    resolved = resolve(load_experiment("demo"), ClusterProfile(name="x"))
    text = resolved.to_json().replace(' "sweep": null,\n', "").replace(' "row": null,\n', "")
    assert '"row"' not in text
    assert Resolved.from_json(text) == resolved


# --- the learning rate's schedule: what a shorter run cannot hold is cut

SMALL = "[model]\nhidden = 64\nlayers = 2\nheads = 4\n"


@pytest.fixture
def write(tmp_path):
    def written(text: str) -> str:
        (path := tmp_path / "own.toml").write_text(SMALL + text)
        return str(path)

    return written


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


def test_steps_of_a_file_that_extends_another_cut_its_warm_up(write, tmp_path):
    write("[train]\nsteps = 100\nwarmup_steps = 20\n")
    shorter, same = tmp_path / "shorter.toml", tmp_path / "same.toml"
    shorter.write_text('extends = "own"\n[train]\nsteps = 5\n')
    same.write_text('extends = "shorter"\n')
    for path in (shorter, same):
        assert cut_warmup(load_experiment(str(path)))[0].train.warmup_steps == 5
    same.write_text('extends = "own"\n[rows]\na = { train.steps = 5 }\n')
    assert cut_warmup(load_experiment(str(same)))[0].train.warmup_steps == 5


def test_quoted_dotted_keys_of_a_row_are_as_those_without_quotes(sweep_file):
    sweep_file.write_text(BASE + '"pp1" = { "layout.pp" = 1, layout.tp = 2, "published.step_s" = 3.5 }\n')
    row = find_sweep(str(sweep_file)).rows[-1]
    assert row == SweepRow("pp1", {"layout": {"pp": 1, "tp": 2}}, {"step_s": 3.5})
