"""tqdm's bars: the progress of a run and its elapsed time. They give the curve; the step time only for a Trainer
(`reader.runs.times`).

A bar is recognised by its shape, not by names and figures. Its rate is smoothed and includes evaluations and saves.
Nothing says what a bar counts: one that maps, loads or downloads is not read, nor one of items other than `it`. A bar
of an evaluation looks like one of training: a bar without a name counts only in a run that shows a training otherwise.
If a bar shows a loss, the loss is read. In a cut bar, which has no `]`, a figure with a comma after it is read; the
bar gives no goal, as the missing name might show that it counts the steps of an epoch.
"""

from hpc_gpt.reader.lines.pattern import CLOCK, LINE_START, NUMBER, Dialect, Pattern

# A bar named after training counts steps. A bar without a name may count them.
BAR_OF_TRAINING = "bar_of_training"
_BEGIN = r"^(?![^|\n]{0,160}\b[Ee]poch)" + LINE_START
_NAME = r"(?:Train|Training|Steps?|Iterations?)\b(?![^|\n]{0,80}[Ee]poch)[^|%]{0,40}"
_EPOCH = (
    LINE_START + r"(?:Train(?:ing)? )?[Ee]poch:? {0,2}(?P<epoch>\d{1,6})(?![^|\n]{0,80} completed \(loss)[^|%]{0,40}"
)
_BAR = r"(?<!\d)\d{1,3}%\|[^|\n]{0,400}\| *"
_CLOCKS = rf"<(?:{CLOCK}|\?), *(?:\d{{1,9}}(?:\.\d{{1,9}})?|\?)(?:s/it|it/s)"
_OTHERS = r"(?![^\]\n]{0,2000}(?:v_num=|reduced_train_loss|num_updates=))"  # Lightning's, NeMo's, fairseq's
# A bar that names an epoch beside its count may count epochs: its goal is not a number of steps.
_SAYS_EPOCH = r"[^\]\n]{0,2000}\b[Ee]pochs?['\"]?[=:] ?\d{1,6}[,}\]/ ]"
_GOAL = rf"(?:(?P<steps_planned>\d{{1,12}})(?= \[[^\]\n]{{0,2000}}[^\]\n.…]\])(?!{_SAYS_EPOCH})|\d{{1,12}})"
_LOSS = rf"(?=[^\]\n]{{0,2000}}[ ,{{'\"](?:[Tt]rain[_ ])?[Ll]oss(?:['\"]?[=:] ?| )(?P<loss>{NUMBER})(?=[,}}\]]))[^\]\n]{{0,2000}}"

DIALECT = Dialect(
    name="tqdm",
    flags=("progress bars show how far a run was, not how long a step took",),
    patterns=(
        *(
            Pattern(
                "progress",
                _BEGIN
                + name
                + _BAR
                + rf"(?P<step>\d{{1,12}})/{goal} \[(?P<elapsed_s>{CLOCK})"
                + _CLOCKS
                + _OTHERS
                # The goal of a named bar may be less than the whole run.
                + r"(?:, [^\]\n]{0,2000})?(?:\]|$)",
                literal="%|",
                facts=facts,
            )
            for name, goal, facts in ((_NAME, r"\d{1,12}", {BAR_OF_TRAINING: 1}), ("", _GOAL, {}))
        ),
        Pattern(
            "step",
            _BEGIN
            + f"(?:{_NAME})?"
            + _BAR
            + rf"(?P<step>\d{{1,12}})/\d{{1,12}} \[{CLOCK}"
            + _CLOCKS
            + _OTHERS
            + _LOSS
            + r"(?:\]|$)",
        ),
        # The count of an epoch's bar restarts with each epoch: it is not a step number.
        # A cut bar may be fairseq's, in bits, or Lightning's.
        Pattern("step", _EPOCH + _BAR + rf"\d{{1,12}}/\d{{1,12}} \[{CLOCK}" + _CLOCKS + _OTHERS + _LOSS + r"\]"),
    ),
)
