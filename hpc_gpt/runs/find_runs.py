"""Finding runs: which runs are in a folder, and which run, or runs of a sweep, a name means."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.errors import NoSuchRun, RunFolderError
from hpc_gpt.files import within_time
from hpc_gpt.runs.run_folder import RunFolder, job_ids
from hpc_gpt.words import some


def list_runs(logs: Path) -> list[RunFolder]:
    """Every run under a logs folder, oldest first; the folder itself if it is a run.

    For the folder of a sweep, or of several, the runs that are linked there.
    """
    (top,) = within_time(_look, [logs])
    if top is None:
        raise RunFolderError(f"{logs} does not answer", "is its file system mounted? HPC_GPT_LOGS names another folder")
    if top.begun is not None:
        return [RunFolder(top.place)]
    runs: dict[Path, float] = {}
    below = [logs / name for name in top.names]
    for depth in range(3):
        looked = within_time(_look, below)
        for path, found in zip(below, looked, strict=True):
            if found is None:  # it may be one
                runs[path] = 0.0
            elif found.begun is not None:
                runs[found.place] = found.begun
        if depth == 1 and runs:
            break
        below = [path / name for path, found in zip(below, looked, strict=True) if found for name in found.names]
    return [RunFolder(path) for path in sorted(runs, key=lambda path: (runs[path], str(path)))]


class _Folder(NamedTuple):
    """What a folder is: its real `place`, when it was made as a run, None if it is none, and the names in it."""

    place: Path
    begun: float | None
    names: list[str]


def _look(path: Path) -> _Folder:
    try:
        begun = (path / "resolved.json").stat().st_mtime
    except OSError:
        begun = None
    try:
        names = os.listdir(path) if begun is None else []
    except OSError:
        names = []
    return _Folder(path.resolve() if begun is not None else path, begun, names)


def oldest_first(runs: Iterable[RunFolder]) -> list[RunFolder]:
    """The runs in the order in which they were made."""
    return sorted(runs, key=lambda run: _begun(run.path))


def _begun(path: Path) -> tuple[float, str]:
    """When a run was made, as a sort key. Its name has no time if plain sbatch made it."""
    try:
        return (path / "resolved.json").stat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)


def find_run(name: str, logs: Path) -> RunFolder:
    """The run that RUN means: a folder, a run id, a job id, the begin or the end of an id, or an experiment, if only
    one run has it.

    Raises NoSuchRun, with the candidates if a name matches several, as the id of an array or a sweep does.
    """
    found = _matches(name, logs)
    if len(found) == 1:
        return found[0]
    raise _several(name, found, logs)


def named_runs(name: str, logs: Path) -> list[RunFolder]:
    """The run that a name means, as in find_run, or all runs of a sweep, by its id, its folder or its array's job id.

    Raises NoSuchRun if there is none, or if the name matches runs of no common sweep.
    """
    if name and is_sweep_folder(Path(name)):
        return list_runs(Path(name))
    found = _matches(name, logs)
    sweeps = {run.sweep_id for run in found}
    if len(found) == 1 or (len(sweeps) == 1 and None not in sweeps and _means_sweep(name, found)):
        return found
    raise _several(name, found, logs)


def find_runs(names: Sequence[str], logs: Path) -> list[RunFolder]:
    """The runs that the names mean, each once. A name is a folder of runs, or is as in named_runs.

    No name means the logs folder. Raises NoSuchRun as named_runs does, and for a folder elsewhere without runs.
    """
    found = [run for name in names for run in _runs_of(name, logs)] if names else list_runs(logs)
    return list({run.path: run for run in found}.values())


def is_sweep_folder(folder: Path) -> bool:
    """Whether a folder is that of one `submit --sweep`, with links to its runs."""
    return any(RunFolder(path.parent).sweep_id == folder.resolve().name for path in folder.glob("*/*/resolved.json"))


def singles_out(name: str) -> bool:
    """Whether a name means a run or a sweep, not a folder with any runs."""
    folder = Path(name)
    return not folder.is_dir() or (folder / "resolved.json").is_file() or is_sweep_folder(folder)


def _matches(name: str, logs: Path) -> list[RunFolder]:
    """The runs that a name matches, by the first way of matching that finds any. NoSuchRun for an empty name: every id
    begins with it."""
    if not name:
        raise NoSuchRun("the name of a run is empty", "is a variable of your shell not set?")
    if (Path(name) / "resolved.json").is_file():
        return [RunFolder(Path(name).resolve())]
    runs = list_runs(logs)
    # A whole job id comes before a prefix: "2026" is a job, though every run id of that year begins with it.
    whole = (
        [run for run in runs if run.run_id == name]
        or [run for run, ids in zip(runs, within_time(job_ids, runs), strict=True) if name in (ids or ())]
        or [run for run in runs if run.sweep_id == name or _is_element(run, name)]
    )
    parts = (
        [run for run in runs if run.run_id.startswith(name) or (run.sweep_id or "").startswith(name)],
        [run for run in runs if run.run_id.endswith(name)],
        [run for run in runs if run.path.parent.name == name],
    )
    return whole or next((found for found in parts if len(found) == 1), next(filter(None, parts), []))


def _is_element(run: RunFolder, array: str) -> bool:
    """Whether one of the run's jobs was an element of that array: `4711_3` is one of `4711`."""
    return any(job_id.startswith(f"{array}_") for job_id in job_ids(run))


def _means_sweep(name: str, found: Sequence[RunFolder]) -> bool:
    return all((run.sweep_id or "").startswith(name) or _is_element(run, name) for run in found)


def _several(name: str, found: Sequence[RunFolder], logs: Path) -> NoSuchRun:
    """The error for a name that matches no run, or several."""
    if found:
        ids = [f"{run.run_id} on cluster {on}" if (on := run.slurm_cluster()) else run.run_id for run in found]
        named = some(ids, 5)
        newest = f"give more of the id, or its end: {found[-1].run_id[-4:]} is the newest"
        hint = "name one of the sweep's runs" if _means_sweep(name, found) else newest
        if all(name in job_ids(run) for run in found):
            hint = f"each has a job of that id: name the run, for example {found[-1].run_id}"
        return NoSuchRun(f"{name!r} matches {len(found)} runs under {logs}: {named}", hint)
    runs = list_runs(logs)
    folder = "" if Path(name).is_dir() else ", nor a folder of that name"
    last = f"the newest is {runs[-1].run_id}" if runs else "there are no runs there yet"
    return NoSuchRun(
        f"no run {name!r} under {logs}{folder}", f"{last}; hpc-gpt status lists them, HPC_GPT_LOGS names the folder"
    )


def _runs_of(name: str, logs: Path) -> list[RunFolder]:
    folder = Path(name)
    if not name or not folder.is_dir():
        return named_runs(name, logs)
    found = list_runs(folder)
    if found or folder.resolve().is_relative_to(logs.resolve()):  # the logs folder may still be empty
        return found
    with contextlib.suppress(NoSuchRun):  # a folder may have the same name as a run
        return named_runs(name, logs)
    raise NoSuchRun(f"no runs under {name}", "give a run folder, or the folder that holds them, as logs/")
