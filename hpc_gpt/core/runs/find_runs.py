"""Finds runs: the runs in a folder, and the run, or the runs, that a name means."""

import contextlib
import errno
import glob
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.core.errors import NoSuchRun, RunFolderError, UserError
from hpc_gpt.core.files import from_here, logs_folder, whose, within_time
from hpc_gpt.core.format import some
from hpc_gpt.core.process import all_pids, start_time
from hpc_gpt.core.runs.run_folder import NEW_ID, RunFolder, job_ids
from hpc_gpt.core.settings.resolved import folder_name
from hpc_gpt.core.tables import close_matches


def list_runs(logs: Path) -> list[RunFolder]:
    """Every run under a logs folder, oldest first; the folder itself if it is a run.

    For the folder of one sweep or several, the runs that are linked there.
    """
    (top,) = within_time(_look, [logs])
    if top is None:
        raise RunFolderError(f"{logs} does not answer", "is its file system mounted? HPC_GPT_LOGS names another folder")
    if top.begun is not None:
        return [RunFolder(top.place)]
    if top.is_closed:
        raise RunFolderError(f"{logs}: {os.strerror(errno.EACCES)}", whose(logs))
    runs: dict[Path, float] = {}
    below = [logs / name for name in top.names]
    for depth in range(3):
        looked = within_time(_look, below)
        for path, shown in zip(below, looked, strict=True):
            if shown is None or (shown.is_closed and path.name != "lost+found"):  # it may be a run
                runs[path] = 0.0
            elif shown.begun is not None:
                runs[shown.place] = shown.begun
        if depth == 1 and runs:
            break
        below = [path / name for path, shown in zip(below, looked, strict=True) if shown for name in shown.names]
    return [RunFolder(path) for path in sorted(runs, key=lambda path: (runs[path], str(path)))]


# The module that supervises a run on this machine, by its command line: `python -m MODULE RUN [ATTEMPT]`.
_SUPERVISOR = b"hpc_gpt.launcher.local.queue"


def removed_runs(logs: Path | None = None) -> dict[Path, tuple[int, str]]:
    """{folder: (pid, start time)} of the runs that a process of this machine supervises though their folder was
    removed or moved. `logs`: only the runs below it, unless it is None."""
    removed: dict[Path, tuple[int, str]] = {}
    for pid in all_pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if arguments[1:2] != [b"-m"] or arguments[2] != _SUPERVISOR:
                continue
            path = Path(os.fsdecode(arguments[3]))
            below = logs is None or path.is_relative_to(logs) or path.is_relative_to(logs.resolve())
            if below and not os.path.lexists(path / "resolved.json") and (started := start_time(pid)):
                removed[path] = pid, started
    return removed


def name_here(run: RunFolder) -> str:
    """The shortest name by which our commands find the run: its id if it is in the logs folder, else its path."""
    logs = logs_folder()
    return run.run_id if run.path.parent.parent in (logs, logs.resolve()) else from_here(run.path)


def no_runs(logs: Path) -> str:
    """The message that the logs folder has no runs, and that it does not exist if HPC_GPT_LOGS names it wrongly."""
    gone = os.environ.get("HPC_GPT_LOGS") and not logs.exists()
    return f"no runs under {logs}" + (", the folder of HPC_GPT_LOGS, which does not exist" if gone else "")


class _Folder(NamedTuple):
    """A folder that was looked at: its real `place`, when it was made as a run (None if it is not a run), and the names
    in it. `is_closed`: this user may not look."""

    place: Path
    begun: float | None
    names: list[str]
    is_closed: bool = False


def _look(path: Path) -> _Folder:
    closed = False
    try:
        begun = (path / "resolved.json").stat().st_mtime
    except OSError as fault:
        begun, closed = None, isinstance(fault, PermissionError)
    try:
        names = os.listdir(path) if begun is None else []
    except OSError as fault:
        names, closed = [], closed or isinstance(fault, PermissionError)
    return _Folder(path.resolve() if begun is not None else path, begun, names, closed)


def oldest_first(runs: Iterable[RunFolder]) -> list[RunFolder]:
    """The runs in the order in which they were made."""
    return sorted(runs, key=lambda run: _begun(run.path))


def _begun(path: Path) -> tuple[float, str]:
    """When a run was made, as a sort key. (The name of a run that plain sbatch made has no time.)"""
    try:
        return (path / "resolved.json").stat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)


@dataclass(frozen=True)
class Named:
    """The meaning of a name: a run, or several `runs`, oldest first. `what`: what they are, such as "sweep
    20261125-1042"; empty for one run."""

    runs: list[RunFolder]
    what: str = ""


def find_named(name: str, logs: Path) -> Named:
    """Finds what a name means, for every verb: a folder of runs; a run or a job; a sweep or an array by its id; all
    runs of the experiment or the sweep of that name, as `status` or its folder shows it; the beginning or the end of an
    id.

    Raises NoSuchRun, with the candidates, if it means nothing or several of these.
    """
    if not name:
        raise NoSuchRun("the name of a run is empty", "is a variable of your shell not set?")
    folder = Path(name)
    if os.path.isdir(name) and (runs := list_runs(folder)):
        is_run = (folder / "resolved.json").is_file()
        return Named(runs) if is_run else Named(runs, name)
    meanings = _meant(name, logs)
    if len(meanings) == 1:
        return meanings[0]
    if not meanings and (removed := _removed(name, logs)):
        return Named(removed)
    if os.path.isdir(name) and not meanings:
        if folder.resolve().is_relative_to(logs.resolve()):  # the logs folder may still be empty
            return Named([], name)
        raise NoSuchRun(f"no runs under {name}", "give a run folder, or the folder that holds them, as logs/")
    raise _several(name, meanings, logs)


def find_run(name: str, logs: Path) -> RunFolder:
    """The one run that a name means, as in find_named. Raises NoSuchRun, also if the name means several."""
    named = find_named(name, logs)
    if len(named.runs) == 1:
        return named.runs[0]
    raise _several(name, [named], logs)


def find_runs(names: Sequence[str], logs: Path) -> list[RunFolder]:
    """All runs that the names mean, each once; without a name, all in the logs folder. Raises as find_named."""
    runs = [run for name in names for run in find_named(name, logs).runs] if names else list_runs(logs)
    return list({run.path: run for run in runs}.values())


def is_run_name(name: str, logs: Path) -> bool:
    """Whether a name is for find_named: not a log, a folder elsewhere, a row of a sweep, or standard input."""
    elsewhere = os.path.lexists(name) and not Path(os.path.realpath(name)).is_relative_to(logs.resolve())
    return not (elsewhere or "#" in name or name == "-" or os.path.isfile(name))


def is_sweep_folder(folder: Path) -> bool:
    """Whether a folder belongs to one `submit --sweep`, with links to its runs."""
    sweep_id = os.path.basename(os.path.realpath(folder))  # realpath, unlike resolve, takes a link that leads to itself
    if not NEW_ID.fullmatch(sweep_id):
        return False
    # Unlike Path.glob, this glob continues if a folder vanishes meanwhile, as folders below /proc do.
    paths = glob.iglob("*/*/resolved.json", root_dir=folder)
    return any(RunFolder((folder / path).parent).sweep_id == sweep_id for path in paths)


def singles_out(name: str) -> bool:
    """Whether a name means a run or a sweep, not a folder with any runs."""
    folder = Path(name)
    return not os.path.isdir(name) or (folder / "resolved.json").is_file() or is_sweep_folder(folder)


def _meant(name: str, logs: Path) -> list[Named]:
    """Everything that a name may mean, by the first way of matching that finds something."""
    runs = list_runs(logs)
    if matched := [Named([run]) for run in runs if run.run_id == name]:
        return matched
    sweeps: dict[str, list[RunFolder]] = {}
    notes = [note or {} for note in within_time(RunFolder.sweep_note, runs)]
    for run, note in zip(runs, notes, strict=True):
        if note.get("id"):
            sweeps.setdefault(note["id"], []).append(run)

    def with_id(fits: Callable[[str], bool]) -> list[Named]:
        named = [Named(of_sweep, f"sweep {sweep_id}") for sweep_id, of_sweep in sweeps.items() if fits(sweep_id)]
        of_these = {run.path for meaning in named for run in meaning.runs}
        return named + [Named([run]) for run in runs if fits(run.run_id) and run.path not in of_these]

    # A whole id counts before a prefix: "2026" is a job, though every run id of that year begins with it.
    if matched := with_id(lambda whole_id: whole_id == name):
        return matched
    jobs = [ids or [] for ids in within_time(job_ids, runs)]
    of_job = [(run, note) for run, note, ids in zip(runs, notes, jobs, strict=True) if name in ids]
    if len(of_job) > 1 and len({note.get("id") for _, note in of_job}) == 1 and of_job[0][1]:
        return [Named([run for run, _ in of_job], f"job {name}")]  # one job that holds several runs of a sweep
    if of_job:
        return [Named([run]) for run, _ in of_job]
    arrays: dict[str, list[RunFolder]] = {}
    for run, note, ids in zip(runs, notes, jobs, strict=True):
        if any(job_id.startswith(f"{name}_") for job_id in ids):  # `4711_3` is an element of `4711`
            arrays.setdefault(note.get("id") or run.run_id, []).append(run)
    if arrays:
        return [Named(of_array, f"array {name}") for of_array in arrays.values()]
    slug = folder_name(name)
    of_name = [
        run
        for run, note in zip(runs, notes, strict=True)
        if slug == run.path.parent.name or ("name" in note and slug == folder_name(str(note["name"])))
    ]
    if slug != name:  # the names of other experiments may lead to the same folder
        exact = [run for run in of_name if _is_called(run, name)]
        of_name = exact or of_name
    if of_name:
        return [Named(oldest_first(of_name), name)]
    parts = [with_id(lambda whole_id: whole_id.startswith(name)), with_id(lambda whole_id: whole_id.endswith(name))]
    return next((matched for matched in parts if len(matched) == 1), next(filter(None, parts), []))


def _removed(name: str, logs: Path) -> list[RunFolder]:
    """The runs whose folder was removed and whose id, folder or process a name is; `cancel` ends them."""
    runs, place = removed_runs(logs), Path(os.path.abspath(name))
    return [RunFolder(path) for path, (pid, _) in runs.items() if name in (path.name, str(pid)) or path == place]


def _is_called(run: RunFolder, name: str) -> bool:
    """Whether a run's experiment or sweep has exactly this name."""
    with contextlib.suppress(UserError):
        return name in (run.resolved().name, run.sweep_note().get("name"))
    return False


def _file_alike(path: Path) -> str:
    """The hint for the path of a log (report, why, compare) that does not exist: files with a similar name."""
    try:
        return close_matches(str(path), [str(path.parent / entry) for entry in os.listdir(path.parent) if "." in entry])
    except OSError:
        return ""


def _logs_beside(path: Path) -> str:
    """The hint for the path of a log that does not exist: the logs in its folder, the newest first."""
    place = "here" if path.parent == Path() else f"in {path.parent}"
    try:
        files = [(entry.stat().st_mtime, entry.name) for entry in os.scandir(path.parent) if entry.is_file()]
    except OSError:
        return f"there is no folder {path.parent}"
    logs = [name for _, name in sorted(files, reverse=True) if Path(name).suffix in _OF_A_LOG]
    return f"logs {place}: {some(logs, 5)}" if logs else f"no log is {place}; hpc-gpt status lists runs"


def _several(name: str, meant: Sequence[Named], logs: Path) -> NoSuchRun:
    """The error for a name that means no run, or several."""
    if matched := oldest_first(run for meaning in meant for run in meaning.runs):
        ids = [f"{run.run_id} on cluster {on}" if (on := run.slurm_cluster()) else run.run_id for run in matched]
        named = some(ids, 5)
        newest = f"give more of the id, or its end: {matched[-1].run_id[-4:]} is the newest"
        hint = f"name one of its runs: {matched[-1].run_id} is the newest" if len(meant) == 1 else newest
        if all(name in job_ids(run) for run in matched):
            hint = f"each has a job of that id: name the run, for example {matched[-1].run_id}"
        return NoSuchRun(f"{name!r} matches {len(matched)} runs under {logs}: {named}", hint)
    if as_log := _meant_as_log(name):
        return as_log
    if Path(name).suffix in _OF_A_LOG:
        return NoSuchRun(f"no such file: {name}", _file_alike(Path(name)) or _logs_beside(Path(name)))
    runs = list_runs(logs)
    folder = "" if Path(name).is_dir() else ", nor a folder of that name"
    last = f"the newest is {runs[-1].run_id}" if runs else "there are no runs there yet"
    alike = _file_alike(Path(name)) if Path(name).suffix else ""
    return NoSuchRun(
        f"no run {name!r} under {logs}{folder}",
        alike or f"{last}; hpc-gpt status lists them, HPC_GPT_LOGS names the folder",
    )


_OF_A_LOG = (".log", ".out", ".err", ".txt")


def _meant_as_log(name: str) -> NoSuchRun | None:
    """The error for another program's log, a run in it, or the name that `report` gives that run; else None."""
    path, mark, number = name.rpartition("#")
    place = Path(path) if mark and number.isdecimal() else Path(name)
    if os.path.isfile(place):
        message = f"{name} is a run in a log" if place != Path(name) else f"{name} is a file, not a run of hpc-gpt"
        return NoSuchRun(message, f"hpc-gpt why {shlex.quote(name)}, report and compare read other programs' logs")
    if mark and number.isdecimal() and place.name:
        files = sorted(place.parent.glob(f"{glob.escape(place.name)}.*"))
        like = [file for file in files if file.suffix in _OF_A_LOG]
        if like:
            return NoSuchRun(f"no run {name!r}", f"did you mean {shlex.quote(f'{like[0]}#{number}')}?")
    return None
