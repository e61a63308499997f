"""Many logs in little memory: they are grouped into runs only after the last one was read."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.reader.logs import Part
from hpc_gpt.reader.records.log_steps import LARGEST_FIGURE
from hpc_gpt.reader.steps import StepColumn, StepTable

_MOST_ROWS = 1 << 19  # lines of steps kept of all logs: about 50 MB, and the same again as steps of runs
_FEW_ROWS = 512  # rows of a table from which on its columns are not shared
_OF_CURVES = ("lr", "grad_norm")
_EMPTY: dict[type, Any] = {dict: {}, list: []}
_Bar = tuple[float, float | None, int]


class PackedLogs(list[tuple[Path, list[Part]]]):
    """The logs that were read, with their parts. `records_only`: their steps will not be shown."""

    def __init__(self, records_only: bool) -> None:
        super().__init__()
        self._records_only = records_only
        self._rows = 0
        self._columns: dict[str, dict[bytes, NDArray[Any]]] = {}

    def add(self, path: Path, parts: list[Part]) -> None:
        """Adds a log. Columns that several logs have, such as the numbers of the first steps, are kept once."""
        for part in parts:
            for steps in part.steps.values():
                self._share_steps(steps)
            if part.progress:
                part.progress = _Bars(part.progress)  # type: ignore[assignment]  # nothing is appended to it any more
            self._share(part)
        self.append((path, parts))
        self._rows += _rows(parts)
        if self._rows > _MOST_ROWS:
            self._rows = self._bounded()

    def _share_steps(self, steps: StepTable) -> None:
        if len(steps) < _FEW_ROWS:
            steps.columns = {name: self._shared(self._used(name, steps[name])) for name in steps.columns}
            self._share(steps)

    def _share(self, log: Part | StepTable) -> None:
        """Replaces arrays and empty containers with equal ones of other logs: a log that was read never changes."""
        for field in fields(log):
            value = getattr(log, field.name)
            if isinstance(value, np.ndarray):
                setattr(log, field.name, self._shared(value))
            elif not value and type(value) in _EMPTY:
                setattr(log, field.name, _EMPTY[type(value)])

    def _used(self, name: str, column: StepColumn) -> StepColumn:
        """A column as a record uses it: for a curve, only the lines that have it matter."""
        if self._records_only and name in _OF_CURVES and not (np.abs(column) > LARGEST_FIGURE).any():
            return np.where(np.isfinite(column), 0.0, np.nan)
        return column

    def _shared(self, column: NDArray[Any]) -> NDArray[Any]:
        if len(column) and column[0] % 1 > 0:  # hardly any other log has the same figures
            return column
        data = column.tobytes()
        return self._columns.setdefault(column.dtype.char, {}).setdefault(data, np.frombuffer(data, column.dtype))

    def _bounded(self) -> int:
        """Halves the longest tables until half of _MOST_ROWS is left; returns the number of lines of steps left.

        Their stride records it, and a flag of the run reports it.
        """
        parts = [part for _, parts_of_log in self for part in parts_of_log]
        longest = max((len(steps) for part in parts for steps in part.steps.values()), default=0)
        while _rows(parts) > _MOST_ROWS // 2 and longest > 2:
            longest //= 2
            for part in parts:
                for name, steps in part.steps.items():
                    if len(steps) > longest:
                        part.steps[name] = steps.halved()
                        self._share_steps(part.steps[name])
        return _rows(parts)


def _rows(parts: Sequence[Part]) -> int:
    return sum(len(steps) for part in parts for steps in part.steps.values())


class _Bars(Sequence[_Bar]):
    """The bars of a part in an array: 24 bytes each instead of some 150."""

    def __init__(self, bars: Sequence[_Bar]) -> None:
        self._rows = np.array(bars, np.float64)  # NaN for None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[_Bar]:
        for step, elapsed_s, line in self._rows.tolist():
            yield step, None if elapsed_s != elapsed_s else elapsed_s, int(line)
