"""The rendezvous of ranks on several nodes: the network interface of gloo, which torch uses between hosts, also on
GPUs; the port; and the files that rank 0 has open for it.

By default gloo takes the interface with the address of the node's name, which may differ on each node or not exist.
NCCL chooses its own interface, on Slingshot among `HSN`: the route to the first node is often the slow Ethernet.
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
# NCCL_SOCKET_IFNAME of a job on Slingshot: the prefix of its interfaces (hsn0, hsn1, …). The job script sets it.
HSN = "hsn"
# Makes gloo connect two ranks when they first communicate. Otherwise it connects all ranks as a group starts: N
# connections per rank, and 8 N^3 bytes through the store. torch 2.9, the oldest supported, has it. A rank that waits
# for one that died before waits forever (pytorch/gloo#520): its launcher, or the watch for hangs, ends it.
LAZY_GLOO = ("TORCH_GLOO_LAZY_INIT", "1")
MEETING_S = 900  # time limit of the ranks for all to connect
# {family: (offset, length) of the address in the C library's sockaddr, which begins with the family}.
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
    """{IP address: interface} of this machine, as gloo finds them. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    names: dict[str, str] = {}
    at = first
    while at:
        interface = at.contents
        if interface.address and (place := _ADDRESS.get(ctypes.c_ushort.from_address(interface.address).value)):
            offset, length = place
            address = ipaddress.ip_address(ctypes.string_at(interface.address + offset, length))
            names.setdefault(str(address), interface.name.decode())
        at = interface.next
    library.freeifaddrs(first)
    return names


def source_address(host: str) -> str:
    """The address from which this machine reaches `host`. Sends nothing. Raises OSError without a route."""
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

    It is the interface with the address from which this machine reaches `host`, the node of the first rank. On that
    node itself it is the interface of its own address, not `lo`. Raises ConfigError if there is no route, or if one of
    several nodes would use its loopback.
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
    """Sets GLOO_SOCKET_IFNAME for this rank of a job with MASTER_ADDR; the first rank of a node prints the interfaces.

    Raises ConfigError as `choose_interface`.
    """
    if host := os.environ.get("MASTER_ADDR"):
        os.environ.update(choose_interface(host, nodes))
        if local_rank == 0:
            print(f"{platform.node()}: {describe_interfaces()}", flush=True)


def describe_interfaces(environment: Mapping[str, str] = os.environ) -> str:
    """The interfaces of gloo and NCCL on this node, for a log."""
    chosen = environment.get(NCCL)
    gloo = environment.get(GLOO, "the interface of the node's name")
    return f"gloo over {gloo}, NCCL over {chosen or 'what it chooses'}"


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """In the block, this thread asks no name server: a name that is not in /etc/hosts fails at once.

    Needs the GNU C library; with another one nothing changes.
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

# It is chosen in this process, and another process binds it later. It is below the ports that the system assigns, so
# only a process that names it can take it. The process that has chosen it holds the same number as a UDP port, so
# that two runs on one machine never choose the same port; it becomes free when its holder dies.
LOWEST_PORT = 10000
# Without /proc: the lowest port that Linux assigns; macOS and BSD begin above it.
_EPHEMERAL = 32768
# The state of a socket in /proc/net/tcp.
_LISTENS = "0A"
_TRIES = 100


def free_port(number: int, tries: int = 0) -> int:
    """A port computed from a number, on which nobody listens and which nobody holds; `tries` skips as many candidates
    as the owner has used before. If all candidates are taken, the first."""
    port, held = held_port(number, tries)
    if held is not None:
        held.close()
    return port


def held_port(number: int, tries: int = 0) -> tuple[int, socket.socket | None]:
    """Returns (a port chosen as by `free_port`, the socket that holds it until it is closed). The socket is None if
    all ports are taken."""
    low, taken = _lowest_ephemeral(), _listened_on()
    ports = [LOWEST_PORT + (number + 7919 * step) % (low - LOWEST_PORT) for step in range(tries, tries + _TRIES)]
    for port in ports:
        if port not in taken and (held := _hold(port)) is not None:
            return port, held
    return ports[0], None


def _lowest_ephemeral() -> int:
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = 0
    return low if low > LOWEST_PORT + 2000 else _EPHEMERAL


def _listened_on() -> set[int]:
    """The ports in use by a listening socket, as far as /proc shows them."""
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
            ports |= {int(line[1].rpartition(":")[2], 16) for line in lines if len(line) > 3 and line[3] == _LISTENS}
    return ports


def _hold(port: int) -> socket.socket | None:
    """A socket that holds the UDP port of this number; None if another process has it."""
    held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        held.bind(("", port))
    except OSError:
        held.close()
        return None
    return held


# --- open files

# Rank 0 has three connections to each rank: two to the store that it serves, and one of the group between the hosts. In
# addition it opens about _BESIDE files of modules, data, logs and NCCL.
OF_THE_STORE = 2
_OF_A_RANK, _BESIDE = OF_THE_STORE + 1, 200


def files_of_first(ranks: int) -> int:
    """The largest number of files that rank 0 has open among so many ranks."""
    return _OF_A_RANK * ranks + _BESIDE


def check_open_files(ranks: int) -> str:
    """A line with the number of files that rank 0 has open and the limit of a process on this node. Raises ConfigError
    if the limit is lower."""
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
