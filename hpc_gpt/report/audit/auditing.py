"""The audit of a document: each table's checks in order, then the logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_gpt.formulas import Recompute
from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.audit.against_logs import check_logs
from hpc_gpt.report.audit.definitions import check_rates
from hpc_gpt.report.audit.document import Table, read_document
from hpc_gpt.report.audit.findings import Audit
from hpc_gpt.report.audit.layouts import check_batch, check_layout
from hpc_gpt.report.audit.ledger import Ledger
from hpc_gpt.report.audit.named_formulas import FormulaName, check_named
from hpc_gpt.report.audit.stated import TARGETS, check_stated, stated_for
from hpc_gpt.report.audit.statements import Statements
from hpc_gpt.report.audit.values import read_columns, read_values


def audit(
    path: Path, runs: Sequence[RunRead] = (), formula: FormulaName | None = None, recompute: Recompute = "full"
) -> Audit:
    """The audit of every table in the document at `path` against its own formulas and against `runs`.

    `formula` is taken for TFLOPs where the document states none; `recompute` is what that formula is told of the runs.
    DataError where the document cannot be read or holds no table.
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
    columns = read_columns(table, statements)
    ledger = Ledger(table, columns, [read_values(row, table, columns, statements) for row in table.rows])
    checked = {
        column.quantity: check_stated(column, ledger, statements) for column in columns if column.quantity in TARGETS
    }
    tflops = ledger.column("tflops")
    has_formula = tflops is not None and bool(stated_for(tflops, ledger, statements))
    for row, values in ledger.lines:
        if row.problem:
            continue
        check_layout(row, values, ledger)
        done = [quantity for quantity, lines in checked.items() if quantity and row.line in lines]
        if "global_batch" not in done:
            check_batch(row, values, ledger)
        check_rates(row, values, ledger, done)
        if tflops is None or has_formula:
            continue
        if formula is not None:
            check_named(row, values, ledger, formula, recompute)
        else:
            ledger.leave(row, "tflops", "no formula: the document states none; --formula names one")
    return ledger
