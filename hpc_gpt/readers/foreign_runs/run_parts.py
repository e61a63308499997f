"""The parts of logs that make up one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.readers.foreign_runs.log_names import LogName
from hpc_gpt.readers.foreign_runs.main_steps import has_steps
from hpc_gpt.readers.foreign_runs.stated import Marks
from hpc_gpt.readers.part import Part


@dataclass
class RunParts:
    """The parts of one run: of each attempt all ranks', the one with the steps first.

    `number`: which run of its file. `marks`: layout, shape and batch as far as its parts say.
    """

    names: list[LogName]
    attempts: list[list[Part]]
    marks: Marks
    number: int = 1

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(name.path for name in self.names))

    @property
    def parts(self) -> list[Part]:
        """All parts, the last attempt's first."""
        return [part for attempt in reversed(self.attempts) for part in attempt]

    @property
    def has_steps(self) -> bool:
        return any(has_steps(part) for part in self.parts)

    @property
    def job_ids(self) -> set[str]:
        """Ids of the jobs, from the names and from what the logs say."""
        said = {str(fact.value) for part in self.parts for fact in part.facts.get("job_id", ())}
        return said | {name.job_id for name in self.names if name.job_id}
