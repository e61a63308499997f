"""The cases of the equality table, and the data they train on. One launch of ranks runs all cases of a world size."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hpc_gpt.cluster import ClusterProfile
from hpc_gpt.experiment import Dtype, Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.layout import Layout
from hpc_gpt.resolve import Resolved, resolve

STEPS = 6
GLOBAL_BATCH = 16
VOCAB = 61  # padded to 64: with tp 2 the second rank's share is part padding
SEQ = 16
EVALUATION = 1000  # a step no training reaches


@dataclass(frozen=True)
class Case:
    """One training of the tiny GPT on one layout; `mutation` breaks it on purpose."""

    layout: Layout
    dtype: Dtype = "fp32"
    zero_stage: int = 1
    clip: float = 0.0
    optimizer: str = "adamw"
    micro_batches: int = 2
    recompute: bool = False
    tied: bool = True
    mutation: str = ""

    @property
    def name(self) -> str:
        parts = [str(self.layout), self.dtype, f"zero{self.zero_stage}", self.optimizer, f"m{self.micro_batches}"]
        parts += [f"clip{self.clip:g}"] if self.clip else []
        parts += ["recompute"] if self.recompute else []
        parts += [] if self.tied else ["untied"]
        return " ".join(parts) + (f", without {self.mutation}" if self.mutation else "")

    @property
    def resolved(self) -> Resolved:
        """As the command line would resolve it."""
        layout = self.layout
        return resolve(
            Experiment(
                name="equality",
                model=Model(hidden=32, layers=3, heads=4, vocab=VOCAB, seq=SEQ, tied=self.tied),
                engine=Engine(zero_stage=self.zero_stage, recompute="full" if self.recompute else "none"),
                layout=LayoutRequest(
                    **asdict(layout),
                    gpus=layout.gpus,
                    micro_batches=self.micro_batches,
                    global_batch=GLOBAL_BATCH,
                ),
                train=Train(
                    steps=STEPS,
                    dtype=self.dtype,
                    optimizer=self.optimizer,  # type: ignore[arg-type]
                    lr=5e-4 if self.optimizer == "adamw" else 0.5,
                    min_lr=1e-4,
                    warmup_steps=2,
                    clip=self.clip,
                ),
            ),
            ClusterProfile(name="test", scheduler="local", gpus_per_node=8),
        )


CLIP = 0.25  # below every step's norm, so that it always acts
LAYOUTS = [Layout(tp, pp, dp) for tp in (1, 2) for pp in (1, 2) for dp in (1, 2)]
TABLE = [Case(layout, zero_stage=zero, clip=clip) for layout in LAYOUTS for zero in (0, 1) for clip in (0.0, CLIP)]
SGD = [
    Case(Layout(1, 2, 1), optimizer="sgd", zero_stage=zero, micro_batches=count)
    for zero in (0, 1)
    for count in (1, 2, 8)
]
BF16 = [
    Case(layout, dtype="bf16", clip=CLIP)
    for layout in (Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 2, 1), Layout(2, 2, 2))
]
RECOMPUTE = [Case(layout, clip=CLIP, recompute=True) for layout in (Layout(1, 1, 1), Layout(2, 1, 1), Layout(2, 2, 1))]
UNTIED = [Case(layout, clip=CLIP, tied=False, zero_stage=zero) for layout in (Layout(2, 2, 1),) for zero in (0, 1)]
GOOD = TABLE + SGD + BF16 + RECOMPUTE + UNTIED

# Each is left out of one run, which the comparison must then refuse.
MUTATIONS = {
    Layout(2, 1, 1): [
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
    Layout(1, 2, 1): ["the tied gradients' sum", "the norm's sum", "the right gradient scale"],
    Layout(1, 1, 2): ["the data-parallel mean", "the right gradient scale"],
}
BROKEN = [
    Case(layout, zero_stage=0, mutation=mutation) for layout, mutations in MUTATIONS.items() for mutation in mutations
]


def cases_of(world: int) -> list[Case]:
    """All cases that take `world` ranks."""
    return [case for case in GOOD + BROKEN if case.layout.gpus == world]


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), int64 [GLOBAL_BATCH, SEQ]: a sequence that can be learnt in part, the same in every layout."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)
    follows = torch.rand((GLOBAL_BATCH, SEQ), generator=generator) < 0.7
    for place in range(SEQ):
        tokens[:, place + 1] = torch.where(follows[:, place], (3 * tokens[:, place] + 1) % VOCAB, tokens[:, place + 1])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def micro_batches(resolved: Resolved, dp_rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """The pairs of one data-parallel rank."""
    batch, dp = resolved.batch, resolved.layout.dp
    tokens, targets = whole_batch(step)
    starts = [(number * dp + dp_rank) * batch.micro_batch for number in range(batch.micro_batches)]
    return [(tokens[at : at + batch.micro_batch], targets[at : at + batch.micro_batch]) for at in starts]
