"""Every way of running a model on so many GPUs: which fit in memory, and which of those is fastest.

Memory is asked first, time only of what fits. Of a split of the GPUs the best few are kept, so that what a search
holds does not grow with what it looks at.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from hpc_gpt.plan.constants import DEFAULT, Constants
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.memory import fits, predict_memory
from hpc_gpt.plan.prediction import Memory, StepTime
from hpc_gpt.plan.question import RECOMPUTES, Question, Split, States
from hpc_gpt.plan.step_time import predict_step
from hpc_gpt.plan.training import Training
from hpc_gpt.plan.translation import Traits
from hpc_gpt.settings.engines import OFFERS

KEPT = 3  # of each split of the GPUs
# Speeds that share a step of this ratio count as one, and the plainer settings come first.
NEAR = 1.01
# From this share of the card on a prediction leaves no room for its own error: such a candidate must be faster than
# one with room by as much as a run is worth that may end for want of memory.
TIGHT = 0.92
WORTH_THE_RISK = 1.15
_OFFLOADS = ("none", "optimizer", "full")
_ENGINES = ("deepspeed-3d", "ddp", "deepspeed-zero", "fsdp", "megatron-lm", "hf-deepspeed")


@dataclass(frozen=True)
class Candidate:
    """One way to run it, with what is predicted of it. `step` is None where it does not fit."""

    training: Training
    memory: Memory
    card_gib: float
    step: StepTime | None = None

    @property
    def split(self) -> Split:
        return Split(self.training.tp, self.training.pp, self.training.dp)

    @property
    def need_gib(self) -> float:
        """GiB of the stage that decides, as the card sees them: reserved and context."""
        return self.memory.stages[self.memory.deciding].nvidia_smi

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
            _OFFLOADS.index(run.offload),
            run.vp > 1,
            run.zero_stage > 1,
            run.sequence_parallel,
            RECOMPUTES.index(run.recompute),
            run.pp,
            run.tp,
            run.distributed_optimizer,
            _ENGINES.index(run.engine) if run.engine in _ENGINES else len(_ENGINES),
            run.zero_stage,
            run.micro_batch,
        )
        speed = self.tokens_per_s / (WORTH_THE_RISK if self.is_tight else 1.0)
        return (-math.floor(math.log(speed) / math.log(NEAR)), self.is_tight, *plainness, -speed)


@dataclass(frozen=True)
class Searched:
    """`candidates` fit, best first, at most KEPT of a split. `too_large` has of every split of which none fits the one
    that comes nearest. `left_out` counts splits by why they cannot run.

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
    def best_of_splits(self) -> list[Candidate]:
        """The best candidate of each split, best first."""
        found: dict[Split, Candidate] = {}
        for candidate in self.candidates:
            found.setdefault(candidate.split, candidate)
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
    for split, obstacle in question.splits():
        if obstacle is not None:
            tally.left_out[obstacle] += 1
            continue
        best, nearest = _search_split(question, split, machine, constants, keep, first, tally)
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


class _Way(NamedTuple):
    """What a series of settings shares: all that decides parameters, gradients and optimizer of a stage."""

    engine: str
    split: Split
    states: States
    chunks: int


def _search_split(
    question: Question, split: Split, machine: Machine, constants: Constants, keep: int, first: bool, tally: _Tally
) -> tuple[list[Candidate], Candidate | None]:
    """(the best of a split, the one nearest to fitting)."""
    heap: list[tuple[tuple[float, ...], int, Candidate]] = []
    nearest: Candidate | None = None
    batches = question.batches(split.dp)
    ways = [
        _Way(engine, split, states, chunks)
        for engine in question.engines
        for states in question.states(engine, split)
        for chunks in question.chunks(engine, split.pp)
        if question.recomputes(engine) and question.sequence_parallel(engine, split.tp)
    ]
    for way in ways:
        for candidate, fit in _tried(question, way, batches, machine, tally):
            if not fit:
                if nearest is None or candidate.need_gib < nearest.need_gib:
                    nearest = candidate
                continue
            timed = replace(candidate, step=predict_step(candidate.training, machine, constants))
            if first:
                return [timed], None
            # The worst stands on top of the heap; of equals the later one is worse.
            entry = (tuple(-each for each in timed.rank), -tally.fitting, timed)
            if len(heap) < keep:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)
    if not ways:
        tally.left_out["no engine that is asked for splits so"] += 1
    elif not heap and nearest is None:
        tally.left_out["the batch does not divide so"] += 1
    return [entry[2] for entry in heap], nearest


def _tried(
    question: Question, way: _Way, batches: Sequence[tuple[int, int]], machine: Machine, tally: _Tally
) -> Iterator[tuple[Candidate, bool]]:
    """Every setting that fits, and of each series of growing micro-batches the first that does not.

    A larger micro-batch never needs less; parameters, gradients and optimizer depend on neither it nor recomputation.
    """
    engine, split, states, chunks = way
    # Megatron-LM wants whole rounds of the stages when it interleaves.
    batches = [pair for pair in batches if chunks == 1 or pair[1] % split.pp == 0]
    series = [
        (parallel, recompute)
        for parallel in question.sequence_parallel(engine, split.tp)
        for recompute in question.recomputes(engine)
    ]
    deals_out = "offload_ratio" in OFFERS[engine].switches and states.zero_stage == 3 and states.offload != "none"
    blocks, traits = question.stage_layers(split.pp), question.traits.get(engine, Traits())
    for place, (parallel, recompute) in enumerate(series):
        for number, (micro_batch, micro_batches) in enumerate(batches):
            training = Training(
                shape=question.shape,
                tp=split.tp,
                pp=split.pp,
                dp=split.dp,
                vp=chunks,
                micro_batch=micro_batch,
                micro_batches=micro_batches,
                recompute=recompute,
                sequence_parallel=parallel,
                zero_stage=states.zero_stage,
                dtype=question.dtype,
                engine=engine,
                distributed_optimizer=states.distributed_optimizer,
                offload=states.offload,
                offload_ratio=question.offload_ratio if deals_out else 1.0,
                stage_layers=blocks,
                optimizer_mode=question.optimizer_mode,
                flash=traits.flash,
                compiled=traits.compiled,
                activations_on_host=traits.activations_on_host,
                loss_chunks=traits.loss_chunks,
            )
            memory = predict_memory(training, machine)
            tally.asked += 1
            fit = fits(memory, machine) and _fits_host(training, memory, machine)
            tally.fitting += fit
            yield Candidate(training, memory, machine.memory_gib), fit
            if fit:
                continue
            tally.not_fitting += len(batches) - number
            if _states_gib(memory) > machine.memory_gib:
                tally.not_fitting += len(batches) * (len(series) - place - 1)
                return
            break


def _fits_host(training: Training, memory: Memory, machine: Machine) -> bool:
    """Whether a node's memory, where it is known, holds what its GPUs offload."""
    if training.offload == "none" or machine.host_memory_gib is None:
        return True
    each = max(stage.host for stage in memory.stages)
    return each * min(machine.gpus_per_node, training.gpus) <= machine.host_memory_gib


def _states_gib(memory: Memory) -> float:
    """Of the stage that decides: where its states alone are too large, no setting of the series fits."""
    stage = memory.stages[memory.deciding]
    return stage.parameters + stage.gradients + stage.optimizer
