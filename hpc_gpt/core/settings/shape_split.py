"""The split of a model shape by a layout: its conditions, the layers of each stage, the parameters of one rank."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice

from hpc_gpt.core.errors import Fault, raise_faults
from hpc_gpt.core.settings.experiment import CpExchange, Partition
from hpc_gpt.core.settings.layer_kinds import LayerKind
from hpc_gpt.core.settings.layout import Layout, largest_divisor
from hpc_gpt.core.settings.model_shape import ModelShape


def kind_params(kind: LayerKind, tp: int, ep: int = 1, etp: int | None = None) -> float:
    """Parameters of one layer of a kind on one of tp x ep ranks: (12 h^2 + 7 h)/t + 6 h for GPT-2 (Shoeybi et al. 2019,
    arXiv:1909.08053, section 3). `etp`: ranks that share an expert, by default tp.

    Matrices are divided, and the biases of those that are divided by rows; other biases, norms and a router are not.
    """
    biases = sum(matrix.bias_on(tp) for matrix in kind.matrices if matrix.bias and not matrix.is_routed)
    matrices = sum(matrix.size_on(tp) for matrix in kind.matrices if not matrix.is_routed) + biases
    return matrices + sum(norm.params for norm in kind.norms) + kind.sinks / tp + expert_params(kind, tp, ep, etp)


def expert_params(kind: LayerKind, tp: int, ep: int = 1, etp: int | None = None) -> float:
    """Parameters of the routed experts of one layer on one rank."""
    return sum(matrix.size_on(etp or tp) + matrix.bias_on(etp or tp) for matrix in kind.routed) / ep


@lru_cache(maxsize=4096)
def hidden_share(shape: ModelShape, of_experts: bool | None = None) -> float:
    """The share of the layers' matrices, without routers, among the parameters: of the routed experts, of all but
    these, or of all (None)."""
    params = shape.params
    if of_experts is not None:
        params = shape.expert_params if of_experts else params - shape.expert_params
    hidden = (
        kind.count * matrix.size
        for kind in shape.kinds
        for matrix in kind.matrices
        if matrix.split != "none" and of_experts in (None, matrix.is_routed)
    )
    return sum(hidden) / params if params else 0.0


def layers_params(shape: ModelShape, counts: Sequence[float], tp: int, ep: int = 1, etp: int | None = None) -> float:
    """Parameters on one rank of so many layers of each kind."""
    return sum(count * kind_params(kind, tp, ep, etp) for count, kind in zip(counts, shape.kinds, strict=True))


def replicated_params(shape: ModelShape) -> int:
    """Parameters that every tensor-parallel rank has in full: norms, positions, routers, and biases after an
    all-reduce."""
    outside = shape.position_params + sum(norm.params for norm in shape.outer_norms)
    return outside + sum(kind.count * _replicated(kind) for kind in shape.kinds)


def _replicated(kind: LayerKind) -> int:
    whole = sum(matrix.size for matrix in kind.matrices if matrix.split == "none")
    biases = sum(matrix.bias_size for matrix in kind.matrices if matrix.split != "rows")
    return whole + biases + sum(norm.params for norm in kind.norms)


def vocab_rows(shape: ModelShape, tp: int) -> int:
    """Rows of the embedding on one of `tp` ranks."""
    return -(-shape.padded_vocab // tp)


def outer_params(shape: ModelShape, tp: int, pp: int, stage: int) -> float:
    """Parameters outside the layers on one rank of a stage: embeddings on the first, last norm and head on the last.

    A tied head is the embedding itself if there is one stage, and a copy of it on the last of several stages.
    """
    rows = vocab_rows(shape, tp) * shape.hidden
    params = 0.0
    if stage == 0:
        params += rows + shape.position_params + sum(norm.params for norm in shape.outer_norms[:-1])
    if stage == pp - 1:
        params += shape.outer_norms[-1].params
        if pp > 1 or not shape.tied:
            params += rows
    return params


def check_split(shape: ModelShape, layout: Layout) -> None:
    """Raises LayoutError if the layout cannot split the model: its heads, MLP, vocabulary rows, layers or experts."""
    raise_faults(split_faults(shape, layout))


def default_tp(gpus: int, gpus_per_node: int, shape: ModelShape, pp: int) -> int:
    """The default tp: the largest that divides the GPUs of a node and the model, if tp x pp divides `gpus`."""
    return max(
        tp
        for tp in range(1, gpus_per_node + 1)
        if gpus_per_node % tp == 0 and _divides_heads(shape, tp) and gpus % (tp * pp) == 0
    )


def _divides_heads(shape: ModelShape, tp: int) -> bool:
    keys = shape.key_heads
    widths = all(width % tp == 0 for _, width in _widths(shape))
    return shape.heads % tp == 0 and widths and (keys % tp == 0 or tp % keys == 0)


def _widths(shape: ModelShape) -> list[tuple[str, int]]:
    """(name, width) of each MLP of the layers, whose width tp divides; the experts' by etp."""
    widths = [("ffn", shape.mlp_width)] if not shape.is_mixture or shape.dense_layers else []
    widths += [("expert_ffn", shape.expert_ffn)] if shape.expert_ffn else []
    return widths + ([("shared_ffn", shape.shared_ffn)] if shape.shared_ffn else [])


def split_fault(summary: str, message: str, hint: str) -> Fault:
    """A reason why a layout cannot split a model."""
    return Fault(message, hint, of_layout=True, keys=("model", "layout"), summary=summary)


def split_faults(shape: ModelShape, layout: Layout) -> Iterator[Fault]:
    """The reasons why the layout cannot split the model, at most one for each of its sizes; none if it can."""
    yield from islice(_tp_faults(shape, layout), 1)
    if shape.layers < layout.pp:
        yield split_fault(
            "more stages than layers",
            f"pp {layout.pp} needs at least {layout.pp} layers, one a stage, but the model has {shape.layers}",
            f"use --pp {shape.layers} or fewer",
        )
    if layout.ep > 1 or layout.expert_tp != layout.tp:
        yield from expert_faults(shape, layout)


def _tp_faults(shape: ModelShape, layout: Layout) -> Iterator[Fault]:
    """The reasons why tp cannot divide the model's heads, MLPs and vocabulary, and etp its experts."""
    tp = layout.tp
    if shape.heads % tp:
        yield split_fault(
            "tp does not divide the heads",
            f"tp {tp} does not divide the {shape.heads} heads: {shape.heads} / {tp} = {shape.heads / tp:.2f}",
            f"use a tp that divides {shape.heads}",
        )
    if shape.key_heads % tp and tp % shape.key_heads:
        yield split_fault(
            "tp and kv_heads do not divide each other",
            f"tp {tp} and the {shape.key_heads} kv_heads: neither divides the other",
            f"use a tp that divides {shape.key_heads}, or a multiple of it",
        )
    if shape.key_heads * shape.head_width % tp:
        yield split_fault(
            "tp does not divide the width of the keys",
            f"tp {tp} does not divide the {shape.key_heads} kv_heads x head_dim {shape.head_width} = "
            f"{shape.key_heads * shape.head_width}",
            f"use a tp that divides {shape.key_heads * shape.head_width}",
        )
    for name, width in _widths(shape):
        axis, size = ("etp", layout.expert_tp) if name == "expert_ffn" and layout.etp else ("tp", tp)
        if width % size:
            yield split_fault(
                f"{axis} does not divide the {name}",
                f"{axis} {size} does not divide {name} {width}: {width} / {size} = {width / size:.2f}",
                f"use a {axis} that divides {width}",
            )
    if shape.padded_vocab % tp:
        yield split_fault(
            "tp does not divide the padded vocabulary",
            f"tp {tp} does not divide the padded vocabulary {shape.padded_vocab} "
            f"({shape.vocab} padded to a multiple of {shape.vocab_multiple})",
            f"set model.vocab_multiple to a multiple of {tp}",
        )


def expert_faults(shape: ModelShape, layout: Layout) -> Iterator[Fault]:
    """The reasons why an ep above 1, or an etp, cannot divide the model's experts over the layout's ranks."""
    ep, etp, experts = layout.ep, layout.expert_tp, shape.experts
    if experts is None:
        axis = f"ep {ep}" if ep > 1 else f"etp {etp}"
        yield split_fault("the model has no experts", f"{axis} divides experts, but the model has none", "use --ep 1")
        return
    if etp == layout.tp:
        ranks, product = layout.data_ranks, f"cp {layout.cp} x dp {layout.dp}" if layout.cp > 1 else f"dp {layout.dp}"
    else:
        ranks, product = layout.gpus // layout.pp, f"tp {layout.tp} x cp {layout.cp} x dp {layout.dp}"
    each = 1 if etp == layout.tp else etp
    divides = ranks % each == 0
    nearest = largest_divisor(math.gcd(experts, ranks // each), ep)
    hint = f"use --ep {nearest}" if divides else f"use a layout.etp that divides {ranks}"
    if experts % ep:
        yield split_fault(
            "ep does not divide the experts",
            f"ep {ep} does not divide the {experts} experts: {experts} / {ep} = {experts / ep:.2f}",
            hint,
        )
    if ranks % (ep * each):
        named = f"ep {ep}" if each == 1 else f"ep {ep} x etp {etp} = {ep * etp}"
        total = f"{product} = {ranks}" if " x " in product else product
        yield split_fault(
            "ep does not divide cp x dp" if each == 1 else "ep x etp does not divide tp x cp x dp",
            f"{named} does not divide {total}: {ranks} / {ep * each} = {ranks / (ep * each):.2f}",
            hint,
        )


def context_fault(
    shape: ModelShape, layout: Layout, exchange: CpExchange, sequence_parallel: bool = False
) -> Fault | None:
    """The first reason why cp cannot divide the model's samples under `engine.cp_exchange`; None if it can.

    "heads": each rank attends to a whole sample with heads / (tp x cp) heads and as many key heads, each possibly
    repeated on several ranks. Otherwise each rank has two chunks of a sample, so that all attend equally much.
    """
    cp, tp, seq = layout.cp, layout.tp, shape.seq
    if cp == 1:
        return None
    heads, keys = _heads_on(shape, tp)
    if exchange == "heads":
        # Hints name only sizes that would run, with as many GPUs and samples of this length.
        less = [size for size in range(cp - 1, 1, -1) if cp * layout.dp % size == 0]
        ways = [f"--cp {size}" for size in less if _divides(shape, tp, size, "heads", sequence_parallel)][:1]
        fewer = [size for size in range(tp - 1, 0, -1) if tp % size == 0]
        ways = ways or [f"--tp {size}" for size in fewer if _divides(shape, size, cp, "heads", sequence_parallel)][:1]
        if _divides(shape, tp, cp, "keys", sequence_parallel):
            ways.append('engine.cp_exchange = "keys"')
        otherwise = f"use {', or '.join(ways) or '--cp 1'}"
        if heads % cp:
            of_tp = f"{shape.heads} heads / tp {tp}" + (f" = {heads}" if tp > 1 else "")
            return split_fault("cp does not divide the heads", f"{of_tp} is not a multiple of cp {cp}", otherwise)
        if keys % cp and cp % keys:
            of_tp = f"{shape.key_heads} kv_heads / tp {tp}" + (f" = {keys}" if tp > 1 else "")
            return split_fault(
                "cp and kv_heads do not divide each other", f"cp {cp} and {of_tp}: neither divides the other", otherwise
            )
    elif exchange == "keys" and shape.windowed:
        way = ', or engine.cp_exchange = "heads"' * _divides(shape, tp, cp, "heads", sequence_parallel)
        return split_fault(
            "a window needs whole samples",
            f'engine.cp_exchange is "keys", which gives a rank some of the queries, but {shape.windowed} layers have '
            f"model.window {shape.window}, whose kernels take whole samples",
            f"use --cp 1{way}",
        )
    parts = cp if exchange == "heads" else 2 * cp
    product = f"cp {cp}" if exchange == "heads" else f"2 x cp {cp} = {parts}"
    if not seq % parts and sequence_parallel and seq % (cp * tp):
        parts, product = math.lcm(parts, cp * tp), f"cp {cp} x tp {tp} = {cp * tp}, with sequence parallelism,"
    if seq % parts:
        return split_fault(
            "cp does not divide the sequence",
            f"{product} does not divide model.seq {seq}: {seq} / {parts} = {seq / parts:.2f}",
            f"use --seq {max(1, seq // parts) * parts}",
        )
    return None


def _heads_on(shape: ModelShape, tp: int) -> tuple[int, int]:
    """(query heads, key heads) on one of `tp` ranks."""
    return shape.heads // tp, max(1, shape.key_heads // tp)


def _divides(shape: ModelShape, tp: int, cp: int, exchange: CpExchange, sequence_parallel: bool) -> bool:
    """Whether `cp` ranks can share a sample equally, and with "heads" also the query heads and whole key heads."""
    heads, keys = _heads_on(shape, tp)
    if exchange == "heads" and (heads % cp or (keys % cp and cp % keys)):
        return False
    if exchange == "keys" and shape.windowed:
        return False
    parts = cp if exchange == "heads" else 2 * cp
    return shape.seq % parts == 0 and not (sequence_parallel and shape.seq % (cp * tp))


def stage_layers(layers: int, pp: int) -> list[int]:
    """Transformer layers of each pipeline stage, as even as possible; earlier stages take the remainder.

    >>> stage_layers(10, 4)
    [3, 3, 2, 2]
    """
    return [layers // pp + (stage < layers % pp) for stage in range(pp)]


def stage_kinds(shape: ModelShape, blocks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each stage, from its number of transformer layers, the number of those of each kind.

    >>> stage_kinds(ModelShape(64, 8, 4, experts=4, experts_per_token=2, expert_ffn=32, dense_layers=3), [2, 2, 4])
    ((2, 0), (1, 1), (0, 4))
    """
    return tuple(shape.kind_counts(sum(blocks[:stage]), count) for stage, count in enumerate(blocks))


def partition_layers(shape: ModelShape, pp: int, partition: Partition = "layers") -> list[int]:
    """Transformer layers of each pipeline stage under `engine.partition`.

    "layers" is `stage_layers`. "parameters" makes the largest stage as small as possible; the first stage holds the
    embeddings, the last the final norm and the weight of the head (a copy if it is tied). A list is used as it is.

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


def params_of_stages(shape: ModelShape, blocks: Sequence[int]) -> list[float]:
    """Parameters of each stage at tp=1, from its number of transformer layers."""
    pp = len(blocks)
    return [
        layers_params(shape, counts, 1) + outer_params(shape, 1, pp, stage)
        for stage, counts in enumerate(stage_kinds(shape, blocks))
    ]


def _by_parameters(shape: ModelShape, pp: int) -> list[int]:
    """The most even split among those whose largest stage is smallest."""
    if pp == 1:
        return [shape.layers]
    middle = pp - 2

    def candidates() -> Iterator[list[int]]:
        for first in range(1, shape.layers - middle):
            for last in range(1, shape.layers - middle - first + 1):
                left = shape.layers - first - last
                # The stages in between are alike, so they share the other layers as evenly as possible.
                if middle or not left:
                    yield [first, *(stage_layers(left, middle) if middle else []), last]

    def unevenness(blocks: list[int]) -> tuple[float, float]:
        params = params_of_stages(shape, blocks)
        return max(params), sum(count * count for count in params)

    return min(candidates(), key=unevenness)
