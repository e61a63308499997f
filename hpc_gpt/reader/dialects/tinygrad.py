"""tinygrad's examples: steps count from 0; the device, memory and GFLOPS of a line are for all GPUs.

The time of `ms run` is the whole step.
"""

from hpc_gpt.reader.pattern import LINE_START, NUMBER, START, Dialect, Pattern, has, later, line


def _before(unit: str, group: str) -> str:
    """A lookahead for a figure before its unit or name."""
    return later(r"(?<![^ :\]])", group, f"(?={unit})", within=r"[^|\n]{0,400}?")


_LOSS_AND_LR = _before(r" loss\b", "loss") + _before(r" LR\b", "lr")

DIALECT = Dialect(
    name="tinygrad",
    engine="tinygrad",
    patterns=(
        Pattern(
            "step",
            START
            + rf"(?P<step>\d{{1,12}}) {{1,8}}(?={NUMBER} [a-zA-Z])"
            + has(rf"{NUMBER} m?s run\b", rf"{NUMBER} loss\b")
            + _before(r" ms run\b", "step_ms")
            + _before(r" s run\b", "step_s")
            + _LOSS_AND_LR,
            literal="s run",
            head=START + r"\d{1,12} {1,8}[-+\dni]",
        ),
        Pattern(
            "step",
            LINE_START
            + rf"(?={NUMBER} [a-zA-Z])"
            + has(rf"{NUMBER} loss\b", r" LR\b", r" GB used\b")
            + _before(r" s(?=,|\s*$)", "step_s")
            + _LOSS_AND_LR,
            literal=" GB used",
        ),
        Pattern(
            "fact",
            START + r"(?:BS=(?P<global_batch>\d{1,7})|(?:DP|GPUS)=(?P<gpus_said>\d{1,5})|SEQLEN=(?P<seq>\d{1,7}))(?=\s)"
            r"(?=[^\n]{0,600} examples/mlperf/model_train\.py)",
            literal=" examples/mlperf/model_train.py",
        ),
        Pattern(
            "fact", rf" ms python, [^|\n]{{0,80}}?{NUMBER} ms \w{{1,12}} \* (?P<gpus>\d{{1,6}}), ", literal=" ms run, "
        ),
        line("fact", "training with batch size {global_batch} for one epoch with {steps_planned} steps", START),
    ),
)
