"""A record while it is built: each field is written once, with its source; flags stay in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_gpt.core.runs.record import Flag


@dataclass
class Draft:
    """Values and sources by field, and flags. A field that has a source and no value is null for that reason.

    `solved`: {field that a rule gave: all fields that it follows from}.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    solved: dict[str, frozenset[str]] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value of a field; None if it is not known."""
        return self.values.get(name)

    def whole(self, name: str) -> int | None:
        """The value of a size or count, at least 1; None if it is not known."""
        value = self.values.get(name)
        return value if isinstance(value, int) and value > 0 else None

    def set(self, name: str, value: Any, source: str) -> None:
        """Writes a field and its source."""
        assert name not in self.values, f"{name} is written twice"
        self.values[name] = value
        self.sources[name] = source

    def infer(self, name: str, value: Any, how: str) -> None:
        """Writes a field that follows from others, unless it is known."""
        if name not in self and value is not None:
            self.set(name, value, f"inferred: {how}")

    def flag(self, message: str, kind: str = "") -> None:
        """Adds a flag, once."""
        if message not in self.flags:
            self.flags.append(Flag(message, kind))


def is_on(arguments: Mapping[str, str], *names: str) -> bool:
    """Whether one of the arguments is given and true."""
    return any(arguments.get(name, "").strip().lower() in ("true", "1", "yes") for name in names)


def number_of(arguments: Mapping[str, str], *names: str) -> int | None:
    """The first of the arguments that is a whole number."""
    texts = (arguments.get(name, "").strip() for name in names)
    return next((int(text) for text in texts if text.isascii() and text.isdigit() and len(text) <= 15), None)
