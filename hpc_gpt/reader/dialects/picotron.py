"""picotron. Its global batch is in tokens; its memory is the allocator's reserved memory, in 10^9 bytes."""

from hpc_gpt.reader.pattern import START, Dialect, Pattern, later, named

_SHORT = r"\d{1,12}(?:\.\d{1,4})?[KMBT]?"

DIALECT = Dialect(
    name="picotron",
    engine="picotron",
    flags=("picotron rounds tokens to two decimals of K, M or B",),
    patterns=(
        Pattern(
            "step",
            r"\bStep: (?P<step>\d{1,12})(?= *\|)"
            + named(loss=r"\| Loss: *", mfu_percent=r"\| MFU: *")
            + "".join(
                later(rf"\| {name}: *", group, "(?= |/)", _SHORT)
                for name, group in (
                    ("Tokens/s", "tokens_per_s"),
                    ("Tokens/s/GPU", "tokens_per_s_gpu"),
                    ("Tokens", "consumed_tokens"),
                )
            )
            + later(r"\| Memory usage: *", "memory_reserved_gb", "(?=GB)"),
            literal="| Tokens/s/GPU: ",
        ),
        Pattern("fact", START + r"Number of parameters: (?P<params>\d{1,4}\.\d\d[KMBT])\s*$", weak=True),
    ),
)
