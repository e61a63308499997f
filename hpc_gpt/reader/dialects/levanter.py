"""Levanter logs its bar as lines. Counts have three digits and an SI suffix (1.23kit), so steps are rounded."""

from hpc_gpt.reader.pattern import NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="levanter",
    engine="levanter",
    flags=("the bar rounds steps to three digits",),
    patterns=(
        Pattern(
            "step",
            r"\bProgress on:train (?P<step>\d{1,4}(?:\.\d{1,2})?[kM]?)it/(?P<steps_planned>\d{1,4}(?:\.\d{1,2})?[kM]?)it "
            rf"rate:[^\n]{{0,300}}?postfix:[^\n]{{0,100}}?\bloss=(?P<loss>{NUMBER})(?=,|\s*$)",
        ),
    ),
)
