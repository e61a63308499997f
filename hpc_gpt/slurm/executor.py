"""submitit's Slurm executor with our script: what `render` prints, sbatch receives and the run folder keeps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpc_gpt.errors import ConfigError, RunFolderError, SlurmUnreachable
from hpc_gpt.resolve import Resolved
from hpc_gpt.run_folder import RunFolder
from hpc_gpt.slurm.environment import job_python, submission_environment
from hpc_gpt.slurm.scheduler import ask, sbatch_failed


class ScriptExecutor(SlurmExecutor):
    """Submits the `job.sh` of one run. What belongs to that run alone goes beside the script, on sbatch's line."""

    def __init__(self, run: RunFolder, resolved: Resolved) -> None:
        try:
            super().__init__(run.path)
        except RuntimeError as fault:  # submitit looks for srun
            raise SlurmUnreachable(str(fault), "run on a login node, or use --cluster local") from None
        self.run = run
        self.update_parameters(nodes=resolved.nodes, ntasks_per_node=resolved.ranks_per_node)
        own = {"HPC_GPT_RUN": str(run.path)} | job_python(resolved)
        self.environment = submission_environment(os.environ, own)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """The rendered script; nothing of submitit's own is in it."""
        return self.run.job_script.read_text(encoding="utf-8")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [
            "sbatch",
            f"--chdir={Path.cwd()}",
            # sbatch reads a pattern here, so a % of the path is doubled; the script soon writes into attempts/ itself.
            f"--output={str(self.run.path).replace('%', '%%')}/slurm-%j.out",
            "--export=ALL",
            str(submission_file_path),
        ]

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        """sbatch on the run folder's own job.sh, so that there is no second copy to differ from it.

        Raises JobRefused or SlurmUnreachable with sbatch's words, and leaves them in submissions.jsonl.
        """
        line = self._make_submission_command(self.run.job_script)
        entry = {"scheduler": "slurm", "job_id": None, "command": line, "refused": None}
        entry["cluster"] = self.run.resolved().cluster.name
        try:
            answer = ask(line, self.environment)
        except SlurmUnreachable as fault:
            self.run.add_submission({**entry, "refused": str(fault)})
            raise
        if answer.code != 0:
            self.run.add_submission({**entry, "refused": answer.words})
            refusal = sbatch_failed(answer)
            refusal.hint += f"; the run is kept, marked refused: {self.run.path}"
            raise refusal
        job_id = self._get_job_id_from_submission_command(answer.stdout)
        try:
            self.run.add_submission({**entry, "job_id": job_id})
        except RunFolderError as fault:
            raise RunFolderError(f"job {job_id} is queued, but {fault}", f"scancel {job_id} ends it") from None
        return SlurmJob(folder=self.run.path, job_id=job_id, tasks=list(range(self._num_tasks())))


def check_output_path(logs: Path) -> None:
    """Refuses a logs folder that sbatch's --output would read as a pattern."""
    path = str(logs.absolute())
    bad = ["a backslash"] * ("\\" in path) + ["a newline"] * ("\n" in path)
    if bad:
        raise ConfigError(
            f"HPC_GPT_LOGS: {path!r} holds {' and '.join(bad)}, which sbatch's --output cannot carry",
            "set HPC_GPT_LOGS to a path without it",
        )


def submit(run: RunFolder, resolved: Resolved) -> str:
    """Submits the run's job.sh and gives the job id. Raises JobRefused or SlurmUnreachable; both are noted there."""
    return str(ScriptExecutor(run, resolved)._submit_command("").job_id)
