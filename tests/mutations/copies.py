"""Copies of the tree for faults to be put into."""

import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def copy_tree(target: Path) -> None:
    """All that git knows of, and what it does not ignore, as it is now; its bytecode, too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = REPOSITORY / name
        if source.is_file():
            # With what Python and pytest have compiled of it: that counts for a file of its size and time.
            compiled = source.parent.glob(f"__pycache__/{source.stem}.*.pyc") if source.suffix == ".py" else ()
            for path in (source, *compiled):
                copied = target / path.relative_to(REPOSITORY)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copied)
