"""Meta's llama-recipes (llama-cookbook): FSDP fine-tuning, one bar per epoch with the loss in its label.

The steps of a bar restart with each epoch, so only those of the first epoch are read, counted from 0. Memory is in whole
GiB, rounded down.
"""

from hpc_gpt.reader.pattern import LINE_START, NUMBER, Dialect, Pattern, line

DIALECT = Dialect(
    name="llama_recipes",
    engine="fsdp",
    flags=("llama-recipes rounds memory down to whole GiB",),
    patterns=(
        Pattern(
            "step",
            rf"\bTraining Epoch: 1(?:/\d{{1,6}})?, step (?P<step>\d{{1,12}})/\d{{1,12}} completed \(loss: (?P<loss>{NUMBER})\)",
        ),
        Pattern(
            "step",
            r"\bTraining Epoch: (?P<epoch>[2-9]|[1-9]\d{1,6})(?:/\d{1,6})?, "
            rf"step \d{{1,12}}/\d{{1,12}} completed \(loss: (?P<loss>{NUMBER})\)",
        ),
        line("memory", "Max CUDA memory allocated was {memory_allocated_gib} GB"),
        line("memory", "Max CUDA memory reserved was {memory_reserved_gib} GB"),
        Pattern(
            "fact",
            LINE_START + r"--> applying fsdp activation checkpointing\.\.\.(?=\s*$)",
            facts={"recompute": "full"},
            weak=True,
        ),
        Pattern(
            "fact",
            LINE_START + r"bFloat16 enabled for mixed precision - using bfSixteen policy(?=\s*$)",
            facts={"dtype": "bf16"},
            weak=True,
        ),
        line("fact", "--> batch_size_training={micro_batch}", LINE_START),
        line("fact", "--> gradient_accumulation_steps={micro_batches}", LINE_START),
        line("fact", "--> context_length={seq}", LINE_START),
        Pattern("fact", rf"--> (?!model )\S{{1,100}} has (?P<params_millions>{NUMBER}) Million params", weak=True),
    ),
)
