"""The timings of earlier runs in a logs folder, for those that are as fast as a run to come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import logs_folder, within_time
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import speed_hash
from hpc_gpt.core.settings.sized import Sized

if TYPE_CHECKING:
    from hpc_gpt.reader.runs.timings import MeasuredRun

_LOOKED_AT = 500  # only so many of the newest runs are read: the settings of one take about 1 ms


class PastTimings:
    """The timings of the newest runs by `speed_hash`; read on first use. Without `runs` they are those of the
    logs folder."""

    def __init__(self, runs: Callable[[], Sequence[RunFolder]] = lambda: list_runs(logs_folder())) -> None:
        self._runs = runs
        self._cached: dict[str, MeasuredRun | None] = {}

    def newest_alike(self, resolved: Sized) -> MeasuredRun | None:
        """The measurements of the newest run with the same settings and enough steps; None without one."""
        wanted = speed_hash(resolved)
        if wanted not in self._cached:
            if not (alike := self._by_hash.get(wanted)):
                return None
            from hpc_gpt.reader.runs.timings import measure_run  # needs numpy

            measured = (measure_run(run) for run in alike)
            self._cached[wanted] = next((timings for timings in measured if timings is not None), None)
        return self._cached[wanted]

    @cached_property
    def _by_hash(self) -> dict[str, list[RunFolder]]:
        """{speed hash: runs, newest first}."""
        runs: dict[str, list[RunFolder]] = {}
        newest = list(self._runs())[-_LOOKED_AT:][::-1]
        for run, speed in zip(newest, within_time(_speed_of, newest), strict=True):
            if speed is not None:
                runs.setdefault(speed, []).append(run)
        return runs


def _speed_of(run: RunFolder) -> str | None:
    with contextlib.suppress(UserError):  # a damaged folder measures nothing
        return speed_hash(run.resolved())
    return None
