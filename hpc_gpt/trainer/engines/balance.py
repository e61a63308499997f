"""The balance of a mixture's experts in a step: the factor of its losses, the choice biases, and the step's figures."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.states import WEIGHT, Held, SavedStates, Share
from hpc_gpt.trainer.model.router import Router, routers_of

_COMPARED_EVERY = 100  # steps, besides an attempt's first one


class Balance:
    """The routers of this rank's model or stage; without experts every method does nothing. `step` gives the steps that
    are done."""

    def __init__(self, resolved: Resolved, module: nn.Module, device: torch.device, step: Callable[[], int]) -> None:
        layout, shape, train = resolved.layout, resolved.model, resolved.train
        self._routers: list[Router] = routers_of(module)
        self._of_other_model = getattr(module, "choice_biases", dict)  # transformers' routers
        self._first = shape.dense_layers  # the first layer with experts
        self._layers, self._experts = shape.layers - shape.dense_layers, shape.experts or 0
        self._rate = train.balance_rate if train.balance == "bias" else 0.0
        self._device = device
        self._gpus = layout.gpus
        # A micro-batch of a layer is counted by all ranks of one stage; each adds its own balance loss.
        self._losses = layout.gpus // layout.pp * resolved.batch.micro_batches
        at = layout.coordinate(dist.get_rank())
        self._counts = at.tp == at.cp == 0
        # Without sequence parallelism each rank of a tp group chooses for itself, from inputs that should be equal.
        self._choose_apart = [one for one in self._routers if one.tp.size > 1 and one.tp.parts == 1]
        self._step = step
        self._in_step: int | None = None  # the step that has begun
        self._is_mixture = shape.is_mixture and bool(routers_of(module) or layout.pp > 1)

    def begin(self, scale: Tensor | float) -> None:
        """Begins a step in which each micro-batch's loss is multiplied by `scale` before its backward pass."""
        for router in self._routers:
            router.scale, router.sums = scale, None
        is_first, self._in_step = self._in_step is None, self._step() + 1
        if is_first or self._in_step % _COMPARED_EVERY == 0:
            for router in self._choose_apart:
                router.choices = torch.zeros((), dtype=torch.int64, device=self._device)

    @torch.no_grad()
    def finish(self, skipped: Tensor | bool) -> Tensor | None:
        """The figures of `StepResult.balance`. Moves the choice biases, unless the step was `skipped`. Collective."""
        if not self._is_mixture:
            return None
        self._compare_choices()
        sums = torch.zeros(self._layers, self._experts + 1, dtype=torch.float64, device=self._device)
        for router in self._routers:
            assert router.sums is not None, f"{router.name} has seen no backward pass"
            sums[router.layer - self._first] = router.sums
        if not self._counts:
            sums[:, :-1] = 0
        if self._gpus > 1:
            dist.all_reduce(sums)
        loads = sums[:, :-1]
        mean = loads.mean(1, keepdim=True)
        if self._rate:
            signs = (mean - loads).sign().float()
            # Signs need not sum to zero; without their mean no choice changes, and the biases do not drift.
            step = (signs - signs.mean(1, keepdim=True)) * self._rate
            if isinstance(skipped, Tensor):
                step = step.masked_fill(skipped, 0)
            elif skipped:
                step = torch.zeros_like(step)
            for router in self._routers:
                assert router.choice_bias is not None
                router.choice_bias += step[router.layer - self._first]
        worst = (loads.amax(1) / mean.squeeze(1)).max()
        return torch.stack([sums[:, -1].mean() / self._losses, worst, (loads == 0).sum()]).float()

    def _compare_choices(self) -> None:
        """Raises RuntimeError if ranks of this tp group have chosen other experts than its first one. Collective."""
        if not (sums := [router.choices for router in self._choose_apart if router.choices is not None]):
            return
        tp, own = self._choose_apart[0].tp, torch.stack(sums)
        everyones = own.new_empty(tp.size * len(own))
        dist.all_gather_into_tensor(everyones, own, group=tp.group)
        for router in self._choose_apart:
            router.choices = None
        for layer, found in zip(self._choose_apart, everyones.view(tp.size, -1).t().tolist(), strict=True):
            if others := [rank for rank, one in enumerate(found) if one != found[0]]:
                first = dist.get_rank() - tp.rank  # the ranks of a tp group are neighbours
                raise RuntimeError(
                    f"step {self._in_step}, layer {layer.layer}: other experts were chosen on rank "
                    f"{', '.join(str(first + rank) for rank in others)} than on rank {first}, of one tensor-parallel "
                    "group, where inputs must be equal"
                )

    @property
    def names(self) -> set[str]:
        """The names of the choice biases."""
        return {*self._biases()}

    def held(self, is_first: bool) -> Iterator[Held]:
        """Yields the choice biases of this stage for a checkpoint; `is_first`: the rank is the first one of its
        stage."""
        for name, bias in self._biases().items() if is_first else ():
            yield Held(Share(name, tuple(bias.shape), None, 0, 1, 0, len(bias), len(bias)), WEIGHT, bias)

    @torch.no_grad()
    def load(self, saved: SavedStates) -> None:
        """Restores the choice biases. Raises CheckpointError if one is missing."""
        for held in self.held(is_first=True):
            saved.read(held.share, WEIGHT, held.elements)

    def _biases(self) -> dict[str, Tensor]:
        ours = {f"{one.name}.choice_bias": one.choice_bias for one in self._routers if one.choice_bias is not None}
        return ours or self._of_other_model()
