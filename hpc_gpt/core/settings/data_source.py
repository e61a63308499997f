"""The source of the tokens, inferred from the file or folder at `data.path`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import read_start

TOKEN_FILE_MAGIC = b"HPCGPTTK"  # the first bytes of a token file (trainer.tokens.token_file)
STDLIB = "stdlib"
# Sources that read no path; the first is the default.
WITHOUT_PATH = (STDLIB, "random")


def stated_source(source: str, layers: Sequence[Mapping[str, Any]]) -> Literal["path", "source", "both"] | None:
    """The newer of data.path and a `source` that reads no path, in the layers of [data], the oldest first; "both" if
    one layer states both, None if they do not contradict each other."""
    newest = {key: _newest(key, layers) for key in ("path", "source")}
    path = next((layer["path"] for layer in reversed(layers) if layer.get("path") is not None), None)
    if path in (None, STDLIB) or source not in WITHOUT_PATH:
        return None
    if newest["path"] == newest["source"]:
        return "both"
    return "path" if newest["path"] > newest["source"] else "source"


def _newest(key: str, layers: Sequence[Mapping[str, Any]]) -> int:
    return max((place for place, layer in enumerate(layers) if layer.get(key) is not None), default=-1)


def refuse_both(path: str, source: str) -> ConfigError:
    """The error for a path together with a source that reads none."""
    return ConfigError(
        f'data.path is {path}, but data.source is "{source}", which reads no file',
        "leave one of the two out: without data.source the path decides it",
    )


def source_at(path: str, folders: Iterable[Path | None]) -> Literal["tokens", "megatron", "stream"]:
    """The source that can read `path` in the first of the folders that contains it: a token file, the prefix of a pair
    of Megatron files, or text in a file or folder. ConfigError if no folder contains it."""
    name = Path(path).expanduser()
    for place in (folder / name for folder in folders if folder is not None):
        if place.with_name(f"{place.name}.idx").is_file() and place.with_name(f"{place.name}.bin").is_file():
            return "megatron"
        if place.is_dir():
            return "stream"
        if place.is_file():
            return "tokens" if _starts_as_tokens(place) else "stream"
    raise ConfigError(
        f"data.path is {path}, but there is nothing at this path, so its source is unknown",
        'correct the path, or set data.source to "tokens", "megatron" or "stream"',
    )


def _starts_as_tokens(path: Path) -> bool:
    try:
        return read_start(path, len(TOKEN_FILE_MAGIC)) == TOKEN_FILE_MAGIC
    except OSError as fault:
        raise ConfigError(f"cannot read {path}: {fault.strerror}", "give a file that can be read") from None
