"""The habits of programs whose tables people publish, by the engine that they are like, if a row does not state one."""

from collections import defaultdict
from dataclasses import dataclass

from hpc_gpt.core.settings.services import ProgramKind


@dataclass(frozen=True)
class Habits:
    """The habits of programs that are like one engine."""

    pads_vocabulary: bool = True
    flash: bool = False  # on every device that can
    sequence_parallel: bool = False  # with tp
    fused_loss: bool = False  # with flash attention


HABITS = defaultdict(Habits) | {
    "ddp": Habits(pads_vocabulary=False),
    "fsdp": Habits(
        pads_vocabulary=False,
        flash=True,  # it came with PyTorch 2's fused attention
        sequence_parallel=True,  # PyTorch's parallel styles do
        fused_loss=True,  # flash_attn.losses.cross_entropy, the default of llm-foundry and others
    ),
}


def kind_of(engine: str, stack: str, sums_in_fp32: bool) -> ProgramKind | None:
    """The kind of a row's program. `sums_in_fp32`: whether the source says that gradients are summed in fp32; before
    BF16_Optimizer a pipeline in bf16 held the same as in fp16."""
    if engine == "fsdp" and "megatron" in stack:
        return "gathers ahead"
    if engine == "megatron-lm" and "nanotron" in stack:
        return "two gradients"
    return "fp32 sums" if engine == "deepspeed-3d" and sums_in_fp32 else None


def offloads_activations(engine: str, zero_stage: int, is_split: bool) -> bool:
    """Whether it keeps recomputed layers' inputs on the host. DeepSpeed's Megatron for ZeRO-3 ships with
    --checkpoint-in-cpu, and only that program splits layers over tp (`is_split`) under ZeRO-3."""
    return engine == "deepspeed-zero" and zero_stage == 3 and is_split
