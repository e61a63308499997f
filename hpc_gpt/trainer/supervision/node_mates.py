"""What the ranks of a node send each other without the shared disk, which then sees a node, not each of its ranks.

They use datagrams between sockets whose names are in no folder, so nothing is left of them, and containers of one node
share them. A rank that gets no answer does for itself what its node's first rank would do for it.
"""

import contextlib
import hashlib
import os
import socket
import struct
import time

from hpc_gpt.core.runs.run_folder import Attempt

# A first rank that has not answered for so long does not run.
_ANSWERS_S = 3.0
_MOST_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class NodeMates:
    """A rank among those of its node. Each `send`s to the first rank, which `gather`s what came and answers `says`.

    Messages of other users are ignored. If a socket cannot be had, nothing comes, and nobody `is_served`.
    """

    def __init__(self, attempt: Attempt, host: str, local_rank: int) -> None:
        self.is_first = local_rank == 0
        self.says = self.heard = b""
        self.heard_s: float | None = None
        key = hashlib.sha256(os.fsencode(f"{attempt.folder.resolve()} {host}")).hexdigest()[:40]
        self._first = f"\0hpc-gpt/{key}"
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            own.setblocking(False)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            own.bind(self._first if self.is_first else "")  # an empty name is one that is free
            self._socket = own

    @property
    def is_served(self) -> bool:
        """Whether the node's first rank has answered in the last seconds."""
        return self.heard_s is not None and time.monotonic() < self.heard_s + _ANSWERS_S

    def send(self, message: bytes) -> None:
        """Sends to the node's first rank, and takes what it has answered before."""
        if answers := self._received():
            self.heard, self.heard_s = answers[-1][0], time.monotonic()
        self._send(message, self._first)

    def gather(self) -> list[bytes]:
        """What the other ranks have sent since the last call, of which each gets an answer."""
        received = self._received()
        for sender in {sender for _, sender in received}:
            self._send(self.says, sender)
        return [message for message, _ in received]

    def _send(self, message: bytes, name: str | bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, or has not read the last ones
            if self._socket is not None:
                self._socket.sendto(message, name)

    def _received(self) -> list[tuple[bytes, bytes]]:
        """(message, name of its sender) of all that came."""
        found = []
        with contextlib.suppress(OSError):
            while self._socket is not None:
                message, more, _, sender = self._socket.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
                if any(_CREDENTIALS.unpack(data)[1] == os.getuid() for _, _, data in more):
                    found.append((message, sender))
        return found
