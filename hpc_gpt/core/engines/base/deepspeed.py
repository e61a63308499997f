"""The base of the engines that run DeepSpeed: ZeRO's stages, states and buckets, and the memory for offloading.

The figures are read from the code of DeepSpeed 0.19.8, and measured with torch's profiler on a CPU: all allocations of
a step, 19M parameters, at one and two ranks, in bf16 and fp32 (tests/planner/test_held_bytes.py does it at one rank).
Those of fp16 are only read: DeepSpeed does not train in it on a CPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from hpc_gpt.core.engines.base.ds_config import (
    DS_CONFIG,
    LIVE_ELEMENTS,
    PREFETCH_ELEMENTS,
    SUB_GROUP_ELEMENTS,
    deepspeed_config,
    longest_bucket,
    stage_that_runs,
    takes_bf16_optimizer,
)
from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.engines.base.training import StateBytes, Training, zero_states
from hpc_gpt.core.errors import Fault
from hpc_gpt.core.optimizers import OptimizerFacts
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.shape_split import outer_params

# DeepSpeed computes the norm of a gradient in pieces of so many elements.
NORM_ELEMENTS = 2.5e8


class DeepspeedFacts(EngineFacts):
    """An engine that runs DeepSpeed."""

    packages: ClassVar[tuple[str, ...]] = ("torch", "deepspeed")
    alternatives = {"sharded_optimizer": "engine.zero_stage = 1 shards the optimizer"}
    trains_fp16_on_cpu = False
    buckets_a_reduction: ClassVar[int] = 1

    def stage_that_runs(self, stage: int) -> int:
        return stage_that_runs(stage)

    def has_optimizer(self, optimizer: OptimizerFacts) -> bool:
        return not optimizer.needs_shares

    def offload_faults(self, engine: Engine) -> Iterator[Fault]:
        stage = engine.zero_stage or 0
        if engine.offload == "full" and stage != 3:
            yield Fault(f"engine.offload = full moves parameters, which only ZeRO-3 can; engine.zero_stage is {stage}",
                        'use --zero-stage 3, or engine.offload = "optimizer"')  # fmt: skip

    def config_files(self, resolved: Resolved) -> dict[str, Any]:
        return {DS_CONFIG: self.config(resolved)}

    def config(self, resolved: Resolved) -> dict[str, Any]:
        """The configuration for `deepspeed.initialize`."""
        return deepspeed_config(resolved)

    # --- states

    def rule(self, training: Training) -> str:
        if training.dtype in ("fp32", "fp16"):
            return "fp32" if training.dtype == "fp32" else "deepspeed-fp16"
        return "bf16-optimizer-immediate" if self._takes_bf16_optimizer(training) else "deepspeed-bf16"

    def state_bytes(self, training: Training) -> StateBytes:
        """Bytes per parameter. fp16 by DeepSpeed: 2 + 2 + 12, divided by ZeRO's stages. bf16: the same with gradients
        summed in fp32 (data_types.grad_accum_dtype), 4 bytes and no copy in the step; ZeRO-1 in BF16_Optimizer
        2 + 4 + 12/dp, as a 16-bit gradient is added to its fp32 sum at once (immediate_grad_update). fp32: 4 + 4 + 12,
        as ZeRO's master weights are copies there, too.

        ZeRO-3 keeps the sums of its gradients from step to step (grad_partitions_flat_buffer), and copies them to the
        update's fp32 gradients in groups of 10^9. With offload the host has master weights, moments and fp32 gradients,
        16; under ZeRO-1 and -2 also a copy of the weights that is sent back and the sums of a step, under ZeRO-3 the
        sums twice (stage_1_and_2.py, stage3.py).
        """
        stage, dp, dtype = training.zero_stage, training.data_ranks, training.dtype
        if self._takes_bf16_optimizer(training):
            return StateBytes(2, 4, (4 + training.moments) / dp, 4, 0)
        weight = training.width
        gradient = 4 if dtype == "bf16" else weight
        states = zero_states(training, weight, gradient, 4)
        if training.offload != "none" and stage in (1, 2):
            sums = gradient if training.micro_batches > 1 or gradient != weight else 0
            return replace(states, host=states.host + (weight + sums) / dp)
        if training.offload != "none" and stage == 3:
            return replace(states, host=states.host + gradient / dp)
        if stage == 3:
            # The fp32 copies of one group at a time (stage3.py, _prepare_fp32_grad_for_sub_group).
            groups = training.shape.params / training.tp / dp / SUB_GROUP_ELEMENTS
            copy = 4 / dp / max(1.0, groups)
            return replace(states, step_gradients=states.gradients + copy, renewed=copy)
        return states

    def _takes_bf16_optimizer(self, training: Training) -> bool:
        return takes_bf16_optimizer(training.dtype, stage_that_runs(training.zero_stage), training.offload)

    def update_bytes(self, training: Training, params: float, matrix: float, table: float) -> float:
        """A tensor is a rank's flat share of all parameters with the same weight decay. So the loop has one tensor, and
        needs twice as much as foreach (bytes per parameter, ZeRO-1 in bf16, measured: 18 fused, 22 foreach, 26
        for-loop).

        ZeRO-1 and -2 flatten fp32 and fp16 gradients, and free the parameters' own gradients before the update; in bf16
        the sums are already flat. Before the update ZeRO computes the norm of each gradient from a copy in fp64, but in
        BF16_Optimizer.
        """
        stage, dtype = training.zero_stage, training.dtype
        if training.offload != "none":
            return super().update_bytes(training, params, matrix, table)
        share = params / training.data_ranks
        if stage == 3:
            share = min(SUB_GROUP_ELEMENTS, share)
        made = {"foreach": 4.0, "for-loop": 8.0}.get(training.optimizer_mode, 0.0)
        largest = table / training.data_ranks if stage == 3 else min(table, share)
        norm = 0.0 if self._takes_bf16_optimizer(training) else 8 * largest
        if stage == 3 or dtype == "bf16":
            return max(norm, share * made)
        return max(norm, share * max(training.width, made + (0 if dtype == "fp32" else -2)))

    # --- communication

    def reduced_bytes(self, training: Training) -> float:
        """The bytes that ds_config.py asks for: fp16 is summed in fp16."""
        return 2.0 if training.dtype == "fp16" else super().reduced_bytes(training)

    def update_traffic(self, training: Training) -> tuple[float, float]:
        """In our configuration gradients are all-reduced, under ZeRO-2 in every micro-batch, and each rank's weights
        are gathered after its update (counted: tests/distributed/test_planned_bytes.py)."""
        if training.program_states is not None:
            return super().update_traffic(training)
        summed = self.reduced_bytes(training) * (training.micro_batches if training.zero_stage == 2 else 1)
        return summed, summed + training.width

    # --- buffers

    def gathered(self, training: Training, gradients: bool = True) -> tuple[float, float]:
        """Under ZeRO-3, in the passes: the gathered layers, and the gradients of one layer; in the loss: embeddings and
        head with their gradients. stage3_max_live_parameters stay gathered (1e9, which is also DeepSpeed's default). In
        our programs a single rank owns all weights, and gathers only those on the host."""
        owns_all = training.data_ranks == 1 and training.program_states is None and training.offload != "full"
        if training.zero_stage != 3 or owns_all:
            return 0.0, 0.0
        shape, width = training.shape, training.width
        layer = training.layer_params
        outer = sum(outer_params(shape, training.tp, training.pp, stage) for stage in {0, training.pp - 1})
        live = max(layer, min(LIVE_ELEMENTS, shape.layers * layer + outer))
        if not gradients:
            return width * live, width * max(live, layer + outer)
        return width * (live + layer), width * (max(live, layer + outer) + outer)

    def buckets(self, training: Training, params: float) -> float:
        """Buckets, the copies that are sent, and other memory of a reduction, in our configuration (ds_config.py). A
        gradient longer than a bucket is reduced by itself; DeepSpeed allocates a bucket of the whole configured
        length."""
        stage, ranks = training.zero_stage, training.data_ranks
        width = training.width
        sent = 2 if training.dtype == "fp16" else 4  # data_types.grad_accum_dtype, communication_data_type
        bucket = self.bucket_elements(training)
        filled, norm = min(bucket, params), 0.0
        if ranks == 1:
            # The embedding's gradient is longer than these smaller buckets, and offloading takes its norm in fp64.
            table = training.shape.padded_vocab / training.tp * training.shape.hidden
            filled = min(max(bucket, table), params)
            norm = 8 * min(table, NORM_ELEMENTS) if training.offload != "none" else 0.0
        if self.rule(training) == "bf16-optimizer-immediate":
            # runtime/engine.py, allreduce_no_retain: the fp32 gradients are one tensor, flattened in one piece.
            return 4 * params if ranks > 1 else 0.0
        if stage == 1:
            return sent * bucket * self.buckets_a_reduction
        if stage == 2:
            # With two or more ranks there are two buckets: one is filled while the other is sent (overlap_comm).
            count = 2 if ranks > 1 and training.offload == "none" else 1
            # The flattened gradients, and their fp32 copy that is sent.
            copies = width + sent if width != sent else width if ranks > 1 else 0
            # If the sums are not wider, a further micro-batch keeps its gradients separate from them until its end.
            further = ranks == 1 and width == sent and training.micro_batches > 1 and training.offload == "none"
            return width * bucket * count + copies * filled + (width * params if further else 0.0) + norm
        # reduce_scatter_coalesced: the concatenated gradients of the bucket, and this rank's share of them.
        prefetched = width * min(PREFETCH_ELEMENTS, params) if ranks > 1 else 0.0
        return sent * bucket + sent * filled * (1 + 1 / ranks) + prefetched + norm

    def lasting_bucket(self, training: Training) -> float:
        """ZeRO-3 keeps its bucket."""
        if training.zero_stage != 3:
            return 0.0
        return self.bucket_elements(training) * (2 if training.dtype == "fp16" else 4)

    def bucket_elements(self, training: Training) -> int:
        """Elements of a bucket in our configuration."""
        return longest_bucket(training.data_ranks, training.shape.params)
