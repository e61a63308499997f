"""submitit's Slurm executor with our scripts: what `render` prints, sbatch receives and the run folder keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpc_gpt.errors import JobRefused, RunFolderError, SlurmUnreachable
from hpc_gpt.launch.slurm import ask, check_dependency, job_python, sbatch_failed, submission_environment
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.resolve import Resolved, folder_name

ARRAY_SCRIPT = "array.sh"


class ScriptExecutor(SlurmExecutor):
    """Submits one script: the `job.sh` of a run, or of an array whose elements are the runs in their order, each a job
    of its own (`4711_0`, `4711_1` and so on).

    What belongs to the runs alone goes beside the script, in the environment and in `flags` on sbatch's line. `note` is
    added to what each run's submissions.jsonl says of the job.
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
        except RuntimeError as fault:  # submitit looks for srun
            raise SlurmUnreachable(str(fault), "run on a login node, or use --cluster local") from None
        self.script = script
        self.cluster_name = resolved.cluster.name
        self.runs = runs
        self.flags = flags
        self.is_array = is_array
        self.note: Mapping[str, Any] = {}
        self.update_parameters(nodes=resolved.nodes, ntasks_per_node=resolved.ranks_per_node)
        self.environment = submission_environment(os.environ, dict(own) | job_python(resolved))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", f"--chdir={Path.cwd()}", *self.flags, "--export=ALL", str(submission_file_path)]

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        """sbatch on the script in its own place, so that there is no second copy to differ from it.

        Raises JobRefused or SlurmUnreachable with sbatch's words, and leaves them in every run's submissions.jsonl.
        """
        line = self._make_submission_command(self.script)
        entry = {"scheduler": "slurm", "job_id": None, "command": line, "refused": None, "cluster": self.cluster_name}
        try:
            answer = ask(line, self.environment)
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
        try:
            self._note({**entry, "job_id": job_id})
        except RunFolderError as fault:
            raise RunFolderError(f"job {job_id} is queued, but {fault}", f"scancel {job_id} ends it") from None
        return SlurmJob(folder=self.script.parent, job_id=job_id, tasks=list(range(self._num_tasks())))

    def _note(self, entry: Mapping[str, Any]) -> None:
        for number, run in enumerate(self.runs):
            job_id = entry["job_id"]
            if self.is_array and job_id:
                job_id = f"{job_id}_{number}"
            run.add_submission({**entry, "job_id": job_id, **self.note})


def submit(run: RunFolder, resolved: Resolved, links: int = 1) -> list[str]:
    """Submits the run's job.sh, as so many jobs that wait for each other, and gives the ids of those that were taken.

    Raises JobRefused or SlurmUnreachable if not even the first was; each is noted in the run's submissions.jsonl.
    """
    flags = [f"--output={_no_pattern(run.path)}/slurm-%j.out"]  # the script soon writes into attempts/ itself
    own = {"HPC_GPT_RUN": str(run.path)}
    if resolved.cluster.chain != "singleton":
        return [str(ScriptExecutor(run.job_script, resolved, [run], own, flags)._submit_command("").job_id)]
    executor = ScriptExecutor(run.job_script, resolved, [run], own, [*flags, *singleton_flags(run, resolved)])
    taken: list[str] = []
    for number in range(1, links + 1):
        executor.note = {"link": number, "links": links}
        try:
            taken.append(str(executor._submit_command("").job_id))
        except (JobRefused, SlurmUnreachable):
            # A limit on jobs in the queue, say: those that were taken run, and the last one submits another.
            if not taken:
                raise
            break
    return taken


def singleton_flags(run: RunFolder, resolved: Resolved) -> list[str]:
    """What makes the jobs of one run wait for each other: a name that no other run has, and the dependency on it."""
    check_dependency(resolved)
    asked = resolved.job.dependency
    return [
        f"--job-name={folder_name(resolved.job.name or resolved.name)}-{run.run_id}",
        f"--dependency={f'{asked},' if asked else ''}singleton",
    ]


def submit_array(folder: Path, resolved: Resolved, runs: Sequence[RunFolder], at_once: int | None) -> str:
    """Submits `array.sh` of a folder that holds a link for each run, by its number, and gives the array's job id.

    `at_once`: how many may run at a time. Raises as submit; the runs' settings are alike in all that Slurm is asked.
    """
    most = f"%{at_once}" if at_once else ""
    flags = [f"--array=0-{len(runs) - 1}{most}", f"--output={_no_pattern(folder)}/%a/slurm-%A_%a.out"]
    own = {"HPC_GPT_ARRAY": str(folder)}
    executor = ScriptExecutor(folder / ARRAY_SCRIPT, resolved, runs, own, flags, is_array=True)
    return str(executor._submit_command("").job_id)


def _no_pattern(path: Path) -> str:
    """sbatch reads a pattern in --output, so a % of the path is doubled."""
    return str(path).replace("%", "%%")
