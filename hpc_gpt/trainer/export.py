"""Exports a run's weights: `python -m hpc_gpt.trainer.export RUN FOLDER DTYPE [STEP]`, for `hpc-gpt export`.

It is one process without torch.distributed. The engine's module reads its checkpoint one parameter at a time, and
`trainer.model.folder_tensors` writes the parameters.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hpc_gpt.core.checkpoints.branches import reading
from hpc_gpt.core.checkpoints.find_checkpoints import list_complete, step_in
from hpc_gpt.core.checkpoints.lineage import find_ancestors
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import CheckpointError, ConfigError, UserError
from hpc_gpt.core.output import outlive_readers
from hpc_gpt.core.process import raise_file_limit
from hpc_gpt.core.runs.provenance import init_config_of
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.weights.classes import architecture_of
from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints
from hpc_gpt.trainer.engines.protocol import read_weights
from hpc_gpt.trainer.model.folder_tensors import check_export, write_hf
from hpc_gpt.trainer.ranks import Peers
from hpc_gpt.trainer.tokens.tokenizer import TABLE_SUFFIX

# The possible files of a tokenizer; a model has some of them.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)


@dataclass(frozen=True)
class ExportedWeights:
    """The result of an export: the checkpoint's step, the files and their size."""

    step: int
    files: tuple[str, ...]
    size_bytes: int


def export_hf(run: RunFolder, folder: Path, step: int | None = None, dtype: str = "fp32") -> ExportedWeights:
    """Writes the newest sound checkpoint, or the one of `step`, as safetensors and config.json of transformers' class.

    The folder is made as a whole or not at all, and never replaces another. Weights are fp32, or rounded to bf16. The
    tokenizer's files are copied if the run's settings name a folder that has them. If the run began from a folder of
    weights, its settings of how a text ends are copied, too. Raises ConfigError, CheckpointError.
    """
    check_export(folder)
    resolved = run.resolved()
    engine_named(resolved.engine.name).check_export()
    if architecture_of(resolved.model) is None:
        raise ConfigError(
            "transformers has no class for this model's shape",
            "the weights are in the checkpoints under the run's folder",
        )
    checkpoint, saved_step = _find_checkpoint(run, step)
    weights = _weights(checkpoint, resolved)
    tokenizer = _tokenizer_files(resolved, run.data_beside)
    begun = init_config_of(one.path for one in (run, *find_ancestors(run)))
    files = write_hf(resolved.model, weights, folder, dtype=dtype, others=tokenizer, begun=begun)
    return ExportedWeights(saved_step, files, sum((folder / name).stat().st_size for name in files))


def _find_checkpoint(run: RunFolder, step: int | None) -> tuple[Path, int]:
    for path, marker in Checkpoints(run.checkpoints, Peers()).sound(step):
        return path, int(marker["step"])
    steps = ", ".join(str(step_in(path.name)) for path in reversed(list_complete(run.checkpoints)))
    of_step = "" if step is None else f" of step {step}"
    raise CheckpointError(
        f"run {run.run_id} has no sound checkpoint{of_step}",
        f"it has checkpoints of steps {steps}" if steps else "set train.save_every, or let the run end",
    )


def _weights(checkpoint: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields (our name, weight) for all weights in the checkpoint, without the vocabulary's padding.

    Raises CheckpointError if one is missing.
    """
    lacking = dict.fromkeys((*resolved.model.parameter_names, *resolved.model.buffer_names))
    for name, weight in read_weights(checkpoint, resolved):
        if name not in lacking:
            raise CheckpointError(f"{checkpoint} holds {name}, which is not a parameter of the model", _DAMAGED)
        del lacking[name]
        yield name, weight[: resolved.model.vocab] if name in ("embedding.weight", "head.weight") else weight
    if lacking:
        raise CheckpointError(f"{checkpoint} lacks {', '.join(list(lacking)[:3])}", _DAMAGED)


_DAMAGED = "was it written by another version? submit again with the version in resolved.json"


def _tokenizer_files(resolved: Resolved, run_data: Path | None) -> list[Path]:
    """The files of the run's tokenizer, if its settings name a tokenizer.json that is there."""
    described = resolved.data.tokenizer
    if not described.endswith(".json") or described.endswith(TABLE_SUFFIX):
        return []
    places = [base / Path(described).expanduser() for base in (run_data, Path()) if base is not None]
    source = next((place.parent for place in places if place.is_file()), None)
    return [] if source is None else [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]


def main(arguments: list[str]) -> int:
    outlive_readers()
    raise_file_limit()
    run, folder, dtype = RunFolder(Path(arguments[0])), Path(arguments[1]), arguments[2]
    step = int(arguments[3]) if len(arguments) > 3 else None
    try:
        with contextlib.redirect_stdout(sys.stderr), reading(run):
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
