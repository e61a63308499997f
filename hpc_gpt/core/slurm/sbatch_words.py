"""Reads the options that sbatch gets from a job script, SBATCH_ variables and a command line, by sbatch's own rules;
and the names of a job's output files, by the patterns of --output and --error.

Nothing is translated: sbatch gets the same words. They are read to know what the job is, and to refuse what cannot run.
"""

import itertools
import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_gpt.core.secrets import hide_secrets, hide_words
from hpc_gpt.core.slurm.directives import BLANKS, Options, options_of, script_directives

# {name in a variable: its option}, where the two differ.
_OTHER_NAMES = {
    "timelimit": "time", "array-inx": "array", "debug": "verbose", "mem-per-node": "mem", "req-switch": "switches",
    "burst-buffer": "bb", "cpu-freq-req": "cpu-freq",
}  # fmt: skip
_COUNT = re.compile(r"(\d+)([kKmM]?)")
# A part of a word in a directive: a quoted text, a character after a backslash, or one that is not quote or comment.
_WORD_PART = re.compile(
    r"""(?P<quote>["'])(?P<quoted>(?:\\.|(?!(?P=quote)).)*)(?P=quote)|\\(?P<escaped>.)|[^"'#\\]""", re.DOTALL
)
# A part of --array between commas. A number is one of C's strtol, 0 without a digit; brackets and %LIMIT may end it.
_ARRAY_PART = re.compile(
    r"\[?(?P<first>\s*[+-]?\d+)?\]?(?:-(?P<last>(?:\s*[+-]?\d+)?)\]?(?::(?P<step>\s*[+-]?\d+)\]?)?)?(?:%.*)?",
    re.ASCII | re.DOTALL,
)
_MAX_ELEMENTS = 10**7
_FIELD = re.compile(r"%(\d*)([%A-Za-z])")  # a field in a pattern of --output
_SIGNAL = re.compile(r"(?:(?P<flags>[BR]+):)?(?P<signal>\w+)(?:@(?P<lead>\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Option:
    """An option by its long name; `value` is None without one, `argv`: its words on the command line."""

    name: str
    value: str | None
    argv: tuple[str, ...]


def read_options(line: Sequence[str]) -> Iterator[Option]:
    """The options of sbatch in a line that has only options; a word that is not an option gets an empty name.

    The word after an unknown option, such as a plugin's, is its value.
    """
    return _read(list(line), options_of("sbatch"))


def read_call(line: Sequence[str], options: Options) -> tuple[dict[str, str], list[str]]:
    """Returns ({long name: value or ""}, the arguments after the options) in a call of one of Slurm's commands.

    >>> read_call(["-n4", "-K", "--nodes=2", "bash", "-l"], options_of("srun"))
    ({'ntasks': '4', 'kill-on-bad-exit': '', 'nodes': '2'}, ['bash', '-l'])
    """
    left = list(line)
    values: dict[str, str] = {}
    for option in _read(left, options):
        if not option.name:
            return values, left if option.value == "--" else [*option.argv, *left]
        values[option.name] = option.value or ""
    return values, []


def _read(left: list[str], options: Options) -> Iterator[Option]:
    """Yields the options at the beginning of `left`, and removes their words from it."""
    kinds, letters = options
    while left:
        word = left.pop(0)
        if word.startswith("--") and len(word) > 2:
            name, equals, value_text = word[2:].partition("=")
            name = options.named(name)
            follows = name not in kinds and left and not left[0].startswith("-") and left[0] != ":"
            if not equals and left and (kinds.get(name) == "valued" or follows):
                value = left.pop(0)
                yield Option(name, value, (word, value))
            else:
                yield Option(name, value_text if equals else None, (word,))
        elif word.startswith("-") and len(word) > 1 and word != "--":
            cluster = word[1:]
            while cluster:
                letter, cluster = cluster[0], cluster[1:]
                name = letters.get(letter, letter)
                kind = kinds.get(name, "plain")
                if kind == "valued" and not cluster and left:
                    value = left.pop(0)
                    yield Option(name, value, (f"-{letter}", value))
                elif kind != "plain" and cluster:
                    yield Option(name, cluster, (f"-{letter}{cluster}",))
                    cluster = ""
                else:
                    yield Option(name, None, (f"-{letter}",))
        else:
            yield Option("", word, (word,))


def chosen_clusters(directives: Sequence[str]) -> str | None:
    """The Slurm clusters that directives name; one of them runs the job. None for the default cluster.

    >>> chosen_clusters(["--nodes=2", "-M east  # the new one"]), chosen_clusters(["--nodes=2"])
    ('east', None)
    """
    options = read_options([word for line in directives for word in split_directive(line)])
    return {option.name: option.value for option in options}.get("clusters")


def options_of_variables(environment: Mapping[str, str]) -> list[str]:
    """The options that SBATCH_ variables set, as words of a command line.

    >>> options_of_variables({"SBATCH_TIMELIMIT": "9", "SBATCH_REQUEUE": "", "HOME": "/"})
    ['--requeue', '--time=9']
    """
    kinds = options_of("sbatch").kinds
    options = []
    for variable, value in sorted(environment.items()):
        if variable.startswith("SBATCH_") and not (variable == "SBATCH_CLUSTERS" and "SLURM_CLUSTERS" in environment):
            name = variable.removeprefix("SBATCH_").lower().replace("_", "-")
            name = _OTHER_NAMES.get(name, name)
            if kinds.get(name) == "plain" or (kinds.get(name) == "optional" and not value):
                options.append(f"--{name}")
            elif name in kinds:
                wait = environment.get("SBATCH_WAIT4SWITCH") if name == "switches" else None
                options.append(f"--{name}={value}" + (f"@{wait}" if wait else ""))
    if clusters := environment.get("SLURM_CLUSTERS"):  # sbatch prefers it to its own variable
        options.append(f"--clusters={clusters}")
    return options


@dataclass(frozen=True)
class Sizes:
    """The sizes that options ask for: nodes, tasks, GPUs per node. Without a request `tasks` is None, `gpus` 0."""

    nodes: int
    tasks: int | None
    gpus: int


def sizes_of(options: Mapping[str, str | None]) -> Sizes:
    """The sizes that the options {long name: value} ask for; for a range, the smallest.

    >>> sizes_of({"nodes": "2-4", "gres": "gpu:a100:8", "ntasks-per-node": "1"})
    Sizes(nodes=2, tasks=2, gpus=8)
    >>> sizes_of({"gpus-per-socket": "2", "sockets-per-node": "2"}).gpus, sizes_of({"gres": "gpu:4g.20gb:2"}).gpus
    (4, 2)
    """
    total, per_node = _count(options.get("ntasks")), _count(options.get("ntasks-per-node"))
    nodes = _count(options.get("nodes")) or (-(-total // per_node) if total and per_node else 1)
    tasks = total or (nodes * per_node if per_node else None)
    sockets = _count(options.get("sockets-per-node")) or _count(options.get("extra-node-info"))
    tasks_here = per_node or -(-(tasks or nodes) // nodes)
    per_gpu = _count(options.get("ntasks-per-gpu")) or _count(options.get("ntasks-per-tres"))
    gpus = (
        _gpus(options.get("gpus-per-node")),
        _gpus_of_tres(options.get("gres")),
        _gpus_of_tres(options.get("tres-per-node")),
        _gpus(options.get("gpus-per-socket")) * sockets,
        -(-_gpus(options.get("gpus")) // nodes),
        _gpus(options.get("gpus-per-task")) * tasks_here,
        _gpus_of_tres(options.get("tres-per-task")) * tasks_here,
        -(-tasks_here // per_gpu) if per_gpu and tasks else 0,
    )
    return Sizes(nodes, tasks, next(filter(None, gpus), 0))


def _count(text: str | None) -> int:
    match = _COUNT.match(text or "")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0


def _gpus(text: str | None) -> int:
    """The number of GPUs in `4`, `a100:4`, `a100` or `a100:2,v100:2`; a type without a number counts 1.

    >>> _gpus("4090:4"), _gpus("1g.5gb"), _gpus("a100:2,v100:1"), _gpus("a100:4(S:0-1)"), _gpus(None)
    (4, 1, 3, 4, 0)
    """
    counts = [part.partition("(")[0].rpartition(":")[2] for part in (text or "").split(",") if part]
    return sum(_count(count) if _COUNT.fullmatch(count) else 1 for count in counts)


def _gpus_of_tres(text: str | None) -> int:
    """The number of GPUs in `gpu:4090:4`, `gres:gpu:2`, `cpu=8,gres/gpu:a100=2` or `gpu`."""
    requests = re.findall(r"(?:^|,)(?:gres[/:])?gpu(?:[:=]([^,]+))?(?=$|,)", text or "")
    return sum(_gpus(gpus.replace("=", ":") or "1") for gpus in requests)


@dataclass(frozen=True)
class LimitSignal:
    """The value of `--signal`: the signal, seconds before the time limit, and whether only the batch shell gets it."""

    name: str
    lead_s: int
    to_shell: bool

    @property
    def number(self) -> int:
        """The number of the signal; 0 if this machine does not know it."""
        named = signal.Signals.__members__.get(f"SIG{self.name}", 0)
        return int(self.name) if self.name.isdecimal() else int(named)


def signal_of(text: str) -> LimitSignal | None:
    """Parses the value of `--signal`; None if sbatch would refuse it.

    >>> signal_of("B:USR1@120")
    LimitSignal(name='USR1', lead_s=120, to_shell=True)
    """
    match = _SIGNAL.fullmatch(text)
    if match is None:
        return None
    flags = (match["flags"] or "").upper()
    return LimitSignal(match["signal"].upper().removeprefix("SIG"), int(match["lead"] or 60), "B" in flags)


def array_numbers(text: str) -> list[int]:
    """The elements in the value of `--array`, as slurmctld parses it; empty if it would refuse it, or has no element.

    >>> array_numbers("0-6:3,9%4"), array_numbers("[2-3]%1"), array_numbers("3,")
    ([0, 3, 6, 9], [2, 3], [3])
    """
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        if (match := _ARRAY_PART.fullmatch(part)) is None:
            return []
        first = int(match["first"] or 0)
        last = first if match["last"] is None else int(match["last"] or 0)
        step = 1 if match["step"] is None else int(match["step"])
        if not 0 <= first <= last <= first + _MAX_ELEMENTS or step < 1:
            return []
        numbers |= {*range(first, last + 1, step)}
    return sorted(numbers)


def array_variables(numbers: Sequence[int]) -> dict[str, str]:
    """The variables that all elements of an array have.

    >>> array_variables([3, 5, 7])["SLURM_ARRAY_TASK_STEP"], array_variables([1, 2, 9])["SLURM_ARRAY_TASK_STEP"]
    ('2', '1')
    """
    steps = {later - number for number, later in itertools.pairwise(numbers)}
    step = steps.pop() if len(steps) == 1 else 1
    values = {"COUNT": len(numbers), "MIN": min(numbers), "MAX": max(numbers), "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def split_directive(line: str) -> list[str]:
    r"""Splits a line after `#SBATCH` into words, like sbatch: a backslash also counts within quotes, an unquoted `#`
    begins a comment, and only a blank of C's isspace ends a word. ValueError if a quote has no end.

    >>> split_directive(r"--comment='a # \b' -n4  # four")
    ['--comment=a # b', '-n4']
    """
    parts: list[str] = []
    place, inside = 0, False
    while place < len(line) and line[place] != "#":
        if line[place] in BLANKS:
            place, inside = place + 1, False
            continue
        match = _WORD_PART.match(line, place)
        if match is None:
            if line[place] == "\\":  # at the end of the line
                break
            raise ValueError(f"a quote has no end: {line}")
        text = match["escaped"] or match[0]
        if match["quote"]:
            text = re.sub(r"\\(.)", r"\1", match["quoted"])
        parts[-1:] = [parts[-1] + text] if inside else [*parts[-1:], text]
        place, inside = match.end(), True
    return parts


def shown_directives(script: str) -> str:
    """The directives of a script on one line, without possible secrets."""
    lines = script_directives(script)
    try:
        words = [word for line in lines for word in split_directive(line)]
    except ValueError:
        return hide_secrets(" ".join(lines))
    hidden = hide_words(words)
    return " ".join(lines) if hidden == words else shlex.join(hidden)


def expand_pattern(pattern: str, environment: Mapping[str, str], user: str = "") -> str:
    r"""The file name that sbatch's pattern gives for the job with an environment.

    >>> expand_pattern("log/%x-%4j.out", {"SLURM_JOB_NAME": "gpt", "SLURM_JOB_ID": "7"})
    'log/gpt-0007.out'
    """
    if "\\" in pattern:  # then sbatch replaces nothing
        return pattern.replace("\\", "")
    job = environment.get("SLURM_JOB_ID", "")
    values = {
        "%": "%",
        "A": environment.get("SLURM_ARRAY_JOB_ID", job),
        "a": environment.get("SLURM_ARRAY_TASK_ID", "4294967294"),
        "J": job,
        "j": job,
        "N": (environment.get("SLURMD_NODENAME") or "").partition(".")[0],
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": user,
        "x": environment.get("SLURM_JOB_NAME", ""),
    }

    def value(match: re.Match[str]) -> str:
        text = values.get(match[2])
        if text is None:
            return match[0]
        return text.zfill(min(int(match[1] or 0), 10)) if text.isdigit() else text

    return _FIELD.sub(value, pattern)
