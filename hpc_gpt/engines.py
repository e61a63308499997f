"""What each engine offers: which switches it takes, and which combinations cannot run."""

from __future__ import annotations

from dataclasses import replace

from hpc_gpt.errors import ConfigError, LayoutError
from hpc_gpt.experiment import Engine
from hpc_gpt.layout import Layout

# The ZeRO stage an engine runs where the experiment names none; the others do not shard by ZeRO.
_DEFAULT_ZERO = {"deepspeed-3d": 1, "deepspeed-zero": 1, "hf-deepspeed": 3}


def settle_engine(engine: Engine, layout: Layout) -> Engine:
    """The engine with every switch settled. Raises ConfigError or LayoutError for what cannot run."""
    engine = replace(
        engine, zero_stage=_DEFAULT_ZERO.get(engine.name, 0) if engine.zero_stage is None else engine.zero_stage
    )
    assert engine.zero_stage is not None
    if engine.zero_stage not in (0, 1, 2, 3):
        raise ConfigError(f"engine.zero_stage is {engine.zero_stage}, but must be 0, 1, 2 or 3", "use 1")
    if layout.pp > 1 and engine.zero_stage > 1:
        raise LayoutError(
            f"pp {layout.pp} with ZeRO-{engine.zero_stage} cannot run: a pipeline keeps its gradients between "
            "micro-batches, ZeRO-2 and -3 give them away",
            "use --zero-stage 1, or --pp 1 on an engine that shards gradients",
        )
    if engine.name == "deepspeed-3d" and engine.zero_stage > 1:
        raise ConfigError(f"engine deepspeed-3d runs ZeRO 0 and 1, not {engine.zero_stage}", "use --zero-stage 1")
    return engine
