"""What an audit concludes: how every cell ends, and each contradiction with its arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Outcome = Literal["holds", "breaks", "blank", "not checked"]
Kind = Literal[
    "formula",  # the cell is not what the document's formula gives
    "layout",  # tp x pp x dp is not the row's GPUs
    "global_batch",  # micro-batch x micro-batches x dp is not the row's global batch
    "definition",  # a rate is not what the row's batch and time give, whatever was rounded
    "size_2_30",  # the size is the log's parameters / 2^30
    "size",  # the size is not the log's
    "first_iteration",  # the time is the first step's alone
    "warm_up_in_mean",  # the time is a mean with the first step in it
    "step_time",  # the time is none of the log's
    "figure",  # a rate or a named formula's TFLOPs are not the log's
    "tflops_of_log",  # the formula on the log's own size and time gives another figure
]


@dataclass(frozen=True)
class Finding:
    """One contradiction. `said` as the table prints it, `found` what comes out instead; `line` is the row's.

    `source`: the line of the formula, or the log's file.
    """

    kind: Kind
    line: int
    table: str
    table_line: int
    row: str
    column: str
    said: str
    found: str
    arithmetic: str
    source: str = ""


@dataclass(frozen=True)
class Cell:
    """How a cell ended, and why it was not checked."""

    line: int
    table_line: int
    column: str
    text: str
    outcome: Outcome
    why: str = ""


@dataclass(frozen=True)
class Match:
    """A log and the row that it stands behind; line None and why where it stands behind none, or where several fit."""

    run: str
    line: int | None
    why: str


@dataclass(frozen=True)
class Audit:
    """All cells of all tables of `path` and what contradicts. `left_out`: what was seen and not read."""

    path: Path
    findings: Sequence[Finding]
    cells: Sequence[Cell]
    matches: Sequence[Match] = ()
    left_out: Sequence[str] = ()
    tables: Mapping[int, str] = field(default_factory=dict)  # line -> title

    @property
    def counts(self) -> dict[str, int]:
        """Cells by how they ended, and findings: a row can break in a cell more than one way."""
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
        """0 where nothing breaks, 1 where something does, so that a paper's own CI can ask."""
        return 1 if self.findings else 0
