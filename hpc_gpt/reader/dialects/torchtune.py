"""torchtune's logs on disk: one line per step. Tokens/s are per GPU, memory in GiB; the last figure ends the line."""

from hpc_gpt.reader.pattern import END, LINE_START, NUMBER, STOP_OR_END, Dialect, Pattern, line, named

DIALECT = Dialect(
    name="torchtune",
    engine="torchtune",
    patterns=(
        Pattern(
            "step",
            rf"\bStep (?P<step>\d{{1,12}}) \|(?= loss:{NUMBER} )"
            + named(loss=" loss:", lr=" lr:", memory_allocated_gib=" peak_memory_alloc:")
            + named(
                STOP_OR_END,
                tokens_per_s_gpu=" tokens_per_second_per_gpu:",
                grad_norm=" grad_norm:",
                memory_reserved_gib=" peak_memory_reserved:",
            ),
            literal=" | loss:",
        ),
        # The label of its bar: the epoch and the step, in some versions the step of the epoch.
        Pattern("step", rf"(?<![\d|])(?P<epoch>\d{{1,6}})\|(?P<step>\d{{1,12}})\|Loss: (?P<loss>{NUMBER})(?=:? |\s*$)"),
        Pattern("fact", r"\bINFO:torchtune\.utils\._?logging:", facts={"engine": "torchtune"}),
        line("fact", "batch_size: {micro_batch}", LINE_START, own=True),
        line("fact", "gradient_accumulation_steps: {micro_batches}", LINE_START, own=True),
        Pattern("fact", LINE_START + r"dtype: (?P<dtype>bf16|fp16|fp32)" + END, own=True),
    ),
)
