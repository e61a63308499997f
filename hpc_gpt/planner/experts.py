"""Experts in a prediction: the rows that one multiplies, the seconds and bytes of sending tokens to them, and the
launches of their kernels.

Letters: T tokens of a micro-batch on one rank, h hidden, k experts of a token, E experts, f width of one. Each rank
computes k T rows, whatever ep is, as it sends as many copies of tokens as it gets: ep gives an expert more rows,
k T ep / E. The rank with the largest load decides, as all wait for it (`experts.worst_load`).
"""

from collections.abc import Sequence

from hpc_gpt.core.engines import engine_of, states_of
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.recomputation import recomputation
from hpc_gpt.core.settings.layer_kinds import LayerKind, Matrix
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.links import Links
from hpc_gpt.planner.machine import Rates

# Dispatchers that sort in the same kernel in which they send, and send a token once to each rank.
_FUSED = ("deepep", "hybridep")


def worst_load(training: Training) -> float:
    """The largest load of a rank over the mean load; 1 if all ranks have the same tokens or the same experts."""
    balanced = training.routing == "forced balance" or not training.dropless or training.ep == 1
    return 1.0 if balanced else float(VALUES["experts.worst_load"])


def routed_tokens(training: Training) -> float:
    """The tokens of a micro-batch for which one rank asks the router: tp ranks have a part of them each, or all."""
    parts = training.sequence_parallel or engine_of(training).sends_parts(training)
    return training.tokens / (training.tp if parts else 1)


def sent_tokens(training: Training) -> float:
    """The tokens of a micro-batch of which one rank sends copies to their experts."""
    return training.tokens / (training.tp if engine_of(training).sends_parts(training) else 1)


def sent_rows(training: Training) -> float:
    """The rows that one rank sends to experts: a copy of each of these tokens for each of its experts."""
    return sent_tokens(training) * (training.shape.experts_per_token or 1)


def expert_rows(training: Training) -> float:
    """The rows of all experts of one rank and micro-batch, on the rank with the largest load. `padded_experts`: each
    expert has as many as the largest, at most all tokens."""
    shape, load = training.shape, worst_load(training)
    chosen = shape.experts_per_token or 1
    if training.padded_experts and training.routing == "real":
        load = min(VALUES["experts.largest_load"], (shape.experts or 0) / chosen)
    rows = chosen * training.tokens / training.tp * training.expert_tp
    return float(rows * load / (training.ep if training.ep_outside_dp else 1))


def local_experts(training: Training) -> float:
    """The number of experts on one rank."""
    return (training.shape.experts or 0) / training.ep


def rows_an_expert(training: Training) -> float:
    """The rows that each expert of a rank multiplies in a micro-batch."""
    return expert_rows(training) / local_experts(training)


def are_joined(training: Training) -> bool:
    """Whether a rank's experts are one weight, and their rows one tensor: our own model's are."""
    return not engine_of(training).sends_parts(training)


def place_bytes(training: Training) -> float:
    """Bytes that our model keeps for each row in addition to its values, in int64: its expert, its place by expert and
    back; if it is sent, its place among what arrives and back (trainer/model/experts.py)."""
    return (24.0 if training.ep == 1 else 40.0) if are_joined(training) else 0.0


def passing_bytes(training: Training, kind: LayerKind, rows: float) -> float:
    """Bytes that `rows` of our model's experts take for a moment, in 16 bits, beside what a layer keeps: h wide before
    and after they are permuted, sent, or summed by token; or the gradients of the first product's input and output
    (counted: tests/distributed/test_planned_bytes.py)."""
    if not are_joined(training):
        return 0.0
    raised = kind.routed[-1].columns_on(training.expert_tp) * (2 if training.shape.is_gated else 1)
    return 2 * rows * (training.shape.hidden + max(training.shape.hidden, raised))


def expert_products_s(training: Training, rates: Rates, kind: LayerKind) -> float:
    """Seconds of the routed experts' products in a forward pass, one expert after the other: a grouped product."""
    return sum(_grouped_s(training, rates, parts) for parts in kind.products.values() if parts[0].is_routed)


def last_product_s(training: Training, rates: Rates, kind: LayerKind) -> float:
    """Seconds of the last of the routed experts' products in a forward pass."""
    return _grouped_s(training, rates, kind.products["experts.down"])


def _grouped_s(training: Training, rates: Rates, parts: Sequence[Matrix]) -> float:
    etp = training.expert_tp
    outputs = sum(matrix.rows_on(etp) for matrix in parts)
    each = rates.layer_product_s(rows_an_expert(training), outputs, parts[0].columns_on(etp))
    return float(local_experts(training) * each / rates.grouped)


def expert_weights(training: Training, kind: LayerKind) -> float:
    """Weights of the routed experts of one layer on one rank."""
    return sum(matrix.size_on(training.expert_tp) for matrix in kind.routed) / training.ep


def sorts_once(training: Training) -> bool:
    """Whether rows are not sorted by expert where they arrive: nothing is sent, the dispatcher does it, or all of them
    are one expert's."""
    return training.ep == 1 or training.dispatcher in _FUSED or local_experts(training) <= 1


def expert_pass_bytes(training: Training, kind: LayerKind, gate_bytes: float) -> float:
    """Bytes that one rank moves in a forward pass for router, permutation and the experts' activation and biases.

    A permutation reads T rows and writes k T, its inverse the opposite; rows that were sent are sorted once more where
    they arrive, and back. The router makes logits, probabilities and a map of T x E, in fp32. `gate_bytes`: those of
    the activation for each of its numbers.
    """
    shape, rows = training.shape, expert_rows(training)
    moved = 4 * shape.hidden * (sent_tokens(training) + sent_rows(training))
    moved += 0 if sorts_once(training) else 8 * shape.hidden * rows
    router = float(VALUES["experts.router_bytes"]) * routed_tokens(training) * (shape.experts or 0)
    width = kind.routed[-1].columns_on(training.expert_tp)
    more = _padding_bytes(training) + _bias_bytes(training, kind)
    return moved + router + rows * gate_bytes * width + more


def _padding_bytes(training: Training) -> float:
    """Bytes moved to copy rows to padded ones, and back: a product in 8 or 4 bits takes whole blocks of rows
    (Megatron-LM, megatron/core/transformer/moe/experts.py, TEGroupedMLP.quantization_padding)."""
    return 8.0 * training.shape.hidden * expert_rows(training) if training.matmul != "none" else 0.0


def _bias_bytes(training: Training, kind: LayerKind) -> float:
    """Bytes moved to add the biases of the experts' outputs, each times its token's probability, expert by expert: the
    product and the sum in fp32, joined and cast, write 4 + 4 + 4 + 2 bytes and read 2 + 4 + 4 + 4 (Megatron-LM,
    megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias)."""
    return 28.0 * expert_rows(training) * kind.routed[-1].rows_on(training.expert_tp) if _is_biased(training) else 0.0


def _is_biased(training: Training) -> bool:
    return training.shape.bias == "all"


def exchange_s(training: Training, links: Links) -> float:
    """Seconds per expert layer and micro-batch in which tokens are sent to their experts and results back, forward and
    backward and in recomputation; and in which etp ranks gather and sum up each expert's rows, unless their sums are
    those of tensor parallelism (`EngineFacts.sends_parts`). Without overlap.

    `ep_outside_dp`: every rank has the tokens already, and the ranks' results are summed up.
    """
    shape, ep, etp = training.shape, training.ep, training.expert_tp
    size, takes = training.width * sent_tokens(training) * shape.hidden, 0.0
    if training.ep_outside_dp:
        takes = 2 * links.ring_s(size, ep, training.tp)
    elif ep > 1 and training.dispatcher == "allgather":
        # Every rank also gets the probabilities, in fp32, and the map of all tokens.
        routes = 5.0 * sent_tokens(training) * (shape.experts or 0)
        takes = sum(links.ring_s(each * ep, ep, etp, links.reduction_b_s) for each in (size + routes, size))
    elif ep > 1:
        takes = 2 * links.exchange_s(worst_load(training) * size, ep, etp, *copies_sent(training, links))
    if engine_of(training).sends_parts(training):
        takes += 2 * links.ring_s(training.width * expert_rows(training) * shape.hidden, etp)
    again = recomputation(training.recompute)
    # PyTorch's checkpoint does not send the results back once more: half of an exchange.
    spared = again.share / 2 if states_of(training).stops_early(training) and not _is_ours(training) else 0.0
    return float(takes * (2 + again.repeats("moe") - spared))


def _is_ours(training: Training) -> bool:
    """Whether our own model is trained, whose experts are repeated whole: the sum of their outputs saves indices."""
    return training.program_states is None and engine_of(training).trains_our_model


def dispatcher_of(training: Training) -> str:
    """The stated dispatcher. If none is, a model whose tokens go to few groups of experts has one that sends a copy to
    each node, as an all-to-all gains nothing by groups; any other has the all-to-all."""
    return training.dispatcher or ("a copy to each node" if training.shape.groups_per_token else "alltoall")


def copies_sent(training: Training, links: Links) -> tuple[float, float]:
    """Returns (copies of a token that leave its rank for its own node, copies that leave its node), on average.

    A token's k experts are on any of ep ranks alike. NCCL's all-to-all sends a copy for each of them. Others send one
    copy to each other node that has some of them, (n - 1) (1 - (1 - 1/n)^k) of n nodes, and to no more nodes than
    groups_per_token of the experts' groups span; a node's GPUs share it by NVLink (DeepEP's README; DeepSeek-V3,
    arXiv:2412.19437, section 3.2.2). DeepEP and HybridEP send it once to each rank that has some of its experts, ep (1
    - (1 - 1/ep)^k) of them, not once to each expert (DeepEP: is_token_in_rank).
    """
    shape, ep = training.shape, training.ep
    chosen = shape.experts_per_token or 0
    inside = max(1, min(ep, links.per_node // training.expert_tp))
    nodes = max(1.0, ep / inside)
    leaving = chosen * (1 - 1 / nodes)
    dispatcher = dispatcher_of(training)
    spread = ep * (1 - (1 - 1 / ep) ** chosen) if dispatcher in _FUSED else chosen
    if dispatcher == "alltoall" or nodes == 1:
        return spread * (inside - 1) / ep, leaving
    reached = nodes * (1 - (1 - 1 / nodes) ** chosen)
    if shape.expert_groups and shape.groups_per_token:
        reached = min(reached, shape.groups_per_token * max(1.0, nodes / shape.expert_groups))
    return spread * (inside - 1) / inside, min(leaving, reached * (1 - 1 / nodes))


def launching_s(training: Training, host_s: float) -> float:
    """Seconds in which the host launches what an expert layer has in addition to attention and norms, in one pass.

    Router, permutation and dispatch are so many passes over a dense layer, and each expert has its own products. With
    biases there are twice as many kernels: beside two products, and four backward, two that add them (`_bias_bytes`),
    and four or more for their gradients.
    """
    graphs = training.cuda_graphs
    if "full" in graphs:
        return 0.0
    fixed = float(VALUES["experts.launches"]) * (0.5 if "moe_router" in graphs else 1.0)
    each = float(VALUES["experts.each"]) * (2 if _is_biased(training) else 1)
    if not training.dropless:  # experts of equal size are one product
        each /= local_experts(training)
    return host_s * (fixed + each * local_experts(training))


def waits_for_router(training: Training) -> bool:
    """Whether the host, before it launches the experts of a layer, must know how many rows each of them gets, and has
    no other micro-batch to launch meanwhile: then the GPU is idle when it comes to them."""
    return training.dropless and not training.ep_overlap and "full" not in training.cuda_graphs
