"""One run on one screen: its curve, its nodes and ranks, what is left and what comes next. By the files that the run
writes; what it costs does not grow with its length."""

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpc_gpt.columns import Column, column, grid
from hpc_gpt.ends.failures import LIVE
from hpc_gpt.files import open_regular
from hpc_gpt.formulas import GIB
from hpc_gpt.runs.checkpoints import list_complete
from hpc_gpt.runs.disk_space import free_gib, space_needed_gib
from hpc_gpt.runs.heartbeats import RankHeartbeat, read_heartbeats, silent_after_s
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.experiment import limit_s
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.watch.control import describe
from hpc_gpt.watch.status import RunStatus
from hpc_gpt.words import NOTHING, clock, counted, plain, show_bytes, show_duration, show_short

# At most so many nodes and ranks have lines; of more there are the spread and the worst.
_MOST = 10
# Lines of metrics.jsonl that a curve is drawn from, and the bytes that hold a whole one wherever they begin.
_SAMPLES, _SAMPLE_BYTES = 200, 2048
_ENDED = -1.0  # the age of a heartbeat when the run has ended
_HEIGHT, _LEVELS = 6, " ▁▂▃▄▅▆▇█"


class RankRow(NamedTuple):
    """A rank with its last heartbeat, None before the first, and how old that is; _ENDED if the run has ended."""

    rank: int
    last: RankHeartbeat | None
    age_s: float
    silent: bool


class NodeRow(NamedTuple):
    """A node with how many of its ranks are silent, and its GPUs: how many, the mean utilisation in percent, the memory
    of the fullest, the power in W of all, the highest temperature. None for what no heartbeat has."""

    name: str
    ranks: int
    silent: int | None
    gpus: int | None
    util: float | None
    memory: str | None
    power_w: float | None
    temperature_c: float | None


_NODES = (
    column("node", "name", right=False), column("ranks", "ranks"), column("silent", "silent"), column("GPUs", "gpus"),
    column("use", "util", "{:.0f}%".format), column("fullest", "memory"),
    column("power", "power_w", "{:,.0f} W".format), column("hottest", "temperature_c", "{:.0f} °C".format),
)  # fmt: skip
_RANKS = (
    column("rank", "rank", right=False),
    Column("node", ("host",), lambda row: row.last and row.last.host, right=False),
    Column("step", ("step",), lambda row: row.last and row.last.step),
    Column("phase", ("phase",), lambda row: row.last and row.last.phase, right=False),
    Column("for", ("quiet_s",), lambda row: row.last and row.last.quiet_s, show_duration),
    Column(
        "heartbeat",
        ("age_s",),
        lambda row: None if row.age_s in (_ENDED, math.inf) else row.age_s,
        lambda age_s: f"{show_duration(age_s)} ago",
    ),
    Column("", ("place",), lambda row: _remark(row), right=False),
)


def _remark(row: RankRow) -> str:
    if row.last is None:
        return "no heartbeat yet"
    return "; ".join(filter(None, ("silent" * row.silent, row.last.collective, row.last.place)))


def screen(run: RunFolder, status: RunStatus, columns: int = 80, blocks: bool = True) -> list[str]:
    """The lines for a run whose status is known. `blocks`: the output can have block characters. Raises UserError."""
    resolved, attempts, now = run.resolved(), run.attempts(), time.time()
    job = f", job {status.job_id}" if status.job_id else ""
    lines = [f"{run.run_id} of {status.name}, {status.layout}{job}, attempt {len(attempts)}", describe(status)]
    if status.left_s is not None:
        lines[1] += f"  left {show_duration(status.left_s)}, until {clock(now + status.left_s, now)}"
    lines += [words for words in (status.cause, status.pace) if words and words not in lines[1]]
    lines += draw_curve(read_curve(attempts), max(20, columns - 12), blocks)
    lines += _space(run, resolved)
    if status.state in LIVE:
        coming = [f"{words}, in {show_duration(in_s)}" for in_s, words in what_comes(run, resolved, status, now)]
        lines += [f"next: {'; '.join(coming)}"] if coming else []
    if attempts:
        lines += _of_ranks(attempts[-1], resolved, now if status.state in LIVE else None)
    return [plain(line) for line in lines]


def read_curve(attempts: Sequence[Attempt]) -> dict[int, float]:
    """{step: loss} of steps spread over the run; of a step that was trained again the last."""
    curve: dict[int, float] = {}
    for attempt in attempts:
        found = dict(_sampled(attempt))
        first = min(found, default=math.inf)
        curve = {step: loss for step, loss in curve.items() if step < first} | found
    return curve


def _sampled(attempt: Attempt) -> Iterator[tuple[int, float]]:
    try:
        with open_regular(attempt.metrics) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _SAMPLES * _SAMPLE_BYTES:
                lines = file.read().split(b"\n")
            else:
                lines = []
                for at in range(_SAMPLES):
                    file.seek(at * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    lines += file.read(_SAMPLE_BYTES).split(b"\n")[1 if at else 0 : 2]
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
            step, loss = row["step"], row["loss"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(step, int) and isinstance(loss, int | float) and math.isfinite(loss):
            yield step, loss


def draw_curve(curve: dict[int, float], columns: int, blocks: bool = True) -> list[str]:
    """The curve as text, a column for each stretch of steps: its mean loss.

    >>> print(*draw_curve({1: 4.0, 2: 3.0, 3: 2.0}, 3, blocks=False), sep="|")
    loss 4|       *|       *|       **|       **|       **|     2 ***|       step 1 to 3
    """
    if not curve:
        return ["no loss yet"]
    first, last = min(curve), max(curve)
    means: list[list[float]] = [[] for _ in range(min(columns, last - first + 1))]
    for step, loss in curve.items():
        means[(step - first) * len(means) // (last - first + 1)].append(loss)
    drawn = [statistics.fmean(each) for each in means if each]
    low, high = min(drawn), max(drawn)
    heights, places = list[int](), iter(drawn)
    for each in means:  # a stretch without a step is as high as the one before
        share = (next(places) - low) / ((high - low) or 1) if each else 0
        heights.append(8 + round(share * 8 * (_HEIGHT - 1)) if each else heights[-1])
    margin = max(len(show_short(low)), len(show_short(high)), 6)
    lines = [f"loss {show_short(high)}"]
    for row in reversed(range(_HEIGHT)):
        parts = [max(0, min(8, height - 8 * row)) for height in heights]
        text = "".join(_LEVELS[part] if blocks else "*" * (part > 3) or " " for part in parts).rstrip()
        lines.append(f"{show_short(low) if row == 0 else '':>{margin}} {text}".rstrip())
    return [*lines, f"{'':{margin}} step {first:,} to {last:,}"]


def _space(run: RunFolder, resolved: Resolved) -> list[str]:
    free = free_gib(run.path)
    if free is None:
        return []
    one = space_needed_gib(resolved, run)[0] if resolved.form.saves_by_train else 0.0
    needs = f", the next checkpoint takes {show_bytes(one * GIB)}" if one else ""
    return [f"space: {show_bytes(free * GIB)} free{needs}"]


def what_comes(run: RunFolder, resolved: Resolved, status: RunStatus, now: float) -> list[tuple[float, str]]:
    """(in how many seconds, what) the run does next, soonest first: evaluations, saves, its end, its time limit."""
    attempts, train, step = run.attempts(), resolved.train, status.step or 0
    if not attempts or status.state != "running":
        return []
    began = float(attempts[-1].started().get("started") or now)
    found: list[tuple[float, str]] = []
    step_s = attempts[-1].last_metrics().get("step_s")
    if step_s and resolved.form.saves_by_train:
        at = [(every * (step // every + 1), does) for does, every in
              (("evaluates", train.eval_every), ("saves", train.save_every)) if every]  # fmt: skip
        at += [(step, "saves") for step in sorted(each for each in train.save_at if each > step)[:1]]
        at = [(due, does) for due, does in at if due < train.steps] + [(train.steps, "ends")]
        found += [((due - step) * step_s, f"{does} after step {due:,}") for due, does in at if due > step]
    if train.save_minutes and resolved.form.saves_by_train:
        saved = began
        with contextlib.suppress(OSError):  # it may just be removed
            saved = max((path.stat().st_mtime for path in list_complete(run.checkpoints)), default=began)
        due_s = saved + 60 * train.save_minutes - now
        found.append((max(0.0, due_s), f"saves, after {train.save_minutes:g} min"))
    if (limit := limit_s(resolved.job.time)) is not None:
        again = "is requeued" if resolved.cluster.chain != "none" else "ends"
        due_s = began + limit - (resolved.job.signal_lead_s or 0) - now
        found.append((max(0.0, due_s), f"time limit at {clock(began + limit, now)}: saves and {again}"))
    return sorted(found)


def _of_ranks(attempt: Attempt, resolved: Resolved, now: float | None) -> list[str]:
    """The tables of nodes and ranks. `now` is None if the run has ended: nobody is silent then."""
    heartbeats, old_s = read_heartbeats(attempt.heartbeats), silent_after_s(resolved.train.hang_floor_s)
    if not heartbeats:
        return ["no heartbeat yet"]
    rows, by_node = list[RankRow](), dict[str, list[RankRow]]()
    for rank, last in heartbeats.items():
        age_s = round(max(0.0, now - last.time), 1) if now else _ENDED
        rows.append(RankRow(rank, last, age_s, age_s > old_s))
        by_node.setdefault(last.host, []).append(rows[-1])
    missing = [rank for rank in range(resolved.tasks if now else 0) if rank not in heartbeats]
    rows.sort(key=_slowness)
    shown = [*(RankRow(rank, None, math.inf, True) for rank in missing[:_MOST]), *rows]
    nodes = [_node(name, of) for name, of in by_node.items()]
    nodes.sort(key=lambda node: (-(node.silent or 0), math.inf if node.util is None else node.util))
    lines = ["", *_table("node", "least used", _NODES, nodes, len(nodes))]
    lines += _spread("GPU use", [node.util for node in nodes if node.util is not None], "%")
    if not any(node.gpus for node in nodes):
        lines.append("no GPU figures in the heartbeats: no GPU, no driver, or a run of an earlier version")
    lines += ["", *_table("rank", "slowest", _RANKS, shown, len(rows) + len(missing))]
    lines += _spread("step", [last.step for last in heartbeats.values()], "")
    lines += _spread("heartbeat", [row.age_s for row in rows], " s ago") if now else []
    silent = len(missing) + sum(row.silent for row in rows)
    return [*lines, *([f"{counted(silent, 'rank')} silent"] if silent > _MOST else [])]


def _slowness(row: RankRow) -> tuple[bool, int, float, float, int]:
    """The slowest rank is the least: a silent one, then that of the least step, then that longest in it."""
    assert row.last is not None
    return not row.silent, row.last.step, -row.last.quiet_s, -row.age_s, row.rank


def _node(name: str, rows: Sequence[RankRow]) -> NodeRow:
    gpus = next((gpus for row in rows if row.last and (gpus := row.last.gpu_figures)), [])
    util, full, power, heat = ([x for gpu in gpus if (x := gpu[place]) is not None] for place in (0, 1, 3, 4))
    memory = f"{max(full):.1f}/{max(gpu.total_gib or 0 for gpu in gpus):.0f} GiB" if full else None
    mean = statistics.fmean(util) if util else None
    silent = sum(row.silent for row in rows) or None
    return NodeRow(
        name, len(rows), silent, len(gpus) or None, mean, memory, sum(power) if power else None, max(heat, default=None)
    )


def _table(what: str, worst: str, columns: Sequence[Column], rows: Sequence[object], count: int) -> list[str]:
    title = [f"{_MOST} of {counted(count, what)}, {worst} first:"] if count > _MOST else []
    filled = [each for each in columns if any(each.show(row) not in (NOTHING, "") for row in rows[:_MOST])]
    return [*title, *grid(filled, rows[:_MOST]).aligned().splitlines()]


def _spread(what: str, figures: Sequence[float], unit: str) -> list[str]:
    """The line on more figures than are shown."""
    if len(figures) <= _MOST:
        return []
    low, middle, high = (f"{each:,.0f}{unit}" for each in (min(figures), statistics.median(figures), max(figures)))
    return [f"{what} of all: {low} to {high}, median {middle}"]
