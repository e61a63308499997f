"""Peers: programs the user has, measured among our own runs, as `--peer` and `--peer-pattern` name them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_gpt.bench.cell import Cell
from hpc_gpt.errors import ConfigError
from hpc_gpt.secrets import hide_secrets
from hpc_gpt.tables import close_matches

# A peer's name becomes part of its logs' names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXAMPLE = "for example --peer nanogpt='python ~/nanoGPT/train.py --compile=True'"
PATTERN_EXAMPLE = r"for example --peer-pattern '([\d,.]+) tok/s': its group is the figure of a line"


def read_peers(peers: Sequence[str], patterns: Sequence[str]) -> list[Cell]:
    """The cells of `NAME=COMMAND` words, each with its `REGEX` or `NAME=REGEX`: what has no name is for all others.

    Raises ConfigError with every fault at once.
    """
    faults: list[str] = []
    commands = _commands(peers, faults)
    own: dict[str, str] = {}
    for_all: str | None = None
    for words in patterns:
        name, equals, rest = words.partition("=")
        named = bool(equals) and name in commands
        pattern = _checked(rest if named else words, faults)
        if not peers:
            faults.append("--peer-pattern reads a peer's log, but there is no --peer")
        elif pattern is None:
            continue
        elif named and name in own:
            faults.append(f"--peer-pattern: peer {name} has two")
        elif named:
            own[name] = pattern
        elif for_all is not None:
            faults.append("--peer-pattern: two without a peer's name" + _nearest(name if equals else "", commands))
        else:
            for_all = pattern
    if faults:
        of_patterns = all(fault.startswith("--peer-pattern") for fault in faults)
        raise ConfigError("\n".join(faults), PATTERN_EXAMPLE if of_patterns and commands else _EXAMPLE)
    return [Cell(name, command=command, pattern=own.get(name, for_all)) for name, command in commands.items()]


def add_peers(cells: Sequence[Cell], peers: Sequence[Cell]) -> list[Cell]:
    """Our cells and the peers behind them; ConfigError where a peer goes by a name of ours."""
    taken = {cell.name for cell in cells}
    twice = [peer.name for peer in peers if peer.name in taken]
    if twice:
        raise ConfigError(f"--peer {twice[0]}: a row of ours goes by that name", "call the peer by another one")
    return [*cells, *peers]


def _commands(peers: Sequence[str], faults: list[str]) -> dict[str, str]:
    commands: dict[str, str] = {}
    for words in peers:
        name, equals, command = words.partition("=")
        name = name.strip()
        if not equals or not name:
            faults.append(f"--peer {hide_secrets(words)!r} is not NAME='COMMAND'")
        elif not _NAME.fullmatch(name):
            faults.append(f"--peer: the name {name!r} is not of letters, digits, and . _ - behind the first")
        elif not command.strip() or "\0" in command:
            faults.append(f"--peer {name} has no command that a shell can run")
        elif name in commands:
            faults.append(f"--peer: two are called {name}; each needs a name of its own")
        else:
            commands[name] = command
    return commands


def _checked(text: str, faults: list[str]) -> str | None:
    """The pattern, where it is one of one group."""
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as fault:
        faults.append(f"--peer-pattern '{text}' is no regular expression: {fault}")
        return None
    if pattern.groups != 1:
        what = "no group" if not pattern.groups else f"{pattern.groups} groups"
        faults.append(
            f"--peer-pattern '{text}' has {what}, but must have one, around the tokens/s; (?:…) counts as none"
        )
        return None
    return text


def _nearest(name: str, commands: dict[str, str]) -> str:
    found = close_matches(name, commands) if name else ""
    return f"; {found}" if found else ""
