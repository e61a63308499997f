"""Files of experiments: a sweep's rows over their base, every fault at once; schedules that contradict themselves."""

import re

import pytest

from hpc_gpt.errors import ConfigError
from hpc_gpt.files import experiments_dir
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment_file import cut_warmup, find_experiment, find_sweep, list_experiments, load_experiment
from hpc_gpt.settings.resolve import resolve
from hpc_gpt.settings.resolved import Resolved, folder_name
from hpc_gpt.settings.sweep_rows import SweepRow

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
    folder = tmp_path / "ladder"
    folder.mkdir()
    (folder / "a-first.toml").write_text("")
    path = folder / "sweep.toml"
    path.write_text(BASE)
    return path


def faults_of(path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        find_sweep(str(path))
    return str(refusal.value).splitlines()


def test_rows_keep_the_files_order_and_their_figures(sweep_file):
    rows = find_sweep(str(sweep_file)).rows
    assert [row.name for row in rows] == ["too-much", "pp2-1.5", "pp4"]
    assert rows[1] == SweepRow("pp2-1.5", {"layout": {"tp": 1}}, {"step_s": 0.661, "notes": "05-26"}, None)
    assert rows[0].impossible == "pp16 needs 16 GPUs, the row has 8"


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


def test_a_sweep_of_another_name_goes_by_its_file(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text(BASE)
    assert load_experiment(str(path), {}, "pp4").name == "table-pp4"
    path.write_text('name = "mine"\n' + BASE)
    assert load_experiment(str(path), {}, "pp4").name == "mine-pp4"
    assert find_sweep(str(path)).name == "mine"


def test_what_extends_a_sweep_takes_its_base_alone(sweep_file):
    child = sweep_file.with_name("child.toml")
    child.write_text('extends = "sweep"\n[train]\nsteps = 3\n')
    experiment = load_experiment(str(child))
    assert (experiment.name, experiment.layout.gpus, experiment.train.steps) == ("child", 8, 3)
    assert find_sweep(str(child)) is None


@pytest.mark.parametrize(
    ("row", "words", "hint"),
    [
        ("too-much", "row 'too-much' cannot run: pp16 needs 16 GPUs", "choose another row"),
        ("pp5", "no row 'pp5'", "did you mean pp4"),
        ("zzz", "no row 'zzz'", "rows: too-much, pp2-1.5, pp4"),
    ],
)
def test_a_row_that_is_not_to_be_had(sweep_file, row, words, hint):
    with pytest.raises(ConfigError, match=re.escape(words)) as refusal:
        load_experiment(str(sweep_file), {}, row)
    assert hint in refusal.value.hint


def test_no_sweep_has_no_rows():
    with pytest.raises(ConfigError, match="no row 'x', as it is no sweep"):
        load_experiment("demo", {}, "x")


def test_every_fault_of_every_row_at_once(sweep_file):
    faults = faults_of(
        sweep_file,
        """
        [rows]
        g2-7.5b = { layout.gpus = 2 }
        "a" = { layut.gpus = 3, impossble = "x", published.done = true, train.stps = 3, layout.gpus = "x" }
        "A" = { published = 3, impossible = "" }
        "b c" = { name = "other" }
        "d" = 4
        """,
    )
    where = f"{sweep_file}: row"
    assert faults[0].startswith(f"{where} 'g2-7': unknown key 5b; known here: ")
    assert faults[1:] == [
        f"{where} 'a': unknown key layut; did you mean layout?",
        f"{where} 'a': unknown key impossble; did you mean impossible?",
        f"{where} 'a': published.done must be a number or a text, not True",
        f"{where} 'a': layout.gpus: input should be a whole number, not the text \"x\"",
        f"{where} 'a': unknown key train.stps; did you mean steps?",
        f"{where} 'A': 'a' differs from it only by upper and lower case",
        f"{where} 'A': impossible must be the reason in words, not ''",
        f"{where} 'A': published must be a table of columns, as published.step_s = 0.661, not 3",
        f"{where} 'b c': a row's name has letters and digits, and after the first . _ + - too",
        next(fault for fault in faults if "'b c': unknown key name" in fault),
        f"{where} 'd' must be an inline table, not 4",
    ]


def test_what_no_table_could_print_is_refused(sweep_file):
    faults = faults_of(
        sweep_file,
        """
        [rows.a]
        published = { step_s = nan, tflops_seed = -inf, notes = "two\\nlines" }
        impossible = "a\\u001b[31m"
        [rows.b]
        published."x\\ny" = 3
        """,
    )
    where = f"{sweep_file}: row"
    assert faults == [
        f"{where} 'a': published.step_s must be a finite number, not nan; leave out what the table does not have",
        f"{where} 'a': published.tflops_seed must be a finite number, not -inf; leave out what the table does not have",
        f"{where} 'a': published.notes must be one line of printable text, not 'two\\nlines'",
        f"{where} 'a': impossible must be one line of printable text, not 'a\\x1b[31m'",
        f"{where} 'b': a column of published must be printable, not 'x\\ny'",
    ]


@pytest.mark.parametrize("rows", ["rows = 3", "[rows]", "rows = []"])
def test_rows_that_are_no_table(sweep_file, rows):
    assert "rows must be a table" in faults_of(sweep_file, rows)[0]


def test_a_name_twice_is_refused_with_its_line(sweep_file):
    (fault,) = faults_of(sweep_file, '[rows]\n"a" = {}\n"a" = {}\n')
    assert "line 3" in fault


def test_a_sweep_without_a_possible_row(sweep_file):
    sweep_file.write_text('[rows]\n"a" = { impossible = "why" }\n')
    with pytest.raises(ConfigError, match="no row can run; the first: why"):
        load_experiment(str(sweep_file))


@pytest.mark.parametrize("name", list_experiments())
def test_every_shipped_experiment_loads(name):
    assert load_experiment(name).name.startswith(name.replace("/", "-"))
    assert (experiments_dir() / name).is_dir() == (find_sweep(name) is not None)


def test_old_runs_are_of_no_sweep():
    resolved = resolve(load_experiment("demo"), ClusterProfile(name="x"))
    text = resolved.to_json().replace(' "sweep": null,\n', "").replace(' "row": null,\n', "")
    assert '"row"' not in text
    assert Resolved.from_json(text) == resolved


def test_a_sweeps_folder_is_never_hidden_nor_outside():
    assert folder_name("../../etc") == "_.._etc"
    assert folder_name("...") == "experiment"


# --- the learning rate's schedule: one that contradicts itself is a fault, one that a shorter run cannot hold is cut

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


def test_quoted_dotted_keys_of_a_row_are_as_those_without_quotes(sweep_file):
    sweep_file.write_text(BASE + '"pp1" = { "layout.pp" = 1, layout.tp = 2, "seed.step_s" = 3.5 }\n')
    row = find_sweep(str(sweep_file)).rows[-1]
    assert row == SweepRow("pp1", {"layout": {"pp": 1, "tp": 2}}, {"step_s": 3.5})
    twice = faults_of(sweep_file, BASE + '"pp1" = { "layout.pp" = 1, layout.pp = 2 }\n')
    assert twice[0].endswith("row 'pp1': layout.pp is given twice")


def test_published_figures_are_read_under_their_earlier_name(sweep_file):
    both = '"pp1" = { layout.pp = 1, seed.step_s = 3.5, seed.notes = "05-26", published.step_s = 3.4 }\n'
    sweep_file.write_text(BASE + both)
    assert find_sweep(str(sweep_file)).rows[-1].published == {"step_s": 3.4, "notes": "05-26"}
    wrong = faults_of(sweep_file, BASE + '"pp1" = { seed.done = true }\n')
    assert wrong[0].endswith("row 'pp1': seed.done must be a number or a text, not True")


def test_a_fault_that_file_and_options_share_is_the_files(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[model]\npreset = "gpt2"\n[trian]\nlr = 1\n')
    with pytest.raises(ConfigError, match=r"own\.toml: unknown key trian"):
        load_experiment(str(path), {"trian.steps": 3})
