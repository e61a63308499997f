"""The figures of a planned layout with their labels, units and texts: every output of a plan takes them from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_gpt.core import formulas
from hpc_gpt.core.format import counted, show_rate, show_share, show_whole
from hpc_gpt.core.recomputation import recomputation
from hpc_gpt.core.runs.record import FIGURES
from hpc_gpt.core.settings.devices import units_of

if TYPE_CHECKING:
    from hpc_gpt.core.engines.base.training import Training
    from hpc_gpt.planner.machine import Machine
    from hpc_gpt.planner.search import Candidate, Searched
    from hpc_gpt.planner.step_time import StepTime

FAR = 0.1  # mfu as done gets a line if mfu is above it by more than this share
_DAY_S = 86400.0
# The lines of `summary`: how each begins, and its figures.
_SUMMARY = (
    ("", ("step", "band", "tokens_per_s", "tokens_per_s_gpu")),
    ("per GPU: ", ("tflops_model", "tflops_hardware", "tflops_seed")),
    ("", ("mfu", "hfu", "peak")),
    ("", ("mfu_as_done",)),
    ("", ("days", "gpu_hours")),
)
_THROUGHPUT = tuple(key for _, keys in _SUMMARY for key in keys if key not in ("step", "band"))


@dataclass(frozen=True)
class Figures:
    """Figures from a predicted step time: throughput, TFLOP/s of one GPU by each formula of core.formulas, and the
    cost of `budget_tokens` (`days`, `gpu_hours`). `mfu` and `hfu` are 0 to 1, over `peak_tflops` of `units`;
    `mfu_as_done` leaves out the half of attention that causal masks save.
    """

    step_s: float
    step_s_low: float
    step_s_high: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tflops_seed: float
    tflops_hardware: float
    tflops_model: float
    mfu: float
    hfu: float
    mfu_as_done: float
    units: str
    peak_tflops: float
    gpu_hours_per_step: float
    budget_tokens: float
    days: float
    gpu_hours: float


def figures_of(training: Training, step: StepTime, machine: Machine, budget_tokens: float) -> Figures:
    """The figures of a training with a predicted step; `step.band` gives the range of its seconds."""
    shape, gpus, step_s = training.shape, training.gpus, step.step_s
    counted: dict[str, Any] = {"seq": shape.seq, "global_batch": training.global_batch, "gpus": gpus, "step_s": step_s}
    sizes: dict[str, Any] = {
        "layers": shape.attention_layers,
        "hidden": shape.attention_width,
        "attention_keys": shape.attention_keys,
    }
    model = formulas.tflops_model(params=shape.multiplied, **sizes, **counted)
    hardware = formulas.tflops_hardware(
        layers=shape.attention_layers,
        hidden=shape.hidden,
        vocab=shape.padded_vocab * (1 + shape.mtp_layers),
        recompute=training.recompute,
        layer_weights=shape.layer_weights,
        again_weights=shape.weights_in(recomputation(training.recompute).linear),
        attention_width=shape.attention_width,
        attention_keys=shape.attention_keys,
        **counted,
    )
    units = units_of(training.dtype, training.matmul) or training.dtype
    peak = machine.peak_tflops[units]
    tokens_per_s = training.global_batch * shape.seq / step_s
    seconds = budget_tokens / tokens_per_s
    return Figures(
        step_s=step_s,
        step_s_low=step_s * (1 - min(step.band, 1.0)),
        step_s_high=step_s * (1 + step.band),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / gpus,
        tflops_seed=formulas.tflops_seed(params=shape.params_active, recompute=training.recompute, **counted),
        tflops_hardware=hardware,
        tflops_model=model,
        mfu=formulas.mfu(model, peak),
        mfu_as_done=formulas.mfu(formulas.as_done(model, **sizes, **counted), peak),
        units=units,
        peak_tflops=peak,
        hfu=formulas.hfu(hardware, peak),
        gpu_hours_per_step=gpus * step_s / 3600,
        budget_tokens=budget_tokens,
        days=seconds / _DAY_S,
        gpu_hours=gpus * seconds / 3600,
    )


def figures_in(searched: Searched, candidate: Candidate, budget_tokens: float) -> Figures | None:
    """The figures of a candidate of a search; None if it does not fit."""
    if candidate.step is None:
        return None
    return figures_of(candidate.training, candidate.step, searched.machine, budget_tokens)


class PlanFigure(NamedTuple):
    """A figure of a planned layout. A share is 0 to 1 and has no unit; its digits are percent. `compared` replaces
    the unit after the digits; `how` is the arithmetic or the formula.

    >>> memory = PlanFigure("memory", 26.04, "GiB", "26.0", "of 31.7 GiB")
    >>> memory.text, str(memory), str(PlanFigure("tokens/s", 1311.0, "tokens/s", "1,311"))
    ('26.0 of 31.7 GiB', 'memory 26.0 of 31.7 GiB', '1,311 tokens/s')
    """

    label: str
    value: float
    unit: str
    digits: str
    compared: str = ""
    how: str = ""

    @property
    def text(self) -> str:
        """The digits with the unit, or with the value that they are compared with."""
        return f"{self.digits} {self.compared or self.unit}".rstrip()

    def __str__(self) -> str:
        return self.text if self.label == self.unit else f"{self.label} {self.text}"


def plan_figures(candidate: Candidate, figures: Figures | None = None) -> dict[str, PlanFigure]:
    """The figures of a candidate by key: `memory`, and `host`, `step`, `band` and tokens/s as far as it has them. With
    `figures`, the candidate's, also TFLOP/s, utilisation and cost."""
    where = f" on stage {candidate.memory.deciding}" if candidate.training.pp > 1 else ""
    need, card = candidate.need_gib, candidate.card_gib
    listed = {"memory": PlanFigure("memory", need, "GiB", f"{need:.1f}", f"of {card:.1f} GiB{where}")}
    if (host := candidate.host_gib) > 0:
        size = candidate.host_memory_gib
        has = f"of {size:,.4g} GiB" if size is not None else "GiB"
        unknown = "" if size is not None else " (its size is unknown)"
        listed["host"] = PlanFigure("host", host, "GiB", f"{host:,.1f}", f"{has} of host memory{unknown}")
    if (step := candidate.step) is not None:
        run, seconds, rate = candidate.training, show_rate(step.step_s), candidate.tokens_per_s
        how = f"{run.global_batch * run.shape.seq:,} tokens / {seconds} s", f"tokens/s / {counted(run.gpus, 'GPU')}"
        unit = FIGURES["tokens_per_s_gpu"].label
        listed |= {
            "step": PlanFigure("step", step.step_s, "s", seconds),
            "band": PlanFigure("give or take", step.band, "", f"{step.band:.0%}"),
            "tokens_per_s": PlanFigure("tokens/s", rate, "tokens/s", show_whole(rate), how=how[0]),
            "tokens_per_s_gpu": PlanFigure(unit, rate / run.gpus, unit, show_rate(rate / run.gpus), how=how[1]),
        }
    return listed if figures is None else listed | _work_and_cost(candidate.training, figures)


def _work_and_cost(run: Training, figures: Figures) -> dict[str, PlanFigure]:
    listed = {}
    for key in ("tflops_model", "tflops_hardware", "tflops_seed", "mfu"):  # as in a record
        figure = FIGURES[key]
        unit = "" if key == "mfu" else "TFLOP/s"
        listed[key] = PlanFigure(figure.label, getattr(figures, key), unit, figure.show(figures), how=figure.formula)
    how = "tflops_hardware over the device's dense peak"
    listed["hfu"] = PlanFigure("hfu", figures.hfu, "", show_share(figures.hfu), how=how)
    peak = figures.peak_tflops
    listed["peak"] = PlanFigure("peak", peak, "TFLOP/s", f"{peak:g}", f"TFLOP/s of {figures.units}")
    if (share := figures.mfu_as_done) * (1 + FAR) < figures.mfu:
        why = "(the formulas count all of attention; a causal mask saves half of it)"
        listed["mfu_as_done"] = PlanFigure("mfu as done", share, "", show_share(share), why)
    time, unit, times = (figures.days, "days", "24 x ") if figures.days >= 1 else (24 * figures.days, "hours", "")
    tokens, gpus = tokens_text(figures.budget_tokens), counted(run.gpus, "GPU")
    rate = f"{tokens} tokens / {show_whole(figures.tokens_per_s)} tokens/s"
    listed["days"] = PlanFigure(f"{tokens} tokens in", time, unit, f"{time:,.1f}", f"{unit} on {gpus}", rate)
    how = f"{time:,.1f} {unit} x {times}{gpus}"
    hours = figures.gpu_hours
    listed["gpu_hours"] = PlanFigure("GPU-hours", hours, "GPU-hours", show_whole(hours), how=how)
    return listed


def as_text(figures: Mapping[str, PlanFigure], *keys: str) -> str:
    """The figures of these keys with their labels; missing ones are left out."""
    return ", ".join(str(figures[key]) for key in keys if key in figures)


def summary(figures: Mapping[str, PlanFigure]) -> list[str]:
    """Lines with the time, the work and the cost."""
    return [begin + line for begin, keys in _SUMMARY if (line := as_text(figures, *keys))]


def arithmetic(figures: Mapping[str, PlanFigure]) -> list[str]:
    """A line for each figure of throughput, work and cost, with its arithmetic or its formula."""
    listed = [figures[key] for key in _THROUGHPUT if key in figures]
    margin = max((len(figure.label) for figure in listed), default=0)
    return [
        f"{figure.label:<{margin}}  {figure.text}" + (f"  ({figure.how})" if figure.how else "") for figure in listed
    ]


def memory_text(candidate: Candidate) -> str:
    """The memory of the card, and of a host if anything is offloaded, as `26.0 of 31.7 GiB on stage 0`."""
    return _texts(plan_figures(candidate), ("memory", "host"))


def peak_memory_text(candidate: Candidate) -> str:
    """The memory of the card, or of the host if the candidate fills that further."""
    key = "host" if candidate.host_share > candidate.need_gib / candidate.card_gib else "memory"
    return _texts(plan_figures(candidate), (key,))


def _texts(figures: Mapping[str, PlanFigure], keys: Iterable[str]) -> str:
    return ", ".join(figures[key].text for key in keys if key in figures)


def tokens_text(tokens: float) -> str:
    """A budget of tokens in units of 10^9, or of 10^6 if it is smaller.

    >>> tokens_text(300e9), tokens_text(2.5e6), tokens_text(15e12)
    ('300e9', '2.5e6', '15,000e9')
    """
    unit, power = (1e9, 9) if tokens >= 1e9 else (1e6, 6)
    return f"{tokens / unit:,.5g}e{power}"
