"""Unknown programs that print a line an epoch, with the loss of training or of both: `Epoch 3/100 - Train Loss: 1.90`.

Programs name these figures in many ways, so a line is a shape and not a table of names. Such a line has no step, so it
counts only if no program prints steps (`reader.runs.epochs`). The epoch may be on a line of its own, before the losses. A
figure after `Train=` is a loss only in a line without the word. Seconds are of the epoch.
"""

from hpc_gpt.reader.lines.fields import EPOCHS
from hpc_gpt.reader.lines.pattern import AFTER, ANY_NUMBER, CLOCK, END, IS, START, VALIDATION, Dialect, Pattern

# A line of a step.
_OF_STEP = r"(?![^\n]{0,300}\b(?:global[_ ]?)?(?:step|iter(?:ation)?|batch)(?:es|s)?['\"]?[ :=\[(#]{0,4}\d{1,12}\b)"
_HEAD = (
    r"(?<![\w./-])epoch['\"]?[ :=#]{0,4}[\[(]? {0,4}(?P<FIELD>\d{1,6})(?![\d.%])"
    r"(?: ?(?:/|of) {0,8}(?P<epochs_planned>\d{1,6})(?!\d))?[\])]?"
)
_NO_PART = r"(?!(?:(?!loss)[^\n]){0,200}(?:\d ?/ {0,8}\d|%\|))"  # before the loss no count or bar
_WITHIN = r"[^\n]{0,300}?"
_TRAIN = r"(?<![\w/.-])train(?:ing)?[ _/-]?(?:(?!aux|balanc|router)\w{1,12}[ _/-]){0,2}loss" + IS
_OTHERS = "".join(rf"(?<!{word}[ _/-])" for word in (*VALIDATION.split("|"), "best", "aux", "min", "train", "training"))
_ALONE = rf"(?<![\w/.]){_OTHERS}(?:(?:avg|average|mean|total|running|epoch)[ _.]{{0,2}})?loss{IS}"
_NOT_EVAL = rf"(?:(?!\b(?:{VALIDATION})\b)[^\n]){{0,300}}?"
_EVAL = rf"(?<![\w/.-])(?:{VALIDATION})(?: - |[ _/-]?)(?:\w{{1,12}}[ _/-])?loss{IS}"


def _of(name: str, group: str, before: str = _WITHIN) -> str:
    return rf"(?={before}{name}(?P<{group}>{ANY_NUMBER})(?:{AFTER}|(?=\.(?:\s|$))))"


_LOSSES = (
    rf"(?:{_of(_TRAIN, 'loss')}|{_of(_ALONE, 'loss_alone', _NOT_EVAL)}|(?!{_WITHIN}loss){_of('train=', 'loss_short')})"
    rf"(?:{_of(_EVAL, 'loss_eval')}|(?!{_WITHIN}loss){_of('val=', 'loss_eval_short')}|)"
)
_TIME = (
    rf"(?=(?:{_WITHIN}(?:time(?: ?\(s(?:ec)?\))?|took|elapsed|duration)['\"]?[ :=]{{1,4}}(?P<step_s>{CLOCK}|{ANY_NUMBER})"
    r"(?= ?(?:s|secs?|seconds?)?(?:[,;|)\]}.]|\s(?! ?(?:m|h))|$)))?)"
)

_EPOCH, _SAID = (_HEAD.replace("FIELD", field) for field in ("epoch", "epoch_said"))
_LINE = rf"^(?i:{_OF_STEP}(?={_WITHIN}{_EPOCH}{_NO_PART}){_LOSSES}{_TIME})"
_LITERALS = ("poch", "POCH")

DIALECT = Dialect(
    name=EPOCHS,
    last_resort=True,
    flags=("the program is not known: its lines were recognised by shape alone",),
    patterns=(
        *(Pattern("step", _LINE, literal) for literal in _LITERALS),
        *(Pattern("fact", START + rf"(?i:{_SAID}):?{END}", literal, weak=True) for literal in _LITERALS),
        # The losses of the epoch that a line before them names.
        Pattern("step", rf"^(?i:{_OF_STEP}(?!{_WITHIN}epoch){_of(_TRAIN, 'loss')})", "oss"),
        Pattern("more", rf"^(?i:{_OF_STEP}(?!{_WITHIN}train){_of(_EVAL, 'loss_eval')})", "oss", own=True),
    ),
)
