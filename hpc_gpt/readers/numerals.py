"""How programs print numbers, as pieces of regular expressions: each bounded, none with two ways to match a text.

A number that a line was cut off in is a wrong number: a pattern asks for what comes after it, a unit or a separator.
Where a number ends a line, nothing can tell that it was cut.
"""

from __future__ import annotations

INT = r"(?:\d{1,3}(?:,\d{3}){1,9}|\d{1,24})"  # 4915 or 7,208,960
NUMBER = rf"[-+]?(?:{INT}(?:\.\d{{0,24}})?(?:[eE][-+]?\d{{1,4}})?|nan|NaN|inf|Infinity)"
SHORT = r"[-+]?\d{1,24}(?:\.\d{1,24})?(?:[eE][-+]?\d{1,4})?[KMGBT]?"  # 11.5K, 85.8G, 1e-05
CLOCK = r"(?:\d{1,5} days?, )?(?:\d{1,6}:)?\d{1,4}:\d{2}"  # 13:54, 9:07:58
END = r"(?=\s*$)"
START = r"(?<![^\s\]:>])"  # of a line's own words: what launchers and loggers put before them ends so
# As START, where the words alone would be found in the middle of other programs' lines: tags, times and labels at most.
LINE_START = r"^ {0,8}(?:\[[^\]\n]{1,64}\]:? ?|\d{4}-\d\d-\d\d[T ][\d:.,+Z]{8,24} |\d{1,7}: ){0,3} {0,8}"
