"""What the text and code around a table state: constants ("TP=4 in all of entries"), formulas and symbols.

A statement is about a table if it is in the table's section, the nearest first, or in a section around it. Only what is
the same for a whole study, such as the sequence length, is also taken from elsewhere if all agree on it, and formulas
from a section without tables, such as one on methods.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from hpc_gpt.report.audit.document import Document, Passage, Section, Table
from hpc_gpt.report.audit.formula import Formula, FormulaError, parse
from hpc_gpt.report.audit.quantities import UNITS, Named, named, plain_name, plain_unit, quantity_of, spelled

# Quantities that a sentence may give, those that hold for the whole document, and those that a formula may be of.
CONSTANTS: tuple[str, ...] = ("tp", "pp", "dp", "cp", "seq", "micro_batch", "micro_batches", "global_batch", "gpus")
CONSTANTS += ("vocab", "hidden", "layers")
_EVERYWHERE = ("seq", "vocab", "gpus_per_node")
_TARGETS: tuple[str, ...] = ("tflops", "global_batch", "step_s", "throughput", "tokens_per_s", "samples_per_s", "dp")
_TARGETS += ("tokens_per_s_per_gpu", "mfu", "hfu")
# Quantities whose formula may be in a section without tables.
_OF_THE_DOCUMENT = ("tflops", "mfu", "hfu", "global_batch")
# Quantities that a symbol may mean.
_EXPLAINED = (*CONSTANTS, "size", "step_s", "heads", "nodes")
_MOST_STATEMENTS = 2000
_MOST_OF_A_GROUP = 8

_IS = r"(?:==?|:|is|are|of|was|set to)"
_CONSTANT = re.compile(
    rf"(?<![\w$-])(?P<name>{spelled(CONSTANTS)})(?!\w)[`*]{{0,3}}\s{{0,3}}{_IS}\s{{0,3}}[`*]{{0,3}}"
    r"(?P<number>\d{1,3}(?:,\d{3}){1,3}|\d{1,9})(?![\w%]|[.,/]\d)(?=(?P<rest>.{0,12}))",
    re.IGNORECASE,
)
# "at most TP=4" gives no constant; "with TP=4" only does if the sentence is about every row.
_LIMITED = re.compile(
    r"(?:\bmax(?:imum|imal)?|\bat most|\bup to|\bmin(?:imum)?|\bat least|\be\.g\.|\bif|\bwhen|\bsay|\bexample|\bthan|"
    r"\bunless|\btr(?:y|ied)|\bnot|\binstead of|\bor)\W{0,4}$",
    re.IGNORECASE,
)
_OF_SOME = re.compile(r"\b(?:with|for|at|using|where)\W{0,4}$", re.IGNORECASE)
_OF_ALL = re.compile(r"\b(?:all|every|each|throughout|everywhere|always)\b", re.IGNORECASE)
_OTHERS = re.compile(r"[`*]{0,3}\s{0,3}(?:-|–|to|or|and|/|,)\s{0,3}[`*]{0,3}\d", re.IGNORECASE)
_WITHOUT = re.compile(rf"\b(?:no|without)\s{{1,3}}(?P<name>{spelled(('tp', 'pp', 'dp', 'cp'))})(?!\w)", re.IGNORECASE)
_PER_NODE = re.compile(
    r"(?<![\d.])(?P<of>\d{1,3})[ -]?GPUs?(?:\s?/\s?| per | a | in each | on each )node\b"
    r"|\bnodes? (?:of|with) (?P<with>\d{1,3}) GPUs",
    re.IGNORECASE,
)
_CODE_SPAN = re.compile(r"(?<!`)`([^`]{3,400})`(?!`)")
_TARGET = re.compile(rf"(?<![\w$])(?P<name>{spelled(_TARGETS)})(?!\w)[^.`;]{{0,30}}$", re.IGNORECASE)
_COPULA = re.compile(r"(?:=|:|\bis|\bare|\bas)\s{0,3}[*]{0,2}\s{0,3}$")
_PLAIN = re.compile(r"(?P<name>[\w #/`*-]{1,40}?)\s{0,3}(?:=|:|\bis\b)\s{0,3}(?P<formula>[^=]{3,300})")
_ASSIGNED = re.compile(r"\$?(?P<name>[A-Za-z_]\w{0,40})\s{0,3}=\s{0,3}(?P<formula>[^=;'\"]{1,300})")
_PRINTED = re.compile(r"\bprint\b\s{0,3}(?P<formula>[^;'\"]{3,300})")
_THROUGHPUT = re.compile(
    r"\bthroughput\W{1,5}(?:is|=|means|in)\W{1,5}(?:the )?(?:average |mean )?"
    r"(?P<what>(?:time|seconds|sec|samples|sequences|tokens)\W{1,3}(?:per|/)\W{0,3}\w{1,10})",
    re.IGNORECASE,
)
# "P is the number of parameters in billions", "where B global batch, t seconds": a symbol and its meaning.
_SYMBOL = re.compile(
    rf"(?<![\w$-])[`*$]{{0,2}}(?P<symbol>[A-Za-z]\w{{0,7}})[`*$]{{0,2}}(?P<is>\s{{0,3}}(?:=|:|\bis\b|\bare\b|-|–)\s{{0,3}}|\s)"
    rf"(?:the |total ){{0,2}}(?:(?P<name>{spelled(_EXPLAINED)})(?!\w)(?:\s(?:in|\()\s?(?P<unit>\w{{1,12}}))?"
    r"|(?P<seconds>(?:seconds|secs?)(?:\s(?:per|a)\s(?:step|iteration|iter))?)(?!\w))",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Constant:
    """A quantity given by a sentence. `table`: the line of the only table that it introduces, if it does."""

    quantity: str
    value: Fraction
    line: int
    section: Section
    table: int | None = None


@dataclass(frozen=True)
class Equation:
    """A formula that the document states for `target`."""

    target: str
    formula: Formula
    line: int
    section: Section


@dataclass(frozen=True)
class Meaning:
    """What the document says of its column Throughput."""

    quantity: str
    line: int
    section: Section


Said = TypeVar("Said", Constant, Equation, Meaning)


class Statements:
    """All statements of a document, and which of them are about a table."""

    def __init__(self, document: Document) -> None:
        self._tables = [table.line for table in document.tables]
        self._with_tables = {table.section for table in document.tables}
        self.constants: list[Constant] = []
        self.equations: list[Equation] = []
        self.meanings: list[Meaning] = []
        self.left_out: list[str] = []
        self._fixed: dict[tuple[str, int], Constant | str | None] = {}
        self._stated: dict[tuple[str, int], list[list[Equation]]] = {}
        symbols = _symbols(document.passages)
        for at, passage in enumerate(document.passages):
            if max(len(self.constants), len(self.equations), len(self.meanings)) > _MOST_STATEMENTS:
                self.left_out.append(f"the statements after line {passage.line}: there are too many")
                break
            if passage.is_code:
                self.equations += _of_code(passage, symbols)
                continue
            introduced = self._introduced(passage, document.passages[at + 1 : at + 2])
            self.constants += _constants(passage, introduced)
            self.equations += _of_prose(passage, symbols)
            self.meanings += _meanings(passage)

    def constant(self, quantity: str, table: Table) -> Constant | str | None:
        """The quantity's constant for a table; a message if statements contradict each other; None without any."""
        key = (quantity, table.line)
        if key not in self._fixed:
            self._fixed[key] = None
            said = [constant for constant in self.constants if constant.quantity == quantity]
            own = [constant for constant in said if constant.table == table.line]
            rest = [constant for constant in said if constant.table is None]
            groups = [own, *self._near(rest, table), *([rest] if quantity in _EVERYWHERE else [])]
            if group := next((group for group in groups if group), None):
                words = " and ".join(f"{constant.value} (line {constant.line})" for constant in group[:3])
                several = len({constant.value for constant in group}) > 1
                self._fixed[key] = f"the document says {words}" if several else group[0]
        return self._fixed[key]

    def formulas(self, target: str, table: Table) -> list[list[Equation]]:
        """The formulas of the target in groups, the nearest to the table first, each formula once."""
        key = (target, table.line)
        if key not in self._stated:
            said = [equation for equation in self.equations if equation.target == target]
            groups = list(self._near(said, table))
            if target in _OF_THE_DOCUMENT:
                groups.append([each for each in said if each.section not in self._with_tables])
            once = [{each.formula.text: each for each in reversed(group)} for group in groups]
            self._stated[key] = [list(reversed(group.values()))[:_MOST_OF_A_GROUP] for group in once if group]
        return self._stated[key]

    def throughput(self, table: Table) -> Meaning | None:
        """What Throughput means in a table."""
        groups = [*self._near(self.meanings, table), self.meanings]
        group = next((group for group in groups if group), [])
        return group[0] if len({meaning.quantity for meaning in group}) == 1 else None

    def _near(self, said: Sequence[Said], table: Table) -> Iterator[list[Said]]:
        """The statements next to the table, then in its section, then in each section around it."""
        own = [each for each in said if each.section == table.section]
        place = self._place(table.line)
        yield [each for each in own if self._place(each.line) in (place, place + 1)]
        yield own
        for depth in range(len(table.section) - 1, 0, -1):
            yield [each for each in said if each.section == table.section[:depth]]

    def _place(self, line: int) -> int:
        """The number of tables before a line."""
        return bisect_left(self._tables, line)

    def _introduced(self, passage: Passage, following: Sequence[Passage]) -> int | None:
        """The table that follows a line ending with a colon."""
        if not passage.text.rstrip().rstrip("*_").endswith(":"):
            return None
        after = next((table for table in self._tables if table > passage.line), None)
        return None if after is None or any(other.line < after for other in following) else after


def _symbols(passages: Sequence[Passage]) -> dict[str, Named]:
    """The symbols that the document explains; one with two meanings is left out.

    An explanation with "is" or "=" takes precedence over words that are only next to each other.
    """
    said: dict[str, dict[bool, set[Named]]] = {}
    for passage in passages:
        if passage.is_code:
            continue
        for match in _SYMBOL.finditer(passage.text):
            symbol, is_explained = match["symbol"], bool(match["is"].strip())
            if named(symbol, in_formula=True) or (not is_explained and len(symbol) > 1):
                continue
            quantity = "step_s" if match["seconds"] else (quantity_of(match["name"]) or "")
            unit = "s" if match["seconds"] else plain_unit(match["unit"] or "")
            unit = {"billions": "billion", "millions": "million"}.get(unit, unit)
            meant = Named(quantity, unit if unit in UNITS.get(quantity, {}) else None)
            said.setdefault(symbol, {}).setdefault(is_explained, set()).add(meant)
    return {symbol: next(iter(ways)) for symbol, by in said.items() if len(ways := by.get(True) or by[False]) == 1}


def _constants(passage: Passage, table: int | None) -> Iterator[Constant]:
    text = passage.text
    matches = list(_CONSTANT.finditer(text))
    sizes: dict[str, set[str]] = {}
    for match in matches:
        sizes.setdefault(_quantity(match["name"]), set()).add(match["number"])
    for match in matches:
        before = text[max(0, match.start() - 24) : match.start()]
        some = _OF_SOME.search(before) and not _OF_ALL.search(text)
        quantity, value = _quantity(match["name"]), Fraction(match["number"].replace(",", ""))
        # If a line has two values of one quantity, each is only of some rows.
        if _LIMITED.search(before) or some or _OTHERS.match(match["rest"]) or len(sizes[quantity]) > 1:
            continue
        if value > 0:
            yield Constant(quantity, value, passage.line, passage.section, table)
    for match in _PER_NODE.finditer(text):
        yield Constant("gpus_per_node", Fraction(match["of"] or match["with"]), passage.line, passage.section, table)
    for match in _WITHOUT.finditer(text):
        yield Constant(_quantity(match["name"]), Fraction(1), passage.line, passage.section, table)


def _of_prose(passage: Passage, symbols: Mapping[str, Named]) -> Iterator[Equation]:
    """Formulas in code spans after "NAME is" or "NAME:", or a line "NAME = FORMULA"."""
    text = passage.text
    found = False
    for span in _CODE_SPAN.finditer(text):
        before = text[max(0, span.start() - 90) : span.start()]
        target = _TARGET.search(_COPULA.sub("", before)) if _COPULA.search(before) else None
        inside = _ASSIGNED.fullmatch(span[1].strip())
        name, words = (
            (target["name"], span[1]) if target else (inside["name"], inside["formula"]) if inside else ("", "")
        )
        for equation in _equation(name, words, passage, symbols):
            found = True
            yield equation
    line = re.sub(r"^\s*(?:[-*+]|\d{1,3}[.)])\s+", "", text).strip()
    plain = _PLAIN.fullmatch(line.rstrip("."))
    if plain and not found:
        words = plain["formula"].strip(" `*")
        same = named(words, in_formula=True)
        for equation in _equation(plain["name"].strip(" `*"), words, passage, symbols):
            # "DP=GPUs" is a formula, but "TP: tensor parallelism" only explains a name.
            if equation.formula.has_arithmetic or (same and same.quantity != equation.target):
                yield equation


def _of_code(passage: Passage, symbols: Mapping[str, Named]) -> Iterator[Equation]:
    """`name = formula`, or what a one-liner prints: a figure from size and time is TFLOPs."""
    whole = _ASSIGNED.fullmatch(passage.text.strip())
    if whole:
        yield from _equation(whole["name"], whole["formula"], passage, symbols)
    printed = _PRINTED.search(passage.text)
    if printed is None:
        return
    try:
        formula = parse(printed["formula"], symbols)
    except FormulaError:
        return
    quantities = {meant.quantity for meant in formula.names.values()}
    target = None
    if {"size", "step_s"} <= quantities:
        target = "tflops"
    elif {"global_batch", "seq", "step_s"} <= quantities:
        target = "tokens_per_s_per_gpu" if "gpus" in quantities else "tokens_per_s"
    if target:
        yield Equation(target, formula, passage.line, passage.section)


def _equation(name: str, words: str, passage: Passage, symbols: Mapping[str, Named]) -> Iterator[Equation]:
    meant = named(name, in_formula=True) if name else None
    if meant is None or meant.quantity not in _TARGETS:
        return
    try:
        formula = parse(words, symbols)
    except FormulaError:
        return
    if formula.names and all(name.quantity != meant.quantity for name in formula.names.values()):
        yield Equation(meant.quantity, formula, passage.line, passage.section)


def _quantity(name: str) -> str:
    """The quantity of a name that a pattern matched."""
    quantity = quantity_of(name)
    assert quantity is not None, name
    return quantity


def _meanings(passage: Passage) -> Iterator[Meaning]:
    for match in _THROUGHPUT.finditer(passage.text):
        words = plain_name(match["what"]).split()
        if words[0] in ("time", "seconds", "sec") and words[-1] in ("iteration", "step", "iter", "it", "batch"):
            yield Meaning("step_s", passage.line, passage.section)
        elif words[-1] in ("second", "sec", "s"):
            quantity = {"tokens": "tokens_per_s"}.get(words[0], "samples_per_s" if words[0][0] == "s" else "")
            if quantity and words[0] in ("samples", "sequences", "tokens"):
                yield Meaning(quantity, passage.line, passage.section)
