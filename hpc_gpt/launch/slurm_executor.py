"""submitit's Slurm executor with our own scripts: sbatch gets the job.sh that is in the run folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpc_gpt.errors import JobRefused, RunFolderError, SlurmUnreachable
from hpc_gpt.launch.slurm import (
    OF_ONE_JOB,
    ask,
    check_dependency,
    job_python,
    sbatch_failed,
    submission_environment,
    without_choice,
    words_of_scancel,
)
from hpc_gpt.runs.run_folder import RunFolder, job_ids
from hpc_gpt.settings.resolved import Resolved, folder_name

ARRAY_SCRIPT = "array.sh"


class ScriptExecutor(SlurmExecutor):
    """Submits one script: the job.sh of a run, or that of an array whose elements are the `runs`, in their order.

    What belongs to the runs is not in the script but in the environment, and in `flags` on sbatch's command line.
    `note` is added to the job's line in each run's submissions.jsonl. An element of an array is a job `4711_0` and so
    on. All jobs of a run go to the cluster that took its first one.
    """

    def __init__(
        self,
        script: Path,
        resolved: Resolved,
        runs: Sequence[RunFolder],
        own: Mapping[str, str],
        flags: Sequence[str],
        is_array: bool = False,
    ) -> None:
        try:
            super().__init__(script.parent)
        except RuntimeError as fault:  # submitit found no srun
            raise SlurmUnreachable(str(fault), "run on a login node, or use --cluster local") from None
        self.script = script
        self.cluster_name = resolved.cluster.name
        self.runs = runs
        self.flags = flags
        self.is_array = is_array
        self.note: Mapping[str, Any] = {}
        self.numbers: Sequence[int] = range(len(runs))  # of an array's elements
        self.update_parameters(nodes=resolved.nodes, ntasks_per_node=resolved.ranks_per_node)
        self.environment = submission_environment(os.environ, dict(own) | job_python(resolved))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", f"--chdir={Path.cwd()}", *self.flags, "--export=ALL", str(submission_file_path)]

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        """Call sbatch with the script in its own folder, not with a copy.

        Raises JobRefused or SlurmUnreachable with sbatch's message, which every run's submissions.jsonl gets, too.
        """
        line = self._make_submission_command(self.script)
        entry = {"scheduler": "slurm", "job_id": None, "command": line, "refused": None, "cluster": self.cluster_name}
        cluster, environment = self.runs[0].slurm_cluster(), self.environment
        if cluster is None and job_ids(self.runs[0]):
            environment = without_choice(environment)
        try:
            answer = ask(line, environment, cluster=cluster)
        except SlurmUnreachable as fault:
            self._note({**entry, "refused": str(fault)})
            raise
        if answer.code != 0:
            self._note({**entry, "refused": answer.words})
            refusal = sbatch_failed(answer)
            kept = "the run is" if len(self.runs) == 1 else f"the {len(self.runs)} runs are"
            refusal.hint += f"; {kept} kept, marked refused: {self.runs[0].path}"
            raise refusal
        job_id = self._get_job_id_from_submission_command(answer.stdout)
        if found := re.search(r" on cluster (\S+)", answer.stdout):
            entry["slurm_cluster"] = cluster = found[1]
        try:
            self._note({**entry, "job_id": job_id})
        except RunFolderError as fault:
            raise RunFolderError(
                f"job {job_id} is queued, but {fault}", f"{words_of_scancel(job_id, cluster)} ends it"
            ) from None
        return SlurmJob(folder=self.script.parent, job_id=job_id, tasks=list(range(self._num_tasks())))

    def _note(self, entry: Mapping[str, Any]) -> None:
        for number, run in zip(self.numbers, self.runs, strict=True):
            job_id = entry["job_id"]
            if self.is_array and job_id:
                job_id = f"{job_id}_{number}"
            run.add_submission({**entry, "job_id": job_id, **self.note})


class OwnScriptExecutor(ScriptExecutor):
    """Submits the job.sh around a script of the user's own: sbatch sees the environment, the folder and the options
    that the user gives it. What belongs to the runs are arguments of job.sh: `folder`, and the interpreter."""

    def __init__(
        self,
        script: Path,
        resolved: Resolved,
        runs: Sequence[RunFolder],
        folder: Path,
        words: Sequence[str],
        output: str,
    ) -> None:
        requeue = "--no-requeue" if resolved.cluster.chain == "none" else "--requeue"
        flags = [*words, requeue, "--open-mode=append", f"--output={output}", f"--error={output}"]
        super().__init__(script, resolved, runs, {}, flags, is_array=len(runs) > 1 or folder != runs[0].path)
        self.environment = {name: value for name, value in os.environ.items() if name not in OF_ONE_JOB}
        python = job_python(resolved).get("HPC_GPT_PYTHON") or os.environ.get("HPC_GPT_PYTHON") or ""
        self.arguments = [str(folder), *([python] if python else [])]

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", *self.flags, str(submission_file_path), *self.arguments]


def submit_own(run: RunFolder, resolved: Resolved, words: Sequence[str]) -> str:
    """Submit the run of a script of the user's own, with `words` on sbatch's command line. Raises as submit."""
    output = f"{_no_pattern(run.path)}/slurm-%j.out"
    return str(OwnScriptExecutor(run.job_script, resolved, [run], run.path, words, output)._submit_command("").job_id)


def submit_own_array(folder: Path, resolved: Resolved, runs: Mapping[int, RunFolder], words: Sequence[str]) -> str:
    """Submit an array whose elements are runs, by their numbers, in a folder with a link to each. Raises as submit."""
    first = next(iter(runs.values()))
    output = f"{_no_pattern(folder)}/%a/slurm-%A_%a.out"
    executor = OwnScriptExecutor(first.job_script, resolved, [*runs.values()], folder, words, output)
    executor.numbers = [*runs]
    return str(executor._submit_command("").job_id)


def submit_to_slurm(run: RunFolder, resolved: Resolved, jobs: int = 1, words: Sequence[str] = ()) -> list[str]:
    """Submit the run's job.sh, as a chain of so many jobs, and return the ids of those that Slurm accepted.

    `words` are further options of sbatch, for a script of the user's own.

    Each is noted in the run's submissions.jsonl. Raises JobRefused or SlurmUnreachable if the first was not accepted.
    """
    flags = [
        f"--output={_no_pattern(run.path)}/slurm-%j.out"
    ]  # for the output before the script has made its attempt's folder
    own = {"HPC_GPT_RUN": str(run.path)}
    if resolved.script is not None:
        return [submit_own(run, resolved, words)]
    if resolved.cluster.chain != "singleton":
        return [str(ScriptExecutor(run.job_script, resolved, [run], own, flags)._submit_command("").job_id)]
    executor = ScriptExecutor(run.job_script, resolved, [run], own, [*flags, *singleton_flags(run, resolved)])
    accepted: list[str] = []
    for number in range(1, jobs + 1):
        executor.note = {"link": number, "links": jobs}
        try:
            accepted.append(str(executor._submit_command("").job_id))
        except (JobRefused, SlurmUnreachable):
            # For example a limit on queued jobs: the accepted jobs run, and the last one submits another.
            if not accepted:
                raise
            break
    return accepted


def singleton_flags(run: RunFolder, resolved: Resolved) -> list[str]:
    """The flags with which the jobs of one run wait for each other: a unique name, and --dependency=singleton."""
    check_dependency(resolved)
    asked = resolved.job.dependency
    return [
        f"--job-name={folder_name(resolved.job.name or resolved.name)}-{run.run_id}",
        f"--dependency={f'{asked},' if asked else ''}singleton",
    ]


def submit_array(folder: Path, resolved: Resolved, runs: Sequence[RunFolder], at_once: int | None) -> str:
    """Submit `array.sh` in a folder with a link for each run, by number, and return the array's job id.

    The runs have equal directives. `at_once`: how many of them may run at a time. Raises as submit.
    """
    most = f"%{at_once}" if at_once else ""
    flags = [f"--array=0-{len(runs) - 1}{most}", f"--output={_no_pattern(folder)}/%a/slurm-%A_%a.out"]
    own = {"HPC_GPT_ARRAY": str(folder)}
    executor = ScriptExecutor(folder / ARRAY_SCRIPT, resolved, runs, own, flags, is_array=True)
    return str(executor._submit_command("").job_id)


def _no_pattern(path: Path) -> str:
    """The path for --output, which sbatch reads as a pattern: a % is doubled."""
    return str(path).replace("%", "%%")
