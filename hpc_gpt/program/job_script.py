"""A job script of the user's own: its bytes, its directives, why it is refused, and what in it is worth a look.

A file that begins with `#!` is one, whatever its name. Nothing in it is executed here, and nothing of it is changed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.errors import ConfigError, OsErrorAs
from hpc_gpt.secrets import hide_secrets
from hpc_gpt.slurm.sbatch_words import Option, read_options, split_directive

_LARGEST = 4 << 20  # slurm.conf's own limit for a script, unless it is set
_DIRECTIVE = re.compile(rb"#SBATCH(?=\s)")
_RENDERED = re.compile(rb"^# Rendered by hpc-gpt ", re.MULTILINE)
_OTHERS = (
    (re.compile(rb"^#PBS\s"), "#PBS", "a script for PBS: write its options as #SBATCH lines"),
    (re.compile(rb"^#BSUB\s"), "#BSUB", "a script for LSF: write its options as #SBATCH lines"),
    (re.compile(rb"^#SBATCH\s+(?:hetjob|packjob)\b"), "a heterogeneous job", "submit it with sbatch"),
)
# What the chain decides: sbatch gets these from us.
OF_THE_CHAIN = frozenset({"requeue", "no-requeue", "open-mode", "output", "error"})
# Options of sbatch that make it another command.
_REFUSED = {
    "wrap": "submit the script's file",
    "test-only": "hpc-gpt submit --dry-run asks it",
    "parsable": "hpc-gpt status --json prints ids",
    "uid": "submit it as that user",
    "gid": "submit it as that user",
}
# (words in a line of the body, what they do under the chain).
_WORDS = (
    (re.compile(r"(?<![\w./-])sbatch\b(?!\s*\()"), "submits another job, which is none of this run's"),
    (re.compile(r"(?<![\w./-])(?:pkill|killall)\b"), "ends processes by name: of every job of yours on the node"),
    (
        re.compile(r"--exit[-_]duration[-_]in[-_]mins"),
        "ends it before its last step: is it to be continued?",
    ),
    (re.compile(r"\bscontrol\s+requeue\b"), "requeues its own job: the run's next attempt, once"),
)
# What a line only prints, such as its usage; a command within "$(…)" runs.
_SAID = re.compile(r"""\b(?:echo|printf)\s+(?:-\w+\s+)*(?:"[^"$`]*(?:\$[^("`][^"$`]*)*"|'[^']*')""")


@dataclass(frozen=True)
class Caution:
    """A line of the script that is worth a look."""

    line: int
    text: str
    means: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}: {self.means}"


@dataclass(frozen=True)
class JobScript:
    """A job script: its file, its bytes, the text of each directive's line, and the options in them."""

    path: Path
    data: bytes
    directives: tuple[str, ...]
    options: tuple[Option, ...]

    @property
    def body_hash(self) -> str:
        """16 hex digits of the script without its directives."""
        lines = [line for line in self.data.splitlines() if not _DIRECTIVE.match(line)]
        return hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]


def is_job_script(path: Path) -> bool:
    """Whether a file begins with `#!`."""
    try:
        with path.open("rb") as file:
            return path.is_file() and file.read(2) == b"#!"
    except OSError:
        return False


def read_job_script(path: Path) -> JobScript:
    """The job script at a path. Raises ConfigError for what sbatch or the chain cannot take."""
    with OsErrorAs(ConfigError, str(path), "name a job script"):
        data = path.read_bytes()
    if _RENDERED.search(data[:4096]):
        raise ConfigError(f"{path} is a script that hpc-gpt rendered", f"sbatch {path} starts it")
    if len(data) > _LARGEST:
        raise ConfigError(f"{path} has {len(data)} bytes, and Slurm takes {_LARGEST}", "is it a program?")
    if b"\0" in data:
        raise ConfigError(f"{path} holds a NUL, which Slurm does not take", "is it a program, not a script?")
    if b"\r\n" in data:
        raise ConfigError(f"{path} has line breaks of DOS, which sbatch does not take", f"dos2unix {path}")
    directives, words = [], []
    for number, line in enumerate(_head(data), 1):
        for pattern, what, hint in _OTHERS:
            if pattern.match(line):
                raise ConfigError(f"{path}:{number}: {what} does not run here", hint)
        if _DIRECTIVE.match(line):
            text = line[7:].decode(errors="surrogateescape").strip()
            try:
                words += split_directive(text)
            except ValueError:
                raise ConfigError(f"{path}:{number}: a quote has no end: {text}", "sbatch refuses it") from None
            directives.append(text)
    options = tuple(read_options(words))
    check_options(options, str(path))
    return JobScript(path, data, tuple(directives), options)


def check_options(options: Sequence[Option], where: str) -> None:
    """ConfigError for an option that a script cannot have here."""
    for option in options:
        if option.name == "" and option.value == ":":
            raise ConfigError(f"{where}: a heterogeneous job does not run here", "submit it with sbatch")
        if option.name == "":
            raise ConfigError(f"{where}: {option.value!r} is no option of sbatch", "write --name=value")
        if option.name.startswith("container"):
            raise ConfigError(
                f"{where}: --{option.name} starts the whole job in a container, and hpc-gpt with it",
                "give it to srun in the script",
            )
        if option.name in _REFUSED:
            raise ConfigError(f"{where}: --{option.name} is not for a run", _REFUSED[option.name])


def _head(data: bytes) -> Iterator[bytes]:
    """The lines up to the first command, at which sbatch stops reading."""
    for line in data.splitlines():
        if line.strip() and not line.startswith(b"#"):
            return
        yield line


def scan(script: JobScript) -> list[Caution]:
    """The lines of the body that are worth a look, with what they mean under the chain."""
    found = []
    for number, line in enumerate(script.data.decode(errors="replace").splitlines(), 1):
        text = line.strip()
        if not text or (text.startswith("#") and number > 1):
            continue
        shown = hide_secrets(text)
        if shown != text:
            found.append(Caution(number, f"{shown:.60}", "a secret: the run's job.sh holds it, readable for you alone"))
        bare = _SAID.sub("", line.partition(" #")[0])
        found += [Caution(number, f"{shown:.60}", means) for pattern, means in _WORDS if pattern.search(bare)]
    return found


def last_values(*layers: Sequence[Option]) -> Mapping[str, str | None]:
    """{long name: value} of several lists of options, of which the later ones win."""
    return {option.name: option.value for layer in layers for option in layer}
