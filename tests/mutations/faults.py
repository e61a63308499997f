"""The faults of faults.toml: how one is read, found in its file, and put into a copy of it."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("faults.toml")


def below_room(file: str) -> str:
    """The path of a file below hpc_gpt and its room."""
    return re.sub(r"^hpc_gpt/(?:(?:core|reader|trainer|launcher)/)?", "", file)


def package_of(file: str) -> str:
    """The package of a file of the tree: `train`, `templates`, or `top` for a module of hpc_gpt or of a room itself."""
    folders = below_room(file).split("/")[:-1]
    return folders[0] if folders else "top"


@dataclass(frozen=True)
class Fault:
    """`line` occurs once in `file`, and `fault` takes its place. Each of `tests` is a file or a test.

    `survived` is true if no test failed on it when the list was written; the test that does was added then.
    """

    name: str
    file: str
    line: str
    fault: str
    tests: tuple[str, ...]
    survived: bool = False

    @property
    def package(self) -> str:
        """The part of the tree it is in: `train`, `templates`, or `top` for a module of hpc_gpt itself."""
        return package_of(self.file)

    def text(self, tree: Path) -> str:
        """The file of `tree` with the fault in it; ValueError if the line is not there exactly once."""
        sound = (tree / self.file).read_text(encoding="utf-8")
        if (count := sound.count(self.line)) != 1:
            raise ValueError(f"{self.file} has the line {count} times, not once: {self.line}")
        text = sound.replace(self.line, self.fault)
        if self.file.endswith(".py"):
            compile(text, self.file, "exec")  # a SyntaxError, which is a ValueError's cousin, is no fault worth a test
        return text


def read_faults() -> list[Fault]:
    """All of them, in the order of the file."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**table, "tests": tuple(table["tests"])}) for table in tables]
