"""Levanter logs its bar as lines. Counts have three digits and an SI suffix (1.23kit), so steps are rounded."""

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="levanter",
    engine="levanter",
    flags=("the bar rounds steps to three digits",),
    patterns=(
        Pattern(
            "step",
            "Progress on:train ",
            r"\bProgress on:train (?P<step>\d{1,4}(?:\.\d{1,2})?[kM]?)it/(?P<steps_planned>\d{1,4}(?:\.\d{1,2})?[kM]?)it "
            rf"rate:[^\n]{{0,300}}?postfix:[^\n]{{0,100}}?\bloss=(?P<loss>{NUMBER})(?=,|\s*$)",
        ),
    ),
    specimen="""\
2024-05-01T10:00:00 - 0 - tqdm_loggable.tqdm_logging - tqdm_logging.py:145 - INFO :: Progress on:train 1.23kit/10.0kit rate:1.2it/s remaining:2:01:10 elapsed:17:10 postfix:loss=3.41
""",
    seen="stanford-crfm/levanter, tqdm-loggable README",
)
