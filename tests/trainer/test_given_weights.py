"""A run that begins from a folder of weights: what it says, keeps and refuses, and what it needs to resume."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.provenance import weights_of
from hpc_gpt.core.runs.run_folder import RunFolder, create_run
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolved import Resolved, config_hash
from hpc_gpt.core.weights.config import architecture_in
from hpc_gpt.launcher.resumption import check_resumption
from hpc_gpt.report.tables import as_block
from hpc_gpt.trainer.export import export_hf
from tests.cli.command import in_process
from tests.made_runs import read_run
from tests.trainer.launch import LOCAL, settings, train
from tests.trainer.test_hf_folders import FAMILIES, write

pytestmark = pytest.mark.xdist_group("given-weights-runs")
pytest.importorskip("safetensors")
SHAPE = replace(FAMILIES["qwen3"], vocab=256, seq=32)


def begun_from(folder: Path, tokens: Path, steps: int = 2) -> Resolved:
    resolved = settings(tokens, {"gpus": 1}, Engine(name="ddp"), steps=steps, save_every=2)
    return replace(resolved, model=SHAPE, train=replace(resolved.train, init=str(folder)))


def run_of(logs: Path, resolved: Resolved) -> RunFolder:
    return create_run(logs, resolved, "#!/bin/sh\n", "", {"provenance.json": {"versions": {}, **weights_of(resolved)}})


def test_it_begins_from_the_folder_and_resumes_without_it(tokens: Path, tmp_path: Path) -> None:
    write(SHAPE, tmp_path / "weights")
    resolved = begun_from(tmp_path / "weights", tokens)
    run = run_of(tmp_path, resolved)
    (tmp_path / "weights" / "model.safetensors").touch()  # as if it were restored
    launch = train(run, 1)
    assert launch.ended == ("done", 2, False), launch.log
    assert f"begins from the weights in {tmp_path / 'weights'}" in launch.log
    what = "tiny: tp1-pp1-dp1 on 1 x cpu, 25,296 parameters, fp32, global batch 4 x 32 tokens, attention flash"
    limits = "a collective may take 120 min; a hang is found after 60 min while starting, compiling or saving, else "
    assert f"\n{what}\n{limits}after the time of 20 steps, at least 300 s\n" in launch.log
    first = json.loads(launch.attempt.metrics.read_text().splitlines()[0])
    assert first["loss"] > 5.7, "random weights give log 256 = 5.55 within 0.02"
    assert f"begins from {tmp_path / 'weights'}" in " ".join(as_block(read_run(run), 300).split())
    shutil.rmtree(tmp_path / "weights")
    longer = replace(resolved, train=replace(resolved.train, steps=4))
    (run.path / "resolved.json").write_text(longer.to_json())
    launch = train(run, 1)
    assert launch.ended == ("done", 4, False), launch.log
    assert "resumed after step 2 of 4" in launch.log


def test_a_folder_that_changed_is_refused_at_the_start(tokens: Path, tmp_path: Path) -> None:
    write(SHAPE, tmp_path / "weights")
    run = run_of(tmp_path, begun_from(tmp_path / "weights", tokens))
    shutil.rmtree(tmp_path / "weights")
    write(SHAPE, tmp_path / "weights", dtype="bf16")
    config = tmp_path / "weights" / "config.json"
    config.write_text(config.read_text().replace('"use_cache": true', '"use_cache": false'))
    with pytest.raises(ConfigError, match="has changed since the run was submitted"):
        check_resumption(run)  # before it is queued
    again = in_process("submit", "--resume", run.path, "--from-start", "--dry-run").stderr
    assert "has changed since the run was submitted: config.json" in again
    assert "; the new run begins from the weights that are there now\n" in again
    launch = train(run, 1)
    assert launch.ended[0] == "user_error", launch.log
    assert "has changed since the run was submitted: config.json, model.safetensors" in launch.log


def test_what_began_from_mistral_is_exported_bit_by_bit(tokens: Path, tmp_path: Path) -> None:
    shape, folder = replace(FAMILIES["llama"], vocab=256, seq=32, pad_token=0), tmp_path / "weights"
    write(shape, folder, dtype="bf16", begun_as="MistralForCausalLM")
    ends = {"bos_token_id": 1, "eos_token_id": [2, 9], "pad_token_id": 0, "max_position_embeddings": 512}
    config = json.loads((folder / "config.json").read_text()) | ends | {"sliding_window": 256}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9], "max_new_tokens": 3}')
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    for name in tokenizer:
        (folder / name).write_text("{}")
    resolved = replace(begun_from(folder, tokens, steps=1), model=shape)
    resolved = replace(resolved, train=replace(resolved.train, lr=0.0))  # a step that changes nothing
    run = run_of(tmp_path, resolved)
    assert train(run, 1).ended == ("done", 1, False)
    (folder / "config.json").unlink()  # what is passed on is in provenance.json
    # The tokens are made already; a run that makes its own from text has taken the folder's tokenizer.
    data = replace(resolved.data, tokenizer=str(folder / "tokenizer.json"))
    (run.path / "resolved.json").write_text(replace(resolved, data=data).to_json())
    export_hf(run, tmp_path / "out", dtype="bf16")
    from safetensors.torch import load_file

    theirs, ours = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert architecture_in(tmp_path / "out") == "MistralForCausalLM"
    assert set(tokenizer) < {path.name for path in (tmp_path / "out").iterdir()}
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found | ends | {"sliding_window": 256} == found
    transformers = pytest.importorskip("transformers")
    generation = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (generation.eos_token_id, generation.max_new_tokens) == ([2, 9], 3)


def test_a_plain_sbatch_records_the_folder_too(tokens: Path, tmp_path: Path) -> None:
    write(SHAPE, tmp_path / "weights")
    run = run_of(tmp_path, begun_from(tmp_path / "weights", tokens))
    expected = json.loads((run.path / "provenance.json").read_text())["init"]
    for name in ("provenance.json", "experiment.toml"):
        (run.path / name).unlink()  # sbatch job.sh writes job.sh and resolved.json alone
    assert train(run, 1).ended == ("done", 2, False)
    assert json.loads((run.path / "provenance.json").read_text())["init"] == expected


def test_the_folder_gives_the_shape_and_the_tokenizer(tmp_path: Path) -> None:
    write(SHAPE, tmp_path / "weights")
    (tmp_path / "weights" / "tokenizer.json").write_text("{}")
    file = tmp_path / "mine.toml"
    file.write_text('[train]\ninit = "weights"\n[model]\nseq = 32\n[data]\nsource = "stream"\npath = "stdlib"\n')
    experiment = load_experiment(str(file))
    resolved = resolve(experiment, LOCAL)
    assert resolved.model == replace(SHAPE, vocab_multiple=64)
    assert resolved.train.init == str(tmp_path / "weights")
    assert resolved.data.tokenizer == str(tmp_path / "weights" / "tokenizer.json")
    without = replace(resolved, train=replace(resolved.train, init=None))
    assert '"init"' not in without.to_json()
    assert Resolved.from_json(without.to_json()) == without
    assert config_hash(without) != config_hash(resolved)
