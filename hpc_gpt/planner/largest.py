"""Searches for the largest model of a family, or the longest sequence of a model, that fits with room to spare."""

from dataclasses import dataclass, replace

from hpc_gpt.core.errors import LayoutError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.planner.machine import DEFAULT, Constants, Machine
from hpc_gpt.planner.question import Question
from hpc_gpt.planner.search import Searched, search, with_margin

FAMILY = (
    "heads of 128, hidden a multiple of 1024 (of 256 below 2048), layers a multiple of 4 (8 from 64, 16 from 128 on), "
    "hidden / layers from 96 to 256 as from GPT-3 13B to 1T"
)
_WIDEST = 65536
# Lower bounds on the bytes per parameter on all GPUs together, by offload. none: 2 + 2 + 12, or DeepSpeed's 14 after
# a step. optimizer: the weight. full: next to nothing.
_LEAST_BYTES = {"none": 12.0, "optimizer": 2.0, "full": 0.25}
# The shortest and the longest sequence to try, in tokens.
_SHORTEST, _LONGEST = 1024, 2**24


@dataclass(frozen=True)
class Largest:
    """The largest model that fits, or the model with the longest sequence that fits; its search; and the next larger
    one, which does not fit or leaves no room."""

    model: ModelShape
    searched: Searched
    next_larger: ModelShape | None
    tried: int


def family(model: ModelShape) -> list[ModelShape]:
    """All shapes of the FAMILY with the model's vocabulary and sequence, and its experts, sorted by parameters.

    Hidden / layers as published: Brown et al. 2020 (arXiv:2005.14165), table 2.1, 12288 / 96 = 128; Narayanan et al.
    2021 (arXiv:2104.04473), table 1, 25600 / 128 = 200; Megatron-DeepSpeed's perf tables, 16384 / 64 = 256.
    """
    shapes = [
        replace(model, hidden=hidden, layers=layers, heads=hidden // 128, expert_ffn=_grown(model, hidden))
        for hidden in (*range(512, 2048, 256), *range(2048, _WIDEST + 1, 1024))
        for layers in (*range(4, 64, 4), *range(64, 128, 8), *range(128, hidden // 96 + 1, 16))
        if 96 * layers <= hidden <= 256 * layers
    ]
    return sorted(shapes, key=lambda shape: shape.params)


def _grown(model: ModelShape, hidden: int) -> int | None:
    """The width of an expert, which grows with hidden in steps of 64, as tensor parallelism divides it."""
    if model.expert_ffn is None:
        return None
    return max(64, round(model.expert_ffn * hidden / model.hidden / 64) * 64)


def largest(question: Question, model: ModelShape, machine: Machine, constants: Constants = DEFAULT) -> Largest:
    """The largest model of the family that fits with room on the card and on the host; tight candidates come last.

    All are tried from the largest down: a smaller model may fail although a larger one fits, if its layers do not
    divide. LayoutError if not even the smallest fits.
    """
    least = _LEAST_BYTES[question.fixed.get("offload", "full")]
    most = machine.memory_gib * 2**30 * question.gpus / least
    tried = 0
    larger: ModelShape | None = None
    for shape in reversed(family(model)):
        if shape.params <= most:
            tried += 1
            if (searched := _with_room(question, shape, machine, constants)) is not None:
                return Largest(shape, searched, larger, tried)
        larger = shape
    raise LayoutError(
        f"no model of the family fits on {question.gpus} {machine.device} with the requested settings",
        "leave --tp, --pp, --dp and the batch open, or use more GPUs",
    )


def longest(question: Question, machine: Machine, constants: Constants = DEFAULT) -> Largest:
    """The longest sequence of the question's model that fits with room: a power of two plus up to seven eighths of it,
    so that it divides over many ranks. LayoutError if not even _SHORTEST tokens fit."""
    length = _SHORTEST
    while length < _LONGEST and _fits(question, replace(question.shape, seq=2 * length), machine):
        length *= 2
    longer = replace(question.shape, seq=2 * length)
    while length >= _SHORTEST:  # the search may end at a length that fits, but tightly
        for seq in (length // 8 * eighths for eighths in range(15, 7, -1)):
            shape = replace(question.shape, seq=seq)
            if (searched := _with_room(question, shape, machine, constants)) is not None:
                return Largest(shape, searched, longer, 1)
            longer = shape
        length //= 2
    raise LayoutError(
        f"not even a sequence of {_SHORTEST:,} tokens fits on {question.gpus} {machine.device}",
        "leave --tp, --pp, --dp and the batch open, use more GPUs, or a smaller model",
    )


def _fits(question: Question, shape: ModelShape, machine: Machine) -> bool:
    """Whether the shape fits with room."""
    return bool(search(question.of(shape), with_margin(machine), first=True).candidates)


def _with_room(question: Question, shape: ModelShape, machine: Machine, constants: Constants) -> Searched | None:
    """The search for a shape, tight candidates last; None if nothing leaves room."""
    if not _fits(question, shape, machine):
        return None
    searched = search(question.of(shape), machine, constants)
    searched.candidates.sort(key=lambda candidate: candidate.is_tight)
    return searched if searched.candidates and not searched.candidates[0].is_tight else None
