"""The peers of `bench --peer`: the user's own programs, each a row with engine `command`."""

import contextlib
import re
from collections.abc import Sequence

from hpc_gpt.core.errors import raise_faults
from hpc_gpt.core.runs.provenance import known_gpus
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, Job, LayoutRequest, Train
from hpc_gpt.core.settings.resolve import size_run
from hpc_gpt.launcher.bench_rows import KILL_LEAD_S, BenchCell
from hpc_gpt.launcher.prepare import finish, predict_run

_PEER = re.compile(r"\s*(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*=(?P<command>.*\S.*)", re.DOTALL)
_EXAMPLE = "for example --peer nanogpt='python ~/nanoGPT/train.py --compile=True'"
PATTERN_EXAMPLE = r"for example --peer-pattern '([\d,.]+) tok/s': its one group is the figure of a line"


def read_peers(
    peers: Sequence[str], patterns: Sequence[str], taken: Sequence[str] = ()
) -> dict[str, tuple[str, str | None]]:
    """{name: (line for a shell, pattern of its tokens/s if it has one)} from the values of `--peer` (`NAME=COMMAND`)
    and `--peer-pattern` (`NAME=REGEX`, or `REGEX` for all others). `taken`: names that no peer may have. Raises
    ConfigError with all faults at once."""
    faults = ["--peer-pattern reads the output of a peer, but there is no --peer"] if patterns and not peers else []
    commands, by_peer = dict[str, str](), dict[str, str]()
    for value in peers:
        match = _PEER.fullmatch(value)
        if match is None:
            faults.append(f"--peer {hide_secrets(value)!r} is not NAME='COMMAND' with a name of letters, digits, . _ -")
        elif match["name"] in (*commands, *taken):
            faults.append(f"--peer {match['name']}: another row has that name")
        else:
            commands[match["name"]] = match["command"]
    for value in patterns:
        name, _, regex = value.partition("=")
        name, text = (name, regex) if name in commands else ("", value)
        with contextlib.suppress(re.error, OverflowError, RecursionError):
            if re.compile(text).groups == 1 and by_peer.setdefault(name, text) is text:
                continue
        fault = (
            "is a second one for the same peers" if name in by_peer else "is not a regular expression with one group"
        )
        faults.append(f"--peer-pattern '{text}' {fault}")
    example = PATTERN_EXAMPLE if commands and len(commands) == len(peers) else _EXAMPLE
    raise_faults(dict.fromkeys(faults, example))
    return {name: (line, by_peer.get(name, by_peer.get(""))) for name, line in commands.items()}


def prepare_peer(name: str, command: str, pattern: str | None, profile: ClusterProfile) -> BenchCell:
    """The peer's run: the command as it is, once, in the current folder. Raises ConfigError."""
    run = re.sub(r"(?<!\$)\{(\w+)\}", r"{{\1}}", command)  # none of its braces is a placeholder of [command]
    experiment = Experiment(
        name=name,
        engine=Engine("command"),
        layout=LayoutRequest(gpus=len(known_gpus()) or 1),
        train=Train(steps=0),  # as many as it makes
        job=Job(signal_lead_s=KILL_LEAD_S),
        command=Command(run=run, per="job", snapshot=False),
    )
    sized = size_run(experiment, profile)
    prepared = finish(sized, predict_run(sized, profile), title="a bench's peer")
    return BenchCell(name, prepared, pattern, is_peer=True)
