"""The data of a run: their path, whether they fit the run, and what its user is to know of them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_gpt.errors import DataError
from hpc_gpt.settings.experiment import Data
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.tokens import megatron
from hpc_gpt.tokens.build import (
    STDLIB,
    STDLIB_SHARDS,
    build_stdlib,
    build_stdlib_megatron,
    build_stdlib_shards,
    check_disk_space,
    stdlib_length,
    stdlib_path,
)
from hpc_gpt.tokens.end_token import check_end_of_stream, check_end_token, end_token
from hpc_gpt.tokens.megatron import check_tokens, open_megatron
from hpc_gpt.tokens.shard_stream import ShardSet, check_count, list_shards
from hpc_gpt.tokens.sources import find_path, places_searched
from hpc_gpt.tokens.token_file import TokenFile, open_tokens
from hpc_gpt.tokens.tokenizer import BYTE, CHAR, ByteTokenizer, check_table, open_tokenizer, tokenizer_name
from hpc_gpt.words import counted, show_short

_STDLIB_SUFFIXES = {"stdlib": ".tokens", "megatron": "-megatron", "stream": "-shards"}


def data_path(resolved: Resolved) -> Path | None:
    """The token file, Megatron's prefix, or the shards that a run reads; None for random tokens.

    A relative data.path is searched in the current folder, then in the data folder. To search first beside the file
    that has the key, call `located` before.
    """
    data = resolved.data
    if data.source == "random":
        return None
    if _is_stdlib(data):
        return stdlib_path(_STDLIB_SUFFIXES[data.source])
    if data.source == "megatron":
        # The prefix itself is not a file.
        return find_path(f"{data.path}.idx").with_suffix("")
    return find_path(data.path or "")


def _is_stdlib(data: Data) -> bool:
    return data.source == "stdlib" or (data.source in ("megatron", "stream") and data.path == STDLIB)


def located(resolved: Resolved, beside: Path | None) -> Resolved:
    """The settings with data.path and a tokenizer's file in `beside`, the folder of the file that has data.path, if
    they are there."""
    data = resolved.data
    if beside is None:
        return resolved
    files = {key: file for key, file in _relative_files(data).items() if (beside / file).exists()}
    found: dict[str, Any] = {key: str(beside / getattr(data, key)) for key in files}
    return replace(resolved, data=replace(data, **found)) if found else resolved


def check_beside(data: Data, beside: Path) -> Path | None:
    """`beside` if data.path or a tokenizer's file is searched there, else None.

    Raises DataError if both `beside` and the current folder have a file of that name: the user must choose one before
    the run exists.
    """
    files = _relative_files(data)
    for key, here in files.items():
        there = beside / here
        if there.exists() and here.exists() and not there.samefile(here):
            raise DataError(
                f"data.{key} {getattr(data, key)} is ambiguous: {there}, beside the file with the key, and "
                f"{here.absolute()}",
                f"remove one, or give an absolute path: --set data.{key}=PATH",
            )
    return beside if files else None


def _relative_files(data: Data) -> dict[str, Path]:
    """{key: its file} of data.path and data.tokenizer, as far as they name files by relative paths."""
    found = {"tokenizer": Path(data.tokenizer)} if Path(data.tokenizer).suffix == ".json" else {}
    if data.path is not None and data.source != "random" and not _is_stdlib(data):
        found = {"path": Path(f"{data.path}.idx" if data.source == "megatron" else data.path), **found}
    return {key: path for key, path in found.items() if not path.expanduser().is_absolute()}


def ensure_data(resolved: Resolved, make: bool = True, beside: Path | None = None) -> Path | None:
    """Checks that the data of a run exist and fit it; returns their path, None for random tokens.

    A relative data.path is searched in `beside` first. Data from the standard library's sources are made if they are
    missing. Without `make` nothing is made, and what would be made is checked. Raises DataError if data are missing,
    damaged, of a larger vocabulary than the model's or of another tokenizer than data.tokenizer, or too few for one
    sample or for all readers.
    """
    try:
        return _ensure(located(resolved, beside), make)
    except DataError as fault:
        here = _relative_files(resolved.data).get("path")
        if here is None or not (places := places_searched(str(here), beside)):
            raise
        raise DataError(str(fault), f"{places}; {fault.hint}") from None


def _ensure(resolved: Resolved, make: bool) -> Path | None:
    path = data_path(resolved)
    end_token(resolved)
    if path is None:
        return None
    data = resolved.data
    if _is_stdlib(data):
        if data.source != "stream" and data.tokenizer != BYTE:
            raise DataError(
                f"data.tokenizer is {data.tokenizer}, but the standard library's sources use tokenizer byte",
                f"hpc-gpt data stdlib -o FILE --tokenizer {data.tokenizer}, then data.path = FILE",
            )
        files = megatron.paths(path) if data.source == "megatron" else [path]
        if not make and not all(file.exists() for file in files):
            _check_vocab(resolved)
            if data.source == "stream":
                check_count(path, STDLIB_SHARDS, resolved)
            else:
                check_length(path, stdlib_length(), resolved)
            check_disk_space(path)
            return path
        if data.source == "stream":
            build_stdlib_shards()
        elif data.source == "megatron":
            build_stdlib_megatron()
        else:
            build_stdlib(path)
    if data.source == "stream":
        shards = open_shards(resolved)
        check_end_of_stream(resolved, shards.folder / shards.training[0])
    else:
        file = open_file(resolved)
        check_end_token(resolved, file.tokens, file.path)
        if data.source == "megatron":
            check_tokens(file)
    return path


def open_file(resolved: Resolved) -> TokenFile:
    """Opens the run's token file or Megatron's pair. Raises DataError if it is missing, damaged or does not fit."""
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
    """Lists the run's shards. Raises DataError if they are missing, too few, or of a vocabulary above the model's."""
    path = data_path(resolved)
    assert path is not None
    _check_vocab(resolved)
    return list_shards(path, resolved)


def check_tokenizer(file: TokenFile, wanted: str) -> None:
    """Raises DataError unless a token file was made with tokenizer `wanted`, and has its table if that is char."""
    kind = file.tokenizer.partition(":")[0]
    if not (wanted == kind == CHAR or tokenizer_name(wanted) == file.tokenizer):
        # data.tokenizer has the path of a tokenizer.json, the token file only its checksum.
        nearest = CHAR if kind == CHAR else "the tokenizer.json it was made with" if kind == "json" else file.tokenizer
        raise DataError(
            f"{file.path} was made with tokenizer {file.tokenizer}, but data.tokenizer is {wanted}",
            f"set data.tokenizer = {nearest}, or make the file again: hpc-gpt data SOURCE -o FILE --tokenizer {wanted}",
        )
    if kind == CHAR:
        check_table(file.path, file.tokenizer)


def _check_vocab(resolved: Resolved) -> None:
    data, wanted = resolved.data, resolved.data.tokenizer
    tokenizer = open_tokenizer(wanted, data.begin_token)
    if tokenizer.vocab > resolved.model.vocab:
        raise DataError(
            f"tokenizer {wanted} has a vocabulary of {tokenizer.vocab}, but the model's is {resolved.model.vocab}",
            f"set model.vocab = {tokenizer.vocab}, or another data.tokenizer",
        )


def split_tokens(count: int, eval_fraction: float) -> int:
    """The number of tokens for training; the last `eval_fraction` of the file is for evaluation."""
    return count - int(count * eval_fraction)


def check_length(path: Path, count: int, resolved: Resolved) -> None:
    """Raises DataError if the training part of `count` tokens, or the evaluation part if it is used, is shorter than
    one sample of seq + 1."""
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
    """The smallest fraction of three digits that keeps `tokens` of `count`; 0.99 if none does.

    >>> _fraction_for(1025, 100_000)
    0.0103
    """
    wanted = tokens / count
    digits = max(2, 2 - math.floor(math.log10(wanted)))
    fraction = math.ceil(wanted * 10.0**digits) / 10.0**digits
    if int(count * fraction) < tokens:
        fraction += 10.0**-digits
    return round(min(0.99, fraction), digits)


def describe_data(resolved: Resolved) -> tuple[str, ...]:
    """Lines for the user on the data of a run that `ensure_data` has accepted: source, tokens, epochs in all steps; and
    whether they use less than a tenth of the model's vocabulary."""
    data, vocab = resolved.data, resolved.model.vocab
    if data.source == "random":
        return resolved.form.data_lines
    path = data_path(resolved)
    assert path is not None
    what = "Python's own sources" if _is_stdlib(data) else str(path)
    used: int | None = None
    if data.source == "stream":
        used = open_tokenizer(data.tokenizer).vocab
        made = list_shards(path, resolved) if path.exists() else None
        size = sum(made.sizes) if made else split_tokens(stdlib_length(), data.eval_fraction)
        shards = len(made.training) if made else STDLIB_SHARDS - int(STDLIB_SHARDS * data.eval_fraction)
        length = f"{counted(shards, 'shard')} to train on, about {size:,} bytes of text"
        samples = size / resolved.model.seq if data.tokenizer == BYTE else 0.0
        unknown = "how many tokens these are is known when they are read"
    else:
        file = _file_if_made(resolved, path)
        count = stdlib_length() if file is None else len(file.tokens)
        # Megatron's files do not state their vocabulary.
        used = ByteTokenizer.vocab if _is_stdlib(data) else file.vocab if file is not None and file.tokenizer else None
        training = split_tokens(count, data.eval_fraction)
        length, unknown = f"{training:,} tokens to train on", ""
        samples = (training - 1) // resolved.model.seq
    by = f" by tokenizer {data.tokenizer}" if used is not None else ""
    steps, each = resolved.train.steps, resolved.batch.global_batch
    epochs = (
        f"{show_short(steps * each / samples)} epochs in {counted(steps, 'step')} of {counted(each, 'sample')}"
        if samples
        else unknown
    )
    line = f"data: {what}{by}, {length}; {epochs}"
    if used is None or 10 * used >= vocab:
        return (line,)
    share = f"at most {used:,} different tokens, {100 * used / vocab:.2g} % of the model's vocabulary of {vocab:,}"
    hint = f"--set model.vocab={used} makes its embedding smaller, and hpc-gpt data makes tokens of other text"
    return (line, f"note: the data have {share}; {hint}")


def _file_if_made(resolved: Resolved, path: Path) -> TokenFile | None:
    """The run's token file or Megatron's pair; None for data of the standard library that are not made yet."""
    files = megatron.paths(path) if resolved.data.source == "megatron" else (path,)
    return open_file(resolved) if all(file.exists() for file in files) else None
