"""Reads a published document: its tables, and the sentences and code around them, with their sections."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
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
_BOLD = re.compile(r"\s*(?:\*\*|__)(?P<text>[^*_].{0,120}?)(?:\*\*|__):?\s*")
_BAR = re.compile(r"(?<!\\)\|")


# The numbers of the sections around a line, outermost first; 0 is the document.
Section = tuple[int, ...]


@dataclass(frozen=True)
class TableRow:
    """A row of a table. `problem`: why its cells cannot be assigned to columns."""

    line: int
    cells: tuple[str, ...]
    problem: str = ""

    @property
    def is_blank(self) -> bool:
        return not any(cell.strip() for cell in self.cells)


@dataclass(frozen=True)
class Table:
    """A table. `title`: the headings above it with the nearest bold line or caption. Lines count from 1."""

    line: int
    headings: tuple[str, ...]
    rows: tuple[TableRow, ...]
    section: Section = (0,)
    title: str = ""


@dataclass(frozen=True)
class Passage:
    """A line of prose, or of code."""

    line: int
    text: str
    section: Section
    is_code: bool = False


@dataclass(frozen=True)
class Document:
    """What was read. `left_out`: what was not."""

    path: Path
    tables: Sequence[Table] = ()
    passages: Sequence[Passage] = ()
    left_out: Sequence[str] = ()


def read_document(path: Path) -> Document:
    """The document at `path`; DataError if it cannot be read, is not text, or has no table.

    A .csv or .tsv file is one table with its headings on the first line. Any other file is Markdown, or csv if it has
    no Markdown table.
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
            f"{path} has no table{seen}",
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
        raise DataError(f"{path} is not text: it has NUL bytes", "name a markdown or csv file")
    return data.decode("utf-8-sig", errors="replace")


def _read_csv(path: Path, text: str) -> Document:
    """One table; lines that start with # are prose."""
    lines = text.splitlines()
    passages = [
        Passage(at, line.lstrip("# ")[:_LONGEST_LINE], (0,))
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
        raise DataError(
            f"{path}:{reader.line_num} is not csv: {fault}", "quote cells that contain line ends"
        ) from fault
    if len(found) < 2 or len(found[0][1]) < 2:
        return Document(path, passages=passages)
    (line, headings), *rest = found
    table = Table(line, tuple(headings), tuple(_row(at, cells, len(headings)) for at, cells in rest), title=path.name)
    return Document(path, [table], passages, [f"{dropped} rows after the first {_MOST_ROWS}"] if dropped else [])


def _is_csv_heading(line: str, following: Sequence[str]) -> bool:
    """Whether a line such as "#GPUs,Size" is the heading: if the next line has as many cells."""
    return any(
        line.count(mark) == following[0].count(mark) > 0 for mark in _DELIMITERS if following and line[1:2] != " "
    )


def _delimiter(text: str) -> str:
    """The delimiter for which most of the first lines have as many cells as the first line."""
    lines = [line for line in text[:65536].splitlines()[:20] if line.strip()]

    def agreement(mark: str) -> tuple[int, int]:
        counts = [line.count(mark) for line in lines]
        return (sum(count == counts[0] for count in counts) if counts and counts[0] else 0, counts[0] if counts else 0)

    return max(_DELIMITERS, key=agreement)


@dataclass
class _Place:
    """The headings, bold line and caption above the current line."""

    titles: list[tuple[int, str, int]] = field(default_factory=list)  # level, text, id
    sections: int = 0
    bold: str = ""
    caption: str = ""

    @property
    def section(self) -> Section:
        return (0, *(number for *_, number in self.titles))

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

    def pass_line(self, line: str) -> None:
        if (bold := _BOLD.fullmatch(line)) and "=" not in line:
            self.bold, self.caption = bold["text"].strip(), ""
        else:
            self.caption = line.strip().rstrip(":")[:80] if line.rstrip().endswith(":") else ""


def _read_markdown(path: Path, text: str) -> Document:
    lines = text.splitlines()
    place, tables, passages, left_out = _Place(), list[Table](), list[Passage](), list[str]()
    if long := sum(len(line) > _LONGEST_LINE for line in lines):
        left_out.append(f"the ends of {long} lines, after {_LONGEST_LINE} characters")
    lines = [line[:_LONGEST_LINE] for line in lines]
    if lines[:1] == ["---"] and "---" in lines[1:50]:  # front matter is about the document, not in it
        end = lines.index("---", 1) + 1
        lines[:end] = [""] * end
    headings, kinds = _read_blocks("\n".join(lines))
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if at in headings:
            place.enter(*headings[at])
        elif kinds.get(at) == "code":
            passages.append(Passage(at, line, place.section, is_code=True))
        elif at in kinds or not line.strip():
            continue
        elif "|" in line and at < len(lines) and _is_rule(lines[at], line):
            start, end = at, at + 1
            while end < len(lines) and "|" in lines[end] and end + 1 not in kinds:
                end += 1
            table, at = _table(start, lines[start - 1 : end], place, left_out), end
            if len(tables) < _MOST_TABLES:
                tables.append(table)
            else:
                left_out.append(f"line {start}: a table after the first {_MOST_TABLES}")
            place.caption = ""
        else:
            if re.match(r"\s*<table\b", line, re.IGNORECASE):
                left_out.append(f"line {at}: an HTML table")
            place.pass_line(line)
            passages.append(Passage(at, line, place.section))
    return Document(path, tables, passages, left_out)


def _read_blocks(text: str) -> tuple[dict[int, tuple[int, str]], dict[int, str]]:
    """Two dictionaries by line number, from 1: (level, text) of each heading, and the kind of each other line that is
    not prose: code, comment or underline.

    Tables are read here, as GitHub's Markdown drops surplus cells of a row. Link references are off, as a long list of
    them takes quadratic time.
    """
    from markdown_it import MarkdownIt

    headings: dict[int, tuple[int, str]] = {}
    kinds: dict[int, str] = {}
    tokens = MarkdownIt("commonmark").disable(["reference", "inline", "text_join"]).parse(text)
    for place, token in enumerate(tokens):
        start, stop = token.map or (0, 0)
        if token.type == "heading_open" and token.level == 0:
            # Of an underlined paragraph the last line is the heading.
            is_underlined = not token.markup.startswith("#")
            kinds |= {stop: "underline", stop - is_underlined: "heading"}
            headings[stop - is_underlined] = (int(token.tag[1]), tokens[place + 1].content.split("\n")[-1])
        elif token.type in ("fence", "code_block"):
            kinds |= dict.fromkeys(range(start + 1, stop + 1), "code")
        elif token.type == "html_block" and token.content.lstrip().startswith("<!--"):
            kinds |= dict.fromkeys(range(start + 1, stop + 1), "comment")
    return headings, kinds


def _is_rule(line: str, heading: str) -> bool:
    """Whether `line` is the row of dashes under a table's `heading`: as many cells, only dashes and colons."""
    cells = _split(line)
    return (
        "-" in line
        and len(cells) <= _MOST_COLUMNS
        and all(_RULE_CELL.fullmatch(cell.replace(" ", "")) for cell in cells)
        and len(cells) in (len(_split(heading)), len(_split(heading, keep_code=True)))
    )


def _table(line: int, lines: Sequence[str], place: _Place, left_out: list[str]) -> Table:
    width = len(_split(lines[1]))
    rows = [_row(line + 2 + at, _cells(each, width), width) for at, each in enumerate(lines[2 : 2 + _MOST_ROWS])]
    if dropped := len(lines) - 2 - len(rows):
        left_out.append(f"line {line}: {dropped} rows after the first {_MOST_ROWS}")
    return Table(line, tuple(_cells(lines[0], width)), tuple(rows), place.section, place.title)


def _row(line: int, cells: Sequence[str], width: int) -> TableRow:
    """A row of `width` cells: missing cells are empty, as in Markdown; surplus cells are a problem."""
    if len(cells) > width:
        return TableRow(line, tuple(cells[:width]), f"the row has {len(cells)} cells, the heading {width}")
    return TableRow(line, (*cells, *[""] * (width - len(cells))))


def _cells(line: str, width: int) -> list[str]:
    """The cells of a line. A bar in code splits, as on GitHub, unless the heading only fits if it does not."""
    cells = _split(line)
    if len(cells) != width and len(whole := _split(line, keep_code=True)) == width:
        return whole
    return cells


def _split(line: str, keep_code: bool = False) -> list[str]:
    line = line.strip()
    hidden = re.sub(r"`[^`]*(?:`|$)", lambda code: code[0].replace("|", "\0"), line) if keep_code else line
    cells = [cell.strip().replace("\0", "|").replace("\\|", "|") for cell in _BAR.split(hidden)]
    first, last = hidden.startswith("|"), len(cells) > 1 and hidden.endswith("|") and not hidden.endswith("\\|")
    return cells[first : len(cells) - last]
