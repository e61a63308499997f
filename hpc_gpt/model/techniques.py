"""How the model computes what it computes: switches that trade time for memory; results differ by rounding alone."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_gpt.settings.experiment import Engine, Recompute


@dataclass(frozen=True)
class Techniques:
    """The switches of `[engine]` that the model itself acts on.

    `recompute`: which activations are dropped and made anew in the backward pass: none, those of the attention alone
    (selective), or all of a block (full). `sequence_parallel`: norms and residuals are split over the tensor-parallel
    group by position. `tiles`: pieces of every linear layer's outputs. `activation_offload`: kept activations wait in
    the host's memory. `loss_chunks`: the logits are made and used up in so many pieces of the micro-batch's tokens.
    """

    recompute: Recompute = "none"
    sequence_parallel: bool = False
    tiles: int = 1
    activation_offload: bool = False
    loss_chunks: int = 1

    @staticmethod
    def of(engine: Engine) -> Techniques:
        """Those that an experiment switches on."""
        return Techniques(
            recompute=engine.recompute,
            sequence_parallel=engine.sequence_parallel,
            tiles=engine.tiles,
            activation_offload=engine.activation_offload,
            loss_chunks=engine.loss_chunks,
        )
