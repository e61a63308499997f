"""Slurm's way of writing several hosts as one word: `n[1-3,7]`."""

from __future__ import annotations

import re
from collections.abc import Sequence


def expand_hosts(words: str) -> list[str]:
    """The hosts of a list, in its order; ValueError where it is none.

    >>> expand_hosts("a,n[08-10,12]")
    ['a', 'n08', 'n09', 'n10', 'n12']
    """
    if re.search(r"[\[\]]", re.sub(r"\[\d[\d,-]*\]", "", words)):
        raise ValueError(f"no list of hosts: {words!r}")
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", words):
        found = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\]([^\[\]]*)", word)
        if found is None:
            hosts.append(word)
            continue
        for part in found[2].split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                hosts.append(f"{found[1]}{number:0{len(first)}d}{found[3]}")
    return hosts


def compress_hosts(hosts: Sequence[str]) -> str:
    """The hosts as one word, neighbours that differ in a last number together.

    >>> compress_hosts(["n1", "n2", "n4"]), compress_hosts(["n1"])
    ('n[1-2,4]', 'n1')
    """
    groups: dict[str, list[int]] = {}
    for host in hosts:
        found = re.fullmatch(r"(.*?)(0|[1-9]\d*)", host)
        groups.setdefault(found[1] if found else host, []).extend([int(found[2])] if found else [])
    return ",".join(_with_numbers(name, sorted(numbers)) for name, numbers in groups.items())


def _with_numbers(name: str, numbers: list[int]) -> str:
    if len(numbers) < 2:
        return name + "".join(map(str, numbers))
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return f"{name}[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in spans)}]"


def compress_counts(counts: Sequence[int]) -> str:
    """A number for each node as Slurm's variables have them.

    >>> compress_counts([4, 4, 2])
    '4(x2),2'
    """
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
