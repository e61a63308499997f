"""A job script of the user's own: its bytes, its directives, why it is refused, and the lines that are worth a look.
Also writes the experiment that runs it as it is, and the profile of its site.

A file that begins with `#!` is a job script, whatever its name. This module executes and changes nothing in it.
"""

import hashlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.core.errors import ConfigError, OsErrorAs
from hpc_gpt.core.format import some
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.slurm.directives import BLANKS, DIRECTIVE, is_command, quote_directive
from hpc_gpt.core.slurm.sbatch_words import Option, read_options, split_directive
from hpc_gpt.core.slurm.script_lines import logical_lines, redirected
from hpc_gpt.trainer.program.script_steps import steps_of

_LARGEST = 4 << 20  # the default limit of slurm.conf for a script
_WITHOUT_MARK = re.compile(r"\s*SBATCH\s+-")  # a beginner's mistake
_APART = re.compile(r"#\s+SBATCH\s+-")  # not read either
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(?P<quote>[\"']?)(?P<end>[A-Za-z_]\w*)(?P=quote)")
_RENDERED = re.compile(rb"^# Rendered by hpc-gpt ", re.MULTILINE)
_OTHERS = (
    (re.compile(r"#PBS\s"), "#PBS", "a script for PBS: write its options as #SBATCH lines"),
    (re.compile(r"#BSUB\s"), "#BSUB", "a script for LSF: write its options as #SBATCH lines"),
    (re.compile(r"#SBATCH\s*(?:hetjob|packjob)\b"), "a heterogeneous job", "submit it with sbatch"),
)
# The first line of a script that bash runs, or could run.
_SHELL = re.compile(rb"#![ \t]*(?:\S*/)?(?:env[ \t]+(?:-S[ \t]+)?(?:\S*/)?)?(?:ba)?sh(?=\s|$)")
# Options that turn sbatch into another command.
_REFUSED = {
    "wrap": "write the command to a file that begins with #!/bin/bash, and submit that file",
    "test-only": "hpc-gpt submit --dry-run asks it",
    "uid": "submit it as that user",
    "gid": "submit it as that user",
    **dict.fromkeys(("help", "usage", "version"), "it only prints: leave it out"),
}
# {option that is left out, as sbatch's answer belongs to the run: the reason}.
_AT_ONCE = "the run needs sbatch's answer at once"
LEFT_OUT = {"wait": _AT_ONCE, "quiet": _AT_ONCE, "parsable": "hpc-gpt submit --json prints the job's id"}
# A dash of a text processor in place of a hyphen, at the beginning of an option.
_OTHER_DASH = re.compile(r"-{0,2}[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]+-*")
_OF_LETTER = re.compile(r"[A-Za-z](?:[^A-Za-z].*)?", re.DOTALL)
# Ends the options.
_NO_MORE = Option("", "--", ("--",))
# (words in a line of the body, their effect under the job chain).
_SUBMITS = re.compile(r"(?<![\w./-])sbatch\b(?!\s*\()")
# A guard: if the script is started by hand, it submits itself.
_NOT_IN_JOB = re.compile(r"(?:-z|!)\s[^;\n]*\bSLURM_JOB_?ID\b|SLURM_JOB_?ID\S*\s+==?\s")
_GUARD_LINES = 5
# Programs that a script may start beside a training, and another job, too.
_AFTER_TRAINING = re.compile(
    r"(?i)(?:eval|test|valid|infer|convert|export|upload|download|prepare|plot|score|env|setup)"
)
_PROGRAM = re.compile(r"([\w./-]+\.py)\b|\s-m\s+(?!torch\.|accelerate\b)([\w.]+)|\b(?:bash|sh)\s+([\w./-]+\.sh)\b")
_SUBMITS_BY_HAND = "submits the script itself if SLURM_JOB_ID is not set, as on a machine without Slurm"
_SUBMITS_AGAIN = "submits this script once more, although the job chain continues it: remove the line"
_SUBMITS_ANOTHER = (
    "submits another job, which is not part of this run; if it is meant to continue this run, remove the line: "
    "the job chain does that"
)
_WORDS = (
    (re.compile(r"(?<![\w./-])(?:pkill|killall)\b"), "ends processes by name, in all of your jobs on the node"),
    (
        re.compile(r"--exit[-_]duration[-_]in[-_]mins"),
        "ends the program before its last step: should the job chain continue it?",
    ),
    (
        re.compile(r"\bCommand=|\bsqueue\b.*%\.?\d*o\b"),
        "the job's command is the run's job.sh, not this script; the folder of the submission is SLURM_SUBMIT_DIR",
    ),
    (re.compile(r"\bscontrol\s+requeue\b"), "requeues its own job: this makes the run's next attempt, once"),
    (
        re.compile(r"\bscontrol\s+requeuehold\b"),
        "requeues its own job and holds it: the run's next attempt starts after scontrol release",
    ),
)
# Words by which a script tells its program to load a checkpoint.
_RESUMES = re.compile(
    r"(?i)--(?:auto[-_])?(?:resume|load|restore|continue)(?![A-Za-z])(?![-_](?:dataset|data|in)\b)[\w-]*|\bresume_from\w*|\bckpt_path\b"
    r"|\bload_checkpoint\b|\bHPC_GPT_(?:RESUME_FROM|CHECKPOINTS)\b|\bresume\s*="
)
_SHARES_A_CORE = (
    "one task starts all ranks of the node, and srun may give it a single core (from Slurm 22.05 on it does not take "
    "over #SBATCH --cpus-per-task): srun --cpus-per-task=N with all cores of the node, or --cpu-bind=none"
)
# Text that a line only prints, such as its usage; a command within "$(…)" runs.
_SAID = re.compile(r"""\b(?:echo|printf)\s+(?:-\w+\s+)*(?:"[^"$`]*(?:\$[^("`][^"$`]*)*"|'[^']*')""")


@dataclass(frozen=True)
class Caution:
    """A line of the script that is worth a look, and what it means."""

    line: int
    text: str
    means: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}: {self.means}"


@dataclass(frozen=True)
class JobScript:
    """A job script: its file, its bytes, the text of each directive, and the options in the directives. `late`: the
    lines of directives after the first command, which is in line `stops`: sbatch does not read them. `left_out`: its
    options that are not in `options`."""

    path: Path
    data: bytes
    directives: tuple[str, ...]
    options: tuple[Option, ...]
    late: tuple[int, ...] = ()
    stops: int = 0
    left_out: tuple[Option, ...] = ()

    @property
    def body_hash(self) -> str:
        """16 hex digits of the script without its directives."""
        lines = [line for line in self.data.splitlines() if not line.startswith(DIRECTIVE.encode())]
        return hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]


def read_job_script(path: Path) -> JobScript:
    """The job script at a path. Raises ConfigError for what sbatch or the chain cannot take."""
    with OsErrorAs(ConfigError, str(path), "name a job script"):
        data = path.read_bytes()
    if _RENDERED.search(data[:4096]):
        raise ConfigError(f"{path} is a script that hpc-gpt rendered", f"sbatch {path} starts it")
    if len(data) > _LARGEST:
        raise ConfigError(f"{path} has {len(data)} bytes, and Slurm takes at most {_LARGEST}", "is it a program?")
    if b"\0" in data:
        raise ConfigError(f"{path} holds a NUL, which Slurm does not take", "is it a program, not a script?")
    if b"\r\n" in data:
        raise ConfigError(f"{path} has DOS line breaks, which sbatch does not take", f"dos2unix {path}")
    lines = data.decode(errors="surrogateescape").split("\n")
    head = len(list(itertools.takewhile(lambda line: not is_command(line), lines)))
    directives, every_word = [], []
    for number, line in enumerate(lines[:head], 1):
        for pattern, what, hint in _OTHERS:
            if pattern.match(line):
                raise ConfigError(f"{path}:{number}: {what} does not run here", hint)
        if line.startswith(DIRECTIVE):
            text = line.removeprefix(DIRECTIVE).strip(BLANKS)
            try:
                words_here = split_directive(text)
            except ValueError:
                raise ConfigError(f"{path}:{number}: a quote has no end: {text}", "sbatch refuses it") from None
            every_word += words_here
            _check_dashes(words_here, f"{path}:{number}")
            every = list(read_options(words_here))
            remaining = [option for option in without_waits(every) if option != _NO_MORE]
            if "#" in text or remaining != every:
                text = " ".join(quote_directive(word) for option in remaining for word in option.argv)
            directives += [text] if text else []
    options = tuple(read_options(every_word))
    options = options[:-1] if options[-1:] == (_NO_MORE,) else options  # sbatch takes it only at the end
    check_options(options, str(path))
    body = list(_body(lines, head))
    late = tuple(number for number, line in body if line.startswith(DIRECTIVE))
    remaining = without_waits(options)
    left_out = tuple(option for option in options if option not in remaining)
    script = JobScript(path, data, tuple(directives), tuple(remaining), late, head + 1, left_out)
    _check_marks(script, body)
    _check_syntax(path, data)
    return script


def without_waits(options: Iterable[Option]) -> list[Option]:
    """The options without those of `LEFT_OUT`."""
    return [option for option in options if option.name not in LEFT_OUT]


def _body(lines: Sequence[str], head: int) -> Iterator[tuple[int, str]]:
    """Yields (number, text) for the lines after the head, without the here-documents of a `<<`."""
    end: str | None = None
    for number, line in enumerate(lines[head:], head + 1):
        if end is not None:
            end = None if line.strip() == end else end
            continue
        yield number, line
        if (heredoc := _HEREDOC.search(line)) and not line.lstrip().startswith("#") and "((" not in line:
            end = heredoc["end"]


def _check_marks(script: JobScript, body: Sequence[tuple[int, str]]) -> None:
    """Raises ConfigError for `SBATCH --…` without a #, and if sbatch reads none of the directives."""
    without = {number: line.strip() for number, line in body if _WITHOUT_MARK.match(line)}
    if without:
        first, *others = without
        raise ConfigError(
            f"{script.path}:{first}: {without[first]:.60}: sbatch reads only lines that begin with {DIRECTIVE}"
            + (f" (also line {_numbers(others)})" if others else ""),
            f"write #{without[first]}",
        )
    if script.late and not script.options:
        raise ConfigError(
            f"{script.path}: sbatch reads no directive after the first command, which is in line {script.stops}: "
            f"{body[0][1].strip():.60}; it would ignore those in line {_numbers(script.late)}",
            f"move the {DIRECTIVE} lines above it",
        )


def _numbers(lines: Sequence[int]) -> str:
    return some([str(number) for number in lines], 8)


def _check_syntax(path: Path, data: bytes) -> None:
    """Raises ConfigError for a script of bash or sh that bash cannot read. The second try has `extglob`: the script may
    allow such patterns by a `shopt`, which `bash -n` does not run."""
    if not _SHELL.match(data) or shutil.which("bash") is None:
        return
    environment = {name: value for name, value in os.environ.items() if name not in ("BASH_ENV", "ENV")}
    environment |= {"LC_ALL": "C"}
    for options in ((), ("-O", "extglob")):
        done = subprocess.run(
            ["bash", *options, "-n", "--", str(path.absolute())], env=environment, capture_output=True, check=False
        )
        if not done.returncode:
            return
    messages = done.stderr.decode(errors="replace").replace(f"{path.absolute()}: ", "").strip().splitlines()
    raise ConfigError(
        f"bash cannot read {path}: {'; '.join(messages[:2]) or f'exit code {done.returncode}'}",
        f"bash -n {path} shows it",
    )


def _check_dashes(words: Sequence[str], where: str) -> None:
    """Raises ConfigError for an option that begins with another dash than a hyphen."""
    values = {option.argv[1] for option in read_options(words) if len(option.argv) > 1}
    for word in words:
        if (dash := _OTHER_DASH.match(word)) and word not in values:
            other = dash[0].strip("-")[0]
            name = word[dash.end() :]
            raise ConfigError(
                f"{where}: {word!r} begins with {other!r} (U+{ord(other):04X}): sbatch takes only hyphens",
                f"write {'-' if _OF_LETTER.fullmatch(name) else '--'}{name}",
            )


def check_options(options: Sequence[Option], where: str) -> None:
    """Raises ConfigError for an option that a job script cannot have."""
    _check_dashes([word for option in options for word in option.argv], where)
    for option in options:
        if option == _NO_MORE:
            raise ConfigError(f"{where}: sbatch takes no option after --", "remove the --")
        if option.name == "" and option.value == ":":
            raise ConfigError(f"{where}: a heterogeneous job does not run here", "submit it with sbatch")
        if option.name == "":
            raise ConfigError(f"{where}: {option.value!r} is not an option of sbatch", "write --name=value")
        if option.name.startswith("container"):
            raise ConfigError(
                f"{where}: --{option.name} starts the whole job in a container, and hpc-gpt with it",
                "give it to srun in the script",
            )
        if option.name in _REFUSED:
            raise ConfigError(f"{where}: --{option.name} is not for a run", _REFUSED[option.name])


def scan(script: JobScript) -> list[Caution]:
    """Finds the lines that are worth a look, with what they mean under the job chain."""
    notes = []
    lines = script.data.decode(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if number in script.late:
            means = f"sbatch does not read it: it is after the first command, which is in line {script.stops}"
            notes.append(Caution(number, f"{text:.60}", means))
        if number <= script.stops and _APART.match(line):
            notes.append(Caution(number, f"{text:.60}", f"sbatch does not read it: {DIRECTIVE} is one word"))
        if not text or (text.startswith("#") and number > 1):
            continue
        shown = hide_secrets(text)
        if shown != text:
            notes.append(Caution(number, f"{shown:.60}", "a secret: it is in the run's job.sh, for you alone to read"))
        bare = _SAID.sub("", line.partition(" #")[0])
        notes += [Caution(number, f"{shown:.60}", means) for pattern, means in _WORDS if pattern.search(bare)]
        if _SUBMITS.search(bare):
            before = "\n".join(lines[max(0, number - _GUARD_LINES) : number])
            arguments = _SUBMITS.split(bare, maxsplit=1)[1]
            own = rf"(?<![\w.-]){re.escape(script.path.name)}(?![\w.-])|\$\{{?(?:0|BASH_SOURCE)\b"
            again = re.search(own, arguments)
            means = _SUBMITS_BY_HAND if _NOT_IN_JOB.search(before) else _SUBMITS_AGAIN if again else _SUBMITS_ANOTHER
            notes.append(Caution(number, f"{shown:.60}", means))
    for step in steps_of("\n".join(lines), last_values(script.options)):
        if step.shares_a_core:
            notes.append(Caution(step.line, f"{hide_secrets(lines[step.line - 1].strip()):.60}", _SHARES_A_CORE))
    for redirection in redirected("\n".join(lines)):
        where = redirection.target or "files of torchrun's own"
        means = f"its output goes to {where}, not to the run's log; why and status read it there if they find it"
        notes.append(Caution(redirection.line, f"{hide_secrets(lines[redirection.line - 1].strip()):.60}", means))
    return sorted(notes, key=lambda caution: caution.line)


def find_resume(script: JobScript) -> tuple[int, str] | None:
    """Returns (line, its words) of the first line in which the script tells its program to load a checkpoint; None
    without one: then only the program itself may do it."""
    for number, line in enumerate(script.data.decode(errors="replace").split("\n"), 1):
        if not line.lstrip().startswith("#") and (words := _RESUMES.search(line.partition(" #")[0])):
            return number, words[0]
    return None


def submits_itself(script: JobScript) -> Caution | None:
    """The first line that calls sbatch; None without one."""
    return next((caution for caution in scan(script) if caution.means.startswith("submits ")), None)


def last_values(*layers: Sequence[Option]) -> Mapping[str, str | None]:
    """Merges lists of options to {long name: value}; later lists win."""
    return {option.name: option.value for layer in layers for option in layer}


def submits_again(name: Path, data: bytes) -> tuple[int, bool] | None:
    """Returns (the line in which the script with this name submits itself, whether it does so only outside a job); None
    if it does not submit itself."""
    means = {_SUBMITS_BY_HAND: True, _SUBMITS_AGAIN: False}
    cautions = [caution for caution in scan(JobScript(name, data, (), ())) if caution.means in means]
    return (cautions[0].line, means[cautions[0].means]) if cautions else None


def programs_of(text: str) -> set[str]:
    """The names of the programs that a script starts, not by sbatch, and that may train: files of Python, modules, and
    scripts of a shell.

    >>> sorted(programs_of("#!/bin/bash\\nsrun python -u src/train.py --lr=1\\n# python old.py\\nbash ./run.sh\\n"))
    ['run.sh', 'train.py']
    """
    lines = [line for _, line in logical_lines(text) if not line.lstrip().startswith("#") and not _SUBMITS.search(line)]
    found = {os.path.basename(match[match.lastindex or 0]) for line in lines for match in _PROGRAM.finditer(line)}
    return {name for name in found if not _AFTER_TRAINING.match(name)}


def without_suffix(name: str) -> str:
    """A script's or a job's name without the suffix of a script.

    >>> without_suffix("train.slurm"), without_suffix("llama-3.1-8b")
    ('train', 'llama-3.1-8b')
    """
    return re.sub(r"(?<=.)\.(?:slurm|sbatch|sh|job|bash|sub|py)$", "", name)
