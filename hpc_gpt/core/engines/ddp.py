"""PyTorch DDP: every rank has the whole model. For bf16 and fp16 we keep our own fp32 master weights."""

import math
from collections.abc import Iterator
from functools import partial

from hpc_gpt.core.engines.base.facts import OUR_MODEL, OUR_PARTS, EngineFacts
from hpc_gpt.core.engines.base.owners import Deal, owned_by_rank
from hpc_gpt.core.engines.base.training import StateBytes, Training
from hpc_gpt.core.errors import Fault
from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape


class Ddp(EngineFacts):
    order, plan_order = 40, 10
    axes = frozenset({"cp", "ep"})
    shape_parts = OUR_PARTS
    switches = OUR_MODEL | {"sharded_optimizer"}
    alternatives = {
        "zero_stage": "engine.sharded_optimizer = true shards the optimizer, as ZeRO-1 does",
        "offload": "use --engine deepspeed-zero",
    }
    matmuls = frozenset({"none", "fp8-tensor"})
    scales_first = True
    overlaps_reduction = reduces_experts_last = True
    synchronizations = 0.1  # measured on one H200: 3 ms of a step are outside the kernels of its passes
    pads_vocabulary = False

    def own_faults(self, engine: Engine, layout: Layout, train: Train, shape: ModelShape) -> Iterator[Fault]:
        if layout.ep > 1 and engine.sharded_optimizer:
            yield Fault(f"engine.sharded_optimizer needs the same weights on all ranks, but ep is {layout.ep}",
                        "leave it out, or use --engine fsdp, which shards everything")  # fmt: skip

    def rule(self, training: Training) -> str:
        return "fp32" if training.dtype == "fp32" else "masters"

    def state_bytes(self, training: Training) -> StateBytes:
        """With master weights 2 + 4 + 4 + 8, and 2 more for DDP's 16-bit buckets (trainer/engines/master_weights.py);
        of sharded moments those of the rank that has the most."""
        moments = training.moments
        if training.sharded_optimizer and (deals := self.deals(training)):
            bytes_of = training.optimizer_facts.moment_bytes
            moments = deals[0].fullest(lambda one: one.size * bytes_of(bool(one.matrices))) / training.shape.params
        elif training.sharded_optimizer:
            moments /= training.data_ranks
        if training.dtype == "fp32":
            return StateBytes(4, 4, moments, 4, 4)
        bucket = 2 if training.data_ranks > 1 and not training.apart else 0
        return StateBytes(2, 4 + bucket, 4 + moments, 4 + bucket, 4)

    def deals(self, training: Training) -> tuple[Deal, ...]:
        """A sharded optimizer's parameters, or the hidden matrices, of which each rank has all but those of experts
        that ep divides."""
        optimizer, ranks, is_sharded = training.optimizer_facts, training.data_ranks, training.sharded_optimizer
        if training.program_states is not None or not (is_sharded or optimizer.needs_shares):
            return ()
        deal_of = partial(owned_by_rank, training.shape, optimizer.name, hidden_only=not is_sharded)
        if training.ep == 1:
            return (Deal(deal_of(ranks)),)
        dense, experts = deal_of(ranks, training.ep, False), deal_of(training.expert_replicas, training.ep, True)
        return Deal(dense), Deal(experts, training.ep)

    def update_bytes(self, training: Training, params: float, matrix: float, table: float) -> float:
        """The bytes of an update on the rank that updates the most parameters. A stack of matrices needs them while it
        is computed, or while it is sent and two others arrive."""
        deals = self.deals(training)
        if training.sharded_optimizer and deals:
            params = deals[0].fullest(lambda one: one.size)
        optimizer, width = training.optimizer_facts, training.muon_width
        needed = [optimizer.update_bytes(training.optimizer_mode, params, matrix, table)]
        for deal in deals if optimizer.needs_shares else ():
            needed += [optimizer.stack_bytes(width, *stack) for stack in deal.stacks]
            if len(deal.owned) > 1:
                needed += [3.0 * width * math.prod(stack) for stack in deal.stacks]
        return max(needed)

    def update_traffic(self, training: Training) -> tuple[float, float]:
        """Gradients are all-reduced with a sharded optimizer, too; `sends_of_owners` has what follows the update."""
        if training.program_states is not None:
            return super().update_traffic(training)
        summed = self.reduced_bytes(training)
        return summed, summed

    def sends_of_owners(self, training: Training) -> list[tuple[float, int, int]]:
        sends = []
        for deal in self.deals(training):
            sizes = [4.0 * sum(one.size for one in own) for own in deal.owned]
            if training.optimizer_facts.needs_shares:
                sizes = [4.0 * sum(one.size for one in own if not one.matrices) for own in deal.owned]
                sizes += [training.muon_width * math.prod(stack) for stack in deal.stacks]
            sends += [(size, len(deal.owned), deal.stride) for size in sizes if size]
        return sends

    def lasting_bucket(self, training: Training) -> float:
        """The FP8 copies of the layers' weights, one byte per number (trainer/model/fp8.py: WeightsOnce)."""
        return 2.0 * training.shape.layer_weights * training.shape.layers if training.matmul != "none" else 0.0

    def copies_by_layer(self, training: Training) -> bool:
        """Whether gradients are copied by layers, as trainer/engines/master_weights.py does. With several ranks, those
        of the last micro-batch are in DistributedDataParallel's buckets instead."""
        return training.dtype != "fp32" and (training.data_ranks == 1 or training.micro_batches > 1)


ENGINE = Ddp()
