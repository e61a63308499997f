"""NVIDIA NeMo Automodel: tokens/s of the job, and of one GPU in brackets."""

from hpc_gpt.reader.pattern import END, NUMBER, Dialect, Pattern, later, line, named

DIALECT = Dialect(
    name="automodel",
    dtype="bf16",
    engine="automodel",
    patterns=(
        Pattern(
            "step",
            r"\bstep (?P<step>\d{1,12})(?= \|[^\n]{0,400}? loss )"
            + named(epoch=r"\| epoch ", loss=r"\| loss ", grad_norm=r"\| grad_norm ", lr=r"\| lr ")
            + named(balance_loss=r"\| (?:aux|load_balanc(?:e|ing))_loss ", memory_allocated_gib=r"\| mem ")
            + later(r"\| tps ", "tokens_per_s", r"(?=\()")
            + later(rf"\| tps {NUMBER}\(", "tokens_per_s_gpu", r"(?=/gpu\))"),
            literal=" | num_label_tokens ",
        ),
        # The benchmark recipe, which counts from 0 and prints the time on a line of its own.
        Pattern(
            "step",
            r"\bRank \d{1,7} \| Iteration (?P<step>\d{1,12}) \| num_label_tokens=\d{1,12} \| "
            rf"Max Memory Allocated: (?P<memory_allocated_gib>{NUMBER}) GB \| loss=(?P<loss>{NUMBER})" + END,
        ),
        Pattern("more", rf"\bMax iter time: (?P<step_s>{NUMBER}) seconds" + END),
        Pattern("more", rf"(?<=\| )MFU: (?P<mfu_percent>{NUMBER})%" + END, literal="MFU: ", own=True),
        line(
            "fact",
            "GA steps: {micro_batches}, DP size: {dp}, Local batch size: {micro_batch}, Global batch size: {global_batch}",
        ),
    ),
)
