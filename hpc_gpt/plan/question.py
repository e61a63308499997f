"""What a search is asked: a model on so many GPUs, what is settled and what is open."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpc_gpt.plan.training import Offload, OptimizerMode, Recompute, Shape
from hpc_gpt.plan.translation import Traits
from hpc_gpt.settings.engines import OFFERS
from hpc_gpt.settings.experiment import Partition
from hpc_gpt.settings.model_shape import ModelShape, partition_layers

# Least to most, so that of equals the plainer comes first.
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
TP_SPANS = "tp would span nodes"
# Those that run without anything of the user's own; megatron-lm wants a checkout, hf-deepspeed another model.
USUAL_ENGINES = ("deepspeed-3d", "deepspeed-zero", "fsdp", "ddp")


class Split(NamedTuple):
    """GPUs dealt out."""

    tp: int
    pp: int
    dp: int

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}"


class States(NamedTuple):
    """How an engine holds parameters, gradients and optimizer."""

    zero_stage: int
    offload: Offload
    distributed_optimizer: bool


@dataclass(frozen=True)
class Question:
    """`settled` holds what is not to be searched, by the names of a Training's fields; `global_batch` is None where
    `settled` has micro_batches, and then follows from them.

    `traits` are by engine, without any where it has none. `model` is for a `partition` that is not even.
    """

    shape: Shape
    gpus: int
    gpus_per_node: int
    dtype: str
    global_batch: int | None
    engines: tuple[str, ...] = USUAL_ENGINES
    settled: Mapping[str, Any] = field(default_factory=dict)
    traits: Mapping[str, Traits] = field(default_factory=dict)
    tp_across_nodes: bool = False
    partition: Partition = "layers"
    model: ModelShape | None = None
    optimizer_mode: OptimizerMode = "fused"
    offload_ratio: float = 1.0  # where ZeRO-3 offloads

    def choices(self, name: str, known: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values to try of a field: the settled one alone, or all that are known."""
        return (self.settled[name],) if name in self.settled else known

    def splits(self) -> Iterator[tuple[Split, str | None]]:
        """Every (tp, pp, dp) of the GPUs, with why it cannot run where it cannot; None where it can."""
        for tp in divisors(self.gpus):
            for pp in divisors(self.gpus // tp):
                split = Split(tp, pp, self.gpus // (tp * pp))
                if all(self.settled.get(axis, size) == size for axis, size in split._asdict().items()):
                    yield split, self._obstacle(split)

    def _obstacle(self, split: Split) -> str | None:
        """As `check_split`, `check_nodes` and `solve_batch` refuse it, in a few words."""
        tp, pp, dp = split
        if self.shape.heads % tp:
            return "tp does not divide the heads"
        if self.shape.vocab % tp:
            return "tp does not divide the padded vocabulary"
        if pp > self.shape.layers:
            return "more stages than layers"
        if isinstance(self.partition, tuple) and not self._deals_out(self.partition, pp):
            return "engine.partition does not deal the layers out over pp"
        if min(self.gpus, self.gpus_per_node) % tp and not self.tp_across_nodes:
            return TP_SPANS
        if self.global_batch is not None and self.global_batch % dp:
            return "dp does not divide the global batch"
        return None

    def _deals_out(self, blocks: tuple[int, ...], pp: int) -> bool:
        return len(blocks) == pp and sum(blocks) == self.shape.layers and min(blocks) > 0

    def batches(self, dp: int) -> list[tuple[int, int]]:
        """(micro_batch, micro_batches) of every way to deal out the batch, the smallest micro-batch first."""
        if self.global_batch is None:
            return [
                (size, self.settled["micro_batches"]) for size in self.choices("micro_batch", (1, 2, 4, 8, 16, 32, 64))
            ]
        if self.global_batch % dp:
            return []
        share = self.global_batch // dp
        pairs = [(size, share // size) for size in divisors(share)]
        return [pair for pair in pairs if self._batch_as_settled(pair)]

    def _batch_as_settled(self, pair: tuple[int, int]) -> bool:
        return all(self.settled.get(name, size) == size for name, size in zip(_BATCH, pair, strict=True))

    def states(self, engine: str, split: Split) -> list[States]:
        """How the engine can hold its states under that split, as `settle_engine` allows it."""
        offer = OFFERS[engine]
        if (split.tp > 1 and "tp" not in offer.axes) or (split.pp > 1 and "pp" not in offer.axes):
            return []
        found = []
        for stage in self.choices("zero_stage", offer.zero_stages):
            if stage not in offer.zero_stages or (split.pp > 1 and stage > 1):
                continue
            if stage == 0 and len(offer.zero_stages) > 1 and self.dtype != "fp32":
                # Runs as ZeRO-1 (ds_config.zero_stage); where it was asked for, that is what it means.
                if "zero_stage" not in self.settled:
                    continue
                stage = 1
            for offload in self.choices("offload", ("none", "optimizer", "full")):
                if not _can_offload(engine, stage, offload):
                    continue
                for sharded in self.choices("distributed_optimizer", (False, True)):
                    if not sharded or ("sharded_optimizer" in offer.switches and split.dp > 1):
                        found.append(States(stage, offload, sharded))
        return found

    def sequence_parallel(self, engine: str, tp: int) -> list[bool]:
        """With and without, where the engine has it and the group divides the sequence."""
        can = "sequence_parallel" in OFFERS[engine].switches and tp > 1 and self.shape.seq % tp == 0
        return [wanted for wanted in self.choices("sequence_parallel", (False, True)) if can or not wanted]

    def chunks(self, engine: str, pp: int) -> list[int]:
        """Interleaved chunks a stage: Megatron-LM's alone, which wants stages and chunks of one depth."""
        if engine != "megatron-lm":
            return [chunks for chunks in self.choices("vp", (1,)) if chunks == 1]
        if self.shape.layers % pp:
            return []
        deep = self.shape.layers // pp
        return [chunks for chunks in self.choices("vp", divisors(deep) if pp > 1 else (1,)) if deep % chunks == 0]

    def stage_layers(self, pp: int) -> tuple[int, ...] | None:
        """Layers of each stage; None where they are as even as can be."""
        if self.partition == "layers" or pp == 1 or self.model is None:
            return None
        return _blocks(self.model, pp, self.partition)

    def recomputes(self, engine: str) -> list[Recompute]:
        known = [way for way in RECOMPUTES if engine != "hf-deepspeed" or way != "selective"]
        return [way for way in self.choices("recompute", RECOMPUTES) if way in known]


_BATCH = ("micro_batch", "micro_batches")


def _can_offload(engine: str, stage: int, offload: Offload) -> bool:
    if offload == "none":
        return True
    if "offload" not in OFFERS[engine].switches:
        return False
    if engine == "fsdp":
        return offload == "full"
    return stage >= 1 and (offload != "full" or stage == 3)


@functools.cache
def _blocks(model: ModelShape, pp: int, partition: Partition) -> tuple[int, ...]:
    return tuple(partition_layers(model, pp, partition))


def divisors(number: int) -> tuple[int, ...]:
    """All of them, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return (*small, *(number // size for size in reversed(small) if size * size != number))
