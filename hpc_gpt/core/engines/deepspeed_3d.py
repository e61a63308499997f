"""DeepSpeed's pipeline with our own tensor parallelism: tp x pp x dp, ZeRO 1."""

from typing import Any

from hpc_gpt.core.engines.base.deepspeed import DeepspeedFacts
from hpc_gpt.core.engines.base.facts import OUR_MODEL, OUR_PARTS
from hpc_gpt.core.settings.resolved import Resolved


class Deepspeed3d(DeepspeedFacts):
    order, plan_order = 10, 20
    axes = frozenset({"tp", "pp", "cp"})
    zero_stages, default_stage = (0, 1), 1
    shape_parts = OUR_PARTS
    switches = OUR_MODEL | {"sequence_parallel", "partition"}
    alternatives = DeepspeedFacts.alternatives | {"offload": "use --engine deepspeed-zero with --pp 1"}
    compiles_edges = False
    has_fused_kernels = True
    keeps_partitioned_outputs = True  # pipe/engine.py, PartitionedTensor
    buckets_a_reduction = 2  # one of ZeRO's, and one that the pipeline engine allocates (reduce_gradients)

    def config(self, resolved: Resolved) -> dict[str, Any]:
        return super().config(resolved) | {
            "pipeline": {
                # The model itself recomputes (`Block.recompute`), in every engine.
                "activation_checkpoint_interval": 0,
                "use_reentrant": False,
                "pipe_partitioned": False,
                "grad_partitioned": False,
            }
        }


ENGINE = Deepspeed3d()
