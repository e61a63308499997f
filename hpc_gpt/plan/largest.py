"""The largest model of a family that fits on so many GPUs: seed 001's first question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpc_gpt.errors import LayoutError
from hpc_gpt.plan.constants import DEFAULT, Constants
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.question import Question
from hpc_gpt.plan.search import TIGHT, Searched, search
from hpc_gpt.plan.translation import shape_of
from hpc_gpt.settings.model_shape import ModelShape

FAMILY = (
    "heads of 128, hidden a multiple of 1024 (of 256 below 2048), layers a multiple of 4 (8 from 64, 16 from 128 on), "
    "hidden / layers from 96 to 256 as from GPT-3 13B to 1T"
)
_WIDEST = 65536
# No engine holds a parameter's states in fewer bytes of all GPUs together, by what is offloaded: 16 and more with
# nothing (2 + 2 + 12, or DeepSpeed's 14 after a step), the weight alone without its optimizer, next to nothing.
_LEAST_BYTES = {"none": 12.0, "optimizer": 2.0, "full": 0.25}


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
    for hidden in (*range(512, 2048, 256), *range(2048, _WIDEST + 1, 1024)):
        for layers in (*range(4, 64, 4), *range(64, 128, 8), *range(128, hidden // 96 + 1, 16)):
            if 96 * layers <= hidden <= 256 * layers:
                yield replace(model, hidden=hidden, layers=layers, heads=hidden // 128)


def largest(question: Question, model: ModelShape, machine: Machine, constants: Constants = DEFAULT) -> Largest:
    """The largest of the family for which `question`, asked of it, has an answer with room on the card (TIGHT).

    From above one after the other: a smaller model may fail where a larger one fits, as its layers do not divide so.
    LayoutError where not even the smallest fits.
    """
    shapes = family(model)
    with_room = replace(machine, memory_gib=TIGHT * machine.memory_gib)
    least = _LEAST_BYTES[question.settled.get("offload", "full")]
    most = machine.memory_gib * 2**30 * question.gpus / least
    tried = 0
    for place in range(len(shapes) - 1, -1, -1):
        shape = shapes[place]
        if shape.params > most:
            continue
        tried += 1
        asked = replace(question, shape=shape_of(shape), model=shape)
        if search(asked, with_room, first=True).candidates:
            larger = shapes[place + 1] if place + 1 < len(shapes) else None
            return Largest(shape, search(asked, machine, constants), larger, tried)
    raise LayoutError(
        f"no model of the family fits on {question.gpus} {machine.device} with what is asked for",
        "leave --tp, --pp, --dp and the batch open, or use more GPUs",
    )
