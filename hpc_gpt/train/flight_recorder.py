"""torch's flight recorder of the last collectives: each rank's record when it hangs, and what all records say together.

A record is written as JSON to `attempts/<n>/flight/<rank>.json`, for NCCL or gloo, whichever the run uses. torch's own
dump after a timeout, `flight/rank-<n>`, is a pickle and is not opened here.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.small_files import read_json

# A record keeps the collectives that are not over, and so many of the last ones.
_KEPT = 20


def write_record(attempt: Attempt, rank: int) -> None:
    """Writes this rank's record if torch has one; else does nothing."""
    # torch is loaded here: the rank of a foreign program has none, and never calls this.
    from torch._C import _distributed_c10d as c10d

    from hpc_gpt.train.engines.private_parts import FLIGHT_RECORDER, can_use

    folder = attempt.folder / "flight"
    # A build without NCCL lacks its name.
    dumps = [getattr(c10d, "_dump_nccl_trace_json", None)]
    if can_use(FLIGHT_RECORDER):
        dumps.append(c10d._dump_fr_trace_json)  # type: ignore[attr-defined]
    for dump in filter(None, dumps):
        with contextlib.suppress(RuntimeError, ValueError, TypeError, OSError):
            record = json.loads(dump())
            if entries := record.get("entries"):
                record["entries"] = [entry for entry in entries[:-_KEPT] if not entry.get("retired")] + entries[-_KEPT:]
                folder.mkdir(exist_ok=True)
                (folder / f"{rank}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
                return


def read_records(attempt: Attempt) -> str:
    """What the records in an attempt's folder say together; empty if there are none, or they say nothing."""
    folder: Path = attempt.folder / "flight"
    files = {int(path.stem): path for path in folder.glob("*.json") if path.stem.isdigit()}
    return stuck_in({rank: read_json(path) for rank, path in files.items()})


@dataclass(frozen=True)
class _Group:
    """A rank in one process group: the number of the last collective that it began, and the one that is not over."""

    begun: int
    open: str


def stuck_in(records: Mapping[int, Mapping[str, Any]]) -> str:
    """Words for the collective that is not over, by its number and group, and for the ranks that have not begun it.

    >>> entry = {"pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 12, "retired": False,
    ...          "profiling_name": "nccl:all_reduce", "input_sizes": [[1024]], "state": "started"}
    >>> status = {"0": {"last_enqueued_collective": "12"}}
    >>> ahead = {"entries": [entry], "pg_status": status}
    >>> behind = {"entries": [{**entry, "collective_seq_id": 11, "retired": True}],
    ...           "pg_status": {"0": {"last_enqueued_collective": "11"}}}
    >>> stuck_in({0: ahead, 1: ahead, 2: behind})
    'flight recorder: nccl:all_reduce 12 of group default_pg, sizes [[1024]], is open on ranks 0, 1; rank 2 is at 11'
    """
    groups: dict[str, dict[int, _Group]] = defaultdict(dict)
    for rank, record in records.items():
        for name, place in _groups_of(record).items():
            groups[name][rank] = place
    # A group whose ranks are at different collectives explains the rest, and comes first.
    for places in sorted(groups.values(), key=lambda places: len({place.begun for place in places.values()}) < 2):
        most = max(place.begun for place in places.values())
        ahead = sorted(rank for rank, place in places.items() if place.begun == most and place.open)
        if not ahead:
            continue
        words = f"flight recorder: {places[ahead[0]].open} is open on {_ranks(ahead)}"
        late = {rank: place.begun for rank, place in sorted(places.items()) if place.begun < most}
        parts = [f"rank {rank} is at {begun}" for rank, begun in list(late.items())[:4]]
        return "; ".join([words, *parts])
    for rank, record in sorted(records.items()):
        for entry in _entries(record):
            if entry.get("is_p2p") and not entry.get("retired"):
                return f"flight recorder: {entry.get('profiling_name')} is open on rank {rank}"
    return ""


def _ranks(ranks: list[int]) -> str:
    more = f", ... ({len(ranks)})" if len(ranks) > 8 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8])) + more


def _entries(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries = record.get("entries")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _groups_of(record: Mapping[str, Any]) -> dict[str, _Group]:
    """{group: how far the rank is in it}; empty for a record of another shape than torch's."""
    found: dict[str, _Group] = {}
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        last: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for entry in _entries(record):
            if not entry.get("is_p2p"):
                last[str(entry["pg_id"])].append(entry)
        for number, entries in last.items():
            name, words = (str(part) for part in entries[-1]["process_group"])
            status = record.get("pg_status", {}).get(number, {})
            begun = int(status.get("last_enqueued_collective") or entries[-1]["collective_seq_id"])
            open_ = next((entry for entry in entries if not entry.get("retired")), None)
            found[name] = _Group(begun, _named(open_, words) if open_ is not None else "")
    return found


def _named(entry: Mapping[str, Any], group: str) -> str:
    sizes = str(entry.get("input_sizes"))[:60]
    group = group if group not in ("", "undefined") else str(entry["process_group"][0])
    return f"{entry['profiling_name']} {entry['collective_seq_id']} of group {group}, sizes {sizes},"
