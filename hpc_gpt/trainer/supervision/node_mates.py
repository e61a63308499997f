"""Messages between the ranks of a node, past the shared disk: so the disk serves one rank per node instead of all.

The ranks send datagrams between sockets whose names are not in any folder, so nothing is left behind, and the
containers of a node share them. A rank that gets no answer does the work of its node's first rank for itself.
"""

import contextlib
import hashlib
import os
import socket
import struct
import time

from hpc_gpt.core.runs.run_folder import Attempt

# A first rank that has not answered for this long does not run.
_ANSWERS_S = 3.0
_MOST_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class NodeMates:
    """A rank among the ranks of its node. The others `send` to the first rank, which `gather`s the messages and answers
    `says`.

    Messages of other users are ignored. If there is no socket, no message comes, and no rank `is_served`.
    """

    def __init__(self, attempt: Attempt, host: str, local_rank: int) -> None:
        self.is_first = local_rank == 0
        self.says = self.heard = b""
        self.heard_s: float | None = None
        key = hashlib.sha256(os.fsencode(f"{attempt.folder.resolve()} {host}")).hexdigest()[:40]
        self._first = f"\0hpc-gpt/{key}"
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            datagrams.setblocking(False)
            datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            datagrams.bind(self._first if self.is_first else "")  # for an empty name the kernel chooses a free one
            self._socket = datagrams

    @property
    def is_served(self) -> bool:
        """Whether the node's first rank has answered in the last seconds."""
        return self.heard_s is not None and time.monotonic() < self.heard_s + _ANSWERS_S

    def send(self, message: bytes) -> None:
        """Sends to the node's first rank, and reads its earlier answers."""
        if answers := self._received():
            self.heard, self.heard_s = answers[-1][0], time.monotonic()
        self._send(message, self._first)

    def gather(self) -> list[bytes]:
        """Reads the messages of the other ranks since the last call, and answers each rank."""
        received = self._received()
        for sender in {sender for _, sender in received}:
            self._send(self.says, sender)
        return [message for message, _ in received]

    def _send(self, message: bytes, name: str | bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, or has not read the last ones
            if self._socket is not None:
                self._socket.sendto(message, name)

    def _received(self) -> list[tuple[bytes, bytes]]:
        """Reads all messages that have come, as (message, name of the sender)."""
        messages = []
        with contextlib.suppress(OSError):
            while self._socket is not None:
                message, ancillary, _, sender = self._socket.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
                if any(_CREDENTIALS.unpack(data)[1] == os.getuid() for _, _, data in ancillary):
                    messages.append((message, sender))
        return messages
