"""`hpc-gpt report --audit TABLE LOGS`: checks each cell of a published table against its formula and its logs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_gpt.formulas import Recompute
from hpc_gpt.readers.runs import RunRead
from hpc_gpt.report.audit.document import Table, read_document
from hpc_gpt.report.audit.ledger import Contradiction, Ledger, LedgerCell, read_table
from hpc_gpt.report.audit.log_checks import Match, check_logs
from hpc_gpt.report.audit.row_checks import (
    NAMED,
    TARGETS,
    FormulaName,
    check_batch,
    check_layout,
    check_named,
    check_rates,
    check_stated,
    stated_for,
)
from hpc_gpt.report.audit.statements import Statements
from hpc_gpt.words import counted, plain

__all__ = ["NAMED", "Audit", "Cell", "Finding", "FormulaName", "Match", "as_json", "as_text", "audit"]
SCHEMA = 1
_LONGEST_ROW = 160


@dataclass(frozen=True)
class Audit:
    """All cells of all tables of `path`, and the contradictions. `left_out`: what was not read."""

    path: Path
    findings: Sequence[Contradiction]
    cells: Sequence[LedgerCell]
    matches: Sequence[Match] = ()
    left_out: Sequence[str] = ()
    tables: Mapping[int, str] = field(default_factory=dict)  # line -> title

    @property
    def counts(self) -> dict[str, int]:
        """The number of tables, of cells by outcome, and of findings; one cell can have several."""
        ended = Counter(cell.outcome for cell in self.cells)
        return {
            "tables": len(self.tables),
            "cells": len(self.cells),
            "holds": ended["holds"],
            "breaks": ended["breaks"],
            "blank": ended["blank"],
            "not_checked": ended["not checked"],
            "findings": len(self.findings),
        }

    @property
    def exit_code(self) -> int:
        """1 if there is a contradiction, else 0, so that a paper's CI can use it."""
        return 1 if self.findings else 0


def audit(
    path: Path, runs: Sequence[RunRead] = (), formula: FormulaName | None = None, recompute: Recompute = "full"
) -> Audit:
    """Audits every table in the document at `path` against its own formulas and against `runs`.

    `formula` is used for TFLOPs if the document states none, with `recompute` as its input. DataError if the document
    cannot be read or has no table.
    """
    document = read_document(path)
    statements = Statements(document)
    ledgers = [_check_table(table, statements, formula, recompute) for table in document.tables]
    matches = check_logs(ledgers, statements, runs)
    return Audit(
        path,
        [finding for ledger in ledgers for finding in sorted(ledger.findings, key=lambda finding: finding.line)],
        [cell for ledger in ledgers for cell in ledger.cells()],
        matches,
        [*document.left_out, *statements.left_out],
        {table.line: table.title for table in document.tables},
    )


def _check_table(table: Table, statements: Statements, formula: FormulaName | None, recompute: Recompute) -> Ledger:
    ledger = read_table(table, statements)
    checked = {
        column.quantity: check_stated(column, ledger, statements)
        for column in ledger.columns
        if column.quantity in TARGETS
    }
    tflops = ledger.column("tflops")
    has_formula = tflops is not None and bool(stated_for(tflops, ledger, statements))
    for line in ledger.lines:
        if line.row.problem:
            continue
        check_layout(line)
        done = [quantity for quantity, lines in checked.items() if quantity and line.row.line in lines]
        if "global_batch" not in done:
            check_batch(line)
        check_rates(line, done)
        if tflops is not None and not has_formula:
            if formula is not None:
                check_named(line, formula, recompute)
            else:
                line.leave("tflops", "no formula: the document states none; --formula names one")
    return ledger


def as_text(audit: Audit) -> str:
    """The contradictions with their arithmetic; then the logs, the counts and what was not checked."""
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
        f"{counted(counts['findings'], 'contradiction')} in {counted(counts['tables'], 'table')}: of {counts['cells']} "
        f"cells {counts['holds']} hold, {counts['breaks']} break, {counts['blank']} are blank, "
        f"{counts['not_checked']} were not checked"
    )
    unchecked = Counter((cell.column, cell.why) for cell in audit.cells if cell.outcome == "not checked")
    lines += [f"  {number} not checked: {column}: {why}" for (column, why), number in unchecked.most_common()]
    lines += [f"  not read: {words}" for words in audit.left_out]
    return "".join(plain(line) + "\n" for line in lines)


def as_json(audit: Audit) -> str:
    """{"schema": 1, "findings": [...], "counts": {...}, ...}; "cells" has all that are not blank."""
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


def _of_finding(audit: Audit, finding: Contradiction) -> list[str]:
    row = finding.row if len(finding.row) <= _LONGEST_ROW else finding.row[:_LONGEST_ROW] + " ..."
    lines = [f"{audit.path.name}:{finding.line}: {finding.column}: {finding.arithmetic}"]
    lines.append(f"    row: {row}")
    lines += [f"    in: {finding.table}"] if finding.table else []
    lines += [f"    by: {finding.source}"] if finding.source else []
    return [*lines, ""]
