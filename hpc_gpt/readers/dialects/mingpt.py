"""minGPT: the time of the previous iteration in ms, and its loss, which ends the line."""

from __future__ import annotations

from hpc_gpt.readers.pattern import END, NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="mingpt",
    engine="mingpt",
    patterns=(
        Pattern(
            "step",
            "iter_dt ",
            rf"\biter_dt (?P<step_ms>{NUMBER})ms; iter (?P<step>\d{{1,12}}): train loss (?P<loss>{NUMBER})" + END,
        ),
    ),
    specimen="iter_dt 12.34ms; iter 100: train loss 4.10214\n",
    seen="karpathy/minGPT projects/chargpt/chargpt.py",
)
