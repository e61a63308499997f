"""The largest model of a family that fits on so many GPUs: seed 001's first question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpc_gpt.errors import LayoutError
from hpc_gpt.model_shape import ModelShape
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.question import Question
from hpc_gpt.plan.search import TIGHT, Searched, search
from hpc_gpt.plan.translation import shape_of

FAMILY = (
    "heads of 128, hidden a multiple of 1024 (of 256 below 2048), layers a multiple of 4, hidden / layers from 96 to "
    "256 as from GPT-3 13B to 1T"
)
_WIDEST = 65536
# A larger model may fit where a smaller one of another shape does not: so many are tried above the last that fits.
_BEYOND = 12


@dataclass(frozen=True)
class Largest:
    """The largest that fits with its search, and the next of the family, which does not, or with no room."""

    model: ModelShape
    searched: Searched
    next_larger: ModelShape | None
    tried: int


def family(model: ModelShape) -> list[ModelShape]:
    """Every shape of the family with the model's vocabulary and sequence, by parameters.

    Widths and depths as the published ones: Brown et al. 2020 (arXiv:2005.14165), table 2.1, 96 x 12288 = 128 a layer;
    Narayanan et al. 2021 (arXiv:2104.04473), table 1, 128 x 25600 = 200; seed 001's 64 x 16384 = 256.
    """
    return sorted(_shapes(model), key=lambda shape: shape.params)


def _shapes(model: ModelShape) -> Iterator[ModelShape]:
    widths = (*range(512, 2048, 256), *range(2048, _WIDEST + 1, 1024))
    for hidden in widths:
        for layers in range(4, hidden // 96 + 1, 4):
            if hidden <= 256 * layers:
                yield replace(model, hidden=hidden, layers=layers, heads=hidden // 128)


def largest(question: Question, model: ModelShape, machine: Machine) -> Largest:
    """The largest of the family for which `question`, asked of it, has an answer with room on the card (TIGHT).

    LayoutError where not even the smallest fits.
    """
    shapes = family(model)
    with_room = replace(machine, memory_gib=TIGHT * machine.memory_gib)
    tried: dict[int, bool] = {}

    def has_answer(place: int) -> bool:
        if place not in tried:
            asked = replace(question, shape=shape_of(shapes[place]), model=shapes[place])
            tried[place] = bool(search(asked, with_room, first=True).candidates)
        return tried[place]

    low, high = 0, len(shapes)  # the first is taken to fit, the last not
    while high - low > 1:
        middle = (low + high) // 2
        if has_answer(middle):
            low = middle
        else:
            high = middle
    found = next((place for place in range(min(low + _BEYOND, len(shapes) - 1), low, -1) if has_answer(place)), low)
    if not has_answer(found):
        raise LayoutError(
            f"no model of the family fits on {question.gpus} {machine.device} with what is asked for",
            "leave --tp, --pp, --dp and the batch open, or use more GPUs",
        )
    answer = search(replace(question, shape=shape_of(shapes[found]), model=shapes[found]), machine)
    larger = shapes[found + 1] if found + 1 < len(shapes) else None
    return Largest(shapes[found], answer, larger, len(tried))
