"""picotron. Its global batch is of tokens a step; memory is what the allocator has reserved, in 10^9 bytes."""

from hpc_gpt.readers.pattern import NUMBER, START, Dialect, Pattern

_SHORT = r"\d{1,12}(?:\.\d{1,4})?[KMBT]?"

DIALECT = Dialect(
    name="picotron",
    engine="picotron",
    flags=("picotron rounds tokens to two decimals of K, M or B",),
    patterns=(
        Pattern(
            "step",
            "| Tokens/s/GPU: ",
            rf"\bStep: (?P<step>\d{{1,12}}) *\| Loss: *(?P<loss>{NUMBER}) \| Global batch size: *{_SHORT} \| "
            rf"Tokens/s: *(?P<tokens_per_s>{_SHORT}) \| Tokens/s/GPU: *(?P<tokens_per_s_gpu>{_SHORT}) \| "
            rf"Tokens: *(?P<consumed_tokens>{_SHORT})(?:/ *{_SHORT})?"
            rf"(?: \| MFU: *(?P<mfu_percent>{NUMBER})%)?(?= \|)"
            rf"(?:[^\n]{{0,200}}? \| Memory usage: *(?P<memory_reserved_gb>{NUMBER})GB)?",
        ),
        Pattern(
            "fact",
            "Number of parameters: ",
            START + r"Number of parameters: (?P<params>\d{1,4}\.\d\d[KMBT])\s*$",
            weak=True,
        ),
    ),
    specimen="""\
[rank 0] Step: 12    | Loss: 7.1234 | Global batch size:   1.05M | Tokens/s: 123.45K | Tokens/s/GPU:  15.43K | Tokens:  12.58M/1.00B | MFU: 38.12% | Memory usage:  61.23GB
Number of parameters: 1.71B
""",
    seen="huggingface/picotron train.py",
)
