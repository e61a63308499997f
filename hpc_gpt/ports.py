"""The port of a rendezvous, which another process binds later than it is chosen.

It is below the ports that the system hands out, so only a process that names it can take it. On one machine its number
is held as a UDP port by whoever has chosen it: two runs never choose the same one, and it is free when its holder dies.
"""

import contextlib
import socket
from pathlib import Path

_LOWEST = 10000
# Without /proc: where Linux, and below where macOS and BSD, begin to hand out ports.
_EPHEMERAL = 32768
# The state of a socket in /proc/net/tcp.
_LISTENS = "0A"
_TRIES = 100


def free_port(number: int, tries: int = 0) -> int:
    """A port that follows from a number, on which nobody listens and which nobody holds: another one for each of the
    earlier `tries` of the same owner. If all that are tried are taken, the first."""
    port, held = held_port(number, tries)
    if held is not None:
        held.close()
    return port


def held_port(number: int, tries: int = 0) -> tuple[int, socket.socket | None]:
    """(port as free_port gives it, what holds it until it is closed; None if all are taken)."""
    low, taken = _lowest_ephemeral(), _listened_on()
    ports = [_LOWEST + (number + 7919 * step) % (low - _LOWEST) for step in range(tries, tries + _TRIES)]
    for port in ports:
        if port not in taken and (held := _hold(port)) is not None:
            return port, held
    return ports[0], None


def _lowest_ephemeral() -> int:
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = 0
    return low if low > _LOWEST + 2000 else _EPHEMERAL


def _listened_on() -> set[int]:
    """The ports on which somebody listens, as far as /proc shows them."""
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
            ports |= {int(line[1].rpartition(":")[2], 16) for line in lines if len(line) > 3 and line[3] == _LISTENS}
    return ports


def _hold(port: int) -> socket.socket | None:
    """The number as a UDP port of this process; None if another has it."""
    held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        held.bind(("", port))
    except OSError:
        held.close()
        return None
    return held
