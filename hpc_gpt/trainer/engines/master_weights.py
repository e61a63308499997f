"""A model in bf16 or fp16 whose weights are copies of fp32 master weights.

The optimizer works on the master weights. In this module `half` means bf16 or fp16.

Bytes per parameter, for AdamW: weight 2, master weight 4, gradient 4, moments 8. Half gradients exist until the
backward pass of their block is over. Then they are added together to the master weights' gradients, because a launch
for each of twelve small tensors takes longer than the copy. Passes over memory in a step, besides the backward pass:
one to add each gradient, one for the norm, one for the fused optimizer, one to copy back.

Bytes read and written per parameter in a step of one micro-batch, by counting: gradient to fp32 2 + 4, norm 4, AdamW
16 + 12 and 4 more, because the fused kernel writes the divided gradient back, weight to half 4 + 2; 48 in all. Each
further micro-batch adds 2 + 4 + 4.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.trainer.engines.torch_engine import for_each, gradients_of
from hpc_gpt.trainer.model.tensor_parallel import full_name, is_of_experts, name_parameter, split_of

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MasterWeights:
    """Turns the fp32 weights of all `parts` into half, in place; `masters` are the fp32 master weights, in the same
    order.

    While `collects`, a part's gradients are added to its master weights' gradients in one call as soon as all of them
    are complete, and then dropped. So are those of parts of experts (`reduced_apart`), which DistributedDataParallel
    does not reduce. `Gpt.parts` has the parts of a model.
    """

    def __init__(self, parts: Sequence[Sequence[nn.Parameter]], dtype: torch.dtype) -> None:
        self.weights = [weight for part in parts for weight in part]
        self.masters: list[nn.Parameter] = []
        self.collects = True
        self.reduced_apart = False
        # Per part: the number of its weights, and the weights that wait for the gradients of the others.
        self._sizes = [len(part) for part in parts]
        self._waiting: list[list[Tensor]] = [[] for _ in parts]
        for number, part in enumerate(parts):
            for weight in part:
                master = nn.Parameter(weight.detach())
                self.masters.append(name_parameter(master, full_name(weight), split_of(weight)))
                weight.data = weight.detach().to(dtype)
                weight.register_post_accumulate_grad_hook(partial(self._collect, number))  # type: ignore[no-untyped-call]
        self._master_of = dict(zip(map(id, self.weights), self.masters, strict=True))

    def master_of(self, weight: Tensor) -> nn.Parameter:
        """The master weight that `weight` copies."""
        return self._master_of[id(weight)]

    @torch.no_grad()
    def _collect(self, number: int, weight: Tensor) -> None:
        if not self.collects and not (self.reduced_apart and is_of_experts(weight)):
            return
        waiting = self._waiting[number]
        assert not any(other is weight for other in waiting), "a part's gradients are not complete"
        waiting.append(weight)
        if len(waiting) == self._sizes[number]:
            self.add(waiting, gradients_of(waiting))
            for done in waiting:
                done.grad = None
            waiting.clear()

    def add(self, weights: Sequence[Tensor], gradients: list[Tensor]) -> None:
        """Adds gradients of `weights` to the gradients of their master weights.

        Either all these master weights have a gradient from earlier micro-batches, or none has. The first gradients of
        a step are copied in one launch on a GPU; torch adds further ones, half to fp32, in one launch per weight.
        """
        owners = [self.master_of(weight) for weight in weights]
        if earlier := gradients_of(owners):
            for_each("add_", earlier, gradients)
            return
        for owner in owners:
            owner.grad = torch.empty_like(owner)
        for_each("copy_", gradients_of(owners), gradients)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """The communication hook of DistributedDataParallel, for a full bucket of half gradients.

        Adds to it, in fp32, the master weights' gradients from earlier micro-batches, begins the all-reduce that
        averages the sum over the ranks during the backward pass, and makes the result the master weights' gradients.
        """
        half = bucket.buffer()
        whole = half.float()
        owners = [self.master_of(weight) for weight in bucket.parameters()]
        pieces = whole.split([owner.numel() for owner in owners])
        views = [piece.view_as(owner) for piece, owner in zip(pieces, owners, strict=True)]
        if earlier := gradients_of(owners):
            for_each("add_", views, earlier)
        for owner, view in zip(owners, views, strict=True):
            owner.grad = view
        whole /= dist.get_world_size()
        averaged = dist.all_reduce(whole, async_op=True).get_future()
        # DDP waits for it, and copies its value to the half gradients, which are no longer needed.
        done: torch.futures.Future[Tensor] = averaged.then(lambda _: half)
        return done

    @torch.no_grad()
    def refresh(self, weights: Sequence[Tensor]) -> None:
        """Copies the master weights into `weights` again, after the optimizer's step."""
        for_each("copy_", [*weights], [self.master_of(weight) for weight in weights])

    def drop_gradients(self, weights: Sequence[Tensor]) -> None:
        """Drops the gradients of the master weights of `weights`."""
        for weight in weights:
            self.master_of(weight).grad = None

    def copy_back(self) -> None:
        """Copies all master weights into the weights, whoever has changed the master weights."""
        self.refresh(self.weights)
