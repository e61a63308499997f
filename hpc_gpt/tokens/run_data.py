"""Which token file a run reads, and making it where it can be made."""

from __future__ import annotations

from pathlib import Path

from hpc_gpt.errors import DataError
from hpc_gpt.paths import data_dir
from hpc_gpt.resolve import Resolved
from hpc_gpt.tokens.build import build_stdlib, stdlib_path
from hpc_gpt.tokens.token_file import TokenFile, open_tokens


def data_path(resolved: Resolved) -> Path | None:
    """The token file that a run reads; None for random tokens.

    A relative data.path is looked for in the current folder, then in the data folder.
    """
    data = resolved.data
    if data.source == "random":
        return None
    if data.source == "stdlib":
        return stdlib_path()
    path = Path(data.path or "").expanduser()
    beside = data_dir() / path
    return beside if not path.is_absolute() and not path.exists() and beside.exists() else path


def ensure_data(resolved: Resolved) -> Path | None:
    """The token file that a run reads, there and fit for it; built first where data.source is "stdlib".

    None for random tokens. Raises DataError where the file is missing, damaged, of a larger vocabulary than the
    model's, or too short for one sample.
    """
    path = data_path(resolved)
    if path is None:
        return None
    if resolved.data.source == "stdlib":
        build_stdlib(path)
    file = open_tokens(path, max_vocab=resolved.model.vocab)
    check_length(file, resolved)
    return path


def split_tokens(count: int, eval_fraction: float) -> int:
    """Tokens for training; the rest, the last `eval_fraction` of the file, is kept for evaluation."""
    return count - int(count * eval_fraction)


def check_length(file: TokenFile, resolved: Resolved) -> None:
    """DataError where the training part, or the evaluation part if it is used, has no whole sample of seq + 1."""
    seq, fraction = resolved.model.seq, resolved.data.eval_fraction
    count = len(file.tokens)
    training = split_tokens(count, fraction)
    evaluation = count - training
    if training < seq + 1:
        raise DataError(
            f"{file.path} has {training} tokens to train on ({count} less {evaluation} for evaluation), but one sample "
            f"needs seq + 1 = {seq + 1}",
            "give more text, or a shorter model.seq",
        )
    if resolved.train.eval_every and evaluation < seq + 1:
        raise DataError(
            f"{file.path} has {evaluation} tokens for evaluation ({fraction} of {count}), but one sample needs "
            f"seq + 1 = {seq + 1}",
            f"set data.eval_fraction to {min(0.99, (seq + 2) / count):.2g} or more, or train.eval_every = 0",
        )
