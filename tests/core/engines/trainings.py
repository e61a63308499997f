"""Trainings of every engine, by what it says of itself."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from hpc_gpt.core.engines import engines
from hpc_gpt.core.engines.base.programs import program_states
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.model_shape import ModelShape

SMALL = ModelShape(hidden=2048, layers=24, heads=16, vocab=50304, seq=2048)
LLAMA = ModelShape(
    4096, 32, 32, vocab=128256, seq=8192, tied=False, kv_heads=8, ffn=14336,
    mlp="swiglu", norm="rmsnorm", positions="rope", bias="none",
)  # fmt: skip
OFFLOADS = ("none", "optimizer", "full")
# Programs of others, by a name that tests use.
PROGRAMS = {
    "ddp": program_states("ddp", None, "bf16", False),
    "fsdp": program_states("fsdp", None, "bf16", False),
    "megatron-fsdp": program_states("fsdp", "gathers ahead", "bf16", False),
    "megatron": program_states("megatron-lm", None, "bf16", True),
    "nanotron": program_states("megatron-lm", "two gradients", "bf16", True),
    "megatron-2021-fp16": program_states("megatron-lm", None, "fp16", False),
    "deepspeed-fp16": program_states("deepspeed-3d", None, "fp16", False),
    "bf16-optimizer": program_states("deepspeed-3d", "fp32 sums", "bf16", False),
}


@st.composite
def trainings(draw: st.DrawFn, among: Sequence[str] = tuple(engines())) -> Training:
    """One of the engines `among`; it offloads nothing."""
    name = draw(st.sampled_from(among))
    facts = engines()[name]
    tp = draw(st.sampled_from((1, 2, 4, 8))) if facts.splits("tp") else 1
    pp = draw(st.sampled_from((1, 2, 3, 8))) if facts.splits("pp") else 1
    shape = draw(st.sampled_from((SMALL, LLAMA, replace(SMALL, hidden=1024, layers=25), replace(LLAMA, layers=64))))
    return Training(
        shape, tp=tp, pp=pp, dp=draw(st.sampled_from((1, 2, 16))),
        vp=draw(st.sampled_from((1, 2))) if pp > 1 and facts.has_chunks else 1, micro_batch=draw(st.integers(1, 16)),
        micro_batches=draw(st.sampled_from((1, 2, 8, 64))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        sequence_parallel=tp > 1 and draw(st.booleans()), zero_stage=draw(st.sampled_from(facts.zero_stages)),
        dtype=draw(st.sampled_from(("bf16", "fp16", "fp32"))), flash=draw(st.booleans()), engine=name,
        sharded_optimizer="sharded_optimizer" in facts.switches and draw(st.booleans()),
        fused_loss=draw(st.sampled_from((None, "kernel"))), compiled=draw(st.booleans()),
        loss_chunks=draw(st.sampled_from((1, 4))),
    )  # fmt: skip
