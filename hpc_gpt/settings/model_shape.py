"""The shape of a GPT, by sizes or by preset; its parameters and the layers of each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpc_gpt.errors import ConfigError, LayoutError
from hpc_gpt.settings.experiment import Partition
from hpc_gpt.settings.layout import Layout
from hpc_gpt.tables import close_matches

# {name: (hidden, layers, heads)}: OpenAI's four GPT-2 sizes, and seed 001's by the size that its tables print. The
# shapes are in its Slurm scripts (vocabulary 50257, 32 heads, sequence 1024); the sizes mix 10^9 and 2^30: "48b" has
# 52.0e9 parameters. The largest are GPT-3 (Brown et al. 2020, table 2.1), MT-NLG (Smith et al. 2022) and the trillion
# of Narayanan et al. 2021, table 1, at their sequence of 2048.
PRESETS = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
    "7.5b": (4096, 36, 32),
    "18b": (6144, 40, 32),
    "22b": (8192, 32, 32),
    "23b": (7168, 40, 32),
    # The seed has no script for its 24B rows; 25.1e9 parameters is the nearest shape of its family.
    "24b": (7168, 40, 32),
    "28b": (7168, 48, 32),
    "30b": (7168, 48, 32),
    "36b": (8192, 48, 32),
    "48b": (8192, 64, 32),
    "50b": (8192, 64, 32),
    "61b": (9216, 64, 32),
    "78b": (10240, 64, 32),
    "91b": (11264, 64, 32),
    "109b": (12288, 64, 32),
    "175b": (12288, 96, 96),
    "193b": (16384, 64, 32),
    "530b": (20480, 105, 128),
    "1t": (25600, 128, 160),
}
_SEQ_2048 = ("175b", "530b", "1t")


@dataclass(frozen=True)
class ModelShape:
    """A GPT-2 shaped model: pre-norm blocks, learned positions, GELU, biases everywhere.

    `vocab` is the tokenizer's; the embedding has `padded_vocab` rows, the next multiple of `vocab_multiple`.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int = 50257
    seq: int = 1024
    tied: bool = True
    vocab_multiple: int = 64

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding. A multiple of 64 pads GPT-2's 50257 to 50304, as seed 002 does."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def params(self) -> int:
        """Parameters of the whole model, the tied embedding counted once."""
        embedding = self.padded_vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.block_params + embedding + self.seq * self.hidden + 2 * self.hidden

    @property
    def block_params(self) -> int:
        """Parameters of one transformer layer.

        12 h^2 + 13 h: QKV 3h^2 + 3h, projection h^2 + h, MLP 8h^2 + 5h, two norms 4h.
        """
        return 12 * self.hidden**2 + 13 * self.hidden

    # Other decoders differ in these: the planner's PublishedShape has fields for them.

    @property
    def mlp(self) -> int:
        """Width of the MLP."""
        return 4 * self.hidden

    @property
    def kv_share(self) -> float:
        """Width of the keys (and of the values) divided by the hidden size: 1 without grouped queries."""
        return 1.0

    @property
    def gated(self) -> bool:
        """Whether the MLP has a third matrix, as SwiGLU has."""
        return False

    @property
    def biases(self) -> bool:
        """Whether matrices and norms have biases."""
        return True

    @property
    def positions(self) -> bool:
        """Whether positions are learned: seq x hidden parameters."""
        return True


def preset(name: str) -> ModelShape:
    """The shape of a preset, whose case is ignored; ConfigError with close matches if there is none."""
    try:
        hidden, layers, heads = PRESETS[name.lower()]
    except KeyError:
        hint = close_matches(name.lower(), PRESETS) or "give hidden, layers and heads under [model] instead"
        raise ConfigError(f"no model preset {name!r}; known: {', '.join(PRESETS)}", hint) from None
    return ModelShape(hidden, layers, heads, seq=2048 if name.lower() in _SEQ_2048 else 1024)


def check_shape(shape: ModelShape) -> None:
    """LayoutError for a size below 1, or heads that do not divide the hidden size."""
    for name in ("hidden", "layers", "heads", "vocab", "seq", "vocab_multiple"):
        size = getattr(shape, name)
        if size < 1:
            raise LayoutError(f"model.{name} is {size}, but must be at least 1", f"give a positive {name}")
    if shape.hidden % shape.heads:
        raise LayoutError(
            f"hidden {shape.hidden} is not a multiple of heads {shape.heads}: "
            f"{shape.hidden} / {shape.heads} = {shape.hidden / shape.heads:.2f}",
            "choose heads that divide hidden",
        )


def check_split(shape: ModelShape, layout: Layout) -> None:
    """LayoutError if the layout cannot split the model: its heads, vocabulary rows or layers."""
    if shape.heads % layout.tp:
        raise LayoutError(
            f"tp {layout.tp} does not divide the {shape.heads} heads: {shape.heads} / {layout.tp} = "
            f"{shape.heads / layout.tp:.2f}",
            f"use a tp that divides {shape.heads}",
        )
    if shape.padded_vocab % layout.tp:
        raise LayoutError(
            f"tp {layout.tp} does not divide the padded vocabulary {shape.padded_vocab} "
            f"({shape.vocab} padded to a multiple of {shape.vocab_multiple})",
            f"set model.vocab_multiple to a multiple of {layout.tp}",
        )
    if shape.layers < layout.pp:
        raise LayoutError(
            f"pp {layout.pp} needs at least {layout.pp} layers, one a stage, but the model has {shape.layers}",
            f"use --pp {shape.layers} or fewer",
        )


def stage_layers(layers: int, pp: int) -> list[int]:
    """Transformer layers of each pipeline stage, as even as possible; the earlier stages take the rest.

    >>> stage_layers(10, 4)
    [3, 3, 2, 2]
    """
    return [layers // pp + (stage < layers % pp) for stage in range(pp)]


def partition_layers(shape: ModelShape, pp: int, partition: Partition = "layers") -> list[int]:
    """Transformer layers of each pipeline stage under `engine.partition`.

    "layers" is `stage_layers`. "parameters" makes the largest stage as small as possible; the first stage has the
    embeddings, the last the final norm and the head's weight (also a tied one, as a copy). A list is used as it is.

    >>> partition_layers(ModelShape(hidden=768, layers=12, heads=12), 4, "parameters")
    [1, 5, 5, 1]
    """
    if partition == "layers":
        return stage_layers(shape.layers, pp)
    if partition == "parameters":
        return _by_parameters(shape, pp)
    fits = len(partition) == pp and sum(partition) == shape.layers and min(partition) > 0
    assert fits, "engines.resolve_engine refuses it"
    return list(partition)


def stage_params(shape: ModelShape, blocks: list[int]) -> list[int]:
    """Parameters of each stage, of all its tensor-parallel ranks together, from its transformer layers."""
    rows = shape.padded_vocab * shape.hidden
    params = [count * shape.block_params for count in blocks]
    params[0] += rows + shape.seq * shape.hidden
    params[-1] += 2 * shape.hidden
    if not shape.tied or len(blocks) > 1:
        params[-1] += rows
    return params


def _by_parameters(shape: ModelShape, pp: int) -> list[int]:
    """The split with the smallest largest stage, and among those the most even one."""
    if pp == 1:
        return [shape.layers]
    middle = pp - 2

    def candidates() -> Iterator[list[int]]:
        for first in range(1, shape.layers - middle):
            for last in range(1, shape.layers - middle - first + 1):
                left = shape.layers - first - last
                # The stages in between are alike, so they share the rest as evenly as possible.
                if middle or not left:
                    yield [first, *(stage_layers(left, middle) if middle else []), last]

    def unevenness(blocks: list[int]) -> tuple[int, int]:
        params = stage_params(shape, blocks)
        return max(params), sum(count * count for count in params)

    return min(candidates(), key=unevenness)
