"""What was made of each line of a script: taken, done by hpc-gpt itself, or left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hpc_gpt.secrets import hide_secrets
from hpc_gpt.words import plain

_WIDEST = 68


class Note(NamedTuple):
    """A place, `12` or `env.sh:3`, what it has, without secrets, and what was made of it."""

    place: str
    text: str
    means: str


@dataclass
class Notes:
    """`taken` into a key, the `own` work of hpc-gpt, and what is `left` for the user to look at."""

    taken: list[Note] = field(default_factory=list)
    own: list[Note] = field(default_factory=list)
    left: list[Note] = field(default_factory=list)

    def take(self, place: str, text: str, means: str) -> None:
        _add(self.taken, place, text, means)

    def does(self, place: str, text: str, means: str) -> None:
        _add(self.own, place, text, means)

    def leave(self, place: str, text: str, means: str) -> None:
        _add(self.left, place, text, means)

    def lines(self) -> list[str]:
        """The list as it is printed, each part under its heading."""
        found: list[str] = []
        for heading, notes in (
            ("taken", self.taken),
            ("hpc-gpt does it itself", self.own),
            ("left out, look at these", self.left),
        ):
            if notes:
                found += [*([""] if found else []), f"{heading}:", *_table(notes)]
        return found


def _add(notes: list[Note], place: str, text: str, means: str) -> None:
    note = Note(place, shortened(hide_secrets(text)), means)
    if note not in notes:
        notes.append(note)


def shortened(text: str) -> str:
    """A statement on one line, without control characters, cut if it is long."""
    flat = plain(" ".join(text.replace("\\\n", " ").split()))
    return flat if len(flat) <= _WIDEST else f"{flat[: _WIDEST - 1]}…"


def _order(note: Note) -> tuple[str, int]:
    """By file, the script first, and line."""
    file, _, line = note.place.rpartition(":")
    return file, int(line) if line.isdigit() else 0


def _table(notes: Iterable[Note]) -> list[str]:
    """Two lines a note if its text is long."""
    found = []
    for note in sorted(notes, key=_order):
        head = f"  {note.place.rjust(4)}  {note.text}"
        found += [f"{head.ljust(46)}  {note.means}"] if len(head) <= 46 else [head, f"{'':46}  {note.means}"]
    return found
