"""A lock on what the program says, for changes that are to change nothing of it.

python -m tests.lock OUT                  asks everything, and writes an answer each into the folder OUT
python -m tests.lock OUT --write          the same, and keeps their sums in sums.txt
python -m tests.lock OUT --against COMMIT the same in a worktree of COMMIT, with this list of questions, and the diff

Without --write it ends with 1 if a sum differs from the one kept. Times, ids, hosts and folders are masked.
"""

import argparse
import difflib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.conftest import REPOSITORY

SPECIMENS = REPOSITORY / "tests" / "reader" / "specimens"
SUMS = Path(__file__).with_name("sums.txt")
RUNS = REPOSITORY / "tests" / "specimens" / "made_at_0.3.0.tar.xz"
_MASKS = (
    (re.compile(r"\b20\d{6}-\d{6}-[0-9a-f]{4}\b"), "RUN-ID"),
    (re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?"), "TIME"),
    (re.compile(r'("[a-z_]*(?:time|started|ended_at|read_at|age_s)": )\d+(\.\d+)?'), r"\1TIME"),
    (re.compile(re.escape(platform.node())), "HOST"),
)


def answers(work: Path) -> dict[str, str]:
    """What the program says to every question, masked."""
    from tests.cli.command import in_process
    from tests.lock.questions import SHARED, everything

    specimens, runs = work / "specimens", work / "runs"
    specimens.mkdir()
    for file in SPECIMENS.iterdir():
        (specimens / f"{file.stem}.log").write_bytes(file.read_bytes().split(b"\n", 1)[1])
    runs.mkdir()
    if RUNS.exists():
        with tarfile.open(RUNS) as archive:
            archive.extractall(runs, filter="data")
    for name in [name for name in os.environ if name.startswith("HPC_GPT_")]:
        del os.environ[name]
    for name in ("CONFIG", "STATE", "CACHE", "DATA", "LOGS"):
        os.environ[f"HPC_GPT_{name}"] = str(work / name.lower())
    os.environ |= {"COLUMNS": "120", "NO_COLOR": "1", "PATH": "/usr/bin:/bin"}
    found = {}
    for name, line in everything(specimens, runs).items():
        done = in_process(*line, cwd=work)
        said = f"$ hpc-gpt {' '.join(line)}\n{done.stdout}\n--- stderr\n{done.stderr}\n--- exit {done.code}\n"
        for folder, mask in ((work, "WORK"), (SHARED, "SHARED"), (REPOSITORY, "REPOSITORY")):
            said = said.replace(str(folder), mask)
        for pattern, mask in _MASKS:
            said = pattern.sub(mask, said)
        found[name] = said
    return found


def ask(out: Path) -> dict[str, str]:
    """The answers, each in a file of `out`."""
    with tempfile.TemporaryDirectory() as work:
        found = answers(Path(work).resolve())
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name, said in found.items():
        (out / f"{name.replace('/', '_')}.txt").write_text(said, encoding="utf-8")
    return found


def ask_commit(commit: str, out: Path) -> None:
    """The same of another commit, with the questions and the runs of this one."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / REPOSITORY.name
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=REPOSITORY, check=True)
        try:
            for name in ("lock", "specimens", "readers/specimens"):
                shutil.rmtree(tree / "tests" / name, ignore_errors=True)
                if (REPOSITORY / "tests" / name).exists():
                    shutil.copytree(REPOSITORY / "tests" / name, tree / "tests" / name)
            shared = REPOSITORY.parent / "shared"
            if shared.exists():
                (tree.parent / "shared").symlink_to(shared)
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            subprocess.run([sys.executable, "-m", "tests.lock", out], cwd=tree, env=environment, check=False)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=REPOSITORY, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--against", metavar="COMMIT")
    asked = parser.parse_args()
    out = asked.out.resolve()
    found = ask(out)
    if asked.against:
        other = out.with_name(f"{out.name}-{asked.against}")
        ask_commit(asked.against, other)
        for file in sorted(out.iterdir()):
            before = other / file.name
            then = before.read_text(encoding="utf-8").splitlines() if before.exists() else []
            now = file.read_text(encoding="utf-8").splitlines()
            print(*difflib.unified_diff(then, now, asked.against, file.stem, lineterm="", n=1), sep="\n", end="")
        return 0
    sums = {name: hashlib.sha256(said.encode()).hexdigest()[:16] for name, said in found.items()}
    if asked.write:
        SUMS.write_text("".join(f"{value}  {name}\n" for name, value in sums.items()), encoding="utf-8")
        return 0
    kept = dict(reversed(line.split("  ", 1)) for line in SUMS.read_text(encoding="utf-8").splitlines())
    differ = [name for name in {**kept, **sums} if kept.get(name) != sums.get(name)]
    for name in differ:
        print(f"differs: {name}")
    print(f"{len(sums) - len(differ)} of {len(sums)} answers are as they were; see {out}")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
