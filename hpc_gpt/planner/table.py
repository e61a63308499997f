"""A search for layouts as a table for a terminal, and as text."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from hpc_gpt.core.columns import Column, fitting, grid
from hpc_gpt.core.engines import engine_of
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.format import Paint, counted, plain, show_rate, wrapped
from hpc_gpt.planner.experts import rows_an_expert
from hpc_gpt.planner.figures import peak_memory_text, plan_figures
from hpc_gpt.planner.nearest import near_batches
from hpc_gpt.planner.question import DIVIDES_NO_BATCH
from hpc_gpt.planner.search import NEAR, SLOW_LAYOUT, Candidate, Searched
from hpc_gpt.planner.step_time import StepTime

LINES = 7  # so many layouts that fit are listed, and half as many that do not


class StepPart(NamedTuple):
    """A part of a step: its field of StepTime, its letter in a bar, its name, and its meaning."""

    field: str
    letter: str
    name: str
    means: str


PARTS = (
    StepPart("compute_s", "c", "compute", "forward and backward passes"),
    StepPart("recompute_s", "r", "recompute", "repeated forward passes"),
    StepPart("tp_s", "t", "tp", "communication within layers, over the tensor-parallel group"),
    StepPart("cp_s", "x", "cp", "exchange of keys, values or heads within cp that attention does not hide"),
    StepPart("bubble_s", "b", "bubble", "stages that wait while the pipeline fills and drains"),
    StepPart("p2p_s", "p", "p2p", "activations sent from stage to stage"),
    StepPart("dp_s", "d", "dp", "exchange of gradients and parameters between replicas that computation does not hide"),
    StepPart("optimizer_s", "o", "optimizer", "the update"),
    StepPart("offload_s", "f", "offload", "transfers between host and GPU"),
    StepPart("ep_s", "e", "ep", "tokens sent to their experts and back"),
)
# The colours of the letters on a terminal.
COLOURS = {"c": "green", "r": "yellow", "t": "magenta", "x": "light magenta", "e": "light yellow", "b": "red",
           "p": "cyan", "d": "blue", "o": "light blue", "f": "light red"}  # fmt: skip


def settings_text(training: Training) -> str:
    """A candidate's settings besides layout and micro-batch.

    >>> from hpc_gpt.core.settings.model_shape import ModelShape
    >>> settings_text(Training(ModelShape(64, 2, 2), engine="deepspeed-zero", zero_stage=3, recompute="full"))
    'ZeRO-3, recompute full'
    """
    settings = []
    if engine_of(training).has_zero:
        settings.append(f"ZeRO-{training.zero_stage}")
    if training.sharded_optimizer:
        settings.append("sharded optimizer")
    if training.recompute != "none":
        settings.append(f"recompute {training.recompute}")
    if training.sequence_parallel:
        settings.append("sequence parallel")
    if training.vp > 1:
        settings.append(f"{training.vp} chunks a stage")
    if training.compiled:
        settings.append("compiled")
    if training.loss_chunks > 1:
        settings.append(f"loss in {training.loss_chunks} chunks")
    if training.activations_on_host:
        settings.append("activations on the host")
    if training.cp > 1:
        settings.append(f"cp exchanges {training.cp_exchange}")
    if training.offload != "none":
        settings.append(f"offload {training.offload}")
    return ", ".join(settings) or "-"


def engine_text(training: Training) -> str:
    """The engine and its settings, if it has any.

    >>> from hpc_gpt.core.settings.model_shape import ModelShape
    >>> engine_text(Training(ModelShape(64, 2, 2), engine="ddp", zero_stage=0))
    'ddp'
    """
    text = settings_text(training)
    return training.engine if text == "-" else f"{training.engine}, {text}"


def candidate_settings(candidate: Candidate) -> str:
    """`settings_text` with the host memory that the offloaded data need, if any."""
    text, host = settings_text(candidate.training), plan_figures(candidate).get("host")
    return text if host is None else f"{text} ({host.label} {host.digits} {host.unit})"


def shares(step: StepTime) -> dict[str, float]:
    """Each part's share of the step, 0 to 1, by the part's name."""
    return {part.name: getattr(step, part.field) / step.step_s for part in PARTS}


def does_not_fit(candidate: Candidate) -> str:
    """The text for a candidate that does not fit: the memory that it needs, and on which stage."""
    return f"does not fit: {peak_memory_text(candidate)}"


def _smaller(candidate: Candidate, best: Candidate) -> str:
    """Why the candidate's matrix products are smaller and so slower than the best's; empty if they are not."""
    run, other = candidate.training, best.training
    if run.micro_batch < other.micro_batch:
        return f" (micro-batch {run.micro_batch} against {other.micro_batch})"
    if run.tp > other.tp:
        return f" (tp {run.tp} against {other.tp})"
    if run.shape.is_mixture and (rows := rows_an_expert(run)) < (of_best := rows_an_expert(other)):
        return f" ({rows:,.0f} rows an expert against {of_best:,.0f})"
    return ""


def count_text(params: float) -> str:
    """A number of parameters in units of 10^9, for a small model in 10^6.

    >>> count_text(51_966_918_656), count_text(3.71e12), count_text(842_496)
    ('52.0e9', '3,710e9', '0.842e6')
    """
    unit, power = (1e9, 9) if params >= 1e7 else (1e6, 6)
    return f"{show_rate(params / unit)}e{power}"


def why_slower(candidate: Candidate, best: Candidate, fastest: Candidate | None = None) -> str:
    """The reason why the candidate is not the best: the part of its step that exceeds the best's most, per token.
    The text for the best itself names the `fastest`, if that was passed over."""
    if candidate.step is None or best.step is None:
        return does_not_fit(candidate)
    if candidate.needs_unknown_host:
        return f"offload needs {plan_figures(candidate)['host'].text}"
    if candidate is best:
        return f"best{', but tight' * best.is_tight}{_passed_over(best, fastest or best)}"
    tighter = (candidate.is_filled, candidate.is_tight) > (best.is_filled, best.is_tight)
    if tighter and (candidate.is_filled or candidate.tokens_per_s * NEAR >= best.tokens_per_s):
        return f"tight: {peak_memory_text(candidate)}"
    if candidate.is_as_fast(best):
        return f"equal{_behind(candidate, best)}"
    scale = best.training.global_batch / candidate.training.global_batch
    of_own = {part: getattr(candidate.step, part.field) * scale for part in PARTS}
    of_best = {part: getattr(best.step, part.field) for part in PARTS}
    worst = max(PARTS, key=lambda part: of_own[part] - of_best[part])
    percent, other = shares(candidate.step)[worst.name], shares(best.step)[worst.name]
    if worst.name == "compute" or round(100 * percent) <= round(100 * other):
        seconds = f"{show_rate(of_own[worst])} s against {show_rate(of_best[worst])} s"
        return f"{worst.name} {seconds}{_smaller(candidate, best)}"
    return f"{worst.name} {100 * percent:.0f} % against {100 * other:.0f} %"


def _behind(candidate: Candidate, best: Candidate) -> str:
    """The drawback of a candidate that is as fast as the best; empty if a table shows none."""
    if candidate.crowding > best.crowding:
        return f", {show_rate(100 * (candidate.share - best.share))} % less memory to spare"
    if candidate.exposed_share - best.exposed_share > 0.01:
        percent, other = 100 * candidate.exposed_share, 100 * best.exposed_share
        return f", exposed communication {percent:.0f} % against {other:.0f} %"
    slower = 100 * (best.tokens_per_s / candidate.tokens_per_s - 1)
    return f", {show_rate(slower)} % slower" if slower > 0.5 else ", less simple"


def _passed_over(best: Candidate, fastest: Candidate) -> str:
    """The words on the fastest, which equals the best and has more drawbacks; empty if their times print alike."""
    ours, other = plan_figures(best), plan_figures(fastest)
    if ours["step"].digits == other["step"].digits:
        return ""
    run, chosen = fastest.training, best.training
    layout = f"{fastest.layout} of " if fastest.layout != best.layout else ""
    same = run.engine == chosen.engine and not layout and run.micro_batch != chosen.micro_batch
    size = f" with micro-batch {run.micro_batch}" if same else ""
    return f"; fastest: {layout}{run.engine}{size}, {other['step'].text}, {other['memory'].digits} GiB"


def can_draw_blocks() -> bool:
    """Whether stdout can encode the block characters."""
    try:
        "█░".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def memory_bar(need_gib: float, card_gib: float, length: int, blocks: bool) -> str:
    """The card's memory as a bar, filled up to the share in use; ends in `>` if more is needed.

    >>> memory_bar(24, 32, 8, False), memory_bar(40, 32, 8, False)
    ('######..', '#######>')
    """
    full, empty = ("█", "░") if blocks else ("#", ".")
    if need_gib > card_gib:
        return full * (length - 1) + ">"
    filled = max(1, round(length * need_gib / card_gib))
    return full * filled + empty * (length - filled)


def time_bar(step: StepTime, length: int) -> str:
    """A step as a bar of its parts' letters; a part shorter than half a letter is left out.

    >>> time_bar(StepTime(6, 2, 1, 1, 0, 0, 0, 0, 0.1), 10)
    'ccccccrrtb'
    """
    bar, done = "", 0.0
    for part in PARTS:
        done += getattr(step, part.field)
        bar += part.letter * (round(length * done / step.step_s) - len(bar))
    return bar


def search_table(
    searched: Searched,
    width: int | None,
    blocks: bool,
    overlap: tuple[Candidate, tuple[str, ...]] | None = None,
    paint: Paint | None = None,
) -> str:
    """An aligned table, a line per layout. `overlap`, a candidate and its arguments, comes below the best.
    If the table is wider than `width` (None: any width), a layout's texts get their own lines below its figures."""
    best = searched.shown(LINES)
    fastest = searched.fastest if best else None
    rows = [PlanRow(candidate, best[0], blocks, fastest) for candidate in (*best, *searched.too_large[: LINES // 2])]
    if overlap is not None and overlap[1]:
        rows.insert(1, PlanRow(overlap[0], best[0], blocks, None, overlap[1]))
    whole = grid(PLAN_COLUMNS, rows)
    if width is None or whole.width <= width:
        return whole.aligned(paint)
    narrow = fitting([column for column in PLAN_COLUMNS if column.keys[0] in _NARROW], rows, width, _LEAST)
    head, *lines = grid(narrow, rows).aligned(paint).splitlines()
    both = [f"{line}\n{_below(row, width)}\n" for line, row in zip(lines, rows, strict=True)]
    return f"{head}\n" + "".join(both)


class PlanRow(NamedTuple):
    """A row of a plan, in a terminal or a file: a candidate, the best one, whether bars are drawn in blocks,
    the fastest one, and the arguments that it has in addition to the best's."""

    candidate: Candidate
    best: Candidate
    blocks: bool = False
    fastest: Candidate | None = None
    extra_arguments: tuple[str, ...] = ()

    @property
    def settings(self) -> str:
        return (
            f"as the best, with {' '.join(self.extra_arguments)}"
            if self.extra_arguments
            else candidate_settings(self.candidate)
        )

    @property
    def why(self) -> str:
        if not self.extra_arguments:
            return why_slower(self.candidate, self.best, self.fastest)
        faster = self.candidate.tokens_per_s / self.best.tokens_per_s
        return f"{faster:.2f} times the best, if the checkout has these arguments"

    def colour(self) -> str:
        """Red if the candidate does not fit, yellow if its text says that it is tight, green for the best."""
        colours = {"does not fit": "red", "tight": "yellow", "best": "green"}
        return next((colour for word, colour in colours.items() if word in self.why and not self.extra_arguments), "")

    @property
    def texts(self) -> dict[str, str]:
        """The row's cells by column; `-` for a missing value."""
        return {column.keys[0]: column.show(self) for column in PLAN_COLUMNS}


def _left(heading: str, key: str, text: Callable[[PlanRow], str | None], **options: Any) -> Column:
    return Column(heading, (key,), text, str, right=False, **options)


def _figure(heading: str, key: str) -> Column:
    return Column(heading, (key,), lambda line: plan_figures(line.candidate).get(key), lambda figure: figure.digits)


PLAN_COLUMNS = (
    _left("Layout", "layout", lambda line: str(line.candidate.layout), style=PlanRow.colour),
    _left("Engine", "engine", lambda line: line.candidate.training.engine),
    Column("Batch", ("batch",), lambda line: line.candidate.training, "{0.micro_batch} x {0.micro_batches}".format),
    _left("Settings", "settings", lambda line: line.settings),
    _left("Memory", "card", lambda line: memory_bar(line.candidate.need_gib, line.candidate.card_gib, 10, line.blocks)),
    _figure("GiB", "memory"),
    _figure("Step s", "step"),
    _figure("Tokens/s", "tokens_per_s"),
    _left("Time", "time", lambda line: time_bar(line.candidate.step, 20) if line.candidate.step else None,
          style=lambda line: COLOURS),
    _left("Against the best", "why", lambda line: line.why, style=PlanRow.colour),
)  # fmt: skip
_NARROW = {"layout", "card", "memory", "step", "tokens_per_s", "time"}
_LEAST = ("card", "time", "step")


def _amount(name: str, heading: str = "", optional: bool = False) -> Column:
    return Column(
        heading or name, (name,), lambda stage: getattr(stage, name) or (None if optional else 0.0), "{:.2f}".format,
        optional=optional,
    )  # fmt: skip


# The memory of one GPU of a stage, in GiB: its parts at the moment of the peak, and the use of the card and the host.
STAGE_COLUMNS = (
    *map(_amount, ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")),
    *map(_amount, ("allocated", "reserved", "nvidia_smi")),
    _amount("host", optional=True),
    _amount("evaluation", optional=True),
    Column("peak in", ("moment",), lambda stage: stage.moment, str),
)


def _below(row: PlanRow, width: int) -> str:
    texts = row.texts
    settings = f", {texts['settings']}" if texts["settings"] != "-" else ""
    text = plain(f"{texts['engine']} {texts['batch']}{settings}: {texts['why']}")
    return "\n".join(wrapped(f"    {text}", width))


def legend(searched: Searched) -> str:
    """The meaning of the letters that occur in the bars, and of `host` if anything is offloaded."""
    used = [
        part
        for part in PARTS
        if any(getattr(candidate.step, part.field) > 0 for candidate in searched.best_of_layouts if candidate.step)
    ]
    host = searched.machine.host_memory_gib
    has = "its memory is unknown" if host is None else f"it has {host:,.4g} GiB"
    moved = any(candidate.host_gib for candidate in (*searched.candidates, *searched.too_large))
    host_text = f"; host: memory of a node that its GPUs offload to; {has}" if moved else ""
    times = ", ".join(f"{part.letter} {part.name}" for part in used)
    alike = "; equal: within 3 % of the best's speed, less than a prediction's error" if _has_equals(searched) else ""
    return f"batch: samples per micro-batch x micro-batches; time: {times}{host_text}{alike}"


def _has_equals(searched: Searched) -> bool:
    best = searched.shown(LINES)
    return any(candidate.is_as_fast(best[0]) for candidate in best[1:])


def heading(searched: Searched, name: str, params: int) -> str:
    """The question, and how many settings fit."""
    question, machine = searched.question, searched.machine
    batch = f"global batch {question.global_batch}" if question.global_batch else (
        f"micro-batches: {question.fixed['micro_batches']}"
    )  # fmt: skip
    total = searched.fitting + searched.not_fitting
    card = f"{question.gpus} {machine.device} ({machine.memory_gib:.3g} GiB)"
    fitting = f"{searched.fitting:,} of {total:,} settings fit"
    return plain(
        f"{name} ({count_text(params)} parameters) on {card}, {batch} x {question.shape.seq} tokens, "
        f"{question.dtype}{f' with {question.matmul} products' * (question.matmul != 'none')}: {fitting}"
    )


def left_out_text(searched: Searched) -> str:
    """The layouts that were left out, counted by reason; empty if there are none."""
    question = searched.question
    parts = [f"{count} as {reason}" for reason, count in searched.left_out.items()]
    if DIVIDES_NO_BATCH in searched.left_out and (sizes := near_batches(question.global_batch or 1, question.gpus)):
        parts.append(f"every dp of {counted(question.gpus, 'GPU')} divides --gbs {' or '.join(map(str, sizes))}")
    if searched.too_large:
        parts.append(f"{len(searched.too_large)} as none of their settings fits")
    return f"layouts left out: {'; '.join(parts)}" if parts else ""


def other_ep_text(searched: Searched) -> str:
    """The cost of each other ep in the best layout of a mixture: its time over the best's, and the reason."""
    if searched.best is None or not searched.question.shape.is_mixture:
        return ""
    best = searched.best

    def others(candidate: Candidate) -> tuple[int, ...]:
        run = candidate.training
        return run.tp, run.pp, run.cp, run.expert_tp

    alike: dict[int, Candidate] = {}
    for candidate in (*searched.best_of_layouts, *searched.too_large):
        if others(candidate) == others(best) and candidate.training.ep != best.training.ep:
            alike.setdefault(candidate.training.ep, candidate)
    if not alike:
        return ""
    texts = []
    for ep, candidate in sorted(alike.items(), key=lambda pair: -pair[0]):
        times = f"{best.tokens_per_s / candidate.tokens_per_s:.2f} times as long, " if candidate.step else ""
        texts.append(f"ep {ep} {times}{why_slower(candidate, best)}")
    return f"ep {best.training.ep} is best of this tp, pp and cp: {'; '.join(texts)}"


def unchecked(searched: Searched) -> str:
    """The note on host memory that the search could not check; empty if it checked everything."""
    unknown = [candidate for candidate in searched.candidates if candidate.needs_unknown_host]
    if not unknown:
        return ""
    hint = "give host_memory_gib in the profile's [machine] to check offload"
    if searched.best is not None:
        return f"the memory of a host is unknown: {hint}"
    only = f"{unknown[0].layout} needs {plan_figures(unknown[0])['host'].text}"
    return f"no layout is known to fit: all that fit on the cards offload, and {only}; {hint}"


def slow_text(best: Candidate, other: Candidate | None, what: str) -> str:
    """The note that the best, which offloads, is far slower than `other`, which does not; empty if it is not. `what`
    describes `other`."""
    if other is None or other.tokens_per_s < SLOW_LAYOUT * best.tokens_per_s:
        return ""
    ratio = other.tokens_per_s / best.tokens_per_s
    return f"slow: {what} has {other.tokens_per_s:,.0f} tokens/s, {ratio:,.0f} times as many"
