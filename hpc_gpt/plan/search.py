"""Every way of running a model on so many GPUs: which fit in memory, and which of those is fastest.

Memory is asked first, time only of what fits. Of each layout the best few are kept, so that what a search holds does
not grow with what it looks at.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hpc_gpt import formulas
from hpc_gpt.errors import LayoutError
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.memory import Memory, StageMemory, fits, predict_memory
from hpc_gpt.plan.question import NO_ENGINE, OFFLOADS, RECOMPUTES, Question
from hpc_gpt.plan.rates import DEFAULT, Constants
from hpc_gpt.plan.step_time import StepTime, predict_step
from hpc_gpt.plan.training import Training
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape

KEPT = 3  # of each layout
# Speeds whose ratio is below this count as one, and the plainer settings come first.
NEAR = 1.01
# From this share of the card on a prediction leaves no room for its own error: such a candidate must be faster than
# one with room by as much as a run is worth that may end for want of memory.
TIGHT = 0.92
WORTH_THE_RISK = 1.15
_ENGINES = ("deepspeed-3d", "ddp", "deepspeed-zero", "fsdp", "megatron-lm", "hf-deepspeed")  # the plainer first
_DAY_S = 86400.0
FAMILY = (
    "heads of 128, hidden a multiple of 1024 (of 256 below 2048), layers a multiple of 4 (8 from 64, 16 from 128 on), "
    "hidden / layers from 96 to 256 as from GPT-3 13B to 1T"
)
_WIDEST = 65536
# No engine holds a parameter's states in fewer bytes of all GPUs together, by what is offloaded: 16 and more with
# nothing (2 + 2 + 12, or DeepSpeed's 14 after a step), only the weight without its optimizer, next to nothing.
_LEAST_BYTES = {"none": 12.0, "optimizer": 2.0, "full": 0.25}


@dataclass(frozen=True)
class Candidate:
    """One way to run it, with what is predicted of it. `step` is None if it does not fit."""

    training: Training
    memory: Memory
    card_gib: float
    step: StepTime | None = None

    @property
    def layout(self) -> Layout:
        return self.training.layout

    @property
    def deciding(self) -> StageMemory:
        """The stage that needs most."""
        return self.memory.stages[self.memory.deciding]

    @property
    def need_gib(self) -> float:
        """GiB of the stage that decides, as the card sees them: reserved and context."""
        return self.deciding.nvidia_smi

    @property
    def is_tight(self) -> bool:
        """Whether the prediction's own error may tip it over."""
        return self.need_gib > TIGHT * self.card_gib

    @cached_property
    def tokens_per_s(self) -> float:
        assert self.step is not None
        return self.training.global_batch * self.training.shape.seq / self.step.step_s

    @cached_property
    def rank(self) -> tuple[float | int, ...]:
        """Ascending: the fastest first, a tight one as if it were slower, to a step of NEAR; then the plainer."""
        run = self.training
        plainness = (
            OFFLOADS.index(run.offload),
            run.vp > 1,
            run.zero_stage > 1,
            run.sequence_parallel,
            RECOMPUTES.index(run.recompute),
            run.pp,
            run.tp,
            run.sharded_optimizer,
            _ENGINES.index(run.engine),
            run.zero_stage,
            run.micro_batch,
        )
        speed = self.tokens_per_s / (WORTH_THE_RISK if self.is_tight else 1.0)
        return (-math.floor(math.log(speed) / math.log(NEAR)), self.is_tight, *plainness, -speed)


@dataclass(frozen=True)
class Searched:
    """`candidates` fit, best first, at most KEPT of a layout. `too_large` has of every layout of which none fits the
    one that comes nearest. `left_out` counts layouts by why they cannot run.

    `fitting` and `not_fitting` count settings; `asked` those whose memory was predicted for it.
    """

    question: Question
    machine: Machine
    candidates: Sequence[Candidate]
    too_large: Sequence[Candidate]
    left_out: Mapping[str, int]
    fitting: int
    not_fitting: int
    asked: int

    @property
    def best_of_layouts(self) -> list[Candidate]:
        """The best candidate of each layout, best first."""
        found: dict[Layout, Candidate] = {}
        for candidate in self.candidates:
            found.setdefault(candidate.layout, candidate)
        return list(found.values())


@dataclass
class _Tally:
    left_out: Counter[str] = field(default_factory=Counter)
    fitting: int = 0
    not_fitting: int = 0
    asked: int = 0


def search(
    question: Question, machine: Machine, constants: Constants = DEFAULT, keep: int = KEPT, first: bool = False
) -> Searched:
    """All that the question leaves open, tried. `first`: stop at the first that fits, whatever its speed."""
    tally, candidates, too_large = _Tally(), [], []
    for layout, obstacle in question.layouts():
        if obstacle is not None:
            tally.left_out[obstacle] += 1
            continue
        best, nearest = _search_layout(question, layout, machine, constants, keep, first, tally)
        candidates += best
        if not best and nearest is not None:
            too_large.append(nearest)
        if first and best:
            break
    return Searched(
        question,
        machine,
        sorted(candidates, key=lambda candidate: candidate.rank),
        sorted(too_large, key=lambda candidate: candidate.need_gib),
        dict(tally.left_out.most_common()),
        tally.fitting,
        tally.not_fitting,
        tally.asked,
    )


def _search_layout(
    question: Question, layout: Layout, machine: Machine, constants: Constants, keep: int, first: bool, tally: _Tally
) -> tuple[list[Candidate], Candidate | None]:
    """(the best of a layout, the one nearest to fitting)."""
    heap: list[tuple[tuple[float, ...], int, Candidate]] = []
    nearest: Candidate | None = None
    batches, ways = question.batches(layout.dp), list(question.ways(layout))
    for way in ways:
        for candidate, fit in _tried(question, way, batches, machine, tally):
            if not fit:
                if nearest is None or candidate.need_gib < nearest.need_gib:
                    nearest = candidate
                continue
            timed = replace(candidate, step=predict_step(candidate.training, machine, constants))
            if first:
                return [timed], None
            # The worst is on top of the heap; of equals the later one is worse.
            entry = (tuple(-each for each in timed.rank), -tally.fitting, timed)
            if len(heap) < keep:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)
    if not ways:
        tally.left_out[NO_ENGINE] += 1
    elif not heap and nearest is None:
        tally.left_out["the batch does not divide so"] += 1
    return [entry[2] for entry in heap], nearest


def _tried(
    question: Question, way: Training, batches: Sequence[tuple[int, int]], machine: Machine, tally: _Tally
) -> Iterator[tuple[Candidate, bool]]:
    """Every setting of a way that fits, and of each series of growing micro-batches the first that does not.

    A larger micro-batch never needs less; parameters, gradients and optimizer depend on neither it nor recomputation.
    """
    # Megatron-LM wants whole rounds of the stages when it interleaves.
    batches = [pair for pair in batches if way.vp == 1 or pair[1] % way.pp == 0]
    series = question.techniques(way.engine, way.tp)
    for place, (parallel, recompute) in enumerate(series):
        for number, (micro_batch, micro_batches) in enumerate(batches):
            training = replace(
                way,
                micro_batch=micro_batch,
                micro_batches=micro_batches,
                recompute=recompute,
                sequence_parallel=parallel,
            )
            memory = predict_memory(training, machine)
            tally.asked += 1
            fit = fits(memory, machine) and _fits_host(training, memory, machine)
            tally.fitting += fit
            candidate = Candidate(training, memory, machine.memory_gib)
            yield candidate, fit
            if fit:
                continue
            tally.not_fitting += len(batches) - number
            states = candidate.deciding
            if states.parameters + states.gradients + states.optimizer > machine.memory_gib:
                # The states alone are too large, so no setting of this way fits.
                tally.not_fitting += len(batches) * (len(series) - place - 1)
                return
            break


def _fits_host(training: Training, memory: Memory, machine: Machine) -> bool:
    """Whether a node's memory, if it is known, holds what its GPUs offload."""
    if training.offload == "none" or machine.host_memory_gib is None:
        return True
    each = max(stage.host for stage in memory.stages)
    return each * min(machine.gpus_per_node, training.gpus) <= machine.host_memory_gib


def fewest_gpus(question: Question, machine: Machine, most: int = 65536) -> int | None:
    """The first doubling of the GPUs, in whole nodes, on which something fits; None if none up to `most` does."""
    per_node = question.gpus_per_node
    gpus = question.gpus
    while gpus < most:
        gpus = 2 * gpus if gpus >= per_node else min(2 * gpus, per_node)
        if search(replace(question, gpus=gpus), machine, first=True).candidates:
            return gpus
    return None


@dataclass(frozen=True)
class Largest:
    """The largest that fits with its search, and the next of the family, which does not fit or leaves no room."""

    model: ModelShape
    searched: Searched
    next_larger: ModelShape | None
    tried: int


def family(model: ModelShape) -> list[ModelShape]:
    """Every shape of the family with the model's vocabulary and sequence, by parameters.

    Widths and depths as the published ones: Brown et al. 2020 (arXiv:2005.14165), table 2.1, 96 x 12288 = 128 a layer;
    Narayanan et al. 2021 (arXiv:2104.04473), table 1, 128 x 25600 = 200; seed 001's 64 x 16384 = 256.
    """
    shapes = [
        replace(model, hidden=hidden, layers=layers, heads=hidden // 128)
        for hidden in (*range(512, 2048, 256), *range(2048, _WIDEST + 1, 1024))
        for layers in (*range(4, 64, 4), *range(64, 128, 8), *range(128, hidden // 96 + 1, 16))
        if 96 * layers <= hidden <= 256 * layers
    ]
    return sorted(shapes, key=lambda shape: shape.params)


def largest(question: Question, model: ModelShape, machine: Machine, constants: Constants = DEFAULT) -> Largest:
    """The largest of the family for which `question`, asked of it, has an answer with room on the card (TIGHT).

    From the largest down, one after the other: a smaller model may fail where a larger one fits, as its layers do not
    divide so. LayoutError if not even the smallest fits.
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
        asked = replace(question, shape=shape)
        if search(asked, with_room, first=True).candidates:
            larger = shapes[place + 1] if place + 1 < len(shapes) else None
            return Largest(shape, search(asked, machine, constants), larger, tried)
    raise LayoutError(
        f"no model of the family fits on {question.gpus} {machine.device} with what is asked for",
        "leave --tp, --pp, --dp and the batch open, or use more GPUs",
    )


@dataclass(frozen=True)
class Figures:
    """What a candidate's step time comes to: throughput, FLOPs by every formula, and what a budget of tokens costs.

    FLOPs are TFLOP/s of one GPU, by the formulas of hpc_gpt.formulas; `budget_tokens` is what `days` and `gpu_hours`
    are for. `mfu` and `hfu` are 0 to 1.
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
    gpu_hours_per_step: float
    budget_tokens: float
    days: float
    gpu_hours: float


def figures_of(training: Training, step: StepTime, machine: Machine, budget_tokens: float) -> Figures:
    """The figures of a training whose step is predicted to take so long; `step.band` gives the range of its seconds."""
    shape, gpus, step_s = training.shape, training.gpus, step.step_s
    counted: dict[str, Any] = {"seq": shape.seq, "global_batch": training.global_batch, "gpus": gpus, "step_s": step_s}
    sizes: dict[str, Any] = {"layers": shape.layers, "hidden": shape.hidden}
    model = formulas.tflops_model(params=shape.params, **sizes, **counted)
    hardware = formulas.tflops_hardware(vocab=shape.padded_vocab, recompute=training.recompute, **sizes, **counted)
    peak = machine.peak_tflops[training.dtype]
    tokens_per_s = training.global_batch * shape.seq / step_s
    seconds = budget_tokens / tokens_per_s
    return Figures(
        step_s=step_s,
        step_s_low=step_s * (1 - min(step.band, 1.0)),
        step_s_high=step_s * (1 + step.band),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / gpus,
        tflops_seed=formulas.tflops_seed(params=shape.params, recompute=training.recompute, **counted),
        tflops_hardware=hardware,
        tflops_model=model,
        mfu=formulas.mfu(model, peak),
        hfu=formulas.hfu(hardware, peak),
        gpu_hours_per_step=gpus * step_s / 3600,
        budget_tokens=budget_tokens,
        days=seconds / _DAY_S,
        gpu_hours=gpus * seconds / 3600,
    )
