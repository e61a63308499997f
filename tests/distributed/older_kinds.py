"""The kinds of checkpoints that 0.3 wrote, and the training that each of them comes from.

    python -m tests.distributed.older_kinds FOLDER      (with RANK, WORLD_SIZE and LOCAL_RANK)

is one rank, and makes FOLDER/KIND/step-00000004 of every kind that has so many ranks. `older_checkpoints` puts this
file into a tree of the old commit, so it imports only what both versions have.
"""

import json
import math
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.trainer.engines import protocol
from hpc_gpt.trainer.ranks import Ranks
from tests.distributed.equality_cases import resolve  # its module has another name in 0.3
from tests.distributed.groups import forget, leave, meet

SAVED, STEPS = 4, 7  # three steps come after the checkpoint
SKIPPED = 1  # the step of fp16's kinds whose loss is not finite
VOCAB, SEQ, GLOBAL_BATCH = 29, 8, 8
DENSE: dict[str, Any] = {"hidden": 12, "layers": 2, "heads": 2}
# A dense layer before one with experts, whose biases choose.
MIXTURE: dict[str, Any] = {
    "hidden": 12, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 6, "ffn": 20, "mlp": "swiglu", "norm": "rmsnorm",
    "positions": "rope", "bias": "none", "tied": False, "experts": 4, "experts_per_token": 2, "expert_ffn": 8,
    "dense_layers": 1, "router": "sigmoid", "router_bias": True, "norm_topk": True, "shared_ffn": 8,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "hidden": 12, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 20, "mlp": "swiglu", "norm": "rmsnorm",
    "positions": "rope", "bias": "qkv", "norm_eps": 1e-6,
}  # fmt: skip
DP1, DP2, TP2, PP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1)
EP2, HYBRID = Layout(1, 1, 2, ep=2), Layout(1, 1, 4, shard=2)


@dataclass(frozen=True)
class Kind:
    """A training of SAVED steps before its checkpoint, and of the others after it."""

    layout: Layout
    engine: Engine
    dtype: Any = "fp32"
    model: str = "dense"

    @property
    def resolved(self) -> Resolved:
        """As the command line would resolve it."""
        shape = {"dense": DENSE, "mixture": MIXTURE, "qwen2": QWEN2}[self.model]
        return resolve(
            Experiment(
                name="older",
                model=Model(vocab=VOCAB, seq=SEQ, **shape),
                engine=self.engine,
                layout=LayoutRequest(
                    **asdict(self.layout), gpus=self.layout.gpus, micro_batches=2, global_batch=GLOBAL_BATCH
                ),
                train=Train(
                    steps=STEPS,
                    dtype=self.dtype,
                    lr=5e-3,
                    min_lr=1e-3,
                    warmup_steps=2,
                    clip=0.5,
                    balance="bias" if self.model == "mixture" else "none",
                    balance_rate=0.01,
                ),
            ),
            ClusterProfile(name="test", scheduler="local", gpus_per_node=8),
        )


def _zero(stage: int, layout: Layout = DP2, dtype: Any = "fp32", model: str = "dense", **switches: Any) -> Kind:
    return Kind(layout, Engine(name="deepspeed-zero", zero_stage=stage, **switches), dtype, model)


def _staged(layout: Layout, stage: int = 1, dtype: Any = "fp32", model: str = "dense") -> Kind:
    return Kind(layout, Engine(name="deepspeed-3d", zero_stage=stage), dtype, model)


DDP, FSDP = Engine(name="ddp"), Engine(name="fsdp")
KINDS = {
    "ddp": Kind(DP2, DDP),
    "ddp-sharded-optimizer": Kind(DP2, replace(DDP, sharded_optimizer=True)),
    "ddp-ep2": Kind(EP2, DDP, model="mixture"),
    "ddp-bf16": Kind(DP2, DDP, "bf16"),
    "ddp-fp16": Kind(DP2, DDP, "fp16"),
    "fsdp": Kind(DP2, FSDP),
    "fsdp-alone": Kind(DP1, FSDP),
    "fsdp-tp2": Kind(TP2, FSDP, model="qwen2"),
    "fsdp-shard2": Kind(HYBRID, FSDP),
    "fsdp-ep2": Kind(EP2, FSDP, model="mixture"),
    "fsdp-fp16": Kind(DP2, FSDP, "fp16"),
    "zero0": _zero(0),
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero(3),
    "zero1-bf16": _zero(1, dtype="bf16"),
    "zero2-fp16": _zero(2, dtype="fp16"),
    "zero3-bf16": _zero(3, dtype="bf16"),
    "zero3-tiles2": _zero(3, tiles=2),
    "zero3-tp2": _zero(3, TP2),
    "zero2-offload-optimizer": _zero(2, offload="optimizer"),
    "zero3-offload-full": _zero(3, offload="full"),
    "3d-pp2": _staged(PP2),
    "3d-pp2-zero0": _staged(PP2, 0),
    "3d-tp2": _staged(TP2),
    "3d-pp2-mixture": _staged(PP2, model="mixture"),
    "hf-zero3": Kind(DP2, Engine(name="hf-deepspeed", zero_stage=3)),
    "hf-zero1-qwen2": Kind(DP2, Engine(name="hf-deepspeed", zero_stage=1), model="qwen2"),
}


class Everyone(Ranks):
    """The ranks of a test, which have met without a run."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_first = self.rank == 0
        self.control = dist.group.WORLD


def build(resolved: Resolved) -> Any:
    """Its engine. DeepSpeed asks whether a CPU trains in fp16, and so do we; it is told so, as torch computes it."""
    if resolved.train.dtype == "fp16" and resolved.engine.name not in ("ddp", "fsdp"):
        from hpc_gpt.trainer.engines.deepspeed_setup import import_deepspeed

        import_deepspeed(torch.device("cpu")).accelerator.get_accelerator().is_fp16_supported = lambda: True
        with patch.object(protocol, "check_dtype_on"):
            return protocol.build_engine(resolved, torch.device("cpu"))
    return protocol.build_engine(resolved, torch.device("cpu"))


def train(engine: Any, resolved: Resolved, steps: range) -> list[list[float]]:
    """[loss, norm] of each step."""
    figures = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        whole = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)
        batch, dp = resolved.batch, resolved.layout.dp
        starts = [(number * dp + engine.dp_rank) * batch.micro_batch for number in range(batch.micro_batches)]
        rows = [whole[start : start + batch.micro_batch] for start in starts]
        pairs = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in rows]
        hook: Any = None
        if resolved.train.dtype == "fp16" and step == SKIPPED:
            loss = getattr(engine.module, "loss_fn", None) or engine.module.loss
            hook = loss.register_forward_hook(lambda _, inputs, loss: loss * math.inf)
        result = engine.train_step(iter(pairs))
        figures.append([float(result.loss), float(result.grad_norm)])
        assert bool(result.skipped) == (hook is not None), figures
        if hook is not None:
            hook.remove()
    return figures


def make(folder: Path, kind: Kind) -> dict[str, Any]:
    """Trains SAVED steps, saves, and trains on. Returns the figures of all steps, the random numbers after the save,
    and the CPU's instructions, which decide about a last digit."""
    resolved = kind.resolved
    engine = build(resolved)
    figures = train(engine, resolved, range(SAVED))
    torch.manual_seed(17)
    ranks = Everyone()
    outcome = Checkpoints(folder, ranks).save(engine, Progress(SAVED, 1.0, "random"))
    assert not outcome.refusal
    drawn = torch.rand(3).tolist()
    figures += train(engine, resolved, range(SAVED, STEPS))
    return {"figures": figures, "drawn": drawn, "cpu": torch.backends.cpu.get_cpu_capability()}


def main(folder: Path) -> None:
    """Makes all kinds of so many ranks, as one rank of them."""
    world = int(os.environ["WORLD_SIZE"])
    for name, kind in KINDS.items():
        if kind.layout.gpus == world:
            meet(folder, name)
            if dist.get_rank() == 0:
                (folder / name).mkdir()
            dist.barrier()
            made = make(folder / name, kind)
            if dist.get_rank() == 0:
                (folder / name / "figures.json").write_text(json.dumps(made, indent=1) + "\n")
            del made
            forget()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
