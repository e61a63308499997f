"""`LayerKind`: layers of a model that are alike, as their matrices and norms with the sizes that follow from them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Matrix:
    """A weight of a transformer layer, [rows, columns], that is [outputs, inputs], in `copies`: one for each expert.

    Tensor parallelism divides its rows or its columns (`split`), and a bias together with the rows. A rank has at least
    `least_rows`: one head of the keys, if there are fewer heads than ranks. A token is multiplied by `used` of the
    copies.
    """

    name: str
    rows: int
    columns: int
    split: Literal["rows", "columns", "none"]
    bias: bool = False
    least_rows: int = 0
    copies: int = 1
    used: int = 1

    @property
    def is_routed(self) -> bool:
        """Whether it belongs to experts to which a router sends tokens."""
        return self.copies > 1

    @property
    def size(self) -> int:
        """Parameters of the weight, in all copies, without biases."""
        return self.copies * self.rows * self.columns

    @property
    def used_size(self) -> int:
        """Weights that multiply one token."""
        return self.used * self.rows * self.columns

    @property
    def bias_size(self) -> int:
        """Parameters of the bias, in all copies."""
        return self.copies * self.rows if self.bias else 0

    def rows_on(self, tp: int) -> float:
        """Rows of a copy that one of `tp` ranks multiplies."""
        return max(self.rows / tp, self.least_rows) if self.split == "rows" else self.rows

    def columns_on(self, tp: int) -> float:
        """Columns of a copy on one of `tp` ranks."""
        return self.columns / tp if self.split == "columns" else self.columns

    def size_on(self, tp: int) -> float:
        """Parameters of this weight on one of `tp` ranks, over all its copies, without biases. Ranks that share a head
        of keys hold a part of it each."""
        return self.size if self.split == "none" else self.size / tp

    def bias_on(self, tp: int) -> float:
        """Parameters of the bias on one of `tp` ranks, in all copies."""
        return self.bias_size / tp if self.split == "rows" else self.bias_size


@dataclass(frozen=True)
class NormShape:
    """A normalisation over `width`, with or without a bias; every rank holds all of it."""

    name: str
    width: int
    bias: bool

    @property
    def params(self) -> int:
        return self.width * (2 if self.bias else 1)


@dataclass(frozen=True)
class LayerKind:
    """`count` layers that are alike: the matrices of one, in the order of its forward pass, its norms, and its sinks, a
    parameter each. `window`: keys that a token attends to, its own included; None: all before it, too."""

    name: Literal["dense", "experts"]
    count: int
    matrices: tuple[Matrix, ...]
    norms: tuple[NormShape, ...]
    sinks: int = 0
    window: int | None = None

    @cached_property
    def routed(self) -> tuple[Matrix, ...]:
        """The matrices of the routed experts; none in a dense layer."""
        return tuple(matrix for matrix in self.matrices if matrix.is_routed)

    @cached_property
    def products(self) -> dict[str, tuple[Matrix, ...]]:
        """{linear layer of our model: the matrices of one layer that it computes together}."""
        layers: dict[str, tuple[Matrix, ...]] = {}
        for matrix in self.matrices:
            layers[_LINEAR[matrix.name]] = (*layers.get(_LINEAR[matrix.name], ()), matrix)
        return layers

    @cached_property
    def weights(self) -> int:
        """Parameters of the matrices of one layer, without biases: 12 h^2 for GPT-2."""
        return sum(matrix.size for matrix in self.matrices)

    @cached_property
    def active_weights(self) -> int:
        """Weights of one layer that multiply a token: all but those of experts that it is not sent to."""
        return sum(matrix.used_size for matrix in self.matrices)

    @cached_property
    def params(self) -> int:
        """Parameters of one layer: 12 h^2 + 13 h for GPT-2."""
        others = sum(norm.params for norm in self.norms) + self.sinks
        return self.weights + sum(matrix.bias_size for matrix in self.matrices) + others

    @cached_property
    def expert_params(self) -> int:
        """Parameters of the routed experts of one layer, with biases."""
        return sum(matrix.size + matrix.bias_size for matrix in self.routed)

    @cached_property
    def params_active(self) -> int:
        """Parameters of one layer without those of the experts that a token is not sent to."""
        used = sum((matrix.size + matrix.bias_size) * matrix.used // matrix.copies for matrix in self.routed)
        return self.params - self.expert_params + used


# {matrix: the linear layer of our model that computes it}
_LINEAR = {
    **dict.fromkeys("qkv", "attention.qkv"),
    **{name: f"attention.{name}" for name in ("q_a", "q_b", "kv_a", "kv_b")},
    "o": "attention.projection",
    **dict.fromkeys(("gate", "up"), "feed_forward.up"),
    "down": "feed_forward.down",
    "router": "router",
    **dict.fromkeys(("experts.gate", "experts.up"), "experts.up"),
    "experts.down": "experts.down",
    "shared_gate": "shared_gate",
    **dict.fromkeys(("shared.gate", "shared.up"), "shared.up"),
    "shared.down": "shared.down",
}
