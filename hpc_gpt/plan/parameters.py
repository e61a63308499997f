"""Parameters that one GPU of a pipeline stage holds, from the shape alone."""

from __future__ import annotations

from functools import lru_cache

from hpc_gpt.plan.training import Shape, Training
from hpc_gpt.settings.model_shape import stage_layers


@lru_cache(maxsize=4096)
def layer_params(shape: Shape, tp: int) -> float:
    """Of one transformer layer over `tp`: (12 h^2 + 7 h)/t + 6 h for GPT-2 (Shoeybi et al. 2019, section 3).

    Matrices and the biases of what is split by columns are divided; the biases after a sum and the norms are not.
    With fewer key-value heads than `tp` every rank keeps one.

    >>> layer_params(Shape(hidden=768, layers=12, heads=12), 1) == 12 * 768**2 + 13 * 768
    True
    """
    hidden, ffn = shape.hidden, shape.mlp
    kv = kv_width(shape, tp)
    columns = 2 if shape.gated else 1
    params = 2 * hidden * hidden / tp + 2 * hidden * kv + (columns + 1) * hidden * ffn / tp
    if shape.biases:
        return params + (hidden + columns * ffn) / tp + 2 * kv + 2 * hidden + 4 * hidden
    return params + 2 * hidden


def kv_width(shape: Shape, tp: int) -> float:
    """Width of the keys (and of the values) that one GPU has: at least one head."""
    return max(shape.hidden * shape.kv_share / tp, shape.hidden / shape.heads)


def vocab_rows(shape: Shape, tp: int) -> int:
    """Rows of the embedding that one GPU has."""
    return -(-shape.vocab // tp)


def largest_matrix(shape: Shape, tp: int) -> float:
    """Parameters of a layer's largest matrix on one GPU: of the MLP, or Q, K and V as one."""
    attention = shape.hidden * (shape.hidden / tp + 2 * kv_width(shape, tp))
    return max((2 if shape.gated else 1) * shape.hidden * shape.mlp / tp, attention)


def layers_of_stages(training: Training) -> tuple[int, ...]:
    """Transformer layers of every stage, all its chunks together."""
    if training.stage_layers is not None:
        return training.stage_layers
    return _even(training.shape.layers, training.pp)


@lru_cache(maxsize=1024)
def _even(layers: int, pp: int) -> tuple[int, ...]:
    return tuple(stage_layers(layers, pp))


def outer_params(shape: Shape, tp: int, pp: int, stage: int) -> float:
    """Beside the layers: embeddings on the first stage, final norm and head on the last.

    A tied head is the embedding itself on one stage, and a copy of it on the last of several.
    """
    rows = vocab_rows(shape, tp) * shape.hidden
    params = 0.0
    if stage == 0:
        params += rows + (shape.seq * shape.hidden if shape.positions else 0)
    if stage == pp - 1:
        params += (2 if shape.biases else 1) * shape.hidden
        if pp > 1 or not shape.tied:
            params += rows
    return params


def stage_params(training: Training) -> list[float]:
    """Parameters of one GPU of every stage."""
    layer = layer_params(training.shape, training.tp)
    return [
        layers * layer + outer_params(training.shape, training.tp, training.pp, stage)
        for stage, layers in enumerate(layers_of_stages(training))
    ]
