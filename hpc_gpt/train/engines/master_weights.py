"""A model in bf16 or fp16 whose weights are copies of fp32 master weights: the optimizer works on the masters only.

Bytes a parameter, for AdamW: weight 2, master 4, gradient 4, moments 8. A half gradient lives from the end of its
own layer's backward pass to its addition to the master's, which happens at once. Passes over memory in a step, beside
the backward pass: one to add each gradient, one for the norm, one for the fused optimizer, one to copy back.

Bytes read and written for a parameter in a step of one micro-batch, by counting: gradient to fp32 2 + 4, norm 4, AdamW
16 + 12 and 4 more, as the fused kernel writes the divided gradient back, weight to half 4 + 2; 48 in all. Each further
micro-batch adds 2 + 4 + 4. `one_pass_adamw` takes 34 and 40 for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.model.tensor_parallel import full_name, name_parameter, split_of
from hpc_gpt.train.engines.optimizer import gradients_of, norms_of
from hpc_gpt.train.engines.private_parts import for_each

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MasterWeights:
    """Turns the fp32 `weights` into their halves, in place; `masters` are what they were, in the same order.

    While `collects`, a weight's gradient is added to its master's as soon as it is there, and dropped.
    """

    def __init__(self, weights: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        self.weights = list(weights)
        self.masters: list[nn.Parameter] = []
        self.collects = True
        for weight in self.weights:
            master = nn.Parameter(weight.detach())
            self.masters.append(name_parameter(master, full_name(weight), split_of(weight)))
            weight.data = weight.detach().to(dtype)
            weight.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]
        self._master_of = dict(zip(map(id, self.weights), self.masters, strict=True))

    def master_of(self, weight: Tensor) -> nn.Parameter:
        """The master that `weight` is a copy of."""
        return self._master_of[id(weight)]

    @torch.no_grad()
    def _collect(self, weight: Tensor) -> None:
        if not self.collects:
            return
        assert weight.grad is not None
        self.add(weight, weight.grad)
        weight.grad = None

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """Adds a gradient of `weight` to its master's."""
        master = self.master_of(weight)
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """What DistributedDataParallel does with a bucket of half gradients that is full.

        Adds to it, in fp32, what the micro-batches before left in the masters' gradients, begins the average of that
        over the ranks, while the backward pass goes on, and makes it the masters' gradients.
        """
        half = bucket.buffer()
        whole = half.float()
        owners = [self.master_of(weight) for weight in bucket.parameters()]
        pieces = whole.split([owner.numel() for owner in owners])
        views = [piece.view_as(owner) for piece, owner in zip(pieces, owners, strict=True)]
        # All masters have a gradient from the micro-batches before, or none has.
        if earlier := gradients_of(owners):
            for_each("add_", views, earlier)
        for owner, view in zip(owners, views, strict=True):
            owner.grad = view
        whole /= dist.get_world_size()
        averaged = dist.all_reduce(whole, async_op=True).get_future()
        # DDP waits for it, and copies what it holds back to the half gradients, which are not needed any more.
        done: torch.futures.Future[Tensor] = averaged.then(lambda _: half)
        return done

    def norms(self) -> Tensor:
        """The norms of the pieces of what has been added up in this step."""
        return norms_of(gradients_of(self.masters))

    def finish_step(self) -> None:
        """After the optimizer's step: the weights follow, the gradients go."""
        self.copy_back()
        for master in self.masters:
            master.grad = None

    @torch.no_grad()
    def copy_back(self) -> None:
        """The weights follow their masters."""
        for_each("copy_", [*self.weights], [*self.masters])
