"""Unknown programs: a line that names a step and a loss, recognised by its shape alone.

A line is read this way only if no other dialect matches it. Many such loops print the loss last, where a cut number
cannot be noticed.

Read are the step, the loss, the learning rate, the gradient norm, and a time if it says that it is of a step and in
which unit. Tokens/s are not read: nothing says whether they are of one GPU or of the job.
"""

from __future__ import annotations

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern

_IS = r"(?:['\"]?[:=] {0,4}| )"
_STEP = r"(?<![\w./-])(?:global_?)?(?:step|iter|iteration)" + _IS
_OTHER_LOSS = "".join(
    rf"(?<!{word}[ _/-])"
    for word in ("val", "eval", "valid", "validation", "test", "dev", "best", "aux", "avg", "min", "ema", "balancing")
)
_LOSS = rf"(?<![./]){_OTHER_LOSS}(?<![a-z])(?:train(?:ing)?[_ /-])?loss{_IS}(?P<loss>{NUMBER})(?=[\s,;|)\]}}]|$)"


def _later(names: str, group: str, unit: str = "") -> str:
    return rf"(?=(?:[^\n]{{0,300}}?(?<![\w./-])(?:{names}){_IS}(?P<{group}>{NUMBER}){unit}(?=[\s,;|)\]}}]|$))?)"


DIALECT = Dialect(
    name="generic",
    last_resort=True,
    flags=("the program is not known: its lines were recognised by shape alone",),
    patterns=(
        Pattern(
            "step",
            "oss",
            rf"(?i){_STEP}(?P<step>\d{{1,12}})(?: ?/ ?\d{{1,12}})?(?=[\s,;:|)\]}}])"
            rf"(?![^\n]{{0,200}}\b(?:val|valid|validation|eval|evaluation|test)\b)[^\n]{{0,200}}?{_LOSS}"
            + _later("lr|learning[_ ]rate", "lr")
            + _later("grad(?:ient)?[_ ]?norm|gnorm", "grad_norm")
            + _later(
                "(?:step|iter|iteration)[_ ]time|time(?:[_/ ]per[_ ]|/)(?:step|iter|iteration)|sec/(?:step|iter)",
                "step_s",
                " ?s",
            )
            + _later(
                "(?:step|iter|iteration)[_ ]time|time(?:[_/ ]per[_ ]|/)(?:step|iter|iteration)", "step_ms", " ?ms"
            ),
        ),
        Pattern(
            "step",
            "oss",
            rf"(?i){_LOSS}[^\n]{{0,100}}?{_STEP}(?P<step>\d{{1,12}})(?=[\s,;|)\]}}]|$)",
        ),
    ),
    specimen="""\
[INFO] global_step=120 epoch=0 train_loss=3.2184 lr=0.0003 grad_norm=1.21 step_time=0.412s
loss:0.92626953125, global_step:160
Step 120/1000, Loss: 3.2184, LR: 3.0e-4
""",
    seen="common to loops written by hand",
)
