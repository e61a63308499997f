"""Where a stream of data stands, kept in a checkpoint: `data-00003.json` for each data-parallel rank that has read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.errors import CheckpointError
from hpc_gpt.train.checkpoints.rank_files import RankFiles


def put_positions(files: RankFiles, positions: Mapping[int, Mapping[str, Any]]) -> None:
    """One file for each data-parallel rank in `positions`; its first rank on every other axis does so."""
    for dp_rank, position in positions.items():
        files.put_text(f"data-{dp_rank:05d}.json", json.dumps(position) + "\n")


def read_positions(folder: Path) -> dict[int, dict[str, Any]]:
    """Every data-parallel rank's position, of as many as saved; empty for data that follow from the step alone."""
    return dict(_read(folder))


def _read(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for path in sorted(folder.glob("data-*.json")):
        try:
            position = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as fault:
            raise CheckpointError(
                f"{path} cannot be read: {fault}", "the checkpoint is damaged; remove it, and the one before is used"
            ) from None
        yield int(path.stem.removeprefix("data-")), position
