"""Unknown programs: a line that names a step and a loss, recognised by its shape alone.

A line is read this way only if no other dialect matches it, and a log only if five lines with a rising step are. Many such loops print the loss last, where a cut number
cannot be noticed.

Read are the step, the loss, the learning rate, the gradient norm, and a time if it says that it is of a step and in
which unit. Tokens/s are not read: nothing says whether they are of one GPU or of the job.
"""

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern

_IS = r"(?:['\"]?[:=] {0,8}| {1,8})"
_STEP = r"(?<![\w./-])(?:global_?)?(?:step|iter|iteration)" + _IS
_OTHER_LOSS = "".join(
    rf"(?<!{word}[ _/-])"
    for word in ("val", "eval", "valid", "validation", "test", "dev", "best", "aux", "avg", "min", "ema", "balancing")
)
LOSS = rf"(?<![./]){_OTHER_LOSS}(?<![a-z])(?:train(?:ing)?[_ /-])?loss{_IS}(?P<loss>{NUMBER})(?=[\s,;|)\]}}]|$)(?! ?(?:bp|bits?\b))"
_BITS = rf"(?<![./]){_OTHER_LOSS}(?<![a-z])(?:train(?:ing)?[_ /-])?loss{_IS}(?P<loss_bits>{NUMBER}) ?(?:bpc|bits)\b"


def _later(names: str, group: str, unit: str = "") -> str:
    return rf"(?=(?:[^\n]{{0,300}}?(?<![\w./-])(?:{names}){_IS}(?P<{group}>{NUMBER}){unit}(?=[\s,;|)\]}}]|$))?)"


_TIME = "(?:step|iter|iteration)[_ ]time|time(?:[_/ ]per[_ ]|/)(?:step|iter|iteration)|dt"
_TIME_MS = "(?:step|iter|iteration)[_ ]time[_ ]ms|(?:step|iter)[_ ]ms|ms(?:[_ ]per[_ ]|/)(?:step|iter)"
# The unit is in the name, or after the figure.
_MILLISECONDS = (
    rf"(?=(?:[^\n]{{0,300}}?(?<![\w./-])(?:(?:{_TIME_MS}){_IS}|(?:{_TIME}){_IS}(?={NUMBER} ?ms))(?P<step_ms>{NUMBER})"
    r"(?: ?ms)?(?=[\s,;|)\]}]|$))?)"
)

DIALECT = Dialect(
    name="generic",
    last_resort=True,
    flags=("the program is not known: its lines were recognised by shape alone",),
    patterns=(
        Pattern(
            "step",
            "oss",
            rf"(?i){_STEP}(?P<step>\d{{1,12}})(?: ?/ {{0,8}}\d{{1,12}})?(?=[\s,;:|)\]}}])"
            rf"(?![^\n]{{0,200}}\b(?:val|valid|validation|eval|evaluation|test)\b)[^\n]{{0,200}}?{LOSS}"
            + _later("lr|learning[_ ]rate", "lr")
            + _later("grad(?:ient)?[_ ]?norm|gnorm", "grad_norm")
            + _later(
                f"{_TIME}|sec/(?:step|iter)",
                "step_s",
                " ?s",
            )
            + _MILLISECONDS,
        ),
        # In bits a character.
        Pattern(
            "step",
            "oss",
            rf"(?i){_STEP}(?P<step>\d{{1,12}})(?: ?/ {{0,8}}\d{{1,12}})?(?=[\s,;:|)\]}}])[^\n]{{0,100}}?{_BITS}"
            rf"(?:, {{1,4}}time:? (?P<step_ms>{NUMBER}) ?ms\b)?",
        ),
        Pattern(
            "step",
            "amples/s",
            rf"(?i)\bbatch {{1,4}}(?P<step>\d{{1,12}}),? {{1,4}}loss: {{0,4}}(?P<loss>{NUMBER}),? {{0,4}}speed: {{0,4}}"
            rf"(?P<samples_per_s>{NUMBER}) samples/s(?:ec)?\b",
        ),
        Pattern(
            "step",
            "oss",
            rf"(?i){LOSS}[^\n]{{0,100}}?{_STEP}(?P<step>\d{{1,12}})(?=[\s,;|)\]}}]|$)",
        ),
    ),
    specimen="""\
[INFO] global_step=120 epoch=0 train_loss=3.9709 lr=0.0003 grad_norm=1.06 step_time=0.047s
loss:0.92626953125, global_step:160
Step 120/1000, Loss: 3.9709, LR: 3.3e-4
step=20 loss=4.9602 dt=262.34ms tok/sec=18476.1
{"step": 20, "loss": 4.9602, "step_time_ms": 269.6}
iteration 20: loss 1.6270 bpc, time 269.6ms
Batch 40 Loss: 8.8305, Speed: 563.5 samples/sec
""",
    seen="common to loops written by hand",
)
