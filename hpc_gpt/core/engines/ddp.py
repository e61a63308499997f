"""PyTorch DDP: every rank has the whole model. For bf16 and fp16 we keep our own fp32 master weights."""

from collections.abc import Iterator

from hpc_gpt.core.engines.base.facts import OUR_MODEL, OUR_PARTS, EngineFacts
from hpc_gpt.core.engines.base.training import StateBytes, Training, plain_states
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
    fast_ratios = {
        "compile": (1.012, 1.003, 1.003),  # edges
        "one_pass_loss": (1.062, 1.005, 1.058),
        "keep_residuals": (1.012, 1.009, 1.010),
        "fused_bias_gradients": (1.013, 1.012, 1.010),
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
        """With master weights 2 + 4 + 4 + 8, the moments over dp if sharded, and 2 more for DDP's 16-bit buckets
        (trainer/engines/master_weights.py)."""
        if training.dtype == "fp32":
            return plain_states(training)
        dp = training.data_ranks
        bucket = 2 if dp > 1 and not training.apart else 0
        moments = training.moments / (dp if training.sharded_optimizer else 1)
        return StateBytes(2, 4 + bucket, 4 + moments, 4 + bucket, 4)

    def update_traffic(self, training: Training) -> tuple[float, float]:
        """A sharded optimizer sends fp32 weights, after gradients that are all-reduced without it, too."""
        summed, back = super().update_traffic(training)
        is_ours = training.program_states is None
        return summed, summed + 4.0 if is_ours and training.sharded_optimizer else back

    def lasting_bucket(self, training: Training) -> float:
        """The FP8 copies of the layers' weights, one byte per number (trainer/model/fp8.py: WeightsOnce)."""
        return 2.0 * training.shape.layer_weights * training.shape.layers if training.matmul != "none" else 0.0

    def copies_by_layer(self, training: Training) -> bool:
        """Whether gradients are copied by layers, as trainer/engines/master_weights.py does. With several ranks, those
        of the last micro-batch are in DistributedDataParallel's buckets instead."""
        return training.dtype != "fp32" and (training.data_ranks == 1 or training.micro_batches > 1)


ENGINE = Ddp()
