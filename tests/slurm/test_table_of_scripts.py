"""Each job script of job_scripts.txt by plain sbatch and by `hpc-gpt submit`: starts, exit state, files and output.

All rows that were selected are submitted with the first of them and run side by side; a test waits for its own.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import pytest

from hpc_gpt.core.files import read_json
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.processes import command_of, started_with
from tests.slurm.launcher import PYTHON, Launcher, is_under_way, settled_class
from tests.slurm.test_job_scripts import of_a_user
from tests.waiting import wait_for

TABLE = Path(__file__).with_name("job_scripts.txt")
WAYS = ("sbatch", "submit")
# Those of `make test`: an end by a signal, and a failure that the script handles.
QUICK = ("exit-143-after-the-last-step", "or-echo")
# What loses work: a retry from the queue, and a requeue by the script itself.
ALWAYS = ("exit-143-among-steps", "requeues-itself-once")
MOST_STARTS = 4  # of any row; the one that has more is started without end
AT_ONCE = 3  # submissions side by side: each is a second of CPU


@dataclass(frozen=True)
class Row:
    """One script of the table, with what its header says."""

    name: str
    text: bytes
    keys: dict[str, str]

    def value(self, key: str, otherwise: str = "") -> str:
        return self.keys.get(key, otherwise).partition(" | ")[0].strip()

    def words(self, key: str) -> list[str]:
        return shlex.split(self.value(key))


def rows() -> Iterator[Row]:
    """The rows of the table. ValueError for a header that is none, or a difference without its reason."""
    _, *sections = re.split(r"(?m)^=== ", TABLE.read_text())
    for section in sections:
        name, _, rest = section.partition("\n")
        keys = dict(re.findall(r"(?m)^--- (\w+): (.*)$", rest))
        text = re.sub(r"(?m)^(---|# ----) .*\n", "", rest).rstrip("\n") + "\n"
        if unknown := keys.keys() - {"words", "args", "ours", "bytes", "slurm", "here", "ends", "apart", "mixed"}:
            raise ValueError(f"{name}: {unknown}")
        if silent := [key for key in ("here", "apart") if key in keys and " | " not in keys[key]]:
            raise ValueError(f"{name}: {silent} without a reason")
        text = {"dos": text.replace("\n", "\r\n"), "cut": text.rstrip("\n")}.get(keys.get("bytes", ""), text)
        yield Row(name, text.encode(), keys)


@dataclass
class Ended:
    """How a script ended by one way: starts, states with exit codes in the order of jobs, and the text of each file."""

    said: str
    files: dict[str, list[str]] = field(default_factory=dict)
    runs: list[RunFolder] = field(default_factory=list)


class Table:
    """The rows on one cluster. Each begins when `begin` is called, and is told by `ended`."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.folder = launcher.place("job-scripts")
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="row")
        self._submitted: dict[tuple[str, str], Future[tuple[int, str]]] = {}
        self._shown: dict[str, list[dict[str, str]]] = {}  # {working folder: its jobs}
        self._looked = 0.0

    def begin(self, selected: list[Row]) -> None:
        """Submits the rows, each by both ways."""
        for row in selected:
            for way in WAYS:
                self._submitted[row.name, way] = self._pool.submit(self._submit, row, way)

    def place(self, row: Row, way: str) -> Path:
        return self.folder / way / row.name

    def _submit(self, row: Row, way: str) -> tuple[int, str]:
        """(exit code, words) of the command that submits it."""
        (folder := self.place(row, way)).mkdir(parents=True)
        (folder / "job.slurm").write_bytes(row.text)
        own = of_a_user(folder) | {"HPC_GPT_LOGS": str(self.folder / "logs" / row.name), "SBATCH_PARTITION": "quiet"}
        words = [*row.words("words"), "job.slurm", *row.words("args")]
        ours = [*PYTHON, "submit", "--set", "job.retry_pause_s=1", *row.words("ours")]
        done = subprocess.run(
            [*(["sbatch"] if way == "sbatch" else ours), *words],
            env=self.launcher.environment | own,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        return done.returncode, done.stdout

    def jobs(self, folder: Path) -> list[dict[str, str]]:
        """The jobs whose working folder this is, each element of an array for itself, in the order of their ids."""
        if time.monotonic() > self._looked + 0.5:
            shown = self.launcher.cluster.run("scontrol", "--oneliner", "show", "job").stdout
            self._shown = {}
            for line in shown.splitlines():
                job = dict(reversed(re.findall(r"(\S+?)=(\S*)", line)))  # the first of each key
                self._shown.setdefault(job.get("WorkDir", ""), []).append(job)
            self._looked = time.monotonic()
            self._end_the_endless()
        found = self._shown.get(str(folder), [])
        return sorted(found, key=lambda job: (int(array_of(job)), int(job.get("ArrayTaskId", 0)), int(job["JobId"])))

    def ended(self, row: Row, way: str) -> Ended:
        """Waits for its end by that way."""
        code, said = self._submitted[row.name, way].result()
        folder = self.place(row, way)
        if code:
            assert not self.jobs(folder), said
            return Ended("refused" if code in (1, 2) else f"exit code {code}: {said}")
        wait_for(
            f"the end of {row.name}", lambda: self._over(row, folder), lambda: f"{self.jobs(folder)}\n{self.why(row)}"
        )
        jobs = self.jobs(folder)
        runs = self.runs(row) if way == "submit" else []
        starts = starts_of(jobs)
        if runs and len(jobs) == len(runs):
            attempts = sum(len(run.attempts()) for run in runs)
            assert attempts == starts, f"{attempts} attempts, {starts} starts"
        states = (f"{job['JobState']} {job['ExitCode']}" for job in jobs)
        return Ended(f"{starts} {' '.join(states)}", self._files(row, folder, jobs), runs)

    def _over(self, row: Row, folder: Path) -> bool:
        found = self.jobs(folder)
        assert starts_of(found) <= MOST_STARTS, (
            f"{row.name} is started for the {starts_of(found)}th time\n{self.why(row)}"
        )
        return bool(found) and not any(is_under_way(job["JobState"]) for job in found)

    def _end_the_endless(self) -> None:
        """One that is started again and again takes the time of the others."""
        for folder, jobs in self._shown.items():
            if (
                folder.startswith(str(self.folder))
                and starts_of(jobs) > MOST_STARTS
                and any(is_under_way(job["JobState"]) for job in jobs)
            ):
                self.launcher.cluster.run("scancel", *(job["JobId"] for job in jobs))

    def runs(self, row: Row) -> list[RunFolder]:
        """Its runs, those of an array in the order of its elements."""
        found = [RunFolder(path.parent) for path in (self.folder / "logs" / row.name).glob("*/*/resolved.json")]
        return sorted(found, key=lambda run: (int(read_json(run.path / "sweep.json").get("row") or 0), run.path.name))

    def why(self, row: Row) -> str:
        """What hpc-gpt says of its runs, for whoever reads a failure."""
        return "\n".join("".join(self.launcher.run("why", str(run.path))) for run in self.runs(row) if run.attempts())

    def _files(self, row: Row, folder: Path, jobs: list[dict[str, str]]) -> dict[str, list[str]]:
        """{name: lines} of what the script made, without what differs from job to job."""
        ids = dict.fromkeys(array_of(job) for job in jobs)
        names = {job_id: f"JOB{number}" if number else "JOB" for number, job_id in enumerate(ids)}

        def alike(text: str) -> str:
            text = text.replace(str(folder), "FOLDER")
            text = re.sub("|".join(rf"(?<!\d){name}(?!\d)" for name in names), lambda found: names[found[0]], text)
            for pattern, word in DIFFERS:
                text = re.sub(pattern, word, text)
            return text

        found = {}
        for path in sorted(folder.rglob("*")):
            if path.name != "job.slurm":
                text = path.read_bytes().decode("latin-1") if path.is_file() else f"{path.stat().st_mode:o}"
                found[alike(path.relative_to(folder).as_posix())] = alike(text).splitlines(keepends=True)
        for name in row.words("mixed"):
            found[name] = sorted(found.get(name, []))
        return {name: lines for name, lines in found.items() if name not in row.words("apart")}

    def stop(self) -> None:
        """Ends what is still under way."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for shown in self._shown.values():
            for job in shown:
                if is_under_way(job["JobState"]) and job["WorkDir"].startswith(str(self.folder)):
                    self.launcher.cluster.run("scancel", job["JobId"])


def left_by(ended: Ended) -> dict[int, list[str]]:
    """{pid: command} of the processes of its runs."""
    return {pid: command_of(pid) for run in ended.runs for pid in started_with(HPC_GPT_RUN=str(run.path))}


DIFFERS = (
    # Slurm's words on the job, which hpc-gpt leaves in the run's own slurm-JOB.out, and srun's on nodes that are busy.
    (r"(?m)^slurmstepd-\S+ error: \*\*\* JOB .*\n|^srun: (?:Job \w+ step creation|Step created) .*\n", ""),
    (r"\bq\d\b", "NODE"),
    (r"(?<!\S)/\S{1,400}/slurm_script(?!\w)", "SCRIPT"),
    (r"(line \d+:) +\d+ ", r"\1 PID "),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "TIME"),
)


def array_of(job: dict[str, str]) -> str:
    """The id of its array, else its own."""
    return job.get("ArrayJobId", job["JobId"])


def starts_of(jobs: list[dict[str, str]]) -> int:
    return sum(int(job["Restarts"]) + 1 for job in jobs)


@pytest.fixture(scope="session")
def table(launcher: Launcher, request: pytest.FixtureRequest) -> Iterator[Table]:
    """The rows of all selected tests have begun."""
    made = Table(launcher)
    try:
        specs = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        made.begin([params["row"] for params in specs if isinstance(params.get("row"), Row)])
        yield made
    finally:
        made.stop()


def marks_of(row: Row) -> list[pytest.MarkDecorator]:
    return [] if row.name in QUICK else [pytest.mark.long(always=row.name in ALWAYS)]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=marks_of(row)) for row in rows()],
)
def test_a_script_does_the_same_by_sbatch_and_by_submit(table: Table, row: Row) -> None:
    by_sbatch, by_submit = table.ended(row, "sbatch"), table.ended(row, "submit")
    assert by_sbatch.said == row.value("slurm", "1 COMPLETED 0:0")
    assert by_submit.said == row.value("here", by_sbatch.said), table.why(row)
    assert sorted(by_submit.files) == sorted(by_sbatch.files)
    for name, lines in by_sbatch.files.items():
        differ = [pair for pair in zip_longest(lines, by_submit.files[name]) if pair[0] != pair[1]]
        assert not differ, f"{name}: {len(differ)} lines differ, {differ[:9]}"
    wait_for("the end of what it left", lambda: not left_by(by_submit), lambda: left_by(by_submit))
    if by_submit.said != "refused":
        ends = [settled_class(attempt) for run in by_submit.runs for attempt in run.attempts()]
        assert " ".join(ends) == row.value("ends", "done"), table.why(row)
