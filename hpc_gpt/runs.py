"""Finding runs: all of a folder, and those that a name means."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from hpc_gpt.errors import NoSuchRun
from hpc_gpt.run_folder import RunFolder, job_ids


def list_runs(logs: Path) -> list[RunFolder]:
    """Every run under a logs folder, or the folder itself if it is a run; oldest first."""
    if (logs / "resolved.json").is_file():
        return [RunFolder(logs.resolve())]
    found = {
        path.parent.resolve() for pattern in ("*/resolved.json", "*/*/resolved.json") for path in logs.glob(pattern)
    }
    return [RunFolder(path) for path in sorted(found, key=_begun)]


def _begun(path: Path) -> tuple[float, str]:
    """When a run was made, which its name says only where `submit` made it: plain sbatch names it by the job id."""
    try:
        return (path / "resolved.json").stat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)


def find_run(name: str, logs: Path) -> RunFolder:
    """The run that RUN means: a run folder, a run id, a prefix of just one, or a job id.

    Raises NoSuchRun, with the candidates where a prefix fits several.
    """
    if (Path(name) / "resolved.json").is_file():
        return RunFolder(Path(name).resolve())
    runs = list_runs(logs)
    # A job id in full before a prefix: "2026" is a job, though every run id of that year begins with it.
    found = (
        [run for run in runs if run.run_id == name]
        or [run for run in runs if name in job_ids(run)]
        or [run for run in runs if run.run_id.startswith(name)]
    )
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(run.run_id for run in found[:5]) + (", …" if len(found) > 5 else "")
        raise NoSuchRun(f"{name!r} fits {len(found)} runs under {logs}: {some}", "give more of the id")
    folder = "" if Path(name).is_dir() else ", nor a folder of that name"
    last = f"the newest is {runs[-1].run_id}" if runs else "there are no runs there yet"
    raise NoSuchRun(
        f"no run {name!r} under {logs}{folder}", f"{last}; hpc-gpt status lists them, HPC_GPT_LOGS names the folder"
    )


def find_runs(names: Sequence[str], logs: Path) -> list[RunFolder]:
    """The runs that the names mean, each once: a folder of runs, or a RUN as find_run takes it.

    No name means the logs folder. Raises NoSuchRun as find_run, and for a folder without runs outside the logs folder.
    """
    found = [run for name in names for run in _runs_of(name, logs)] if names else list_runs(logs)
    return list({run.path: run for run in found}.values())


def _runs_of(name: str, logs: Path) -> list[RunFolder]:
    folder = Path(name)
    if not folder.is_dir():
        return [find_run(name, logs)]
    found = list_runs(folder)
    if found or folder.resolve().is_relative_to(logs.resolve()):  # under logs there may well be none yet
        return found
    with contextlib.suppress(NoSuchRun):  # a folder that only happens to go by the run's name
        return [find_run(name, logs)]
    raise NoSuchRun(f"no runs under {name}", "give a run folder, or the folder that holds them, as logs/")
