"""mlx-lm and its descendants, on Apple's GPUs: iterations, rates since the line before, memory in units of 1e9 bytes."""

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern, named

DIALECT = Dialect(
    name="mlx_lm",
    engine="mlx",
    patterns=(
        Pattern(
            "step",
            ": Train loss ",
            r"\bIter (?P<step>\d{1,12}): "
            + named("(?=,)", loss="Train loss ", lr="Learning Rate ", steps_per_s="It/sec ", tokens_per_s="Tokens/sec ")
            + named("(?=,| GB)", consumed_tokens="Trained Tokens ", memory_allocated_gb="Peak mem "),
        ),
        Pattern(
            "eval", ": Val loss ", rf"\bIter (?P<step>\d{{1,12}}): Val loss (?P<loss_eval>{NUMBER}), Val took {NUMBER}s"
        ),
    ),
    specimen="""\
Iter 1: Val loss 3.245, Val took 15.961s
Iter 2: Train loss 3.729, Learning Rate 4.000e-06, It/sec 0.576, Tokens/sec 98.498, Trained Tokens 363, Peak mem 5.419 GB
""",
    seen="unslothai/unsloth/pull/1289; ml-explore/mlx-lm mlx_lm/tuner/trainer.py",
)
