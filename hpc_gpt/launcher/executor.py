"""submitit's Slurm executor with our own scripts: sbatch gets the job.sh in the run folder."""

import contextlib
import os
import re
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from submitit.slurm.slurm import SlurmExecutor

from hpc_gpt.core.errors import JobRefused, RunFolderError, SlurmUnreachable
from hpc_gpt.core.process import interrupts_wait
from hpc_gpt.core.runs.run_folder import RunFolder, is_federated, job_ids
from hpc_gpt.core.secrets import hide_secrets, hide_words
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.clients import (
    CUT_OFF,
    NoAnswer,
    add_found,
    as_noted,
    ask,
    ask_for_lost,
    is_lost,
    patience_s,
    sbatch_failed,
    scancel_command,
)
from hpc_gpt.core.slurm.directives import options_of, script_directives
from hpc_gpt.core.slurm.environment import (
    CHOOSE_CLUSTER,
    OF_ONE_JOB,
    job_python,
    submission_environment,
    without_choice,
)
from hpc_gpt.core.slurm.requeue import requeue_of
from hpc_gpt.core.slurm.sbatch_words import chosen_clusters, read_call

ARRAY_SCRIPT = "array.sh"
TURNS_SCRIPT = "turns.sh"
ARRAY_OUTPUT = "%a/slurm-%A_%a.out"  # below a folder with a link for each run
# If sbatch got no answer, its job is searched for so many times the patience with Slurm.
_TIMES = 4
_POLL_S = 0.5


class SlurmJobs(NamedTuple):
    """The `ids` of the jobs that Slurm accepted for a run, and their cluster, if one of several was chosen."""

    ids: list[str]
    cluster: str | None


class ScriptExecutor(SlurmExecutor):
    """Submits a script with sbatch's `command` line: the job.sh of a run or of an array.

    `runs`: (what a run's id has after the job's id, run), "" for a job of one run or of several, `_0` and so on for the
    elements of an array. All jobs of a run go to the cluster that accepted its first one.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        runs: Sequence[tuple[str, RunFolder]],
        profile: str,
    ) -> None:
        self.first = runs[0][1]
        try:
            super().__init__(self.first.path)
        except RuntimeError as fault:  # submitit found no srun
            raise SlurmUnreachable(str(fault), "run on a login node, or use --cluster local") from None
        self.command, self.environment, self.runs, self.profile = command, environment, runs, profile
        # The same for all jobs of a chain: the first may start before the next is submitted.
        self._before = {run.path: run.attempts_before for _, run in runs}
        self.cluster = self.first.slurm_cluster() if self.first.was_sent else None

    def submit_script(self, note: Mapping[str, Any] | None = None) -> str:
        """Calls sbatch with the script in its own folder, not with a copy, and returns the job's id. Each run's
        submissions.jsonl gets a line before the call, by which the job is found whatever ends this process, and one
        after it, with `note` added. SIGTERM and SIGHUP wait for sbatch's answer.

        Raises JobRefused or SlurmUnreachable with sbatch's message, which these lines have, too.
        """
        entry = {"scheduler": "slurm", "job_id": None, "command": hide_words(self.command), "refused": None}
        entry |= {"cluster": self.profile, "call": secrets.token_hex(8), **(note or {})}
        cluster, environment = self.cluster, self.environment
        if cluster is None and self.first.was_sent and job_ids(self.first):
            environment = without_choice(environment)
        search = {**entry, **self._search_keys(cluster, environment), "time": time.time()}
        self._note({**search, "lost": CUT_OFF})
        with interrupts_wait(signal.SIGTERM, signal.SIGHUP):
            return self._submit(entry, search, cluster, environment)

    def _submit(
        self, entry: dict[str, Any], search: dict[str, Any], cluster: str | None, environment: Mapping[str, str]
    ) -> str:
        """Calls sbatch, and notes its answer: `entry`, or `search` if there is none. Returns and raises as
        `submit_script`."""
        lost = ""
        try:
            answer = ask(self.command, environment, cluster=cluster, apart=True)
            if is_lost(answer):
                lost = answer.sentence or f"it ended with {answer.code}"
        except (NoAnswer, KeyboardInterrupt) as fault:
            lost = str(fault) or "Ctrl-C"
            if isinstance(fault, KeyboardInterrupt):
                self._note({**search, "lost": lost})
                raise
        except SlurmUnreachable as fault:
            self._note({**entry, "refused": str(fault)})
            raise
        if lost:
            return self._look_for({**search, "lost": lost})
        if answer.code != 0:
            self._note({**entry, "refused": answer.message})
            refusal = sbatch_failed(answer)
            stay = "the run is" if len(self.runs) == 1 else f"the {len(self.runs)} runs are"
            refusal.hint += f"; {stay} kept, marked refused: {self.first.path}"
            raise refusal
        job_id = self._get_job_id_from_submission_command(answer.stdout)
        if match := re.search(r" on cluster (\S+)", answer.stdout):
            entry["slurm_cluster"] = cluster = match[1]
            self.cluster = None if is_federated(job_id) else cluster
        try:
            self._note(entry, job_id)
        except RunFolderError as fault:
            raise RunFolderError(
                f"job {job_id} is queued, but {fault}", f"{scancel_command(job_id, cluster)} ends it"
            ) from None
        return job_id

    def _search_keys(self, cluster: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
        """The keys by which a job whose sbatch gave no answer is found: its command and the clusters to ask."""
        options, script = read_call(self.command[1:], options_of("sbatch"))
        chosen = cluster or options.get("clusters") or next(filter(None, map(environment.get, CHOOSE_CLUSTER)), None)
        if chosen is None:
            text = Path(script[0]).read_text(encoding="utf-8", errors="replace")
            chosen = chosen_clusters(script_directives(text))
        return {"script": as_noted(" ".join(script)), "clusters": chosen}

    def _look_for(self, entry: Mapping[str, Any]) -> str:
        """Finds the job of an sbatch without an answer; returns its id. SlurmUnreachable if it is not found in time."""
        self._note(entry)  # first, as the search may be killed
        until, job_id = time.monotonic() + _TIMES * patience_s(), ""
        while not job_id and time.monotonic() < until:
            time.sleep(_POLL_S)
            with contextlib.suppress(SlurmUnreachable), ask_for_lost(entry) as client:
                if (answer := client.answer(until - time.monotonic())) is not None:
                    ids = [add_found(run, run.submissions()[-1], answer) for _, run in self.runs]
                    job_id = next(filter(None, ids), "").partition("_")[0]
        if not job_id:
            name = self.first.run_id if len(self.runs) == 1 else self.first.sweep_id or self.first.run_id
            raise SlurmUnreachable(
                f"sbatch sent the job and got no answer ({entry['lost']}): it may be queued",
                f"do not submit it again: hpc-gpt status {name} finds it once Slurm answers",
            )
        self.cluster = self.first.slurm_cluster()
        return job_id

    def _note(self, entry: Mapping[str, Any], job_id: str = "") -> None:
        for element, run in self.runs:
            line = {**entry, "element": element} if entry.get("lost") else {**entry}
            line |= {key: hide_secrets(line[key]) for key in ("refused", "lost") if line.get(key)}
            run.add_submission({**line, **self._before[run.path], "job_id": f"{job_id}{element}" if job_id else None})


def _executor(
    script: Path,
    flags: Sequence[str],
    variables: Mapping[str, str],
    runs: Sequence[tuple[str, RunFolder]],
    resolved: Resolved,
) -> ScriptExecutor:
    """The executor for a rendered script. What differs between runs is in the variables `variables` and in `flags`."""
    command = ["sbatch", f"--chdir={Path.cwd()}", *flags, "--export=ALL", str(script)]
    environment = submission_environment(os.environ, {**variables, **job_python(resolved)})
    return ScriptExecutor(command, environment, runs, resolved.cluster.name)


def submit_own(
    folder: Path,
    output: str,
    resolved: Resolved,
    runs: Sequence[tuple[str, RunFolder]],
    options: Sequence[str],
    later: Sequence[str] = (),
) -> str:
    """Submits the job.sh around a user's own script: sbatch gets the environment, the current folder and the `options`
    of the user. What differs between runs is passed as arguments of job.sh: the `folder` of the run, or the folder with
    a link to each run, the interpreter, and the options for `later` jobs of the chain. `output`: a pattern in `folder`.
    """
    path = f"{_no_pattern(folder)}/{output}"
    flags = [*options, requeue_of(resolved.cluster).flag, "--open-mode=append", f"--output={path}", f"--error={path}"]
    python = job_python(resolved).get("HPC_GPT_PYTHON") or os.environ.get("HPC_GPT_PYTHON")
    script = runs[0][1].job_script
    command = ["sbatch", *flags, str(script), str(folder), *([python or "", *later] if python or later else [])]
    environment = {name: value for name, value in os.environ.items() if name not in {*OF_ONE_JOB, "SBATCH_WAIT"}}
    return ScriptExecutor(command, environment, runs, resolved.cluster.name).submit_script()


def submit_to_slurm(run: RunFolder, resolved: Resolved, jobs: int = 1, options: Sequence[str] = ()) -> SlurmJobs:
    """Submits the run's job.sh, as a chain of `jobs` jobs, and returns those that Slurm accepted.

    `options`: further options of sbatch, for a user's own script.

    Each job is noted in the run's submissions.jsonl. Raises JobRefused or SlurmUnreachable if the first was refused.
    """
    output = "slurm-%j.out"  # it gets what the script prints before its attempt's folder exists
    if resolved.script is not None:
        later = options if job_ids(run) else ()  # job.sh has the options of the first submission
        if run.sweep_id is None:
            job_id = submit_own(run.path, output, resolved, [("", run)], options, later)
        else:
            folder = run.path.parent / run.sweep_id / "1"  # the folder of its array
            only = [*options, f"--array={resolved.row}"]
            job_id = submit_own(folder, ARRAY_OUTPUT, resolved, [(f"_{resolved.row}", run)], only, later)
        return SlurmJobs([job_id], run.slurm_cluster())
    requeue = requeue_of(resolved.cluster)
    flags = [f"--output={_no_pattern(run.path)}/{output}", *requeue.flags(resolved, run.run_id)]
    executor = _executor(run.job_script, flags, {"HPC_GPT_RUN": str(run.path)}, [("", run)], resolved)
    if not requeue.at_once:
        return SlurmJobs([executor.submit_script()], executor.cluster)
    accepted: list[str] = []
    for number in range(1, jobs + 1):
        try:
            accepted.append(executor.submit_script({"link": number, "links": jobs}))
        except (JobRefused, SlurmUnreachable):
            # For example at a limit on queued jobs: the accepted jobs run, and the last one submits another.
            if not accepted:
                raise
            break
    return SlurmJobs(accepted, executor.cluster)


def submit_array(
    folder: Path, resolved: Resolved, runs: Sequence[RunFolder], at_once: int | None, after: str | None = None
) -> str:
    """Submits `array.sh` in a folder with one link per run, by number, and returns the array's job id.

    The runs have equal directives. `at_once`: how many of them may run at a time. `after`: the array that must have
    ended first. Raises as submit_script.
    """
    most = f"%{at_once}" if at_once else ""
    flags = [f"--array=0-{len(runs) - 1}{most}", f"--output={_no_pattern(folder)}/{ARRAY_OUTPUT}"]
    if after is not None:  # on the command line it replaces the script's own
        requested = resolved.job.dependency
        flags.append(f"--dependency={f'{requested},' if requested else ''}afterany:{after}")
    elements = [(f"_{number}", run) for number, run in enumerate(runs)]
    variables = {"HPC_GPT_ARRAY": str(folder)}
    return _executor(folder / ARRAY_SCRIPT, flags, variables, elements, resolved).submit_script()


def submit_in_turns(folder: Path, resolved: Resolved, runs: Sequence[RunFolder]) -> str:
    """Submits `turns.sh` in a folder with one link per run, by number, as one job that starts one run after the other;
    returns the job's id. Raises as submit_script."""
    flags = [f"--output={_no_pattern(folder)}/slurm-%j.out"]
    variables = {"HPC_GPT_TURNS": str(folder)}
    executor = _executor(folder / TURNS_SCRIPT, flags, variables, [("", run) for run in runs], resolved)
    return executor.submit_script({"shared": True})


def _no_pattern(path: Path) -> str:
    """Doubles each % of a path, because sbatch reads --output as a pattern."""
    return str(path).replace("%", "%%")
