"""What a bench makes of an experiment, engine by engine and micro-batch by micro-batch."""

import dataclasses

import pytest

from hpc_gpt.core.engines import engines
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.launcher.bench_rows import BenchRequest, parse_engines, parse_micro_batches, prepare_cells
from hpc_gpt.launcher.this_machine import profile_here

LOCAL = profile_here(None, [])


def settled(experiment="bench", **more):
    """(name, resolved) of each cell."""
    found = prepare_cells(BenchRequest(experiment, LOCAL, **more))
    return [(cell.name, cell.prepared.resolved) for cell in found.cells]


def test_without_anything_it_is_gpt2_on_one_gpu():
    ((name, run),) = settled(has_gpu=True)
    assert (name, run.preset, run.model.seq, run.engine.name, run.gpus) == ("ddp", "gpt2", 1024, "ddp", 1)
    assert (run.train.dtype, run.engine.compile, run.data.source) == ("bf16", "edges", "random")
    fast = (run.engine.one_pass_loss, run.engine.keep_residuals, run.engine.fused_bias_gradients)
    assert fast == (True, True, True)
    assert run.batch.micro_batch * run.model.seq >= 16_000


@pytest.mark.parametrize("experiment", ["bench", "demo", "gpt2-meg-ds-3d"])
def test_nothing_is_saved_or_fetched_between_first_and_last_step(experiment):
    ((_, run),) = settled(experiment, steps=37, smoke=experiment != "bench")
    train = run.train
    assert (train.steps, train.log_every) == (37, 37)
    assert (train.save_every, train.save_last, train.eval_every) == (0, False, 0)
    assert (run.data.source, run.data.path) == ("random", None)
    assert run.job.time is None


ON_V100 = dataclasses.replace(LOCAL, device="v100-32g")


@pytest.mark.parametrize(
    ("asked", "compiled", "others"),
    [
        ({"has_gpu": True}, "edges", (True, True, True)),
        ({"has_gpu": True, "overrides": {"model.preset": "llama3.2-1b"}}, "edges", (True, True, False)),
        ({"has_gpu": True, "engines": ["deepspeed-zero:3"]}, "block", (True, True, True)),
        ({"has_gpu": True, "engines": ["hf-deepspeed"]}, "block", (False, False, False)),
        ({"has_gpu": True, "engines": ["megatron-lm"]}, "none", (False, False, False)),
        ({"has_gpu": True, "overrides": {"engine.loss_chunks": 4}}, "block", (False, False, False)),
        ({"has_gpu": True, "overrides": {"engine.keep_residuals": False}}, "edges", (True, False, True)),
        ({"has_gpu": True, "profile": ON_V100}, "block", (False, False, False)),
        ({}, "block", (False, False, False)),
        ({"overrides": {"engine.one_pass_loss": True}}, "block", (True, False, False)),
    ],
    ids=["gpt2", "llama", "zero 3", "hf", "megatron", "chunks", "one off", "v100", "cpu", "cpu, one asked"],
)
def test_the_default_bench_has_the_fast_settings_that_run_here(asked, compiled, others):
    request = BenchRequest("bench", **{"profile": LOCAL, **asked})
    found = prepare_cells(request)
    engine = found.cells[0].prepared.resolved.engine
    assert engine.compile == compiled
    assert (engine.one_pass_loss, engine.keep_residuals, engine.fused_bias_gradients) == others
    named = any(note.startswith("left out, as not for") for note in found.notes)
    assert named == ((compiled, others) not in [("edges", (True, True, True)), ("edges", (True, False, True))])


def test_a_warm_up_is_cut_to_the_steps_and_that_is_said():
    ((_, run),) = settled("demo", steps=6)
    assert run.train.warmup_steps == 6
    assert "train.warmup_steps is cut from 20 to 6" in prepare_cells(BenchRequest("demo", LOCAL, steps=6)).notes


def test_tokens_are_random_and_that_is_said():
    found = prepare_cells(BenchRequest("demo", LOCAL, {"data.source": "stdlib"}))
    assert found.cells[0].prepared.resolved.data.source == "random"
    assert any("random tokens, not stdlib" in note for note in found.notes)
    assert not any("random tokens" in note for note in prepare_cells(BenchRequest("bench", LOCAL)).notes)


def test_a_cell_for_each_engine_and_micro_batch():
    cells = settled(engines=["ddp", "deepspeed-zero:3"], micro_batches=[1, 4])
    assert [name for name, _ in cells] == ["ddp mbs 1", "ddp mbs 4", "deepspeed-zero:3 mbs 1", "deepspeed-zero:3 mbs 4"]
    assert [(run.engine.name, run.batch.micro_batch) for _, run in cells] == [
        ("ddp", 1), ("ddp", 4), ("deepspeed-zero", 1), ("deepspeed-zero", 4),
    ]  # fmt: skip
    assert cells[2][1].engine.zero_stage == 3
    assert len({run.slug for _, run in cells}) == 4


def test_the_users_own_settings_win():
    ((_, run),) = settled(engines=["fsdp"], micro_batches=[4], overrides={"engine.name": "ddp", "train.steps": 9})
    assert run.engine.name == "ddp"
    assert run.train.steps == 9
    ((_, run),) = settled(overrides={"train.log_every": 3, "train.eval_every": 5})
    assert (run.train.log_every, run.train.eval_every) == (3, 5)


def test_the_passes_of_a_step_stay_unless_the_batch_is_given():
    for _, run in settled("demo", micro_batches=[1, 2]):
        assert run.batch.micro_batches == 4
    for _, run in settled(micro_batches=[1, 4], overrides={"layout.global_batch": 8}):
        assert run.batch.micro_batch * run.batch.micro_batches == 8


def test_a_small_run_keeps_micro_batch_and_steps_as_asked():
    cells = settled(smoke=True, micro_batches=[1, 300], steps=2)
    assert [(run.batch.micro_batch, run.train.steps, run.model.hidden) for _, run in cells] == [
        (1, 2, 64),
        (300, 2, 64),
    ]
    ((_, run),) = settled(smoke=True)
    assert (run.train.steps, run.batch.micro_batch) == (5, 2)
    assert run.name.endswith("-smoke")


@pytest.mark.parametrize(
    "engine", [name for name, each in engines().items() if not {"compile"} & each.switches and not each.takes_command]
)
def test_an_engine_without_a_compiler_is_measured_without(engine):
    found = prepare_cells(BenchRequest("bench", LOCAL, engines=["ddp", engine]))
    assert [cell.prepared.resolved.engine.compile for cell in found.cells] == ["block", "none"]
    assert any("engine.compile is none" in note for note in found.notes)


def test_without_a_compiler_and_a_gpu_nothing_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = prepare_cells(BenchRequest("bench", LOCAL))
    assert found.cells[0].prepared.resolved.engine.compile == "none"
    assert any("no" in note and "g++" in note for note in found.notes)
    assert settled(has_gpu=True)[0][1].engine.compile == "edges"
    assert settled(overrides={"engine.compile": "block"})[0][1].engine.compile == "block"


def test_a_row_of_a_sweep():
    found = prepare_cells(BenchRequest("colab-ladder", LOCAL, row="flash", smoke=True))
    run = found.cells[0].prepared.resolved
    assert (run.sweep, run.row) == ("colab-ladder", "flash")
    with pytest.raises(UserError):
        prepare_cells(BenchRequest("colab-ladder", LOCAL, row="no such rung"))


def test_the_faults_of_all_cells_at_once():
    with pytest.raises(UserError) as refused:
        prepare_cells(BenchRequest("bench", LOCAL, {"engine.tiles": 4}, engines=["ddp", "fsdp"]))
    assert "'ddp'" in str(refused.value)
    assert "'fsdp'" in str(refused.value)
    assert refused.value.hint


def test_engines_as_words():
    assert parse_engines(None) == []
    assert parse_engines("ddp, deepspeed-zero:3 ,fsdp") == ["ddp", "deepspeed-zero:3", "fsdp"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [("dpd", "ddp"), ("", "engines:"), ("ddp,", "engines:"), ("ddp:1", "use ddp"),
     ("deepspeed-zero:4", "deepspeed-zero:3"), ("deepspeed-zero:", "deepspeed-zero:0"),
     ("deepspeed-3d:2", "deepspeed-3d:1"), ("ddp,ddp", "--rounds")],
)  # fmt: skip
def test_engines_that_are_none(words, hint):
    with pytest.raises(ConfigError) as refused:
        parse_engines(words)
    assert hint in refused.value.hint


def test_micro_batches_as_words():
    assert parse_micro_batches(None) == []
    assert parse_micro_batches("1, 2,16") == [1, 2, 16]


@pytest.mark.parametrize("words", ["a,b", "", "1,", "0", "-1", "1.5", "1,1", "9" * 5000, "²", "1 2"])
def test_micro_batches_that_are_none(words):
    with pytest.raises(ConfigError) as refused:
        parse_micro_batches(words)
    assert refused.value.hint


def test_this_machine_is_where_it_runs_whatever_the_profile():
    site = load_profile("h100-80g-8")
    here = profile_here(site, [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.6}])
    assert (here.scheduler, here.device, here.gpus_per_node) == ("local", site.device, 1)
    assert here.calibration == site.calibration
    assert profile_here(None, [{"name": "NVIDIA H200"}] * 2).device == "h200"
    assert profile_here(None, [{"name": "A card of tomorrow"}]).device is None


def test_on_a_known_gpu_the_plan_is_asked():
    profile = profile_here(None, [{"name": "NVIDIA H200"}])
    (cell,) = prepare_cells(BenchRequest("bench", profile, has_gpu=True)).cells
    assert cell.prepared.prediction.tables["memory_gib"]["stages"][0]["allocated"] > 5


@pytest.mark.long
def test_a_bench_begins_from_given_weights_a_small_one_cannot(tmp_path):
    pytest.importorskip("transformers")
    from tests.trainer.test_hf_folders import FAMILIES, write

    write(FAMILIES["qwen3"], tmp_path / "weights")
    file = tmp_path / "mine.toml"
    file.write_text('[train]\ninit = "weights"\n[model]\nseq = 32\n')
    ((_, run),) = settled(str(file), overrides={"layout.gpus": 1})
    assert run.train.init == str(tmp_path / "weights")
    assert (run.model.kv_heads, run.model.seq) == (FAMILIES["qwen3"].kv_heads, 32)
    small = prepare_cells(BenchRequest(str(file), LOCAL, {"layout.gpus": 1}, smoke=True))
    assert small.cells[0].prepared.resolved.train.init is None
    assert any("begins from random ones" in note for note in small.notes)


ROWS = """
name = "mine"
[model]
hidden = 32
layers = 2
heads = 4
vocab = 256
[layout]
gpus = 1
micro_batch = 2
[data]
source = "stdlib"
[engine]
compile = "block"
[train]
dtype = "fp32"
lr = 1e-3
[rows]
"b1" = { layout.micro_batch = 1 }
"b2" = {}
"theirs" = { engine.name = "command", command.run = "./train.sh {much}", command.values.much = 3 }
"""


def test_rows_of_a_file_are_measured_and_command_is_a_peer(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(ROWS)
    found = prepare_cells(BenchRequest(str(file), LOCAL, {"train.lr": 1e-3}, row="b1, theirs", steps=7))
    assert [(cell.name, cell.is_peer) for cell in found.cells] == [("b1", False), ("theirs", True)]
    ours, theirs = (cell.prepared.resolved for cell in found.cells)
    assert (ours.row, ours.batch.micro_batch, ours.train.steps, ours.data.source) == ("b1", 1, 7, "random")
    assert (theirs.row, theirs.engine.name, theirs.train.steps) == ("theirs", "command", 0)
    assert "./train.sh 3" in found.cells[1].prepared.script
    both = prepare_cells(BenchRequest(str(file), LOCAL, row="b1,b2", engines=["ddp", "fsdp"]))
    assert [cell.name for cell in both.cells] == ["b1 ddp", "b1 fsdp", "b2 ddp", "b2 fsdp"]
    with pytest.raises(UserError, match="bench compares trainers of one model"):
        prepare_cells(BenchRequest(str(file), LOCAL, row="theirs"))
