"""mlx-lm and its descendants, on Apple's GPUs: iterations, rates since the line before, memory in units of 1e9 bytes."""

from hpc_gpt.reader.pattern import Dialect, Pattern, line, named

DIALECT = Dialect(
    name="mlx_lm",
    engine="mlx",
    patterns=(
        Pattern(
            "step",
            r"\bIter (?P<step>\d{1,12}): "
            + named("(?=,)", loss="Train loss ", lr="Learning Rate ", steps_per_s="It/sec ", tokens_per_s="Tokens/sec ")
            + named("(?=,| GB)", consumed_tokens="Trained Tokens ", memory_allocated_gb="Peak mem "),
            literal=": Train loss ",
        ),
        line("eval", "Iter {step}: Val loss {loss_eval}, Val took {}s"),
    ),
)
