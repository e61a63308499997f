"""Slurm's clients (squeue for all jobs, sacct if accounting is on, scontrol, scancel), and a submission's environment.

No variable of an enclosing job is passed to a new one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.errors import ConfigError, JobRefused, SlurmUnreachable
from hpc_gpt.settings.resolve import Resolved

_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|connection refused|connect failure|could not establish a configuration|"
    r"socket timed out|zero bytes were transmitted|dns srv lookup failed|communication connection failure|"
    r"unable to establish|network is unreachable|host is down|slurm_load_jobs error: unable",
    re.IGNORECASE,
)
_GONE = re.compile(r"invalid job id|already completing or completed", re.IGNORECASE)
_TIMEOUT_S = 60.0
_PING_S = 20.0
# The cluster and the user's identity there; without them a client finds no controller.
_KEEP = {"SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER"}
_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMIX_", "SUBMITIT_", "TORCHELASTIC_")
_OF_ONE_JOB = {
    "HPC_GPT_RUN", "HPC_GPT_ATTEMPT", "HPC_GPT_ARRAY", "HPC_GPT_ELEMENT", "HPC_GPT_JOB", "HPC_GPT_STOP_AT",
    "HPC_GPT_HOLD_AFTER",
}  # fmt: skip
_NAMES = _OF_ONE_JOB | {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Every HPC_GPT_* variable except those of options: scripts, jobs and tests set them, and users may.
OWN_VARIABLES = frozenset(_OF_ONE_JOB) | {
    "HPC_GPT_LOGS", "HPC_GPT_DATA", "HPC_GPT_CONFIG", "HPC_GPT_STATE", "HPC_GPT_CACHE", "HPC_GPT_PYTHON",
    "HPC_GPT_MASTER_ADDR", "HPC_GPT_PROBE_COMMAND", "HPC_GPT_PREFLIGHT_S", "HPC_GPT_REHEARSAL", "HPC_GPT_SHARED",
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The answer of a Slurm client."""

    code: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """The client's message, without its name at the start of the lines."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return "\n".join(re.sub(r"^(sbatch|squeue|scontrol|scancel|sacct): ", "", line) for line in lines)

    @property
    def sentence(self) -> str:
        """The message on one line, without `error:`."""
        return "; ".join(
            re.sub(r"^(error|fatal): ", "", line).strip() for line in self.words.splitlines() if line.strip()
        )

    @property
    def unreachable(self) -> bool:
        return self.code != 0 and bool(_UNREACHABLE.search(self.stderr))


@dataclass(frozen=True)
class QueuedJob:
    """A line of squeue: the long name of the state (PENDING, RUNNING, …), and the reason."""

    state: str
    reason: str


def has_sbatch() -> bool:
    return shutil.which("sbatch") is not None


def ask(
    command: list[str],
    environment: Mapping[str, str] | None = None,
    text: str | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> Answer:
    """Run a Slurm client. SlurmUnreachable if it is not installed or does not answer in time."""
    try:
        done = subprocess.run(
            command,
            input=text,
            stdin=None if text is not None else subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=dict(environment) if environment is not None else None,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise SlurmUnreachable(
            f"no {command[0]} on this machine", "run on a login node of the cluster, or use --cluster local"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachable(
            f"{command[0]} gave no answer in {timeout_s:.0f} s", "is slurmctld up? try again later"
        ) from None
    return Answer(done.returncode, done.stdout, done.stderr)


def check_reachable() -> None:
    """SlurmUnreachable unless sbatch is installed and a controller answers."""
    if not has_sbatch():
        raise SlurmUnreachable("no sbatch on this machine", "run on a login node, or use --cluster local")
    answer = ask(["scontrol", "ping"], timeout_s=_PING_S)
    if answer.code != 0 or " is UP" not in answer.stdout:
        raise SlurmUnreachable(
            f"Slurm's controller does not answer: {answer.sentence.partition('; *')[0] or 'scontrol ping failed'}",
            "nothing was submitted; try again when slurmctld is up",
        )


def check_output_path(logs: Path) -> None:
    """ConfigError for a logs folder whose path sbatch's --output cannot carry."""
    path = str(logs.absolute())
    bad = ["a backslash"] * ("\\" in path) + ["a newline"] * ("\n" in path)
    if bad:
        raise ConfigError(
            f"HPC_GPT_LOGS: {path!r} holds {' and '.join(bad)}, which sbatch's --output cannot carry",
            "set HPC_GPT_LOGS to a path without it",
        )


def check_dependency(resolved: Resolved) -> None:
    """ConfigError for a job.dependency that cannot be joined with the singleton of a job chain."""
    asked = resolved.job.dependency
    if asked and "?" in asked and resolved.cluster.chain == "singleton":
        raise ConfigError(
            f"job.dependency {asked!r} holds a ?, which cannot be joined with the chain's own singleton",
            "separate the conditions with commas, or leave it out",
        )


def sbatch_failed(answer: Answer) -> SlurmUnreachable | JobRefused:
    """The exception for an sbatch that failed, with its message."""
    if answer.unreachable:
        return SlurmUnreachable(f"sbatch cannot reach Slurm: {answer.sentence}", "try again when slurmctld is up")
    return JobRefused(f"sbatch refused the job: {answer.sentence}", "change the request, or the cluster profile")


def test_only(script: str, environment: Mapping[str, str]) -> str:
    """The answer of `sbatch --test-only`: when and where a script would start. Raises as sbatch_failed."""
    answer = ask(["sbatch", "--test-only"], environment, script)
    if answer.code != 0:
        raise sbatch_failed(answer)
    return answer.words


def queued_jobs() -> dict[str, QueuedJob] | None:
    """{job id: job} of the user's jobs that squeue knows, recently ended ones too; None if Slurm is not reachable.

    The elements of an array are separate jobs: `4711_0` and so on. A missing job is unknown, not failed: squeue forgets
    a job minutes after its end.
    """
    try:
        answer = ask(["squeue", "--noheader", "--states=all", "--array", f"--user={os.getuid()}", "--format=%i|%T|%r"])
    except SlurmUnreachable:
        return None
    if answer.code != 0:
        return None
    jobs = {}
    for line in answer.stdout.splitlines():
        job_id, _, rest = line.partition("|")
        state, _, reason = rest.partition("|")
        jobs[job_id.strip()] = QueuedJob(state.strip(), reason.strip())
    return jobs


def accounted_states(job_ids: Iterable[str]) -> dict[str, str]:
    """{job id: last state by sacct}, "CANCELLED by 1000" as CANCELLED; empty without accounting."""
    wanted = [job_id for job_id in job_ids if re.fullmatch(r"\d+(_\d+)?", job_id)]
    if not wanted or shutil.which("sacct") is None:
        return {}
    try:
        answer = ask(["sacct", "-n", "-X", "-P", "-o", "JobID,State", "-j", ",".join(wanted)])
    except SlurmUnreachable:
        return {}
    if answer.code != 0:
        return {}
    states = {}
    for line in answer.stdout.splitlines():
        job_id, _, state = line.partition("|")
        states[job_id] = state.split(" ")[0].rstrip("+")
    return states


def largest_array() -> int:
    """The most elements of an array: MaxArraySize of `scontrol show config`, 1 if arrays are off.

    Raises SlurmUnreachable if it cannot be asked.
    """
    answer = ask(["scontrol", "show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer.stdout, re.MULTILINE)
    if answer.code != 0 or found is None:
        raise SlurmUnreachable(f"scontrol show config names no MaxArraySize: {answer.sentence}", "is slurmctld up?")
    return max(1, int(found[1]))


def cancel_job(*job_ids: str) -> None:
    """Cancel queued or running jobs; an ended job is no error. Raises SlurmUnreachable, JobRefused."""
    if job_ids:
        _scancel([*job_ids])


def interrupt_job(job_id: str) -> None:
    """Send SIGINT to every rank of a running job, which then saves and stops. Raises as cancel_job."""
    _scancel(["--signal=INT", job_id])


def _scancel(arguments: list[str]) -> None:
    answer = ask(["scancel", *arguments])
    if answer.unreachable:
        raise SlurmUnreachable(f"scancel cannot reach Slurm: {answer.sentence}", "try again when slurmctld is up")
    if answer.code != 0 and not _GONE.search(answer.stderr):
        raise JobRefused(f"scancel refused: {answer.sentence}", "is it your job?")


# --- the environment of a submission


def leaks(environment: Mapping[str, str]) -> list[str]:
    """The variables of `environment` that belong to an enclosing job or would silently change the submission."""
    return sorted(name for name in environment if name in _NAMES or (name.startswith(_PREFIXES) and name not in _KEEP))


def submission_environment(environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """`environment` without its `leaks`, with `own` laid over it."""
    drop = set(leaks(environment))
    return {name: value for name, value in environment.items() if name not in drop} | dict(own)


def job_python(resolved: Resolved) -> dict[str, str]:
    """HPC_GPT_PYTHON for the job: this interpreter, unless the user or the profile names one."""
    profile = resolved.cluster
    if os.environ.get("HPC_GPT_PYTHON") or profile.venv or profile.container or profile.python:
        return {}
    return {"HPC_GPT_PYTHON": sys.executable}
