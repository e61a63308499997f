"""torchtune's logs on disk: one line per step. Tokens/s are per GPU, memory in GiB; the last figure ends the line."""

from hpc_gpt.readers.pattern import END, LINE_START, NUMBER, Dialect, Pattern


def _entry(key: str, group: str, end: str = "(?= )") -> str:
    return rf"(?=(?:[^\n]{{0,1000}}? {key}:(?P<{group}>{NUMBER}){end})?)"


DIALECT = Dialect(
    name="torchtune",
    engine="torchtune",
    patterns=(
        Pattern(
            "step",
            " | loss:",
            rf"\bStep (?P<step>\d{{1,12}}) \|(?= loss:{NUMBER} )"
            + _entry("loss", "loss")
            + _entry("lr", "lr")
            + _entry("tokens_per_second_per_gpu", "tokens_per_s_gpu", r"(?=\s|$)")
            + _entry("grad_norm", "grad_norm", r"(?=\s|$)")
            + _entry("peak_memory_alloc", "memory_allocated_gib")
            + _entry("peak_memory_reserved", "memory_reserved_gib", r"(?=\s|$)"),
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
Step 2 | loss:1.2870930080029074 lr:2e-05 tokens_per_second_per_gpu:452.686055301284 peak_memory_active:13.1 peak_memory_alloc:13.79 peak_memory_reserved:14.2
""",
    seen="meta-pytorch/torchtune/pull/1358, /2274",
)
