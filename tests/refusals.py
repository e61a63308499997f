"""Tables of what a package refuses: {a name: (what is done in a folder, `the error | its hint`)}; and which refusals of
its source have no row. HERE stands for the folder, PYTHON for the interpreter."""

import ast
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import UserError
from tests.conftest import REPOSITORY

Row = tuple[Callable[[Path], Any], str]


def check_refusal(row: Row, folder: Path) -> None:
    """Fails unless what the row does is refused with its words; `...` stands for words of another program."""
    act, words = row
    fault = _fault_of(act, folder)
    said = f"{fault} | {fault.hint}" if isinstance(fault, UserError) else str(fault)
    said = said.replace(str(folder), "HERE").replace(sys.executable, "PYTHON")
    assert said == words or re.fullmatch(".*".join(map(re.escape, words.split("..."))), said), said


def _fault_of(act: Callable[[Path], Any], folder: Path) -> Exception:
    try:
        act(folder)
    except (UserError, ValueError, RuntimeError, TimeoutError) as fault:
        return fault
    raise AssertionError("it is not refused")


def unseen_refusals(package: str, rows: Mapping[str, Row], folder: Path) -> list[str]:
    """The functions of a package's modules that raise one of our errors where no row does, in the order of names."""
    seen: set[tuple[str, int]] = set()
    for number, (act, *_) in enumerate(rows.values()):
        (place := folder / str(number)).mkdir()
        trace = _fault_of(act, place).__traceback__
        while trace is not None:
            seen.add((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
            trace = trace.tb_next
    unseen = set()
    for path in sorted((REPOSITORY / package).glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if (lines := _lines_of_refusal(node)) and not any((str(path), line) in seen for line in lines):
                        unseen.add(f"{path.stem}.{function.name}")
    return sorted(unseen)


def _lines_of_refusal(node: ast.AST) -> range:
    """The lines of a statement that raises a UserError, or turns an OSError into one; of another, none."""
    if isinstance(node, ast.With) and any(_is_call_of(item.context_expr, {"OsErrorAs"}) for item in node.items):
        return range(node.lineno, node.body[0].lineno)
    if isinstance(node, ast.Raise) and _is_call_of(node.exc, _OURS):
        return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return range(0)


def _is_call_of(node: ast.AST | None, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


_OURS = {"ConfigError", "LayoutError", "DataError", "UnreadableFile", "CheckpointError"}
