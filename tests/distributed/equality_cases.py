"""One case of the equality table, the cases the issues name one by one, and the data they train on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from hpc_gpt.core.engines import engines
from hpc_gpt.core.engines.base.facts import RECOMPUTES
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import (
    Data,
    Dtype,
    Engine,
    Experiment,
    LayoutRequest,
    Matmul,
    Model,
    Train,
)
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.model.context_parallel import WHOLE, SequencePart
from hpc_gpt.trainer.model.documents import Boundaries, MicroBatch
from tests import ALL_TESTS
from tests.distributed.mixtures import MIXTURES, seed_of

STEPS = 6 if ALL_TESTS else 4  # two of warm-up, the rest of decay
GLOBAL_BATCH = 32  # dp 4 with 8 micro-batches
END = 7  # the token that ends a document
PAD = 40  # one of the data; with tp 2 the second rank has its row
VOCAB = 61  # padded to 64: with tp 2 the second rank's share is part padding
SEQ = 16
LAYERS = 3  # two stages are uneven
EVALUATION = 1000  # a step no training reaches
CLIP = 0.25  # below every step's norm, so that it always acts
# So large that a factor of them shows.
BALANCE_COEF, BALANCE_RATE, Z_LOSS = 0.5, 0.01, 0.05
PROFILE = ClusterProfile(name="test", scheduler="local", gpus_per_node=8)
USUAL = Engine()
_LLAMA: dict[str, Any] = {
    # Heads wider than hidden / heads, whose kv_heads are fewer.
    "hidden": 32,
    "head_dim": 12,
    "kv_heads": 2,
    "ffn": 40,
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "bias": "none",
    "rope_theta": 500.0,
}
# One of each class of transformers that trains here. SmolLM3's single head of keys is used by both ranks of tp 2.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"hidden": 32},
    "llama": _LLAMA | {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8)},
    "qwen2": _LLAMA | {"bias": "qkv", "norm_eps": 1e-6},
    "qwen3": _LLAMA | {"qk_norm": True, "norm_eps": 1e-6},
    "smollm3": _LLAMA | {"nope_every": 2, "kv_heads": 1},
}
# Uneven over 4 ranks, and in each half of it over 2; an odd number of parameters.
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "uneven": {"hidden": 30, "layers": 2, "heads": 2},
    "odd": {"hidden": 33, "heads": 3},
}


@dataclass(frozen=True)
class Case:
    """One training of the tiny GPT by one engine on one layout; `mutation` breaks it on purpose."""

    layout: Layout
    engine: Engine = USUAL
    dtype: Dtype = "fp32"
    clip: float = 0.0
    optimizer: str = "adamw"
    optimizer_mode: str | None = None
    micro_batches: int = 2
    tied: bool = True
    model: str = "gpt2"
    documents: bool = False  # that are masked
    pad: bool = False  # whether PAD's row of the embedding gets no gradient
    matmul: Matmul = "none"
    balance: Literal["none", "loss", "bias"] = "none"  # of a mixture of experts
    z_loss: bool = False
    idle: int = 0  # the first experts of each layer, to which no token is sent
    mutation: str = ""

    @property
    def name(self) -> str:
        """Engine, layout, and whatever is not as usual."""
        engine = self.engine
        parts = [engine.name, str(self.layout)]
        if engine.zero_stage is not None and len(engines()[engine.name].zero_stages) > 1:
            parts.append(f"zero{engine.zero_stage}")
        for entry in fields(Engine):
            value = getattr(engine, entry.name)
            if entry.name not in ("name", "zero_stage") and value != getattr(USUAL, entry.name):
                parts.append(entry.name if value is True else f"{entry.name}={_short(value)}")
        parts += [self.dtype, self.optimizer, f"m{self.micro_batches}"]
        parts += [self.optimizer_mode] if self.optimizer_mode else []
        parts += [f"clip{self.clip:g}"] if self.clip else []
        parts += [] if self.tied else ["untied"]
        parts += [] if self.model == "gpt2" else [self.model]
        parts += ["documents"] if self.documents else []
        parts += ["pad"] if self.pad else []
        parts += [] if self.matmul == "none" else [self.matmul]
        parts += self._of_experts
        return " ".join(parts) + (f", without {self.mutation}" if self.mutation else "")

    @property
    def _of_experts(self) -> list[str]:
        """The words for experts that are not as usual."""
        parts = [] if self.balance == "none" else [f"balance={self.balance}"]
        parts += ["z-loss"] if self.z_loss else []
        return parts + ([f"idle={self.idle}"] if self.idle else [])

    @property
    def routing(self) -> str:
        """All that a mixture's decisions follow from, but for rounding and the seed."""
        parts = [self.model, self.optimizer, *[f"clip{self.clip:g}"] * bool(self.clip), *["tied"] * self.tied]
        return " ".join([*parts, *["documents"] * self.documents, *["pad"] * self.pad, *self._of_experts])

    @cached_property
    def resolved(self) -> Resolved:
        """As the command line would resolve it."""
        layout = self.layout
        of_experts: dict[str, Any] = {}
        if self.model in MIXTURES:
            of_experts = {"seed": seed_of(self.routing), "balance": self.balance, "balance_coef": BALANCE_COEF}
            of_experts |= {"balance_rate": BALANCE_RATE, "z_loss": Z_LOSS * self.z_loss}
        return resolve(
            Experiment(
                name="equality",
                model=Model(
                    vocab=VOCAB,
                    seq=SEQ,
                    tied=self.tied,
                    pad_token=PAD if self.pad else None,
                    **{"layers": LAYERS, "heads": 4} | (MODELS | OTHER_SHAPES | MIXTURES)[self.model],
                ),
                data=Data(mask_documents=True, end_token=END) if self.documents else Data(),
                engine=self.engine,
                layout=LayoutRequest(
                    **asdict(layout), gpus=layout.gpus, micro_batches=self.micro_batches, global_batch=GLOBAL_BATCH
                ),
                train=Train(
                    steps=STEPS,
                    dtype=self.dtype,
                    matmul=self.matmul,
                    optimizer=self.optimizer,
                    optimizer_mode=self.optimizer_mode,
                    lr=5e-4 if self.optimizer == "adamw" else 0.5,
                    min_lr=1e-4,
                    warmup_steps=2,
                    clip=self.clip,
                    **of_experts,
                ),
            ),
            PROFILE,
        )

    def without(self, mutation: str) -> Case:
        """The same, broken."""
        return replace(self, mutation=mutation)


def plainer(case: Case) -> Case:
    """The case without recomputation: what a case with it is compared with."""
    return replace(case, engine=replace(case.engine, recompute="none"))


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def zero(stage: int, **switches: Any) -> Engine:
    """Engine deepspeed-3d at a ZeRO stage."""
    return Engine(zero_stage=stage, **switches)


LAYOUTS = [Layout(tp, pp, dp) for tp in (1, 2) for pp in (1, 2) for dp in (1, 2)]
TABLE = [Case(layout, zero(stage), clip=clip) for layout in LAYOUTS for stage in (0, 1) for clip in (0.0, CLIP)]
SGD = [
    Case(Layout(1, 2, 1), zero(stage), optimizer="sgd", micro_batches=count) for stage in (0, 1) for count in (1, 2, 8)
]
RECOMPUTE = [
    Case(layout, zero(1, recompute="full"), clip=CLIP) for layout in (Layout(1, 1, 1), Layout(2, 1, 1), Layout(2, 2, 1))
]
UNTIED = [Case(Layout(2, 2, 1), zero(stage), clip=CLIP, tied=False) for stage in (0, 1)]
BF16 = [
    Case(layout, dtype="bf16", clip=CLIP)
    for layout in (Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 2, 1), Layout(2, 2, 2))
]
_ZERO = "deepspeed-zero"
_SHARDED = ((False, "llama"), (True, "gpt2"))
FAMILIES = [
    Case(layout, engine, clip=CLIP, tied=model != "llama", model=model)
    for model in MODELS
    if model != "gpt2"
    for layout, engine in (
        (Layout(1, 1, 1), Engine(name="ddp")),
        (Layout(1, 1, 2), Engine(name="ddp")),
        (Layout(2, 1, 1), zero(0)),
        (Layout(1, 2, 1), zero(1)),
        (Layout(2, 2, 1), zero(1)),
        *((Layout(1, 1, 2), Engine(name=_ZERO, zero_stage=stage)) for stage in (1, 2, 3)),
        (Layout(2, 1, 1), Engine(name=_ZERO, zero_stage=3)),
        (Layout(1, 1, 2), Engine(name="fsdp")),
        (Layout(2, 1, 1), Engine(name="fsdp")),
        (Layout(2, 1, 1), Engine(name=_ZERO, zero_stage=1, sequence_parallel=True)),
        (Layout(1, 1, 2), Engine(name="hf-deepspeed")),
    )
]
# A row of the embedding that transformers does not train: each family, each engine, and each way to hold that row.
PADDED = [
    Case(layout, engine, clip=CLIP, tied=tied, model=model, pad=True)
    for model, tied, layout, engine in (
        ("llama", False, Layout(1, 1, 1), Engine(name="ddp")),
        ("qwen2", True, Layout(1, 1, 2), Engine(name="hf-deepspeed")),
        ("qwen3", False, Layout(2, 1, 1), Engine(name="fsdp")),
        ("smollm3", True, Layout(1, 2, 1), zero(1)),
        ("llama", True, Layout(2, 2, 1), zero(0)),
        ("qwen3", False, Layout(2, 2, 1), zero(1, recompute="full")),
        *(("qwen2", bool(stage % 2), Layout(1, 1, 2), Engine(name=_ZERO, zero_stage=stage)) for stage in (0, 1, 2, 3)),
        ("llama", False, Layout(2, 1, 1), Engine(name=_ZERO, zero_stage=1, sequence_parallel=True)),
        ("smollm3", False, Layout(1, 1, 2), Engine(name="hf-deepspeed", zero_stage=1)),
        ("qwen3", True, Layout(1, 1, 1, 2), Engine(name="ddp", cp_exchange="keys")),
        ("llama", False, Layout(1, 1, 1, 2), Engine(name=_ZERO, zero_stage=3)),
        ("qwen3", True, Layout(1, 2, 1, 2), zero(1)),
        ("qwen2", True, Layout(2, 1, 2), Engine(name="fsdp")),
    )
]
NAMED = TABLE + SGD + RECOMPUTE + UNTIED + FAMILIES + PADDED


def _context(cp: int, engine: Engine, model: str = "gpt2", tp: int = 1, pp: int = 1, dp: int = 1, **rest: Any) -> Case:
    """A case of context parallelism."""
    return Case(Layout(tp, pp, dp, cp), engine, **{"clip": CLIP, "model": model, "tied": model != "llama"} | rest)


_KEYS = Engine(name="ddp", cp_exchange="keys")
# With qwen3 at cp 4 and smollm3 at cp 2 there are fewer heads of keys than ranks. Without clipping and Adam a gradient
# that is cp times too large shows in the losses.
CONTEXT = [
    _context(2, Engine(name="ddp"), optimizer="sgd", clip=0.0),
    _context(2, Engine(name="ddp"), "llama"),
    _context(2, Engine(name="ddp"), "smollm3"),
    *(_context(2, Engine(name=_ZERO, zero_stage=stage), "qwen3") for stage in (0, 1, 2, 3)),
    _context(2, Engine(name="fsdp"), "llama"),
    _context(2, zero(0)),
    _context(2, zero(1), "qwen3"),
    *(
        _context(2, Engine(name="ddp", compile_backend="aot_eager", compile=compile_), model)
        for compile_ in ("block", "edges", "whole")
        for model in ("gpt2", "qwen3")
    ),
    *(_context(2, Engine(name="ddp", recompute=recompute), "qwen3") for recompute in ("selective", "full")),
    _context(2, Engine(name="ddp", one_pass_loss=True, fused_bias_gradients=True)),
    _context(2, Engine(name=_ZERO, zero_stage=3, tiles=2, offload="full", loss_chunks=2), "llama"),
    _context(2, Engine(name=_ZERO, zero_stage=3, compile="block", compile_backend="aot_eager"), "llama"),
    _context(2, Engine(name="fsdp", activation_offload=True, loss_chunks=2), "qwen3"),
    _context(2, Engine(name="fsdp", compile="block", compile_backend="aot_eager", recompute="full"), "qwen3"),
    _context(4, Engine(name="ddp")),
    _context(4, Engine(name="ddp"), "qwen3"),
    _context(4, Engine(name="fsdp"), "qwen3"),
    *(_context(4, Engine(name=_ZERO, zero_stage=stage), "qwen3") for stage in (1, 3)),
    *(_context(2, Engine(name="ddp", sharded_optimizer=sharded), model, dp=2) for sharded, model in _SHARDED),
    _context(2, Engine(name="fsdp"), "qwen3", dp=2),
    *(_context(2, Engine(name=_ZERO, zero_stage=stage), dp=2) for stage in (1, 2, 3)),
    _context(2, zero(0), "qwen3", dp=2),
    *(_context(2, Engine(name=_ZERO, zero_stage=stage, sequence_parallel=True), tp=2) for stage in (1, 3)),
    _context(2, Engine(name=_ZERO, zero_stage=1, sequence_parallel=True), "qwen3", tp=2),
    _context(2, Engine(name="fsdp"), "qwen3", tp=2),
    *(_context(2, zero(stage), model, tp=2) for stage, model in ((0, "gpt2"), (1, "llama"))),
    *(_context(2, zero(stage), model, pp=2) for stage, model in ((0, "gpt2"), (1, "llama"), (1, "qwen3"))),
    _context(2, zero(1, recompute="full"), "qwen3", pp=2, micro_batches=8),
    _context(2, Engine(name="ddp"), "llama", documents=True),
    *(_context(2, replace(_KEYS, recompute=recompute)) for recompute in RECOMPUTES),
    _context(2, _KEYS, "smollm3"),
    _context(2, _KEYS, optimizer="sgd", clip=0.0),
    *(_context(2, replace(_KEYS, compile=how, compile_backend="aot_eager"), "qwen3") for how in ("block", "whole")),
    _context(2, replace(_KEYS, name="fsdp", activation_offload=True), "llama"),
    *(_context(2, replace(_KEYS, name=_ZERO, zero_stage=stage), "qwen3") for stage in (1, 2, 3)),
    _context(2, replace(_KEYS, name=_ZERO, zero_stage=3, tiles=2, offload="full", recompute="full"), "llama"),
    _context(4, _KEYS, "qwen3"),
    _context(4, replace(_KEYS, name="fsdp"), "llama"),
    _context(2, replace(_KEYS, name="fsdp"), "qwen3", dp=2),
    _context(2, replace(_KEYS, name=_ZERO, zero_stage=1, sequence_parallel=True), tp=2),
    _context(2, zero(1, cp_exchange="keys"), "llama", tp=2),
    *(_context(2, zero(1, cp_exchange="keys", recompute=recompute), "qwen3", pp=2) for recompute in ("none", "full")),
    _context(4, Engine(name="fsdp"), "qwen3", documents=True),
    _context(2, Engine(name=_ZERO, zero_stage=1, sequence_parallel=True), tp=2, documents=True),
    _context(2, zero(1, recompute="full"), "qwen3", pp=2, micro_batches=4, documents=True),
]

# Each is left out of one run, which the comparison must then refuse.
_TP2, _PP2, _DP2 = Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2)
MUTATIONS = {
    Case(_TP2, zero(0)): [
        "the embedding's sum",
        "the head's backward sum",
        "qkv's backward sum",
        "up's backward sum",
        "the projection's sum",
        "down's sum",
        "the loss's maximum",
        "the loss's sum",
        "the norm's sum",
        "the right gradient scale",
    ],
    Case(_PP2, zero(0)): ["the tied gradients' sum", "the norm's sum", "the right gradient scale"],
    Case(_DP2, zero(0)): ["the data-parallel mean", "the right gradient scale"],
    Case(_TP2, zero(1, sequence_parallel=True)): ["the norms' gradient sum"],
    Case(_DP2, Engine(name="deepspeed-zero", zero_stage=0)): ["the data-parallel mean"],
    Case(_DP2, Engine(name="deepspeed-zero", zero_stage=2)): ["the right gradient scale"],
    Case(_DP2, Engine(name="deepspeed-zero", zero_stage=3)): ["the padding's mask"],
    # The norm is DeepSpeed's own where the optimizer is not fused.
    Case(_TP2, Engine(name="deepspeed-zero", zero_stage=1), optimizer_mode="foreach"): ["the tensor-parallel marks"],
    Case(_TP2, Engine(name="deepspeed-zero", zero_stage=1)): ["the owner of what is whole"],
    Case(_TP2, Engine(name="deepspeed-zero", zero_stage=1, sequence_parallel=True)): [
        "the norms' gradient sum",
        "the biases' gradient sum",
        "the position gradients' sum",
        "the rank's own positions",
        "the scattered sums",
    ],
    Case(_TP2, Engine(name="fsdp")): ["qkv's backward sum", "the norm's sum"],
    Case(_DP2, Engine(name="fsdp")): ["the mean of the sum", "the norm's sum", "the accumulation's divisor"],
    Case(_DP2, Engine(name="ddp")): ["the data-parallel mean", "the accumulation's divisor"],
    Case(_DP2, Engine(name="ddp", sharded_optimizer=True)): ["the exchange of what each rank updated"],
    Case(_DP2, Engine(name="hf-deepspeed")): ["the right gradient scale", "the padding's mask"],
    **{case: ["the pad token's row"] for case in PADDED},
}
# What every engine must have, for those not named above.
_BROKEN_ENGINES = {case.engine.name for case in MUTATIONS}
MUTATIONS |= {
    Case(_DP2, Engine(name=name)): ["the right gradient scale"]
    for name, facts in engines().items()
    if not facts.is_program and name not in _BROKEN_ENGINES
}
BROKEN = [case.without(mutation) for case, names in MUTATIONS.items() for mutation in names]


def whole_batch(step: int, end: int | None = None) -> tuple[Tensor, Tensor]:
    """(tokens, targets), int64 [GLOBAL_BATCH, SEQ]: a sequence that can be learnt in part, the same in every layout.

    With an `end` token there are documents in it, of 1 to SEQ tokens and 6 on average.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)
    follows = torch.rand((GLOBAL_BATCH, SEQ), generator=generator) < 0.7
    for place in range(SEQ):
        tokens[:, place + 1] = torch.where(follows[:, place], (3 * tokens[:, place] + 1) % VOCAB, tokens[:, place + 1])
    if end is not None:
        tokens[torch.rand(tokens.shape, generator=generator) < 1 / 6] = end
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def micro_batches(resolved: Resolved, dp_rank: int, step: int, part: SequencePart = WHOLE) -> list[MicroBatch]:
    """A rank's part of the pairs of its data-parallel rank, with the boundaries of documents if the run masks them."""
    batch, dp, end = resolved.batch, resolved.layout.dp, resolved.data.end_token
    whole, following = whole_batch(step, end)
    tokens, targets = part.of(whole, 1), part.of(following, 1)
    starts = [(number * dp + dp_rank) * batch.micro_batch for number in range(batch.micro_batches)]
    own = [slice(at, at + batch.micro_batch) for at in starts]
    if end is None:
        return [(tokens[rows], targets[rows]) for rows in own]
    return [(tokens[rows], targets[rows], Boundaries.of(whole[rows], end)) for rows in own]
