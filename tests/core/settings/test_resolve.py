"""From experiment and profile to a run's settings: defaults and precedence. What is refused: cli/refused."""

import dataclasses
import os
import re
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError, LayoutError, UserError, raise_faults
from hpc_gpt.core.settings.cluster import ClusterProfile, list_profiles, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Experiment, LayoutRequest, Model
from hpc_gpt.core.settings.experiment_file import (
    DEFAULT_EXPERIMENT,
    list_experiments,
    load_experiment,
    read_experiment,
)
from hpc_gpt.core.settings.grid import parse_override
from hpc_gpt.core.settings.resolved import Resolved, folder_name
from hpc_gpt.core.settings.stored import experiment_of
from hpc_gpt.core.slurm.directives import job_faults

NODE_OF_4 = ClusterProfile(name="four")


def settle(profile=NODE_OF_4, experiment=DEFAULT_EXPERIMENT, **overrides):
    return resolve(load_experiment(experiment, {key.replace("__", "."): v for key, v in overrides.items()}), profile)


PUBLISHED_RUN = settle()


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


# --- defaults


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ({"tp": 16}, "use --tp 4 (tp4-pp16-dp1)"),
        ({"tp": 16, "pp": 3}, "use --pp 4 --allow-tp-across-nodes (tp16-pp4-dp1)"),
        ({"tp": 16, "gpus": 16, "pp": 2, "dp": 1}, "use --tp 8 (tp8-pp2-dp1)"),
        ({"tp": 16, "gpus": 16, "pp": 3, "dp": 2}, "use --gpus 96 --allow-tp-across-nodes (tp16-pp3-dp2)"),
        ({"tp": 2, "pp": 2, "gpus": 3}, "use --gpus 4 (tp2-pp2-dp1)"),
        ({"tp": 4, "pp": 1, "gpus": 2}, "use --gpus 4 (tp4-pp1-dp1)"),
        ({"tp": 2, "pp": 3, "gpus": 8}, "use --pp 4 (tp2-pp4-dp1)"),
        ({"tp": 4, "pp": 4, "gpus": 7, "dp": 1}, "use --gpus 16 (tp4-pp4-dp1)"),
        ({"tp": 2, "pp": 8, "nodes": 1, "gpus": None}, "use --pp 4 (tp2-pp4-dp1)"),
        ({"tp": 8, "pp": 4, "nodes": 2, "gpus": None, "dp": 4}, "use --nodes 16 (tp8-pp4-dp4)"),
    ],
)
def test_the_hint_at_a_layout_of_other_gpus_runs(asked, hint):
    profile = dataclasses.replace(NODE_OF_4, gpus_per_node=8)
    overrides = {f"layout__{axis}": size for axis, size in asked.items()}
    with pytest.raises(LayoutError, match=r"needs \d+ GPUs") as refusal:
        settle(profile, **overrides)
    assert refusal.value.hint == hint
    options, layout = re.fullmatch(r"use (.+) \((\S+)\)", hint).groups()
    changed = {f"layout__{name}": int(size) for name, size in re.findall(r"--(\w+) (\d+)", options)}
    changed |= {"layout__allow_tp_across_nodes": "--allow" in options}
    assert str(settle(profile, **{**overrides, **changed}).layout) == layout


@pytest.mark.parametrize(
    ("gpus", "pp", "heads", "per_node", "layout"),
    [
        (64, 16, 32, 4, "tp4-pp16-dp1"), (64, 1, 32, 4, "tp4-pp1-dp16"), (64, 1, 32, 8, "tp8-pp1-dp8"),
        (8, 4, 32, 4, "tp2-pp4-dp1"), (4, 1, 25, 4, "tp1-pp1-dp4"), (10, 2, 25, 5, "tp5-pp2-dp1"),
        (3, 1, 32, 4, "tp1-pp1-dp3"),
    ],
)  # fmt: skip
def test_default_tp(gpus, pp, heads, per_node, layout):
    shape = Model(hidden=heads * 128, layers=16, heads=heads, vocab_multiple=320)
    asked = Experiment(model=shape, layout=LayoutRequest(gpus=gpus, pp=pp))
    profile = ClusterProfile(name="x", gpus_per_node=per_node)
    assert str(resolve(asked, profile).layout) == layout


def test_a_small_model_is_not_split_over_tp_unless_asked_for():
    def layout_of(hidden, **asked):
        experiment = Experiment(model=Model(hidden=hidden, layers=24, heads=16), layout=LayoutRequest(gpus=8, **asked))
        resolved = resolve(experiment, NODE_OF_4)
        return resolved.model.params, str(resolved.layout)

    params, layout = layout_of(1664)
    assert (params < 1e9, layout) == (True, "tp1-pp1-dp8")
    params, layout = layout_of(1792)
    assert (params > 1e9, layout) == (True, "tp4-pp1-dp2")
    assert (layout_of(1664, tp=4)[1], layout_of(1664, dp=2)[1]) == ("tp4-pp1-dp2", "tp4-pp1-dp2")
    assert layout_of(1664, pp=2)[1] == "tp1-pp2-dp4"


# --- properties


sizes = st.none() | st.integers(1, 9)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(
    asked=st.builds(
        LayoutRequest,
        gpus=st.none() | st.integers(1, 64),
        nodes=sizes,
        tp=sizes,
        pp=sizes,
        dp=sizes,
        micro_batch=sizes,
        micro_batches=sizes,
        global_batch=st.none() | st.integers(1, 64),
    ),
    per_node=st.integers(1, 8),
)
def test_whatever_is_asked_is_settled_or_refused_with_a_hint(asked, per_node):
    shape = Model(hidden=96, layers=6, heads=12)
    try:
        run = resolve(Experiment(model=shape, layout=asked), ClusterProfile(name="x", gpus_per_node=per_node))
    except UserError as refusal:
        assert any(letter.isdigit() for letter in str(refusal))
        assert refusal.hint
        return
    assert run.layout.gpus == run.gpus == run.nodes * run.ranks_per_node
    assert run.ranks_per_node <= per_node
    assert run.ranks_per_node % run.layout.tp == 0
    assert run.batch.micro_batch * run.batch.micro_batches * run.layout.dp == run.batch.global_batch
    for name in ("gpus", "nodes"):
        assert getattr(asked, name) in (None, getattr(run, name))
    for name in ("tp", "pp", "dp"):
        assert getattr(asked, name) in (None, getattr(run.layout, name))
    for name in ("micro_batch", "micro_batches", "global_batch"):
        assert getattr(asked, name) in (None, getattr(run.batch, name))
    assert Resolved.from_json(run.to_json()) == run
    assert resolve(experiment_of(run), run.cluster) == run


@pytest.mark.parametrize("profiles", ["one", pytest.param("all", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", list_experiments())
def test_every_shipped_experiment_is_what_it_resolves_to(name, profiles):
    """Each row, on the first profile that takes one, or on all: resolved, turned into an experiment and resolved
    again, nothing changes; nor does it as JSON."""
    file = read_experiment(name)
    runs = []
    for profile in map(load_profile, ["generic-slurm", *list_profiles()]):
        for row in [row.name for row in file.possible] or [None]:
            try:
                run = resolve(load_experiment(file, row=row), profile, file.name if row else None, row)
            except UserError as refusal:
                assert refusal.hint
                continue
            runs.append(run)
            assert resolve(experiment_of(run), profile, run.sweep, run.row) == run
            again = Resolved.from_json(run.to_json())
            assert (again, again.to_json()) == (run, run.to_json())
        if runs and profiles == "one":
            break
    assert runs


def test_a_files_contradictory_sizes_are_refused_with_arithmetic():
    """Sizes of the command line replace the file's (cli/refused/layouts.txt)."""
    for overrides, words in (
        ({"layout__micro_batches": 3}, r"4 x 3 x 1 = 12"),
        ({"layout__nodes": 8}, "8 nodes of 4 GPUs give 32"),
        ({"train__steps": 10**400}, r"train\.steps must be at most 1\.84e\+19, and is larger"),
    ):
        with pytest.raises(UserError, match=words) as refusal:
            settle(**overrides)
        assert refusal.value.hint


# --- reading files


def test_not_utf8(tmp_path):
    (path := tmp_path / "e.toml").write_bytes(b'name = "\xff"\n')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_experiment(str(path))


def test_extends_folds_the_parent_in_table_by_table(tmp_path):
    write(tmp_path / "base.toml", 'name = "base"\n[model]\npreset = "gpt2"\n[train]\nsteps = 7\nlr = 0.5\n')
    child = write(tmp_path / "child.toml", 'extends = "base"\n[train]\nsteps = 9\n')
    experiment = load_experiment(child)
    assert (experiment.model.preset, experiment.train.steps, experiment.train.lr) == ("gpt2", 9, 0.5)
    assert experiment.name == "child"


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("train.steps=20", ("train.steps", 20)),
        ("train.lr = 1e-4", ("train.lr", 1e-4)),
        ("train.deterministic=true", ("train.deterministic", True)),
        ("job.name=a name; rm -rf ~", ("job.name", "a name; rm -rf ~")),
        ('job.sbatch=["-x", "n1"]', ("job.sbatch", ["-x", "n1"])),
        ("data.path=/a=b", ("data.path", "/a=b")),
        ("train.steps=10k", ("train.steps", 10_000)),
        ("model.seq=128k", ("model.seq", 131_072)),
        ("model.vocab=1.5k", ("model.vocab", 1500)),
        ("train.seed=10q", ("train.seed", "10q")),
        ("job.signal_lead_s=2M", ("job.signal_lead_s", "2M")),
        ("job.mem=64k", ("job.mem", "64k")),
        ("train.lr=1k", ("train.lr", "1k")),
        ("train.steps=1e999999999k", ("train.steps", "1e999999999k")),
    ],
)
def test_parse_override(text, pair):
    assert parse_override(text) == pair


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_string_given_as_override_stays_data(value):
    key, found = parse_override(f"job.comment={value}")
    assert key == "job.comment"
    assert not isinstance(found, str) or found == value or value.lstrip()[:1] in ("'", '"')


def test_a_whole_float_is_a_number_and_an_option_may_say_yes(tmp_path):
    path = write(tmp_path / "typed.toml", "[train]\nsteps = 1e4\nlr = 1\n")
    experiment = load_experiment(path, dict([parse_override("engine.prefetch=no")]))
    assert (experiment.train.steps, experiment.train.lr, experiment.engine.prefetch) == (10000, 1, False)


def test_a_file_may_have_a_count_with_a_unit(tmp_path):
    path = write(tmp_path / "counts.toml", '[model]\nseq = "8k"\n[train]\nsteps = "10k"\nsave_at = ["1k", 2000]\n')
    experiment = load_experiment(path)
    assert (experiment.model.seq, experiment.train.steps, experiment.train.save_at) == (8192, 10_000, (1000, 2000))
    phases = 'source = "random"\nphases = ["30B", 4e10]\n[data.mix]\na = { path = "a", weight = [1, 1, 1] }\n'
    mixed = load_experiment(write(tmp_path / "mixed.toml", f"[data]\n{phases}"))
    assert mixed.data.phases == (30e9, 40e9)
    late = write(tmp_path / "late.toml", '[train]\nsteps = "1k"\nwarmup_steps = "2k"\n')
    with pytest.raises(ConfigError, match=r"warmup_steps is 2000, longer than the run of train.steps = 1000"):
        load_experiment(late)
    for line in ('steps = "1q"', 'steps = "10"', 'lr = "1k"', 'steps = "1.5"'):
        with pytest.raises(ConfigError, match=r"input should be a (whole )?number, not the text"):
            load_experiment(write(tmp_path / "wrong.toml", f"[train]\n{line}\n"))


# --- profiles


def test_the_users_profile_wins_and_may_extend_the_shipped_one():
    own = os.environ["HPC_GPT_CONFIG"] + "/clusters/jean-zay-v100-32g.toml"
    os.makedirs(os.path.dirname(own))
    with open(own, "w") as file:
        file.write('extends = "jean-zay-v100-32g"\naccount = "abc@v100"\n')
    profile = load_profile("jean-zay-v100-32g")
    assert (profile.account, profile.constraint, profile.gpus_per_node) == ("abc@v100", "v100-32g", 4)
    assert str(list_profiles()["jean-zay-v100-32g"]) == own


def test_a_profiles_fault_is_none_of_one_that_made_a_run(tmp_path):
    path = write(tmp_path / "site.toml", 'cpus_per_node = 2\n[environment]\nHF_TOKEN = "opensesame"\n')
    profile = load_profile(path, of_a_run=True)
    assert (profile.cpus_per_node, profile.environment) == (2, {"HF_TOKEN": "opensesame"})


@pytest.mark.parametrize("value", ["/run/secrets/hf", "~/.cache/hf", "", "0", "1e3", "true", "Off"])
def test_a_path_a_number_and_a_flag_are_no_secrets(tmp_path, value):
    profile = load_profile(write(tmp_path / "site.toml", f'[environment]\nHF_TOKEN = "{value}"\n'))
    assert profile.environment == {"HF_TOKEN": value}


# --- resolved.json


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" \n", "it is empty"),
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("{}", "KeyError('version')"),
        ("[]", "TypeError('list indices must be integers or slices, not str')"),
        ('{"version": "0.5.0"}', "KeyError('model')"),
        ('{"version": "0.5.0", "model": 3}', "KeyError('batch')"),
    ],
)
def test_damaged_resolved_json(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as fault:
        Resolved.from_json(text)
    said = (f"resolved.json cannot be read: {words}", "the run folder is damaged; submit again")
    assert (str(fault.value), fault.value.hint) == said


@pytest.mark.parametrize("version", ["9.1", "0.3.4", "0.45.0"])
def test_resolved_of_another_version(version: str) -> None:
    with pytest.raises(ConfigError) as fault:
        Resolved.from_json(f'{{"version": "{version}"}}')
    said = f"resolved.json is of hpc-gpt {version}, this version reads 0.4 and 0.5"
    assert (str(fault.value), fault.value.hint) == (said, f"use the version that wrote it: {version}")


@given(st.text(max_size=30))
def test_slug_is_a_plain_folder_name(name):
    slug = dataclasses.replace(PUBLISHED_RUN, name=name).slug
    assert slug
    assert "/" not in slug
    assert not slug.startswith((".", "-"))
    assert not set(slug) & set(" \t\n\0$`'\"\\*?[]{}()<>|&;!#~%:,=@^")
    assert len(slug.encode()) <= 255
    assert folder_name(slug) == slug
    assert folder_name(unicodedata.normalize("NFD", name)) == folder_name(unicodedata.normalize("NFC", name))


@given(st.text(st.characters(whitelist_categories=("L", "M", "N")), min_size=1, max_size=300), st.integers(20, 255))
def test_letters_of_any_script_stay_and_two_long_names_stay_two(name, most):
    whole = unicodedata.normalize("NFC", name)
    cut = folder_name(name, most)
    assert cut == whole if len(whole.encode()) <= most else len(cut.encode()) <= most
    assert whole.startswith(cut[:-9] if cut != whole else whole)
    assert folder_name(f"{name}a", most) != folder_name(f"{name}b", most)


def test_a_jobs_name_leaves_room_for_its_outputs_number():
    experiment = load_experiment("demo", {"name": "实验" * 100})
    name = resolve(experiment, ClusterProfile(name="x")).job.name
    assert len(f"{name}-4294967295_4294967295.out".encode()) <= 255
    too_long = load_experiment("demo", {"name": "a", "job.name": "实验" * 100})
    run = resolve(too_long, ClusterProfile(name="x"))
    with pytest.raises(ConfigError, match=r"job\.name has 600 bytes, but the output's name %x-%j.out carries 229"):
        raise_faults(job_faults(run.job, run.cluster))
