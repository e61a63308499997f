"""The optimizers: a module each, with `build`, named as its facts in `core.optimizers`."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.engines.base.owners import Owned, deal
from hpc_gpt.core.optimizers import optimizer_named
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.states import Share
from hpc_gpt.trainer.model.tensor_parallel import full_name, split_of
from hpc_gpt.trainer.optimizers.newton_schulz import is_hidden, matrices_in

# The ranks that hold the same of a parameter; None for this rank alone.
Replicas = Callable[[nn.Parameter], dist.ProcessGroup | None]
# Numbers to whose multiples weights are aligned in a buffer, as kernels read 128 bytes at once.
_ALIGNED = 32


@dataclass(frozen=True)
class Updated:
    """The `parameters` of a rank, of which each is a share of the whole model (DeepSpeed's engines give no `shares`).

    `owners`: the rank that updates each parameter and has its states; empty if each rank updates all.
    """

    resolved: Resolved
    parameters: Sequence[nn.Parameter]
    shares: Sequence[Share]
    replicas: Replicas = lambda _: None
    owners: Mapping[nn.Parameter, int] = field(default_factory=dict)

    @property
    def own(self) -> list[nn.Parameter]:
        """The parameters whose states this rank has."""
        return [one for one in self.parameters if not self.owners or self.owners[one] == dist.get_rank()]

    def deal(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> dict[nn.Parameter, int]:
        """The rank of the group that computes the update of each of the parameters."""
        by_name = {full_name(one): one for one in parameters}
        facts = optimizer_named(self.resolved.train.optimizer)
        ranks = 1 if group is None else dist.get_world_size(group)
        owners = deal([_describe_parameter(name, one) for name, one in by_name.items()], facts, ranks)
        return {one: owners[name] for name, one in by_name.items()}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """torch's groups: matrices and embeddings, which decay; biases and norms, of one dimension, which do not."""
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for one in self.own:  # under ZeRO-3 a rank holds only a flat piece
            parts[len(getattr(one, "ds_shape", one.shape)) < 2].append(one)
        decays = self.resolved.train.weight_decay, 0.0
        return [{"params": part, "weight_decay": decay} for part, decay in zip(parts, decays, strict=True)]

    @property
    def kernels(self) -> dict[str, bool]:
        """torch's arguments for `train.optimizer_mode`.

        Modes fused and host are torch's fused kernels, on the device or for states offloaded to the host: one pass, no
        compiler, and the host does not wait. Foreach launches one kernel per operation for all parameters, for-loop one
        per operation and parameter. With both the host waits for the gradient norm, because they cannot skip a step on
        the device. Results differ only by rounding.
        """
        mode = self.resolved.train.optimizer_mode or "fused"
        return {"fused": mode in ("fused", "host"), "foreach": mode == "foreach"}


def build_optimizer(
    resolved: Resolved,
    parameters: Iterable[nn.Parameter],
    shares: Sequence[Share] = (),
    replicas: Replicas = lambda _: None,
) -> torch.optim.Optimizer:
    """The optimizer that `train.optimizer` names. Collective.

    Before each step the engine sets the `lr` of each group, by the group's own `peak_lr` if it has one. With
    `defaults["fused"]` a step obeys `found_inf` and `grad_scale`, as torch's fused kernels do. States of a parameter's
    size are saved by their names. With engine.sharded_optimizer each rank has the states of some parameters, which it
    updates; `send_weights` is to be called after a step.
    """
    module = importlib.import_module(f"{__name__}.{resolved.train.optimizer.replace('-', '_')}")
    updated = Updated(resolved, list(parameters), shares, replicas)
    if resolved.engine.sharded_optimizer:
        updated = replace(updated, owners=updated.deal(updated.parameters, dist.group.WORLD))
    optimizer: torch.optim.Optimizer = module.build(updated)
    if updated.owners:
        sent_apart = {one for matrices in getattr(optimizer, "matrices", ()) for one in matrices.parameters}
        owners = {one: rank for one, rank in updated.owners.items() if one not in sent_apart}
        optimizer.send_weights = SentWeights(owners).send  # type: ignore[attr-defined]
    return optimizer


class SentWeights:
    """Weights of which each is updated by its owner, one of all ranks. Those of an owner lie in one buffer, which it
    sends to the others."""

    def __init__(self, owners: Mapping[nn.Parameter, int]) -> None:
        """Moves the weights into the buffers."""
        self._buffers: dict[int, Tensor] = {}
        for owner in sorted(set(owners.values())):
            weights = [one for one, rank in owners.items() if rank == owner]
            sizes = [-(-one.numel() // _ALIGNED) * _ALIGNED for one in weights]
            self._buffers[owner] = buffer = weights[0].new_zeros(sum(sizes))
            for one, place in zip(weights, torch.split(buffer, sizes), strict=True):
                place = place[: one.numel()].view_as(one)
                one.data = place.copy_(one.detach())

    @torch.no_grad()
    def send(self) -> None:
        """Sends what each rank has updated. Collective."""
        sent = [dist.broadcast(buffer, owner, async_op=True) for owner, buffer in self._buffers.items()]
        for work in filter(None, sent):
            work.wait()


def _describe_parameter(name: str, parameter: nn.Parameter) -> Owned:
    matrices = matrices_in(parameter, split_of(parameter)) if is_hidden(parameter) else []
    sizes = [((1, *one.shape) if one.ndim == 2 else (len(one), *one.shape[1:])) for one in matrices]
    return Owned(name, parameter.numel(), tuple(sizes))
