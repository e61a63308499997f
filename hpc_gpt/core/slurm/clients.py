"""Slurm's clients (squeue for all jobs, sacct if accounting is on, scontrol, scancel).

If the controller hangs, a client retries for a minute. So every question has a time limit, and nobody waits for an
answer that is not needed.

At a site with several clusters, the same id is another job on each cluster. A client asks the cluster that its caller
names, else the default one, never the one in SLURM_CLUSTERS. In a federation ids are unique: the default cluster knows
them all.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_gpt.core.errors import ConfigError, JobRefused, SlurmUnreachable
from hpc_gpt.core.files import user_name
from hpc_gpt.core.process import seconds_given
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.secrets import hide_words
from hpc_gpt.core.slurm.environment import PATIENCE, without_choice

_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|connection refused|connect failure|could not establish a configuration|"
    r"socket timed out|zero bytes were transmitted|dns srv lookup failed|communication connection failure|"
    r"unable to establish|network is unreachable|host is down|slurm_load_jobs error: unable",
    re.IGNORECASE,
)
_GONE = re.compile(r"invalid job id|already completing or completed", re.IGNORECASE)
TIMEOUT_S = 60.0
KILL_WAIT_S = 30.0  # from SIGTERM to SIGKILL, Slurm's own default
# The limit for details about a job that has ended.
_ENDED_S = 5.0
# So many ids go in one argument, which the system limits to 128 KiB.
_MOST_ASKED = 1000
_State = TypeVar("_State")
_SQUEUE = ["squeue", "--noheader", "--states=all", "--array"]
_SACCT = ["sacct", "--federation", "-n", "-X", "-P"]
# A job's id in squeue's answer: 7, 7_3, 7_[3-5%1], 7+1 of a heterogeneous job.
_SQUEUE_ID = re.compile(r"\d[\w\[\],:%+.-]*")
# The state of a job that another cluster of the federation has started: it says nothing about the job.
REVOKED = "REVOKED"


class NoAnswer(SlurmUnreachable):
    """A client got no answer in time; Slurm may have accepted its request."""


@dataclass(frozen=True)
class Answer:
    """The answer of a Slurm client."""

    code: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """The client's message, without its name at the start of the lines."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return "\n".join(re.sub(r"^(sbatch|squeue|scontrol|scancel|sacct): ", "", line) for line in lines)

    @property
    def sentence(self) -> str:
        """The message on one line, without `error:`."""
        return "; ".join(
            re.sub(r"^(error|fatal|allocation failure): ", "", line).strip()
            for line in self.message.splitlines()
            if line.strip()
        )

    @property
    def unreachable(self) -> bool:
        return self.code != 0 and bool(_UNREACHABLE.search(self.stderr))


class Client:
    """A Slurm client that has been started, for a job on `cluster`. It is killed at the end of a `with` block. `apart`:
    a signal to this process's group does not reach it.

    SlurmUnreachable if it is not installed, or if SLURM_CONF names no file: it would wait for one for a minute.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str] | None = None,
        text: str | None = None,
        cluster: str | None = None,
        apart: bool = False,
    ) -> None:
        if environment is None:
            environment = without_choice(os.environ)
        if cluster:
            command = [command[0], f"--clusters={cluster}", *command[1:]]
        configuration = environment.get("SLURM_CONF")
        if configuration and not os.path.exists(configuration):
            raise SlurmUnreachable(f"SLURM_CONF names {configuration}, which does not exist", "correct it, or unset it")
        self.name = command[0]
        self._text = text
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env=dict(environment),
                process_group=0 if apart else None,
            )
        except (FileNotFoundError, PermissionError):
            raise SlurmUnreachable(
                f"no {self.name} on this machine", "run on a login node of the cluster, or use --cluster local"
            ) from None
        except OSError as fault:
            raise SlurmUnreachable(f"{self.name} cannot be started: {fault.strerror}", "try again") from None

    def answer(self, timeout_s: float) -> Answer | None:
        """Waits for the client's answer; None if there is none within `timeout_s`. It may be called again then."""
        try:
            stdout, stderr = self._process.communicate(self._text, timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None
        return Answer(self._process.returncode, stdout, stderr)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            if self._process.poll() is None:
                self._process.kill()


def ask(
    command: list[str],
    environment: Mapping[str, str] | None = None,
    text: str | None = None,
    timeout_s: float = TIMEOUT_S,
    cluster: str | None = None,
    apart: bool = False,
) -> Answer:
    """Runs a Slurm client, as Client. SlurmUnreachable if it cannot be started, NoAnswer if it does not answer in
    time."""
    with Client(command, environment, text, cluster, apart) as client:
        answer = client.answer(timeout_s)
    if answer is None:
        raise NoAnswer(f"{command[0]} gave no answer in {timeout_s:.0f} s", "is slurmctld up? try again later")
    return answer


def patience_s() -> float:
    """Total seconds to wait for Slurm's answer about runs that have ended, by HPC_GPT_SLURM_S. Raises ConfigError."""
    return seconds_given(PATIENCE, "5", "20 for a busy controller")


def check_output_path(logs: Path) -> None:
    """Raises ConfigError if sbatch's --output cannot hold the path of the logs folder."""
    path = str(logs.absolute())
    bad = ["a backslash"] * ("\\" in path) + ["a newline"] * ("\n" in path)
    if bad:
        raise ConfigError(
            f"HPC_GPT_LOGS: {path!r} holds {' and '.join(bad)}, which sbatch's --output cannot carry",
            "set HPC_GPT_LOGS to a path without it",
        )


def sbatch_failed(answer: Answer) -> SlurmUnreachable | JobRefused:
    """The exception for an sbatch that failed, with its message."""
    if answer.unreachable:
        return SlurmUnreachable(f"sbatch cannot reach Slurm: {answer.sentence}", "try again when slurmctld is up")
    return JobRefused(f"sbatch refused the job: {answer.sentence}", "change the request, or the cluster profile")


def squeue(cluster: str | None, job_ids: Sequence[str] = ()) -> Client:
    """Asks for the user's jobs on a cluster, or for these of whatever user, also recently ended ones; `queued_jobs`
    reads the answer. Raises as Client."""
    which = f"--jobs={','.join(job_ids)}" if job_ids else f"--user={os.getuid()}"
    return Client([*_SQUEUE, which, "--format=%i|%T|%r", "--sibling"], cluster=cluster)


def ask_jobs(job_ids: Sequence[str], cluster: str | None) -> dict[str, tuple[str, str]]:
    """Asks for jobs of whatever user; returns as `queued_jobs`. Raises SlurmUnreachable."""
    with squeue(cluster, job_ids) as client:
        if (answer := client.answer(TIMEOUT_S)) is None:
            raise SlurmUnreachable(f"squeue gave no answer in {TIMEOUT_S:g} s", "is slurmctld up?")
    return queued_jobs(answer)


def queued_jobs(answer: Answer) -> dict[str, tuple[str, str]]:
    """{job id: (long name of its state, such as PENDING, reason)} of the jobs in squeue's answer. Raises
    SlurmUnreachable if squeue failed.

    The elements of an array are separate jobs: `4711_0` and so on; those that were cancelled while they waited are
    4711. A missing job is unknown, not failed: squeue forgets a job minutes after its end, and then fails if it is
    asked for that job alone.
    """
    return {job_id: (state, reason) for job_id, state, reason in squeue_rows(answer, 3) if state != REVOKED}


def squeue_rows(answer: Answer, columns: int) -> list[list[str]]:
    """The rows of squeue's answer to a --format with `|` between the columns, of which the first is the job's id; the
    last column has the rest of its line. Other lines, such as a site's banner, are skipped. Raises SlurmUnreachable if
    squeue failed."""
    if answer.code != 0 and not _GONE.search(answer.stderr):
        raise SlurmUnreachable(f"squeue: {answer.sentence}", "is slurmctld up?")
    rows = ([cell.strip() for cell in line.split("|", columns - 1)] for line in answer.stdout.splitlines())
    return [row for row in rows if len(row) == columns and _SQUEUE_ID.fullmatch(row[0])]


def add_rest(states: dict[str, _State], job_ids: Iterable[str]) -> None:
    """Adds the elements of arrays among `job_ids` that have no state of their own: they have that of the rest."""
    for job_id in job_ids:
        if (rest := states.get(job_id.partition("_")[0])) is not None:
            states.setdefault(job_id, rest)


def sacct(job_ids: Iterable[str], cluster: str | None) -> Iterator[Client]:
    """Asks the accounting for a cluster's jobs, with one client after the other; `accounted_states` reads the
    answers. Yields nothing if there are no jobs, or no sacct. An array's id stands for its elements: the answer has
    all of them. Raises as Client.
    """
    for wanted in in_parts(job_ids) if shutil.which("sacct") else ():
        yield Client([*_SACCT, "-o", "JobID,State", "-j", ",".join(wanted)], cluster=cluster)


def in_parts(job_ids: Iterable[str]) -> Iterator[list[str]]:
    """Yields the ids, an array's in place of its elements, in parts that fit on a command line."""
    matches = (re.fullmatch(r"(\d+)(_\d+)?", job_id) for job_id in job_ids)
    wanted = list(dict.fromkeys(match[1] for match in matches if match))
    for at in range(0, len(wanted), _MOST_ASKED):
        yield wanted[at : at + _MOST_ASKED]


def accounted_states(answer: Answer) -> dict[str, str]:
    """{job id: last state} in sacct's answer, "CANCELLED by 1000" as CANCELLED; empty without accounting. The elements
    of an array that never started, 4711_[2-8%1], are 4711, as in squeue's answer."""
    states = {}
    for line in answer.stdout.splitlines() if answer.code == 0 else ():
        job_id, _, state = line.partition("|")
        states[job_id.partition("_[")[0]] = state.split(" ")[0].rstrip("+")
    return {job_id: state for job_id, state in states.items() if state != REVOKED}


def who_cancelled(job_id: str, cluster: str | None) -> str | None:
    """The text that says who cancelled a job, and when, by accounting; None if unknown or not cancelled."""
    if not re.fullmatch(r"\d+(_\d+)?", job_id) or shutil.which("sacct") is None:
        return None
    try:
        answer = ask([*_SACCT, "-o", "State,End", "-j", job_id], timeout_s=_ENDED_S, cluster=cluster)
    except SlurmUnreachable:
        return None
    match = re.search(r"^CANCELLED by (\d+)\|(\d{4}-\d\d-\d\d)T(\d\d:\d\d)", answer.stdout, re.MULTILINE)
    return f"{user_name(int(match[1]))} cancelled it on {match[2]} at {match[3]}" if match else None


def slurm_config(cluster: str | None = None) -> dict[str, str]:
    """Slurm's settings by `scontrol show config`. Raises SlurmUnreachable if it cannot be asked."""
    answer = ask(["scontrol", "show", "config"], cluster=cluster)
    if answer.code != 0:
        raise SlurmUnreachable(f"scontrol show config: {answer.sentence}", "is slurmctld up?")
    pairs = (line.partition("=") for line in answer.stdout.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def sacctmgr_rows(*query: str, columns: Sequence[str]) -> list[list[str]]:
    """The rows of a list with these columns, empty without accounting. A line with fewer columns, such as a site's
    banner, is skipped; columns that a site has added are cut off."""
    try:
        answer = ask(["sacctmgr", "-nP", "show", *query, f"format={','.join(columns)}"])
    except SlurmUnreachable:
        return []
    rows = [line.split("|") for line in answer.stdout.splitlines()] if answer.code == 0 else []
    return [row[: len(columns)] for row in rows if len(row) >= len(columns)]


def default_account(user: str, of: str) -> str:
    """The default account of a user on a cluster (`of`, as cluster=NAME); empty without one."""
    rows = sacctmgr_rows("user", user, of, "withassoc", columns=("User", "DefaultAccount"))
    return next((account for name, account in rows if name == user), "")


def scheduler_parameter(config: Mapping[str, str], name: str) -> int | None:
    """A whole number in SchedulerParameters; None if it is not set.

    >>> scheduler_parameter({"SchedulerParameters": "defer,max_array_tasks=100"}, "max_array_tasks")
    100
    """
    match = re.search(rf"(?:^|,){name}=(\d+)", config.get("SchedulerParameters", ""))
    return int(match[1]) if match else None


def largest_array() -> int:
    """The largest number of elements of an array whose indexes begin at 0: MaxArraySize (every index is below it), or
    max_array_tasks if that is less; 1 if arrays are off. Raises SlurmUnreachable if Slurm does not answer."""
    config = slurm_config()
    if not (size := config.get("MaxArraySize", "")).isdecimal():
        raise SlurmUnreachable("scontrol show config names no MaxArraySize", "is slurmctld up?")
    most = scheduler_parameter(config, "max_array_tasks")
    return max(1, min(int(size), int(size) if most is None else most))


def cancel_job(*job_ids: str, cluster: str | None = None, save: bool = False) -> None:
    """Cancels queued or running jobs of a cluster; an ended job is not an error. `save`: sends SIGINT to every rank of
    a running job instead, so that it saves and stops. Raises SlurmUnreachable, JobRefused."""
    if not job_ids:
        return
    answer = ask(["scancel", *(["--signal=INT"] if save else []), *job_ids], cluster=cluster)
    if answer.unreachable:
        raise SlurmUnreachable(f"scancel cannot reach Slurm: {answer.sentence}", "try again when slurmctld is up")
    if answer.code != 0 and not _GONE.search(answer.stderr):
        raise JobRefused(f"scancel refused: {answer.sentence}", "is it your job?")


def scancel_command(job_id: str, cluster: str | None) -> str:
    """The command with which a user cancels a job."""
    return f"scancel {f'-M {cluster} ' if cluster else ''}{job_id}"


# --- jobs whose sbatch got no answer: the controller may have queued them

# Such a submission is a line of submissions.jsonl without an id; its `lost` is sbatch's message. The job is found by
# the `script` that Slurm shows as its command; then another line gets its id. Until then the run is `unknown`. Such a
# line is written before sbatch is called; of the lines of one `call` the last counts.
CUT_OFF = "hpc-gpt ended before sbatch answered"

# Messages which mean that the request was sent. A failed connection does not: then sbatch could not send it.
_SENT = re.compile(
    r"socket timed out|zero bytes were transmitted|message receive failure|connection reset|transport endpoint|"
    r"header lengths are longer|insane message length|unexpected message received",
    re.IGNORECASE,
)


def is_lost(answer: Answer) -> bool:
    """Whether a failed sbatch had sent its request, or was killed."""
    return answer.code < 0 or (answer.code != 0 and bool(_SENT.search(answer.stderr)))


def ask_for_lost(line: Mapping[str, Any]) -> Client:
    """Asks squeue for a job whose sbatch gave no answer; `add_found` reads the reply. Raises as Client."""
    return Client([*_SQUEUE, f"--user={os.getuid()}", "--format=%i|%o"], cluster=line.get("clusters"))


def add_found(run: RunFolder, line: Mapping[str, Any], answer: Answer) -> str:
    """Finds the job of a lost submission in squeue's answer, and notes and returns its id; empty if it is not there.
    Raises SlurmUnreachable, RunFolderError."""
    if answer.code != 0:
        raise SlurmUnreachable(f"squeue: {answer.sentence}", "is slurmctld up?")
    noted = {entry["job_id"] for entry in run.submissions() if entry.get("job_id")}
    job_id, cluster = _newest(line, noted, answer.stdout)
    if job_id:
        requested = str(line.get("clusters") or "")
        cluster = cluster or (requested if "," not in requested else "")  # squeue does not name a single cluster
        chosen = {"slurm_cluster": cluster} if cluster else {}
        run.add_submission({**line, "lost": None, "job_id": job_id, **chosen})
    return job_id


def as_noted(command: str) -> str:
    """A job's command in the form of submissions.jsonl: without possible secrets."""
    return " ".join(hide_words(command.split(" ")))


def _newest(line: Mapping[str, Any], noted: Collection[str], listed: str) -> tuple[str, str]:
    """Returns (id, cluster) of the newest job with the command of a lost submission, without the `noted` ids."""
    element, script = str(line.get("element") or ""), str(line.get("script"))
    newest, cluster = ("", ""), ""
    for row in listed.splitlines():
        if row.startswith("CLUSTER: "):  # a heading before the jobs of each cluster
            cluster = row.removeprefix("CLUSTER: ").strip()
        job_id, _, command = row.partition("|")
        mine = (
            as_noted(command) == script
            and job_id not in noted
            and job_id.partition("_")[1:] == element.partition("_")[1:]
        )
        if mine and int(job_id.partition("_")[0]) > int(newest[0].partition("_")[0] or 0):
            newest = job_id, cluster
    return newest
