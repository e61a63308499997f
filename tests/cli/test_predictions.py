"""What submit and render say of a run's memory and time, refuse and leave to the planner; and how good it was."""

import itertools
import json
import math
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.runs.run_folder import PREDICTED, RunFolder
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve, size_run
from hpc_gpt.core.settings.experiment import with_keys
from hpc_gpt.core.settings.experiment_file import list_experiments, load_experiment, read_experiment
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.render import render_script
from hpc_gpt.launcher.submission import write_run
from hpc_gpt.planner.prediction import PlanChoice, plan_open, predict
from hpc_gpt.planner.search import search
from tests.cli.command import error_of, in_process, profile_of, resolved_of, without_slurm
from tests.made_runs import add_attempt, metrics_line, read_run

PUBLISHED_CLUSTER = ("--cluster", "jean-zay-v100-32g")
SMALL = {"model.preset": "gpt2-xl", "model.seq": 1024, "layout.gpus": 4, "layout.tp": 4, "layout.pp": 1}


def run_with_prediction(cluster: str = "h100-80g-8", **overrides: object) -> RunFolder:
    """A run folder as submit leaves it."""
    profile = load_profile(cluster)
    resolved = resolve(load_experiment("demo", {key.replace("__", "."): v for key, v in overrides.items()}), profile)
    seen = predict(resolved, profile, refuse=True)
    prepared = PreparedRun(resolved, render_script(resolved), "name = 'demo'\n", prediction=seen)
    return write_run(prepared, Path(os.environ["HPC_GPT_LOGS"]), {})


# --- the line


def test_the_source_run_is_predicted_and_left_as_it_is():
    done = in_process("render", "--gpus", "64", "--pp", "16", *PUBLISHED_CLUSTER, code=0)
    took = r"no EXPERIMENT: takes gpt2-meg-ds-3d --row 48b, tp4-pp16-dp1 on 64 GPUs of jean-zay-v100-32g\n"
    line = (
        took + r"predicted: tp4-pp16-dp1 needs (\d+\.\d) of 31\.7 GiB on stage \d+; step (\d+) s, give or take \d+%\n"
    )
    found = re.fullmatch(line, done.stderr)
    assert found, done.stderr
    assert float(found[1]) < 31.7
    # The source printed 146 s; its author gives V100 on Jean Zay 40 % of noise.
    assert 146 / 1.6 < float(found[2]) < 146 * 1.4


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ("", "profile site names no device"),
        ('device = "h999"\nfabric = "nvlink"\n', "profile site: device 'h999' is not known"),
        ('device = "a100-80g"\nfabric = "nvlink"\ngpus_per_node = 2\n', "4 GPUs are more than the 2 of a node"),
    ],
)
def test_a_profile_that_does_not_tell_enough_is_gone_on_with(profile, reason):
    done = in_process("render", "demo", "--cluster", profile_of("site", profile), code=0)
    assert done.stderr.startswith(f"not predicted: {reason}")
    assert done.stderr.count("\n") == 1


def test_profile_show_writes_tables_that_a_profile_reads():
    text = 'extends = "a100-80g-8"\n[machine]\nmemory_gib = 70.0\npeak_tflops = { bf16 = 300.0 }\n'
    text += '[calibration.constants]\ngemm = 0.5\n[calibration.residuals]\n"a row, of 1.3b" = -0.25\n'
    profile = load_profile(profile_of("mine", text))
    shown = in_process("profile", "show", "mine").stdout
    assert load_profile(profile_of("mine", shown)) == profile
    assert profile.machine.peak_tflops == {"bf16": 300.0}
    assert profile.calibration.residuals == {"a row, of 1.3b": -0.25}


def test_a_calibration_moves_the_time_alone():
    resolved = resolve(load_experiment("demo", SMALL), load_profile("a100-80g-8"))
    plain = predict(resolved, load_profile("a100-80g-8"), refuse=False)
    profile_of("mine", 'extends = "a100-80g-8"\n[calibration.constants]\ngemm = 0.2\nnew_of_another_version = 3.0\n')
    fitted = predict(resolved, load_profile("mine"), refuse=False)
    assert fitted.tables["step"]["step_s"] > plain.tables["step"]["step_s"]
    assert fitted.tables["memory_gib"] == plain.tables["memory_gib"]
    assert (plain.tables["calibrated"], fitted.tables["calibrated"]) == (False, True)


def test_arithmetic_that_the_card_lacks_has_no_time():
    done = in_process("render", "demo", "--set", "train.dtype=bf16", *PUBLISHED_CLUSTER)
    assert re.search(r"GiB on stage \d; time not predicted: v100-32g has no unit for train.dtype bf16\n", done.stderr)


# --- what does not fit


@pytest.mark.parametrize(
    "asked",
    [
        ["--gpus", "64", "--pp", "16", "--set", "engine.recompute=none"],
        ["--gpus", "64", "--pp", "16", "--micro-batch-size", "64"],
        ["demo", "--model", "18b", "--gpus", "8", "--set", "train.dtype=fp16", "--engine=ddp", "--tp=1", "--pp=1"],
    ],
    ids=["recompute", "micro-batch", "ddp"],
)
def test_what_would_not_fit_is_refused_and_the_hint_fits(asked):
    refused = in_process("render", *asked, *PUBLISHED_CLUSTER)
    assert (refused.code, refused.stdout) == (2, "")
    message, hint = error_of(refused)
    assert re.search(r"is predicted not to fit on v100-32g: it needs [\d.]+ of 31\.7 GiB( on stage \d+)?$", message)
    if "engine.recompute=none" in asked:
        assert hint.startswith("use --set engine.recompute=full (tp4-pp16-dp1: "), "it keeps what it can"
    flags, layout = re.fullmatch(r"use (.*) \((tp\d+-pp\d+-dp\d+): .*\), or --force to run it anyway", hint).groups()
    taken = in_process("render", *asked, *shlex.split(flags), *PUBLISHED_CLUSTER, code=0)
    assert f"predicted: {layout} needs" in taken.stderr


def dark(text=""):
    """A profile that says nothing of a host's memory but what `text` does."""
    return profile_of("dark", f'device = "v100-32g"\nfabric = "omni-path 4x100G"\n{text}')


OFFLOADED = ("--model", "7.5b", "--gpus", "4", "--engine", "fsdp", "--set", "engine.offload=full", "--gbs", "4")


def test_what_a_host_must_hold_is_said_and_refused_beyond_it():
    unknown = in_process("render", *OFFLOADED, "--cluster", dark())
    assert re.search(r"needs [\d.]+ of 31\.7 GiB, 11\d\.\d GiB of host memory \(its size is unknown\); step ",
                     unknown.stderr)  # fmt: skip
    enough = in_process("render", *OFFLOADED, "--cluster", dark("[machine]\nhost_memory_gib = 120\n"))
    assert " of 120 GiB of host memory; " in enough.stderr
    short = in_process("render", *OFFLOADED, "--cluster", dark("[machine]\nhost_memory_gib = 100\n"), code=2)
    message, hint = error_of(short)
    assert re.search(r"of 31\.7 GiB, 11\d\.\d of 100 GiB of host memory$", message)
    assert "engine.offload=none" in hint


def test_no_hint_needs_a_hosts_memory_that_is_not_known():
    asked = ("--model", "18b", "--gpus", "8", "--gbs", "8", "--engine", "deepspeed-3d", "--cluster")
    assert "offload=optimizer" in error_of(in_process("render", *asked, dark("[machine]\nhost_memory_gib = 999\n")))[1]
    assert "offload" not in error_of(in_process("render", *asked, dark()))[1]


def test_force_smoke_and_this_machine_are_never_refused():
    asked = ("--gpus", "64", "--pp", "16", "--set", "engine.recompute=none", *PUBLISHED_CLUSTER)
    forced = in_process("render", *asked, "--force")
    assert (forced.code, ": does not fit; " in forced.stderr) == (0, True)
    assert "#SBATCH" in forced.stdout
    in_process("render", *asked, "--smoke", code=0)
    here = 'scheduler = "local"\ndevice = "cpu"\nfabric = "pcie"\ngpus_per_node = 8\n[machine]\nmemory_gib = 0.001\n'
    local = in_process("render", "demo", "--cluster", profile_of("here", here))
    assert (local.code, ": does not fit; " in local.stderr) == (0, True)


def test_a_model_that_no_layout_holds_says_so():
    message, hint = error_of(in_process("render", "--gpus", "1", "--pp", "1", "--tp", "1", "--cluster", profile_of(
        "tiny", 'extends = "a100-80g-8"\n[machine]\nmemory_gib = 0.5\n')))  # fmt: skip
    assert "is predicted not to fit" in message
    fits = "no layout of 1 GPU fits at global batch 1024"
    assert hint == f"{fits}: use more GPUs, a smaller model, a shorter --seq, or --force to run it anyway"


def test_experts_over_ranks_are_a_nearest_that_fits(tmp_path):
    text = 'name = "moe"\nmodel.preset = "olmoe-1b-7b"\ndata.source = "random"\nengine.name = "ddp"\n'
    (file := tmp_path / "moe.toml").write_text(text + "layout = { gpus = 8, global_batch = 512 }\n")
    profile = load_profile("h100-80g-8")
    assert plan_open(resolve(load_experiment(str(file)), profile), profile, ()) == PlanChoice()  # at ep 1 nothing fits
    words = ("render", str(file), "--cluster", "h100-80g-8")
    message, hint = error_of(in_process(*words))
    assert message.startswith("tp1-pp1-dp8 is predicted not to fit on h100-80g: ")
    flags = hint.removeprefix("use ").partition(" (")[0].split()
    assert flags == ["--ep", "8"]
    assert "\npredicted: tp1-pp1-dp8-ep8 needs " in f"\n{in_process(*words, *flags, code=0).stderr}"


# --- what is left to the planner


def test_recomputation_is_the_planners_where_nobody_settles_it():
    left = ("--gpus", "64", "--pp", "16", "--set", "engine.recompute=", *PUBLISHED_CLUSTER)
    done = in_process("render", *left)
    assert "\nfrom plan: recompute full, which neither flags nor experiment give\npredicted: " in done.stderr
    assert '"recompute": "full"' in done.stdout
    assert "from plan" not in in_process("render", *left, "--set", "engine.recompute=full").stderr


def test_the_rules_stand_where_they_are_as_good():
    experiment, profile = load_experiment("demo"), load_profile("a100-80g-8")
    resolved = resolve(experiment, profile)
    assert plan_open(resolved, profile, {"layout.tp", "layout.pp", "layout.micro_batch"}) == PlanChoice()


def test_more_stages_are_the_planners_where_one_is_too_little():
    sizes = {"model.preset": "18b", "layout.gpus": 16, "layout.global_batch": 16, "engine.recompute": "full"}
    experiment = load_experiment("gpt2-meg-ds-3d", {**sizes, "layout.pp": None, "layout.micro_batch": 1})
    profile, given = load_profile("jean-zay-v100-32g"), {"engine.recompute", "engine.zero_stage", "layout.micro_batch"}
    ruled = resolve(experiment, profile)
    keys, notes, _ = plan_open(ruled, profile, given)
    planned = resolve(with_keys(experiment, keys), profile)
    assert planned.layout.pp > 1
    assert planned.gpus == 16
    assert notes == (f"from plan: pp {planned.layout.pp}, which neither flags nor experiment give",)
    assert plan_open(ruled, profile, {*given, "layout.pp"}) == PlanChoice()


MIXTRAL = ("--model", "mixtral-8x7b", "--gpus", "32", "--engine", "fsdp", "--cluster", "h100-80g-8")


def test_ep_is_the_planners_if_the_layout_is_its_own(tmp_path):
    assert "\npredicted: tp1-pp1-dp32-ep8 needs " in in_process("render", *MIXTRAL, code=0).stderr
    assert "\npredicted: tp1-pp1-dp32-ep4 needs " in in_process("render", *MIXTRAL, "--ep", "4", code=0).stderr
    raced = in_process("submit", "--race", "--dry-run", *MIXTRAL, environment=without_slurm(tmp_path), code=0)
    rows = {line.partition(": predicted: ")[0] for line in raced.stdout.splitlines() + raced.stderr.splitlines()}
    assert {"tp1-pp1-dp32", "tp1-pp1-dp32-ep2", "tp1-pp1-dp32-ep8"} <= rows


def test_ep_of_an_experiment_stays(tmp_path):
    text = 'name = "moe"\nmodel.preset = "mixtral-8x7b"\ndata.source = "random"\nengine.name = "fsdp"\n'
    (file := tmp_path / "moe.toml").write_text(text + "layout = { gpus = 32, global_batch = 512 }\n")
    for words, layout in (((), "tp1-pp1-dp32"), (("--ep", "2"), "tp1-pp1-dp32-ep2")):
        done = in_process("render", str(file), "--cluster", "h100-80g-8", *words, code=0)
        assert "from plan: recompute full, " in done.stderr
        assert f"\npredicted: {layout} needs " in done.stderr


# --- the record, and the report card


def test_a_run_folder_and_its_record_hold_what_was_predicted():
    run = run_with_prediction(layout__pp=2)
    stages = json.loads((run.path / PREDICTED).read_text())["memory_gib"]["stages"]
    record = read_run(run)
    assert record.predicted_memory_gib == [stage["allocated"] for stage in stages]
    assert len(stages) == 2
    assert record.predicted_step_s > 0
    assert record.sources["predicted_memory_gib"] == "predicted.json, allocated at the peak"
    assert record.sources["predicted_step_s"] == "predicted.json, by data sheets"
    assert "predicted" not in run.job_script.read_text()


def test_a_profile_of_processors_is_not_taken_for_missing_gpus():
    here = 'scheduler = "local"\ndevice = "cpu"\nfabric = "pcie"\ngpus_per_node = 8\n'
    run = run_with_prediction(profile_of("here", here))
    add_attempt(run, 30, device="cpu")
    record = read_run(run)
    assert (record.device, record.mfu, record.flags) == (None, None, [])
    assert record.predicted_step_s > 0


def test_no_prediction_leaves_no_file_and_a_damaged_one_is_none():
    run = run_with_prediction("local")
    assert not (run.path / PREDICTED).exists()
    for text in (
        None, "", "[]", "{", '{"memory_gib": 3, "step": []}',
        '{"memory_gib": {"stages": [{"allocated": NaN}, 3]}, "step": {"step_s": "1"}}',
        '{"memory_gib": {"stages": [{"allocated": -1}]}, "step": {"step_s": true}}',
        '{"memory_gib": {"stages": {"allocated": 1}}, "step": {"step_s": 1e999}}',
    ):  # fmt: skip
        if text is not None:
            (run.path / PREDICTED).write_text(text)
        record = read_run(run)
        assert (record.predicted_step_s, record.predicted_memory_gib) == (None, None), text


@pytest.fixture
def two_runs() -> tuple[RunFolder, RunFolder]:
    """Predicted 0.4 s where half a second was measured, 1.1 times the memory; and one with no prediction."""
    run, bare = run_with_prediction(), run_with_prediction("local")
    tables = json.loads((run.path / PREDICTED).read_text())
    tables["step"]["step_s"] = 0.4
    for stage, allocated in zip(tables["memory_gib"]["stages"], (2.2, 1.0), strict=True):
        stage["allocated"] = allocated
    (run.path / PREDICTED).write_text(json.dumps(tables))
    lines = [metrics_line(step, memory_allocated_gib=[2.0, 1.5]) for step in range(1, 31)]
    add_attempt(run, lines)
    add_attempt(bare, 30)
    return run, bare


def test_the_report_card_as_json_and_of_no_run(two_runs):
    done = in_process("report", "--predictions", "--json")
    page = json.loads(done.stdout)
    (line,) = page["predictions"]
    assert (line["run"], line["layout"], line["step_s"], line["predicted_step_s"]) == (
        two_runs[0].run_id, "tp2-pp2-dp1", 0.5, 0.4)  # fmt: skip
    assert (line["step_error"], line["memory_error"]) == (pytest.approx(-0.2), pytest.approx(0.1))
    assert page["mean"] == {
        "step_error": pytest.approx(0.2), "step_runs": 1, "memory_error": pytest.approx(0.1), "memory_runs": 1,
    }  # fmt: skip
    assert "note: 1 of 2 runs have no prediction\n" in done.stderr
    (two_runs[0].path / PREDICTED).unlink()
    done = in_process("report", "--predictions")
    assert (done.code, done.stdout) == (0, "")
    assert json.loads(in_process("report", "--predictions", "--json").stdout)["mean"]["step_error"] is None


XL = ("--model", "gpt2-xl", "--gpus", "64", "--cluster", "a100-80g-8", "--set", "data.source=random")


OPEN = (
    '[model]\npreset = "7.5b"\n[data]\nsource = "random"\n[engine]\nname = "deepspeed-3d"\n'
    "[layout]\nglobal_batch = 1024\n"
)
ON_A100 = ("--gpus", "64", "--cluster", "a100-80g-8")


def test_a_much_faster_layout_is_named_with_what_asks_for_it(tmp_path):
    (file := tmp_path / "open.toml").write_text(OPEN)
    there, words = without_slurm(tmp_path), (str(file), *ON_A100)
    done = in_process("submit", "--dry-run", *words, environment=there)
    [note] = [line for line in done.stderr.splitlines() if "is predicted faster than tp8-pp1-dp8" in line]
    flags = note.partition("; use ")[2].split()
    again = in_process("submit", "--dry-run", *words, *flags, environment=there, code=0)
    assert f"layout       {note.split()[1]}, 64 GPUs" in again.stdout
    assert "is predicted faster" not in again.stderr


@pytest.mark.parametrize(
    ("words", "held"),
    [
        ((*XL, "--pp", "16"), [{"pp"}]),
        ((*XL, "--smoke"), [set()]),
        (("open.toml", *ON_A100), [set()]),
        (
            ("open.toml", *ON_A100, "--dp", "64", "--mbs", "4", "--zero-stage", "1", "--set", "engine.recompute=full"),
            [],
        ),
    ],
    ids=["pp given", "smoke", "a file of no layout", "all given"],
)
def test_a_submission_searches_once_and_only_what_is_open(tmp_path, monkeypatch, words, held):
    """And sizes the run twice, beside the note on the samples of its step."""
    (tmp_path / "open.toml").write_text(OPEN)
    asked, sizings = [], []

    def sized(*rest, **more):
        sizings.append(rest)
        return size_run(*rest, **more)

    monkeypatch.setattr("hpc_gpt.launcher.decide.size_run", sized)

    def counted(question, *rest, **limits):
        asked.append(question)
        return search(question, *rest, **limits)

    monkeypatch.setattr("hpc_gpt.planner.search.search", counted)
    monkeypatch.setattr("hpc_gpt.planner.best_plan.search", counted)
    monkeypatch.setattr("hpc_gpt.planner.prediction._FASTER_S", math.inf)
    in_process("submit", "--dry-run", *words, environment=without_slurm(tmp_path), cwd=tmp_path, code=0)
    axes = {"tp", "pp", "dp"}
    assert [axes & set(question.fixed) for question in asked] == held
    assert len(sizings) == 2


CLUSTERS = ("a100-80g-8", "h100-80g-8", "jean-zay-v100-16g", "jean-zay-v100-32g")


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("name", "cluster"), zip(list_experiments(), itertools.cycle(CLUSTERS), strict=False))
def test_the_search_of_all_layouts_chooses_what_is_open(monkeypatch, name, cluster):
    monkeypatch.setattr("hpc_gpt.planner.prediction._FASTER_S", math.inf)
    file, profile = read_experiment(name), load_profile(cluster)
    for left_open in ({}, dict.fromkeys(("layout.pp", "layout.tp", "layout.dp", "layout.micro_batches"))):
        for row in [row.name for row in file.rows or ()] or [None]:
            try:
                ruled = resolve(load_experiment(file, left_open, row), profile)
            except UserError:
                continue  # it cannot run there
            for given in (set(), {"engine.recompute"}, {"layout.micro_batch", "engine.zero_stage"}):
                widely, own = plan_open(ruled, profile, given, all_layouts=True), plan_open(ruled, profile, given)
                assert widely[:2] == own[:2], (row, given)


COMPILED = "engine.compile=block"


@pytest.mark.parametrize(
    ("verb", "words", "named"),
    [
        (("submit", "--dry-run", "--yes"), ("--cluster", "a100-80g-8"), True),
        (("submit", "--dry-run", "--yes"), ("--cluster", "a100-80g-8", "--set", COMPILED), False),
        (("submit", "--dry-run", "--yes"), ("--cluster", "jean-zay-v100-32g", "--set", "train.dtype=fp16"), False),
        (("plan",), ("--cluster", "a100-80g-8"), True),
    ],
    ids=["eager", "compiled", "V100", "plan"],
)
def test_an_experiment_silent_on_compiling_is_told_its_gain(tmp_path, verb, words, named):
    file = tmp_path / "own.toml"
    file.write_text('[model]\npreset = "gpt2-xl"\n[data]\nsource = "random"\n[layout]\nmicro_batch = 1\n')
    done = in_process(
        *verb, str(file), "--gpus", "8", "--tp", "1", "--pp", "1", *words, environment=without_slurm(tmp_path)
    )
    if verb == ("plan",):  # it compiles by itself
        assert COMPILED in done.stderr.splitlines()[-1]
        return
    lines = [line for line in done.stderr.splitlines() if "times as fast" in line]
    assert len(lines) == named, done.stderr
    assert all(COMPILED in line for line in lines)


FAST = {"compile": "edges", "one_pass_loss": True, "keep_residuals": True}
PLAIN = {"compile": "none", "one_pass_loss": False, "keep_residuals": False}
BLOCK = PLAIN | {"compile": "block"}


@pytest.mark.parametrize(
    ("cluster", "more", "wanted"),
    [
        ("h100-80g-8", (), FAST),
        ("h100-80g-8", ("--engine", "ddp", "--model", "qwen2.5-0.5b"), FAST),
        ("h100-80g-8", ("--engine", "ddp", "--set", "engine.compile=block"), BLOCK),
        ("h100-80g-8", ("--engine", "ddp", "--set", "engine.keep_residuals=false"), FAST | {"keep_residuals": False}),
        ("jean-zay-v100-32g", ("--engine", "ddp"), PLAIN),
        ("generic-slurm", ("--engine", "ddp"), PLAIN),
    ],
)
def test_without_an_experiment_a_gpu_has_the_fast_settings(tmp_path, cluster, more, wanted):
    """`render` has and names the fast settings, `init` writes them; core/settings/test_fast.py has each engine's."""
    words = ("--model", "gpt2", "--gpus", "8", "--cluster", cluster, *more)
    done = in_process("render", *words, environment=without_slurm(tmp_path), code=0)
    carried = resolved_of(done)
    carried = carried["engine"] | carried["train"]
    assert {key: carried[key] for key in FAST} == wanted
    line = done.stderr.splitlines()[0]
    for key, value in wanted.items():
        assert (f"compiled by {value}, " if key == "compile" else f"{key}, ") in line or value in ("none", False)
        assert value or f"{key}, " not in line
    if not more or cluster == "generic-slurm":
        return
    done = in_process("init", "mine", *words, cwd=tmp_path, code=0)
    written = tomllib.loads((tmp_path / "mine.toml").read_text())["engine"]
    assert {key: written.get(key, PLAIN[key]) for key in FAST} == wanted
    assert all(key not in written for key, value in PLAIN.items() if wanted[key] == value)


def test_plan_counts_the_fast_settings_and_its_next_has_them(tmp_path):
    """Each setting that is turned off costs time, and the line of `next` asks for what was planned: `submit` predicts
    the same step."""
    words = ("--model", "gpt2", "--gpus", "1", "--cluster", "h100-80g-8", "--engine", "ddp", "--mbs", "32")
    steps = {}
    for off in ("", "one_pass_loss", "keep_residuals"):
        more = ("--set", f"engine.{off}=false") if off else ()
        planned = in_process("plan", *words, *more, "--json", environment=without_slurm(tmp_path))
        best = json.loads(planned.stdout)["candidates"][0]["figures"]
        steps[off] = best["step_s"]
        command = in_process("plan", *words, *more, environment=without_slurm(tmp_path)).stderr.splitlines()[-1]
        submit = shlex.split(command.removeprefix("next: hpc-gpt "))
        assert [word for word in submit if word.startswith("engine.") and "recompute" not in word] == list(more[1:])
        dry = in_process(*submit, "--dry-run", environment=without_slurm(tmp_path))
        said = re.search(r"needs ([\d.]+) of .*; step ([\d.]+) s, ", dry.stdout)
        assert float(said[2]) == pytest.approx(best["step_s"], rel=5e-3)
    assert all(step > steps[""] for off, step in steps.items() if off), steps


@pytest.mark.parametrize(
    ("words", "limit_s"),
    [
        (("render", *XL, "--pp", "16"), 60),
        (("submit", "--dry-run", "open.toml", *ON_A100, "--dp", "64"), 60),
        (("submit", "--dry-run", "open.toml", *ON_A100), 0),
        (("submit", "--dry-run", "open.toml", *ON_A100, "--cluster", "generic-slurm"), 60),
    ],
    ids=["no experiment", "a layout given", "no time", "no device"],
)
def test_otherwise_no_faster_layout_is_named(tmp_path, monkeypatch, words, limit_s):
    monkeypatch.setattr("hpc_gpt.planner.prediction._FASTER_S", limit_s)
    (tmp_path / "open.toml").write_text(OPEN)
    done = in_process(*words, environment=without_slurm(tmp_path), cwd=tmp_path, code=0)
    assert "is predicted faster" not in done.stderr
