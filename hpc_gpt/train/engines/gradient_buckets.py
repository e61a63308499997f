"""What DistributedDataParallel does with a bucket of half gradients whose weights have fp32 masters."""

# No `from __future__ import annotations`: DDP compares this hook's annotations with the types themselves.
import torch
import torch.distributed as dist

from hpc_gpt.train.engines.flat_masters import FlatMasters
from hpc_gpt.train.engines.master_weights import MasterWeights


def average_into_masters(
    masters: MasterWeights,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP's hook for a bucket that is full.

    Adds to it, in fp32, what the micro-batches before left in the masters' gradients, begins the average of that over
    the ranks, beside which the backward pass goes on, and makes it the masters' gradients.
    """
    half = bucket.buffer()
    whole = half.float()
    owners = [masters.master_of(weight) for weight in bucket.parameters()]
    pieces = whole.split([owner.numel() for owner in owners])
    views = [piece.view_as(owner) for piece, owner in zip(pieces, owners, strict=True)]
    earlier = [owner.grad for owner in owners if owner.grad is not None]
    if earlier:
        torch._foreach_add_(views, earlier)
    for owner, view in zip(owners, views, strict=True):
        owner.grad = view
    whole /= dist.get_world_size()
    averaged = dist.all_reduce(whole, async_op=True).get_future()
    # DDP waits for it, and takes what it holds back to the half gradients, which nobody needs any more.
    done: torch.futures.Future[torch.Tensor] = averaged.then(lambda _: half)
    return done


def average_in_place(
    masters: FlatMasters,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The same for masters whose gradients are fp32 sums in a flat buffer: they are averaged where they lie, all those
    of a bucket in one call."""
    half = bucket.buffer()
    weights = bucket.parameters()
    for weight, gradient in zip(weights, bucket.gradients(), strict=True):
        masters.add(weight, gradient)
    sums = [masters.gradient_of(weight) for weight in weights]
    torch._foreach_div_(sums, dist.get_world_size())
    group = dist.group.WORLD
    assert group is not None
    averaged = group.allreduce_coalesced(sums).get_future()
    done: torch.futures.Future[torch.Tensor] = averaged.then(lambda _: half)
    return done
