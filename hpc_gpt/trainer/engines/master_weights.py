"""A model in bf16 or fp16 whose weights are copies of fp32 master weights, and AdamW that updates both in one pass.

The optimizer works on the master weights. In this module `half` means bf16 or fp16.

Bytes per parameter, for AdamW: weight 2, master weight 4, gradient 4, moments 8. Half gradients exist until the
backward pass of their block is over. Then they are added together to the master weights' gradients, because a launch
for each of twelve small tensors takes longer than the copy. Passes over memory in a step, besides the backward pass:
one to add each gradient, one for the norm, one for the fused optimizer, one to copy back.

Bytes read and written per parameter in a step of one micro-batch, by counting: gradient to fp32 2 + 4, norm 4, AdamW
16 + 12 and 4 more, because the fused kernel writes the divided gradient back, weight to half 4 + 2; 48 in all. Each
further micro-batch adds 2 + 4 + 4.

`OnePassAdamW` is AdamW in one compiled pass, from the gradient to moments, master weight and half weight. All of them
are in flat buffers. The gradient buffer exists from the first gradient of a step to the end of the step, so a forward
pass does not have it next to its activations. It is half if a step has one gradient per parameter, and fp32 if it has
several, from micro-batches or ranks.

Bytes read and written per parameter in such a step, counted as above:

    one micro-batch on one rank, half gradients     copy 2 + 2, norm 2, update 2 + 12 and 12 + 2                     34
    several gradients, fp32 sums                    copy 2 + 4, norm 4, update 4 + 12 and 12 + 2                     40
    each further micro-batch                        2 + 4 + 4                                                        10

The copy reads gradients that the block's backward pass has just written. With several ranks the average adds 4 + 4, for
the division and the all-reduce, as in every mode. Memory: weight 2, master weight 4, moments 8, and from the first
gradient of a step to its end 2, or 4 for sums.

These are the figures with Inductor, which makes one loop per group without temporaries. Backend aot_eager runs the same
formula operation by operation: correct, but slow, and with temporaries as large as the model's fp32 weights.
tests/benchmarks/update.py measures the time.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.trainer.engines.kernels import check_backend
from hpc_gpt.trainer.engines.optimizer import by_decay, gradients_of, norms_of
from hpc_gpt.trainer.engines.torch_private import all_reduce_each, for_each
from hpc_gpt.trainer.model.tensor_parallel import full_name, is_of_experts, name_parameter, split_of

# A parameter begins at a multiple of this many elements: 128 bytes of half, which is aligned for every kernel.
_ALIGNED = 64
# This many squares are summed in fp32, and their sums in float64: with more squares a CPU would lose digits. The size
# of a buffer is a multiple of it.
_SUMMED = 1024
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

    def norms(self) -> Tensor:
        """The norms of the pieces of this step's gradient, in one tensor."""
        return norms_of(gradients_of(self.masters))

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
        MasterWeights.refresh(self, self.weights)


class FlatGroup:
    """Flat buffers of parameters with the same weight decay: fp32 `masters` (the master weights), `halves`, and during
    a step `gradients`."""

    def __init__(self, weights: Sequence[nn.Parameter], decays: bool, dtype: torch.dtype, sums: torch.dtype) -> None:
        self.decays = decays
        self._device, self._sums = weights[0].device, sums
        self._shapes = [weight.shape for weight in weights]
        self._starts = [0]  # one per parameter; the last number is the end
        for shape in self._shapes:
            self._starts.append(self._starts[-1] + _rounded(shape.numel(), _ALIGNED))
        self._starts[-1] = _rounded(self._starts[-1], _SUMMED)
        self.masters = self._empty(torch.float32)
        self.halves = self._empty(dtype)
        self.gradients: Tensor | None = None

    def view(self, flat: Tensor, number: int) -> Tensor:
        """The view of parameter `number` in one of the buffers, or in another buffer of the same length."""
        shape, start = self._shapes[number], self._starts[number]
        return flat[start : start + shape.numel()].view(shape)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The views of all parameters, in order."""
        return [self.view(flat, number) for number in range(len(self._shapes))]

    def begin_gradients(self) -> Tensor:
        """Returns the gradient buffer. A new one is not initialised, except for the gaps."""
        if self.gradients is None:
            self.gradients = self._empty(self._sums)
        return self.gradients

    def _empty(self, dtype: torch.dtype) -> Tensor:
        """A buffer whose gaps between parameters are zero, because the gaps are read, too."""
        flat = torch.empty(self._starts[-1], dtype=dtype, device=self._device)
        ends = [start + shape.numel() for start, shape in zip(self._starts, self._shapes, strict=False)]
        gaps = [(end, start) for end, start in zip(ends, self._starts[1:], strict=True) if end < start]
        if gaps:
            for_each("zero_", [flat[end:start] for end, start in gaps])
        return flat


class FlatMasterWeights(MasterWeights):
    """`MasterWeights` whose master weights and half weights are views of a FlatGroup's buffers, one group per weight
    decay.

    A part's gradients are copied or added to the gradient buffer in one call. `sums` is the buffer's dtype: the
    weights' dtype if a step has one gradient per parameter, else fp32.
    """

    @torch.no_grad()
    def __init__(self, parts: Sequence[Sequence[nn.Parameter]], dtype: torch.dtype, sums: torch.dtype) -> None:
        weights = [weight for part in parts for weight in part]
        self.groups: list[FlatGroup] = []
        self._places: dict[int, tuple[FlatGroup, int]] = {}
        for alike, decays in zip(by_decay(weights), (True, False), strict=True):
            if alike:
                self.groups.append(group := FlatGroup(alike, decays, dtype, sums))
                self._places |= {id(weight): (group, number) for number, weight in enumerate(alike)}
        for weight in weights:
            group, number = self._places[id(weight)]
            weight.data = group.view(group.masters, number).copy_(weight)
        super().__init__(parts, dtype)
        for weight in self.weights:
            group, number = self._places[id(weight)]
            weight.data = group.view(group.halves, number).copy_(weight)
        self._arrived: set[int] = set()

    def masters_of(self, group: FlatGroup) -> list[nn.Parameter]:
        """A group's master weights, in its order."""
        return [self.master_of(weight) for weight in self.weights if self._places[id(weight)][0] is group]

    def add(self, weights: Sequence[Tensor], gradients: list[Tensor]) -> None:
        """Copies the first gradients of a step into the gradient buffer; adds further ones as `MasterWeights` does."""
        places = [self.gradient_of(weight) for weight in weights]
        if id(weights[0]) not in self._arrived:
            self._arrived.update(map(id, weights))
            for_each("copy_", places, gradients)
        else:
            assert places[0].dtype == torch.float32, "a second gradient in a step that should have one"
            for_each("add_", places, gradients)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """The communication hook, as in `MasterWeights`. Averages all sums of a bucket in place, in one call."""
        half = bucket.buffer()
        weights = bucket.parameters()
        self.add(weights, bucket.gradients())
        sums = [self.gradient_of(weight) for weight in weights]
        for_each("div_", sums, dist.get_world_size())
        done: torch.futures.Future[Tensor] = all_reduce_each(sums).then(lambda _: half)
        return done

    def gradient_of(self, weight: Tensor) -> Tensor:
        """The view of the gradient buffer for a weight."""
        group, number = self._places[id(weight)]
        return group.view(group.begin_gradients(), number)

    def norms(self) -> Tensor:
        """The norms of pieces of the gradients, which are read once. All gradients must have been added before."""
        assert len(self._arrived) == len(self.weights), f"{len(self._arrived)} of {len(self.weights)} gradients"
        pieces = [group.begin_gradients().view(-1, _SUMMED) for group in self.groups]
        return torch.cat([torch.linalg.vector_norm(piece, dim=1, dtype=torch.float32) for piece in pieces])

    def refresh(self, weights: Sequence[Tensor]) -> None:
        """Does nothing: the update has written the half weights."""

    def drop_gradients(self, weights: Sequence[Tensor]) -> None:
        """Drops the gradient buffers of all groups with one of `weights`."""
        for weight in weights:
            self._arrived.discard(id(weight))
            self._places[id(weight)][0].gradients = None


def _rounded(numbers: int, multiple: int) -> int:
    return -(-numbers // multiple) * multiple


class _Buffers(NamedTuple):
    """The buffers of a group, all of the same length: gradients half or fp32; master weights and moments fp32; half
    weights."""

    gradients: Tensor
    masters: Tensor
    first: Tensor
    second: Tensor
    halves: Tensor


class OnePassAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW (Loshchilov and Hutter 2019, algorithm 2) over the groups of `masters`; writes the half
    weights, too.

    All groups have one learning rate, which is read at each step. Like torch's fused kernels it can divide the gradient
    or skip the step (`optimizer.instruct`), and waits for nothing. Its state has torch's keys per parameter:
    "step", "exp_avg", "exp_avg_sq", views of its own buffers. Raises ConfigError if `engine.compile_backend` lacks its
    compiler.
    """

    obeys = True  # see optimizer.is_fused

    def __init__(self, train: Train, masters: FlatMasterWeights, engine: Engine) -> None:
        device = masters.weights[0].device
        check_backend(engine.compile_backend, device, "or leave train.optimizer_mode out")
        self._groups = masters.groups
        self._betas, self._eps = (train.beta1, train.beta2), train.eps
        groups = [
            {"params": masters.masters_of(group), "weight_decay": train.weight_decay if group.decays else 0.0}
            for group in self._groups
        ]
        super().__init__(groups, {"lr": train.lr, "betas": self._betas, "eps": self._eps, "fused": True})
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        self._moments = [(torch.zeros_like(group.masters), torch.zeros_like(group.masters)) for group in self._groups]
        # One count per parameter, as in torch, although all are equal.
        self._steps = torch.zeros(sum(len(group["params"]) for group in self.param_groups), device=device)
        self._one, self._never = torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device)
        steps = iter(self._steps)
        for group, settings, (first, second) in zip(self._groups, self.param_groups, self._moments, strict=True):
            for owner, *moments in zip(settings["params"], group.views(first), group.views(second), strict=True):
                self.state[owner] = {"step": next(steps), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        self._update = torch.compile(
            _update,
            backend=engine.compile_backend,
            dynamic=False,
            fullgraph=True,
            # Trying several block sizes would copy the tensors that the kernel writes: 26 bytes per parameter at the
            # first step.
            options={"triton.autotune_pointwise": False} if engine.compile_backend == "inductor" else None,
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does one step with the gradients that `masters` has collected."""
        assert closure is None
        skipped = self._never if self.found_inf is None else self.found_inf.bool()
        self._steps += ~skipped
        # In fp32 the bias corrections would lose digits, as 1 - 0.999.
        count = self._steps[0].double()
        lr = self.param_groups[0]["lr"]
        beta1, beta2 = self._betas
        self._update(
            [self._buffers(*pair) for pair in zip(self._groups, self._moments, strict=True)],
            [torch.full_like(self._one, group["lr"] * group["weight_decay"]) for group in self.param_groups],
            (torch.full_like(count, lr) / (1 - beta1**count)).float(),
            (1 - beta2**count).sqrt().float(),
            self._one if self.grad_scale is None else self.grad_scale,
            skipped,
            self._betas,
            self._eps,
        )

    @staticmethod
    def _buffers(group: FlatGroup, moments: tuple[Tensor, Tensor]) -> _Buffers:
        assert group.gradients is not None, "no gradient came"
        return _Buffers(group.gradients, group.masters, *moments, group.halves)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the state of each parameter, by torch's numbers, into the buffers. Missing states become zero."""
        owners = [owner for group in self.param_groups for owner in group["params"]]
        for number, owner in enumerate(owners):
            saved = state_dict["state"].get(number)
            for key, place in self.state[owner].items():
                if saved is None:
                    place.zero_()
                else:
                    place.copy_(saved[key])


def _update(
    groups: list[_Buffers],
    decays: list[Tensor],
    step_size: Tensor,
    root: Tensor,
    divisor: Tensor,
    skipped: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Updates every group in place.

    `decays`: rate x weight decay of each group; `step_size`: rate / (1 - beta1^step); `root`: sqrt(1 - beta2^step).
    These, `divisor` and `skipped` are tensors without dimensions.
    """
    beta1, beta2 = betas
    for (gradients, masters, first, second, halves), decay in zip(groups, decays, strict=True):
        gradient = gradients.float() / divisor
        mean = beta1 * first + (1 - beta1) * gradient
        square = beta2 * second + (1 - beta2) * gradient * gradient
        moved = masters - decay * masters - step_size * mean / (square.sqrt() / root + eps)
        # `where`, because a skipped value may be NaN, and NaN times zero is NaN.
        moved = torch.where(skipped, masters, moved)
        first.copy_(torch.where(skipped, first, mean))
        second.copy_(torch.where(skipped, second, square))
        masters.copy_(moved)
        halves.copy_(moved)
