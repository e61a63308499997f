"""karpathy's build-nanogpt and its many copies: tokens/s of the whole job, steps counted from 0. Its log.txt has three columns."""

from hpc_gpt.reader.pattern import END, LINE_START, START, Dialect, Pattern, later, line, named

DIALECT = Dialect(
    name="build_nanogpt",
    engine="build-nanogpt",
    patterns=(
        Pattern(
            "step",
            # A line with `lrm`, or the share of steps that are done, is nanochat's.
            r"\bstep:? {1,8}(?P<step>\d{1,12})(?=,| \|)(?! \|[^\n]{0,400} lrm: )(?=[^\n]{0,400} dt: )"
            + named(loss="[|,] loss: ", lr=r"\| lr:? ", grad_norm=r"(?:\||\d) norm: ")
            + later(" dt: ", "step_ms", "(?= ?ms)")
            + later(" dt: ", "step_s", "(?= ?s)")
            + later(" tok/sec: ", "tokens_per_s", r"(?= \||\s*$)"),
            literal="tok/sec: ",
        ),
        Pattern("step", LINE_START + r"(?P<step>\d{1,12}) train (?P<loss>\d{1,4}\.\d{1,8})" + END),
        Pattern("eval", LINE_START + r"(?P<step>\d{1,12}) val (?P<loss_eval>\d{1,4}\.\d{1,8})" + END),
        line("eval", "validation loss: {loss_eval}", LINE_START, weak=True),
        line("fact", "total desired batch size: {global_batch_tokens}", START),
        line("fact", "=> calculated gradient accumulation steps: {micro_batches}", START),
    ),
)
