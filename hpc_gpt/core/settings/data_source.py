"""The source of the tokens: what is at `data.path`; and the sources of a mixture, `[data.mix]`, their weights per phase
and the begin of each phase, in exact fractions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import read_start

TOKEN_FILE_MAGIC = b"HPCGPTTK"  # the first bytes of a token file (trainer.tokens.token_file)
STDLIB = "stdlib"
# Sources that read no path; the first is the default.
WITHOUT_PATH = (STDLIB, "random")
MIX: Literal["mix"] = "mix"  # data.source of a mixture


def stated_source(source: str, layers: Sequence[Mapping[str, Any]]) -> Literal["path", "source", "both"] | None:
    """The newer of data.path and a `source` that reads no path, in the layers of [data], the oldest first; "both" if
    one layer states both, None if they do not contradict each other."""
    newest = {
        key: max((place for place, layer in enumerate(layers) if layer.get(key) is not None), default=-1)
        for key in ("path", "source")
    }
    path = next((layer["path"] for layer in reversed(layers) if layer.get("path") is not None), None)
    if path in (None, STDLIB) or source not in WITHOUT_PATH:
        return None
    if newest["path"] == newest["source"]:
        return "both"
    return "path" if newest["path"] > newest["source"] else "source"


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


# --- mixtures


@dataclass(frozen=True)
class MixedSource:
    """`[data.mix.NAME]`: a source of a mixture. Its last `data.eval_fraction` is reserved for evaluation.

    `path` and `weight` are required, but may come from different places: files that extend others, rows and options.
    """

    path: str | None = None
    "Token file of the source, or the prefix of a pair of Megatron files; searched as data.path is."
    source: Literal["tokens", "megatron"] = "tokens"
    "Format of the files: a token file, or Megatron's .bin and .idx."
    weight: float | tuple[float, ...] | None = None
    "Share of the tokens, relative to the other sources, or a list with one share per phase; for example 0.7."

    def weights(self, phases: int) -> tuple[Fraction, ...]:
        """The weight in each phase, exactly as written: 0.1 is a tenth."""
        weights = self.weight if isinstance(self.weight, tuple) else (self.weight or 0.0,) * phases
        return tuple(Fraction(repr(weight)) for weight in weights)


def mixture_shares(mix: Mapping[str, MixedSource], phases: Sequence[float]) -> list[dict[str, Fraction]]:
    """{name: share of the source} per phase, sorted by name, so that the order of the tables does not matter."""
    count = len(phases) + 1
    weights = {name: mix[name].weights(count) for name in sorted(mix)}
    totals = [sum(weight[phase] for weight in weights.values()) for phase in range(count)]
    return [{name: weight[phase] / totals[phase] for name, weight in weights.items()} for phase in range(count)]


def evaluation_shares(mix: Mapping[str, MixedSource] | None, phases: Sequence[float]) -> dict[str, float]:
    """{name: weight of the source's loss in loss_eval}, its share in the first phase. Empty without a mixture."""
    shares = mixture_shares(mix, phases)[0] if mix else {}
    return {name: float(share) for name, share in shares.items()}


def phase_steps(phases: Sequence[float], step_tokens: int) -> list[int]:
    """The number of steps before each phase, which begins with the first step at or after its number of tokens.

    >>> phase_steps([1000, 1001], 500)
    [0, 2, 3]
    """
    return [0, *(math.ceil(Fraction(tokens) / step_tokens) for tokens in phases)]
