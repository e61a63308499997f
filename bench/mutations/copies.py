"""Copies of the tree, and tests that run in one."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.processes import all_pids, command_of, environment_of

REPOSITORY = Path(__file__).resolve().parents[2]


def copy_tree(target: Path) -> None:
    """Copies every file that git knows or does not ignore, as it is now, with its bytecode."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = REPOSITORY / name
        if source.is_file():
            # With what Python and pytest have compiled of it: that counts for a file of its size and time.
            compiled = source.parent.glob(f"__pycache__/{source.stem}.*.pyc") if source.suffix == ".py" else ()
            for path in (source, *compiled):
                copied = target / path.relative_to(REPOSITORY)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copied)


def run_tests(tree: Path, tests: list[str], limit: float = 900.0, long: bool = False) -> tuple[int | None, str]:
    """(pytest's exit code, None after `limit` seconds; its output) of tests in a copy of the tree.

    Every process that the tests leave behind is killed: a training would take a core for hours.
    """
    with tempfile.TemporaryDirectory(prefix="hpc-gpt-fault-") as folder:
        environment = {
            **os.environ,
            "CI": "true",  # the same examples each time, and a skip is a failure
            "ALL_TESTS": "true" if long else "",
            "PYTHONPATH": str(tree),
            # Two texts of one length within a second would share a .pyc.
            "PYTHONDONTWRITEBYTECODE": "1",
            "HPC_GPT_SHARED": "",  # CI has no real files: a fault that they alone show would reach users
            "PYTEST_DEBUG_TEMPROOT": folder,
        }
        with open(f"{folder}/output", "w+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", *tests],
                cwd=tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = None
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            finally:
                _kill_all_of(folder)
            output.seek(0)
            return code, output.read().decode(errors="replace")


def _kill_all_of(folder: str) -> None:
    for pid in all_pids():
        if any(folder in word for word in (*command_of(pid), *environment_of(pid).values())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
