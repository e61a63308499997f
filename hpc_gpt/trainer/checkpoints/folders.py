"""The folders of checkpoints on the disk: their names and completion, and the reading of their files.

`core.checkpoints.find_checkpoints` decides whether a checkpoint is sound, `core.checkpoints.retention` which ones stay.

    checkpoints/.writing-step-00000020/    being written; not to be read
    checkpoints/step-00000020/             complete: what the engine wrote, and complete.json, written last
    checkpoints/.damaged-step-00000020-1/  found to be damaged, and renamed
    checkpoints/.deleting-step-00000020-1/ being removed

complete.json names every file with its size and CRC-32.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.core.checkpoints.find_checkpoints import COMPLETE, set_aside
from hpc_gpt.core.errors import CheckpointError, read_hint
from hpc_gpt.core.files import json_in, sync

# Hints for a checkpoint that cannot be loaded, or would be so if it was saved.
REMOVE_IT = "remove the checkpoint: then the one before it is used"
IT_IS_OURS = "this is a fault of hpc-gpt: report it; another engine, or engine.sharded_optimizer=false, may save"
IT_IS_DAMAGED = "the checkpoint is damaged; remove it: then the one before it is used"
# File name in the checkpoint's folder -> "bytes" and "crc32".
Sums = dict[str, dict[str, int]]


def load_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file of a checkpoint. Raises CheckpointError if it cannot be read."""
    try:
        content: dict[str, Any] = json_in(path)
    except ValueError as fault:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read: {fault}", IT_IS_DAMAGED) from None
    except OSError as fault:
        raise unread(path, fault) from None
    return content


def unread(path: Path, fault: OSError) -> CheckpointError:
    """The error for a file of a checkpoint that could not be read; "damaged" is said of its contents alone."""
    return CheckpointError(f"{path} cannot be read: {fault.strerror}", read_hint(fault, IT_IS_DAMAGED))


def complete(aside: Path, final: Path, marker: Mapping[str, Any]) -> None:
    """Writes complete.json, then renames the folder. Each is on the disk before the next begins."""
    (aside / COMPLETE).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    sync(aside / COMPLETE)
    sync(aside)
    if final.exists():
        # A resume skipped this checkpoint. It is not deleted: perhaps only one host could not read it.
        set_aside(final)
    aside.rename(final)
    sync(final.parent)
