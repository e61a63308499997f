"""A reader in a process of its own: `python -m hpc_gpt.tokens.reader_process`, started by the rank, no torch in it.

It gets its task as JSON on stdin, and answers on stdout with frames: the lengths of both parts, a JSON head, and the
samples' bytes. The pipe lets it be one chunk ahead. It ends with its rank, however that ends: its stdin is closed then.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

from hpc_gpt.errors import DataError, UserError
from hpc_gpt.tokens.shard_reader import Chunk, ReaderTask, read_chunks

_FRAME = struct.Struct("<QQ")
_LOOK_S = 2.0
# Slurm and terminals send these to every process; the reader goes on for as long as its rank does.
_RANKS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}


class ReaderProcess:
    """The rank's end: an iterator of chunks, as `read_chunks` gives them."""

    def __init__(self, task: ReaderTask) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        # A blocked signal stays so in the child, from its first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RANKS_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpc_gpt.tokens.reader_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self._answers: Any = self._process.stdout
        # stdin stays open: its end is the rank's.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"parent": os.getpid(), **asdict(task)}).encode() + b"\n")
            self._process.stdin.flush()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk; waits for it. DataError where the reader met one, RuntimeError where it ended otherwise."""
        lengths = self._answers.read(_FRAME.size)
        if len(lengths) == _FRAME.size:
            head_size, body_size = _FRAME.unpack(lengths)
            head, body = self._answers.read(head_size), self._answers.read(body_size)
            if len(head) == head_size and len(body) == body_size:
                return _chunk(json.loads(head), body)
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "; was the memory of this machine used up?" if code == -signal.SIGKILL else ""
        raise RuntimeError(f"data reader (process {self.pid}) {how}{hint}")

    def close(self) -> None:
        """Ends the process, and waits for it."""
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                end.close()  # type: ignore[union-attr]


def _chunk(head: dict[str, Any], body: bytes) -> Chunk:
    if "failed" in head:
        raise RuntimeError(f"data reader failed: {head['failed']}")
    if "error" in head:
        raise DataError(head["error"], head["hint"])
    rows = np.frombuffer(body, dtype=head.pop("dtype")).reshape(head.pop("shape"))
    return Chunk(rows=rows, **head)


def main() -> None:
    """The reader's end."""
    # What a library prints must not come between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    words = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not words:
        os._exit(0)
    threading.Thread(target=_leave_with, args=(words.pop("parent"),), daemon=True).start()
    words["places"] = {shard: tuple(place) for shard, place in words["places"].items()}
    try:
        for chunk in read_chunks(ReaderTask(**words)):
            rows = np.ascontiguousarray(chunk.rows)
            head = {"shard": chunk.shard, "epoch": chunk.epoch, "first": chunk.first, "ends": chunk.ends}
            head |= {"fault": chunk.fault, "dtype": rows.dtype.str, "shape": rows.shape}
            _answer(answers, head, rows.data.cast("B") if rows.size else b"")
    except BrokenPipeError:
        pass
    except UserError as error:
        _answer(answers, {"error": str(error), "hint": error.hint})
    except BaseException as error:
        traceback.print_exc()
        _answer(answers, {"failed": "".join(traceback.format_exception_only(error)).strip()})
    os._exit(0)


def _answer(answers: BinaryIO, head: dict[str, Any], body: Any = b"") -> None:
    text = json.dumps(head).encode()
    answers.write(_FRAME.pack(len(text), len(body)) + text)
    answers.write(body)
    answers.flush()


def _leave_with(parent: int) -> None:
    """Ends this process with its parent: at the end of stdin, or where a copy of that pipe has outlived the parent."""
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if (readable and not os.read(0, 4096)) or os.getppid() != parent:
            os._exit(0)


if __name__ == "__main__":
    main()
