"""Meta's llama-recipes (llama-cookbook): FSDP fine-tuning, one bar per epoch with the loss in its label.

The steps of a bar restart with each epoch, so only those of the first epoch are read, counted from 0. Memory is in whole
GiB, rounded down.
"""

from hpc_gpt.readers.pattern import END, LINE_START, NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="llama_recipes",
    engine="fsdp",
    flags=("llama-recipes rounds memory down to whole GiB",),
    patterns=(
        Pattern(
            "step",
            " completed (loss: ",
            rf"\bTraining Epoch: 1(?:/\d{{1,6}})?, step (?P<step>\d{{1,12}})/\d{{1,12}} completed \(loss: (?P<loss>{NUMBER})\)",
        ),
        Pattern(
            "step",
            " completed (loss: ",
            r"\bTraining Epoch: (?P<epoch>[2-9]|[1-9]\d{1,6})(?:/\d{1,6})?, "
            rf"step \d{{1,12}}/\d{{1,12}} completed \(loss: (?P<loss>{NUMBER})\)",
        ),
        Pattern("memory", "CUDA memory", r"\bMax CUDA memory allocated was (?P<memory_allocated_gib>\d{1,7}) GB"),
        Pattern("memory", "CUDA memory", r"\bMax CUDA memory reserved was (?P<memory_reserved_gib>\d{1,7}) GB"),
        Pattern(
            "fact",
            "applying fsdp activation checkpointing",
            LINE_START + r"--> applying fsdp activation checkpointing\.\.\.(?=\s*$)",
            facts={"recompute": "full"},
            weak=True,
        ),
        Pattern(
            "fact",
            "enabled for mixed precision",
            LINE_START + r"bFloat16 enabled for mixed precision - using bfSixteen policy(?=\s*$)",
            facts={"dtype": "bf16"},
            weak=True,
        ),
        *(
            Pattern("fact", f"--> {key}=", LINE_START + rf"--> {key}=(?P<{group}>\d{{1,9}})" + END)
            for key, group in (
                ("batch_size_training", "micro_batch"),
                ("gradient_accumulation_steps", "micro_batches"),
                ("context_length", "seq"),
            )
        ),
        Pattern(
            "fact",
            " Million params",
            rf"--> (?!model )\S{{1,100}} has (?P<params_millions>{NUMBER}) Million params",
            weak=True,
        ),
    ),
)
