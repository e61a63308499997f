"""Tables of a training in a file of values with commas: each row becomes a line with the names of its columns.

A table is one of a training if its first line has a step or an epoch, and a loss. Any other text stays as it is.
"""

import re
from collections.abc import Iterator

_OTHERS = "val|valid|validation|eval|test|dev"
# (the name in the line, a regex for the names of columns): the first column that fits is read.
_COLUMNS = tuple(
    (name, re.compile(regex, re.IGNORECASE))
    for name, regex in (
        ("step", r"(?:trainer/)?(?:global_)?_?(?:step|iter(?:ation)?)s?"),
        ("epoch", "epochs?"),
        ("train_loss", r"(?:train(?:ing)?[_/ ]?)?loss(?:_step|/train)?|loss_train"),
        ("train_loss", r"train(?:ing)?[_/ ]loss_epoch"),
        ("val_loss", rf"(?:{_OTHERS})[_/ ]?loss(?:_epoch|_step)?|loss/(?:{_OTHERS})"),
        ("lr", r"lr(?:-\w+)?|learning[_ ]rate"),
        ("grad_norm", r"grad(?:ient)?[_ ]norm"),
        ("tokens_seen", r"(?:consumed|total)_tokens|tokens[_ ](?:seen|consumed)"),
        ("step_time_ms", r"(?:step_time|time_per_step|dt)_ms|step_ms"),
        ("tokens_per_sec", r"tok(?:en)?s?(?:_per_|/)s(?:ec(?:ond)?)?"),
    )
)
_COUNTS = (b"step", b"epoch", b"tokens_seen")
_WHOLE = re.compile(rb"(\d+)\.0*")


def with_names(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks of a text, with a name before each value that is read if it is a table of a training."""
    names: dict[int, bytes] | None = None
    width = 0
    for chunk in chunks:
        if names is None:
            first = chunk.split(b"\n", 1)[0].strip().split(b",")
            names, width = _names_of(first), len(first)
        yield b"\n".join(_named(row, names, width) for row in chunk.split(b"\n")) if names else chunk


def _names_of(cells: list[bytes]) -> dict[int, bytes]:
    """{place of a column that is read: its name}; {} if the cells are not the head of a table of a training."""
    texts = [cell.strip(b' "').decode("utf-8", "replace").split(" - ")[-1] for cell in cells]
    places: dict[str, int] = {}
    for name, regex in _COLUMNS:
        if fitting := [place for place, text in enumerate(texts) if regex.fullmatch(text)]:
            places.setdefault(name, fitting[0])
    counts, losses = places.keys() & {"step", "epoch"}, places.keys() & {"train_loss", "val_loss"}
    return {place: name.encode() for name, place in places.items()} if counts and losses else {}


def _named(row: bytes, names: dict[int, bytes], width: int) -> bytes:
    cells = row.rstrip(b"\r").split(b",")
    if len(cells) != width:
        return row
    values = ((name, cells[place].strip(b' "')) for place, name in names.items())
    return b", ".join(
        name + b"=" + (_WHOLE.sub(rb"\1", value) if name in _COUNTS else value) for name, value in values if value
    )
