"""Peers: the user's own programs, each a run of engine `command`. The log readers, or a pattern, find their
tokens/s."""

import re
import statistics
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.ends.state import ends_by_itself
from hpc_gpt.core.runs.record import Record
from hpc_gpt.launcher.peers import PATTERN_EXAMPLE
from hpc_gpt.reader.pattern import figure
from hpc_gpt.reader.records.discovery import DiscoveredFiles
from hpc_gpt.reader.records.foreign_run import read_foreign_runs

_MOST_WARM_UP = 5  # at most this many of a pattern's first figures are left out
# A peer's record has these keys from its run, and all others from what the program printed.
_OF_THE_RUN = ("run", "name", "job_id", "config_hash", "versions", "started", "ended_at", "ended", "cause", "attempts",
               "gpu_hours", "node_list")  # fmt: skip


def peer_record(record: Record, log: Path, pattern: str | None) -> Record:
    """The record of a peer's run, with the figures of its log; if the log has several runs, those of the longest."""
    read = [run_read.record for run_read in read_foreign_runs(DiscoveredFiles(logs=[log]))]
    figures = max(read, key=lambda record: record.steps_used or 0, default=Record())
    flags, sources, settings = [*record.flags, *figures.flags], {**figures.sources}, figures.settings | record.settings
    if pattern is not None:
        lines = re.split("[\r\n]", log.read_text(encoding="utf-8", errors="replace"))
        our_line = f"{record.name}: once a job on "  # we print the command before the program starts
        matches = [re.search(pattern, line) for line in lines if not line.startswith(our_line)]
        speeds = [value for match in matches if match and 0 < (value := figure(match[1] or "") or 0) < 1e15]
        used = speeds[min(_MOST_WARM_UP, len(speeds) // 2) :]
        figures = replace(figures, tokens_per_s=statistics.median(used) if used else None, steps_used=len(used))
        sources["tokens_per_s"] = f"--peer-pattern '{pattern}': median of the last {len(used)} of {len(speeds)} lines"
        settings["peer_pattern"] = pattern
    if ends_by_itself(record.cause):
        record = replace(record, ended="done", cause=None)  # for a bench an exit with 0 is enough
    if figures.tokens_per_s is None and record.ended == "done":
        flags.append(f"no tokens/s found in {log}: give --peer-pattern, {PATTERN_EXAMPLE}")
    of_run = {key: getattr(record, key) for key in _OF_THE_RUN}
    sources |= {key: source for key, source in record.sources.items() if key in of_run}
    return replace(figures, **of_run, settings=settings, flags=flags, sources=sources)
