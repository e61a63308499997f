"""Programs that tests start to their ends, and scripts that they put in a program's place."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def put(path: Path, text: str) -> Path:
    """A program at that path, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def ran(
    *line: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, code: int | None = None
) -> subprocess.CompletedProcess[str]:
    """What a program has printed, as text, and its exit code, which must be `code` if one is given. `env`: all of its
    environment, else ours."""
    done = subprocess.run(
        [str(word) for word in line], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def python(*line: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, code: int | None = None):
    """The same of this Python."""
    return ran(sys.executable, *line, cwd=cwd, env=env, code=code)
