"""A run as this version makes it, for the tests of later versions.

    python -m tests.specimens

trains a few steps of a small model on this machine, and writes the run folder into `made_at_VERSION.tar.xz` beside this
file. The archive leaves out the run's code, and has other names in place of this machine's host, user and folders.
"""

import getpass
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from hpc_gpt import __version__
from hpc_gpt.core.process import boot_id
from tests.conftest import REPOSITORY

ARCHIVE = Path(__file__).with_name(f"made_at_{__version__}.tar.xz")
EXPERIMENT = """\
[model]
hidden = 8
layers = 1
heads = 1
vocab = 32
seq = 8

[data]
source = "random"

[engine]
name = "ddp"

[layout]
gpus = 1
micro_batch = 1
micro_batches = 1

[train]
steps = 6
save_every = 2
keep_last = 1
log_every = 1
dtype = "fp32"
"""


def make(folder: Path) -> Path:
    """Trains a run below `folder`, and returns its folder."""
    (folder / "small.toml").write_text(EXPERIMENT)
    own = {f"HPC_GPT_{name}": str(folder / name.lower()) for name in ("LOGS", "CONFIG", "STATE", "CACHE", "DATA")}
    line = [sys.executable, "-m", "hpc_gpt", "submit", "small.toml", "--cluster", "local", "--wait"]
    environment = {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(line, cwd=folder, env=environment, check=True)
    [run] = (folder / "logs" / "small").iterdir()
    return run


def pack(folder: Path, run: Path) -> bytes:
    """The archive of a run below `folder`, without its code. AssertionError if a name of this machine is left in it."""
    masks = {str(folder): "/made", str(REPOSITORY): "/repository", str(Path.home()): "/home/me"}
    masks |= {sys.executable: "/usr/bin/python3", sys.prefix: "/usr"}
    masks |= {platform.platform(): "Linux", platform.node(): "node-1", boot_id(): "boot-1"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for path in sorted(run.rglob("*")):
            name = path.relative_to(folder)
            if path.is_dir() or path.name == "code.zip":
                continue
            content, is_text = path.read_bytes(), "checkpoints" not in name.parts
            if is_text:  # the checksums of a checkpoint's files are noted
                for own, other in sorted(masks.items(), key=lambda mask: -len(mask[0])):
                    content = content.replace(own.encode(), other.encode())
                content = content.replace(f'"user": "{getpass.getuser()}"'.encode(), b'"user": "me"')
            # A host's name of two letters may stand among random numbers.
            assert not any(own.encode() in content for own in masks if is_text or len(own) > 6), name
            entry = tarfile.TarInfo(str(name))
            entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        made = Path(place).resolve()
        ARCHIVE.write_bytes(pack(made, make(made)))
    print(f"{ARCHIVE.name}: {ARCHIVE.stat().st_size} bytes")
