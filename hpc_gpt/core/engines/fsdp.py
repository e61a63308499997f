"""PyTorch FSDP2: weights, gradients and optimizer sharded over cp x dp, layers over tp."""

from collections.abc import Iterator

from hpc_gpt.core.engines.base.facts import OUR_MODEL, EngineFacts, Fault
from hpc_gpt.core.engines.base.training import StateBytes, Training
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.shape_split import outer_params


class Fsdp(EngineFacts):
    order, plan_order = 30, 40
    axes = frozenset({"tp", "cp"})
    switches = OUR_MODEL | {"offload", "prefetch", "reshard"}
    alternatives = {
        "zero_stage": "fsdp shards everything, as ZeRO-3 does; engine.reshard = false keeps the weights (ZeRO-2)",
        "sharded_optimizer": "fsdp always shards the optimizer; leave it out",
    }
    converts = frozenset({"layout.tp", "layout.cp", "layout.dp"})
    selects_operators = True
    matmuls = frozenset({"none", "fp8-tensor"})
    scales_first = is_pytorchs = True
    overlaps_reduction = True
    synchronizations = 0.1  # as for ddp: one H200, gpt2 at 510k tokens/s per GPU; with 25 ms per step it would be 390k
    pads_vocabulary = False

    def offload_faults(self, engine: Engine) -> Iterator[Fault]:
        if engine.offload != "full":
            yield Fault("fsdp offloads parameters, gradients and optimizer together, not the optimizer alone",
                        'use engine.offload = "full"')  # fmt: skip

    def rule(self, training: Training) -> str:
        return "fsdp"

    def sharding(self, training: Training) -> int:
        """ZeRO stage 3, as it shards everything, unless a lower stage is requested."""
        return training.zero_stage or 3

    def optimizer_ranks(self, training: Training) -> int:
        return training.data_ranks

    def state_bytes(self, training: Training) -> StateBytes:
        """Weights 4, gradients 4, moments 8, all over dp (PyTorch's FSDP with mixed precision)."""
        dp = training.data_ranks
        # If not everything is sharded, weights stay gathered in 16 bits, in addition to their fp32 shards.
        gathered = 2 if training.zero_stage in (1, 2) else 0
        states = StateBytes(4 / dp + gathered, 4 / dp, 8 / dp, 4 / dp, 4 / dp)
        if training.offload == "full":
            return StateBytes(0, 0, 0, 0, 0, states.parameters + states.gradients + states.optimizer)
        return states

    def update_bytes(self, training: Training, params: float, matrix: float, table: float) -> float:
        """The bytes that ddp's update moves, for a rank's part of each parameter."""
        return super().update_bytes(training, params, matrix, table) / training.data_ranks

    def gathered(self, training: Training, gradients: bool = True) -> tuple[float, float]:
        """The current layer and the next one, and through the backward pass the root's own weights (embeddings, head);
        gradients are reduced in fp32 unless the training states another format."""
        shape, width = training.shape, 4 if training.dtype == "fp32" else 2
        layer = training.layer_params
        outer = sum(outer_params(shape, training.tp, training.pp, stage) for stage in {0, training.pp - 1})
        reduced = width + (0 if training.grad_sum in ("bf16", "fp16") else 4) if gradients else 0
        return width * (2 * layer + outer) + reduced * layer, width * (layer + outer) + reduced * outer


ENGINE = Fsdp()
