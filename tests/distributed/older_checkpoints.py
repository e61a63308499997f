"""Checkpoints as 0.3 wrote them, a small one of each kind, with the losses and norms that came after them.

    python -m tests.distributed.older_checkpoints

makes them anew with the code of commit 8eebf195, in a working tree of its own, and packs them into ARCHIVE.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.distributed import older_kinds

COMMIT = "8eebf195"
ARCHIVE = REPOSITORY / "tests" / "specimens" / "checkpoints_of_0.3.tar.xz"


def make(tree: Path, folder: Path) -> None:
    """Makes the checkpoints of all kinds in `folder`, with the code in `tree`."""
    shutil.copy(older_kinds.__file__, tree / "tests" / "distributed")
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(tree)}
    line = [sys.executable, "-m", "tests.distributed.older_kinds", str(folder)]
    for world in sorted({kind.layout.gpus for kind in older_kinds.KINDS.values()}):
        ranks = [
            subprocess.Popen(line, cwd=tree, env={**os.environ, **own, "WORLD_SIZE": str(world), "RANK": rank,
                                                  "LOCAL_RANK": rank})
            for rank in map(str, range(world))
        ]  # fmt: skip
        codes = [rank.wait() for rank in ranks]
        assert not any(codes), f"ranks ended with {codes}"


def pack(folder: Path) -> bytes:
    """The archive of the checkpoints in `folder`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for path in sorted(path for name in older_kinds.KINDS for path in (folder / name).rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(str(path.relative_to(folder)))
                entry.size = path.stat().st_size
                archive.addfile(entry, io.BytesIO(path.read_bytes()))
    return packed.getvalue()


def unpack(kind: str, folder: Path) -> Path:
    """Unpacks the checkpoint of one kind below `folder`, and returns its own folder there."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, [one for one in archive if one.name.startswith(f"{kind}/")], filter="data")
    return folder / kind


def main() -> None:
    """Makes ARCHIVE."""
    with tempfile.TemporaryDirectory() as place:
        tree, folder = Path(place) / "tree", Path(place) / "made"
        folder.mkdir()
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), COMMIT], check=True)
        try:
            make(tree, folder)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        ARCHIVE.write_bytes(pack(folder))
    print(f"{ARCHIVE.name}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
