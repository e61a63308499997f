"""Finding runs: all of a folder, and those that a name means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_gpt.errors import NoSuchRun
from hpc_gpt.runs.run_folder import RunFolder, job_ids


def list_runs(logs: Path) -> list[RunFolder]:
    """Every run under a logs folder, or the folder itself if it is a run; oldest first.

    Of a sweep's folder, or the folder of several, the runs that are linked there.
    """
    if (logs / "resolved.json").is_file():
        return [RunFolder(logs.resolve())]
    found = {path.parent.resolve() for depth in ("*", "*/*") for path in logs.glob(f"{depth}/resolved.json")}
    found = found or {path.parent.resolve() for path in logs.glob("*/*/*/resolved.json")}
    return oldest_first(RunFolder(path) for path in found)


def oldest_first(runs: Iterable[RunFolder]) -> list[RunFolder]:
    """The runs in the order they were made."""
    return sorted(runs, key=lambda run: _begun(run.path))


def _begun(path: Path) -> tuple[float, str]:
    """When a run was made. Its name says that only if `submit` made it: plain sbatch names it by the job id."""
    try:
        return (path / "resolved.json").stat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)


def find_run(name: str, logs: Path) -> RunFolder:
    """The run that RUN means: a run folder, a run id, a prefix of just one, or a job id.

    Raises NoSuchRun, with the candidates if a name fits several, as an array's id or a sweep's does.
    """
    found = _matches(name, logs)
    if len(found) == 1:
        return found[0]
    raise _several(name, found, logs)


def named_runs(name: str, logs: Path) -> list[RunFolder]:
    """The runs that a name singles out: one as for find_run, or a sweep's, by its id or folder or its array's job id.

    Raises NoSuchRun if there is none, or the name fits runs that have nothing to do with each other.
    """
    if is_sweep_folder(Path(name)):
        return list_runs(Path(name))
    found = _matches(name, logs)
    sweeps = {run.sweep_id for run in found}
    if len(found) == 1 or (len(sweeps) == 1 and None not in sweeps and _means_sweep(name, found)):
        return found
    raise _several(name, found, logs)


def find_runs(names: Sequence[str], logs: Path) -> list[RunFolder]:
    """The runs that the names mean, each once: a folder of runs, or a name as named_runs takes it.

    No name means the logs folder. Raises NoSuchRun as named_runs, and for a folder without runs outside of it.
    """
    found = [run for name in names for run in _runs_of(name, logs)] if names else list_runs(logs)
    return list({run.path: run for run in found}.values())


def is_sweep_folder(folder: Path) -> bool:
    """Whether it is the folder of one `submit --sweep`, with links to its runs."""
    return any(RunFolder(path.parent).sweep_id == folder.resolve().name for path in folder.glob("*/*/resolved.json"))


def singles_out(name: str) -> bool:
    """Whether a name is that of runs or of a sweep, not of a folder that happens to hold some."""
    folder = Path(name)
    return not folder.is_dir() or (folder / "resolved.json").is_file() or is_sweep_folder(folder)


def _matches(name: str, logs: Path) -> list[RunFolder]:
    """The runs that a name fits, by the first way in which it fits any."""
    if (Path(name) / "resolved.json").is_file():
        return [RunFolder(Path(name).resolve())]
    runs = list_runs(logs)
    # A job id in full before a prefix: "2026" is a job, though every run id of that year begins with it.
    return (
        [run for run in runs if run.run_id == name]
        or [run for run in runs if name in job_ids(run)]
        or [run for run in runs if run.sweep_id == name or _is_element(run, name)]
        or [run for run in runs if run.run_id.startswith(name) or (run.sweep_id or "").startswith(name)]
    )


def _is_element(run: RunFolder, array: str) -> bool:
    """Whether one of the run's jobs was an element of that array: `4711_3` is one of `4711`."""
    return any(job_id.startswith(f"{array}_") for job_id in job_ids(run))


def _means_sweep(name: str, found: Sequence[RunFolder]) -> bool:
    return all((run.sweep_id or "").startswith(name) or _is_element(run, name) for run in found)


def _several(name: str, found: Sequence[RunFolder], logs: Path) -> NoSuchRun:
    """What is wrong with a name that fits none, or too many."""
    if found:
        some = ", ".join(run.run_id for run in found[:5]) + (", …" if len(found) > 5 else "")
        hint = "name one of the sweep's runs" if _means_sweep(name, found) else "give more of the id"
        return NoSuchRun(f"{name!r} fits {len(found)} runs under {logs}: {some}", hint)
    runs = list_runs(logs)
    folder = "" if Path(name).is_dir() else ", nor a folder of that name"
    last = f"the newest is {runs[-1].run_id}" if runs else "there are no runs there yet"
    return NoSuchRun(
        f"no run {name!r} under {logs}{folder}", f"{last}; hpc-gpt status lists them, HPC_GPT_LOGS names the folder"
    )


def _runs_of(name: str, logs: Path) -> list[RunFolder]:
    folder = Path(name)
    if not folder.is_dir():
        return named_runs(name, logs)
    found = list_runs(folder)
    if found or folder.resolve().is_relative_to(logs.resolve()):  # under logs there may well be none yet
        return found
    with contextlib.suppress(NoSuchRun):  # a folder that only happens to go by the run's name
        return named_runs(name, logs)
    raise NoSuchRun(f"no runs under {name}", "give a run folder, or the folder that holds them, as logs/")
