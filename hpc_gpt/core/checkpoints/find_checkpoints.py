"""The checkpoints of a run: which are sound, and which is the newest complete one.

Our trainers write `checkpoints/step-<step>/` with a complete.json that names every file. For a user's own program
`[command] checkpoints` says how its checkpoints are named, and `complete` which file a complete one has. Needs no
torch: the trainer checks before it loads a checkpoint, the launcher before it submits a run that is to load one.
"""

import contextlib
import errno
import glob
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.checkpoints.whole_checkpoints import fault_of_checkpoint, is_being_written
from hpc_gpt.core.errors import UserError, tells_of_contents
from hpc_gpt.core.files import read_text
from hpc_gpt.core.format import counted
from hpc_gpt.core.runs.run_folder import RunFolder, work_folder
from hpc_gpt.core.runs.stored import read_stored, stored_lines_from_end
from hpc_gpt.core.settings.experiment import Command
from hpc_gpt.core.settings.program_text import fill

COMPLETE = "complete.json"
SCHEMA = 1
# Prefixes of the name of a checkpoint that is being written, or was renamed.
WRITING, DAMAGED, DELETING = ".writing-", ".damaged-", ".deleting-"
_PIECE_BYTES = 1 << 22
_NAME = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True)
class CheckpointFault:
    """A fault of a checkpoint. `damaged`: its bytes are wrong; else this host only could not read them."""

    text: str = ""
    damaged: bool = True


def checkpoint_folder_name(step: int) -> str:
    """The name of a complete checkpoint."""
    return f"step-{step:08d}"


def step_in(name: str) -> int:
    """The step in the name of a complete checkpoint; -1 for any other name. Compare names by it, as they are longer
    from step 100,000,000 on."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else -1


def list_complete(folder: Path) -> list[Path]:
    """The folders with the name of a complete checkpoint, newest first."""
    checkpoints = [
        (step, path) for path in folder.glob("step-*") if (step := step_in(path.name)) >= 0 and path.is_dir()
    ]
    return [path for _, path in sorted(checkpoints, reverse=True)]


def newest_step(run: RunFolder) -> int | None:
    """The step of the newest checkpoint that is marked complete; None without one. The trainer checks its files."""
    folder, names = run.checkpoints, list[str]()
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith("step-")]
    complete = (path for name in names if (path := folder / name / COMPLETE).exists())
    return max((read_stored(path).get("step") or 0 for path in complete), default=None)


def set_aside(path: Path, prefix: str = DAMAGED) -> Path:
    """Renames a checkpoint that is damaged or will be removed, and returns its new path."""
    taken = 1
    while (place := path.with_name(f"{prefix}{path.name}-{taken}")).exists():
        taken += 1
    path.rename(place)
    return place


def read_marker(path: Path) -> dict[str, Any]:
    """A checkpoint's complete.json; empty if it is missing, damaged or has another schema."""
    marker = read_stored(path / COMPLETE)
    return marker if marker.get("files") is not None and marker.get("schema") == SCHEMA else {}


def marker_fault(path: Path) -> CheckpointFault:
    """The fault of a checkpoint whose `read_marker` is empty."""
    try:
        with (path / COMPLETE).open("rb") as file:
            file.read(1)
    except OSError as fault:
        if not tells_of_contents(fault):
            return CheckpointFault(f"{COMPLETE}: {fault.strerror}", damaged=False)
    return CheckpointFault(f"{COMPLETE} is missing or damaged")


def check_file(path: Path, name: str, expected: object, read: bool = True) -> CheckpointFault:
    """Reads one file of the checkpoint `path` and compares it with its entry in complete.json. Without `read` it
    compares only the size."""
    sums = expected if isinstance(expected, dict) else {}
    try:
        if not _is_inside(path, name) or not all(isinstance(sums.get(key), int) for key in ("bytes", "crc32")):
            return CheckpointFault(f"{COMPLETE} is damaged: it names {name!r}")
        size, crc = (path / name).stat().st_size, sums["crc32"]
        if read and size == sums["bytes"]:
            size, crc = read_through(path / name)
    except OSError as fault:
        return CheckpointFault(f"{name}: {fault.strerror}", tells_of_contents(fault))
    if size != sums["bytes"]:
        return CheckpointFault(f"{name} has {size} bytes, not {sums['bytes']}")
    if crc != sums["crc32"]:
        return CheckpointFault(f"{name} has CRC-32 {crc:08x}, not {sums['crc32']:08x}")
    return CheckpointFault()


def faults_of(path: Path, most_bytes: float = math.inf) -> Iterator[tuple[str, CheckpointFault]]:
    """Yields (file, its fault) of a checkpoint; nothing if it is sound.

    If the checkpoint has more than `most_bytes`, only the sizes are checked.
    """
    files = read_marker(path).get("files", {})
    if not files:
        yield COMPLETE, marker_fault(path)
    read = stored_bytes(path) <= most_bytes
    for name, sums in files.items():
        if (fault := check_file(path, name, sums, read)).text:
            yield name, fault


def stored_bytes(path: Path) -> int:
    """The bytes of all files of a checkpoint, by its complete.json."""
    sizes = (sums.get("bytes") for sums in read_marker(path).get("files", {}).values() if isinstance(sums, dict))
    return sum(size for size in sizes if isinstance(size, int))


def newest_sound(
    folder: Path, most_bytes: float = math.inf, step: int | None = None
) -> tuple[Path | None, dict[str, CheckpointFault]]:
    """Finds the newest sound checkpoint, as the trainer does. Returns (it, {name of a newer, unsound one: its first
    fault}). `step`: only the checkpoint of that step counts, unless it is None."""
    passed: dict[str, CheckpointFault] = {}
    for path in list_complete(folder):
        if step is not None and path.name != checkpoint_folder_name(step):
            continue
        fault = next((fault for _, fault in faults_of(path, most_bytes)), None)
        if fault is None:
            return path, passed
        passed[path.name] = fault
    return None, passed


def _is_inside(folder: Path, name: str) -> bool:
    """Whether the name is a regular file in the folder, or does not exist. (Reading a pipe would block.)"""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        return False
    return (folder / path).is_file() or not (folder / path).exists()


def has_all_bytes(path: Path) -> bool:
    """Whether every file in complete.json exists and has its size; the files are not read."""
    files = read_marker(path).get("files", {})
    try:
        return bool(files) and all((path / name).stat().st_size == sums["bytes"] for name, sums in files.items())
    except (OSError, TypeError, KeyError):
        return False


def read_through(path: Path) -> tuple[int, int]:
    """Returns (bytes, CRC-32) of a file, after an fsync."""
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
        try:
            os.fsync(file.fileno())
        except OSError as fault:
            # A read-only file system refuses fsync.
            if fault.errno not in (errno.EROFS, errno.EINVAL):
                raise
    return size, crc


# The file in which Megatron-LM writes the step of its newest checkpoint.
MEGATRON = "megatron/latest_checkpointed_iteration.txt"
# A whole number: not a part of a decimal one, such as a loss, nor a version, such as -v1.
_WHOLE = r"(?<!\d)(?<!\d\.)(?<![-_.]v)(?P<number>\d{1,15})(?!\.?\d)"
_THOUSANDS = r"(?:(?P<unit>[km])(?![a-z\d]))?"
_STEP = rf"(?:steps?|iter(?:ation)?s?)[-_=:. ]{{0,3}}{_WHOLE}{_THOUSANDS}"
# The forms of a step in a name, the surest first: DeepSpeed's, a separate word, a part of a word such as `val_step`,
# and `300_steps`.
_STEPS = tuple(
    re.compile(form, re.ASCII | re.IGNORECASE)
    for form in (
        rf"(?<![a-z])global[-_ ]?{_STEP}",
        rf"(?<![a-z])(?<![a-z]_){_STEP}",
        rf"(?<![a-z])(?:[a-z]+_|train|time){_STEP}",
        rf"{_WHOLE}{_THOUSANDS}[-_ ]?(?:steps|iters|iterations)(?![a-z])",
    )
)
_NUMBERS = re.compile(_WHOLE, re.ASCII)
_NUMBERS_ALONE = re.compile(rf"(?<![a-z]){_WHOLE}(?![a-z])", re.ASCII | re.IGNORECASE)
_OF_CHECKPOINT = re.compile(r"(?:checkpoint|ch?e?c?kpt)[-_=:. ]{0,3}$", re.IGNORECASE)  # what is before the number
_NO_STEP = re.compile(r"(?<![a-z])(?:last|latest|best|final)(?![a-z])", re.IGNORECASE)
_UNITS = {None: 1, "k": 1000, "m": 10**6}
# (number in the name, -1 without one; time in epoch seconds; path) of a checkpoint.
_Numbered = tuple[int, float, Path]
# One part of a pattern of names: a class of letters, or one letter.
_GLOB_PART = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)


def command_of(run: RunFolder) -> Command | None:
    """The program that a run starts; None if one of our trainers runs it, or its settings cannot be read."""
    with contextlib.suppress(UserError):
        return run.resolved().command
    return None


def checkpoints_of(run: RunFolder) -> list[tuple[int, Path]]:
    """Returns (step, path) of the complete checkpoints of a run, by step; for Megatron-LM only the newest."""
    if (command := command_of(run)) is not None:
        return [(_step_of(run, number, made), path) for number, made, path in _whole(run, command)]
    with contextlib.suppress(OSError, ValueError):
        step = int(read_text(run.checkpoints / MEGATRON))
        return [(step, (run.checkpoints / MEGATRON).with_name(f"iter_{step:07d}"))]
    return [(step_in(path.name), path) for path in reversed(list_complete(run.checkpoints))]


def own_checkpoints(run: RunFolder, command: Command) -> list[Path]:
    """The checkpoints of a program, whole or not, by `numbers_in` their names, then by time; first those without a
    number. If other runs use the folder too, only checkpoints that are later than the run are included."""
    return [path for _, _, path in _numbered(run, command)]


def unwhole_note(run: RunFolder) -> str:
    """A line for the user if a program has checkpoints, and none is whole; else empty."""
    command = command_of(run)
    if command is None or not (numbered := _numbered(run, command)) or _newest_whole(run, command, numbered):
        return ""
    fault = _fault_of(numbered, -1, run, command)
    return f"none of {counted(len(numbered), 'checkpoint')} is whole, so none is resumed: {numbered[-1][2]} {fault}"


def checkpoint_note(run: RunFolder) -> str:
    """A line for the user: that of `unwhole_note`, or that an older checkpoint in the folder, perhaps another run's,
    has a higher number than the newest. Empty if neither holds."""
    if (command := command_of(run)) is None:
        return ""
    if note := unwhole_note(run):
        return note
    own = _numbered(run, command)
    latest = _newest_whole(run, command, own, by_time=True)
    highest = _newest_whole(run, command, _numbered(run, command, of_any=True))
    if latest is None or highest is None or highest[0] == latest[0]:
        return ""
    counts = " and counts as the newest checkpoint" if highest == _newest_whole(run, command, own) else ""
    return (
        f"{highest[2]} has the highest number{counts}, but {latest[2]} was written later: move away the one that "
        "belongs to another training"
    )


def begun_note(run: RunFolder) -> str:
    """A line for the user if the last attempt of a program began at a checkpoint before the newest that it had; else
    empty."""
    for attempt in run.attempts()[-1:] if command_of(run) is not None else []:
        newest, begun = attempt.trainer().get("resumed_step"), attempt.resumed_step()
        if newest and begun and begun < newest:
            return f"it began at step {begun + 1}, and its newest checkpoint was of {newest}: is {newest} whole?"
    return ""


def _numbered(run: RunFolder, command: Command, until: float = math.inf, of_any: bool = False) -> list[_Numbered]:
    """Returns (number in the name, time, path) of `own_checkpoints`; with `of_any` those of all runs in the folder.
    `until`: only those that were made by then, in epoch seconds."""
    if command.checkpoints is None:
        return []
    pattern, of_run = _pattern(run, command), command.checkpoints.startswith("{run}/")
    # A copy of the program's folder also belongs to the run alone.
    since = 0.0 if of_any or of_run or (command.snapshot and not os.path.isabs(command.checkpoints)) else _made_at(run)
    found = []
    for name in glob.iglob(pattern, recursive=True):
        path = Path(name)
        try:
            made = path.stat().st_mtime
        except OSError:  # it was removed, or is a dangling link
            continue
        if since <= made <= until and not is_being_written(path):
            found.append((made, path))
    numbers = numbers_in([path for _, path in found], pattern)
    return sorted((number, made, path) for number, (made, path) in zip(numbers, found, strict=True))


def _whole(run: RunFolder, command: Command) -> list[_Numbered]:
    """The whole checkpoints of `_numbered`."""
    numbered = _numbered(run, command)
    return [each for index, each in enumerate(numbered) if _fault_of(numbered, index, run, command) is None]


def _newest_whole(
    run: RunFolder, command: Command, numbered: Sequence[_Numbered], by_time: bool = False
) -> _Numbered | None:
    """The last one that is whole; None without one. `by_time`: of those with a number, the one that was written last.
    The others are not looked at, as each look reads its files."""
    order: Sequence[int] = range(len(numbered))
    if by_time:
        order = sorted((index for index in order if numbered[index][0] >= 0), key=lambda index: numbered[index][1])
    damaged = {attempt.verdict().get("damaged_checkpoint") for attempt in run.attempts()} if numbered else set()
    for index in reversed(order):
        if str(numbered[index][2]) not in damaged and _fault_of(numbered, index, run, command) is None:
            return numbered[index]
    return None


def unwhole_checkpoints(run: RunFolder, command: Command) -> list[tuple[Path, str]]:
    """Returns (path, the reason why it is not whole) of the checkpoints after the newest whole one."""
    numbered, found = _numbered(run, command, of_any=True), list[tuple[Path, str]]()
    for index in range(len(numbered) - 1, -1, -1):
        if (fault := _fault_of(numbered, index, run, command)) is None:
            break
        found.append((numbered[index][2], fault))
    return found


def _fault_of(numbered: Sequence[_Numbered], index: int, run: RunFolder, command: Command) -> str | None:
    """The reason why one of these checkpoints is not whole, by `command.complete` or by `whole_checkpoints`; None if it
    is whole."""
    index %= len(numbered)
    path = numbered[index][2]
    if command.complete is None:
        return fault_of_checkpoint(path, numbered[index - 1][2] if index else None)
    name = command.complete.removeprefix("!")
    is_there = (path / fill(name, {"checkpoint": str(path), "run": str(run.path)})).exists()
    if is_there != command.complete.startswith("!"):
        return None
    return f"has {name if is_there else f'no {name}'} (command.complete)"


def _pattern(run: RunFolder, command: Command) -> str:
    """The absolute pattern of a program's checkpoints; for an element of an array with its index in place of %a."""
    assert command.checkpoints is not None
    text = command.checkpoints
    if "%a" in text and (element := array_element(run, command)) is not None:
        text = text.replace("%a", element)
    is_whole = text.startswith("{run}/") or os.path.isabs(text)
    base = "" if is_whole else f"{glob.escape(str(work_folder(run, command)))}/"
    return base + fill(text, {"run": glob.escape(str(run.path))})


def array_element(run: RunFolder, command: Command) -> str | None:
    """The index of a run that is an element of a script's array; None for other runs."""
    row = run.resolved().row if command.script is not None else None
    return row if row is not None and row.isdecimal() else None


def newest_checkpoint(run: RunFolder, command: Command, until: float = math.inf) -> tuple[Path | None, int | None]:
    """Returns (the last whole one of `own_checkpoints` that was made by `until` in epoch seconds, its step). The step
    is the number in its name, else the last step that was logged before it. Without a checkpoint the step is 0, or
    None if only the program knows its checkpoints."""
    newest = _newest_whole(run, command, _numbered(run, command, until))
    if newest is None:
        return None, None if command.checkpoints is None else 0
    number, made, path = newest
    return path, _step_of(run, number, made)


def checkpoint_for_start(run: RunFolder, command: Command) -> tuple[str, int] | None:
    """Returns (path, step) of the checkpoint that a start of a program gets in HPC_GPT_RESUME_FROM: the newest whole
    one, whoever wrote it. The path is relative to the program's folder if the pattern is; empty without a checkpoint.
    None if the run's checkpoints are not known: there is no pattern, or one for all elements of an array."""
    if command.checkpoints is None or ("%a" not in command.checkpoints and array_element(run, command) is not None):
        return None
    newest = _newest_whole(run, command, _numbered(run, command, of_any=True))
    if newest is None:
        return "", 0
    number, made, path = newest
    is_relative = not (os.path.isabs(command.checkpoints) or command.checkpoints.startswith("{run}/"))
    name = os.path.relpath(path, work_folder(run, command)) if is_relative else str(path)
    return name, _step_of(run, number, made)


def _step_of(run: RunFolder, number: int, made: float) -> int:
    """The step of a checkpoint with this number in its name, of this time, as in `newest_checkpoint`."""
    if number >= 0:
        return number
    # The last line before it counts, not the largest step: a second stage may count from the start again.
    for attempt in reversed(run.attempts()):
        for line in stored_lines_from_end(attempt.metrics):
            if float(line.get("time") or 0.0) <= made and (step := _last_step(line)):
                return step
    return 0


def _last_step(line: Mapping[str, object]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def numbers_in(paths: Sequence[Path], pattern: str) -> list[int]:
    """The step in the name of each checkpoint of a program, -1 if the name has none: the number after step, iter or
    global_step, else the only whole number, if it follows `checkpoint` or several names differ in it. A version (-v1)
    is no step, nor is a number beside last, best or final. Only the parts of a path that the pattern leaves open count,
    and of several the last one with a number.

    >>> numbers_in([Path("epoch=1-step=300-loss=2.07.ckpt"), Path("10k_steps.pt"), Path("last-v1.ckpt")], "*")
    [300, 10000, -1]
    >>> [numbers_in([Path(name) for name in names], "*") for names in (["a-7"], ["a-7", "a-8"], ["checkpoint-7"])]
    [[-1], [7, 8], [7]]
    """
    numbers = [_number_in(path, pattern) for path in paths]
    differs = len({number for number, says_so in numbers if number >= 0 and not says_so}) > 1
    return [number if says_so or differs else -1 for number, says_so in numbers]


def _number_in(path: Path, pattern: str) -> tuple[int, bool]:
    """Returns (the number in a name that may be its step, or -1; whether the name says that it is the step)."""
    parts = list(_open_parts(path, pattern))
    for name, begin, end in parts:
        for form in _STEPS:
            if numbers := [match for match in form.finditer(name) if _is_within(match, begin, end)]:
                return int(numbers[-1]["number"]) * _UNITS[(numbers[-1]["unit"] or "").lower() or None], True
    for name, begin, end in parts:
        for form in (_NUMBERS_ALONE, _NUMBERS):
            if numbers := [match for match in form.finditer(name) if _is_within(match, begin, end)]:
                if len(numbers) > 1 or _NO_STEP.search(name):
                    return -1, False
                return int(numbers[0]["number"]), bool(_OF_CHECKPOINT.search(name[: numbers[0].start("number")]))
    return -1, False


def _is_within(number: re.Match[str], begin: int, end: int) -> bool:
    return number.start("number") < end and number.end("number") > begin


def _open_parts(path: Path, pattern: str) -> Iterator[tuple[str, int, int]]:
    """Yields, for each part of the path for which the pattern has a wildcard, the last first: its name, and where the
    wildcard's match begins and ends."""
    names, forms = list(path.parts), list(Path(pattern).parts)
    if "**" in forms:  # any number of parts
        first, after = forms.index("**"), len(forms) - 1 - forms[::-1].index("**")
        forms[first : after + 1] = ["*"] * (len(names) - first - (len(forms) - after - 1))
    for name, form in zip(reversed(names), reversed(forms), strict=False):
        pieces = _GLOB_PART.findall(form)
        # A class of one letter stands for that letter, as glob.escape writes it.
        wild = [at for at, piece in enumerate(pieces) if piece in "*?" or len(piece) > 3]
        if wild:
            yield name, wild[0], len(name) - (len(pieces) - 1 - wild[-1])


def _made_at(run: RunFolder) -> float:
    """When a run began, by a file of its first start: like the checkpoints, a node wrote it, not a login node."""
    for path in (run.attempt(1).folder / "attempt.json", run.path / "resolved.json"):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0
