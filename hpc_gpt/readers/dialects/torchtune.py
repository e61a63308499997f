"""torchtune's logs on disk: one line per step. Tokens/s are per GPU, memory in GiB; the last figure ends the line."""

from hpc_gpt.readers.pattern import END, LINE_START, NUMBER, STOP_OR_END, Dialect, Pattern, named

DIALECT = Dialect(
    name="torchtune",
    engine="torchtune",
    patterns=(
        Pattern(
            "step",
            " | loss:",
            rf"\bStep (?P<step>\d{{1,12}}) \|(?= loss:{NUMBER} )"
            + named(loss=" loss:", lr=" lr:", memory_allocated_gib=" peak_memory_alloc:")
            + named(
                STOP_OR_END,
                tokens_per_s_gpu=" tokens_per_second_per_gpu:",
                grad_norm=" grad_norm:",
                memory_reserved_gib=" peak_memory_reserved:",
            ),
        ),
        # The label of its bar: the epoch and the step, in some versions that of the epoch.
        Pattern(
            "step",
            "|Loss: ",
            rf"(?<![\d|])(?P<epoch>\d{{1,6}})\|(?P<step>\d{{1,12}})\|Loss: (?P<loss>{NUMBER})(?=:? |\s*$)",
        ),
        Pattern("fact", "torchtune.utils", r"\bINFO:torchtune\.utils\._?logging:", facts={"engine": "torchtune"}),
        *(
            Pattern("fact", f"{key}: ", LINE_START + rf"{key}: (?P<{group}>{text})" + END, own=True)
            for key, group, text in (
                ("batch_size", "micro_batch", r"\d{1,7}"),
                ("gradient_accumulation_steps", "micro_batches", r"\d{1,7}"),
                ("dtype", "dtype", "bf16|fp16|fp32"),
            )
        ),
    ),
    specimen="""\
INFO:torchtune.utils._logging:Running FullFinetuneRecipeSingleDevice with resolved config:
batch_size: 4
dtype: bf16
Step 1 | loss:2.800974229386741 lr:2e-05 tokens_per_second_per_gpu:57.453514618588315
1|46|Loss: 2.2193:   0%|▏         | 46/25720 [00:21<3:42:12,  1.93it/s]
Step 2 | loss:1.2870930080029074 lr:2e-05 tokens_per_second_per_gpu:452.686055301284 peak_memory_active:13.1 peak_memory_alloc:13.79 peak_memory_reserved:14.2
""",
    seen="meta-pytorch/torchtune/pull/1358, /2274",
)
