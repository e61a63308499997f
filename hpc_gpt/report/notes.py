"""The notes on runs: everything that looks wrong, the worst first, for the lines of `report` and for its page.

There are five levels: a run that failed, an absurd figure, figures in doubt, worth a look, good to know. Within a level
the note that cost most GPU hours, or most GPUs, comes first. The same text for many runs is one note, and so are
failures that differ only in their figures, paths and hosts.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from hpc_gpt.core.ends.failures import ENDED, LIVE
from hpc_gpt.core.format import ALIKE, FEW_ALIKE, counted, show_digits, some_names, without_figures
from hpc_gpt.core.runs.record import ABSENT, Record
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.svg import number, safe
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
_MOST_FLAGS = 40  # of a run on the page
# The texts of ends that are not just the name of the class; and the levels of ends that are not failures, None if
# nothing is wrong.
_TEXTS = {
    "walltime": "out of walltime", "budget": "out of budget",
    "gpu_memory": "out of GPU memory", "host_memory": "out of host memory",
    "collective_timeout": "a collective timed out", "hang": "hung", "nan": "NaN loss", "data": "data fault",
}  # fmt: skip
_ENDED_LEVELS: dict[str, int | None] = {
    **dict.fromkeys(("done", *LIVE)),
    **dict.fromkeys(("stopped", "walltime", "preempted", "requeued", "cancelled", "unknown"), KNOW),
    "budget": LOOK,
}
ENDED_TEXTS = {ended: (_TEXTS.get(ended, ended.replace("_", " ")), _ENDED_LEVELS.get(ended, FAILED)) for ended in ENDED}
# The parts of a message in which two runs differ that fail in the same way: paths, addresses, units of sizes.
_VARYING = re.compile(r"(?:[\w.~-]*/)+[\w.-]+|\b0x[0-9a-fA-F]+\b|\b[KMGT]i?B\b|\bbytes\b")
_EXCEPTION = re.compile(r"^(?:\w{1,60}\.){0,6}\w{1,60}(?:Error|Exception): ")
_SENTENCE = re.compile(r"[.;(]\s?")
_SLOWER = 1.1  # ratio to the median of similar runs from which a run is slow
_NODES = 8
_LIKE = 3  # similar runs that this median needs
_WIDE = 1.5  # p90 over p10


class RunNote(NamedTuple):
    """A note on a run, by its name or its place in the report. `level`: an index of LEVELS. `cost`: GPU hours, else
    GPUs. Notes of one `shape`, or with the same text, are one."""

    run: str | int
    text: str
    level: int
    cost: float = 0.0
    where: str = ""
    node: str = ""
    shape: str = ""


@dataclass(frozen=True)
class Note:
    """A note and the runs that have it. `nodes`: the failed ones, each with the number of its runs if there are
    several."""

    level: int
    text: str
    runs: tuple[str | int, ...]
    cost: float = 0.0
    where: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the level."""
        return LEVELS[self.level]


def grouped(notes: Iterable[RunNote], few_alike: int = FEW_ALIKE) -> list[Note]:
    """The notes, the worst first. More than `few_alike` texts that differ only in figures become one."""
    same: dict[tuple[int, str], list[RunNote]] = defaultdict(list)
    for note in notes:
        same[note.level, note.shape or note.text].append(note)
    alike: dict[tuple[int, str], list[list[RunNote]]] = defaultdict(list)
    for (level, text), of_text in same.items():
        alike[level, text if of_text[0].shape else without_figures(text)].append(of_text)
    groups: list[Note] = []
    for texts in alike.values():
        groups += map(_one, texts if len(texts) <= few_alike else [[note for of_text in texts for note in of_text]])
    return sorted(groups, key=lambda note: (note.level, -note.cost, -len(note.runs)))


def _one(notes: Sequence[RunNote]) -> Note:
    """The note with the text of the costliest run."""
    worst, costs = notes[0], {note.run: note.cost for note in notes}
    text = worst.text
    if len({note.text for note in notes}) > 1:
        worst = max(notes, key=lambda note: note.cost)
        text = f"{worst.text} ({ALIKE})"
        costs = {worst.run: worst.cost, **costs}
    nodes = Counter(note.node for note in notes if note.node).most_common(_NODES)
    where = "" if worst.where and worst.where in text else worst.where  # a path that is in the text is not shown again
    named = (f"{node} ({runs} runs)" if runs > 1 else node for node, runs in nodes)
    return Note(worst.level, text, tuple(costs), sum(costs.values()), where, tuple(named))


def notes_on(run: RunRead, name: str | None = None) -> list[RunNote]:
    """The notes on a run for a terminal: what looks wrong, and the checkpoint that a branch begins from. `name`: its
    name in the table, if that is a shorter one."""
    name, parent = name or show_name(run.record), run.record.settings.get("resumed_from")
    notes = _flag_notes(run, name)
    if absent := [flag for flag, kind in run.record.all_flags if kind == ABSENT]:
        notes.append(RunNote(name, "; ".join(absent), KNOW, _cost(run.record)))
    if isinstance(parent, dict) and parent.get("branch"):
        notes.insert(0, RunNote(name, f"begins from {show_begin(run.record)}", KNOW, _cost(run.record)))
    return notes


def note_lines(notes: Iterable[RunNote], runs: int, taken: int = 0) -> list[str]:
    """The notes on `runs` runs as lines, the worst first, each text once with the runs that have it. Several runs get
    at most MOST_NOTE_LINES lines, `taken` of them printed elsewhere; the last line counts the others."""
    notes, room = list(notes), max(1, MOST_NOTE_LINES - taken)
    groups = grouped(notes)
    if runs > 1 and len(groups) > room:
        groups = grouped(notes, 1)
    is_whole = runs == 1 or len(groups) <= room
    shown, left = (groups, []) if is_whole else (groups[: room - 1], groups[room - 1 :])
    lines = [f"{some_names([str(name) for name in note.runs])}: {note.text}" for note in shown]
    if left:
        lines.append(f"{len(left)} {'more' if shown else 'notes'}: report RUN")
    return lines


def notes_of_page(runs: Sequence[RunRead]) -> list[Note]:
    """All notes on the runs for the page, by their places, the worst first."""
    medians = _usual_steps(runs)
    return grouped(note for place, run in enumerate(runs) for note in _of_run(run, place, medians))


def ended_text(ended: str | None) -> str:
    """The text for a run's end; the class itself if ENDED_TEXTS has none."""
    return ENDED_TEXTS[ended][0] if ended in ENDED_TEXTS else safe(ended or "unknown", 60)


def has_failed(ended: str | None) -> bool:
    """Whether a run with this end has failed."""
    return ended in ENDED_TEXTS and ENDED_TEXTS[ended][1] == FAILED


def is_history(run: RunRead) -> bool:
    """Whether the run is done and its failures belong to earlier attempts."""
    return run.record.ended == "done" and len(run.record.attempts or ()) > 1


def failure_shape(ended: str | None, cause: str) -> str:
    """A failure's text without what differs between two runs that fail in the same way.

    >>> one = failure_shape("error", "error: OSError: /data/a/x.bin: read 12 of 40 bytes at 0x7f00")
    >>> one == failure_shape("error", "error: OSError: /scratch/y-3.bin: read 9 of 40 bytes at 0x8a1b")
    True
    >>> torch = failure_shape("gpu_memory", "out of GPU memory: torch.OutOfMemoryError: CUDA out of memory. Tried to")
    >>> torch == failure_shape("gpu_memory", "out of GPU memory: RuntimeError: CUDA out of memory (GPU 3)")
    True
    """
    kind, _, text = cause.partition(": ")
    if ended == "gpu_memory":
        text = _SENTENCE.split(_EXCEPTION.sub("", text))[0].strip()
    return f"{kind}: {without_figures(_VARYING.sub('#', text))}"


def _of_run(run: RunRead, place: int, medians: dict[tuple[object, ...], float]) -> Iterator[RunNote]:
    """Yields the notes on a run for the page: its end, its flags, and what its steps show."""
    record, cost = run.record, _cost(run.record)
    message, level = ENDED_TEXTS.get(record.ended or "", (safe(record.ended or "", 60), LOOK if record.ended else None))
    first = run.failures[0] if run.failures else None
    where = str(first.place) if first else ""
    if level is not None:
        cause = safe(record.cause or (first.message if first else ""), 300)
        text, node, shape = f"{message}: {cause}" if cause else message, "", ""
        if level == FAILED:  # a cause from a log names its line
            node, shape = safe(record.failed_node, 100), failure_shape(record.ended, text.replace(f"({where})", ""))
        yield RunNote(place, text, level, cost, where, node, shape)
    elif first is not None and not is_history(run):
        text = f"{message}, but its log reports {ended_text(first.ended)}: {safe(first.message, 300)}"
        yield RunNote(place, text, LOOK, cost, where)
    for note in _flag_notes(run, place)[:_MOST_FLAGS]:
        yield note._replace(text=safe(note.text, 300))
    for text, level in _of_figures(run, medians.get(_like(record))):
        yield RunNote(place, text, level, cost)


def _of_figures(run: RunRead, usual: float | None) -> Iterator[tuple[str, int]]:
    """Yields (text, level) of what the steps show. `usual`: the median step time of similar runs."""
    record, step, kinds = run.record, number(run.record.step_s), run.record.flag_kinds
    if (nan := number(record.nan_steps)) and "nan" not in kinds:
        yield f"{counted(int(nan), 'step')} with a NaN loss", DOUBT
    if (skipped := number(record.skipped_steps)) and "all_skipped" not in kinds:
        yield f"{counted(int(skipped), 'step')} skipped", LOOK
    if again := int((~run.steps.counts).sum()):
        restarts = len(set(run.steps.attempt.tolist())) - 1
        yield f"{again:,} steps trained again after {counted(restarts, 'restart')}", LOOK
    if step and usual and step >= _SLOWER * usual:
        text = f"{step / usual:.2f} x the median step time of similar runs"
        yield f"{text} ({show_digits(step)} s, not {show_digits(usual)} s)", LOOK
    low, high = number(record.step_s_p10), number(record.step_s_p90)
    if low and high and high / low >= _WIDE and "spread" not in kinds:
        text = f"step time varies: 90th percentile {show_digits(high)} s is {high / low:.1f} x the 10th"
        yield f"{text} ({show_digits(low)} s)", LOOK


def _flag_notes(run: RunRead, name: str | int) -> list[RunNote]:
    """The flags of a run as notes, without those that only say why a figure is null."""
    flags, cost = run.record.all_flags, _cost(run.record)
    return [
        RunNote(name, _short(flag, run.files), _FLAG_LEVELS.get(kind, LOOK), cost)
        for flag, kind in flags
        if kind != ABSENT
    ]


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


def _cost(record: Record) -> float:
    return 0.0 if record.is_on_cpu else number(record.gpu_hours) or (number(record.gpus) or 0.0) / 1e6


def _like(record: Record) -> tuple[object, ...]:
    """The figures that two runs must share for their step times to be compared."""
    shape = (record.params, record.seq, record.global_batch, record.micro_batch, record.recompute, record.dtype)
    layout = (record.tp, record.pp, record.cp or 1, record.dp, record.ep or 1)
    return (record.engine or record.dialect, record.gpus, *layout, record.zero_stage, record.device, *shape)


def _usual_steps(runs: Sequence[RunRead]) -> dict[tuple[object, ...], float]:
    """The median step time per kind of run, for kinds with at least _LIKE runs."""
    steps: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for run in runs:
        if (step := number(run.record.step_s)) and run.record.gpus and run.record.global_batch:
            steps[_like(run.record)].append(step)
    return {kind: median(seconds) for kind, seconds in steps.items() if len(seconds) >= _LIKE}
