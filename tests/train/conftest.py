"""The text all of the trainer's tests train on, and a small disk to fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt.tokens.build import build_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token file of this repository's own sources."""
    source = Path(__file__).resolve().parents[2] / "hpc_gpt" / "tokens"
    return build_tokens(source, tmp_path_factory.mktemp("tokens") / "own.tokens").path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
