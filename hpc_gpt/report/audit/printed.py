"""A number as a document prints it: its exact value, its last digit's worth and its unit, or why it is none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

# No figure of a training run is longer, larger or smaller; arithmetic on what is would take forever.
_LONGEST = 40
_LARGEST_EXPONENT = 30
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<digits>\d{1,3}(?:,\d{3}){1,8}(?:\.\d{1,30})?|\d{1,40}(?:\.\d{0,30})?|\.\d{1,30})"
    r"(?:[eE](?P<exponent>[+-]?\d{1,4}))?(?P<rest>.{0,60})",
    re.DOTALL,
)
_UNIT = re.compile(r"%|(?:[A-Za-z]{1,8} )?[A-Za-zµμ][A-Za-zµμ]{0,15}(?: ?/ ?[A-Za-z]{1,10}){0,2}")
_DASHES = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-"))
_BLANKS = str.maketrans({**dict.fromkeys("\u00a0\u2007\u2009\u202f\u2002\u2003\t", " "), "\u200b": "", "\ufeff": ""})


@dataclass(frozen=True)
class Printed:
    """`value` exactly as printed, `quantum` the worth of its last digit, both in `unit` as the text spells it."""

    value: Fraction
    quantum: Fraction
    unit: str | None
    text: str

    def says(self, figure: Fraction) -> bool:
        """Whether `figure`, in the same unit, is this number when rounded or cut off to as many digits.

        A number printed in full was worked out by a machine that keeps 16 digits: twelve are asked for.
        """
        return self.rounds(figure) or self.cuts(figure) or abs(figure - self.value) * 10**12 <= abs(figure)

    def rounds(self, figure: Fraction) -> bool:
        """Whether `figure` rounded to as many digits is this number; half way it may go either way."""
        return abs(figure - self.value) * 2 <= self.quantum

    def cuts(self, figure: Fraction) -> bool:
        """Whether `figure` without what comes after as many digits is this number."""
        beyond = figure - self.value if self.value > 0 or (self.value == 0 and figure >= 0) else self.value - figure
        return 0 <= beyond < self.quantum

    @property
    def range(self) -> tuple[Fraction, Fraction]:
        """The lowest and the highest figure that rounded or cut off is this number."""
        return self.value - self.quantum / 2, self.value + self.quantum

    def show(self, figure: Fraction) -> str:
        """`figure` with two digits behind the point at least, and one more than this number has."""
        digits = max(2, _decimals(self.quantum) + (1 if _decimals(self.quantum) < 2 else 0))
        return show(figure, digits)


def show(figure: Fraction, digits: int) -> str:
    """`figure` with `digits` digits behind the point, rounded, half up."""
    scaled = abs(figure) * 10**digits
    whole = (scaled.numerator * 2 + scaled.denominator) // (2 * scaled.denominator)
    if whole >= 10**30:
        return f"{float(figure):.6g}" if abs(figure) < 10**300 else "beyond 1e300"
    text = str(whole).rjust(digits + 1, "0")
    sign = "-" if figure < 0 and whole else ""
    return sign + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)


def read_printed(text: str) -> Printed | str:
    """The number that a cell holds, or in words why it holds none that can be checked. An empty one is "blank"."""
    if len(text) > 400:
        return "is too long for a number"
    bare = _bare(text)
    if bare in ("", "-", "--", "---", "n/a", "N/A", "NA", "?", "TBD", "tbd", "/"):
        return "blank"
    if "~~" in text or re.search(r"</?(?:s|del|strike)>", text):
        return "is struck out"
    if re.match(r"[~≈<>≤≥]|(?:about|approx|ca|circa|over|under|up to|at least|at most)\b", bare, re.IGNORECASE):
        return "is approximate"
    if "±" in bare or "+/-" in bare or "+-" in bare:
        return "has a spread"
    match = _NUMBER.match(bare)
    if match is None:
        return "holds no number" if not re.match(r"[+-]?\d", bare) else "is beyond any figure of a run"
    rest = match["rest"].strip()
    if len(match.group()) < len(bare) or re.match(r"\d", rest):
        return "is beyond any figure of a run" if re.match(r"[\d.,eE+-]+$", bare) else "is more than a number"
    # A remark without a figure, as in "16 (peak)", leaves the number what it is.
    rest = re.sub(r"\([^()\d]{0,40}\)$", "", rest).strip()
    if re.match(r"(?:-|to\b|\.\.)\s*[\d.]", rest):
        return "is a range"
    if re.match(r",\s*\d", rest):
        return "has a comma that may be a decimal point"
    if rest and _UNIT.fullmatch(rest) is None:
        return "is more than a number"
    exponent = int(match["exponent"] or 0)
    digits = match["digits"].replace(",", "")
    if abs(exponent) > _LARGEST_EXPONENT or len(digits) > _LONGEST:
        return "is beyond any figure of a run"
    value = Fraction(Decimal(f"{match['sign']}{digits}"))
    places = len(digits.partition(".")[2])
    scale = Fraction(10) ** exponent
    return Printed(value * scale, scale / 10**places, rest or None, bare)


def _bare(text: str) -> str:
    """The cell without what markdown and HTML put around a number."""
    text = text.translate(_BLANKS).translate(_DASHES).replace("&nbsp;", " ").replace("&thinsp;", " ")
    text = re.sub(r"</?[A-Za-z][^<>]{0,80}>", " ", text)
    text = re.sub(r"\[\^[^\]]{1,20}\]", "", text)
    text = re.sub(r"\[([^\[\]]{1,80})\]\([^()\s]{0,200}\)", r"\1", text)
    text = re.sub(r"[*`_]{1,3}(?=\S)|(?<=\S)[*`†‡]{1,3}", "", text.strip())
    text = re.sub(r"(?<=\d)[_'’](?=\d{3}(?:\D|$))", "", text)
    if re.fullmatch(r"\d{1,3}(?: \d{3}){1,8}(?:\.\d{1,30})?", text.strip()):
        text = text.replace(" ", "")
    return text.strip()


def _decimals(quantum: Fraction) -> int:
    places = 0
    while quantum < 1 and places < 40:
        quantum, places = quantum * 10, places + 1
    return places
