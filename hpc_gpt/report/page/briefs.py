"""Where the figures of very many runs are from, in few words: what most share is told once, a file once a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.page.anomalies import ended_words
from hpc_gpt.report.page.safe_text import safe
from hpc_gpt.report.page.table import SHOWN_KEYS, ended_sign
from hpc_gpt.runs.record import Record

_LONGEST = 160
_PLACE = re.compile(r"([^:\s]{1,400}):(?=\d)")


@dataclass(frozen=True)
class Brief:
    """A run's own sources: (keys, the place they share); "line 12" is one of `file`."""

    anchor: str
    label: str
    sign: str
    ended: str
    file: str
    sources: Sequence[tuple[str, str]]


def briefs_of(
    runs: Sequence[RunRead], labels: Sequence[str], places: Sequence[int]
) -> tuple[list[tuple[str, str]], list[Brief]]:
    """What most of the runs at `places` share, and each run's own sources."""
    counts = Counter(pair for place in places for pair in _sources(runs[place].record))
    shared = {pair for pair, count in counts.items() if count > 1 and 2 * count > len(places)}
    briefs = []
    for place in places:
        record = runs[place].record
        own = [pair for pair in _sources(record) if pair not in shared]
        files = Counter(found[1] for _, where in own if (found := _PLACE.match(where)))
        file = files.most_common(1)[0][0] if files else ""
        told = _grouped([(key, where.replace(f"{file}:", "line ") if file else where) for key, where in own])
        briefs.append(
            Brief(f"run-{place + 1}", labels[place], ended_sign(record.ended), ended_words(record.ended), file, told)
        )
    return _grouped(sorted(shared)), briefs


def _sources(record: Record) -> list[tuple[str, str]]:
    return [
        (key, safe(where, _LONGEST))
        for key, where in record.sources.items()
        if key in SHOWN_KEYS and getattr(record, key) is not None
    ]


def _grouped(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    keys: dict[str, list[str]] = {}
    for key, where in pairs:
        keys.setdefault(where, []).append(key)
    return [(", ".join(names), where) for where, names in keys.items()]
