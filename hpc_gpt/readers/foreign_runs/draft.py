"""A record in the making: each field's value with where it is from, and what looks wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_gpt.readers.fields import TEXT_FIELDS
from hpc_gpt.readers.foreign_runs.stated import ASKED, SAID, SCRIPT, Stated
from hpc_gpt.secrets import hide_secrets

# Larger than any size or count of a training.
_LARGEST = 10**18
# Of these, two places that say different things are told of.
_TOLD = {
    "gpus": "GPUs",
    "nodes": "nodes",
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "cp": "cp",
    "micro_batch": "the micro-batch",
    "micro_batches": "micro_batches",
    "global_batch": "the global batch",
    "seq": "the sequence length",
    "hidden": "the hidden size",
    "layers": "layers",
    "heads": "heads",
    "zero_stage": "the ZeRO stage",
    "dtype": "the dtype",
}
_WORDS = {SAID: "the log says", ASKED: "the arguments ask for", SCRIPT: "the script beside says"}


@dataclass
class Draft:
    """Values and sources by field, flags in the order found."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value, None where it is not known."""
        return self.values.get(name)

    def whole(self, name: str) -> int | None:
        """The value of a size or count, at least 1; None where it is not known."""
        value = self.values.get(name)
        return value if isinstance(value, int) and value > 0 else None

    def set(self, name: str, value: Any, source: str) -> None:
        """Settles a field."""
        self.values[name] = value
        self.sources[name] = source

    def infer(self, name: str, value: Any, how: str) -> None:
        """Settles a field that nothing states, unless it is settled."""
        if name not in self and value is not None:
            self.set(name, value, f"inferred: {how}")

    def flag(self, words: str) -> None:
        """Tells of something once."""
        if words not in self.flags:
            self.flags.append(words)


def draft_of(found: Mapping[str, Sequence[Stated]], beside: Mapping[str, Stated]) -> Draft:
    """The fields as they are stated: what a program did before what it was asked, before the script beside.

    Where two of them differ, a flag says so with both places.
    """
    draft = Draft()
    for name in dict.fromkeys([*found, *beside]):
        candidates = [*found.get(name, ()), *([beside[name]] if name in beside else [])]
        usable = [(value, each) for each in candidates if (value := _usable(name, each.value)) is not None]
        for each in candidates:
            if _usable(name, each.value) is None:
                draft.flag(f"{_TOLD.get(name, name)} cannot be {str(each.value)[:40]} ({each.source}): left out")
        if not usable:
            continue
        best, said = max(usable, key=lambda pair: pair[1].by)
        draft.set(name, best, said.source)
        if name in _TOLD:
            _tell(draft, name, best, said, usable)
    return draft


def _tell(draft: Draft, name: str, best: Any, said: Stated, usable: Sequence[tuple[Any, Stated]]) -> None:
    values = [value for value, each in usable if each.by == SAID]
    if name == "global_batch" and len(values) > 1 and values == sorted(values):
        # It grows as `--rampup-batch-size` asks; what follows from it is of the largest.
        largest, where = [(value, each) for value, each in usable if each.by == SAID][-1]
        draft.set(name, largest, f"{where.source}, the largest of {len(values)}")
        draft.flag(f"the global batch grew during the run, from {values[0]} to {largest} ({where.source})")
        return
    other = next(((value, each) for value, each in usable if value != best), None)
    if other is not None:
        value, each = other
        words = "and" if each.by == said.by else f"but {_WORDS[each.by]}"
        draft.flag(f"{_WORDS[said.by]} {_TOLD[name]} {best} ({said.source}), {words} {value} ({each.source})")


def _usable(name: str, value: Any) -> Any:
    """A value fit for its field; None for a size that no training has."""
    if name in TEXT_FIELDS or isinstance(value, str):
        text = hide_secrets(" ".join(str(value).split()))[:200]
        return text or None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, bool) else None
    if not abs(value) <= _LARGEST:
        return None
    if name in _TOLD and (value < 0 or value != int(value) or (value == 0 and name != "zero_stage")):
        return None
    return int(value) if value == int(value) else value
