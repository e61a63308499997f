"""A row of the embedding that transformers does not train: one step from a folder, as the folder's class does it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.stored import experiment_of
from hpc_gpt.core.tables import toml_lines
from hpc_gpt.core.weights.config import read_config
from hpc_gpt.core.weights.folder import read_folder
from hpc_gpt.core.weights.names import parts_of
from hpc_gpt.launcher.smoke import shrink
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.initial_weights import FolderWeights
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from tests.trainer.launch import LOCAL
from tests.trainer.test_hf_folders import FAMILIES, write

transformers = pytest.importorskip("transformers")
PAD = 7
# One of each class, and the same with the head that it has not.
CLASSES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}


def made(name: str, tied: bool, folder: Path, **keys: Any) -> Path:
    """A folder of weights whose config.json has a pad token, or other `keys`."""
    shape = replace(FAMILIES[CLASSES[name]], tied=tied)
    write(shape, folder, begun_as="MistralForCausalLM" if name == "mistral" else None)
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": PAD} | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def asked(folder: Path, text: str) -> Resolved:
    """What an experiment's file beside the folder resolves to."""
    file = folder.parent / "mine.toml"
    file.write_text(f'{text}\n[engine]\nname = "ddp"\n[layout]\ngpus = 1\nmicro_batch = 1\n')
    return resolve(load_experiment(str(file)), LOCAL)


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in CLASSES), ("gpt2", True), ("qwen3", True)])
def test_one_step_moves_the_embedding_as_transformers_class_does(name: str, tied: bool, tmp_path: Path) -> None:
    folder = made(name, tied, tmp_path / "weights")
    resolved = asked(folder, '[train]\ninit = "weights"\n[model]\nseq = 48')
    shape = resolved.model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__.lower().startswith(name)
    ours = Gpt(shape, 1, TensorParallel(given=FolderWeights(read_folder(folder), shape)))
    tokens = torch.randint(0, shape.vocab, (4, 49), generator=torch.Generator().manual_seed(5))
    tokens[:, 3::5] = PAD
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss = ours(inputs, targets)
    expected = torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    before = ours.embedding.weight.detach().clone()
    for model, own in ((ours, loss), (theirs, expected)):
        own.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    row = theirs.get_input_embeddings().weight
    torch.testing.assert_close(ours.embedding.weight[: shape.vocab], row, rtol=0, atol=2e-6)
    moved = float((ours.embedding.weight.detach() - before)[PAD].abs().max())
    assert (moved == 0) is (name != "gpt2" and not tied), "a tied head trains it, and GPT-2's class has no such row"
    if not tied:
        head = theirs.get_parameter(parts_of(shape, "head.weight")[0].name)
        torch.testing.assert_close(ours.output_layer.weight[: shape.vocab], head, rtol=0, atol=2e-6)


def test_a_drawn_row_begins_as_zeros_and_changes_no_other() -> None:
    """As transformers' `_init_weights` has it."""
    without = replace(FAMILIES["llama"], tied=False)
    plain, padded = (Gpt(shape, 1) for shape in (without, replace(without, pad_token=PAD)))
    for own, other in zip(plain.parameters(), padded.parameters(), strict=True):
        apart = own.detach() != other.detach()
        assert bool(apart.any()) is (own is plain.embedding.weight)
    assert not padded.embedding.weight[PAD].any()
    assert torch.equal(plain.embedding.weight[PAD + 1 :], padded.embedding.weight[PAD + 1 :])


def test_the_switch_follows_from_the_given_folder_alone(tmp_path: Path) -> None:
    folder = made("qwen2", False, tmp_path / "weights")
    sizes, init = "\n".join(toml_lines(read_config(folder).table() | {"pad_token": None})), '[train]\ninit = "weights"'
    for text, pad in (
        (f'[model]\nhf = "weights"\n{init}', PAD),
        ('[model]\nhf = "weights"', PAD),
        (init, PAD),
        (f"[model]\n{sizes}\n{init}", PAD),
        (f"[model]\n{sizes}\npad_token = 9\n{init}", 9),
        ('[model]\nhf = "weights"\npad_token = 9', 9),
        (f"[model]\n{sizes}", None),
        (f'[model]\npreset = "gpt2"\n{init}', None),  # another model: check_weights refuses the folder
        ('[model]\npreset = "smollm3-3b"', None),
    ):
        resolved = asked(folder, text)
        assert resolved.model.pad_token == pad, text
        assert ("pad_token" in resolved.to_json()) is (pad is not None)
        assert resolve(experiment_of(resolved), LOCAL) == resolved
        small = shrink(experiment_of(replace(resolved, model=replace(resolved.model, vocab=999))), resolved, False)
        assert small.experiment.model.pad_token == pad
