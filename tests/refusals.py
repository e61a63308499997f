"""Tables of what a package refuses: {a name: (what is done in a folder, `the error | its hint`)}. HERE stands for the
folder, `...` for words of another program."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import UserError

Row = tuple[Callable[[Path], Any], str]


def check_refusal(row: Row, folder: Path) -> None:
    """Fails unless what the row does is refused in its words, to the letter."""
    act, words = row
    said = "it is not refused"
    try:
        act(folder)
    except UserError as fault:
        said = f"{fault} | {fault.hint}"
    except (ValueError, RuntimeError, TimeoutError) as fault:
        said = str(fault)
    said = said.replace(str(folder), "HERE")
    assert said == words or re.fullmatch(".*".join(map(re.escape, words.split("..."))), said), said
