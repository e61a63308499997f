"""Adds the results of a run that another program logged: printed rates, losses, counts, tokens, memory."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from hpc_gpt.core.format import counted, counted_words
from hpc_gpt.core.runs.record import MIXTURE_FIGURES
from hpc_gpt.reader.lines.fields import EPOCHS, NEVER_ZERO
from hpc_gpt.reader.lines.part import Fact, Part, PeakMemory
from hpc_gpt.reader.lines.steps import CROWDED_LINES, StepColumn, StepTable
from hpc_gpt.reader.runs.draft import Draft, is_on
from hpc_gpt.reader.runs.facts import Facts
from hpc_gpt.reader.runs.log_steps import LogSteps, evaluations
from hpc_gpt.reader.runs.rules import Known, peak_of, solve, step_tokens

OF_EXPERTS = "experts"  # the kind of the flag on a mixture's router
_MOST_TOKENS = 10**18
_MOST_STEPS = 10**12
# {column of the steps, or name of a fact: key of the record}
PRINTED = {
    "tflops": "tflops_printed",
    "mfu": "mfu_printed",
    "tokens_per_s_gpu": "tokens_per_s_gpu",
    "tokens_per_s": "tokens_per_s",
}


def add_rates(known: Known, steps: LogSteps) -> None:
    """Adds the printed TFLOPs, MFU, tokens/s per GPU and of all GPUs, each the median of the steady lines, if they are
    possible; and tokens/s by the table of rules, as a log such as nanoGPT's prints no rate."""
    draft = known.draft
    peak, of_peak = peak_of(draft.get("device"), draft.get("dtype"))
    limits = {"tflops_printed": (peak, of_peak), "mfu_printed": (1.0, "1")}
    for column, key in PRINTED.items():
        if key in draft or (found := _printed(known.facts, steps, column)) is None:
            continue
        figure, source = found
        most, what = limits.get(key, (math.inf, ""))
        if figure > most:
            draft.flag(f"{key} would be {figure:,.4g}, above {what}: left out", "absurd")
            draft.sources[key] = "null: impossible"
        else:
            draft.set(key, figure, source)
    solve(known, "tokens_per_s")


def _printed(facts: Facts, steps: LogSteps, column: str) -> tuple[float, str] | None:
    """Returns (the median of the program's own figures, where they are); None without any."""
    if column in steps and (usable := np.isfinite(steps[column]) & (steps[column] > 0) & steps.counts).any():
        lines = np.flatnonzero(usable & steps.steady if (usable & steps.steady).any() else usable)
        source = f"median of the program's own figures in {len(lines)} lines from {steps.place(int(lines[0]))}"
        return float(np.median(steps[column][lines])), source
    if stated := facts.figures(column):
        source = f"{stated[0].where}, median of the program's own {len(stated)} figures"
        return float(np.median([fact.value for fact in stated])), source
    return None


def add_losses(draft: Draft, steps: LogSteps, parts: Sequence[Part]) -> None:
    """Adds the first and the last loss, the loss of the last evaluation, and a mixture's figures."""
    closing = _closing_losses(steps, parts)
    add_first_and_last_loss(draft, steps)
    add_mixture(draft, steps)
    for key, fact in closing.items():
        is_loss = key == "loss_eval" and "evaluates_accuracy" not in draft
        if is_loss or (key == "loss_last" and math.isfinite(draft.get(key) or math.nan)):
            draft.values[key] = float(fact.value)
            draft.sources[key] = f"{fact.place}, the program's closing line"
    evals = evaluations(steps, parts)
    if evals and "loss_eval" not in draft and "evaluates_accuracy" not in draft:
        draft.set("loss_eval", evals[-1][1], evals[-1][2])


def _closing_losses(steps: LogSteps, parts: Sequence[Part]) -> dict[str, Fact]:
    """The losses in a line after the last step in which a program closes, by their keys of the record."""
    if not len(steps):
        return {}
    file, line = steps.files[int(steps.attempt[-1])], int(steps.line[-1])
    names = {"loss_eval_closing": "loss_eval", "loss_closing": "loss_last"}
    found = ((key, fact) for part in parts for name, key in names.items() for fact in part.facts.get(name, ()))
    return {key: fact for key, fact in found if fact.place.file == file and fact.place.line > line}


def add_first_and_last_loss(draft: Draft, steps: StepTable) -> None:
    """Adds the losses of the first and the last step that count; the last is NaN if steps without a finite loss end the
    last attempt as NaN steps."""
    since = steps.nan_since(int(steps.attempt[-1])) if len(steps) else None
    loss = steps.columns.get("loss", np.zeros(0))
    since = None if len(loss) and np.isfinite(loss[-1]) else since
    finite = np.flatnonzero(np.isfinite(loss) & steps.counts[: len(loss)])
    if len(finite):
        first, last = int(finite[0]), int(finite[-1])
        draft.set("loss_first", float(loss[first]), steps.place(first))
        if since is None:
            draft.set("loss_last", float(loss[last]), steps.place(last))
        if last > first and loss[last] >= loss[first]:
            draft.flag("the loss did not fall", "loss")
    if since is not None:
        draft.set("loss_last", math.nan, steps.place(since))


def add_mixture(draft: Draft, steps: StepTable) -> None:
    """Adds a mixture's losses and loads at the last step that has them, and a flag if an expert has most tokens."""
    for name in (each for each in MIXTURE_FIGURES if each in steps):
        column = steps[name]
        has_figure = np.isfinite(column) & ((column != 0) | (name not in NEVER_ZERO)) & steps.counts
        if len(present := np.flatnonzero(has_figure)):
            figure = float(column[present[-1]])
            draft.set(name, figure if name in NEVER_ZERO else int(figure), steps.place(int(present[-1])))
            if name == "expert_load":
                _flag_crowded(draft, column[present[-CROWDED_LINES:]])


def _flag_crowded(draft: Draft, loads: StepColumn) -> None:
    """Adds a flag if one expert of a layer took three quarters of all tokens, and twice its share, in each last line.

    With k of E experts a token, a load is at most E / k times the mean: then one expert takes every token. Where k is
    near E, balanced loads come near that, too.
    """
    model = (draft.get("settings") or {}).get("model") or {}
    experts, used = (draft.whole(name) or model.get(name) for name in ("experts", "experts_per_token"))
    if not experts or not used or len(loads) < CROWDED_LINES:
        return
    least = max(0.75 * experts / used, 2.0)
    if loads.min() >= least:
        draft.flag(
            f"one of {experts} experts of a layer takes most tokens: expert_load was at least {least:.3g} in the last"
            f" {CROWDED_LINES} lines of steps, of at most {experts / used:.3g}",
            OF_EXPERTS,
        )


def add_counts(known: Known, steps: LogSteps, parts: Sequence[Part]) -> None:
    """Adds skipped and NaN steps, tokens, saves."""
    draft = known.draft
    if steps.absurd:
        draft.flag(f"left out: {counted_words(steps.absurd, 'impossibly large figures of steps')}")
    if not steps.numbered:
        draft.flag("the lines have no step numbers: the lines are counted instead")
    _add_lost(draft, steps, parts)
    saves = [took for part in parts for _, took, _ in part.saves if took is not None and 0 < took < 1e9]
    timed = [part.timers_s["save-checkpoint"] for part in parts if "save-checkpoint" in part.timers_s]
    if saves:
        draft.set("save_s", float(np.median(saves)), f"median of {len(saves)} saves")
    elif count := sum(number for _, number in timed):
        draft.infer("save_s", sum(total for total, _ in timed) / count, f"mean of {count} timers save-checkpoint")
    _add_tokens(known, steps)


def _add_lost(draft: Draft, steps: LogSteps, parts: Sequence[Part]) -> None:
    """Adds the numbers of steps that were skipped, and of those whose loss or gradient is not a number."""
    if not len(steps):
        skipped = sum(table.totals.get("skipped", 0.0) for part in parts for table in part.steps.values())
        if skipped:
            draft.set("skipped_steps", int(min(skipped, 1e15)), "lines that say that a step was skipped")
        return
    summed = {
        key: np.nansum(steps[key][steps.counts]) if steps.stride == 1 else steps.totals.get(key, 0.0)
        for key in ("skipped", "nan")
        if key in steps
    }
    nan = np.flatnonzero(steps.nan & steps.counts)
    lost = len(nan) if steps.stride == 1 else max(len(nan), int(steps.totals.get("nan_loss", 0)))
    if "skipped" in summed:
        draft.set("skipped_steps", int(min(summed["skipped"], 1e15)), "sum over the lines of steps")
    if lost > summed.get("nan", 0):
        draft.set("nan_steps", lost, "lines with a loss or a gradient that is not a number")
    elif "nan" in summed:
        draft.set("nan_steps", int(min(summed["nan"], 1e15)), "sum over the lines of steps")
    if lost:
        where = f", the first at {steps.place(int(nan[0]))}" if len(nan) else ""
        draft.flag(f"{counted(lost, 'line')} with a loss or a gradient that is not a number{where}", "nan")


def _add_tokens(known: Known, steps: LogSteps) -> None:
    """Adds the tokens of all steps, by what the lines count, else by the number of steps."""
    draft = known.draft
    for key, per_unit in (("consumed_tokens", 1), ("consumed_samples", draft.whole("seq"))):
        rows = np.flatnonzero(np.isfinite(steps[key]) & steps.counts) if key in steps else np.zeros(0, np.int64)
        column, numbers = steps[key], steps["step"]
        if per_unit and len(rows) > 1 and (np.diff(column[rows]) >= 0).all():
            first, last = int(rows[0]), int(rows[-1])
            # The difference lacks the tokens of the first line's steps.
            begun = (step_tokens(draft) or 0) * steps.interval
            # Composer's first line counts the tokens before its step, which are 0.
            known_begin = numbers[first] <= steps.interval and (column[first] or numbers[first] == 0)
            begun = int(float(column[first]) * per_unit) if known_begin else begun
            total = int(float(column[last] - column[first]) * per_unit) + begun
            if 0 < total < _MOST_TOKENS:
                draft.set("tokens_total", total, f"inferred: {key} from {steps.place(first)} to {steps.line[last]}")
                return
    if not steps.numbered or steps.dialect == EPOCHS:
        return
    count = 0
    if "step" in steps and len(numbers := steps["step"][np.isfinite(steps["step"]) & steps.counts]):
        # The first line represents the steps up to it; a line of step 0 represents only that step.
        begin = float(numbers.min())
        count = int(numbers.max() - begin) + (min(steps.interval, int(begin)) or 1)
    elif "step_s" in draft:
        count = int(draft.get("steps_used") or 0)
    if 0 < count < _MOST_STEPS:
        draft.set("steps_trained", count, "the lines of steps")
        solve(known, "tokens_total")


def add_memory(draft: Draft, parts: Iterable[Part], arguments: Mapping[str, str]) -> None:
    """Adds both lists of peak memory: one figure per stage if all stages print it, else the highest of all.

    Rank order: tp fastest, then cp and dp, then pp, as in Megatron and DeepSpeed; with Megatron's
    `--use-tp-pp-dp-mapping` pp before dp.
    """
    parts = list(parts)
    seen = [(rank, memory) for part in parts for rank, memory in part.memory.items()]
    # A figure before the first step is not a peak of training.
    seen = [(rank, memory) for rank, memory in seen if not memory.at_start]
    if not seen:
        return
    stages = _stage_of(draft, arguments)
    few: list[int] = []
    pp = draft.whole("pp") or 1
    for name, key in (("memory_allocated_gib", "allocated_gib"), ("memory_reserved_gib", "reserved_gib")):
        figures = [(rank, value, memory) for rank, memory in seen if (value := _figure(memory, key)) is not None]
        if not figures:
            continue
        _, highest, memory = max(figures, key=lambda figure: figure[1])
        peaks: dict[int, float] = {}
        for rank, value, _ in figures:
            if rank is not None and stages is not None and (stage := stages(rank)) is not None:
                peaks[stage] = max(peaks.get(stage, 0.0), value)
        if len(peaks) == pp > 1:
            listed = [peaks[stage] for stage in range(pp)]
            ranks = len({rank for rank, _, _ in figures})
            draft.set(
                name, listed, f"the highest of each stage over {ranks} ranks, the highest of all at {memory.place}"
            )
        else:
            draft.set(name, [highest], f"{memory.place}, the highest in the log")
            few.append(len(peaks))
    if few and pp > 1:
        where = f"for {max(few)} of {pp} stages" if max(few) else "without the rank"
        draft.flag(f"memory is printed {where}: one figure, the highest")


def _figure(memory: PeakMemory, key: str) -> float | None:
    value: float | None = getattr(memory, key)
    return value if value is not None and 0 < value < 1e6 else None


def _stage_of(draft: Draft, arguments: Mapping[str, str]) -> Callable[[int], int | None] | None:
    """A function from rank to pipeline stage; None if the layout is not known."""
    tp, pp, dp = (draft.whole(name) for name in ("tp", "pp", "dp"))
    if not (tp and pp and dp):
        return None
    ways, per_stage = tp * pp * dp * (draft.whole("cp") or 1), tp * dp * (draft.whole("cp") or 1)
    pipes_first = is_on(arguments, "use_tp_pp_dp_mapping")

    def stage(rank: int) -> int | None:
        if not 0 <= rank < ways:
            return None
        return rank // (ways // pp // dp) % pp if pipes_first else rank // per_stage

    return stage
