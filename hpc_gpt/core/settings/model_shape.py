"""The shape of a decoder: its matrices and norms, and the sizes and names that follow from them."""

import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Literal

from hpc_gpt.core.errors import LayoutError, check_sizes
from hpc_gpt.core.settings.experiment import Bias, MlpKind, NormKind, Positions, RopeScaling


@dataclass(frozen=True)
class Matrix:
    """A weight of a transformer layer, [rows, columns], that is [outputs, inputs].

    Tensor parallelism divides its rows or its columns (`split`), and a bias together with the rows. A rank has at least
    `least_rows`: one head of the keys, if there are fewer heads than ranks.
    """

    name: str
    rows: int
    columns: int
    split: Literal["rows", "columns"]
    bias: bool = False
    least_rows: int = 0

    @property
    def size(self) -> int:
        """Parameters of the weight without its bias."""
        return self.rows * self.columns

    def rows_on(self, tp: int) -> float:
        """Rows that one of `tp` ranks multiplies."""
        return max(self.rows / tp, self.least_rows) if self.split == "rows" else self.rows

    def columns_on(self, tp: int) -> float:
        """Columns on one of `tp` ranks."""
        return self.columns if self.split == "rows" else self.columns / tp

    def size_on(self, tp: int) -> float:
        """Parameters of the weight without its bias that one of `tp` ranks holds: ranks that share a head of keys hold
        a part of it each."""
        return self.size / tp


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
class ModelShape:
    """The shape of a decoder with a norm before attention and MLP. By default the fields after `vocab_multiple` are
    GPT-2's: learned positions, GELU, biases everywhere.

    A layer is a list of matrices and norms; parameters, bytes and FLOPs follow from it, each computed once, as a search
    asks for them a hundred thousand times. `vocab` is the size of the tokenizer's vocabulary; the embedding has
    `padded_vocab` rows, the next multiple of `vocab_multiple`. `kv_heads`, `head_dim` and `ffn` are None if they follow
    from the other sizes (`key_heads`, `head_width`, `mlp_width`). All layers are alike, except that `rotates` is false
    in every `nope_every`-th one. The embedding gives no gradient to the row of `pad_token`, as transformers' classes of
    Llama's kind do; a tied head does give it one.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int = 50257
    seq: int = 1024
    tied: bool = True
    vocab_multiple: int = 64
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    mlp: MlpKind = "gelu"
    norm: NormKind = "layernorm"
    positions: Positions = "learned"
    bias: Bias = "all"
    embedding_norm: bool = False  # BLOOM's
    norm_eps: float = 1e-5
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    nope_every: int | None = None
    pad_token: int | None = None

    @property
    def key_heads(self) -> int:
        """Number of key and value heads: fewer than `heads` with grouped queries."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Width of the queries and of the output of attention: all heads together."""
        return self.heads * self.head_width

    @property
    def mlp_width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def is_gated(self) -> bool:
        return self.mlp == "swiglu"

    @property
    def is_grouped(self) -> bool:
        """Whether several queries share a head of keys and values."""
        return self.key_heads < self.heads

    def rotates(self, layer: int) -> bool:
        """Whether queries and keys are rotated in the layer, counted from 0."""
        return self.positions == "rope" and not (self.nope_every and (layer + 1) % self.nope_every == 0)

    @property
    def is_gpt2(self) -> bool:
        """Whether the shape is GPT-2's, at any size."""
        sizes = self.key_heads == self.heads and self.query_width == self.hidden and self.mlp_width == 4 * self.hidden
        plain = not self.is_gated and self.norm == "layernorm" and not self.embedding_norm and not self.qk_norm
        return sizes and plain and self.positions == "learned" and self.bias == "all" and self.norm_eps == 1e-5

    @cached_property
    def padded_vocab(self) -> int:
        """Rows of the embedding. A multiple of 64 pads GPT-2's 50257 to 50304, as nanoGPT does."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The weights of one layer, in the order of its forward pass."""
        return _matrices(self)

    @cached_property
    def products(self) -> dict[str, tuple[Matrix, ...]]:
        """{linear layer of our model: the matrices of one layer that it computes together}."""
        layers: dict[str, tuple[Matrix, ...]] = {}
        for matrix in self.matrices:
            layers[_LINEAR[matrix.name]] = (*layers.get(_LINEAR[matrix.name], ()), matrix)
        return layers

    @property
    def parameter_names(self) -> list[str]:
        """The names of our model's parameters, in the order of the model."""
        linear = [name for layer, parts in self.products.items() for name in _names(layer, parts[0].bias)]
        first, second, *head_norms = (_names(norm.name, norm.bias) for norm in self.norms)
        of_heads = [name for names in head_norms for name in names]
        in_attention = [name.startswith("attention") for name in linear].count(True)
        block = [*first, *linear[:in_attention], *of_heads, *second, *linear[in_attention:]]
        return [
            *_names("embedding", False),
            *(_names("position", False) if self.position_params else []),
            *(f"blocks.{number}.{name}" for number in range(self.layers) for name in block),
            *_names("norm", self.outer_norms[-1].bias),
            *([] if self.tied else _names("head", False)),
        ]

    @cached_property
    def norms(self) -> tuple[NormShape, ...]:
        """The norms of one layer."""
        of_heads = ("attention.query_norm", "attention.key_norm") if self.qk_norm else ()
        return (
            *(NormShape(name, self.hidden, self.norm == "layernorm") for name in ("norm1", "norm2")),
            *(NormShape(name, self.head_width, False) for name in of_heads),
        )

    @cached_property
    def outer_norms(self) -> tuple[NormShape, ...]:
        """The norms outside the layers: that after the embedding, if there is one, and the last one."""
        names = ("embedding_norm", "norm") if self.embedding_norm else ("norm",)
        return tuple(NormShape(name, self.hidden, self.norm == "layernorm") for name in names)

    @property
    def position_params(self) -> int:
        """Parameters of learned positions."""
        return self.seq * self.hidden if self.positions == "learned" else 0

    @cached_property
    def layer_weights(self) -> int:
        """Parameters of the matrices of one layer, without biases: 12 h^2 for GPT-2."""
        return sum(matrix.size for matrix in self.matrices)

    @property
    def multiplied(self) -> int:
        """Number of weights that multiply every token: the matrices of the layers, and the head. Tables that are looked
        up (an embedding without a tied head, positions), biases and norms do not count."""
        return self.layers * self.layer_weights + self.padded_vocab * self.hidden

    @cached_property
    def block_params(self) -> int:
        """Parameters of one layer: 12 h^2 + 13 h for GPT-2."""
        biases = sum(matrix.rows for matrix in self.matrices if matrix.bias)
        return self.layer_weights + biases + sum(norm.params for norm in self.norms)

    @cached_property
    def params(self) -> int:
        """Parameters of the whole model, the tied embedding counted once."""
        embedding = self.padded_vocab * self.hidden * (1 if self.tied else 2)
        outside = self.position_params + sum(norm.params for norm in self.outer_norms)
        return self.layers * self.block_params + embedding + outside

    def table(self) -> dict[str, Any]:
        """The fields as a table of resolved.json. Fields after `vocab_multiple` are written only if they differ from
        GPT-2's, so that the text and hash of a GPT-2's settings never change."""
        table = asdict(self)
        later = list(table)[list(table).index("vocab_multiple") + 1 :]
        return {name: value for name, value in table.items() if name not in later or value != _DEFAULTS[name]}


# {matrix: the linear layer of our model that computes it}
_LINEAR = {
    **dict.fromkeys("qkv", "attention.qkv"),
    "o": "attention.projection",
    **dict.fromkeys(("gate", "up"), "feed_forward.up"),
    "down": "feed_forward.down",
}


def _names(layer: str, bias: bool) -> list[str]:
    return [f"{layer}.weight", f"{layer}.bias"] if bias else [f"{layer}.weight"]


_DEFAULTS = {entry.name: entry.default for entry in fields(ModelShape)}


@lru_cache(maxsize=4096)
def _matrices(shape: ModelShape) -> tuple[Matrix, ...]:
    hidden, head, ffn = shape.hidden, shape.head_width, shape.mlp_width
    queries, keys = shape.query_width, shape.key_heads * head
    qkv, everywhere = shape.bias in ("all", "qkv"), shape.bias == "all"
    up = [Matrix(name, ffn, hidden, "rows", everywhere) for name in (("gate", "up") if shape.is_gated else ("up",))]
    return (
        Matrix("q", queries, hidden, "rows", qkv),
        Matrix("k", keys, hidden, "rows", qkv, least_rows=head),
        Matrix("v", keys, hidden, "rows", qkv, least_rows=head),
        Matrix("o", hidden, queries, "columns", everywhere),
        *up,
        Matrix("down", hidden, ffn, "columns", everywhere),
    )


def check_shape(shape: ModelShape) -> None:
    """Raises LayoutError for sizes that contradict each other, or that no model can have."""
    sizes = ("hidden", "layers", "heads", "vocab", "seq", "vocab_multiple", "kv_heads", "head_dim", "ffn")
    check_sizes({name: getattr(shape, name) for name in sizes}, "model.")
    if shape.head_dim is None and shape.hidden % shape.heads:
        raise LayoutError(
            f"hidden {shape.hidden} is not a multiple of heads {shape.heads}: "
            f"{shape.hidden} / {shape.heads} = {shape.hidden / shape.heads:.2f}",
            "choose heads that divide hidden",
        )
    if shape.heads % shape.key_heads:
        raise LayoutError(
            f"kv_heads {shape.key_heads} does not divide the {shape.heads} heads: "
            f"{shape.heads} / {shape.key_heads} = {shape.heads / shape.key_heads:.2f}",
            f"use a model.kv_heads that divides {shape.heads}",
        )
    if not (shape.norm_eps > 0 and math.isfinite(shape.norm_eps)):
        raise LayoutError(f"model.norm_eps is {shape.norm_eps}, but must be above 0", "use 1e-5 or 1e-6")
    if shape.pad_token is not None and shape.positions == "learned":
        raise LayoutError(
            f"model.pad_token is {shape.pad_token}, but model.positions is learned: GPT-2 trains every row",
            "leave model.pad_token out",
        )
    if shape.pad_token is not None and not 0 <= shape.pad_token < shape.vocab:
        raise LayoutError(
            f"model.pad_token is {shape.pad_token}, but the tokens are 0 to {shape.vocab - 1}",
            "name a token of the vocabulary, or leave model.pad_token out",
        )
    _check_rotation(shape)


def _check_rotation(shape: ModelShape) -> None:
    stated = {"rope_theta": shape.rope_theta != 1e4, "rope_scaling": shape.rope_scaling, "nope_every": shape.nope_every}
    if shape.positions != "rope":
        if useless := [name for name, is_given in stated.items() if is_given]:
            raise LayoutError(
                f"model.{useless[0]} is given, but model.positions is {shape.positions}: nothing is rotated",
                f'set model.positions = "rope", or leave {", ".join(useless)} out',
            )
        return
    if shape.head_width % 2:
        raise LayoutError(
            f"model.head_dim is {shape.head_width}, but a rotation needs pairs: it must be even",
            f"use model.head_dim = {shape.head_width + 1}, or other heads",
        )
    if not (shape.rope_theta > 1 and math.isfinite(shape.rope_theta)):
        raise LayoutError(f"model.rope_theta is {shape.rope_theta:g}, but must be above 1", "use 10000 or 500000")
    if shape.nope_every is not None and shape.nope_every < 2:
        raise LayoutError(f"model.nope_every is {shape.nope_every}, but must be 2 or more", "leave it out for none")
    if (scaling := shape.rope_scaling) is not None:
        figures = {"factor": (scaling.factor, 1.0), "low_freq_factor": (scaling.low_freq_factor, 0.0)}
        figures["original_max_position_embeddings"] = (scaling.original_max_position_embeddings, 1)
        for name, (figure, least) in figures.items():
            if not (figure >= least and figure > 0 and math.isfinite(figure)):
                must = f"at least {least:g}" if least else "above 0"
                raise LayoutError(f"model.rope_scaling.{name} is {figure:g}, but must be {must}", "Llama 3.1 has 8")
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if not (high > low and math.isfinite(high)):
            raise LayoutError(
                f"model.rope_scaling.high_freq_factor is {high:g}, but must be above low_freq_factor, {low:g}",
                "Llama 3.1 has 1 and 4",
            )


def architectures_of(shape: ModelShape) -> tuple[str, ...]:
    """The classes of transformers that have this shape, the usual one first; empty if there is none."""
    is_whole = shape.key_heads == shape.heads and shape.query_width == shape.hidden and not shape.qk_norm
    if (shape.mlp, shape.norm, shape.positions) == ("gelu", "layernorm", "learned"):
        return ("GPT2LMHeadModel",) if is_whole and shape.bias == "all" and not shape.embedding_norm else ()
    if (shape.mlp, shape.norm, shape.positions) != ("swiglu", "rmsnorm", "rope") or shape.embedding_norm:
        return ()
    special = [shape.qk_norm, shape.nope_every is not None, shape.bias != "none"]
    if sum(special) > 1:
        return ()
    if shape.qk_norm:
        return ("Qwen3ForCausalLM",)
    if shape.nope_every is not None:
        return ("SmolLM3ForCausalLM",)
    if shape.bias == "qkv":
        return ("Qwen2ForCausalLM",)
    # Only Llama's class refuses a width that is not a multiple of its heads, whatever head_dim says.
    llama = ("LlamaForCausalLM",) if shape.hidden % shape.heads == 0 else ()
    return llama if shape.bias == "all" else (*llama, "MistralForCausalLM", "SmolLM3ForCausalLM")


def architecture_of(shape: ModelShape) -> str | None:
    """The class of transformers for this shape; None if there is none."""
    return next(iter(architectures_of(shape)), None)
