"""An audit as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hpc_gpt.report.audit.findings import Audit, Finding
from hpc_gpt.report.grid import plain

SCHEMA = 1
_LONGEST_ROW = 160


def as_text(audit: Audit) -> str:
    """The contradictions, line by line with their arithmetic; then the logs, the counts and what was not checked."""
    lines: list[str] = []
    for finding in audit.findings:
        lines += _of_finding(audit, finding)
    for match in audit.matches:
        where = f"line {match.line}" if match.line is not None else "no row"
        lines.append(f"log {match.run}: {where}: {match.why}")
    if audit.matches:
        lines.append("")
    counts = audit.counts
    lines.append(
        f"{_count(counts['findings'], 'contradiction')} in {_count(counts['tables'], 'table')}: of {counts['cells']} "
        f"cells {counts['holds']} hold, {counts['breaks']} break, {counts['blank']} are blank, "
        f"{counts['not_checked']} were not checked"
    )
    lines += [f"  {number} not checked: {column}: {why}" for (column, why), number in _unchecked(audit)]
    lines += [f"  not read: {words}" for words in audit.left_out]
    return "".join(plain(line) + "\n" for line in lines)


def as_json(audit: Audit) -> str:
    """One object: {"schema": 1, "findings": [...], "counts": {...}, ...}; "cells" holds all that are not blank."""
    tables: dict[str, Any] = {
        "schema": SCHEMA,
        "document": str(audit.path),
        "findings": [vars(finding) for finding in audit.findings],
        "counts": audit.counts,
        "logs": [vars(match) for match in audit.matches],
        "cells": [vars(cell) for cell in audit.cells if cell.outcome != "blank"],
        "left_out": list(audit.left_out),
    }
    return json.dumps(tables, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _of_finding(audit: Audit, finding: Finding) -> list[str]:
    row = finding.row if len(finding.row) <= _LONGEST_ROW else finding.row[:_LONGEST_ROW] + " ..."
    lines = [f"{audit.path.name}:{finding.line}: {finding.column}: {finding.arithmetic}"]
    lines.append(f"    row: {row}")
    lines += [f"    in: {finding.table}"] if finding.table else []
    lines += [f"    by: {finding.source}"] if finding.source else []
    return [*lines, ""]


def _unchecked(audit: Audit) -> list[tuple[tuple[str, str], int]]:
    """What kept cells from being checked, by column, the most frequent first."""
    counted = Counter((cell.column, cell.why) for cell in audit.cells if cell.outcome == "not checked")
    return counted.most_common()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
