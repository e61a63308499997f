"""Slurm's lists of hosts."""

import re
from itertools import product

_ITEM = re.compile(r"(?:[^,\[\]]|\[[\d,-]+\])+")
_PART = re.compile(r"\[([\d,-]+)\]|([^\[\]]+)")
# Matches r6i4n5 in `r6i4n[5-7,9]`, and n3 in `n3,n5`.
_FIRST = re.compile(r"([A-Za-z][\w.-]{0,80})(?:\[(\d{1,8}))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list, in its order. ValueError if the text is not a list of hosts.

    >>> expand_hosts("a,n[08-10,12]"), expand_hosts("r[1-2]n[3,5]")
    (['a', 'n08', 'n09', 'n10', 'n12'], ['r1n3', 'r1n5', 'r2n3', 'r2n5'])
    """
    if text and not re.fullmatch(rf"{_ITEM.pattern}(?:,{_ITEM.pattern})*", text):
        raise ValueError(f"Invalid hostlist: {text}")
    hosts: list[str] = []
    for item in _ITEM.findall(text):
        parts = [_numbers(numbers) if numbers else [name] for numbers, name in _PART.findall(item)]
        hosts += map("".join, product(*parts))
    return hosts


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"Invalid hostlist: [{ranges}]")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def first_host(text: object) -> str | None:
    """The first host of a list, on which a job's script runs; None if the text names none.

    >>> first_host("r6i4n[5-7,9]"), first_host("n3,n5"), first_host(None)
    ('r6i4n5', 'n3', None)
    """
    match = _FIRST.match(text) if isinstance(text, str) else None
    return match[1] + (match[2] or "") if match else None
