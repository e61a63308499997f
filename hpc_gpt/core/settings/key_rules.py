"""`KeyRules`, the rules of each key in an experiment's tables: when it may change, and what it affects."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from hpc_gpt.core.errors import Fault
from hpc_gpt.core.typed_tables import LARGEST


@dataclass(frozen=True)
class KeyRules:
    """The rules of a key: when it may change, what it affects, and its bounds.

    `resume`: whether a run that resumes from another run's checkpoint may change the key. Engine and layout are free:
    every engine reads the checkpoints of every other one in any layout.
    `branch`: whether a branch, another training from that checkpoint, may change what a resumption may not; it may
    change all of [data].
    `affects`: "speed" keys decide the weights or the time of a step; "schedule" keys do not change the time of a step;
    keys that affect nothing are not in `config_hash`.
    `least`, `above`, `below`: bounds of a number; only `least` is itself allowed. `hint`: the hint for a number outside
    of them.
    `thousand`: the `k` of a count as a text (`"8k"`), 1000 for a whole number without this rule; 1024 for tokens of a
    sample, whose lengths are powers of two.
    `check`: raises ConfigError for a text that has no meaning.
    `site_may_set`: the key belongs to one cluster, so a run that resumes on another one drops it.
    `of_our_loop`: another program does not follow the key.
    `part`: the part that the key gives a model, in words, which Llama's and GPT-2's kind of model does not have;
    `without`: values with which it gives none. `trains`: whether our own model has it; if not, it is for a plan alone.
    `defaults`: its default, and other values that mean the same. A key with one of them is neither in the text of
    resolved.json nor in `config_hash`, so that neither changes with keys that are added later.
    """

    resume: Literal["never", "free"]
    affects: tuple[Literal["speed", "schedule"], ...]
    least: int | None = None
    above: int | None = None
    below: int | None = None
    hint: str = ""
    thousand: int | None = None
    check: Callable[[str], object] | None = None
    site_may_set: bool = False
    of_our_loop: bool = False
    part: str = ""
    without: tuple[Any, ...] = (None, False, 0)
    trains: bool = True
    branch: bool = False
    defaults: tuple[Any, ...] = ()

    def fault(self, value: Any) -> str:
        """The fault of a number, as text to follow its key's name; empty if it is allowed."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        must = ""
        if isinstance(value, float) and not math.isfinite(value):
            must = "be a finite number"
        elif isinstance(value, int) and abs(value) > LARGEST:
            return f"must be at most {LARGEST:.3g}, and is larger"
        elif self.below is not None and not (self.least or 0) <= value < self.below:
            must = f"be in [{self.least or 0}, {self.below})"
        elif self.least is not None and value < self.least:
            must = f"be at least {self.least}" if self.least else "not be negative"
        elif self.above is not None and value <= self.above:
            must = f"be above {self.above}"
        return f"is {value}, but must {must}" if must else ""


def key(
    default: Any,
    *,
    resume: Literal["never", "free"],
    affects: tuple[Literal["speed", "schedule"], ...],
    **rules: Any,
) -> Any:
    """A key of a table: its default and its rules."""
    rules = {"defaults": (default,), **rules}
    return field(default=default, metadata={"rules": KeyRules(resume, affects, **rules)})


def number_faults(name: str, table: Any, hint: str, but: Collection[str] = ()) -> Iterator[Fault]:
    """The fault of each number in table `name` that its key's rules do not allow. `hint`: for keys whose rules have
    none. The keys in `but` may have any value."""
    for key, rules in key_rules(table).items():
        if key not in but and (fault := rules.fault(getattr(table, key))):
            yield Fault(f"{name}.{key} {fault}", rules.hint or hint)


def without_defaults(table: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a table's keys that differ from the keys' defaults."""
    rules = key_rules(table)
    return {name: value for name, value in values.items() if value not in rules[name].defaults}


def key_rules(table: Any) -> dict[str, KeyRules]:
    """The rules of each key of a table, in the order of its fields."""
    return {entry.name: entry.metadata["rules"] for entry in fields(table)}
