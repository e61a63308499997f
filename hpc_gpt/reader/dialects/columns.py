"""Columns of figures, with a tab between, below a header that begins with step and loss. Only these two are read."""

from hpc_gpt.reader.pattern import LINE_START, NUMBER, Dialect, Pattern

_TAB = r"\t {0,8}"

DIALECT = Dialect(
    name="columns",
    last_resort=True,
    flags=("the program is not known: its columns were recognised by their header",),
    patterns=(
        Pattern(
            "start",
            LINE_START + rf"(?i:(?:global[_ ])?step|iter(?:ation)?){_TAB}(?i:train(?:ing)?[_ ])?(?i:loss)(?=\t|\s*$)",
            literal="oss",
        ),
        Pattern(
            "step",
            LINE_START + rf"(?P<step>\d{{1,12}}){_TAB}(?P<loss>{NUMBER})(?=\t|\s*$)",
            literal="\t",
            own=True,
        ),
    ),
)
