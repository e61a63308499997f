"""A reader of a stream, which tokenises its shards and cuts them into samples. Needs no torch.

Seed and epoch give the order of its shards. Each shard is read in blocks of 256 samples, which are shuffled within the
block. Neither depends on the number of readers. Tokens at the end of a shard that are less than a sample are skipped.

A reader may run in a process of its own, `python -m hpc_gpt.trainer.tokens.reader_process`, which the rank starts. The
process gets its task as JSON on stdin, and answers over a Connection of multiprocessing, whose pipe lets it be one
chunk ahead. It ends with its rank, in whatever way the rank ends, because its stdin is closed then.
"""

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.errors import DataError, UserError
from hpc_gpt.trainer.tokens.sources import UnreadableFile, file_pieces
from hpc_gpt.trainer.tokens.token_file import token_dtype
from hpc_gpt.trainer.tokens.tokenizer import Tokenizer, open_tokenizer

BLOCK = 256
_LOOK_S = 2.0
# Slurm and terminals send these to every process, but the reader must run as long as its rank.
_RANKS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}

# (how often a shard was read to its end, how many samples were taken since)
StreamPlace = tuple[int, int]


@dataclass(frozen=True)
class ReaderTask:
    """A reader's task: its shards with the place in each, and how to read them."""

    folder: str
    places: dict[str, StreamPlace]
    tokenizer: str
    seq: int
    seed: int
    skip: bool
    begins: bool = False


@dataclass(frozen=True)
class Chunk:
    """Samples of one shard from number `first` of an epoch on, unsigned [n, seq + 1]; n may be 0.

    `ends`: the shard has no more samples in this epoch. `fault`: why it was left before its end, if it was.
    """

    shard: str
    epoch: int
    first: int
    rows: NDArray[Any]
    ends: bool
    fault: str | None = None


def read_chunks(task: ReaderTask) -> Iterator[Chunk]:
    """Yields a reader's chunks, endlessly. Raises DataError for a damaged shard, unless such shards are skipped."""
    tokenizer = open_tokenizer(task.tokenizer, task.begins)
    places = dict(task.places)
    while True:
        epoch = min(places.values())[0]
        for shard in epoch_order(list(places), task.seed, epoch):
            at, taken = places[shard]
            if at == epoch:
                yield from _shard_chunks(task, tokenizer, shard, epoch, taken)
                places[shard] = epoch + 1, 0


def epoch_order(shards: Sequence[str], seed: int, epoch: int) -> list[str]:
    """The order of shards in an epoch. A subset of the shards has the same order."""
    return sorted(shards, key=lambda shard: _digest(seed, epoch, shard))


def read_windows(folder: Path, shards: Sequence[str], tokenizer: Tokenizer, seq: int, skip: bool) -> Iterator[Any]:
    """Yields the samples of shards in their own order, [n, seq + 1] at a time, for evaluation."""
    for shard in shards:
        for _, windows, _, _ in _blocks(folder / shard, tokenizer, seq, skip):
            yield windows


def _shard_chunks(task: ReaderTask, tokenizer: Tokenizer, shard: str, epoch: int, taken: int) -> Iterator[Chunk]:
    for first, windows, ends, fault in _blocks(Path(task.folder, shard), tokenizer, task.seq, task.skip):
        count = len(windows)
        if first + count <= taken and not ends:
            continue
        before = min(max(0, taken - first), count)
        key = np.frombuffer(_digest(task.seed, epoch, shard, first), dtype="<u8")
        # Raw words, because numpy keeps their stream from version to version.
        order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
        yield Chunk(shard, epoch, first + before, windows[order[before:]], ends, fault)


def _blocks(
    path: Path, tokenizer: Tokenizer, seq: int, skip: bool
) -> Iterator[tuple[int, NDArray[Any], bool, str | None]]:
    """Yields (number of the first sample, samples [n, seq + 1] as a view, whether they are the last, fault)."""
    dtype = token_dtype(tokenizer.vocab)
    arrays, size, first, fault = [np.empty(0, dtype)], 0, 0, None
    # A block is yielded when there is another sample after it, so the last block is known to be the last.
    needed = (BLOCK + 1) * seq + 1
    source = tokenizer.encode(file_pieces(path), str(path))
    while True:
        try:
            array = next(source, None)
        except DataError as error:
            # Another machine may read a file that this one cannot read now: if only one of the ranks that read the same
            # samples skipped it, that rank would have other samples from then on.
            if not skip or isinstance(error, UnreadableFile):
                raise
            array, fault = None, str(error)
        if array is not None:
            arrays.append(array.astype(dtype, copy=False))
            size += len(array)
            if size < needed:
                continue
        tokens, start = np.concatenate(arrays), 0
        while len(tokens) - start >= needed:
            yield first, _windows(tokens[start:], BLOCK, seq), False, None
            start += BLOCK * seq
            first += BLOCK
        if array is None:
            yield first, _windows(tokens[start:], max(0, (len(tokens) - start - 1) // seq), seq), True, fault
            return
        arrays, size = [tokens[start:]], len(tokens) - start


def _windows(tokens: NDArray[Any], count: int, seq: int) -> NDArray[Any]:
    """The first `count` windows of seq + 1 tokens as a view; each shares one token with the next."""
    if not count:
        return np.empty((0, seq + 1), tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens[: count * seq + 1], seq + 1)[::seq]


def _digest(seed: int, epoch: int, shard: str, block: int = -1) -> bytes:
    key = f"{seed} {epoch} {block} {shard}".encode("utf-8", errors="surrogateescape")
    return hashlib.blake2b(key, digest_size=16).digest()


class ReaderProcess:
    """The rank's side of a reader process: an iterator of chunks, like `read_chunks`."""

    def __init__(self, task: ReaderTask) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        self._answers, answers = Pipe(duplex=False)
        # The child inherits the blocked signals, so none can end it while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RANKS_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpc_gpt.trainer.tokens.reader_process", str(answers.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(answers.fileno(),),
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            answers.close()
        assert self._process.stdin is not None
        self.pid = self._process.pid
        # stdin stays open until the rank ends.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"parent": os.getpid(), **asdict(task)}).encode() + b"\n")
            self._process.stdin.flush()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """Waits for the next chunk. Raises the reader's DataError, or RuntimeError if the reader ended otherwise."""
        try:
            answer = self._answers.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            hint = "; was the memory of this machine used up?" if code == -signal.SIGKILL else ""
            raise RuntimeError(f"data reader (process {self.pid}) {how}{hint}") from None
        if isinstance(answer, Exception):
            raise answer
        return Chunk(*answer)

    def close(self) -> None:
        """Ends the process, and waits for it."""
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._answers):
            with contextlib.suppress(OSError):
                end.close()  # type: ignore[union-attr]


def main() -> None:
    """The reader process."""
    answers = Connection(int(sys.argv[1]), readable=False)
    task = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not task:
        os._exit(0)
    threading.Thread(target=_leave_with, args=(task.pop("parent"),), daemon=True).start()
    task["places"] = {shard: tuple(place) for shard, place in task["places"].items()}
    try:
        for chunk in read_chunks(ReaderTask(**task)):
            answers.send(tuple(vars(chunk).values()))  # this process's Chunk is a class of __main__
    except BrokenPipeError:
        pass
    except UserError as error:
        answers.send(DataError(str(error), error.hint))
    except BaseException as error:
        traceback.print_exc()
        answers.send(RuntimeError(f"data reader failed: {''.join(traceback.format_exception_only(error)).strip()}"))
    os._exit(0)


def _leave_with(parent: int) -> None:
    """Ends this process with its parent: at the end of stdin, or when the parent process changes while a copy of that
    pipe is still open."""
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if (readable and not os.read(0, 4096)) or os.getppid() != parent:
            os._exit(0)


if __name__ == "__main__":
    main()
