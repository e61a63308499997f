"""Transformer-XL and its forks. Of each line `step` counts all batches; loss and time are means since the line before."""

from __future__ import annotations

from hpc_gpt.readers.pattern import NUMBER, START, Dialect, Pattern

DIALECT = Dialect(
    name="transformer_xl",
    engine="transformer-xl",
    patterns=(
        Pattern(
            "step",
            " | ms/batch ",
            START
            + rf"\| epoch {{1,4}}(?P<epoch>\d{{1,6}}) step {{1,12}}(?P<step>\d{{1,12}}) \| {{1,8}}\d{{1,12}} batches"
            rf"(?: / {{1,8}}\d{{1,12}})? \| lr (?P<lr>{NUMBER}) \| ms/batch {{1,6}}(?P<step_ms>{NUMBER}) \| "
            rf"(?:tok/s {{1,8}}(?P<tokens_per_s>{NUMBER}) \| )?loss {{1,4}}(?P<loss>{NUMBER}) \| (?:ppl|bpc) ",
        ),
        Pattern(
            "eval",
            "| valid loss ",
            START + rf"\| Eval {{1,6}}\d{{1,9}} at step {{1,12}}(?P<step>\d{{1,12}}) \| time: {{1,8}}{NUMBER}s \| "
            rf"valid loss {{1,4}}(?P<loss_eval>{NUMBER}) \| ",
        ),
    ),
    specimen="""\
| epoch   2 step    16800 |   5330 batches | lr 0.000246 | ms/batch 621.31 | loss  7.34 | ppl  1544.213
| Eval   5 at step    20000 | time: 2560.01s | valid loss  7.32 | valid ppl  1513.171
""",
    seen="kimiyoung/transformer-xl pytorch/train.py, issue 15",
)
