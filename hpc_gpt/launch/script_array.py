"""Submit an array of a job script: one array for Slurm, a run for each of its elements."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hpc_gpt.errors import RunFolderError
from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.launch.submission import check_start, check_submission, write_run
from hpc_gpt.launch.sweep import SubmittedSweep, SweepJob, refuse_runs
from hpc_gpt.runs.run_folder import claim_folder


def submit_script_array(prepared: Prepared, logs: Path) -> SubmittedSweep:
    """Write a run folder for each element, with a link by its number, and submit the array. Raises as submit_run."""
    from hpc_gpt.launch.slurm_executor import submit_own_array

    asked, resolved = prepared.job_script, prepared.resolved
    assert asked is not None
    provenance = check_submission([prepared], logs)
    waits = check_start(resolved, prepared.script)
    sweep = SubmittedSweep(resolved.name, claim_folder(logs / resolved.slug))
    folder = sweep.folder / "1"
    try:
        folder.mkdir()
        for number in asked.array:
            row = replace(prepared, resolved=replace(resolved, sweep=resolved.name, row=str(number)))
            run = write_run(row, logs, provenance, {"id": sweep.id, "name": resolved.name, "row": str(number)})
            sweep.runs.append(run)
            (folder / str(number)).symlink_to(os.path.relpath(run.path, folder), target_is_directory=True)
        runs = dict(zip(asked.array, sweep.runs, strict=True))
        job_id = submit_own_array(folder, resolved, runs, asked.words)
    except OSError as fault:
        refuse_runs(sweep.runs, str(fault))
        raise RunFolderError(f"cannot write in {folder}: {fault.strerror}", "is the disk full?") from None
    sweep.jobs.append(SweepJob(job_id, tuple(sweep.runs)))
    if waits:
        sweep.waits[job_id] = waits
    return sweep
