"""Unknown programs: a line that names a step and a loss, recognised by its shape alone.

A line is read this way only if no other dialect matches it, and a log only if the step rises in two lines of one shape,
or in five of any; in the output of tests only in five. Many such loops print the loss last, where a cut number cannot be noticed.

Read are the step, the loss, the learning rate, the gradient norm, a time whose name or unit says that it is of a step,
and tokens or samples a second, which are taken as the job's unless their name says of a GPU.
"""

from hpc_gpt.readers.pattern import NUMBER, START, Dialect, Pattern

TESTS = "test_runner"  # a fact of the output of tests, which print lines of steps, too
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


def _rate(names: str, group: str) -> str:
    """A figure after its name, or before it at the begin of a column: `tok/s 1000`, `| 1000 tok/s`."""
    return (
        rf"(?=(?:[^\n]{{0,300}}?(?:(?<![\w./-])(?:{names}){_IS}(?={NUMBER}(?:[\s,;|)\]}}]|$))"
        rf"|[|,;(\[] {{0,8}}(?={NUMBER} ?(?:{names})(?!{_IS}{NUMBER})(?:[\s,;|)\]}}]|$)))(?P<{group}>{NUMBER}))?)"
    )


_STEPS = "(?:steps?|iter(?:ation)?s?|it)"
_SECOND = "(?:s|secs?|seconds?)"
_PER = "(?:[_ ]?/[_ ]?|[_ ]per[_ ])"
_GPU = rf"{_PER}(?:gpu|device|rank)"
_TIME = "(?:step|iter|iteration)[_ ]time|time(?:[_/ ]per[_ ]|/)(?:step|iter|iteration)|dt"
_TIME_MS = "(?:step|iter|iteration)[_ ]time[_ ]ms|(?:step|iter)[_ ]ms"
# The unit is in the name, or after the figure.
_MILLISECONDS = (
    rf"(?=(?:[^\n]{{0,300}}?(?<![\w./-])(?:(?:{_TIME_MS}){_IS}|(?:{_TIME}|(?<![a-z][ _-])time){_IS}(?={NUMBER} ?ms))"
    rf"(?P<step_ms>{NUMBER})"
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
            + _later(_TIME, "step_s", " ?s")
            + _MILLISECONDS
            + _rate(rf"{_SECOND}{_PER}{_STEPS}", "seconds_per_step")
            + _rate(rf"(?:ms|milliseconds?){_PER}{_STEPS}", "ms_per_step")
            + _rate(rf"tok(?:en)?s?{_PER}{_SECOND}", "tokens_per_s")
            + _rate(rf"tok(?:en)?s?(?:{_PER}{_SECOND}{_GPU}|{_GPU}{_PER}{_SECOND})", "tokens_per_s_gpu")
            + _rate(rf"(?:samples?|sequences?|examples?){_PER}{_SECOND}", "samples_per_s"),
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
        *(
            Pattern("fact", literal, START + regex, facts={TESTS: 1}, weak=True)
            for literal, regex in (
                (" test session starts ", r"=+ test session starts =+"),
                (" tests in ", r"Ran \d{1,7} tests in \d"),
                ("=== RUN ", r"=== RUN "),
            )
        ),
    ),
    specimen="""\
[INFO] global_step=120 epoch=0 train_loss=3.9709 lr=0.0003 grad_norm=1.06 step_time=0.047s
loss:0.92626953125, global_step:160
Step 120/1000, Loss: 3.9709, LR: 3.3e-4
step=20 loss=4.9602 dt=262.34ms tok/sec=18476.1
{"step": 20, "loss": 4.9602, "step_time_ms": 269.6}
step 20 | loss 4.960 | 103 tok/s | dt 498ms
epoch 0 step 20/500 train_loss=4.960 tokens_per_sec=18476 sec_per_step=0.277
step 20/500 loss 4.960 time 270.0 ms tok/s 18476
============================= test session starts ==============================
Ran 12 tests in 0.104s
=== RUN   TestLoss
iteration 20: loss 1.6270 bpc, time 269.6ms
Batch 40 Loss: 8.8305, Speed: 563.5 samples/sec
""",
    seen="common to loops written by hand",
)
