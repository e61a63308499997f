"""Caches the rows that `status` shows for runs that have ended, as `report` caches records (`reader.cache`)."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpc_gpt.core.ends.run_state import RunState, is_of_slurm, moved_from, newest_chain, open_jobs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.cache import KINDS, CachedEntries


class _CachedRow(NamedTuple):
    """A row's `figures` by name. `submitted`: epoch seconds. `jobs`: the Slurm jobs of its newest job chain, on
    `cluster`. `folder`: the run folder at the submission, if it has moved since."""

    figures: dict[str, Any]
    submitted: float | None
    jobs: list[str]
    cluster: str | None
    folder: str | None


class CachedRows:
    """The cached rows of some runs. A row is valid while the run's files are unchanged and Slurm shows none of its
    jobs."""

    def __init__(self, runs: Sequence[RunFolder] = ()) -> None:
        self.rows: dict[Path, _CachedRow] = {}
        self._entries: CachedEntries | None = None
        if len(runs) >= KINDS["rows"].least:
            from hpc_gpt.reader.records.cached_runs import entries_of_runs  # needs numpy

            self._entries = entries_of_runs("rows", runs)

    def find(self, run: RunFolder) -> bool:
        """Looks for a row that fits the run's files, and returns whether there is one."""
        if self._entries is not None and (cached := self._entries.find(str(run.path))) is not None:
            row = _CachedRow(*cached)
            moved = moved_from(run, {"folder": row.folder}) if row.folder else None
            if row.figures["moved_from"] == (str(moved) if moved else None):
                self.rows[run.path] = row
        return run.path in self.rows

    def figures(self, run: RunFolder, jobs: Container[str]) -> dict[str, Any] | None:
        """The figures of the run's row; None if none is cached. `jobs`: the jobs that its cluster shows."""
        row = self.rows.get(run.path)
        if row is None or any(job_id in jobs for job_id in row.jobs):
            return None
        age_s = max(0.0, time.time() - row.submitted) if row.submitted else None
        return {**row.figures, "age_s": age_s}

    def note(
        self, run: RunFolder, run_state: RunState, figures: Mapping[str, Any], jobs: Container[str] | None
    ) -> None:
        """Notes the figures of a run's row after `find`, if its files alone decide them. `jobs`: as in `figures`, None
        if Slurm did not answer."""
        if self._entries is None or not run_state.is_settled or figures["after"] or open_jobs(run):
            return
        of_slurm = [str(line.get("job_id")) for line in newest_chain(run) if is_of_slurm(line)]
        if of_slurm and (jobs is None or any(job_id in jobs for job_id in of_slurm)):
            return
        submitted = time.time() - figures["age_s"] if figures["age_s"] else None
        folder = str(run_state.line.get("folder") or run.path)
        elsewhere = folder if folder != str(run.path) else None
        row = _CachedRow(dict(figures), submitted, of_slurm, run.slurm_cluster(), elsewhere)
        self._entries.note(str(run.path), row)

    def store(self) -> None:
        """Writes the noted rows to the cache."""
        if self._entries is not None:
            self._entries.store()
