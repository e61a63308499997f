"""The anomalies of the runs: everything that looks wrong, the worst first.

There are five levels: a run that failed, an absurd figure, figures in doubt, worth a look, good to know. Within a level
the anomaly that cost most GPU hours, or most GPUs, comes first. The same text for many runs is one anomaly, and so are
failures that differ only in their figures, paths and hosts.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from hpc_gpt.core.ends.failures import ENDED, LIVE
from hpc_gpt.core.format import ALIKE, FEW_ALIKE, counted, show_digits, without_figures
from hpc_gpt.core.runs.record import ABSENT, Record
from hpc_gpt.reader.records import RunRead
from hpc_gpt.reader.steps import StepTable
from hpc_gpt.report.svg import number, safe
from hpc_gpt.report.table_notes import DOUBT, FAILED, KNOW, LEVELS, LOOK, flag_level

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


@dataclass(frozen=True)
class Anomaly:
    """One thing that is wrong, and the places in the report of the runs that have it. `cost`: GPU hours, else GPUs.

    `nodes`: the failed nodes, each with the number of its runs if there are several.
    """

    level: int
    message: str
    runs: tuple[int, ...]
    where: str = ""
    cost: float = 0.0
    nodes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the level."""
        return LEVELS[self.level]


@dataclass
class _Gathered:
    message: str
    where: str = ""
    runs: list[int] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    cost: float = 0.0
    nodes: Counter[str] = field(default_factory=Counter)

    def anomaly(self, level: int) -> Anomaly:
        # A path that is in the text is not shown again.
        where = "" if self.where and self.where in self.message else self.where
        nodes = (f"{node} ({runs} runs)" if runs > 1 else node for node, runs in self.nodes.most_common(_NODES))
        text = f"{self.message} ({ALIKE})" if len(self.texts) > 1 else self.message
        return Anomaly(level, text, tuple(self.runs), where, self.cost, tuple(nodes))


def ended_text(ended: str | None) -> str:
    """The text for a run's end; the class itself if ENDED_TEXTS has none."""
    return ENDED_TEXTS[ended][0] if ended in ENDED_TEXTS else safe(ended or "unknown", 60)


def has_failed(ended: str | None) -> bool:
    """Whether a run with this end has failed."""
    return ended in ENDED_TEXTS and ENDED_TEXTS[ended][1] == FAILED


def rank_anomalies(runs: Sequence[RunRead]) -> list[Anomaly]:
    """All anomalies of the runs, the worst first."""
    gathered: dict[tuple[int, str], _Gathered] = {}
    medians = _usual_steps(runs)
    for place, run in enumerate(runs):
        for level, message, where in _of_run(run, medians):
            key = message
            if level == FAILED:  # a cause from a log names its line
                key = failure_shape(run.record.ended, message.replace(f"({where})", ""))
            entry = gathered.setdefault((level, key), _Gathered(message, where))
            entry.texts.add(message)
            if not entry.runs or entry.runs[-1] != place:
                entry.runs.append(place)
                entry.cost += _cost(run.record)
                if level == FAILED and run.record.failed_node:
                    entry.nodes[safe(run.record.failed_node, 100)] += 1
    anomalies = [entry.anomaly(level) for (level, _), entry in gathered.items()]
    return sorted(
        _alike(anomalies), key=lambda anomaly: (anomaly.level, -anomaly.cost, -len(anomaly.runs), anomaly.runs[0])
    )


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


def _alike(anomalies: Sequence[Anomaly]) -> list[Anomaly]:
    """The anomalies; if more than a few have texts that differ only in figures, these become one."""
    shapes: dict[tuple[int, str], list[Anomaly]] = defaultdict(list)
    for anomaly in anomalies:
        shapes[anomaly.level, without_figures(anomaly.message)].append(anomaly)
    merged = []
    for (level, _), alike in shapes.items():
        if len(alike) <= FEW_ALIKE or level == FAILED:
            merged += alike
            continue
        worst = max(alike, key=lambda anomaly: anomaly.cost)
        runs = dict.fromkeys(place for anomaly in (worst, *alike) for place in anomaly.runs)
        text = f"{worst.message} ({ALIKE})"
        cost = sum(anomaly.cost for anomaly in alike)
        merged.append(replace(worst, message=text, runs=tuple(runs), cost=cost))
    return merged


def _of_run(run: RunRead, medians: dict[tuple[object, ...], float]) -> Iterator[tuple[int, str, str]]:
    """Yields (level, text, place) of every anomaly of a run."""
    record = run.record
    message, level = ENDED_TEXTS.get(record.ended or "", (safe(record.ended or "", 60), LOOK if record.ended else None))
    first = run.failures[0] if run.failures else None
    if level is not None:
        cause = safe(record.cause or (first.message if first else ""), 300)
        yield level, f"{message}: {cause}" if cause else message, str(first.place) if first else ""
    elif first is not None and not is_history(run):
        yield (
            LOOK,
            f"{message}, but its log reports {ended_text(first.ended)}: {safe(first.message, 300)}",
            str(first.place),
        )
    for flag, kind in [pair for pair in record.all_flags if pair[1] != ABSENT][:40]:
        yield flag_level(kind), safe(flag, 300), ""
    if (nan := number(record.nan_steps)) and "nan" not in record.flag_kinds:
        yield DOUBT, f"{counted(int(nan), 'step')} with a NaN loss", ""
    if (skipped := number(record.skipped_steps)) and "all_skipped" not in record.flag_kinds:
        yield LOOK, f"{counted(int(skipped), 'step')} skipped", ""
    if again := trained_again(run.steps):
        restarts = len(set(run.steps.attempt.tolist())) - 1
        yield LOOK, f"{again:,} steps trained again after {counted(restarts, 'restart')}", ""
    yield from _speed(record, medians, "spread" in record.flag_kinds)


def trained_again(curve: StepTable) -> int:
    """The number of steps that a later attempt trained again."""
    return int((~curve.counts).sum())


def _speed(
    record: Record, medians: dict[tuple[object, ...], float], is_flagged: bool
) -> Iterator[tuple[int, str, str]]:
    step, low, high = number(record.step_s), number(record.step_s_p10), number(record.step_s_p90)
    usual = medians.get(_like(record))
    if step and usual and step >= _SLOWER * usual:
        message = f"{step / usual:.2f} x the median step time of similar runs"
        yield LOOK, f"{message} ({show_digits(step)} s, not {show_digits(usual)} s)", ""
    if low and high and high / low >= _WIDE and not is_flagged:
        message = f"step time varies: 90th percentile {show_digits(high)} s is {high / low:.1f} x the 10th"
        yield LOOK, f"{message} ({show_digits(low)} s)", ""


def is_history(run: RunRead) -> bool:
    """Whether the run is done and its failures belong to earlier attempts."""
    return run.record.ended == "done" and len(run.record.attempts or ()) > 1


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
