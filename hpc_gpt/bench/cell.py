"""What a bench measures: cells, each an experiment of ours that trains here, or a program that the user has."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.runs.record import Record
from hpc_gpt.settings.resolve import folder_name


@dataclass(frozen=True)
class Cell:
    """One thing that is measured, a row of the table. `name` is told from the others' of its bench.

    Ours has `prepared`; a peer has `command`, a line for a shell, and `pattern`, a regular expression that finds its
    tokens/s in what it prints, None where the log readers do. What cannot run here has the `record` that says so.
    """

    name: str
    prepared: Prepared | None = None
    command: str | None = None
    pattern: str | None = None
    record: Record | None = None

    @property
    def slug(self) -> str:
        """Its name as a folder's or a file's.

        >>> Cell("deepspeed-zero:3 mbs 4").slug
        'deepspeed-zero_3_mbs_4'
        """
        return folder_name(self.name)
