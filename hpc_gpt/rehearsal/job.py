"""A job of the rehearsal, its steps and their ranks: real processes of this machine on virtual nodes."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.rehearsal.request import Request

PENDING, RUNNING, COMPLETING = "PENDING", "RUNNING", "COMPLETING"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")


@dataclass
class Rank:
    """One process of a step. `code` is its exit code, 128 and the signal's number for one that a signal ended."""

    number: int
    node: str
    process: subprocess.Popen[bytes] | None
    code: int | None = None
    number_of_signal: int = 0

    @property
    def session(self) -> int | None:
        return self.process.pid if self.process is not None else None


@dataclass
class Step:
    """What one srun has started. `errors` is srun's own stderr; `ended` is set once all ranks are gone."""

    job: int
    id: int
    ranks: list[Rank]
    errors: int
    kill_on_bad_exit: bool
    ended: threading.Event = field(default_factory=threading.Event)
    kill_at: float | None = None
    terminated: bool = False
    told: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.job}.{self.id}"

    @property
    def code(self) -> int:
        return max((rank.code or 0 for rank in self.ranks), default=0)


@dataclass(frozen=True)
class Past:
    """One start of a job as accounting keeps it."""

    state: str
    exit: tuple[int, int]
    nodes: tuple[str, ...]
    started: float
    ended: float


@dataclass
class Job:
    """What the scheduler knows of a job. Times are epoch seconds, None where Slurm would say Unknown.

    `term_after` is set while SIGTERM is still to be sent: once that process is gone, with those words.
    `errors` is the script's stderr, where Slurm's own lines go.
    `becomes` is what a COMPLETING job is once its processes are gone: an end, or PENDING for a requeued one.
    """

    id: int
    request: Request
    script: Path
    script_path: str
    arguments: tuple[str, ...]
    submit_folder: str
    environment: dict[str, str]
    user: str
    submitted: float
    array: tuple[int, int] | None = None
    state: str = PENDING
    reason: str = "None"
    restarts: int = 0
    eligible: float = 0.0
    started: float | None = None
    ended: float | None = None
    ends_at: float | None = None
    preempted: float | None = None
    preempted_until: float | None = None
    nodes: list[str] = field(default_factory=list)
    exit: tuple[int, int] = (0, 0)
    exclude: str | None = None
    nodelist: str | None = None
    comment: str | None = None
    dependency: str | None = None
    limit_s: int | None = None
    held: bool = False
    batch: subprocess.Popen[bytes] | None = None
    errors: int | None = None
    steps: list[Step] = field(default_factory=list)
    next_step: int = 0
    becomes: str = ""
    account_as: str = ""
    term_after: tuple[int | None, str] | None = None
    kill_at: float | None = None
    signalled_ahead: bool = False
    history: list[Past] = field(default_factory=list)

    @property
    def word(self) -> str:
        """The name that squeue and scontrol know it by: `7`, or `7_0` for an array's element."""
        return f"{self.array[0]}_{self.array[1]}" if self.array else str(self.id)

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    def output(self, pattern: str | None) -> Path:
        """Where the script's output goes, by --output's pattern or Slurm's own."""
        from hpc_gpt.rehearsal.request import output_path

        pattern = pattern or ("slurm-%A_%a.out" if self.array else "slurm-%j.out")
        array = {"A": str(self.array[0]), "a": str(self.array[1])} if self.array else {"A": str(self.id), "a": "0"}
        host = self.nodes[0] if self.nodes else ""
        fields = {"j": str(self.id), "x": self.request.name, "u": self.user, "N": host, "n": "0", "t": "0", **array}
        return Path(self.work_folder) / output_path(pattern, fields)

    @property
    def work_folder(self) -> str:
        return str(Path(self.submit_folder) / (self.request.chdir or ""))
