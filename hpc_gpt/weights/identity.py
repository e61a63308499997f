"""Whether a folder of weights is the one that a run was submitted with, without reading all of it.

provenance.json keeps what identifies it: of config.json and index the SHA-256; of each file the size, the SHA-256 of
its header, its modification time and inode; of each tensor a hash of its first and last block. Weights that were
trained further, or are another model's of the same shapes, differ in every tensor's blocks.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpc_gpt.errors import ConfigError, OsErrorAs
from hpc_gpt.weights.folder import CONFIG, INDEX, SINGLE, StoredWeight, WeightsFolder
from hpc_gpt.words import and_more

EDGE = 4096  # bytes
_SHOWN = 5
# Of a file, what a copy or a restore changes; the rest says what is in it.
_OF_THE_DISK = ("mtime_ns", "inode")


@dataclass(frozen=True)
class Changes:
    """How a folder differs from what provenance.json says of it: {file: how}, and the files that only have another
    modification time or inode."""

    files: dict[str, str]
    copied: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """A line on files that were copied; empty if none was."""
        if not self.copied:
            return ""
        return (
            f"{', '.join(self.copied)}: another modification time or inode than at submission, as after a copy or a "
            f"restore; size, header, and first and last {EDGE} bytes of each tensor are equal"
        )


def identity_of(folder: WeightsFolder) -> dict[str, Any]:
    """What provenance.json keeps of a folder. Raises ConfigError if a file cannot be read."""
    files = {}
    for name, stored in folder.identity["files"].items():
        state = (folder.path / name).stat()
        blocks = _hashes(folder, name)
        files[name] = {**stored, "mtime_ns": state.st_mtime_ns, "inode": state.st_ino, "blocks": blocks}
    return {**folder.identity, "files": files}


def changes_since(folder: WeightsFolder, then: dict[str, Any]) -> Changes:
    """Compares a folder with what provenance.json says of it; what an earlier version did not store, not.

    Raises ConfigError if a file cannot be read.
    """
    now, before = identity_of(folder), then.get("files", {})
    if then.get("index") is not None and SINGLE in now["files"] and SINGLE not in before:
        return Changes({SINGLE: f"goes before {INDEX}, from which the run was submitted"})
    changes = {
        name: "changed, added or removed"
        for key, name in (("config", CONFIG), ("index", INDEX))
        if then.get(key) != now[key]
    }
    copied = []
    for name in {**before, **now["files"]}:
        own, other = before.get(name), now["files"].get(name)
        if own is None or other is None or any(own.get(key) != other[key] for key in ("size", "header")):
            changes[name] = "changed, added or removed"
        elif differ := [tensor for tensor, block in own.get("blocks", {}).items() if other["blocks"][tensor] != block]:
            changes[name] = f"other numbers in {_listed(differ)}"
        elif any(own.get(key, other[key]) != other[key] for key in _OF_THE_DISK):
            copied.append(name)
    return Changes(changes, tuple(copied))


def check_unchanged(folder: WeightsFolder, then: dict[str, Any]) -> str:
    """A note for the user, or empty. Raises ConfigError if the folder is not what provenance.json says of it."""
    changes = changes_since(folder, then)
    if changes.files:
        raise ConfigError(
            f"{folder.path} has changed since the run was submitted: "
            + _listed([f"{name} ({how})" for name, how in changes.files.items()]),
            "submit again to begin from what is there now",
        )
    return changes.note


def _hashes(folder: WeightsFolder, name: str) -> dict[str, str]:
    """{a tensor's name in the file: 64 bits of the SHA-256 of its first and last block, in hexadecimal}."""
    tensors = {folder.stored[own]: weight for own, weight in folder.weights.items() if weight.file.name == name}
    found = {}
    path = folder.path / name
    with OsErrorAs(ConfigError, str(path), "download the folder again"), path.open("rb", buffering=0) as file:
        for tensor, weight in sorted(tensors.items(), key=lambda one: one[1].begin):
            digest = hashlib.sha256()
            for begin, end in _blocks(weight):
                file.seek(begin)
                digest.update(file.read(end - begin))
            found[tensor] = digest.hexdigest()[:16]
    return found


def _blocks(weight: StoredWeight) -> Iterable[tuple[int, int]]:
    """The bytes of the first and the last block; of a small tensor all at once."""
    begin, end = weight.begin, weight.end
    return [(begin, end)] if end - begin <= 2 * EDGE else [(begin, begin + EDGE), (end - EDGE, end)]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + and_more(len(names), _SHOWN, ", and ", "other")
