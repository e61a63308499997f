"""The data of a run: their path, whether they fit the run, and how much of them it reads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hpc_gpt.core.errors import DataError, OsErrorAs
from hpc_gpt.core.format import counted, show_short
from hpc_gpt.core.settings.data_source import MIX
from hpc_gpt.core.settings.experiment import Data
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.tokens import megatron
from hpc_gpt.trainer.tokens.build import (
    STDLIB,
    STDLIB_SHARDS,
    build_stdlib,
    build_stdlib_megatron,
    build_stdlib_shards,
    check_disk_space,
    stdlib_length,
)
from hpc_gpt.trainer.tokens.end_token import check_end_of_stream, check_end_token, end_token
from hpc_gpt.trainer.tokens.megatron import open_megatron
from hpc_gpt.trainer.tokens.shard_stream import ShardSet, check_count, evaluation_samples, fraction_for, list_shards
from hpc_gpt.trainer.tokens.sources import check_forms, find_path, places_searched
from hpc_gpt.trainer.tokens.token_file import (
    TokenFile,
    check_sum,
    check_tokens,
    open_tokens,
    stdlib_path,
    tokenizer_of_bytes,
    write_token_bytes,
)
from hpc_gpt.trainer.tokens.tokenizer import BYTE, CHAR, check_table, open_tokenizer, tokenizer_name

# Cached facts of data whose reading takes long, by path: Megatron's index, the list of shards. Rank 0 reads them, and
# the other ranks take them over.
LookedUp = dict[str, Any]
_T = TypeVar("_T")
_STDLIB_SUFFIXES = {"stdlib": ".tokens", "megatron": "-megatron", "stream": "-shards"}
_BUILDERS: dict[str, Callable[[], object]] = {
    "stdlib": build_stdlib, "megatron": build_stdlib_megatron, "stream": build_stdlib_shards,
}  # fmt: skip


def data_path(resolved: Resolved) -> Path | None:
    """The token file, Megatron's prefix, or the shards that a run reads; None for random tokens and for a mixture.

    A relative data.path is searched in the current folder, then in the data folder. To search beside the file with
    the key first, call `located` before.
    """
    data = resolved.data
    if data.source in ("random", MIX):
        return None
    if is_stdlib(data):
        return stdlib_path(_STDLIB_SUFFIXES[data.source])
    if data.source == "megatron":
        # The prefix itself is not a file.
        return find_path(f"{data.path}.idx").with_suffix("")
    return find_path(data.path or "")


def is_stdlib(data: Data) -> bool:
    return data.source == "stdlib" or (data.source in ("megatron", "stream") and data.path == STDLIB)


def located(resolved: Resolved, beside: Path | None) -> Resolved:
    """The settings with the paths of data.path, a mixture's sources and the tokenizer's file in `beside`, the folder of
    the file that has data.path, if the files are there."""
    data = resolved.data
    if beside is None:
        return resolved
    files = {key: file for key, file in _relative_files(data).items() if (beside / file).exists()}
    paths_beside: dict[str, Any] = {key: str(beside / _value(data, key)) for key in files}
    if data.mix is not None and paths_beside:
        paths = {name: paths_beside.pop(f"mix.{name}.path", one.path) for name, one in data.mix.items()}
        paths_beside["mix"] = {name: replace(one, path=paths[name]) for name, one in data.mix.items()}
    return replace(resolved, data=replace(data, **paths_beside)) if paths_beside else resolved


def check_beside(data: Data, beside: Path) -> Path | None:
    """The folder `beside` if data.path or a tokenizer's file is searched there, else None.

    Raises DataError if both `beside` and the current folder have a file of that name: the user must choose one before
    the run exists.
    """
    files = _relative_files(data)
    for key, file in files.items():
        other = beside / file
        if other.exists() and file.exists() and not other.samefile(file):
            raise DataError(
                f"data.{key} {_value(data, key)} is ambiguous: {other}, beside the file with the key, and "
                f"{file.absolute()}",
                f"remove one, or give an absolute path: --set data.{key}=PATH",
            )
    return beside if files else None


def _relative_files(data: Data) -> dict[str, Path]:
    """{key: file} for data.path, the paths of a mixture and data.tokenizer, if they name files by relative paths."""
    files: dict[str, Path] = {}
    for key, one in ({"path": data} | {f"mix.{name}.path": alone for name, alone in _alone(data).items()}).items():
        if one.path is not None and one.source != "random" and not is_stdlib(one):
            files[key] = Path(f"{one.path}.idx" if one.source == "megatron" else one.path)
    if Path(data.tokenizer).suffix == ".json":
        files["tokenizer"] = Path(data.tokenizer)
    return {key: path for key, path in files.items() if not path.expanduser().is_absolute()}


def _value(data: Data, key: str) -> str:
    """The value of one of the keys of `_relative_files`."""
    _, _, name = key.removesuffix(".path").partition(".")
    return str(_alone(data)[name].path if name else getattr(data, key))


def _alone(data: Data) -> dict[str, Data]:
    """{source's name: [data] with this source only}, sorted by name; empty without a mixture."""
    mix = data.mix or {}
    return {name: replace(data, source=mix[name].source, path=mix[name].path, mix=None) for name in sorted(mix)}


def sources_alone(resolved: Resolved) -> dict[str, Resolved]:
    """{source's name: the run with this source only}, sorted by name; empty without a mixture."""
    return {name: replace(resolved, data=data) for name, data in _alone(resolved.data).items()}


def ensure_data(
    resolved: Resolved,
    make: bool = True,
    beside: Path | None = None,
    looked_up: LookedUp | None = None,
    sums: bool = False,
) -> Path | None:
    """Checks that the data of a run exist and fit it; returns their path, None for random tokens and for a mixture.

    A relative data.path is searched in `beside` first. Data from the standard library's sources are made if they are
    missing. Without `make` nothing is made; the data that would be made are checked. With `sums` a token file's tokens
    are compared with its header's SHA-256, which takes seconds. Raises DataError if data are missing or damaged, have a
    larger vocabulary than the model's or another tokenizer than data.tokenizer, or are too few for one sample or for
    all readers; for a mixture also if its files have several tokenizers, or are read too often.
    """
    if resolved.data.mix is not None:
        resolved = located(resolved, beside)
        _check_one_tokenizer(resolved)
        for alone in sources_alone(resolved).values():
            ensure_data(alone, make, beside, looked_up, sums)
        _check_epochs(resolved)
        return None
    try:
        return _ensure(located(resolved, beside), make, looked_up, sums)
    except DataError as fault:
        relative = _relative_files(resolved.data).get("path")
        if relative is None or not (places := places_searched(str(relative), beside)):
            raise
        raise DataError(str(fault), f"{places}; {fault.hint}") from None


def _check_one_tokenizer(resolved: Resolved) -> None:
    """DataError if the token files of a mixture were made with different tokenizers."""
    made: dict[str, str] = {}
    for name, alone in sources_alone(resolved).items():
        path = data_path(alone)
        if alone.data.source == "tokens" and path is not None and path.is_file():
            made[name] = open_tokens(path).tokenizer
        elif alone.data.source == "megatron" and path is not None and (tokenizer := tokenizer_of_bytes(path)):
            made[name] = tokenizer
    first = next(iter(made), "")
    for name, tokenizer in made.items():
        if tokenizer != made[first]:
            raise DataError(
                f"the mixture's files were made with different tokenizers: {first} with {made[first]}, "
                f"{name} with {tokenizer}",
                f"make {name} again with the tokenizer of {first}: hpc-gpt data SOURCE -o FILE --tokenizer …",
            )


def _ensure(resolved: Resolved, make: bool, looked_up: LookedUp | None, sums: bool) -> Path | None:
    path, data = data_path(resolved), resolved.data
    if data.mask_documents:
        end_token(resolved)  # raises if there is none
    if path is None:
        return None
    if is_stdlib(data):
        if data.source != "stream" and data.tokenizer != BYTE:
            raise DataError(
                f"data.tokenizer is {data.tokenizer}, but the standard library's sources use tokenizer byte",
                f"hpc-gpt data stdlib -o FILE --tokenizer {data.tokenizer}, then data.path = FILE",
            )
        files = megatron.paths(path) if data.source == "megatron" else [path]
        is_made = all(file.exists() for file in files)
        if not (is_made or make):
            _check_vocab(resolved)
            if data.source == "stream":
                check_count(path, STDLIB_SHARDS, resolved)
            else:
                check_length(path, stdlib_length(), resolved)
            check_disk_space(path)
            return path
        if not is_made:
            _BUILDERS[data.source]()
    if data.source == "stream":
        shards = open_shards(resolved, looked_up)
        check_forms([shards.folder / name for name in (*shards.training, *shards.evaluation)])
        check_end_of_stream(resolved, shards.folder / shards.training[0])
        if resolved.train.eval_every:
            evaluation_samples(shards, resolved, 1, set())  # raises if there is none
    else:
        file = open_file(resolved, looked_up)
        if data.mask_documents:
            check_end_token(resolved, file.tokens, file.path)
        _check_content(file, sums=sums and data.source == "tokens" and not is_stdlib(data))
    return path


# The files whose tokens this process has checked: many runs of a sweep read the same file.
_SOUND: set[tuple[Path, int, int, int, int, bool]] = set()


def _check_content(file: TokenFile, sums: bool) -> None:
    state = file.path.stat()
    looked_at = (file.path, state.st_ino, state.st_size, state.st_mtime_ns, file.vocab, sums)
    if looked_at in _SOUND:
        return
    check_tokens(file)
    if sums:
        check_sum(file)
    _SOUND.add(looked_at)


def open_file(resolved: Resolved, looked_up: LookedUp | None = None) -> TokenFile:
    """Opens the run's token file or Megatron's pair. Raises DataError if it is missing or damaged, or does not fit."""
    path, data = data_path(resolved), resolved.data
    assert path is not None
    if data.source == "megatron":
        index = _once(looked_up, path, lambda: megatron.read_index(path))
        file = open_megatron(path, resolved.model.vocab, index)
        if data.tokenizer != BYTE:
            _check_vocab(resolved)
            _check_made_with(path, tokenizer_of_bytes(path), data.tokenizer)
    else:
        file = open_tokens(path, max_vocab=resolved.model.vocab)
        check_tokenizer(file, data.tokenizer)
    check_length(file.path, len(file.tokens), resolved)
    return file


def open_shards(resolved: Resolved, looked_up: LookedUp | None = None) -> ShardSet:
    """Lists the run's shards. Raises DataError if they are missing or too few, or the model's vocabulary too small."""
    path = data_path(resolved)
    assert path is not None
    _check_vocab(resolved)
    return _once(looked_up, path, lambda: list_shards(path, resolved))


def _once(looked_up: LookedUp | None, path: Path, read: Callable[[], _T]) -> _T:
    """The cached value of the path; on a miss calls `read` and caches it."""
    cached = {} if looked_up is None else looked_up
    if str(path) not in cached:
        cached[str(path)] = read()
    value: _T = cached[str(path)]
    return value


def check_tokenizer(file: TokenFile, wanted: str) -> None:
    """Raises DataError unless a token file was made with tokenizer `wanted`, and for char has its table."""
    _check_made_with(file.path, file.tokenizer, wanted)
    if file.tokenizer.partition(":")[0] == CHAR:
        check_table(file.path, file.tokenizer)


def _check_made_with(path: Path, made_with: str, wanted: str) -> None:
    """Raises DataError if data were made with another tokenizer than `wanted`; empty if it is not known."""
    is_its = wanted == made_with or wanted == made_with.partition(":")[0] == CHAR
    if made_with and not (is_its or tokenizer_name(wanted) == made_with):
        raise DataError(
            f"{path} was made with tokenizer {made_with}, but data.tokenizer is {wanted}",
            f"set data.tokenizer = {_described(made_with)}, or make the file again: "
            f"hpc-gpt data SOURCE -o FILE --tokenizer {wanted}",
        )


def add_token_bytes(data: Path, tokenizer: str) -> Path:
    """Writes the bytes of each token beside a token file, or a pair of Megatron's by its prefix, that was made with
    `tokenizer`; returns the path. Raises DataError if it exists, or the file was made with another tokenizer."""
    if megatron.paths(data)[1].exists():
        sha = megatron.read_index(data).sha
    else:
        file = open_tokens(data)
        check_tokenizer(file, tokenizer)
        sha = file.sha
    opened = open_tokenizer(tokenizer)
    with OsErrorAs(DataError, f"cannot write the bytes of tokens beside {data}", "remove it first if it is there"):
        return write_token_bytes(data, opened.token_bytes, opened.name, sha)


def _described(tokenizer: str) -> str:
    """A token file's tokenizer as text for the user; the file has only a checksum of a tokenizer.json."""
    kind = tokenizer.partition(":")[0]
    return CHAR if kind == CHAR else "the tokenizer.json it was made with" if kind == "json" else tokenizer


def _check_vocab(resolved: Resolved) -> None:
    data, wanted = resolved.data, resolved.data.tokenizer
    tokenizer = open_tokenizer(wanted, data.begin_token)
    if tokenizer.vocab > resolved.model.vocab:
        raise DataError(
            f"tokenizer {wanted} has a vocabulary of {tokenizer.vocab}, but the model's is {resolved.model.vocab}",
            f"set model.vocab = {tokenizer.vocab}, or another data.tokenizer",
        )


class SourceUse(NamedTuple):
    """A run's use of a source of its mixture: it reads `samples` in all its steps, of `size` training samples."""

    path: Path
    samples: int
    size: int

    @property
    def epochs(self) -> float:
        return self.samples / self.size


def mixture_use(resolved: Resolved) -> dict[str, SourceUse]:
    """{name: a run's use of this source of its mixture}. Raises DataError as `open_file` does."""
    from hpc_gpt.trainer.tokens.order import mixture_order  # few runs have a mixture

    uses = {}
    samples = mixture_order(resolved).counts(resolved.data_steps * resolved.batch.global_batch)
    for name, alone in sources_alone(resolved).items():
        path = data_path(alone)
        assert path is not None
        file = file_if_made(alone, path)
        count = stdlib_length() if file is None else len(file.tokens)
        size = (split_tokens(count, alone.data.eval_fraction) - 1) // alone.model.seq
        uses[name] = SourceUse(path, samples[name], size)
    return uses


def _check_epochs(resolved: Resolved) -> None:
    limit = resolved.data.max_epochs
    often = {name: use for name, use in mixture_use(resolved).items() if 0 < limit < use.epochs}
    if often:
        seq = resolved.model.seq
        uses = [
            f"{name} {show_short(use.epochs)} times, {use.samples * seq:,} of {use.size * seq:,} tokens"
            for name, use in often.items()
        ]
        raise DataError(
            f"{counted(resolved.data_steps, 'step')} read parts of the mixture more than "
            f"data.max_epochs = {limit:g} times: "
            f"{'; '.join(uses)}",
            "use a smaller weight, more text or fewer steps; --set data.max_epochs=0 removes the limit",
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
            f"set data.eval_fraction to {fraction_for(seq + 1, count):.6g} or more, or train.eval_every = 0",
        )


def file_if_made(resolved: Resolved, path: Path) -> TokenFile | None:
    """The run's token file or Megatron's pair; None for data of the standard library that are not made yet."""
    files = megatron.paths(path) if resolved.data.source == "megatron" else (path,)
    return open_file(resolved) if all(file.exists() for file in files) else None
