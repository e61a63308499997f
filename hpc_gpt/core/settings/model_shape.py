"""The shape of a decoder: its kinds of layers, and the sizes and names that follow from them."""

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Literal

from hpc_gpt.core.settings.key_rules import key_rules
from hpc_gpt.core.settings.layer_kinds import LayerKind, Matrix, NormShape
from hpc_gpt.core.settings.model_keys import Bias, MlpKind, Model, NormKind, Positions, RopeScaling, Router


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder with a norm before attention and MLP. By default the fields after `vocab_multiple` are
    GPT-2's: learned positions, GELU, biases everywhere.

    Its layers are of one kind, or of two in a mixture of experts whose first `dense_layers` have none; of twice as
    many if only some have a window (`window_layers`). A kind is a list of matrices and norms; parameters, bytes and
    FLOPs follow from it, each computed once, as a search asks for them a hundred thousand times. `vocab` is the size
    of the tokenizer's vocabulary; the embedding has `padded_vocab` rows, the next multiple of `vocab_multiple`.
    `kv_heads`, `head_dim` and `ffn` are None if they follow from the other sizes (`key_heads`, `head_width`,
    `mlp_width`). `rotates` is false in every `nope_every`-th layer. The embedding gives no gradient to the row of
    `pad_token`, as transformers' classes of Llama's kind do; a tied head does give it one. A `window` of the sequence
    or more is none: the shape has neither it nor `window_layers`.

    With `kv_lora` attention is DeepSeek's (Liu et al. 2024, arXiv:2405.04434, section 2.1). No parameter count has the
    `mtp_layers`; the counts of work have them: each is a layer of the last kind, a projection of [h, 2 h] and the head.
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
    qk_norm: bool | Literal["width"] = False
    nope_every: int | None = None
    pad_token: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    expert_ffn: int | None = None
    shared_ffn: int | None = None
    shared_gate: bool = False
    dense_layers: int = 0
    router: Router = "softmax"
    router_bias: bool = False
    expert_groups: int | None = None
    groups_per_token: int | None = None
    norm_topk: bool = False
    router_scale: float = 1.0
    router_dtype: Literal["fp32"] | None = None
    rotated: float = 1.0
    q_lora: int | None = None
    kv_lora: int | None = None
    qk_rope: int | None = None
    v_head: int | None = None
    window: int | None = None
    window_layers: str | None = None
    sinks: bool = False
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window >= self.seq:
            for name in ("window", "window_layers"):
                object.__setattr__(self, name, None)

    def __hash__(self) -> int:
        """By some of the sizes: a search looks a shape up a hundred thousand times."""
        return hash((self.hidden, self.layers, self.heads, self.vocab, self.seq, self.ffn, self.experts))

    @property
    def key_heads(self) -> int:
        """Number of key and value heads: fewer than `heads` with grouped queries."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Width of the queries: all heads together."""
        return self.heads * self.head_width

    @property
    def value_width(self) -> int:
        """Width of the output of attention: the values of all heads together."""
        return self.heads * (self.v_head or self.head_width)

    @property
    def attention_width(self) -> float:
        """Width of all heads together in the FLOPs of attention, the mean of its scores' and its values'."""
        return self.query_width if self.v_head is None else (self.query_width + self.value_width) / 2

    @property
    def attention_layers(self) -> int:
        """Layers that attend, those for later tokens included."""
        return self.layers + self.mtp_layers

    @property
    def attention_keys(self) -> float | None:
        """Keys that a token attends to, the mean over the layers; None without a window."""
        if self.window is None:
            return None
        keys = sum(kind.count * (kind.window or self.seq) for kind in self.kinds)
        return (keys + self.mtp_layers * self.seq) / self.attention_layers

    @property
    def windowed(self) -> int:
        """The number of layers with a window."""
        return self.letters.count("S")

    def window_of(self, layer: int) -> int | None:
        """Keys that a token attends to in the layer, counted from 0: its own and those before; None: all of them."""
        return self.window if self.letters[layer] == "S" else None

    @cached_property
    def letters(self) -> str:
        """A letter for each layer, as in `window_layers`: S has a window below the sequence, L attends to all."""
        letters = "L" if self.window is None else self.window_layers or "S"
        return (letters * self.layers)[: self.layers]

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
    def is_mixture(self) -> bool:
        """Whether it has layers with experts."""
        return self.experts is not None

    @property
    def is_gpt2(self) -> bool:
        """Whether the shape is GPT-2's, at any size."""
        sizes = self.key_heads == self.heads and self.query_width == self.hidden and self.mlp_width == 4 * self.hidden
        plain = not self.is_gated and self.norm == "layernorm" and not self.embedding_norm and not self.qk_norm
        return (
            sizes
            and plain
            and not self.special_keys
            and self.positions == "learned"
            and self.bias == "all"
            and self.norm_eps == 1e-5
        )

    @cached_property
    def padded_vocab(self) -> int:
        """Rows of the embedding. A multiple of 64 pads GPT-2's 50257 to 50304, as nanoGPT does."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def special_keys(self) -> tuple[str, ...]:
        """The keys of [model] that give it a part which Llama's and GPT-2's kind of model does not have."""
        return tuple(name for name, without in _PARTS.items() if getattr(self, name) not in without)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers with their counts, in the order of their first layers; none has the count 0."""
        return _kinds(self)

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer, counted from 0."""
        return self.kinds[self.kind_counts(layer, 1).index(1)]

    def kind_counts(self, first: int, count: int) -> tuple[int, ...]:
        """The number of layers of each kind among `count` layers from the layer `first` on."""
        end, dense = first + count, self._dense
        routed = max(first, min(dense, end))
        ends = {"dense": (first, routed), "experts": (routed, end)}
        return tuple(self.letters.count("S" if kind.window else "L", *ends[kind.name]) for kind in self.kinds)

    @property
    def _dense(self) -> int:
        """The number of layers without experts."""
        return self.dense_layers if self.is_mixture else self.layers

    @property
    def parameter_names(self) -> list[str]:
        """The names of our model's parameters, in the order of the model."""
        blocks = {kind.name: list(_block_names(kind)) for kind in self.kinds}
        return [
            *_names("embedding", False),
            *(_names("position", False) if self.position_params else []),
            *(f"blocks.{number}.{name}" for number in range(self.layers) for name in blocks[self.kind_of(number).name]),
            *_names("norm", self.outer_norms[-1].bias),
            *([] if self.tied else _names("head", False)),
        ]

    @property
    def buffer_names(self) -> list[str]:
        """The names of what a checkpoint has besides parameters: the biases of the routers' choice."""
        layers = range(self._dense, self.layers)
        return [f"blocks.{number}.router.choice_bias" for number in layers if self.router_bias]

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
    def layer_weights(self) -> float:
        """Weights of a layer that multiply a token, the mean over `attention_layers`: 12 h^2 for GPT-2."""
        if len(self.kinds) == 1 and not self.mtp_layers:
            return self.kinds[0].active_weights
        later = self.mtp_layers * (self.kinds[-1].active_weights + 2 * self.hidden**2)
        return (sum(kind.count * kind.active_weights for kind in self.kinds) + later) / self.attention_layers

    def weights_in(self, linear: Collection[str]) -> int:
        """Weights of all layers' linear layers of these names that multiply a token."""
        return sum(
            (kind.count + (kind is self.kinds[-1]) * self.mtp_layers) * matrix.used_size
            for kind in self.kinds
            for name in linear
            for matrix in kind.products.get(name, ())
        )

    @property
    def multiplied(self) -> int:
        """Number of weights that multiply every token: the active matrices of the layers, and the head. Tables that are
        looked up (an embedding without a tied head, positions), biases and norms do not count."""
        heads = (1 + self.mtp_layers) * self.padded_vocab * self.hidden
        return round(self.attention_layers * self.layer_weights) + heads

    @property
    def work_of_layer(self) -> tuple[float, float]:
        """(weights that multiply a token, width of attention) of a layer, the mean over `layers`: those for later
        tokens and their heads are spread over the others."""
        weights = (self.multiplied - self.padded_vocab * self.hidden) / self.layers
        return weights, self.attention_width * self.attention_layers / self.layers

    @cached_property
    def outer_params(self) -> int:
        """Parameters outside the layers, the tied embedding counted once."""
        embedding = self.padded_vocab * self.hidden * (1 if self.tied else 2)
        return embedding + self.position_params + sum(norm.params for norm in self.outer_norms)

    @cached_property
    def params(self) -> int:
        """Parameters of the whole model, the tied embedding counted once."""
        return self.outer_params + sum(kind.count * kind.params for kind in self.kinds)

    @cached_property
    def params_active(self) -> int:
        """Parameters that a token uses: all but those of experts that it is not sent to; both embeddings count."""
        return self.outer_params + sum(kind.count * kind.params_active for kind in self.kinds)

    @cached_property
    def expert_params(self) -> int:
        """Parameters of the routed experts of all layers."""
        return sum(kind.count * kind.expert_params for kind in self.kinds)

    def table(self) -> dict[str, Any]:
        """The fields as a table of resolved.json. Fields after `vocab_multiple` are written only if they differ from
        GPT-2's, so that the text and hash of a GPT-2's settings never change."""
        table = asdict(self)
        later = list(table)[list(table).index("vocab_multiple") + 1 :]
        return {name: value for name, value in table.items() if name not in later or value != DEFAULTS[name]}


def shortest_pattern(letters: str) -> str | None:
    """`window_layers` for the letters of all layers: as few as give them in turn; None if all have the window.

    >>> shortest_pattern("SSLSSL"), shortest_pattern("LLS"), shortest_pattern("SS")
    ('SSL', 'LLS', None)
    """
    counts = range(1, len(letters) + 1)
    pattern = next(letters[:count] for count in counts if (letters[:count] * len(letters)).startswith(letters))
    return None if pattern == "S" else pattern


def _names(layer: str, bias: bool) -> list[str]:
    return [f"{layer}.weight", f"{layer}.bias"] if bias else [f"{layer}.weight"]


def _block_names(kind: LayerKind) -> Iterator[str]:
    """The names of the parameters of one layer, in the order of the model."""
    linear = [name for layer, parts in kind.products.items() for name in _names(layer, parts[0].bias)]
    first, second, *head_norms = (_names(norm.name, norm.bias) for norm in kind.norms)
    in_attention = [name.startswith("attention") for name in linear].count(True)
    yield from (*first, *linear[:in_attention])
    for names in head_norms:
        yield from names
    yield from (*second, *linear[in_attention:])


# {field: its value without a word in [model]}
DEFAULTS = {entry.name: entry.default for entry in fields(ModelShape)}
# {key that gives a model a part of its own: values with which it does not}
_PARTS = {name: rules.without for name, rules in key_rules(Model).items() if rules.part}


@lru_cache(maxsize=4096)
def _kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    attention, norms, sinks = tuple(_attention(shape)), tuple(_norms(shape)), shape.heads if shape.sinks else 0
    dense = (*attention, *_mlp(shape, "", shape.mlp_width))
    routed = (*attention, *_experts(shape)) if shape.is_mixture else ()
    parts: list[tuple[Literal["dense", "experts"], int, int, tuple[Matrix, ...]]] = [
        ("dense", 0, shape._dense, dense),
        ("experts", shape._dense, shape.layers, routed),
    ]
    found = [
        LayerKind(name, shape.letters.count("S" if window else "L", first, end), matrices, norms, sinks, window)
        for name, first, end, matrices in parts
        for window in dict.fromkeys((shape.window, None))
    ]
    return tuple(kind for kind in found if kind.count > 0) or (LayerKind("dense", 0, dense, norms, sinks),)


def _attention(shape: ModelShape) -> Iterator[Matrix]:
    hidden, head, heads, qkv = shape.hidden, shape.head_width, shape.heads, shape.bias in ("all", "qkv")
    if shape.kv_lora is None:
        keys = shape.key_heads * head
        yield Matrix("q", shape.query_width, hidden, "rows", qkv)
        yield Matrix("k", keys, hidden, "rows", qkv, least_rows=head)
        yield Matrix("v", keys, hidden, "rows", qkv, least_rows=head)
    else:
        if shape.q_lora is not None:
            yield Matrix("q_a", shape.q_lora, hidden, "none", qkv)
            yield Matrix("q_b", shape.query_width, shape.q_lora, "rows")
        else:
            yield Matrix("q", shape.query_width, hidden, "rows")
        shared = shape.qk_rope or 0
        yield Matrix("kv_a", shape.kv_lora + shared, hidden, "none", qkv)
        yield Matrix("kv_b", heads * (head - shared) + shape.value_width, shape.kv_lora, "rows")
    yield Matrix("o", hidden, shape.value_width, "columns", shape.bias == "all")


def _mlp(shape: ModelShape, prefix: str, ffn: int, copies: int = 1, used: int = 1) -> Iterator[Matrix]:
    bias, counts = shape.bias == "all", {"copies": copies, "used": used}
    for name in ("gate", "up") if shape.is_gated else ("up",):
        yield Matrix(prefix + name, ffn, shape.hidden, "rows", bias, **counts)
    yield Matrix(f"{prefix}down", shape.hidden, ffn, "columns", bias, **counts)


def _experts(shape: ModelShape) -> Iterator[Matrix]:
    copies, used, ffn = (
        shape.experts or 0,
        shape.experts_per_token or 0,
        shape.expert_ffn or 0,
    )  # as check_shape demands
    yield Matrix("router", copies, shape.hidden, "none", shape.bias == "all")
    yield from _mlp(shape, "experts.", ffn, copies, used)
    if shape.shared_ffn is not None:
        if shape.shared_gate:
            yield Matrix("shared_gate", 1, shape.hidden, "none")
        yield from _mlp(shape, "shared.", shape.shared_ffn)


def _norms(shape: ModelShape) -> Iterator[NormShape]:
    for name in ("norm1", "norm2"):
        yield NormShape(name, shape.hidden, shape.norm == "layernorm")
    if shape.qk_norm:
        whole = shape.qk_norm == "width"
        queries, keys = (shape.heads, shape.key_heads) if whole else (1, 1)
        yield NormShape("attention.query_norm", queries * shape.head_width, False)
        yield NormShape("attention.key_norm", keys * shape.head_width, False)
    for name, rank in {"attention.q_a_norm": shape.q_lora, "attention.kv_a_norm": shape.kv_lora}.items():
        if rank is not None and shape.kv_lora is not None:
            yield NormShape(name, rank, False)
