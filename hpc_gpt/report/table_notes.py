"""The notes that `report` prints with its table: counted, grouped by the runs that have them, and shortened."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.core.format import ALIKE, FEW_ALIKE, counted, some_names, without_figures
from hpc_gpt.core.runs.record import ABSENT
from hpc_gpt.reader.records import RunRead
from hpc_gpt.report.tables import show_begin, show_name

# How bad a note is, the worst first.
LEVELS = ("failed", "absurd", "figures in doubt", "worth a look", "good to know")
FAILED, ABSURD, DOUBT, LOOK, KNOW = range(5)
# The level of a flag by its kind; any other is worth a look.
_FLAG_LEVELS = {
    "absurd": ABSURD,
    **dict.fromkeys(("layout", "batch", "value", "nan", "all_skipped"), DOUBT),
    **dict.fromkeys(("no_peak", "device", "cause", "attempts", "program", "attention", ABSENT), KNOW),
}
# The lines of notes printed for several runs; one run prints them all, as nothing else shows them at a glance.
MOST_NOTE_LINES = 3


class RunNote(NamedTuple):
    """A note on a run: the run's name, the text, and its level, an index of LEVELS."""

    name: str
    text: str
    level: int


def flag_level(kind: str) -> int:
    """The level of a flag, by its kind."""
    return _FLAG_LEVELS.get(kind, LOOK)


def notes_on(run: RunRead) -> list[RunNote]:
    """The notes on a run: what looks wrong, and the checkpoint that a branch begins from."""
    name, parent = show_name(run.record), run.record.settings.get("resumed_from")
    flags = [(flag, kind) for flag, kind in run.record.all_flags if kind != ABSENT]
    notes = [RunNote(name, _short(flag, run.files), flag_level(kind)) for flag, kind in flags]
    if absent := [flag for flag, kind in run.record.all_flags if kind == ABSENT]:
        notes.append(RunNote(name, "; ".join(absent), flag_level(ABSENT)))
    if isinstance(parent, dict) and parent.get("branch"):
        notes.insert(0, RunNote(name, f"begins from {show_begin(run.record)}", KNOW))
    return notes


def note_lines(notes: Iterable[RunNote], runs: int, taken: int = 0) -> list[str]:
    """The notes on `runs` runs as lines, the worst first. A text comes once, with the runs that have it; of many texts
    that differ only in figures one stands for all. Several runs get at most MOST_NOTE_LINES lines, `taken` of them
    printed elsewhere; the last line counts the notes that are left."""
    notes, room = list(notes), max(1, MOST_NOTE_LINES - taken)
    lines = _grouped(notes, FEW_ALIKE)
    if runs > 1 and len(lines) > room:
        lines = _grouped(notes, 1)
    if runs == 1 or len(lines) <= room:
        return [text for text, _ in lines]
    shown, left = lines[: room - 1], lines[room - 1 :]
    names = {name for _, of_line in left for name in of_line}
    count = counted(len(left), f"{'more ' if shown else ''}note")
    where = "which --json, --html and a report of one run show"
    return [*(text for text, _ in shown), f"{count} on {counted(len(names), 'run')}, {where}"]


def _grouped(notes: Sequence[RunNote], few_alike: int) -> list[tuple[str, list[str]]]:
    """(line, names of its runs), the worst line first; among equally bad ones the line that most runs have. More than
    `few_alike` texts that differ only in figures become one line."""
    names: dict[str, list[str]] = {}
    levels: dict[str, int] = {}
    for name, text, level in notes:
        if name not in names.setdefault(text, []):
            names[text].append(name)
        levels[text] = min(level, levels.get(text, level))
    shapes: dict[str, list[str]] = {}
    for text in names:
        shapes.setdefault(without_figures(text), []).append(text)
    for alike in shapes.values():
        if len(alike) > few_alike:
            together = f"{alike[0]} ({ALIKE})"
            levels[together] = min(levels[text] for text in alike)
            names[together] = list(dict.fromkeys(name for text in alike for name in names.pop(text)))
    ranked = sorted(names, key=lambda text: (levels[text], -len(names[text])))
    return [(f"{some_names(names[text])}: {text}", names[text]) for text in ranked]


def _short(flag: str, files: Sequence[Path]) -> str:
    """A flag without the names that its line already has. A place in the run's only log is just its line, as the run
    has the log's name. The reader's name is dropped before a sentence that names the same program.

    >>> _short("litgpt: litgpt times micro-batches", [])
    'litgpt times micro-batches'
    >>> _short("a size of 23B (a.out:7)", [Path("a.out")])
    'a size of 23B (line 7)'
    """
    if len(files) == 1:
        names = {str(files[0]), files[0].name}
        flag = re.sub(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, names))}):(\d+)", r"line \1", flag)
    reader, _, sentence = flag.partition(": ")
    said_twice = reader.isidentifier() and reader.replace("_", "") in re.sub(r"[\s_-]", "", sentence).lower()
    return sentence if said_twice else flag
