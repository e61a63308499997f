"""DeepSpeed-Domino's training example: a line an iteration, the time in ms at its end, where a cut cannot be noticed."""

from __future__ import annotations

from hpc_gpt.readers.pattern import END, LINE_START, NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="deepspeed_domino",
    engine="deepspeed-domino",
    patterns=(
        Pattern(
            "step",
            "| iteration time (ms): ",
            LINE_START + rf"iteration: (?P<step>\d{{1,12}}) \| loss: (?P<loss>{NUMBER}) \| iteration time \(ms\): "
            rf"(?P<step_ms>{NUMBER})" + END,
        ),
    ),
    specimen="""\
iteration: 1 | loss: 11.318 | iteration time (ms): 2174.0469932556152
""",
    seen="microsoft/DeepSpeedExamples training/DeepSpeed-Domino/README.md",
)
