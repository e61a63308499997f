"""Whether a job on Slingshot sent over TCP sockets: NCCL, or RCCL, names the network that it takes at its start, with
NCCL_DEBUG=INFO. It takes sockets if its plugin for libfabric is not there, and the job is slower by far.

In another program's log the fact `over_sockets` is a line that names a Slingshot interface (dialect `collectives`).
"""

import re
from pathlib import Path

from hpc_gpt.reader.lines.source import Source

# The kind of a flag on the network, which `why` also shows.
OF_NETWORK = "network"
OVER_SOCKETS = (
    "NCCL sent over TCP sockets (NET/Socket) although the fabric is Slingshot: load its plugin for libfabric "
    "(aws-ofi-nccl, aws-ofi-rccl), as a module, in the image or by the EDF's hook"
)
_SOCKETS = re.compile(rb"\bNET/Socket\b|\bUsing network Socket\b")
_LIBFABRIC = re.compile(rb"\bUsing network (?!Socket)|\bvia NET/(?!Socket)")


def says_sockets(log: Path) -> bool:
    """Whether the first MiB of a log says that NCCL took sockets and no other network."""
    with Source(log) as source:
        head = next(source.chunks(), b"")
    return _SOCKETS.search(head) is not None and _LIBFABRIC.search(head) is None
