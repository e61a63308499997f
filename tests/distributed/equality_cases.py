"""One case of the equality table, its models, and the data that it trains on."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_gpt.core.engines import engines
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
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
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.model.context_parallel import WHOLE, SequencePart
from hpc_gpt.trainer.model.documents import Boundaries, MicroBatch
from tests.distributed.mixtures import MIXTURES, seed_of

STEPS = 4  # two of warm-up, the rest of decay
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
    # Newton-Schulz of a matrix takes so long that a rank has nothing else.
    "wide": {"hidden": 256, "layers": 1},
    "wide llama": _LLAMA | {"hidden": 256, "head_dim": 64, "ffn": 320, "layers": 2},
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
    muon_dtype: Literal["bf16", "fp32"] = "fp32"
    micro_batches: int = 2
    tied: bool = True
    model: str = "gpt2"
    documents: bool = False  # that are masked
    pad: bool = False  # whether PAD's row of the embedding gets no gradient
    matmul: Matmul = "none"
    balance: Literal["none", "loss", "bias"] = "none"  # of a mixture of experts
    z_loss: bool = False
    window: int | None = None
    window_layers: str | None = None  # those that have it
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
        parts += ["products=bf16"] if self.muon_dtype == "bf16" else []
        parts += [f"clip{self.clip:g}"] if self.clip else []
        parts += [] if self.tied else ["untied"]
        parts += [] if self.model == "gpt2" else [self.model]
        parts += ["documents"] if self.documents else []
        parts += ["pad"] if self.pad else []
        parts += self._of_windows
        parts += [] if self.matmul == "none" else [self.matmul]
        parts += self._of_experts
        return " ".join(parts) + (f", without {self.mutation}" if self.mutation else "")

    @property
    def file(self) -> str:
        """A name for its files: that of the case may be too long."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]

    @property
    def _of_windows(self) -> list[str]:
        return [f"window{self.window} {self.window_layers or 'all'}"] if self.window else []

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
        return " ".join(
            [*parts, *["documents"] * self.documents, *["pad"] * self.pad, *self._of_windows, *self._of_experts]
        )

    @cached_property
    def resolved(self) -> Resolved:
        """As the command line would resolve it."""
        layout = self.layout
        of_experts: dict[str, Any] = {}
        if self.model in MIXTURES:
            of_experts = {"seed": seed_of(self.routing), "balance": self.balance, "balance_coef": BALANCE_COEF}
            of_experts |= {"balance_rate": BALANCE_RATE, "z_loss": Z_LOSS * self.z_loss}
        rates: dict[str, Any] = {"lr": 0.5 if self.optimizer == "sgd" else 5e-4}
        if self.optimizer == "muon":
            rates |= {"muon_lr": 1e-3, "muon_dtype": self.muon_dtype}
        return resolve(
            Experiment(
                name="equality",
                model=Model(
                    vocab=VOCAB,
                    # Windows are above and below the length.
                    seq=24 if self.window else SEQ,
                    window=self.window,
                    window_layers=self.window_layers,
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
                    steps=6 if self.window or self.optimizer == "muon" else STEPS,
                    dtype=self.dtype,
                    matmul=self.matmul,
                    optimizer=self.optimizer,
                    optimizer_mode=self.optimizer_mode,
                    min_lr=1e-4,
                    warmup_steps=2,
                    clip=self.clip,
                    **rates,
                    **of_experts,
                ),
            ),
            PROFILE,
        )


def plainer(case: Case) -> Case:
    """The case without recomputation: what a case with it is compared with."""
    return replace(case, engine=replace(case.engine, recompute="none"))


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def zero(stage: int, **switches: Any) -> Engine:
    """Engine deepspeed-3d at a ZeRO stage."""
    return Engine(zero_stage=stage, **switches)


def whole_batch(step: int, end: int | None = None, seq: int = SEQ) -> tuple[Tensor, Tensor]:
    """(tokens, targets), int64 [GLOBAL_BATCH, seq]: a sequence that can be learnt in part, the same in every layout.

    With an `end` token there are documents in it, of 1 to `seq` tokens and 6 on average.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, seq + 1), generator=generator)
    follows = torch.rand((GLOBAL_BATCH, seq), generator=generator) < 0.7
    for place in range(seq):
        tokens[:, place + 1] = torch.where(follows[:, place], (3 * tokens[:, place] + 1) % VOCAB, tokens[:, place + 1])
    if end is not None:
        tokens[torch.rand(tokens.shape, generator=generator) < 1 / 6] = end
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def token_bytes(vocab: int) -> NDArray[Any]:
    """Bytes of text of each token, made up: a quarter of them has none, and the last one is not known."""
    return np.arange(vocab - 1) * 7 % 4


def micro_batches(resolved: Resolved, dp_rank: int, step: int, part: SequencePart = WHOLE) -> list[MicroBatch]:
    """A rank's part of the pairs of its data-parallel rank, with the boundaries of documents if the run masks them."""
    batch, dp, end = resolved.batch, resolved.layout.dp, resolved.data.end_token
    whole, following = whole_batch(step, end, resolved.model.seq)
    tokens, targets = part.of(whole, 1), part.of(following, 1)
    starts = [(number * dp + dp_rank) * batch.micro_batch for number in range(batch.micro_batches)]
    own = [slice(at, at + batch.micro_batch) for at in starts]
    if end is None:
        return [(tokens[rows], targets[rows]) for rows in own]
    return [(tokens[rows], targets[rows], Boundaries.of(whole[rows], end)) for rows in own]
