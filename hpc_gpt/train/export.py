"""Exports a run's weights: `python -m hpc_gpt.train.export RUN FOLDER [STEP]`, which `hpc-gpt export` starts.

It is one process without torch.distributed. The engine's module reads its own checkpoint a parameter at a time, and a
file of the export is written for every 5 GB of weights, which is about the memory that it needs.

The format is that of transformers' GPT2LMHeadModel. GPT-2 there keeps its linear layers as Conv1D, [inputs, outputs],
and splits the fused QKV along the outputs into Q, K and V of all heads. That is also our order
(`view(batch, seq, 3, heads, head_dim)`), so a transpose is all. Engine hf-deepspeed uses the same names.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hpc_gpt.errors import CheckpointError, ConfigError, UserError
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.settings.requirements import check_package
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.checkpoint import Checkpoints
from hpc_gpt.train.engines.protocol import MODULES
from hpc_gpt.train.ranks import Peers

PIECE_BYTES = 5 * 10**9  # what transformers writes too
_INDEX = "model.safetensors.index.json"
_IN_BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
_OUTSIDE = {
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


@dataclass(frozen=True)
class Exported:
    """The result of an export: the checkpoint's step, the files and their size."""

    step: int
    files: tuple[str, ...]
    size_bytes: int


def export_hf(run: RunFolder, folder: Path, step: int | None = None, piece_bytes: int = PIECE_BYTES) -> Exported:
    """Writes the newest sound checkpoint, or that of `step`, as safetensors and config.json of a GPT2LMHeadModel.

    The folder is made as a whole or not at all, and replaces no other. Weights are fp32. Raises ConfigError,
    CheckpointError.
    """
    check_export(folder)
    resolved = run.resolved()
    if resolved.engine.name not in MODULES:
        raise ConfigError(
            f"engine {resolved.engine.name} keeps checkpoints in its own format, which hpc-gpt does not read",
            "Megatron-LM converts its own: tools/checkpoint/convert.py of the checkout",
        )
    checkpoint, found = _find_checkpoint(run, step)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        files = _write_weights(_weights(checkpoint, resolved), aside, piece_bytes)
        config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"}
        text = json.dumps({**config, **hf_config(resolved.model)}, indent=2) + "\n"
        (aside / "config.json").write_text(text, encoding="utf-8")
        files.append("config.json")
        size = sum((aside / name).stat().st_size for name in files)
        check_export(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(found, tuple(files), size)


def check_export(folder: Path) -> None:
    """Raises ConfigError if the folder exists or safetensors is not installed."""
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists, and an export replaces no folder", "name another folder with --out")
    check_package("safetensors", "hf", "the export")


def _find_checkpoint(run: RunFolder, step: int | None) -> tuple[Path, int]:
    for path, marker in Checkpoints(run.checkpoints, Peers()).sound(step):
        return path, int(marker["step"])
    there = ", ".join(str(int(path.name[5:])) for path in sorted(run.checkpoints.glob("step-*")))
    of_step = "" if step is None else f" of step {step}"
    raise CheckpointError(
        f"run {run.run_id} has no sound checkpoint{of_step}",
        f"it has checkpoints of steps {there}" if there else "set train.save_every, or let the run end",
    )


def _weights(checkpoint: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights in the checkpoint by our names, without the vocabulary's padding.

    Raises CheckpointError if one is missing.
    """
    lacking = dict.fromkeys(weight_names(resolved.model))
    engine = importlib.import_module(MODULES[resolved.engine.name])
    for name, weight in engine.read_weights(checkpoint, resolved):
        if name not in lacking:
            raise CheckpointError(f"{checkpoint} holds {name}, which is not a parameter of the model", _DAMAGED)
        del lacking[name]
        yield name, weight[: resolved.model.vocab] if name in ("embedding.weight", "head.weight") else weight
    if lacking:
        raise CheckpointError(f"{checkpoint} lacks {', '.join(list(lacking)[:3])}", _DAMAGED)


_DAMAGED = "was it written by another version? submit again with the version in resolved.json"


def _write_weights(weights: Iterator[tuple[str, Tensor]], folder: Path, piece_bytes: int) -> list[str]:
    """Writes the weights in files of about `piece_bytes`, and an index if there are several; returns their names."""
    from safetensors.torch import save_file

    pieces: list[list[str]] = []
    total = 0

    def write(piece: dict[str, Tensor]) -> None:
        save_file(piece, str(folder / f"piece-{len(pieces)}"), metadata={"format": "pt"})
        pieces.append(list(piece))

    piece: dict[str, Tensor] = {}
    held = 0
    for name, weight in weights:
        piece[hf_name(name)] = kept = to_hf(name, weight).float().contiguous()
        held += kept.nbytes
        total += kept.nbytes
        if held >= piece_bytes:
            write(piece)
            piece, held = {}, 0
    if piece:
        write(piece)
    if len(pieces) == 1:
        (folder / "piece-0").rename(folder / "model.safetensors")
        return ["model.safetensors"]
    files = [f"model-{number:05d}-of-{len(pieces):05d}.safetensors" for number in range(1, len(pieces) + 1)]
    for number, file in enumerate(files):
        (folder / f"piece-{number}").rename(folder / file)
    where = {name: file for names, file in zip(pieces, files, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return [*files, _INDEX]


def hf_config(shape: ModelShape, vocab: int | None = None) -> dict[str, Any]:
    """The keys of GPT2Config for our model, with `vocab` rows of the embedding (default: the tokenizer's vocabulary).

    Our model has no dropout, and no token that begins or ends a text.
    """
    return {
        "vocab_size": shape.vocab if vocab is None else vocab,
        "n_positions": shape.seq,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": 4 * shape.hidden,
        "activation_function": "gelu_new",  # the tanh approximation
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }


def hf_name(full_name: str) -> str:
    """The name that transformers has for a parameter of ours.

    >>> hf_name("blocks.3.attention.qkv.weight")
    'transformer.h.3.attn.c_attn.weight'
    >>> hf_name("embedding.weight")
    'transformer.wte.weight'
    """
    layer, kind = full_name.rsplit(".", 1)
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", layer)
    if block:
        return f"transformer.h.{block[1]}.{_IN_BLOCK[block[2]]}.{kind}"
    return f"{_OUTSIDE[layer]}.{kind}"


def to_hf(full_name: str, weight: Tensor) -> Tensor:
    """A whole weight of ours in transformers' shape, or the other way round; a view.

    transformers has the transposes of the weights of a block's linear layers.
    """
    is_linear = full_name.startswith("blocks.") and full_name.endswith(".weight") and ".norm" not in full_name
    return weight.t() if is_linear else weight


def weight_names(shape: ModelShape) -> list[str]:
    """The full names of all our parameters, in the model's order."""
    kinds = ("weight", "bias")
    blocks = [f"blocks.{n}.{layer}.{kind}" for n in range(shape.layers) for layer in _IN_BLOCK for kind in kinds]
    head = [] if shape.tied else ["head.weight"]
    return ["embedding.weight", "position.weight", *blocks, "norm.weight", "norm.bias", *head]


def main(arguments: list[str]) -> int:
    run, folder = RunFolder(Path(arguments[0])), Path(arguments[1])
    step = int(arguments[2]) if len(arguments) > 2 else None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            done = export_hf(run, folder, step)
    except UserError as fault:
        print(f"Error: {fault}" + (f"\n\nhint: {fault.hint}" if fault.hint else ""), file=sys.stderr)
        return fault.exit_code
    except OSError as fault:
        print(f"Error: cannot write {fault.filename or folder}: {fault.strerror}", file=sys.stderr)
        return 1
    print(f"wrote {folder}: step {done.step} of run {run.run_id}, {done.size_bytes / 1e6:,.1f} MB in fp32")
    print(f"next: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
