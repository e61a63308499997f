"""Letters and short names that a document explains before it uses them in a formula."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_gpt.report.audit.document import Passage
from hpc_gpt.report.audit.quantities import UNITS, Named, named, plain_unit, quantity_of, spelled

_QUANTITIES: tuple[str, ...] = ("tp", "pp", "dp", "cp", "seq", "micro_batch", "micro_batches", "global_batch", "gpus")
_QUANTITIES += ("vocab", "hidden", "layers", "size", "step_s", "heads", "nodes")
# "P is the number of parameters in billions", "where B global batch, t seconds": a symbol and what it stands for.
_SYMBOL = re.compile(
    rf"(?<![\w$-])[`*$]{{0,2}}(?P<symbol>[A-Za-z]\w{{0,7}})[`*$]{{0,2}}(?P<is>\s{{0,3}}(?:=|:|\bis\b|\bare\b|-|–)\s{{0,3}}|\s)"
    rf"(?:the |total ){{0,2}}(?:(?P<name>{spelled(_QUANTITIES)})(?!\w)(?:\s(?:in|\()\s?(?P<unit>\w{{1,12}}))?"
    r"|(?P<seconds>(?:seconds|secs?)(?:\s(?:per|a)\s(?:step|iteration|iter))?)(?!\w))",
    re.IGNORECASE,
)


def read_symbols(passages: Sequence[Passage]) -> dict[str, Named]:
    """Names of formulas that the document explains. One that it explains in two ways stands for nothing.

    What is said with "is" or "=" counts before what merely stands side by side.
    """
    said: dict[str, dict[bool, set[Named]]] = {}
    for passage in passages:
        if passage.is_code:
            continue
        for match in _SYMBOL.finditer(passage.text):
            symbol, firmly = match["symbol"], bool(match["is"].strip())
            if named(symbol, in_formula=True) or (not firmly and len(symbol) > 1):
                continue
            quantity = "step_s" if match["seconds"] else (quantity_of(match["name"]) or "")
            unit = "s" if match["seconds"] else plain_unit(match["unit"] or "")
            unit = {"billions": "billion", "millions": "million"}.get(unit, unit)
            meant = Named(quantity, unit if unit in UNITS.get(quantity, {}) else None)
            said.setdefault(symbol, {}).setdefault(firmly, set()).add(meant)
    return {symbol: next(iter(ways)) for symbol, by in said.items() if len(ways := by.get(True) or by[False]) == 1}
