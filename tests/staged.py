"""An environment in a tar, as a profile's `stage` names it, whose original is gone."""

import shutil
import site
import subprocess
import sys
import tempfile
from pathlib import Path

# What Python imports at its start in it: a line of the rank and of what it runs from, for a test to look at.
_SEEN = """import os, sys
if os.environ.get("STAGE_SEEN"):
    with open(os.environ["STAGE_SEEN"], "a") as seen:
        seen.write(f"{os.environ.get('RANK', '-')} {sys.prefix}\\n")
"""


def make_archive(path: Path, *content: str) -> Path:
    """Makes the tar `path` of a virtual environment that has the packages of this one; `content` are the words for tar
    that say what is in it, by default its folder's content."""
    folder = Path(tempfile.mkdtemp()) / "original"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "all.pth").write_text("".join(f"{each}\n" for each in site.getsitepackages()) + "import seen\n")
    (packages / "seen.py").write_text(_SEEN)
    compress = ["-a"] if path.suffix != ".tar" else []
    words = content or ("-C", str(folder), ".")
    subprocess.run(["tar", "--force-local", *compress, "-cf", path, *words], check=True, cwd=folder.parent)
    shutil.rmtree(folder.parent)
    return path
