"""A record while it is built: the values that logs state per field, the one that is used, its source, and flags."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from hpc_gpt.core.runs.record import Flag
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.reader.dialects import dialects
from hpc_gpt.reader.logs import Fact, Part
from hpc_gpt.reader.pattern import MARKS, TEXT_FIELDS, Dialect

# Who states a value. The highest is used, as it is closest to what ran. A library's dump of its configuration ranks
# below the arguments of the program that uses it, because it has the batch of one moment only.
SAID, ASKED, LIBRARY = 3, 2, 1
LIBRARIES = frozenset(("deepspeed_config",))


@dataclass(frozen=True)
class Stated:
    """A value, who states it (SAID, ASKED or LIBRARY), and where (`file:line`)."""

    value: Any
    by: int
    source: str


@cache
def _by_name() -> dict[str, Dialect]:
    return {dialect.name: dialect for dialect in dialects()}


def dialect_named(name: str | None) -> Dialect | None:
    """The dialect with a name, None without one."""
    return _by_name().get(name or "")


def dialects_of(part: Part) -> list[Dialect]:
    """The dialects with lines in a part, most lines first."""
    names = sorted(part.dialects, key=lambda name: -part.dialects[name])
    return [_by_name()[name] for name in names if name in _by_name()]


def _asked(part: Part) -> dict[str, Any]:
    """The fields that follow from a part's dump of arguments; of two dialects the one with most lines decides."""
    texts = {key: text for key, (text, _) in part.arguments.items()}
    asked: dict[str, Any] = {}
    for dialect in dialects_of(part) if texts else ():
        fields = dialect.interpret(texts) if dialect.interpret is not None else {}
        asked |= {name: value for name, value in fields.items() if name not in asked}
    return asked


def asked_at(part: Part) -> dict[str, Stated]:
    """The fields that follow from a part's dump of arguments, each with the first line of the dump."""
    line = min((place.line for _, place in part.arguments.values()), default=0)
    return {name: Stated(value, ASKED, f"{part.file}:{line} (arguments)") for name, value in _asked(part).items()}


def _who(fact: Fact) -> int:
    return LIBRARY if fact.dialect in LIBRARIES else SAID


# Facts of lines that say that a batch changed: {fact: (the field that changed, a field that follows from it)}. The
# other sizes of the batch stay unless they are stated again.
CHANGES = {
    "device_batch_now": ("micro_batch", "global_batch"),
    "micro_batch_now": ("micro_batch", "micro_batches"),
    "global_batch_now": ("global_batch", "micro_batches"),
}
_OF_A_START = ("micro_batch", "micro_batches", "global_batch", "global_batch_tokens", "steps_planned")


def _facts_of(part: Part) -> Iterator[tuple[str, Sequence[Fact]]]:
    """Yields (name, facts) of a part. If a line says that the batch changed, only later facts of the batch are used.

    A program that states another micro-batch than before has begun again, like a Trainer that ran out of memory.
    """
    changes = [(fact.place.line, *CHANGES[name], fact) for name in CHANGES for fact in part.facts.get(name, ())]
    begun: dict[str, Fact] = {}
    for fact in part.facts.get("micro_batch", ()):
        if begun.setdefault(fact.dialect, fact).value != fact.value:
            changes.append((fact.place.line - 1, *CHANGES["device_batch_now"], fact))
    if not changes:
        yield from part.facts.items()
        return
    line, changed, follows, change = max(changes, key=lambda entry: entry[0])
    for name in dict.fromkeys([*part.facts, changed]):
        facts = part.facts.get(name, [])
        facts_after = [fact for fact in facts if fact.place.line > line] if name in _OF_A_START else facts
        facts_before = [] if name == follows else facts
        if name not in CHANGES and (used := facts_after or ([change] if name == changed else facts_before)):
            yield name, used


def stated(parts: Sequence[Part]) -> dict[str, list[Stated]]:
    """All values that parts state per field, the closest to what ran first, without repeats."""
    facts = (fact for part in parts for fact in _facts_of(part))
    printed = [(name, Stated(fact.value, _who(fact), str(fact.place))) for name, of_name in facts for fact in of_name]
    values: dict[str, list[Stated]] = {}
    for name, value in [*printed, *(argument for part in parts for argument in asked_at(part).items())]:
        statements = values.setdefault(name, [])
        if all(other.value != value.value or other.by != value.by for other in statements):
            statements.append(value)
    return values


Marks = Mapping[str, frozenset[Any]]


def marks(part: Part) -> Marks:
    """The marks that tell runs apart: layout, shape and batch, as far as the part states them."""
    arguments = _asked(part)
    values_of = {name: {fact.value for fact in part.facts.get(name, ())} for name in MARKS}
    for name in values_of.keys() & arguments.keys():
        values_of[name].add(arguments[name])
    return _shared(tuple((name, frozenset(values)) for name, values in values_of.items() if values))


@lru_cache(4096)
def _shared(marks: tuple[tuple[str, frozenset[Any]], ...]) -> Marks:
    """The marks as one shared object for equal ones: many runs of a folder have the same."""
    return dict(marks)


def contradict(one: Marks, other: Marks) -> bool:
    """Whether the marks of two parts show that they belong to different runs."""
    return any(not one[name] & other[name] for name in one.keys() & other.keys())


def united(one: Marks, other: Marks) -> Marks:
    """The marks of two parts that do not contradict each other."""
    return {**other, **{name: values & other.get(name, values) for name, values in one.items()}}


_LARGEST = 10**18  # no size or count of a training is larger
# {field whose different values a flag reports: its name in the flag}.
_COMPARED = {
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
_WORDS = {
    SAID: "the log says",
    ASKED: "the arguments ask for",
    LIBRARY: "DeepSpeed's configuration says",
}


@dataclass
class Draft:
    """Values and sources by field, and flags in order. `by`: who states each stated value."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    by: dict[str, int] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value, None if it is not known."""
        return self.values.get(name)

    def whole(self, name: str) -> int | None:
        """The value of a size or count, at least 1; None if it is not known."""
        value = self.values.get(name)
        return value if isinstance(value, int) and value > 0 else None

    def set(self, name: str, value: Any, source: str) -> None:
        """Sets a field and its source."""
        self.values[name] = value
        self.sources[name] = source

    def infer(self, name: str, value: Any, how: str) -> None:
        """Sets a field that follows from others, unless it is known."""
        if name not in self and value is not None:
            self.set(name, value, f"inferred: {how}")

    def flag(self, message: str, kind: str = "") -> None:
        """Adds a flag, once."""
        if message not in self.flags:
            self.flags.append(Flag(message, kind))


def draft_of(logged: Mapping[str, Sequence[Stated]]) -> Draft:
    """The draft of the stated fields. The order of precedence is: the program's own lines, its arguments, the dump of a
    library.

    If two statements differ, a flag gives both with their places.
    """
    draft = Draft()
    for name, candidates in logged.items():
        usable = [
            (value, statement) for statement in candidates if (value := _usable(name, statement.value)) is not None
        ]
        for statement in candidates:
            is_unset = statement.value == -1 and name not in _COMPARED  # as programs say it
            if _usable(name, statement.value) is None and not is_unset:
                draft.flag(
                    f"{_COMPARED.get(name, name)} cannot be {str(statement.value)[:40]} ({statement.source}): left out",
                    "value",
                )
        if not usable:
            continue
        best, chosen = max(usable, key=lambda pair: pair[1].by)
        draft.set(name, best, chosen.source)
        draft.by[name] = chosen.by
        if name in _COMPARED:
            _compare(draft, name, best, chosen, usable)
    return draft


def _compare(draft: Draft, name: str, best: Any, first: Stated, usable: Sequence[tuple[Any, Stated]]) -> None:
    values = [(value, statement) for value, statement in usable if statement.by == SAID]
    if name == "global_batch" and len(values) > 1:
        # `--rampup-batch-size`: the figures are for the largest batch of the last attempt, whose values come first.
        until = next((index for index, (one, two) in enumerate(pairwise(values), 1) if two[0] < one[0]), len(values))
        if until > 1:
            largest, where = values[until - 1]
            least = min(value for value, _ in values)
            draft.set(name, largest, f"{where.source}, the largest of {len(values)}")
            draft.flag(f"the global batch grew during the run, from {least} to {largest} ({where.source})")
            return
    other = next(((value, statement) for value, statement in usable if value != best), None)
    if other is not None:
        value, statement = other
        joint = "and" if statement.by == first.by else f"but {_WORDS[statement.by]}"
        draft.flag(
            f"{_WORDS[first.by]} {_COMPARED[name]} {best} ({first.source}), {joint} {value} ({statement.source})"
        )


def _usable(name: str, value: Any) -> Any:
    """The value in the type of its field; None for an impossible size."""
    if name in TEXT_FIELDS or isinstance(value, str):
        text = hide_secrets(" ".join(str(value).split()))[:200]
        return text or None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, bool) else None
    if not abs(value) <= _LARGEST:
        return None
    if value < 0 and not name.startswith("loss"):
        return None
    if name in _COMPARED and (value != int(value) or (value == 0 and name != "zero_stage")):
        return None
    return int(value) if value == int(value) else value
