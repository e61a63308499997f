"""Which data a run reads, making them where they can be made, and refusing those that do not fit it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from hpc_gpt.errors import DataError
from hpc_gpt.settings.experiment import Data
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.tokens import megatron
from hpc_gpt.tokens.build import (
    STDLIB,
    STDLIB_SHARDS,
    build_stdlib,
    build_stdlib_megatron,
    build_stdlib_shards,
    stdlib_length,
    stdlib_path,
)
from hpc_gpt.tokens.character import CHAR, check_table
from hpc_gpt.tokens.megatron import check_tokens, open_megatron
from hpc_gpt.tokens.shards import ShardSet, check_count, list_shards
from hpc_gpt.tokens.sources import find_path
from hpc_gpt.tokens.token_file import TokenFile, open_tokens
from hpc_gpt.tokens.tokenizer import BYTE, open_tokenizer, tokenizer_name

_STDLIB_SUFFIXES = {"stdlib": ".tokens", "megatron": "-megatron", "stream": "-shards"}


def data_path(resolved: Resolved) -> Path | None:
    """The token file, Megatron's prefix, or the shards that a run reads; None for random tokens.

    A relative data.path is looked for in the current folder, then in the data folder; before them beside the file that
    states it, where `located` was asked first.
    """
    data = resolved.data
    if data.source == "random":
        return None
    if _is_stdlib(data):
        return stdlib_path(_STDLIB_SUFFIXES[data.source])
    if data.source == "megatron":
        # The name before .bin and .idx; no file has it.
        return find_path(f"{data.path}.idx").with_suffix("")
    return find_path(data.path or "")


def _is_stdlib(data: Data) -> bool:
    return data.source == "stdlib" or (data.source in ("megatron", "stream") and data.path == STDLIB)


def located(resolved: Resolved, beside: Path | None) -> Resolved:
    """The settings with data.path as the one in folder `beside`, of the file that states it, where it is there."""
    here = _relative(resolved.data)
    if beside is None or here is None or not (beside / here).exists():
        return resolved
    return replace(resolved, data=replace(resolved.data, path=str(beside / str(resolved.data.path))))


def check_beside(data: Data, beside: Path) -> Path | None:
    """`beside` where data.path is looked for there, else None. DataError where there and in the current folder lie two
    files of that name: which one was meant is the user's to say, before the run exists."""
    here = _relative(data)
    if here is None:
        return None
    there = beside / here
    if there.exists() and here.exists() and not there.samefile(here):
        raise DataError(
            f"data.path {data.path} is two: {there}, beside the file that states it, and {here.absolute()}",
            "remove one, or name it by an absolute path: --set data.path=PATH",
        )
    return beside


def _relative(data: Data) -> Path | None:
    """The file to look for beside that which states data.path, and in the current folder; None where it is not."""
    if data.path is None or data.source == "random" or _is_stdlib(data):
        return None
    path = Path(f"{data.path}.idx" if data.source == "megatron" else data.path)
    return None if path.expanduser().is_absolute() else path


def ensure_data(resolved: Resolved, make: bool = True) -> Path | None:
    """The data that a run reads, there and fit for it; built first where they are the standard library's sources.
    Without `make` nothing is built, and those sources are judged by what would be.

    None for random tokens. Raises DataError where they are missing, damaged, of a larger vocabulary than the model's
    or of another tokenizer than data.tokenizer, or too few for one sample or for so many readers.
    """
    path = data_path(resolved)
    if path is None:
        return None
    data = resolved.data
    if _is_stdlib(data):
        if data.source != "stream" and data.tokenizer != BYTE:
            raise DataError(
                f"data.tokenizer is {data.tokenizer}, but the standard library's sources are made into tokens by bytes",
                f"hpc-gpt data stdlib -o FILE --tokenizer {data.tokenizer}, then data.path = FILE",
            )
        files = megatron.paths(path) if data.source == "megatron" else [path]
        if not make and not all(file.exists() for file in files):
            _check_vocab(resolved)
            if data.source == "stream":
                check_count(path, STDLIB_SHARDS, resolved)
            else:
                check_length(path, stdlib_length(), resolved)
            return path
        if data.source == "stream":
            build_stdlib_shards()
        elif data.source == "megatron":
            build_stdlib_megatron()
        else:
            build_stdlib(path)
    if data.source == "stream":
        open_shards(resolved)
    else:
        file = open_file(resolved)
        if data.source == "megatron":
            check_tokens(file)
    return path


def open_file(resolved: Resolved) -> TokenFile:
    """The run's token file or Megatron's pair; DataError where it is missing, damaged or does not fit the run."""
    path, data = data_path(resolved), resolved.data
    assert path is not None
    if data.source == "megatron":
        file = open_megatron(path, resolved.model.vocab)
        if data.tokenizer != BYTE:
            _check_vocab(resolved)
    else:
        file = open_tokens(path, max_vocab=resolved.model.vocab)
        check_tokenizer(file, data.tokenizer)
    check_length(file.path, len(file.tokens), resolved)
    return file


def open_shards(resolved: Resolved) -> ShardSet:
    """The run's shards; DataError where they are missing, too few, or of another vocabulary than the model's."""
    path = data_path(resolved)
    assert path is not None
    _check_vocab(resolved)
    return list_shards(path, resolved)


def check_tokenizer(file: TokenFile, words: str) -> None:
    """DataError unless a token file was made with tokenizer `words`, and has its table where that is of characters."""
    kind = file.tokenizer.partition(":")[0]
    if not (words == kind == CHAR or tokenizer_name(words) == file.tokenizer):
        # A tokenizer.json goes by its path; the file knows no more than its sum.
        nearest = CHAR if kind == CHAR else "the tokenizer.json it was made with" if kind == "json" else file.tokenizer
        raise DataError(
            f"{file.path} was made with tokenizer {file.tokenizer}, but data.tokenizer is {words}",
            f"set data.tokenizer = {nearest}, or make the file again: hpc-gpt data SOURCE -o FILE --tokenizer {words}",
        )
    if kind == CHAR:
        check_table(file.path, file.tokenizer)


def _check_vocab(resolved: Resolved) -> None:
    tokenizer, words = open_tokenizer(resolved.data.tokenizer), resolved.data.tokenizer
    if tokenizer.vocab > resolved.model.vocab:
        raise DataError(
            f"tokenizer {words} has a vocabulary of {tokenizer.vocab}, but the model's is {resolved.model.vocab}",
            f"set model.vocab = {tokenizer.vocab}, or another data.tokenizer",
        )


def split_tokens(count: int, eval_fraction: float) -> int:
    """Tokens for training; the rest, the last `eval_fraction` of the file, is kept for evaluation."""
    return count - int(count * eval_fraction)


def check_length(path: Path, count: int, resolved: Resolved) -> None:
    """DataError where of `count` tokens the training part, or the evaluation part if it is used, has no whole sample
    of seq + 1."""
    seq, fraction = resolved.model.seq, resolved.data.eval_fraction
    training = split_tokens(count, fraction)
    evaluation = count - training
    if training < seq + 1:
        raise DataError(
            f"{path} has {training} tokens to train on ({count} less {evaluation} for evaluation), but one sample "
            f"needs seq + 1 = {seq + 1}",
            "give more text, or a shorter model.seq",
        )
    if resolved.train.eval_every and evaluation < seq + 1:
        raise DataError(
            f"{path} has {evaluation} tokens for evaluation ({fraction} of {count}), but one sample needs "
            f"seq + 1 = {seq + 1}",
            f"set data.eval_fraction to {_fraction_for(seq + 1, count):.6g} or more, or train.eval_every = 0",
        )


def _fraction_for(tokens: int, count: int) -> float:
    """The smallest fraction of three digits that keeps so many of `count` tokens; 0.99 where none does.

    >>> _fraction_for(1025, 100_000)
    0.0103
    """
    wanted = tokens / count
    digits = max(2, 2 - math.floor(math.log10(wanted)))
    fraction = math.ceil(wanted * 10.0**digits) / 10.0**digits
    if int(count * fraction) < tokens:
        fraction += 10.0**-digits
    return round(min(0.99, fraction), digits)
