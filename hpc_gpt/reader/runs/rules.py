"""The table of rules: products that hold between the fields of a run. A row solves one unknown field, and holds the
fields against each other if all are known.

The rows are tried from the top until none adds a field. A size is whole: a quotient that is not whole gives nothing.
Sizes are compared exactly, measured and rounded figures to 5 %, and a field is not compared with those that it follows
from. Of two figures that contradict each other an impossible one goes before a possible one, and a library's before the
program's. A printed rate and one by sizes and step time both go, unless a habit of the program's arithmetic explains
the printed one. Otherwise both stay. A flag has the product and the other figure.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from hpc_gpt.core.engines import engines
from hpc_gpt.core.runs.record import Flag, Record
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.layout import AXES
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.facts import LIBRARY, MEASURED, Facts
from hpc_gpt.reader.runs.figures import Figures
from hpc_gpt.reader.runs.log_steps import LogSteps

_ALIKE = 0.05  # two measured or rounded figures of one quantity that differ by more contradict each other
_ABSURD = 100.0  # ratio of two figures of one quantity from which on one of them is absurd
_LEAST = 5  # figures that a comparison of rates needs
# Programs that split only the batch, as our engines without another axis do.
_ONLY_BATCH = frozenset(("hf", "nanogpt", "build-nanogpt", "nanochat", "modded-nanogpt", "llm.c", "deepspeed-chat"))
_ABSENT = {"cp": 1}  # a program that does not name the axis has none


@dataclass(frozen=True)
class Known:
    """What the conditions of rows are about: the fields so far, the dump of arguments, and who states each field."""

    draft: Draft
    arguments: Mapping[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)


Condition = Callable[[Known], bool]


def splits_only_the_batch(engine: object) -> bool:
    """Whether an engine, ours or another program's, has no axis but dp."""
    return engine in _ONLY_BATCH or (engine in engines() and not engines()[str(engine)].axes)


def _has_one_gpu(known: Known) -> bool:
    return known.draft.whole("gpus") == 1


def _splits_batch(known: Known) -> bool:
    return splits_only_the_batch(known.draft.get("engine"))


def _names_the_other(known: Known) -> bool:
    draft = known.draft
    return bool(known.arguments) and ("tp" in draft) != ("pp" in draft) and not _splits_batch(known)


def _gpus_are_sure(known: Known) -> bool:
    """Whether the number of GPUs is stated, or unknown: one that follows is too weak for a micro-batch."""
    gpus = known.facts.best("gpus")
    return "gpus" not in known.draft if gpus is None else gpus.who > MEASURED


class Rule(NamedTuple):
    """`whole` is the product of `factors`. `solves`: the fields that may follow from the others, the first one first,
    and `up` those of them that are rounded up. `when`: {field: whether the row solves it}. Without factors the field is
    1, for the reason `says`. `kind`: of the flag if the fields contradict each other; without one they are not
    compared.
    """

    whole: str
    factors: tuple[str, ...] = ()
    solves: tuple[str, ...] = ()
    kind: str = ""
    when: Mapping[str, Condition] = {}
    up: tuple[str, ...] = ()
    says: str = ""


def _one(fields: Iterable[str], says: str, when: Condition) -> tuple[Rule, ...]:
    return tuple(Rule(name, solves=(name,), says=says, when={name: when}) for name in fields)


RULES = (
    Rule("gpus", ("nodes", "gpus_per_node"), ("gpus", "nodes"), up=("nodes",)),
    *_one(AXES, "one GPU", _has_one_gpu),
    *_one(("tp", "pp"), "{engine} splits only the batch", _splits_batch),
    *_one(("tp", "pp"), "the dump of arguments names none", _names_the_other),
    Rule("global_batch_tokens", ("global_batch", "seq"), ("global_batch", "global_batch_tokens")),
    Rule("gpus", ("tp", "pp", "cp", "dp"), ("dp", "pp", "gpus"), "layout"),
    Rule(
        "global_batch",
        ("micro_batch", "micro_batches", "dp"),
        ("dp", "micro_batches", "global_batch", "micro_batch"),
        "batch",
        {"micro_batch": _gpus_are_sure},
    ),
    Rule("runtime_s", ("steps_of_runtime", "step_s"), ("step_s",)),
    Rule("tokens_per_s", ("tokens_per_s_gpu", "gpus"), ("tokens_per_s",)),
    Rule("global_batch_tokens", ("tokens_per_s", "step_s"), ("tokens_per_s",)),
    Rule("tokens_total", ("steps_trained", "global_batch_tokens"), ("tokens_total",)),
)
# Fields that are measured, or printed with a rounding; every other one is whole.
_MEASURED = frozenset(("runtime_s", "steps_of_runtime", "step_s", "tokens_per_s", "tokens_per_s_gpu"))
_SIZES = frozenset(name for rule in RULES for name in rule.solves) - _MEASURED - {"tokens_total"}


def solve(known: Known, *fields: str) -> None:
    """Adds those of the fields that follow from others, until the table gives none; without `fields` every size."""
    while any(_apply(known, rule, name) for rule, name in _rows(fields or _SIZES)):
        pass


@cache
def _rows(fields: Collection[str]) -> list[tuple[Rule, str]]:
    return [(rule, name) for rule in RULES for name in rule.solves if name in fields]


def step_tokens(draft: Draft) -> int | None:
    """The tokens of one step, None if the batch is not known."""
    batch, seq = draft.whole("global_batch"), draft.whole("seq")
    return batch * seq if batch and seq else draft.whole("global_batch_tokens")


def _size(draft: Draft, name: str) -> float:
    """The value of a field, 0 if it is not known."""
    if name in _MEASURED:
        value = draft.get(name)
        return value if isinstance(value, int | float) and value > 0 else 0
    return draft.whole(name) or _ABSENT.get(name, 0)


def _apply(known: Known, rule: Rule, name: str) -> bool:
    """Adds a field by a row if it is unknown and the others are known; returns whether it did."""
    draft = known.draft
    if name in draft or (name in rule.when and not rule.when[name](known)):
        return False
    if not rule.factors:
        draft.infer(name, 1, rule.says.format(engine=draft.get("engine")))
        return True
    others = tuple(each for each in rule.factors if each != name)
    of, over = (others, ()) if name == rule.whole else ((rule.whole,), others)
    above, below = (math.prod(_size(draft, each) for each in names) for names in (of, over))
    if not above or not below:
        return False
    value = above / below if name in _MEASURED else -(-above // below)
    if name not in _MEASURED and above % below and name not in rule.up:
        return False
    divisor = _product(draft, over)
    quotient = _product(draft, of) + (f" / ({divisor})" if " x " in divisor else f" / {divisor}" if divisor else "")
    places = [f"{each}: {draft.sources[each]}" for each in (*of, *over) if each in _MEASURED and each in draft.sources]
    draft.infer(name, value, "; ".join([quotient, *places]))
    draft.solved[name] = frozenset((*of, *over)).union(*(draft.solved.get(each, ()) for each in (*of, *over)))
    return True


def _product(draft: Draft, names: Iterable[str]) -> str:
    """The fields of a product with their values, without an axis that is not named."""
    return " x ".join(f"{name} {_size(draft, name):.10g}" for name in names if name in draft or name not in _ABSENT)


def outdated(facts: Facts) -> list[str]:
    """The sizes of a library that the program's own contradict: the batch grew after the library's dump."""
    for rule in RULES:
        sizes = [facts.whole(name) for name in (rule.whole, *rule.factors)] if rule.kind == "batch" else [None]
        if all(sizes) and sizes[0] != math.prod(size for size in sizes[1:] if size):
            of_library = (name for name in rule.solves if (best := facts.best(name)) and best.who == LIBRARY)
            return list(of_library)[:1]
    return []


def flag_contradictions(draft: Draft) -> None:
    """Flags each product whose fields contradict each other, and each quotient of sizes that is not whole."""
    for rule in RULES:
        fields = (rule.whole, *rule.factors)
        lacking = [name for name in fields if not _size(draft, name)] if rule.kind else fields
        if len(lacking) > 1 or any({*fields} & draft.solved.get(name, frozenset()) for name in fields):
            continue
        factors = [name for name in rule.factors if name not in lacking]
        product, whole = math.prod(_size(draft, name) for name in factors), _size(draft, rule.whole)
        where = f"{rule.whole} is {whole} ({draft.sources.get(rule.whole, '')})"
        if lacking and rule.whole not in lacking and whole % product:
            draft.flag(f"{_product(draft, factors)} = {product}, but {where}, which is no multiple of it", rule.kind)
        elif not lacking and product != whole:
            draft.flag(f"{_product(draft, factors)} = {product}, but {where}", rule.kind)


_BY_FORMULA = ("tflops_seed", "tflops_hardware", "tflops_model")
_OF_RATE = ("tokens_per_s", "tokens_per_s_gpu", *_BY_FORMULA, "mfu", "hfu")
_FLOPS_ALIKE = 0.1  # programs count a norm, a head or the causal half of attention in different ways


@cache
def peak_of(device: str | None, dtype: str | None) -> tuple[float, str]:
    """Returns (the most TFLOP/s of a device, or of every device in the dtype if it is not known; what that is)."""
    if device in DEVICES:
        return max(DEVICES[device].peaks.values()), f"the peak of {device}"
    unit = "tf32" if dtype == "fp32" else dtype
    every = [(name, most) for each in DEVICES.values() for name, most in each.peaks.items()]
    of_dtype = [most for name, most in every if name == unit]
    if of_dtype:
        return max(of_dtype), f"the peak of every device in {unit}"
    return max(most for _, most in every), "the peak of every device"


def check_rates(record: Record, figures: Figures, steps: LogSteps) -> list[Flag]:
    """Holds the figures that follow from a record against what its program prints; returns the flags.

    A rate that the printed one contradicts goes from `figures`, with the figures that follow from it, unless a habit of
    the program's arithmetic explains the printed one. A printed rate of one GPU gives way to the rate of all.
    """
    flags = []
    speed = figures.get("tokens_per_s", (record.tokens_per_s, ""))[0]
    printed = _printed_rate(record, steps) if speed and record.step_s and "tokens_per_s" in figures else None
    if printed is not None and speed and abs(printed[0] / speed - 1) > _ALIKE and not _same_tokens(record, steps):
        ratio = printed[0] / speed
        product = f"global_batch {record.global_batch} x seq {record.seq} / step_s {record.step_s:.4g} = {speed:,.0f}"
        reason, kind = _habit(record, ratio), "disagrees" if 1 / _ABSURD < ratio < _ABSURD else "absurd"
        message = f"{product} tokens/s, but {printed[1]}"
        flags.append(Flag(f"{message}: {reason or 'left out'}", kind))
        if not reason:
            figures |= {name: (None, f"null: {message}") for name in _OF_RATE if name in figures}
            return flags
    each, gpus = record.tokens_per_s_gpu, record.gpus
    if speed and gpus and each and abs(each * gpus / speed - 1) > _ALIKE:
        product = f"tokens_per_s_gpu {each:,.0f} x gpus {gpus} = {each * gpus:,.0f}"
        where = record.sources.get("tokens_per_s_gpu", "")
        flags += [] if flags else [Flag(f"{product}, but tokens_per_s is {speed:,.0f} ({where})")]
        figures["tokens_per_s_gpu"] = (speed / gpus, "tokens_per_s / gpus")
    return flags


def check_flops(record: Record, figures: Figures) -> list[Flag]:
    """Takes the TFLOPs above the peak of the device from `figures`, and shares of a peak above 1; returns the flags. If
    the program's own figure is possible but is none of those by formula, a flag gives both."""
    (peak, what), flags = peak_of(record.device, record.units), list[Flag]()
    for name in (*_BY_FORMULA, "mfu", "hfu"):
        figure = figures.get(name, (None, ""))[0]
        most, of = (1.0, "1") if name in ("mfu", "hfu") else (peak, what)
        if figure is not None and figure > most:
            figures[name] = (None, "null: impossible")
            flags.append(Flag(f"{name} would be {figure:,.4g}, above {of}: left out", "absurd"))
    own = [figure for name in _BY_FORMULA if (figure := figures.get(name, (None, ""))[0])]
    printed = record.tflops_printed
    if own and printed and all(abs(figure / printed - 1) > _FLOPS_ALIKE for figure in own):
        by_shape = own[-1]  # tflops_model, if it is known
        message = f"the program prints {printed:,.4g} TFLOP/s a GPU, by shape and step time it is {by_shape:,.4g}"
        flags.append(Flag(message))
    return flags


def _same_tokens(record: Record, steps: LogSteps) -> bool:
    """Whether rate and time of the same lines give the tokens of a step: the time may change during a run."""
    tokens = steps["tokens_per_s"] * steps["step_s"]
    steady = tokens[steps.steady & np.isfinite(tokens)]
    size = (record.global_batch or 0) * (record.seq or 0)
    return bool(size and len(steady) >= _LEAST and abs(float(np.median(steady)) / size - 1) <= _ALIKE)


def _printed_rate(record: Record, steps: LogSteps) -> tuple[float, str] | None:
    """Returns (tokens/s of the job by the rate that the program prints, its words); None without one, or if it gave
    step_s."""
    if "step_s" not in steps:
        return None
    for name, over in (
        ("tokens_per_s", {}),
        ("tokens_per_s_gpu", {"gpus": record.gpus}),
        ("samples_per_s", {"seq": record.seq}),
        ("samples_per_s_gpu", {"seq": record.seq, "gpus": record.gpus}),
    ):
        if name not in steps or not all(over.values()):
            continue
        rows = np.flatnonzero(steps.steady & np.isfinite(steps[name]))
        later = rows[len(rows) // 2 :]  # a running mean comes near its figure only with time
        rate = float(np.median(steps[name][later])) if len(later) >= _LEAST else 0.0
        if rate > 0:
            product = " x ".join([f"{name} {rate:,.4g}", *(f"{key} {size}" for key, size in over.items())])
            whole = rate * math.prod(size or 0 for size in over.values())
            total = f" = {whole:,.0f}" if over else ""
            return whole, f"the program prints {product}{total} ({steps.place(int(later[0]))})"
    return None


def _habit(record: Record, ratio: float) -> str:
    """Why a program's rate is `ratio` times the true one; "" if no known reason explains it."""
    for count, what in (
        (record.micro_batches, "micro-batches"),
        (record.dp, "data-parallel ranks"),
        (record.cp, "context-parallel ranks"),
        (record.gpus, "GPUs"),
    ):
        if count and abs(ratio * count - 1) <= _ALIKE:
            return f"it counts one of {count} {what}"
        if count and abs(ratio / count - 1) <= _ALIKE:
            return f"each of {count} {what} counts all tokens"
    return ""
