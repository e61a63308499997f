"""`hpc-gpt export`: transformers loads what a run has trained, and computes the same."""

import importlib.util
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_gpt.core.errors import CheckpointError, ConfigError
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.config import InitConfig, architecture_in, config_of, read_config
from hpc_gpt.core.weights.names import size_of
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.states import WEIGHT, Held, SavedIndex, SavedStates, Share, put_states
from hpc_gpt.trainer.engines.protocol import read_weights
from hpc_gpt.trainer.export import export_hf, main
from hpc_gpt.trainer.model import folder_tensors as tensors
from hpc_gpt.trainer.model.folder_tensors import write_hf
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import full_name
from hpc_gpt.trainer.ranks import Peers
from tests.cli.command import hpc_gpt
from tests.distributed.equality_cases import MODELS
from tests.limits import open_files_left
from tests.trainer.checkpoints.test_states import on_ranks
from tests.trainer.launch import new_run, settings, train

pytestmark = pytest.mark.xdist_group("train-export")

transformers = pytest.importorskip("transformers")
VOCAB = 259  # padded to 320
SHAPE = ModelShape(layers=3, heads=4, vocab=61, seq=32, **MODELS["llama"])
ENGINES = {"deepspeed-zero": True, "hf-deepspeed": False}  # whether tied


@pytest.fixture(scope="module")
def runs(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """A run of each engine: four steps, checkpoints after two and four."""
    made = {}
    for name, tied in ENGINES.items():
        resolved = settings(tokens, {"gpus": 1}, steps=4, save_every=2)
        resolved = replace(
            resolved, engine=Engine(name=name, zero_stage=3), model=replace(resolved.model, vocab=VOCAB, tied=tied)
        )
        made[name] = new_run(tmp_path_factory.mktemp(name), resolved)
        launch = train(made[name], 1)
        assert launch.ended == ("done", 4, False), launch.log
    return made


def our_logits(run: RunFolder, step: int, tokens: torch.Tensor) -> torch.Tensor:
    """What our own model computes with the weights of a checkpoint."""

    resolved = run.resolved()
    model = Gpt(resolved.model, seed=99)
    weights = dict(read_weights(run.checkpoints / f"step-{step:08d}", resolved))
    with torch.no_grad():
        for parameter in model.parameters():
            weight = weights.pop(full_name(parameter))  # without the vocabulary's padding
            parameter[: len(weight)].copy_(weight)
        assert not weights
        return model.logits(tokens)[..., :VOCAB]


def hf_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(tokens).logits


TOKENS = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", ENGINES)
def test_transformers_computes_the_same_logits(runs, name, tmp_path):
    done = export_hf(runs[name], tmp_path / "out")
    assert done.step == 4
    assert "model.safetensors" in done.files
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(done.files), "safetensors and JSON, no pickle"
    ours, theirs = our_logits(runs[name], 4, TOKENS), hf_logits(tmp_path / "out", TOKENS)
    assert theirs.shape == (2, 32, VOCAB), "the padding of the vocabulary stays behind"
    assert float((ours - theirs).abs().max()) <= 1e-5
    # Trained weights they are: those of two steps before give others.
    assert float((our_logits(runs[name], 2, TOKENS) - theirs).abs().max()) > 1e-3


def test_the_verb_takes_a_run_and_a_step_and_says_what_it_wrote(runs, tmp_path, monkeypatch, capsys):
    run = runs["hf-deepspeed"]
    done = hpc_gpt("export", run.path, "--step", 2, cwd=tmp_path, code=0)
    folder = tmp_path / f"{run.run_id}-hf"
    assert done.stdout.startswith(f"wrote {folder.name}: step 2 of run {run.run_id}, ")
    megabytes = float(done.stdout.split()[-4])
    assert megabytes == pytest.approx((folder / "model.safetensors").stat().st_size / 1e6, abs=0.06)
    assert float((our_logits(run, 2, TOKENS) - hf_logits(folder, TOKENS)).abs().max()) <= 1e-5
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False

    # What the verb starts, without its start: torch is here already.
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main([str(run.path), folder.name, "fp32"]) == 2
    words = "exists, and an export does not replace a folder\n\nhint: name another folder with --out\n"
    assert capsys.readouterr().err == f"Error: {folder.name} {words}"
    assert main([str(run.path), "three", "fp32", "3"]) == 2
    words = "has no sound checkpoint of step 3\n\nhint: it has checkpoints of steps 2, 4\n"
    assert capsys.readouterr().err == f"Error: run {run.run_id} {words}"
    assert sorted(path.name for path in tmp_path.iterdir() if "hf" in path.name or "three" in path.name) == [
        folder.name
    ]
    assert hpc_gpt("export", "nowhere", cwd=tmp_path).code == 5


def in_ten_files(run: RunFolder, folder: Path) -> RunFolder:
    """The run with its checkpoint of step 4 as ten ranks save it, each some rows of every parameter."""
    shutil.copytree(run.path, folder)
    shutil.rmtree(folder / "checkpoints")
    states = SavedStates(run.checkpoints / "step-00000004")
    about = {key: value for key, value in states.about.items() if key not in ("format", "parameters")}
    checkpoint, sums = folder / "checkpoints" / "step-00000004", dict[str, dict[str, int]]()
    checkpoint.mkdir(parents=True)

    def work(peers: Peers) -> None:
        files, held = RankFiles(peers), []
        for name in states.names:
            weight = states.whole(name)
            first, end = (len(weight) * (peers.rank + more) // 10 * (weight[0].numel()) for more in (0, 1))
            share = Share(name, tuple(weight.shape), None, 0, 1, first, end - first, len(weight))
            held.append(Held(share, WEIGHT, weight.flatten()[first:end]))
        put_states(files, held, about, SavedIndex())
        sums.update(files.write(checkpoint))

    on_ranks(10, work)
    marker = json.loads((run.checkpoints / "step-00000004" / "complete.json").read_text())
    (checkpoint / "complete.json").write_text(json.dumps(marker | {"files": sums}))
    return RunFolder(folder)


def test_ten_ranks_files_need_no_more_open_files_than_one(runs, tmp_path):
    one, ten = runs["deepspeed-zero"], in_ten_files(runs["deepspeed-zero"], tmp_path / "ten")
    export_hf(one, tmp_path / "before")  # what it imports is opened here
    with open_files_left(5):
        export_hf(one, tmp_path / "one-hf")
        export_hf(ten, tmp_path / "ten-hf")
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one-hf", "ten-hf")]
    assert written[0] == written[1]
    file = ten.checkpoints / "step-00000004" / "states-00007.safetensors"
    content = bytearray(file.read_bytes())
    content[-70] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="has no sound checkpoint"):
        export_hf(ten, tmp_path / "never")


def test_a_damaged_checkpoint_is_passed_over(runs, tmp_path, capsys):
    run = runs["deepspeed-zero"]
    [victim, *_] = sorted((run.checkpoints / "step-00000004").rglob("*.safetensors"))
    sound = victim.read_bytes()
    try:
        victim.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        assert export_hf(run, tmp_path / "out").step == 2
        assert "skipping" in capsys.readouterr().out
        with pytest.raises(CheckpointError, match="no sound checkpoint of step 4"):
            export_hf(run, tmp_path / "other", step=4)
    finally:
        victim.write_bytes(sound)
    assert not (tmp_path / "other").exists()


def test_half_an_export_is_none(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "config_of", lambda shape, begun: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_hf(runs["hf-deepspeed"], tmp_path / "out")
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.parametrize("at", ["the second file", "the tokenizer's", "config.json", "the name"])
def test_a_killed_export_leaves_no_folder_and_blocks_no_other(at, tmp_path, monkeypatch):
    import safetensors.torch

    owner, name, calls = {
        "the second file": (safetensors.torch, "save_file", 1),
        "the tokenizer's": (shutil, "copyfile", 0),
        "config.json": (tensors, "config_of", 0),
        "the name": (tensors, "check_export", 0),
    }[at]
    tokenizer, out = tmp_path / "tokenizer.json", tmp_path / "out"
    tokenizer.write_text("{}")
    weights = [(key, torch.ones(size_of(SHAPE, key))) for key in SHAPE.parameter_names]

    def write():
        return write_hf(SHAPE, weights, out, 9_000, others=[tokenizer])

    pid = os.fork()
    if pid == 0:
        left, was = iter(range(calls)), getattr(owner, name)
        setattr(owner, name, lambda *given, **more: (
            was(*given, **more) if next(left, None) is not None else os.kill(os.getpid(), signal.SIGKILL)
        ))  # fmt: skip
        try:
            write()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [tokenizer.name]
    files = write()
    assert {path.name for path in out.iterdir()} == set(files) > {"config.json", "tokenizer.json"}


def test_weights_that_began_as_mistrals_are_its_own_again(tmp_path):
    write_hf(SHAPE, [(key, torch.ones(size_of(SHAPE, key))) for key in SHAPE.parameter_names],
             tmp_path / "out", begun=InitConfig("MistralForCausalLM"))  # fmt: skip
    assert architecture_in(tmp_path / "out") == "MistralForCausalLM"
    assert read_config(tmp_path / "out", SHAPE.seq) == SHAPE
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "MistralForCausalLM"
    assert model.config.sliding_window is None
    for shape in (replace(SHAPE, bias="qkv"), ModelShape(32, 2, 4)):  # no more Mistral's
        assert config_of(shape, begun=InitConfig("MistralForCausalLM")) == config_of(shape)


def test_without_safetensors_one_line_says_what_to_install(runs, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "safetensors" else find(name))
    with pytest.raises(ConfigError, match="the export needs safetensors, which is not installed") as refused:
        export_hf(runs["hf-deepspeed"], tmp_path / "out")
    assert refused.value.hint == "pip install 'hpc-gpt[train]'"
