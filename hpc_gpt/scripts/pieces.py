"""The pieces of a value: text that is known, and source for the job's bash; and how bash reads them back."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Literal, NamedTuple


class Piece(NamedTuple):
    """A piece of a value.

    text      known text
    pattern   unquoted text with `*`, `?` or `{a,b}`, which bash fills in
    runtime   source that the job's bash evaluates; `value` is what it will give, if that is known; `splits`: unquoted,
              so that bash may make several words of it
    fill      `{nodes}` or `{gpus}`, which engine `command` fills in; `value` is the number
    hosts     all nodes' names
    """

    text: str
    kind: Literal["text", "pattern", "runtime", "fill", "hosts"] = "text"
    value: str | None = None
    splits: bool = False


Argument = tuple[Piece, ...]
MASTER_ADDR = Piece("$MASTER_ADDR", "runtime")
MASTER_PORT = Piece("$MASTER_PORT", "runtime")
# The names by which an inner script has the sizes that engine `command` fills in.
FILLS = {"hpc_gpt_nodes": "{nodes}", "hpc_gpt_gpus": "{gpus}"}
_PLAIN = re.compile(r"[\w@%+=:,./-]*")


def known(argument: Argument) -> str | None:
    """The text of an argument; None if only the job knows a piece of it."""
    texts = [piece.text if piece.kind in ("text", "pattern") else piece.value for piece in argument]
    return None if None in texts else "".join(map(str, texts))


def quote(argument: Argument) -> str:
    """An argument as bash reads it back: texts quoted, what the job evaluates between double quotes."""
    texts = [piece.text for piece in argument if piece.kind == "text"]
    if len(texts) == len(argument):
        return shlex.quote("".join(texts))
    if all(piece.kind in ("text", "fill") for piece in argument) and all(map(_PLAIN.fullmatch, texts)):
        return "".join(piece.text for piece in argument)
    if any(piece.kind == "pattern" or piece.splits for piece in argument):
        return "".join(
            shlex.quote(piece.text) if piece.kind == "text" else piece.text if _is_bare(piece) else f'"{piece.text}"'
            for piece in argument
        )
    words = []
    for piece, following in zip(argument, [*(piece.text for piece in argument[1:]), ""], strict=True):
        if piece.kind == "text":
            words.append(re.sub(r'([\\"$`])', r"\\\1", piece.text))
        elif re.fullmatch(r"\$\w+", piece.text) and re.match(r"[\w\[]", following):
            words.append(f"${{{piece.text[1:]}}}")
        else:
            words.append(piece.text)
    return f'"{"".join(words)}"'


def _is_bare(piece: Piece) -> bool:
    """Whether a piece is not quoted: a pattern, or what bash may make several words of."""
    return piece.kind in ("pattern", "fill") or piece.splits


def source_of(argument: Argument) -> str:
    """An argument's text as the source of an inner script (`bash -c`, `eval`)."""
    names = {fill: f"${name}" for name, fill in FILLS.items()}
    return "".join(names[piece.text] if piece.kind == "fill" else piece.text for piece in argument)


def merged(pieces: Iterable[Piece]) -> Argument:
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.kind == "text" == found[-1].kind:
            found[-1] = Piece(found[-1].text + piece.text)
        elif piece.text or piece.kind != "text":
            found.append(piece)
    return tuple(found)


def with_spaces(values: Iterable[Argument]) -> Argument:
    return merged(piece for index, each in enumerate(values) for piece in ([Piece(" ")] * bool(index) + list(each)))


def is_hosts(argument: Argument) -> bool:
    return any(piece.kind == "hosts" for piece in argument)
