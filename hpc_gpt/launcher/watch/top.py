"""Shows one run on one screen: its curve, its nodes and ranks, what is left and what comes next. Reads the files that
the run writes, at a cost that does not grow with the run's length."""

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hpc_gpt.core.checkpoints.disk_space import free_gib, space_needed_gib
from hpc_gpt.core.checkpoints.find_checkpoints import list_complete
from hpc_gpt.core.columns import Column, column, grid
from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.files import open_regular
from hpc_gpt.core.format import NOTHING, clock, counted, plain, show_bytes, show_duration, show_short
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.processes.heartbeats import RankHeartbeat, read_heartbeats, silent_after_s
from hpc_gpt.core.processes.slow_ranks import slow_ranks
from hpc_gpt.core.runs.record import MIXTURE_FIGURES, show_named
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.launcher.watch.control import describe
from hpc_gpt.launcher.watch.status import RunStatus
from hpc_gpt.trainer.preflight.verdict import SHARED

# At most this many nodes and ranks have lines; if there are more, the worst are shown, and the spread of all.
_MOST = 10
# A curve is drawn from this many lines of metrics.jsonl; this many bytes hold a whole line wherever they begin.
_SAMPLES, _SAMPLE_BYTES = 200, 2048
_NO_EXPERTS = dict.fromkeys(MIXTURE_FIGURES)
_HEIGHT, _LEVELS = 6, " ▁▂▃▄▅▆▇█"
_NODES = (
    column("node", "name", right=False), column("ranks", "ranks"), column("silent", "silent"), column("GPUs", "gpus"),
    column("use", "util", "{:.0f}%".format), column("fullest", "memory"),
    column("power", "power_w", "{:,.0f} W".format), column("hottest", "temperature_c", "{:.0f} °C".format),
)  # fmt: skip
_RANKS = (
    column("rank", "rank", right=False), column("node", "host", right=False), column("step", "step"),
    column("phase", "phase", right=False), column("for", "quiet_s", show_duration),
    column("heartbeat", "age_s", lambda age_s: f"{show_duration(age_s)} ago"), column("", "remark", right=False),
)  # fmt: skip


def screen(run: RunFolder, status: RunStatus, columns: int = 80, blocks: bool = True) -> list[str]:
    """The lines of the screen for a run and its status. `blocks`: the output can have block characters. Raises
    UserError."""
    resolved, attempts, now = run.resolved(), run.attempts(), time.time()
    job = f", job {status.job_id}" if status.job_id else ""
    lines = [f"{run.run_id} of {status.name}, {status.layout}{job}, attempt {len(attempts)}", describe(status)]
    if status.left_s is not None:
        lines[1] += f"  left {show_duration(status.left_s)}, until {clock(now + status.left_s, now)}"
    lines += [status.cause] if status.cause and status.cause not in lines[1] else []
    lines += draw_curve(read_curve(attempts), max(20, columns - 12), blocks)
    if attempts and (of_experts := show_named({**_NO_EXPERTS, **attempts[-1].last_metrics()}, MIXTURE_FIGURES)):
        lines.append(f"experts: {of_experts}")
    if (free := free_gib(run.path)) is not None:
        one = space_needed_gib(resolved, run)[0] if not runs_program(resolved) else 0.0
        needs = f", the next checkpoint takes {show_bytes(one * GIB)}" if one else ""
        lines.append(f"space: {show_bytes(free * GIB)} free{needs}")
    pauses = bool(attempts and attempts[-1].verdict())  # the job has no ranks until the next attempt
    trains = attempts and status.state == "running" and not pauses
    if trains and (coming := what_comes(run, resolved, status.step or 0, now)):
        lines.append("next: " + "; ".join(f"{text}, in {show_duration(in_s)}" for in_s, text in coming))
    if attempts:
        lines += _of_ranks(attempts[-1], resolved, now if status.state in LIVE and not pauses else None)
    return [plain(line) for line in lines]


def read_curve(attempts: Sequence[Attempt]) -> dict[int, float]:
    """Reads {step: loss} for steps spread over the run; if a step was trained again, its last loss counts."""
    curve: dict[int, float] = {}
    for attempt in attempts:
        sampled = dict(_sampled(attempt))
        first = min(sampled, default=math.inf)
        curve = {step: loss for step, loss in curve.items() if step < first} | sampled
    return curve


def _sampled(attempt: Attempt) -> Iterator[tuple[int, float]]:
    samples: list[bytes] = []
    with contextlib.suppress(OSError), open_regular(attempt.metrics) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _SAMPLES * _SAMPLE_BYTES:
            samples = file.read().split(b"\n")
        for at in range(_SAMPLES) if not samples else ():
            file.seek(at * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            samples += file.read(_SAMPLE_BYTES).split(b"\n")[1 if at else 0 : 2]
    for line in samples:
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            step, loss = map(json.loads(line).__getitem__, ("step", "loss"))
            if isinstance(step, int) and math.isfinite(loss):
                yield step, loss


def draw_curve(curve: Mapping[int, float], columns: int, blocks: bool = True) -> list[str]:
    """Draws the curve as text: each column is the mean loss of a stretch of steps.

    >>> print(*draw_curve({1: 4.0, 2: 3.0, 3: 2.0}, 3, blocks=False), sep="|")
    loss 4|       *|       *|       **|       **|       **|     2 ***|       step 1 to 3
    """
    if not curve:
        return ["no loss yet"]
    first, last = min(curve), max(curve)
    stretches: list[list[float]] = [[] for _ in range(min(columns, last - first + 1))]
    for step, loss in curve.items():
        stretches[(step - first) * len(stretches) // (last - first + 1)].append(loss)
    means = [statistics.fmean(losses) if losses else math.nan for losses in stretches]
    low, high = min(filter(math.isfinite, means)), max(filter(math.isfinite, means))
    heights = list[int]()
    for mean in means:  # a stretch without a step gets the height of the previous one
        level = heights[-1] if math.isnan(mean) else 8 + round((mean - low) / ((high - low) or 1) * 8 * (_HEIGHT - 1))
        heights.append(level)
    margin, lines = max(len(show_short(low)), 6), [f"loss {show_short(high)}"]
    for row in reversed(range(_HEIGHT)):
        parts = [max(0, min(8, height - 8 * row)) for height in heights]
        text = "".join(_LEVELS[part] if blocks else "*" * (part > 3) or " " for part in parts)
        lines.append(f"{show_short(low) if row == 0 else '':>{margin}} {text}".rstrip())
    return [*lines, f"{'':{margin}} step {first:,} to {last:,}"]


def what_comes(run: RunFolder, resolved: Resolved, step: int, now: float) -> list[tuple[float, str]]:
    """Lists (seconds until then, text) for what a running run does next, soonest first: evaluations, saves, its end,
    its time limit."""
    attempt, train, coming = run.attempts()[-1], resolved.train, list[tuple[float, str]]()
    began, step_s = float(attempt.started().get("started") or now), attempt.last_metrics().get("step_s")
    if step_s and not runs_program(resolved):
        every = (("evaluates", train.eval_every), ("saves", train.save_every))
        at = [(steps * (step // steps + 1), does) for does, steps in every if steps]
        at += [(due, "saves") for due in sorted(at_step for at_step in train.save_at if at_step > step)[:1]]
        at = [*(save for save in at if save[0] < train.steps), (train.steps, "ends")]
        coming += [((due - step) * step_s, f"{does} after step {due:,}") for due, does in at if due > step]
    if train.save_minutes and not runs_program(resolved):
        saved = began
        with contextlib.suppress(OSError):  # it may just be removed
            saved = max((path.stat().st_mtime for path in list_complete(run.checkpoints)), default=began)
        coming.append((max(0.0, saved + 60 * train.save_minutes - now), f"saves, after {train.save_minutes:g} min"))
    if (limit := limit_s(resolved.job.time)) is not None:
        first = next(iter(run.before_in_job(attempt)), attempt)  # the limit is of the job's start
        began = float(first.started().get("started") or began)
        then = "is requeued" if resolved.cluster.chain != "none" else "ends"
        due_s = began + limit - (resolved.job.signal_lead_s or 0) - now
        coming.append((max(0.0, due_s), f"time limit at {clock(began + limit, now)}: saves and {then}"))
    return sorted(coming)


def _of_ranks(attempt: Attempt, resolved: Resolved, now: float | None) -> list[str]:
    """The tables of nodes and ranks. `now` is None if the run has ended: nobody is silent then."""
    heartbeats, old_s = read_heartbeats(attempt.heartbeats), silent_after_s(resolved.train.hang_floor_s)
    if not heartbeats:
        if not now:
            return ["no heartbeat yet"]
        probed = (attempt.folder / SHARED).is_dir()
        return [f"no heartbeat yet: {'the nodes are probed (preflight)' if probed else 'the ranks start'}"]
    ages = {rank: round(max(0.0, now - last.time), 1) for rank, last in heartbeats.items()} if now else {}
    silent = {rank for rank, age_s in ages.items() if age_s > old_s}
    # The slowest first: silent ranks, then those at the lowest step, then those that have been in it longest.
    ranks = sorted(
        heartbeats.values(),
        key=lambda last: (last.rank not in silent, last.step, -last.quiet_s, -ages.get(last.rank, 0.0), last.rank),
    )
    slow = slow_ranks(heartbeats)
    shares = {one.rank: f"at {one.share:.2f} of {one.reference}" for one in slow.ranks}
    missing = [rank for rank in range(resolved.tasks if now else 0) if rank not in heartbeats]
    empty = dict.fromkeys([*vars(ranks[0]), "age_s"])
    rows = [{**empty, "rank": rank, "remark": "no heartbeat yet"} for rank in missing[:_MOST]]
    for last in ranks[: _MOST - len(rows)]:
        heard = f"heard {last.heard}" if last.heard else None
        remarks = ("silent" * (last.rank in silent), shares.get(last.rank), heard, last.collective, last.place)
        rows.append({**vars(last), "age_s": ages.get(last.rank), "remark": "; ".join(filter(None, remarks))})
        late = last.step < int(attempt.last_metrics().get("step") or 0)  # the last heartbeat is before the last step
        # The run has ended, so these mean nothing.
        rows[-1] |= {} if now else dict.fromkeys(("phase", "quiet_s", *["step"] * late))
        # The steps of a program of the user's own are in its output; its supervisor counts none.
        rows[-1] |= dict.fromkeys(("phase", "quiet_s", "step")) if runs_program(resolved) and not last.step else {}
    by_node: dict[str, list[RankHeartbeat]] = {}
    for last in ranks:
        by_node.setdefault(last.host, []).append(last)
    nodes = [_node(name, of, silent) for name, of in by_node.items()]
    nodes.sort(key=lambda node: (-(node["silent"] or 0), math.inf if node["util"] is None else node["util"]))
    lines = ["", *_table("node", "least used", _NODES, nodes, len(nodes))]
    lines += _spread("GPU use", [node["util"] for node in nodes if node["util"] is not None], "%")
    if not any(node["gpus"] for node in nodes):
        lines.append("no GPU figures in the heartbeats: no GPU, or no driver")
    lines += ["", *_table("rank", "slowest", _RANKS, rows, len(ranks) + len(missing))]
    lines += _spread("step", [last.step for last in ranks], "") + _spread("heartbeat", list(ages.values()), " s ago")
    lines += slow.lines
    return [*lines, *([f"{counted(count, 'rank')} silent"] if (count := len(silent) + len(missing)) > _MOST else [])]


def _node(name: str, ranks: Sequence[RankHeartbeat], silent: Collection[int]) -> dict[str, Any]:
    """A node's row: mean utilisation, memory of the fullest GPU, power of all GPUs; None for figures that no heartbeat
    has."""
    gpus = next((gpus for last in ranks if (gpus := last.gpu_figures)), [])
    util, full, power, heat = ([x for gpu in gpus if (x := gpu[place]) is not None] for place in (0, 1, 3, 4))
    memory = f"{max(full):.1f}/{max(gpu.total_gib or 0 for gpu in gpus):.0f} GiB" if full else None
    of_gpus = {"gpus": len(gpus) or None, "util": statistics.fmean(util) if util else None, "memory": memory}
    of_gpus |= {"power_w": sum(power) if power else None, "temperature_c": max(heat, default=None)}
    return {"name": name, "ranks": len(ranks), "silent": sum(last.rank in silent for last in ranks) or None, **of_gpus}


def _table(what: str, worst: str, columns: Sequence[Column], rows: Sequence[Any], count: int) -> list[str]:
    title = [f"{_MOST} of {counted(count, what)}, {worst} first:"] if count > _MOST else []
    filled = [shown for shown in columns if any(shown.show(row) not in (NOTHING, "") for row in rows[:_MOST])]
    return [*title, *grid(filled, rows[:_MOST]).aligned().splitlines()]


def _spread(what: str, figures: Sequence[float], unit: str) -> list[str]:
    """The line with lowest, highest and median, if there are more figures than the table shows."""
    if len(figures) <= _MOST:
        return []
    low, middle, high = (f"{figure:,.0f}{unit}" for figure in (min(figures), statistics.median(figures), max(figures)))
    return [f"{what} of all: {low} to {high}, median {middle}"]
