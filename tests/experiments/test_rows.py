"""Every row of every published folder: it resolves, or cannot, by our rules; it renders; its layout is the table's."""

import re
import subprocess
from dataclasses import replace

import pytest

from hpc_gpt.core.errors import LayoutError
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.experiment_file import DEFAULT_EXPERIMENT, list_experiments, load_experiment
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.tables import merge_tables
from hpc_gpt.core.typed_tables import check_tables
from hpc_gpt.core.weights.classes import architecture_of
from hpc_gpt.launcher.render import render_script
from tests.experiments.sweeps import COUNTS, PROFILES, possible_rows, settle, sweep


def test_there_is_a_folder_for_each_published_table():
    assert set(list_experiments()) == {
        "demo",
        "llama-tiny",
        "memory-techniques",
        "moe-tiny",
        "muon-tiny",
        "torchtitan-llama",
        *COUNTS,
    }
    assert {name: len(sweep(name).rows) for name in COUNTS} == COUNTS


def test_the_six_impossible_rows_are_refused_by_our_rules():
    impossible = [(name, row) for name in COUNTS for row in sweep(name).rows if row.impossible]
    assert len(impossible) == 6
    for name, row in impossible:
        experiment = check_tables(merge_tables(sweep(name).tables, row.overrides), Experiment, row.name)
        with pytest.raises(LayoutError, match=r"layout tp4-pp\d+-dp1 needs \d+ GPUs .*, but there are \d+") as refusal:
            resolve(experiment, load_profile("generic-slurm"))
        # The reason that the file gives is that of the refusal.
        needed, there = re.findall(r"needs (\d+) GPUs .* are (\d+)", str(refusal.value))[0]
        pp = experiment.layout.pp
        assert row.impossible == f"tp4 x pp{pp} needs {needed} GPUs, the row has {there}"
        # It is the layout alone: with the GPUs that it needs, it resolves.
        enough = replace(experiment, layout=replace(experiment.layout, gpus=int(needed)))
        assert resolve(enough, load_profile("generic-slurm")).layout.gpus == int(needed)


def test_by_default_it_is_the_sources_64_gpu_run():
    run = resolve(load_experiment(DEFAULT_EXPERIMENT), load_profile("generic-slurm"))
    assert run.name == "gpt2-meg-ds-3d-48b"
    assert (str(run.layout), run.batch.micro_batches, run.batch.global_batch) == ("tp4-pp16-dp1", 256, 1024)


def test_every_row_renders_and_differs_from_the_others(tmp_path):
    """Each at full size, under both kinds of nodes; bash can read all of them."""
    scripts = []
    for name, row in possible_rows():
        for profile in PROFILES:
            run = settle(name, row.name, profile)
            assert (run.layout.gpus, run.name) == (run.gpus, f"{name}-{row.name}")
            path = tmp_path / f"{name}-{row.name}-{profile}.sh"
            path.write_text(render_script(run))
            scripts.append(path)
    assert len({path.read_text() for path in scripts}) == len(scripts) == 2 * (sum(COUNTS.values()) - 6)
    read = 'for script in *.sh; do bash -n "$script" || exit 1; done'
    done = subprocess.run(["bash", "-c", read], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rung_keeps_what_the_one_before_switched_on():
    """the colab ladder's rungs differ from one another by what their names say, and by the batch that then fits."""
    rungs = [row.name for row in sweep("colab-ladder").rows]
    settings = [settle("colab-ladder", name) for name in rungs]
    switches = [
        {
            "tf32": run.train.tf32,
            "no-sync": run.train.log_every > 10,
            "amp": run.train.dtype == "fp16",
            "compile": run.engine.compile != "none",
            "flash": run.engine.attention == "flash",
            "vocab": run.model.padded_vocab == 50304,
            "tied": run.model.tied,
            "workers": run.data.workers > 0,
        }
        for run in settings
    ]
    assert not any(switches[0].values())
    for before, after, name in zip(switches, switches[1:], rungs[1:], strict=False):
        switched = [key for key in after if after[key] != before[key]]
        assert all(after[key] for key in switched)
        assert switched in ([name.partition("-b")[0]], []), name
    assert all(switches[-1].values())


def test_colab_ladders_samples_are_512_tokens():
    run = settle("colab-ladder", "baseline")
    assert 11 * run.batch.global_batch * run.model.seq == 157_696


def test_every_memory_rung_trains_on_the_sources_10240_samples():
    for row in sweep("memory-ladder").rows:
        run = settle("memory-ladder", row.name)
        assert run.train.steps * run.batch.global_batch == 10_240


def test_each_memory_technique_stands_alone_against_a_plain_base():
    """One GPU, no published figure, shape and batch of the base; one switch each, but for the row of all of them."""
    rows = sweep("memory-techniques").rows
    base = settle("memory-techniques", "base")
    assert (base.model.padded_vocab, base.model.seq, base.batch.global_batch * base.model.seq) == (50304, 1024, 16384)
    assert [row.name for row in rows if row.published or row.impossible] == []
    for row in rows:
        run = settle("memory-techniques", row.name)
        assert (run.gpus, run.model, run.batch, run.train.dtype) == (1, base.model, base.batch, base.train.dtype)
        own = {key: getattr(run.engine, key) for key in row.overrides.get("engine", {})}
        assert own == row.overrides.get("engine", {}), row.name
        if run.engine.name == base.engine.name and row.name not in ("base", "all-of-these"):
            assert sum(len(table) for table in row.overrides.values()) == 1, row.name


def test_training_parallelisms_parameters_are_of_another_block():
    """What the sweep's file says of the 194,103,296: 8.5 h^2 + 2 h a block, no positions, tied."""
    run = settle("training-parallelism", "fsdp")
    shape = run.model
    assert sweep("training-parallelism").rows[4].published["params"] == 194_103_296
    block = 17 * shape.hidden**2 // 2 + 2 * shape.hidden
    assert 50257 * shape.hidden + shape.hidden + shape.layers * block == 194_103_296
    assert 50257 * shape.hidden + shape.hidden + 32 * block == 336_742_400
    assert shape.params == 253_577_216


def test_torchtitans_llama_rows_resolve_with_figures_as_printed():
    """As benchmarks/llama3_h100_202412_torchtitan.md has them."""
    rows = {row.name: row.published for row in sweep("torchtitan-llama").rows}
    assert {name: figures["tokens_per_s_gpu"] for name, figures in rows.items()} == {
        "fsdp-8": 5762, "fsdp-8-compile": 6667, "fsdp-128": 5605, "fsdp-128-compile": 6514,
    }  # fmt: skip
    for name in rows:
        run = settle("torchtitan-llama", name)
        assert (run.model, run.engine.name) == (preset("llama3.1-8b"), "fsdp")
        assert run.batch.global_batch == 2 * run.gpus
        assert render_script(run)


def test_the_small_mixture_of_experts_is_balanced():
    run = resolve(load_experiment("moe-tiny"), load_profile("local"))
    assert (run.model.experts, run.model.experts_per_token, run.train.balance) == (8, 2, "loss")
    assert run.model.params_active < run.model.params / 2 < 1e6


def test_the_small_llama_is_one_in_every_part():
    shape = resolve(load_experiment("llama-tiny"), load_profile("local")).model
    assert architecture_of(shape) == "LlamaForCausalLM"
    assert shape.is_grouped
    assert shape.rope_scaling.original_max_position_embeddings < shape.seq
    assert shape.params < 2e6
