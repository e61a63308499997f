"""What a job asks for: the directives of its script and sbatch's own line, read as sbatch reads them."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from hpc_gpt.job_time import limit_s
from hpc_gpt.launch.render import script_directives
from hpc_gpt.rehearsal.options import parse_options

_AHEAD_S = 60


class RequestFault(ValueError):
    """What sbatch or srun refuses, in its words."""


@dataclass(frozen=True)
class SignalAhead:
    """`--signal=[B:]NUMBER@SECONDS`: sent that long before the time limit, to the ranks or to the script alone."""

    number: int
    lead_s: int
    to_script: bool


@dataclass(frozen=True)
class Request:
    """One job's request. `limit_s` None: no limit. `begin` is epoch seconds. `array`: the elements' numbers."""

    name: str
    nodes: int
    ntasks: int
    ntasks_per_node: int | None
    gpus_per_node: int
    cpus_per_task: int | None
    limit_s: int | None
    requeue: bool
    append: bool
    output: str | None
    error: str | None
    signal: SignalAhead | None
    dependency: str | None
    begin: float
    exclude: str | None
    nodelist: str | None
    export: str
    chdir: str | None
    held: bool
    array: tuple[int, ...]
    array_words: str
    at_once: int | None
    options: Mapping[str, str]


def read_request(script: str, line: Mapping[str, str], name: str, now: float) -> Request:
    """The request of a script whose file is `name`; sbatch's line, parsed, lies over the script's directives.

    Raises OptionFault, RequestFault.
    """
    words = [word for directive in script_directives(script) for word in _split(directive)]
    options = {**parse_options("sbatch", words)[0], **line}
    nodes = _count(options, "nodes")
    per_node = _count(options, "ntasks-per-node")
    ntasks = _count(options, "ntasks")
    if nodes is None:
        nodes = max(1, -(-(ntasks or 1) // per_node)) if per_node else 1
    array, words_of_array, at_once = _array(options.get("array"))
    return Request(
        name=options.get("job-name", "wrap" if "wrap" in options else name),
        nodes=nodes,
        ntasks=ntasks or nodes * (per_node or 1),
        ntasks_per_node=per_node,
        gpus_per_node=_gpus(options, nodes),
        cpus_per_task=_count(options, "cpus-per-task"),
        limit_s=_limit(options.get("time")),
        requeue="requeue" in options or "no-requeue" not in options,
        append=options.get("open-mode") in ("append", "a"),
        output=options.get("output"),
        error=options.get("error"),
        signal=read_signal(options.get("signal")),
        dependency=options.get("dependency"),
        begin=read_time(options.get("begin"), now),
        exclude=options.get("exclude"),
        nodelist=options.get("nodelist"),
        export=options.get("export", "ALL"),
        chdir=options.get("chdir"),
        held="hold" in options,
        array=array,
        array_words=words_of_array,
        at_once=at_once,
        options=options,
    )


def _split(directive: str) -> list[str]:
    try:
        return shlex.split(directive, comments=True)
    except ValueError:
        raise RequestFault(f"Unmatched quote in a directive: {directive}") from None


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\d+(-\d+)?", text) or int(text.partition("-")[0]) < 1:
        raise RequestFault(f'invalid {name.replace("-", " ")} specification "{text}"')
    return int(text.partition("-")[0])


def _gpus(options: Mapping[str, str], nodes: int) -> int:
    """GPUs on each node, by --gres, --gpus-per-node or --gpus."""
    for resource in options.get("gres", "").split(","):
        kind, *rest = resource.split(":")
        if kind == "gpu":
            return int(rest[-1]) if rest and rest[-1].isdigit() else 1
    for name, share in (("gpus-per-node", 1), ("gpus", nodes)):
        count = options.get(name, "").rpartition(":")[2]
        if count.isdigit():
            return -(-int(count) // share)
    return 0


def _limit(text: str | None) -> int | None:
    """Seconds of --time, in whole minutes as Slurm counts them."""
    try:
        limit = limit_s(text)
    except ValueError:
        raise RequestFault("Invalid --time specification") from None
    return None if limit is None else -(-limit // 60) * 60


def read_signal(text: str | None) -> SignalAhead | None:
    """`--signal=USR2@120`; RequestFault where it names no signal.

    >>> read_signal("B:TERM")
    SignalAhead(number=15, lead_s=60, to_script=True)
    """
    if text is None:
        return None
    found = re.fullmatch(r"(?:(R?B?R?):)?([A-Za-z0-9]+)(?:@(\d+))?", text)
    number = signal_number(found[2]) if found else None
    if found is None or number is None:
        raise RequestFault(f"Invalid --signal specification: {text}")
    return SignalAhead(number, int(found[3] or _AHEAD_S), "B" in (found[1] or ""))


def signal_number(word: str) -> int | None:
    """A signal by its name, with or without SIG, or its number.

    >>> signal_number("SIGUSR2") == signal_number("usr2") == signal.SIGUSR2
    True
    """
    if word.isdigit():
        return int(word) if int(word) in {*signal.Signals} else None
    try:
        return signal.Signals["SIG" + word.upper().removeprefix("SIG")].value
    except KeyError:
        return None


def read_time(text: str | None, now: float) -> float:
    """Epoch seconds of a time as --begin and StartTime take it: `now+20`, `now+1hour`, `2026-11-20T10:00:00`, epoch.

    RequestFault where it is none.
    """
    if text is None or text.lower() == "now":
        return now
    if found := re.fullmatch(r"now([+-]\d+)([a-z]*)", text):
        unit = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}.get(found[2][:1])
        if unit is not None:
            return now + int(found[1]) * unit
    if text.isdigit():
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise RequestFault(f"Invalid time specification (pos=0): {text}") from None


def _array(text: str | None) -> tuple[tuple[int, ...], str, int | None]:
    """(the numbers, the words without the limit, how many at once) of --array."""
    if text is None:
        return (), "", None
    words, _, most = text.partition("%")
    numbers: list[int] = []
    for part in words.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if found is None or (most and not most.isdigit()):
            raise RequestFault(f"Invalid job array specification: {text}")
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1))
    return tuple(numbers), words, int(most) if most else None


def output_path(pattern: str, fields: Mapping[str, str]) -> str:
    """A file's name with its %-fields filled in: `%x-%j.out`. What has no field stays; `%%` is one %."""

    def fill(found: re.Match[str]) -> str:
        if found[2] == "%":
            return "%"
        value = fields.get(found[2])
        return found[0] if value is None else value.zfill(int(found[1] or 0)) if value.isdigit() else value

    return re.sub(r"%(\d*)([a-zA-Z%])", fill, pattern)
