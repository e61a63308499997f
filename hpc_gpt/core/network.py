"""Where the ranks of several nodes meet: the network interface of gloo, which torch uses between hosts, also on GPUs;
the port of the rendezvous; and the files that rank 0 has open for it.

Left alone, gloo takes the interface whose address the node's own name has, which may be another on each node, or none.
NCCL chooses for itself: the route to the first node is often the slow Ethernet.
"""

import contextlib
import ctypes
import ipaddress
import os
import platform
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_gpt.core.errors import ConfigError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# gloo connects two ranks when they first talk. Else it connects each with every other as a group begins: N connections
# a rank, and 8 N^3 bytes through the store. torch 2.11, the oldest that is allowed, has it. One that waits for a rank
# that died before waits without a limit (pytorch/gloo#520): its launcher ends it, or the watch for hangs.
LAZY_GLOO = ("TORCH_GLOO_LAZY_INIT", "1")
MEETING_S = 900  # how long ranks wait until all have come
# The C library's sockaddr begins with the family; so many bytes are before the address itself, and in it.
_ADDRESS: dict[int, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


class _Interface(ctypes.Structure):
    """The C library's `struct ifaddrs`, as far as it is the same on every Linux."""


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def list_interfaces() -> dict[str, str]:
    """The name of the interface that has each IP address of this machine, as gloo finds them. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    names: dict[str, str] = {}
    at = first
    while at:
        here = at.contents
        if here.address and (place := _ADDRESS.get(ctypes.c_ushort.from_address(here.address).value)):
            offset, length = place
            address = ipaddress.ip_address(ctypes.string_at(here.address + offset, length))
            names.setdefault(str(address), here.name.decode())
        at = here.next
    library.freeifaddrs(first)
    return names


def source_address(host: str) -> str:
    """The address of this machine from which it reaches `host`. Sends nothing. Raises OSError if there is no route."""
    fault: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError as error:
            fault = error
    raise fault


def choose_interface(host: str, nodes: int) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME for the ranks of this node, as a variable to add; empty if the environment names one.

    It is the interface from whose address this machine reaches `host`, the first rank's. On the first node itself that
    is the interface of its own address, where the route would say `lo`. Raises ConfigError if there is no route, or if
    it is the loopback of one of several nodes.
    """
    if os.environ.get(GLOO):
        return {}
    node = platform.node()
    hint = "set HPC_GPT_MASTER_ADDR to the first node's address that others reach, or node_suffix in the profile"
    try:
        source = source_address(host)
    except OSError as error:
        raise ConfigError(f"node {node} has no route to {host}, where the ranks meet: {error}", hint) from None
    if nodes > 1 and ipaddress.ip_address(source).is_loopback:
        raise ConfigError(
            f"node {node} reaches {host}, where the ranks of {nodes} nodes meet, from its loopback address {source}",
            f"{hint}; or {GLOO}",
        )
    name = list_interfaces().get(source)
    if name is None:
        raise ConfigError(f"no interface of node {node} has {source}, from which it reaches {host}", f"set {GLOO}")
    return {GLOO: name}


def use_interface(nodes: int, local_rank: int) -> None:
    """Sets GLOO_SOCKET_IFNAME for this rank of a job with MASTER_ADDR; the first rank of a node prints what is used.

    Raises ConfigError as `choose_interface`.
    """
    if host := os.environ.get("MASTER_ADDR"):
        os.environ.update(choose_interface(host, nodes))
        if local_rank == 0:
            print(f"{platform.node()}: {describe_interfaces()}", flush=True)


def describe_interfaces(environment: Mapping[str, str] = os.environ) -> str:
    """What gloo and NCCL use on this node, for a log."""
    chosen = environment.get(NCCL)
    gloo = environment.get(GLOO, "the interface of the node's name")
    return f"gloo over {gloo}, NCCL over {chosen or 'what it chooses'}"


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """Within it this thread asks no name server: what is not in /etc/hosts fails at once, as if none had answered.

    It needs the GNU C library; with another one nothing changes.
    """
    if (find := getattr(ctypes.CDLL(None), "__res_state", None)) is None:
        yield
        return
    find.restype = ctypes.POINTER(ctypes.c_int * 2)  # `_res` begins with the seconds of a try, and the number of tries
    with contextlib.suppress(OSError):
        socket.getaddrinfo("localhost", 0)  # the first lookup of a thread sets them
    state = find().contents
    tries, state[1] = state[1], 0
    try:
        yield
    finally:
        state[1] = tries


# --- the port

# It is chosen here, and another process binds it later. It is below the ports that the system hands out, so only a
# process that names it can take it. On one machine its number is held as a UDP port by whoever has chosen it: two runs
# never choose the same one, and it is free when its holder dies.
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


# --- open files

# Of each rank rank 0 has two connections to the store that it serves, and one of the group between the hosts; beside
# them so many files of modules, data, logs and NCCL.
OF_THE_STORE = 2
_OF_A_RANK, _BESIDE = OF_THE_STORE + 1, 200


def files_of_first(ranks: int) -> int:
    """The most files that rank 0 of so many ranks has open."""
    return _OF_A_RANK * ranks + _BESIDE


def check_open_files(ranks: int) -> str:
    """How many files rank 0 has open, and how many a process of this node may have. Raises ConfigError if those are
    fewer."""
    needed, (_, hard) = files_of_first(ranks), resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "any number" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    if needed > hard != resource.RLIM_INFINITY:
        raise ConfigError(
            f"rank 0 of {ranks:,} ranks has up to {needed:,} files open, and node {platform.node()} allows a process "
            f"{allowed} (ulimit -Hn)",
            f"ask the site for a hard limit of at least {needed:,} open files (nofile) in the jobs of its nodes: "
            "LimitNOFILE of slurmd, or limits.conf",
        )
    return f"rank 0 of {ranks:,} ranks has up to {needed:,} files open, a process here may have {allowed}"


def connections_held() -> int | None:
    """How many connections can wait here for a server to accept them; None if the system does not say."""
    try:
        return int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return None
