"""Faults that nobody has chosen: `python -m tests.mutations --random N --seed S` draws them from all of the program.

A line counts once if any fault can be made of it; of a line drawn, each of its faults is as likely. The draw follows
from the seed and the files alone.
"""

import random
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutations.faults import package_of
from tests.mutations.python_faults import changes_of_python
from tests.mutations.shell_faults import changes_of_shell, is_shell


@dataclass(frozen=True, order=True)
class Drawn:
    """`text` takes the place of bytes `start` to `end` of `file`, in a statement of the lines `line` to `last`."""

    file: str
    line: int
    last: int
    kind: str
    start: int
    end: int
    text: str

    @property
    def package(self) -> str:
        """As that of a fault of faults.toml."""
        return package_of(self.file)

    def applied(self, sound: bytes) -> bytes:
        return sound[: self.start] + self.text.encode() + sound[self.end :]

    def described(self, tree: Path) -> str:
        """file:line, before -> after, on one line."""
        sound = (tree / self.file).read_bytes()
        first = sound.rfind(b"\n", 0, self.start) + 1
        end = sound.find(b"\n", self.end)
        before = sound[first:end].decode()
        after = self.applied(sound)[first : end + len(self.text.encode()) - (self.end - self.start)].decode()
        return f"{self.file}:{self.line}  {' '.join(before.split())} -> {' '.join(after.split())}"

    def without_line(self, tree: Path) -> str:
        """The same without the line's number, which other changes move."""
        return self.described(tree).replace(f"{self.file}:{self.line}  ", f"{self.file}  ", 1)


def files_of(tree: Path) -> list[str]:
    """Python of hpc_gpt and shell of templates that git knows."""
    listed = subprocess.run(
        ["git", "-C", tree, "ls-files", "hpc_gpt", "templates"], capture_output=True, text=True, check=True
    )
    return sorted(name for name in listed.stdout.split() if name.endswith(".py") or is_shell(name))


@cache
def lines_of(tree: Path) -> dict[tuple[str, int], list[Drawn]]:
    """{(file, line): the faults that can be made of it}, in order."""
    found = defaultdict(list)
    for name in files_of(tree):
        make = changes_of_python if name.endswith(".py") else changes_of_shell
        for change in make((tree / name).read_bytes()):
            found[name, change[0]].append(Drawn(name, *change))
    return {place: sorted(found[place]) for place in sorted(found)}


def draw(tree: Path, count: int, seed: int, words: str = "") -> list[Drawn]:
    """`count` faults, each of another line of a file whose name holds the words; ValueError if it is too many."""
    lines = lines_of(tree)
    chance = random.Random(seed)
    # The first of a longer draw are a shorter one's, and those of some files are a whole one's.
    places = [place for place in chance.sample(list(lines), len(lines)) if words in place[0]]
    if count > len(places):
        raise ValueError(f"faults can be made of {len(places):,} lines, not of {count:,}")
    found = []
    for place in places:
        if len(found) == count:
            break
        # One that breaks the grammar is none: it is seen by whatever reads the file.
        sound = (tree / place[0]).read_bytes()
        apart = random.Random(f"{seed} {place}")
        faults = [fault for fault in lines[place] if fault.kind]
        apart.shuffle(faults)
        found += [fault for fault in faults if grammatical(sound, fault)][:1]
    return found


def grammatical(sound: bytes, fault: Drawn) -> bool:
    from tests.mutations.python_faults import is_grammatical as python
    from tests.mutations.shell_faults import is_grammatical as shell

    return (python if fault.file.endswith(".py") else shell)(sound, fault.applied(sound))
