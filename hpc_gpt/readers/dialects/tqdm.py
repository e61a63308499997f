"""tqdm's bars: how far a run is, and since when. They give the curve, never the step time.

A bar's rate is smoothed, and holds evaluations and saves. Of a bar it is not known what it counts: one that says that it
maps, loads or downloads something is left alone, and so is one of items other than `it`. A bar of an evaluation looks
like one of training. A bar that shows a loss gives that too. A cut bar has no `it/s]` and is not read.
"""

from __future__ import annotations

from hpc_gpt.readers.pattern import CLOCK, LINE_START, NUMBER, Dialect, Pattern

# What a bar is called. One without a name, or named after training, counts steps as far as is known.
_NAMED = LINE_START + r"(?P<before>(?:Train|Training|Steps?|Iterations?)\b(?![^|\n]{0,80}[Ee]poch)[^|%]{0,40})?"
_EPOCH = (
    LINE_START + r"(?:Train(?:ing)? )?[Ee]poch:? {0,2}(?P<epoch>\d{1,6})(?![^|\n]{0,80} completed \(loss)[^|%]{0,40}"
)
_BAR = r"(?<!\d)\d{1,3}%\|[^|\n]{0,400}\| *"
_CLOCKS = rf"<(?:{CLOCK}|\?), *(?:\d{{1,9}}(?:\.\d{{1,9}})?|\?)(?:s/it|it/s)"
_OTHERS = r"(?![^\]\n]{0,2000}(?:v_num=|reduced_train_loss|num_updates=))"  # Lightning's, NeMo's, fairseq's
_LOSS = rf"(?=[^\]\n]{{0,2000}}[ ,{{'\"](?:train[_ ])?loss['\"]?[=:] ?(?P<loss>{NUMBER})(?=[,}}\]]))[^\]\n]{{0,2000}}\]"

DIALECT = Dialect(
    name="tqdm",
    flags=("progress bars tell how far a run was, not how long a step took",),
    patterns=(
        Pattern(
            "progress",
            "%|",
            # What a named bar runs up to may be less than the run.
            _NAMED
            + _BAR
            + r"(?P<step>\d{1,12})/(?(before)\d{1,12}|(?P<steps_planned>\d{1,12}))"
            + rf" \[(?P<elapsed_s>{CLOCK})"
            + _CLOCKS
            + _OTHERS
            + r"(?:, [^\]\n]{0,2000})?\]",
        ),
        Pattern(
            "step",
            "%|",
            _NAMED + _BAR + rf"(?P<step>\d{{1,12}})/\d{{1,12}} \[{CLOCK}" + _CLOCKS + _OTHERS + _LOSS,
        ),
        # The bar of an epoch begins anew with each: its count is no step.
        Pattern("step", "%|", _EPOCH + _BAR + rf"\d{{1,12}}/\d{{1,12}} \[{CLOCK}" + _CLOCKS + _OTHERS + _LOSS),
    ),
    specimen="""\
 12%|█▎        | 2/16 [02:00<13:54, 59.61s/it]
 93%|█████████▎| 18625/20000 [5:43:21<25:20,  0.90it/s, loss=3.400]
Epoch 2/3:  12%|█▎        | 2/16 [02:00<13:54, 59.61s/it, loss=3.125]
""",
    seen="bigscience-workshop/bigscience experiments/gpt2-hf-ds",
)
