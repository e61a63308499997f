"""What parts of a log state of a field, by how near it is to what ran: said by the program, or asked of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hpc_gpt.readers.dialects import dialects
from hpc_gpt.readers.part import Part, Place
from hpc_gpt.readers.pattern import Dialect

SAID, ASKED, SCRIPT = 3, 2, 1


@dataclass(frozen=True)
class Stated:
    """A value, who states it (SAID, ASKED or SCRIPT) and where, as `file:line`."""

    value: Any
    by: int
    source: str


@cache
def _by_name() -> dict[str, Dialect]:
    return {dialect.name: dialect for dialect in dialects()}


def dialects_of(part: Part) -> list[Dialect]:
    """The dialects whose lines stand in a part, that with most lines first."""
    names = sorted(part.dialects, key=lambda name: -part.dialects[name])
    return [_by_name()[name] for name in names if name in _by_name()]


def asked(part: Part) -> dict[str, Any]:
    """Fields that a part's dump of arguments settles."""
    found: dict[str, Any] = {}
    texts = {key: text for key, (text, _) in part.arguments.items()}
    for dialect in dialects_of(part) if texts else []:
        if dialect.settle is not None:
            found = {**dialect.settle(texts), **found}
    return found


def asked_at(part: Part) -> dict[str, Stated]:
    """Fields that a part's dump settles, each with the line of the argument that it hangs on."""
    found: dict[str, Stated] = {}
    texts = {key: text for key, (text, _) in part.arguments.items()}
    for dialect in dialects_of(part) if texts else []:
        if dialect.settle is None:
            continue
        watched = _Watched(texts)
        settled = dialect.settle(watched)
        places = _places(dialect, texts, settled, watched.read, part)
        for name, value in settled.items():
            if name not in found:
                key, place = places.get(name, ("", Place(part.file, part.first_line)))
                found[name] = Stated(value, ASKED, f"{place} (argument{' ' + key if key else 's'})")
    return found


def _places(
    dialect: Dialect, texts: Mapping[str, str], settled: Mapping[str, Any], read: Sequence[str], part: Part
) -> dict[str, tuple[str, Place]]:
    """The argument each field hangs on: were it another, or else were it missing, the field would be.

    Those that say just what the field does are tried first. Of two that say it, the one that counts is found by another
    text in its place: neither is missed alone.
    """
    settle = dialect.settle
    assert settle is not None
    tried: dict[tuple[str, bool], Mapping[str, Any]] = {}

    def hangs_on(name: str, key: str, missing: bool) -> bool:
        if (key, missing) not in tried:
            other = {each: text for each, text in texts.items() if each != key}
            tried[key, missing] = settle(other if missing else {**other, key: _other(texts[key])})
        return bool(tried[key, missing].get(name) != settled[name])

    places: dict[str, tuple[str, Place]] = {}
    for name, value in settled.items():
        alike = [key for key in read if texts[key].strip() == str(value)]
        order = [*alike, *(key for key in read if key not in alike)]
        trials = ((key, missing) for missing in (False, True) for key in order)
        key = next((key for key, missing in trials if hangs_on(name, key, missing)), None)
        key = alike[0] if key is None and alike else key
        if key is not None:
            places[name] = (key, part.arguments[key][1])
    return places


def _other(text: str) -> str:
    """A text that means something else."""
    text = text.strip()
    if text.isdecimal() and len(text) < 19:
        return str(int(text) + 1)
    return {"True": "False", "False": "True"}.get(text, f"not {text}")


class _Watched(Mapping[str, str]):
    """Arguments that remember which of them were looked at and are there."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._read: dict[str, None] = {}

    @property
    def read(self) -> list[str]:
        return list(self._read)

    def __getitem__(self, key: str) -> str:
        text = self._texts[key]
        self._read[key] = None
        return text

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def stated(parts: Sequence[Part]) -> dict[str, list[Stated]]:
    """Every value that parts state of each field, the nearest to what ran first; equal ones once."""
    found: dict[str, list[Stated]] = {}
    for part in parts:
        for name, facts in part.facts.items():
            for fact in facts:
                _add(found, name, Stated(fact.value, SAID, str(fact.place)))
    for part in parts:
        for name, value in asked_at(part).items():
            _add(found, name, value)
    return found


def _add(found: dict[str, list[Stated]], name: str, value: Stated) -> None:
    known = found.setdefault(name, [])
    if all(each.value != value.value or each.by != value.by for each in known):
        known.append(value)


# Two parts in which one of these differs are not of one run.
_MARKS = ("gpus", "tp", "pp", "dp", "hidden", "layers", "heads", "seq", "vocab", "micro_batch", "global_batch")


Marks = Mapping[str, frozenset[Any]]


def marks(part: Part) -> Marks:
    """What tells one run from another: layout, shape and batch, as far as the part says."""
    settled = asked(part)
    found: dict[str, frozenset[Any]] = {}
    for name in _MARKS:
        values = {fact.value for fact in part.facts.get(name, ())} | ({settled[name]} if name in settled else set())
        if values:
            found[name] = frozenset(values)
    return found


def contradict(one: Marks, other: Marks) -> bool:
    """Whether the marks of two parts rule out that they are of one run."""
    return any(not one[name] & other[name] for name in one.keys() & other.keys())


def united(one: Marks, other: Marks) -> Marks:
    """The marks of two parts that do not contradict each other."""
    return {**other, **{name: values & other.get(name, values) for name, values in one.items()}}
