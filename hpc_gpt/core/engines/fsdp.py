"""PyTorch FSDP2: weights, gradients and optimizer sharded over cp x dp, or a part of it; layers over tp."""

from collections.abc import Iterator
from typing import Any

from hpc_gpt.core.engines.base.facts import OUR_MODEL, OUR_PARTS, EngineFacts
from hpc_gpt.core.engines.base.owners import Deal
from hpc_gpt.core.engines.base.training import StateBytes, Training
from hpc_gpt.core.engines.ddp import ENGINE as DDP
from hpc_gpt.core.errors import Fault
from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.shape_split import outer_params

# Parameters of blocks that are gathered together: a block of fewer is computed in less time than its hooks take.
GATHERED = 32e6


class Fsdp(EngineFacts):
    order, plan_order = 30, 40
    axes = frozenset({"tp", "cp", "ep"})
    has_replicas = True
    shape_parts = OUR_PARTS
    switches = OUR_MODEL | {"offload", "prefetch", "reshard", "gather_blocks"}
    alternatives = {
        "zero_stage": "fsdp shards everything, as ZeRO-3 does; engine.reshard = false keeps the weights (ZeRO-2)",
        "sharded_optimizer": "fsdp always shards the optimizer; leave it out",
    }
    selects_operators = True
    matmuls = frozenset({"none", "fp8-tensor"})
    scales_first = is_pytorchs = True
    overlaps_reduction = True
    synchronizations = 0.1  # measured on one H200: gpt2 at 510k tokens/s, 390k if a step waited 25 ms
    pads_vocabulary = False

    def offload_faults(self, engine: Engine) -> Iterator[Fault]:
        if engine.offload != "full":
            yield Fault("fsdp offloads parameters, gradients and optimizer together, not the optimizer alone",
                        'use engine.offload = "full"')  # fmt: skip

    def own_faults(self, engine: Engine, layout: Layout, train: Train, shape: ModelShape) -> Iterator[Fault]:
        if layout.ep > 1 and layout.shard is not None:
            yield Fault(f"layout.shard is {layout.shard} with ep {layout.ep}, whose experts have shards of their own",
                        "leave layout.shard out, or use --ep 1", of_layout=True)  # fmt: skip

    def rule(self, training: Training) -> str:
        return DDP.rule(training) if is_whole(training) else "fsdp"

    def stated_traits(self, engine: Engine) -> dict[str, Any]:
        own = {"gather_blocks": engine.gather_blocks, "keeps_weights": not engine.reshard}
        return super().stated_traits(engine) | own

    def sharding(self, training: Training) -> int:
        """ZeRO stage 3, as it shards everything, unless a lower stage is requested, or there are no ranks to share."""
        return 0 if is_whole(training) else training.zero_stage or (2 if training.keeps_weights else 3)

    def optimizer_ranks(self, training: Training) -> int:
        return training.shards

    def state_bytes(self, training: Training) -> StateBytes:
        """Weights 4, gradients 4, moments 8, all over the ranks that shard (PyTorch's FSDP with mixed precision)."""
        if is_whole(training):
            return DDP.state_bytes(training)
        dp = training.shards
        # If not everything is sharded, weights stay gathered in 16 bits, in addition to their fp32 shards.
        gathered = training.width if self.sharding(training) < 3 else 0
        # Then gradients are whole, too, until the last micro-batch.
        gradients = 4 if training.keeps_weights and training.micro_batches > 1 else 4 / dp
        states = StateBytes(4 / dp + gathered, gradients, training.moments / dp, 4 / dp, 4 / dp)
        if training.offload == "full":
            return StateBytes(0, 0, 0, 0, 0, states.parameters + states.gradients + states.optimizer)
        return states

    def update_bytes(self, training: Training, params: float, matrix: float, table: float) -> float:
        """ddp's for the rank's shard alone, or for whole matrices, of which two more are under way."""
        if is_whole(training):
            return DDP.update_bytes(training, params, matrix, table)
        if training.optimizer_facts.needs_shares:
            matrix *= training.tp * training.muon_width / 2
            return super().update_bytes(training, params / training.shards, matrix, table) + 4 * matrix
        return super().update_bytes(training, params, matrix, table) / training.shards

    def deals(self, training: Training) -> tuple[Deal, ...]:
        return DDP.deals(training) if is_whole(training) else ()

    def lasting_bucket(self, training: Training) -> float:
        return DDP.lasting_bucket(training) if is_whole(training) else 0.0

    def copies_by_layer(self, training: Training) -> bool:
        return is_whole(training) and DDP.copies_by_layer(training)

    def update_traffic(self, training: Training) -> tuple[float, float]:
        """The traffic of an update: weights that stay gathered are gathered anew after it."""
        if training.program_states is not None:
            return super().update_traffic(training)
        return self.reduced_bytes(training), training.width

    def blocks_gathered(self, training: Training) -> int:
        if training.program_states is not None:
            return 1
        return training.gather_blocks or blocks_by_size(training.layer_params, training.shape.layers)

    def gathered(self, training: Training, gradients: bool = True) -> tuple[float, float]:
        """Two groups of blocks are gathered at once, the current one and the next, and during the backward pass the
        root's own weights (embeddings, head). Gradients are reduced in fp32 unless the training states another format.
        """
        if is_whole(training):
            return 0.0, 0.0
        shape, width = training.shape, training.width
        layer = training.layer_params * self.blocks_gathered(training)
        outer = sum(outer_params(shape, training.tp, training.pp, stage) for stage in {0, training.pp - 1})
        reduced = width + (0 if training.grad_sum in ("bf16", "fp16") else 4) if gradients else 0
        return width * ((3 if training.program_states is None else 2) * layer + outer) + reduced * layer, width * (
            layer + outer
        ) + reduced * outer


def is_whole(training: Training) -> bool:
    """Whether our engine shards nothing, as a data axis of one rank has nobody to share with, and trains as ddp does
    (trainer/engines/fsdp.py). Offloaded states keep FSDP's hooks, which copy them; so does a model over tp, whose
    16-bit weights come and go with them: 2 bytes a parameter less."""
    alone = training.tp == training.data_ranks == 1 and not training.apart
    return training.program_states is None and alone and training.offload != "full"


def blocks_by_size(params: float, layers: int) -> int:
    """The default number of blocks of so many parameters on a rank: about GATHERED parameters, at most a quarter of the
    layers.

    >>> [blocks_by_size(millions * 1e6, layers) for millions, layers in ((7, 12), (7, 48), (31, 48), (200, 32))]
    [3, 5, 1, 1]
    """
    return max(1, min(round(GATHERED / params), layers // 4))


ENGINE = Fsdp()
