"""A published document as an audit takes it: tables, and the sentences and code around them with their sections."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.errors import DataError
from hpc_gpt.report.audit.quantities import named

_LARGEST_BYTES = 2 * 2**20
_MOST_COLUMNS = 200
_MOST_ROWS = 10_000
_MOST_TABLES = 500
_LONGEST_LINE = 4000
_DELIMITERS = ",;\t|"
_RULE_CELL = re.compile(r":?-+:?")
_HEADING = re.compile(r" {0,3}(?P<marks>#{1,6})[ \t]+(?P<text>.*?)[ \t]*#*$")
_UNDERLINE = re.compile(r" {0,3}(?:={3,}|-{3,})[ \t]*")
_BOLD = re.compile(r"\s*(?:\*\*|__)(?P<text>[^*_].{0,120}?)(?:\*\*|__):?\s*")
_FENCE = re.compile(r"\s{0,12}(?P<marks>`{3,}|~{3,})")


@dataclass(frozen=True)
class Section:
    """Where a line stands: the headings above it, outermost first, and a number that each section has of its own."""

    titles: tuple[str, ...] = ()
    ids: tuple[int, ...] = (0,)

    def holds(self, other: Section) -> bool:
        """Whether `other` is this section or lies in it."""
        return other.ids[: len(self.ids)] == self.ids


@dataclass(frozen=True)
class Row:
    """A line of a table. `problem`: why its cells cannot be told apart."""

    line: int
    cells: tuple[str, ...]
    problem: str = ""

    @property
    def is_blank(self) -> bool:
        return not any(cell.strip() for cell in self.cells)


@dataclass(frozen=True)
class Table:
    """`title`: the headings it stands under, with the bold line or the caption nearest above. Lines count from 1."""

    line: int
    headings: tuple[str, ...]
    rows: tuple[Row, ...]
    section: Section = Section()
    title: str = ""


@dataclass(frozen=True)
class Passage:
    """A line of prose, or of code where `is_code`."""

    line: int
    text: str
    section: Section
    is_code: bool = False


@dataclass(frozen=True)
class Document:
    """What was read. `left_out`: what was seen and not read, in words."""

    path: Path
    tables: Sequence[Table] = ()
    passages: Sequence[Passage] = ()
    left_out: Sequence[str] = ()


def read_document(path: Path) -> Document:
    """The document at `path`; DataError where it cannot be read, is no text, or holds no table.

    A file named .csv or .tsv is one table whose first line holds the headings; every other is markdown, or csv where
    it has no markdown table.
    """
    text = _read_text(path)
    if path.suffix.lower() in (".csv", ".tsv"):
        document = _read_csv(path, text)
    else:
        document = _read_markdown(path, text)
        if not document.tables and "<table" not in text:
            as_csv = _read_csv(path, text)
            known = [heading for table in as_csv.tables for heading in table.headings if named(heading)]
            document = as_csv if len(known) > 1 else document
    if not any(table.rows for table in document.tables):
        seen = f" ({'; '.join(document.left_out)})" if document.left_out else ""
        raise DataError(
            f"{path} holds no table{seen}",
            "a markdown table has a line of headings, a line of dashes as | --- | and rows; csv has a line of headings",
        )
    return document


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except (OSError, ValueError) as fault:
        why = getattr(fault, "strerror", None) or str(fault)
        raise DataError(f"{path} cannot be read: {why}", "name the document that holds the table") from fault
    if len(data) > _LARGEST_BYTES:
        raise DataError(f"{path} is larger than {_LARGEST_BYTES >> 20} MiB", "name a document, not a log")
    if b"\0" in data:
        raise DataError(f"{path} is no text: it holds NUL bytes", "name a markdown or csv file")
    return data.decode("utf-8-sig", errors="replace")


def _read_csv(path: Path, text: str) -> Document:
    """One table; lines that begin with # are prose."""
    lines = text.splitlines()
    passages = [
        Passage(at, line.lstrip("# ")[:_LONGEST_LINE], Section())
        for at, line in enumerate(lines, 1)
        if line.startswith("#") and not _is_csv_heading(line, lines[at : at + 1])
    ]
    prose = {passage.line for passage in passages}
    body = "\n".join("" if at in prose else line for at, line in enumerate(lines, 1))
    found: list[tuple[int, list[str]]] = []
    dropped = 0
    reader = csv.reader(io.StringIO(body), delimiter=_delimiter(body))
    try:
        for cells in reader:
            dropped += bool(cells) and len(found) > _MOST_ROWS
            if cells and len(found) <= _MOST_ROWS:
                found.append((reader.line_num, [cell.strip() for cell in cells[: _MOST_COLUMNS + 1]]))
    except csv.Error as fault:
        raise DataError(f"{path}:{reader.line_num} is no csv: {fault}", "quote cells that hold line ends") from fault
    if len(found) < 2 or len(found[0][1]) < 2:
        return Document(path, passages=passages)
    (line, headings), *rest = found
    table = Table(line, tuple(headings), tuple(_row(at, cells, len(headings)) for at, cells in rest), title=path.name)
    return Document(path, [table], passages, [f"{dropped} rows after the first {_MOST_ROWS}"] if dropped else [])


def _is_csv_heading(line: str, following: Sequence[str]) -> bool:
    """ "#GPUs,Size" heads a table where the next line has as many cells; "# seq is 1024" does not."""
    return any(
        line.count(mark) == following[0].count(mark) > 0 for mark in _DELIMITERS if following and line[1:2] != " "
    )


def _delimiter(text: str) -> str:
    """The one that the first lines agree on best, by how many cells it gives them."""
    lines = [line for line in text[:65536].splitlines()[:20] if line.strip()]

    def agreement(mark: str) -> tuple[int, int]:
        counts = [line.count(mark) for line in lines]
        return (sum(count == counts[0] for count in counts) if counts and counts[0] else 0, counts[0] if counts else 0)

    return max(_DELIMITERS, key=agreement)


@dataclass
class _Reading:
    """What a pass over a markdown document has met so far."""

    titles: list[tuple[int, str, int]] = field(default_factory=list)  # level, text, id
    sections: int = 0
    bold: str = ""
    caption: str = ""
    fence: str = ""
    comment: bool = False

    @property
    def section(self) -> Section:
        return Section(tuple(title for _, title, _ in self.titles), (0, *(number for *_, number in self.titles)))

    @property
    def title(self) -> str:
        parts = [*(title for _, title, _ in self.titles), self.bold, self.caption]
        return " > ".join(part for part in parts if part)

    def enter(self, level: int, text: str) -> None:
        while self.titles and self.titles[-1][0] >= level:
            self.titles.pop()
        self.sections += 1
        self.titles.append((level, text.strip()[:200], self.sections))
        self.bold = self.caption = ""


def _read_markdown(path: Path, text: str) -> Document:
    lines = [line[:_LONGEST_LINE] for line in text.splitlines()]
    reading, tables, passages, left_out = _Reading(), list[Table](), list[Passage](), list[str]()
    if long := sum(len(line) > _LONGEST_LINE for line in text.splitlines()):
        left_out.append(f"the ends of {long} lines, after {_LONGEST_LINE} characters")
    # Front matter is about the document, not in it.
    at = lines.index("---", 1) + 1 if lines[:1] == ["---"] and "---" in lines[1:50] else 0
    while at < len(lines):
        line = lines[at]
        at += 1
        fence = _FENCE.match(line)
        if reading.fence:
            if fence and fence["marks"].startswith(reading.fence) and not line.strip(" `~"):
                reading.fence = ""
            else:
                passages.append(Passage(at, line, reading.section, is_code=True))
            continue
        if reading.comment or line.lstrip().startswith("<!--"):
            reading.comment = "-->" not in line
            continue
        if fence and "`" not in line[fence.end() :]:
            reading.fence = fence["marks"]
            continue
        if heading := _HEADING.match(line):
            reading.enter(len(heading["marks"]), heading["text"])
            continue
        if re.match(r"\s*<table\b", line, re.IGNORECASE):
            left_out.append(f"line {at}: an HTML table")
        if at < len(lines) and "|" in line and _is_rule(lines[at], line):
            table, at = _read_table(lines, at, reading, left_out)
            if len(tables) < _MOST_TABLES:
                tables.append(table)
            else:
                left_out.append(f"line {table.line}: a table after the first {_MOST_TABLES}")
            reading.caption = ""
            continue
        if at < len(lines) and line[:1].strip(" -*+>#") and _UNDERLINE.fullmatch(lines[at]):
            reading.enter(1 if "=" in lines[at] else 2, line)
            at += 1
            continue
        if (bold := _BOLD.fullmatch(line)) and "=" not in line:
            reading.bold, reading.caption = bold["text"].strip(), ""
        elif line.strip():
            reading.caption = line.strip().rstrip(":")[:80] if line.rstrip().endswith(":") else ""
        if line.strip():
            passages.append(Passage(at, line, reading.section))
    return Document(path, tables, passages, left_out)


def _is_rule(line: str, heading: str) -> bool:
    """Whether `line` is the row of dashes under a table's `heading`: as many cells, nothing but dashes and colons."""
    cells = _split(line)
    return (
        "-" in line
        and len(cells) <= _MOST_COLUMNS
        and all(_RULE_CELL.fullmatch(cell.replace(" ", "")) for cell in cells)
        and len(cells) in (len(_split(heading)), len(_split(heading, keep_code=True)))
    )


def _read_table(lines: Sequence[str], at: int, reading: _Reading, left_out: list[str]) -> tuple[Table, int]:
    """The table whose heading is `lines[at - 1]` and whose dashes are `lines[at]`; where to go on."""
    start = at
    width = len(_split(lines[at]))
    headings = _cells(lines[at - 1], width)
    rows: list[Row] = []
    dropped = 0
    at += 1
    while at < len(lines) and "|" in lines[at] and not _HEADING.match(lines[at]) and not _FENCE.match(lines[at]):
        if len(rows) < _MOST_ROWS:
            rows.append(_row(at + 1, _cells(lines[at], width), width))
        else:
            dropped += 1
        at += 1
    if dropped:
        left_out.append(f"line {start}: {dropped} rows after the first {_MOST_ROWS}")
    return Table(start, tuple(headings), tuple(rows), reading.section, reading.title), at


def _row(line: int, cells: Sequence[str], width: int) -> Row:
    """A row of `width` cells. One that lacks some ends early, as markdown shows it; one with more cannot be placed."""
    if len(cells) > width:
        return Row(line, tuple(cells[:width]), f"the row has {len(cells)} cells, the heading {width}")
    return Row(line, (*cells, *[""] * (width - len(cells))))


def _cells(line: str, width: int) -> list[str]:
    """The cells of a line. A bar inside code splits, as GitHub has it, unless only the other way fits the heading."""
    cells = _split(line)
    if len(cells) != width and len(whole := _split(line, keep_code=True)) == width:
        return whole
    return cells


def _split(line: str, keep_code: bool = False) -> list[str]:
    line = line.strip()
    marks = list(_bars(line, keep_code))
    starts = [0, *(mark + 1 for mark in marks)]
    cells = [
        line[start:end].strip().replace("\\|", "|") for start, end in zip(starts, [*marks, len(line)], strict=True)
    ]
    if line.startswith("|"):
        cells = cells[1:]
    if marks and marks[-1] == len(line) - 1:
        cells = cells[:-1]
    return cells


def _bars(line: str, keep_code: bool) -> Iterator[int]:
    in_code = False
    for at, mark in enumerate(line):
        if mark == "`":
            in_code = not in_code
        elif mark == "|" and line[at - 1 : at] != "\\" and not (in_code and keep_code):
            yield at
