"""A run's weights for other programs: `python -m hpc_gpt.train.export RUN FOLDER [STEP]`, what `hpc-gpt export` starts.

One process, no torch.distributed: the engine's module reads its own checkpoint a parameter at a time, and a piece of
the export is written whenever 5 GB have come together, so that is about what it takes of memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hpc_gpt.errors import CheckpointError, ConfigError, UserError
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.settings.requirements import check_package
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.checkpoint import Checkpoints
from hpc_gpt.train.engines.protocol import MODULES
from hpc_gpt.train.hf_format import hf_config, hf_name, to_hf, weight_names
from hpc_gpt.train.ranks import Peers

PIECE_BYTES = 5 * 10**9  # what transformers writes too
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Exported:
    """What an export has written: the checkpoint's step, the files, their size."""

    step: int
    files: tuple[str, ...]
    size_bytes: int


def export_hf(run: RunFolder, folder: Path, step: int | None = None, piece_bytes: int = PIECE_BYTES) -> Exported:
    """Writes the newest sound checkpoint, or that of `step`, as safetensors and config.json of a GPT2LMHeadModel.

    The folder comes into being whole or not at all, and never over another. Weights are fp32. Raises ConfigError,
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
    """Refuses a folder that is there, and an installation that lacks safetensors."""
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists, and an export writes over nothing", "name another folder with --out")
    check_package("safetensors", "hf", "the export")


def _find_checkpoint(run: RunFolder, step: int | None) -> tuple[Path, int]:
    for path, marker in Checkpoints(run.checkpoints, Peers()).sound(step):
        return path, int(marker["step"])
    there = ", ".join(str(int(path.name[5:])) for path in sorted(run.checkpoints.glob("step-*")))
    of_step = "" if step is None else f" of step {step}"
    raise CheckpointError(
        f"run {run.run_id} has no sound checkpoint{of_step}",
        f"it has checkpoints of steps {there}" if there else "let it save one: train.save_every, or its end",
    )


def _weights(checkpoint: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """The weights in the checkpoint by our names, the vocabulary's padding cut off; CheckpointError if one lacks."""
    lacking = dict.fromkeys(weight_names(resolved.model))
    engine = importlib.import_module(MODULES[resolved.engine.name])
    for name, weight in engine.read_weights(checkpoint, resolved):
        if name not in lacking:
            raise CheckpointError(f"{checkpoint} holds {name}, which is no parameter of the model", _DAMAGED)
        del lacking[name]
        yield name, weight[: _rows(name, weight, resolved.model)]
    if lacking:
        raise CheckpointError(f"{checkpoint} lacks {', '.join(list(lacking)[:3])}", _DAMAGED)


_DAMAGED = "was it written by another version? submit again with the version in resolved.json"


def _rows(name: str, weight: Tensor, shape: ModelShape) -> int:
    return shape.vocab if name in ("embedding.weight", "head.weight") else weight.shape[0]


def _write_weights(weights: Iterator[tuple[str, Tensor]], folder: Path, piece_bytes: int) -> list[str]:
    """Writes the weights in files of about `piece_bytes`, with an index where there are several; gives their names."""
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
