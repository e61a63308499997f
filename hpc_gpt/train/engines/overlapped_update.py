"""The update of the weights beside the next step's forward pass: each part of the model just before that part runs.

Not beside the backward pass: clipping needs the norm of the whole gradient, so no weight can be updated before the last
gradient is there. An update is limited by memory and a forward pass by arithmetic, so on a GPU they share the device:

    stream of the model      waits for 0, embeds      waits for 1, block 1      waits for 2, block 2      ...
    stream beside it         updates 0, 1             updates 2                 updates 3                 ...

The update of a part begins with the part before it. On a CPU it comes just before its own part. Every gradient exists
until its part is updated; by then few activations do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hpc_gpt.model.gpt import Gpt


class SideStream:
    """A CUDA stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None]) -> Any:
        """Runs `work` after all that the current stream has got so far; returns the event of its end."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    def join(self, event: Any) -> None:
        """Lets the current stream wait for the event."""
        torch.cuda.current_stream().wait_event(event)


class OverlappedUpdate:
    """Updates the parts of `model`, which are those of `Gpt.parts`, during the forward pass after `begin`.

    `update(number)` updates a part, on the stream `side` if there is one. `drop(number)`, always on the model's stream
    and after the update's end, drops its gradients, whose memory is then the model's again. The hooks are on the model
    and its blocks, which are never compiled themselves unless the model is compiled whole.
    """

    def __init__(
        self, model: Gpt, update: Callable[[int], None], drop: Callable[[int], None], side: SideStream | None
    ) -> None:
        self._update, self._drop, self._side = update, drop, side
        self._parts = len(model.blocks) + 2
        # Parts whose update has begun, and parts that have been updated and may run.
        self._begun = self._ready = self._parts
        self._events: list[Any] = []
        model.register_forward_pre_hook(partial(self._before, 0))
        for number, block in enumerate(model.blocks, 1):
            block.register_forward_pre_hook(partial(self._before, number))
        model.blocks[-1].register_forward_hook(partial(self._before, self._parts - 1))

    def begin(self) -> None:
        """Makes the update of all parts due."""
        assert self._ready == self._parts, "the update before is not over"
        self._begun = self._ready = 0
        self._events.clear()

    def finish(self) -> None:
        """Updates what is still due, and lets the current stream wait for it."""
        self._prepare(self._parts - 1)

    def _before(self, number: int, *of_hook: Any) -> None:
        self._prepare(number)

    @torch.no_grad()
    def _prepare(self, number: int) -> None:
        """Updates all parts up to `number`, which is the next to run, and begins with the one after it."""
        ahead = self._side is not None
        while self._begun < min(number + 1 + ahead, self._parts):
            part = self._begun
            self._begun += 1
            if self._side is None:
                self._update(part)
            else:
                self._events.append(self._side.run(partial(self._update, part)))
        while self._ready <= number:
            if self._side is not None:
                self._side.join(self._events[self._ready])
            self._drop(self._ready)
            self._ready += 1
