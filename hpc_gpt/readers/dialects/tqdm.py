"""tqdm's bars: how far a run is, and since when. They give the curve, never the step time.

A bar's rate is smoothed, and holds evaluations and saves. Of a bar it is not known what it counts: one that says that it
maps, loads or downloads something is left alone, and so is one of items other than `it`. A bar of an evaluation looks
like one of training. A bar that shows a loss gives that too. A cut bar has no `it/s]` and is not read.
"""

from __future__ import annotations

from hpc_gpt.readers.numerals import CLOCK, LINE_START, NUMBER
from hpc_gpt.readers.pattern import Dialect, Pattern

_LABEL = LINE_START + r"(?:(?:Epoch|Train|Training|Steps?|Iterations?)\b(?![^|\n]{0,80} completed \(loss)[^|%]{0,40})?"
_BAR = (
    r"(?<!\d)\d{1,3}%\|[^|\n]{0,400}\| *(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12})"
    rf" \[(?P<elapsed_s>{CLOCK})<(?:{CLOCK}|\?), *(?:\d{{1,9}}(?:\.\d{{1,9}})?|\?)(?:s/it|it/s)"
)
_OTHERS = r"(?![^\]\n]{0,2000}(?:v_num=|reduced_train_loss|num_updates=))"  # Lightning's, NeMo's, fairseq's

DIALECT = Dialect(
    name="tqdm",
    flags=("progress bars tell how far a run was, not how long a step took",),
    patterns=(
        Pattern("progress", "%|", _LABEL + _BAR + _OTHERS + r"(?:, [^\]\n]{0,2000})?\]"),
        Pattern(
            "step",
            "%|",
            _LABEL
            + _BAR.replace("(?P<elapsed_s>", "(?:").replace("steps_planned", "of")
            + _OTHERS
            + rf"(?=[^\]\n]{{0,2000}}[ ,{{'\"](?:train[_ ])?loss['\"]?[=:] ?(?P<loss>{NUMBER})(?=[,}}\]]))[^\]\n]{{0,2000}}\]",
        ),
    ),
    specimen="""\
 12%|█▎        | 2/16 [02:00<13:54, 59.61s/it]
 93%|█████████▎| 18625/20000 [5:43:21<25:20,  0.90it/s, loss=3.400]
""",
    seen="bigscience-workshop/bigscience experiments/gpt2-hf-ds",
)
