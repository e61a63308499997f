"""NVIDIA NeMo Automodel: tokens/s of the job, and of one GPU in brackets."""

from hpc_gpt.reader.pattern import NUMBER, Dialect, Pattern, later, named

DIALECT = Dialect(
    name="automodel",
    dtype="bf16",
    engine="automodel",
    patterns=(
        Pattern(
            "step",
            r"\bstep (?P<step>\d{1,12})(?= \|[^\n]{0,400}? loss )"
            + named(epoch=r"\| epoch ", loss=r"\| loss ", grad_norm=r"\| grad_norm ", lr=r"\| lr ")
            + named(memory_allocated_gib=r"\| mem ")
            + later(r"\| tps ", "tokens_per_s", r"(?=\()")
            + later(rf"\| tps {NUMBER}\(", "tokens_per_s_gpu", r"(?=/gpu\))"),
            literal=" | num_label_tokens ",
        ),
    ),
)
