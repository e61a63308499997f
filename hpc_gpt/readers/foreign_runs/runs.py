"""From logs that were discovered to runs: read, put together, each under a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_gpt.readers.foreign_runs.discover import STDIN, Discovered
from hpc_gpt.readers.foreign_runs.grouping import group_logs
from hpc_gpt.readers.foreign_runs.log_names import is_general, telling_folders
from hpc_gpt.readers.foreign_runs.run import read_foreign
from hpc_gpt.readers.foreign_runs.run_parts import RunParts
from hpc_gpt.readers.foreign_runs.slurm_script import Script, read_script, script_beside
from hpc_gpt.readers.log_files.read_log import LogRead, read_log
from hpc_gpt.readers.part import Part
from hpc_gpt.readers.run_read import RunRead

MOST_ROWS = 1 << 19  # lines of steps that are held of all logs: some 50 MB, and as much again as curves
NOT_KNOWN = "holds no line that a reader knows"


def read_foreign_runs(found: Discovered, read: Callable[[Path], LogRead] = read_log) -> list[RunRead]:
    """The runs in the logs that were discovered. What turns out to be no log is counted in `found`."""
    logs: list[tuple[Path, list[Part]]] = []
    left_out: dict[str, dict[str, int]] = {}
    silent: list[Path] = []
    held = 0
    for path in found.logs:
        log = read(path)
        if log.refused is not None:
            found.skip(log.refused, path)
        elif not any(part.dialects for part in log.parts):
            found.skip(NOT_KNOWN, path)
            silent.append(path)
        else:
            logs.append((path, log.parts))
            held += _rows(log.parts)
            if held > MOST_ROWS:
                held = _bounded(logs)
            left_out[log.parts[0].file] = log.left_out
    runs = group_logs(logs, silent)
    scripts = [script for path in found.scripts if runs and (script := read_script(path)) is not None]
    names = _names(runs)
    return [
        read_foreign(run, name, _script(run, scripts), _of_files(run, left_out))
        for run, name in zip(runs, names, strict=True)
    ]


def _rows(parts: Sequence[Part]) -> int:
    return sum(len(steps) for part in parts for steps in part.steps.values())


def _bounded(logs: Sequence[tuple[Path, list[Part]]]) -> int:
    """The lines of steps of all logs after the longest stretches were halved until half of MOST_ROWS are left.

    Their stride says so, and with it a flag of the run.
    """
    parts = [part for _, found in logs for part in found]
    longest = max((len(steps) for part in parts for steps in part.steps.values()), default=0)
    while _rows(parts) > MOST_ROWS // 2 and longest > 2:
        longest //= 2
        for part in parts:
            for name, steps in part.steps.items():
                if len(steps) > longest:
                    part.steps[name] = steps.halved()
    return _rows(parts)


def _script(run: RunParts, scripts: Sequence[Script]) -> Script | None:
    for name in run.names:
        if (script := script_beside(name.path, name.stem, scripts)) is not None:
            return script
    return None


def _of_files(run: RunParts, left_out: dict[str, dict[str, int]]) -> dict[str, int]:
    """What was skipped of the run's files, in words."""
    counts: Counter[str] = Counter()
    for file in {part.file for part in run.parts}:
        counts.update(left_out.get(file, {}))
    return dict(counts)


# Folders and log's name, from short to long, of a log whose own name says nothing, and of the others.
_OF_GENERAL = ((1, False), (2, False), (1, True), (2, True), (3, False), (3, True), (5, True), (9, True))
_OF_NAMED = tuple((folders, True) for folders in (0, 1, 2, 3, 4, 5, 7, 9))


def _names(runs: Sequence[RunParts]) -> list[str]:
    """A name for each run: the log's, its folder's where the log's says nothing, more folders where two are alike."""
    names = [_name(run, 0) for run in runs]
    for length in range(1, len(_OF_NAMED)):
        twice = {name for name, count in Counter(names).items() if count > 1}
        if not twice:
            return names
        names = [_name(run, length) if name in twice else name for run, name in zip(runs, names, strict=True)]
    met: Counter[str] = Counter()
    for index, name in enumerate(names):
        met[name] += 1
        names[index] = f"{name} ({met[name]})" if met[name] > 1 else name
    return names


def _name(run: RunParts, length: int) -> str:
    """The second run of a file is `name#2`."""
    log = run.names[0]
    if str(log.path) == STDIN:
        name = "stdin"
    else:
        folders = telling_folders(log.path)
        count, with_stem = (_OF_GENERAL if is_general(log.stem) else _OF_NAMED)[length]
        taken = folders[-count:] if count else []
        name = "/".join([*taken, *([log.stem] if log.stem and (with_stem or not taken) else [])]) or log.path.name
    return name if run.number == 1 else f"{name}#{run.number}"
