"""fp16's loss scale: torch's, told from outside whether the whole model's gradient was finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class LossScaler:
    """torch.amp.GradScaler with its defaults: 65536 at first, halved after a step that was skipped, doubled after 2000
    in a row that were not. For fp32 and bf16 it does nothing.

    torch's scaler looks at the gradients that one rank holds: of sharded ones each rank would come to a scale of its
    own. Here it looks at one number in their place, made from the norm of the whole model's gradient, which is there
    anyway. Nothing waits for the device but `read`.
    """

    def __init__(self, dtype: str, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
        self._one = torch.ones((), device=device)
        self._verdict = torch.zeros((), device=device)
        self._stand_in = torch.optim.SGD([self._verdict])
        self._scaler.scale(self._one)  # the scale itself is made when it is first used

    def scale(self, loss: Tensor) -> Tensor:
        """What the backward pass begins with."""
        return self._scaler.scale(loss)

    @property
    def factor(self) -> Tensor | None:
        """The scale as a tensor on the device; None where nothing is scaled."""
        return self._scaler.scale(self._one) if self._scaler.is_enabled() else None

    def follow(self, skipped: Tensor) -> None:
        """Moves the scale after a step."""
        if self._scaler.is_enabled():
            self._verdict.grad = torch.where(skipped, math.inf, 0.0)
            self._scaler.unscale_(self._stand_in)
            self._scaler.update()

    def read(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers, none where nothing is scaled. Waits for the device."""
        return self._scaler.state_dict()

    def restore(self, kept: dict[str, Any]) -> None:
        """Takes up what `read` gave."""
        self._scaler.load_state_dict(kept)
