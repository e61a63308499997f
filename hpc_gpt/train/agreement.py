"""What all ranks do next, agreed without waiting: a word on step k is read after step k + 1.

At each step's edge every rank puts what it has seen into a small all-reduce between the hosts, and reads the one it
began a step before, which has long ended. So nobody waits, least of all for the device, and all ranks come to the
same verdict at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Word:
    """What one rank has seen; after the all-reduce, what any rank has.

    `walltime`, `terminated` and `interrupted` are any rank's to say, and `writing`, that its part of a checkpoint is
    on its way; the other wishes to stop, and `save`, are rank 0's. `allocated_bytes` and `reserved_bytes` are peaks of
    device memory, one a pipeline stage; a rank knows its own stage's and leaves the others 0.
    """

    walltime: bool = False
    terminated: bool = False
    interrupted: bool = False
    minutes: bool = False
    bad_steps: bool = False
    budget: bool = False
    target: bool = False
    stop: bool = False
    requeue: bool = False
    save: bool = False
    writing: bool = False
    allocated_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()

    def asks_to_stop(self) -> bool:
        return any(getattr(self, name) for name in STOPS)


# The wishes to stop among them; what one rank says for all.
STOPS = ("walltime", "terminated", "interrupted", "minutes", "bad_steps", "budget", "target", "stop", "requeue")
FLAGS = tuple(entry.name for entry in fields(Word) if entry.type == "bool")


class Agreement:
    """The exchange of words over the control group `group`; one `exchange` a step on every rank."""

    def __init__(self, group: dist.ProcessGroup, stages: int) -> None:
        self._group = group
        self._stages = stages
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def exchange(self, word: Word) -> Word:
        """Begins the exchange of this step's word and returns what was agreed on the one before."""
        agreed = self.finish()
        empty = (0,) * self._stages
        flags = [int(getattr(word, name)) for name in FLAGS]
        tensor = torch.tensor(
            [*flags, *(word.allocated_bytes or empty), *(word.reserved_bytes or empty)], dtype=torch.int64
        )
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, tensor
        return agreed

    def finish(self) -> Word:
        """Waits for the exchange that was begun last; an empty word where there is none."""
        if self._pending is None:
            return Word()
        work, tensor = self._pending
        self._pending = None
        work.wait()
        numbers = [int(number) for number in tensor.tolist()]
        flags = {name: number > 0 for name, number in zip(FLAGS, numbers, strict=False)}
        peaks = numbers[len(FLAGS) :]
        return Word(**flags, allocated_bytes=tuple(peaks[: self._stages]), reserved_bytes=tuple(peaks[self._stages :]))
