"""Whether a checkpoint that another program wrote is whole, or was left half written by a kill.

The first rule that applies decides: the mark of the program that wrote it, then the bytes of its files, then the files
of the checkpoint before it. Only names, sizes and the beginnings and ends of files are read. Its age, or that it no
longer grows, is no sign: what a kill has left has both.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

# Endings and beginnings of the name of a checkpoint that is being written, and of a file beside one (NeMo).
_UNFINISHED_END = re.compile(r"-unfinished$|\.(?:tmp|incomplete|partial)$|\.orbax-checkpoint-tmp-\d+$")
_UNFINISHED_BEGIN = ("tmp-", ".tmp-")
_MARKER = "{}-unfinished"
_COPIES = ("{}.tmp", "{}.incomplete", "tmp-{}")
# The Trainer of transformers writes trainer_state.json as the last file of checkpoint-N.
_TRAINER_FOLDER = re.compile(r"checkpoint-\d+")
_TRAINER_FILES = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth")
_TRAINER_MARK = "trainer_state.json"
_DCP_MARK = ".metadata"  # of torch.distributed.checkpoint, beside its *.distcp
_ORBAX_MARK = "commit_success.txt"
# {file beside the checkpoints: name of a checkpoint, whose number the file has}.
_LAST_FILES = {
    "latest_checkpointed_iteration.txt": re.compile(r"iter_(\d+)"),  # Megatron-LM
    "latest": re.compile(r"global_step(\d+)"),  # DeepSpeed
}
_MAX_FILES = 20_000
_ZIP_TAIL_BYTES = 1 << 16
_MAX_HEADER_BYTES = 100 << 20
_NUMBERS = re.compile(r"\d+")


def is_being_written(path: Path) -> bool:
    """True if the name of a file or folder is that of an unfinished checkpoint, or of the marker beside one."""
    return bool(_UNFINISHED_END.search(path.name)) or path.name.startswith(_UNFINISHED_BEGIN)


def fault_of_checkpoint(path: Path, earlier: Path | None = None) -> str | None:
    """The reason why a checkpoint is not whole, as the end of "it …"; None if it is whole. `earlier`: the whole
    checkpoint before it, if there is one."""
    # A name without a step (last.pt) gets each save in turn: a copy beside it is what a kill left of a later one.
    neighbours = (_MARKER, *(_COPIES if _NUMBERS.search(path.name) else ()))
    beside = next((name for each in neighbours if (path.parent / (name := each.format(path.name))).exists()), None)
    if beside is not None:
        return f"has {beside} beside it"
    marked, fault = _judge_by_mark(path, earlier)
    if marked:
        return fault
    files = _files_in(path)
    if not files:
        return "is empty"
    for name, size in files.items():
        if fault := _fault_of_file(path / name if name else path, size):
            return fault
    return None if earlier is None else _compare(files, _files_in(earlier))


def _judge_by_mark(path: Path, earlier: Path | None) -> tuple[bool, str | None]:
    """Returns (whether a mark decides, the fault). A mark decides if the checkpoint's other files show which program
    wrote it, or if the checkpoint before has the mark."""
    for name, form in _LAST_FILES.items():
        step = form.fullmatch(path.name)
        with contextlib.suppress(OSError, ValueError):
            if step and (last := _NUMBERS.search((path.parent / name).read_text(encoding="utf-8")[:200])):
                is_written = int(step[1]) <= int(last[0])
                return True, None if is_written else f"is not in {name}, which names {last[0]}"
    if _TRAINER_FOLDER.fullmatch(path.name) and path.is_dir():
        is_trainers = any((path / name).exists() for name in _TRAINER_FILES)
        if is_trainers or (earlier is not None and (earlier / _TRAINER_MARK).exists()):
            return _lacks(path, _TRAINER_MARK)
    if earlier is not None and (earlier / _ORBAX_MARK).exists():
        return _lacks(path, _ORBAX_MARK)
    for folder in (path, *_folders_in(path)):
        is_dcp = any(entry.name.endswith(".distcp") for entry in _entries(folder))
        before = None if earlier is None else earlier / folder.relative_to(path) / _DCP_MARK
        if is_dcp or (before is not None and before.exists()):
            return _lacks(folder, _DCP_MARK)
    return False, None


def _lacks(folder: Path, mark: str) -> tuple[bool, str | None]:
    return True, None if (folder / mark).exists() else f"has no {mark}"


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _folders_in(path: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(path) if entry.is_dir()]


def _files_in(path: Path) -> dict[str, int]:
    """{path in the checkpoint: bytes} of its files, at most `_MAX_FILES`; {"": bytes} for a checkpoint of one file."""
    if not path.is_dir():
        with contextlib.suppress(OSError):
            return {"": size} if (size := path.stat().st_size) else {}
        return {}
    sizes: dict[str, int] = {}
    for name, size in _walk(path):
        sizes[name] = size
        if len(sizes) >= _MAX_FILES:
            break
    return sizes


def _walk(path: Path) -> Iterator[tuple[str, int]]:
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            with contextlib.suppress(OSError):
                yield str(file.relative_to(path)), file.stat().st_size


def _fault_of_file(file: Path, size: int) -> str | None:
    """The reason why a file is cut off, by its format: an archive of torch.save, safetensors, an index of shards."""
    try:
        if file.suffix == ".safetensors":
            return _fault_of_safetensors(file, size)
        if file.name.endswith(".index.json"):
            return _fault_of_index(file)
        with file.open("rb") as data:
            if data.read(4) != b"PK\x03\x04":
                return None
            data.seek(max(0, size - _ZIP_TAIL_BYTES))
            return None if b"PK\x05\x06" in data.read() else f"has {file.name} without its end"
    except OSError:
        return None  # not visible is not damaged


def _fault_of_safetensors(file: Path, size: int) -> str | None:
    with file.open("rb") as data:
        header_bytes = int.from_bytes(data.read(8), "little")
        cut = f"has {file.name} of {size} bytes, fewer than its header states"
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            return cut
        try:
            header = json.loads(data.read(header_bytes))
            ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return f"has {file.name} with a damaged header"
    return cut if size < 8 + header_bytes + max(ends, default=0) else None


def _fault_of_index(file: Path) -> str | None:
    try:
        shards = set(json.loads(file.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"has a damaged {file.name}"
    missing = sorted(str(shard) for shard in shards if not (file.parent / str(shard)).exists())
    return f"has no {missing[0]}, which {file.name} names" if missing else None


def _compare(files: dict[str, int], earlier: dict[str, int]) -> str | None:
    """The first file of the checkpoint before, names compared without their numbers, that is missing or empty."""
    sizes = {_NUMBERS.sub("#", name): size for name, size in files.items()}
    for name, size in earlier.items():
        form = _NUMBERS.sub("#", name)
        if form not in sizes:
            return f"has no {name}, as the one before has"
        if size and not sizes[form]:
            return f"has an empty {name}"
    return None
