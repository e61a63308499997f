"""Lines that name a failure or an end but do not report one: environment dumps, printed source code, and advice."""

import math
import re
from functools import lru_cache

# A variable with its value, as `env`, `export -p` and `declare -x` print it. A logger's `key=value` line has a level.
_VARIABLE = re.compile(r"^\s{0,8}(?:export |declare -x )?[A-Za-z_]\w{0,80}=(?!.{0,400}\blevel=)")
# A quoted string with a placeholder that is not filled in, as in source code.
_TEMPLATE = re.compile(r"""(?P<quote>["'])[^"'\n]{0,400}?\{[A-Za-z_][^{}"'\n]{0,80}\}[^"'\n]{0,400}?(?:(?P=quote)|$)""")
# Words before and after a failure that say that it did not happen. A line of an exception or an error does report one.
_REPORTS = re.compile(r"(?:Error|Exception)\b|\b(?:ERROR|FATAL|CRITICAL)\b")
_BEFORE = re.compile(
    r"(?i)\b(?:(?:to|will|would|can|may|might|could|should|helps?) (?:help )?(?:to )?"
    r"(?:avoid|prevent|reduce|cause|lead to)|avoids|avoiding|prevents|preventing|in case of|the risk of|without"
    r"|if you (?:see|get|hit|face|run into|encounter))"
    r" (?:[\w-]{1,20} ){0,4}$"
)
_LONGEST_BEFORE = 200  # characters before the failure that are searched
_AFTER = re.compile(r"(?i)[^.:;\n]{0,60}?\b(?:is|are|was|were|be) (?:avoided|prevented|unlikely|handled|ignored)\b")


def only_mentions(line: str, literal: str, start: int) -> bool:
    """Whether a line only mentions a failure; its pattern matches from `start` on and needs the text `literal`.

    >>> only_mentions("_CUDA_COMPAT_STATUS=System has unsupported display driver", "unsupported display driver", 0)
    True
    >>> only_mentions("  print(f'CUDA out of memory at {step}')", "out of memory", 9)
    True
    >>> only_mentions("CUDA out of memory is avoided by checkpointing", "out of memory", 0)
    True
    >>> only_mentions("RuntimeError: CUDA out of memory. Try {a} to avoid fragmentation", "out of memory", 0)
    False
    """
    place = line.find(literal, start)
    if (variable := _VARIABLE.match(line)) and place >= variable.end():
        return True
    templates, reported = _of_line(line)
    if any(begin < place < end for begin, end in templates):
        return True
    if reported <= place:
        return False
    return bool(
        _BEFORE.search(line, max(0, place - _LONGEST_BEFORE), place) or _AFTER.match(line, place + len(literal))
    )


@lru_cache(maxsize=4)
def _of_line(line: str) -> tuple[list[tuple[int, int]], float]:
    """Returns (spans of templates, end of the first words that report); cached, as a long line may have very many
    matches."""
    reports = _REPORTS.search(line)
    return [template.span() for template in _TEMPLATE.finditer(line)], reports.end() if reports else math.inf
