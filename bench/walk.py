"""The modules and functions through which a command goes: `python -m bench.walk [WORDS]`.

Nothing passes or fails. Slurm's commands are stand-ins that accept every job, and the standard data are made already. A
function counts if it ran, also while its module was imported, by its name: the comprehensions of one function are one
more, and its lambdas another. Two more rows count without any of them, and with each. A module counts as run if one of
its functions did. Without WORDS it measures two commands that are typed often.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from bench.sweep import make_stand_ins

COMMANDS = (("submit", "--gpus", "64", "--pp", "16", "--yes"), ("status",))
PACKAGE = Path(__file__).parents[1] / "hpc_gpt"
_WITHOUT_NAME = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>")
# The module that decides what a submission is to be; it had another name before.
DECIDES = ("launcher/decide.py", "launcher/prepare.py")


class Walk:
    """What ran between `start` and `stop`, in the package alone: calls by (caller, called), and the functions."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.moves: Counter[tuple[str, str]] = Counter()
        self.decided: set[str] = set()  # the modules that run below the one that decides

    def start(self) -> None:
        sys.setprofile(self._see)

    def stop(self) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or (module := _module(code)) is None or not code.co_flags & CO_NEWLOCALS:
            return  # a module's or a class's own text is not a function
        self.functions.add(code)
        caller, at = frame.f_back, None
        while caller is not None and (at := _module(caller.f_code)) is None:
            caller = caller.f_back
        if at is not None and at != module:
            self.moves[at, module] += 1
        while caller is not None:
            if _module(caller.f_code) in DECIDES:
                self.decided.add(module)
                return
            caller = caller.f_back

    def table(self) -> dict[str, int]:
        """The figures by name."""
        loaded = [name for name in sys.modules if name.partition(".")[0] == PACKAGE.name]
        files = {Path(path) for name in loaded if (path := getattr(sys.modules[name], "__file__", None))}
        names = {(_module(code), code.co_qualname) for code in self.functions}
        return {
            "modules run": len({module for module, _ in names}),
            "functions run": len(names),
            "  without comprehensions": sum(code.co_name not in _WITHOUT_NAME for code in self.functions),
            "  with each comprehension": len(self.functions),
            "moves between modules": sum(self.moves.values()),
            "modules that the deciding one enters": len(self.decided),
            "returns to it": sum(count for (at, _), count in self.moves.items() if at in DECIDES),
            "modules imported": len(loaded),
            "lines imported": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
        }


def _module(code: CodeType) -> str | None:
    """The path of a function's module within the package; None for code elsewhere."""
    path = code.co_filename
    return path[len(str(PACKAGE)) + 1 :] if path.startswith(f"{PACKAGE}/") else None


def walk_here(words: Sequence[str], named: bool) -> None:
    """Runs the command in this process, and prints its figures, or with `named` its modules and functions, as JSON on
    stderr."""
    walk = Walk()
    walk.start()
    from hpc_gpt.cli import main

    try:
        main([*words])
    except SystemExit as end:
        assert not end.code, (words, end.code)
    finally:
        walk.stop()
    run = {_module(code) for code in walk.functions}
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == PACKAGE.name)
    names: dict[str, Any] = {
        "run": sorted(f"{_module(code)}:{code.co_qualname}" for code in walk.functions),
        "imported, not run": [
            name
            for name in loaded
            if not {f"{name.partition('.')[2].replace('.', '/')}{end}" for end in (".py", "/__init__.py")} & run
        ],
    }
    print(json.dumps(names if named else walk.table(), indent=1), file=sys.stderr)


def walk_of(words: Sequence[str], folder: Path, named: bool = False) -> dict[str, Any]:
    """The figures of a command, in a process of its own with stand-ins for Slurm, three ended runs and no settings of
    the user."""
    from tests.made_runs import add_attempt, make_run, metrics_line  # imports much of what is counted

    make_stand_ins(folder / "bin")
    for _ in range(3):
        add_attempt(make_run(folder / "logs", "generic-slurm"), [metrics_line(step) for step in range(1, 30)])
    make_run(folder / "logs", "generic-slurm")
    own = {f"HPC_GPT_{key}": str(folder / key.lower()) for key in ("LOGS", "CONFIG", "STATE", "DATA")}
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(PACKAGE.parent)}
    make = "from hpc_gpt.trainer.tokens.build import build_stdlib; build_stdlib()"
    subprocess.run([sys.executable, "-c", make], env={**os.environ, **own, **path}, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "bench.walk", "--here", *(["--names"] if named else []), *words],
        cwd=PACKAGE.parent, env={**os.environ, **own, **path, "HPC_GPT_CLUSTER": "generic-slurm"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stderr[f"\n{done.stderr}".rindex("\n{") :])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--names", action="store_true", help="print the modules and functions by name")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.here:
        walk_here(given.words, given.names)
        return
    for words in [given.words] if given.words else COMMANDS:
        with tempfile.TemporaryDirectory() as name:
            print(f"hpc-gpt {' '.join(words)}", flush=True)
            for label, figure in walk_of(words, Path(name), given.names).items():
                print(f"  {label:<38} {figure:>6,}" if not given.names else "\n  ".join([f"  {label}:", *figure]))


if __name__ == "__main__":
    main()
