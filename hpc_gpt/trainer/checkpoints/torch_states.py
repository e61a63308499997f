"""What an engine without DeepSpeed saves and loads: fp32 parameters, and the states of torch's optimizer of them."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.checkpoints.states import WEIGHT, Held, SavedStates, Share, kept_rows
from hpc_gpt.trainer.model.dispatch import ExpertParallel
from hpc_gpt.trainer.model.tensor_parallel import full_name, is_of_experts


class TorchStates:
    """The `parameters`, of each of which this rank has a share, and the states in their `optimizer`.

    `writes(share)`: whether this rank is the one that saves the share. If `is_sharded`, the optimizer has the states of
    some parameters only, and saves them all.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shares: Sequence[Share],
        optimizer: torch.optim.Optimizer,
        writes: Callable[[Share], bool],
        is_sharded: bool = False,
    ) -> None:
        self._shares = dict(zip(parameters, shares, strict=True))
        self._optimizer, self._writes, self._is_sharded = optimizer, writes, is_sharded

    def held(self) -> Iterator[Held]:
        """Yields what this rank saves."""
        for one, share in self._shares.items():
            if self._writes(share):
                yield Held(share, WEIGHT, one)
        for one in self._owned():
            share = self._shares[one]
            if self._is_sharded or self._writes(share):
                for kind, value in self._optimizer.state.get(one, {}).items():
                    if value.ndim:
                        yield Held(share, kind, value)

    def numbers(self) -> dict[str, float]:
        """The optimizer's states that are one number, the same for all parameters that have it; those of the parameters
        that this rank updates."""
        first: dict[str, Tensor] = {}
        for states in self._optimizer.state.values():
            first = {kind: value for kind, value in states.items() if not value.ndim} | first
        return {kind: float(value) for kind, value in first.items()}

    @torch.no_grad()
    def load(self, saved: SavedStates) -> None:
        """Fills the parameters and the optimizer's states, which any engine has saved."""
        for one, share in self._shares.items():
            saved.read(share, WEIGHT, one)
        states: dict[int, dict[str, Tensor]] = {}
        for number, one in enumerate(self._owned()):
            share = self._shares[one]
            if kinds := saved.kinds(share.name):
                states[number] = {kind: torch.tensor(value) for kind, value in saved.optimizer.items()}
                for kind in kinds:
                    states[number][kind] = torch.zeros_like(one)
                    saved.read(share, kind, states[number][kind])
        # It puts the numbers where a kernel needs them.
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _owned(self) -> list[nn.Parameter]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]


def whole_share(parameter: nn.Parameter, model: ModelShape, experts: ExpertParallel | None = None) -> Share:
    """The share of a parameter that every rank holds whole, but for `experts` that ranks divide."""
    shape, first = list(parameter.shape), 0
    if experts is not None and experts.size > 1 and is_of_experts(parameter):
        first = experts.first(len(parameter)) * parameter[0].numel()
        shape[0] *= experts.size
    name = full_name(parameter)
    return Share(name, tuple(shape), None, 0, 1, first, parameter.numel(), kept_rows(model, name, shape[0]))
