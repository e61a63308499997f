"""Exports a run's weights: `python -m hpc_gpt.train.export RUN FOLDER DTYPE [STEP]`, which `hpc-gpt export` starts.

It is one process without torch.distributed. The engine's module reads its own checkpoint a parameter at a time, and a
file of the export is written for every 5 GB of weights, which is about the memory that it needs.

The format is that of transformers' class of the shape (`model_shape.architecture_of`): GPT2LMHeadModel,
LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM or SmolLM3ForCausalLM. Mistral's shape is Llama's, so a run writes
MistralForCausalLM if it began from one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpc_gpt.engines import engine_named
from hpc_gpt.errors import CheckpointError, ConfigError, UserError
from hpc_gpt.files import aside, sync
from hpc_gpt.output import outlive_readers
from hpc_gpt.runs.lineage import find_ancestors
from hpc_gpt.runs.provenance import begun_of
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.model_shape import ModelShape, architecture_of
from hpc_gpt.settings.requirements import check_package
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.tokens.tokenizer import TABLE_SUFFIX
from hpc_gpt.train.checkpoints.checkpoint import Checkpoints
from hpc_gpt.train.engines.protocol import module_of
from hpc_gpt.train.ranks import Peers
from hpc_gpt.weights.config import GENERATION, Begun, config_of
from hpc_gpt.weights.names import to_hf

PIECE_BYTES = 5 * 10**9  # what transformers writes too
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A tokenizer's files, of which a model has some.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ExportedWeights:
    """The result of an export: the checkpoint's step, the files and their size."""

    step: int
    files: tuple[str, ...]
    size_bytes: int


def export_hf(
    run: RunFolder, folder: Path, step: int | None = None, piece_bytes: int = PIECE_BYTES, dtype: str = "fp32"
) -> ExportedWeights:
    """Writes the newest sound checkpoint, or that of `step`, as safetensors and config.json of transformers' class.

    The folder is made as a whole or not at all, and replaces no other. Weights are fp32, or rounded to bf16. The files
    of the tokenizer go along if the run's settings name a folder that has them, and so does what says how the model of
    the folder that the run began from ends a text. Raises ConfigError, CheckpointError.
    """
    check_export(folder)
    resolved = run.resolved()
    if engine_named(resolved.engine.name).is_program:
        raise ConfigError(
            f"engine {resolved.engine.name} keeps checkpoints in its own format, which hpc-gpt does not read",
            "its own program converts them; Megatron-LM has tools/checkpoint/convert.py",
        )
    if architecture_of(resolved.model) is None:
        raise ConfigError(
            "transformers has no class of this model's shape", "the checkpoints under the run's folder are the weights"
        )
    checkpoint, found = _find_checkpoint(run, step)
    weights = _weights(checkpoint, resolved)
    tokenizer = _tokenizer_files(resolved, run.data_beside)
    begun, note = begun_of(one.path for one in (run, *find_ancestors(run)))
    print(f"note: {note}\n" if note else "", end="")
    files = write_hf(resolved.model, weights, folder, piece_bytes, dtype, tokenizer, begun)
    return ExportedWeights(found, files, sum((folder / name).stat().st_size for name in files))


def write_hf(
    shape: ModelShape,
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    piece_bytes: int = PIECE_BYTES,
    dtype: str = "fp32",
    others: Iterable[Path] = (),
    begun: Begun | None = None,
) -> tuple[str, ...]:
    """Writes weights, by our names and without the vocabulary's padding, and `others`; returns the files' names.

    The folder is made as a whole or not at all: whoever finds it after a crash or a power cut finds all of it.
    `begun`: see `config_of`.
    """
    with aside(folder) as own:
        own.mkdir(parents=True)
        files = _write_weights(to_hf(shape, weights), own, piece_bytes, _DTYPES[dtype])
        for other in others:
            shutil.copyfile(other, own / other.name)
            files.append(other.name)
        if begun is not None and begun.generation is not None:
            (own / GENERATION).write_text(json.dumps(begun.generation, indent=2) + "\n", encoding="utf-8")
            files.append(GENERATION)
        config = config_of(shape, begun=begun)
        first = {key: config[key] for key in ("architectures", "model_type")}
        text = json.dumps({**first, "dtype": str(_DTYPES[dtype]).removeprefix("torch."), **config}, indent=2) + "\n"
        (own / "config.json").write_text(text, encoding="utf-8")
        for written in (*own.iterdir(), own):
            sync(written)
        check_export(folder)
        own.rename(folder)
        sync(folder.parent)
    return (*files, "config.json")


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
    lacking = dict.fromkeys(resolved.model.parameter_names)
    engine = module_of(resolved.engine.name)
    for name, weight in engine.read_weights(checkpoint, resolved):
        if name not in lacking:
            raise CheckpointError(f"{checkpoint} holds {name}, which is not a parameter of the model", _DAMAGED)
        del lacking[name]
        yield name, weight[: resolved.model.vocab] if name in ("embedding.weight", "head.weight") else weight
    if lacking:
        raise CheckpointError(f"{checkpoint} lacks {', '.join(list(lacking)[:3])}", _DAMAGED)


_DAMAGED = "was it written by another version? submit again with the version in resolved.json"


def _tokenizer_files(resolved: Resolved, beside: Path | None) -> list[Path]:
    """The files of the run's tokenizer, if its settings name a tokenizer.json that is there."""
    described = resolved.data.tokenizer
    if not described.endswith(".json") or described.endswith(TABLE_SUFFIX):
        return []
    places = [base / Path(described).expanduser() for base in (beside, Path()) if base is not None]
    source = next((place.parent for place in places if place.is_file()), None)
    return [] if source is None else [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]


def _write_weights(
    weights: Iterator[tuple[str, Tensor]], folder: Path, piece_bytes: int, dtype: torch.dtype
) -> list[str]:
    """Writes weights in files of about `piece_bytes`, and an index if there are several; returns the files' names."""
    from safetensors.torch import save_file

    pieces: list[list[str]] = []
    total = 0

    def write(piece: dict[str, Tensor]) -> None:
        save_file(piece, str(folder / f"piece-{len(pieces)}"), metadata={"format": "pt"})
        pieces.append(list(piece))

    piece: dict[str, Tensor] = {}
    held = 0
    for name, weight in weights:
        # A copy: a view of a larger parameter would be written whole, and keep it alive.
        piece[name] = kept = weight.to(dtype, copy=True, memory_format=torch.contiguous_format)
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


def main(arguments: list[str]) -> int:
    outlive_readers()
    run, folder, dtype = RunFolder(Path(arguments[0])), Path(arguments[1]), arguments[2]
    step = int(arguments[3]) if len(arguments) > 3 else None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            done = export_hf(run, folder, step, dtype=dtype)
    except UserError as fault:
        print(f"Error: {fault}" + (f"\n\nhint: {fault.hint}" if fault.hint else ""), file=sys.stderr)
        return fault.exit_code
    except OSError as fault:
        print(f"Error: cannot write {fault.filename or folder}: {fault.strerror}", file=sys.stderr)
        return 1
    print(f"wrote {folder}: step {done.step} of run {run.run_id}, {done.size_bytes / 1e6:,.1f} MB in {dtype}")
    print(f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
