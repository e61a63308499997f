"""Seconds of one optimizer step, part by part, from shapes and a machine's rates.

Letters: s sequence, h hidden, T tokens of a micro-batch. The time of a layer on the GPU is `planner.layer_time`'s. If
the host needs longer to launch a layer than the GPU to compute it, the host's time counts instead.

A pipeline of p stages with m micro-batches: the slowest stage takes m slots, the others one each to fill and drain,
divided by the chunks of a stage if they are interleaved (Narayanan et al. 2021, arXiv:2104.04473, 2.2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from hpc_gpt.core.engines import engine_of, states_of
from hpc_gpt.core.engines.base.owners import rounds_s
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.recomputation import recomputation
from hpc_gpt.core.settings.layer_kinds import LayerKind
from hpc_gpt.planner import experts
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.layer_bytes import OPERAND_BYTES, kept_of_layer, kv_width, layer_bytes, mlp_width
from hpc_gpt.planner.layer_time import LayerTime, head_s, is_ours, layer_time, repeats_mlp
from hpc_gpt.planner.links import Links
from hpc_gpt.planner.machine import DEFAULT, Constants, Machine, Rates, generation_of
from hpc_gpt.planner.memory import kinds_of_stages, layers_of_stages, over_kinds


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step; the parts sum up to `step_s`. `dp_s`, `cp_s`: communication over dp and within
    context parallelism, without its hidden part. `ep_s`: tokens sent to their experts and back.

    `band`: half the width of the range in which the true time is expected, relative to `step_s`.
    """

    compute_s: float
    recompute_s: float
    tp_s: float
    bubble_s: float
    p2p_s: float
    dp_s: float
    optimizer_s: float
    offload_s: float
    band: float
    cp_s: float = 0.0
    ep_s: float = 0.0

    @property
    def step_s(self) -> float:
        passes = self.compute_s + self.recompute_s + self.tp_s + self.bubble_s + self.p2p_s
        return passes + self.cp_s + self.ep_s + self.dp_s + self.optimizer_s + self.offload_s


def predict_step(training: Training, machine: Machine, constants: Constants = DEFAULT, ranged: bool = True) -> StepTime:
    """The time of one training's step on a machine, part by part.

    Constants were fitted to a few layouts; for others, half of the change that they make to a prediction is added to
    the range. Of 319 rows predicted by constants fitted to other sources 305 are then in the range, 291 without.
    """
    step = _StepModel(machine, constants).predict(training)
    if constants == DEFAULT or not ranged:
        return step
    moved = abs(step.step_s / _StepModel(machine, DEFAULT).predict(training).step_s - 1)
    return replace(step, band=min(VALUES["band.most"], step.band + moved / 2))


class _StepModel:
    def __init__(self, machine: Machine, constants: Constants) -> None:
        self.machine, self.constants = machine, constants
        self.links = Links(machine, constants)

    def predict(self, training: Training) -> StepTime:
        shape, constants, pp, vp = training.shape, self.constants, training.pp, training.vp
        micro_batches = training.micro_batches
        rates = Rates(self.machine, constants, training)
        head, kinds = head_s(training, rates), shape.kinds
        layers = [self._layer(training, rates, number) for number in range(len(kinds))]
        # The last stage's layers for later tokens, each with a head.
        later = shape.mtp_layers * (layers[-1].per_layer + head)
        first, most, at_end = _slowest(training, [layer.per_layer for layer in layers], head + later)
        layer = layers[0]
        if len(layers) > 1:
            layer = _Layer(*(_mean(values, most) for values in zip(*layers, strict=True)))
        count = sum(most)
        compute = count * (layer.forward_s + layer.backward_s + layer.waited) + (head + later) * at_end
        again, tensor, context = count * layer.again_s, count * layer.tensor, count * layer.context
        exchange, gathers = count * layer.exchange, layer.gathers
        sends, on_average = self._sends_s(training)
        slot = compute + again + tensor + context + exchange + sends + count * gathers
        counts = [kind.count for kind in kinds]
        filled = shape.layers * _mean([each.per_layer for each in layers], counts) + head + later
        bubble = max(0.0, filled + pp * on_average - slot) / vp if pp > 1 else 0.0
        params, of_experts = _stage_params(training, first)
        hiding = (layer.forward_s + layer.backward_s) * sum(first)
        dp = self._reduction_s(training, params, of_experts, hiding) + micro_batches * count * gathers
        optimizer, offload = self._update_s(training, params)
        if of_experts:
            more = self._update_s(training.of_experts, of_experts)
            optimizer, offload = optimizer + more[0], offload + more[1]
        optimizer += self._products_s(training)
        dp += sum(self.links.ring_s(*send) for send in engine_of(training).sends_of_owners(training))
        if training.activations_on_host:  # each layer's input is copied to the host and back
            bytes_kept = training.width * training.tokens * shape.hidden
            offload += 2 * micro_batches * count * bytes_kept / self.links.host_b_s
        if training.offloaded_layers:  # their activations are copied during other layers' passes
            kept = _mean([kept_of_layer(training, layer_bytes(training, kind)) for kind in kinds], most)
            copied = kept * count * training.offloaded_layers / shape.layers / self.links.host_b_s
            waits = max(0.0, copied - count * layer.forward_s) + max(0.0, copied - count * layer.backward_s)
            offload += micro_batches * waits
        per_node = self.links.per_node
        across = dp + micro_batches * sends + (micro_batches * tensor if training.tp > per_node else 0.0)
        across += micro_batches * context if training.tp * training.cp > per_node else 0.0
        across += micro_batches * exchange if training.ep * training.expert_tp > per_node else 0.0
        return StepTime(
            compute_s=micro_batches * compute,
            recompute_s=micro_batches * again,
            tp_s=micro_batches * tensor,
            bubble_s=bubble,
            p2p_s=micro_batches * sends,
            dp_s=dp,
            optimizer_s=optimizer + constants.step_s * states_of(training).synchronizations,
            offload_s=offload,
            cp_s=micro_batches * context,
            ep_s=micro_batches * exchange,
            band=self._band(training, layer.waited > 0, across / (across + micro_batches * slot + bubble)),
        )

    def _layer(self, training: Training, rates: Rates, number: int) -> "_Layer":
        """The parts of one layer of the kind with this number, for one micro-batch."""
        kind = training.shape.kinds[number]
        layer = layer_time(training, rates, kind)
        tensor, context = self._tensor_parallel_s(training, kind), self._context_parallel_s(training, layer)
        exchange = experts.exchange_s(training, self.links) if kind.routed else 0.0
        if training.ep_overlap:  # beside the passes of another micro-batch
            hiding = layer.forward_s + layer.backward_s
            taken = VALUES.get(f"experts.taken.{training.dispatcher}", 0.0) * min(exchange, hiding)
            exchange = self._shown_s(exchange, hiding) + taken
        busy = layer.forward_s + layer.backward_s + layer.again_s + tensor + context + exchange
        waited = self._waited_s(training, kind, layer, busy, exchange)
        gathers = self._gathers_s(training, number, busy)
        return _Layer(busy + waited + gathers, layer.forward_s, layer.backward_s, layer.again_s, tensor, context,
                      exchange, waited, gathers)  # fmt: skip

    def _waited_s(self, training: Training, kind: LayerKind, layer: LayerTime, busy: float, exchange: float) -> float:
        """Seconds per layer in which the GPU waits for the host, which launches forward, backward and recomputation.

        The host may be ahead of the GPU by as much as the GPU has to do. Where it waits for each router, it is not: in
        a forward pass the experts take the longer one's time, and what follows them starts when it is launched.
        """
        again, host_s = recomputation(training.recompute), self.constants.host_s
        passes, of_experts = 2 + again.share, 2 + again.repeats("moe")
        launching = host_s
        if training.compiled:
            launching *= VALUES["passes.compiled_launches"]
        elif training.tp > 1 and states_of(training).splits_by_dtensor:
            launching *= VALUES["host.dtensor"]
        if training.cuda_graphs:
            launching *= _launches_beside_graphs(training)
        gathers = 0.0
        # In a pipeline, weights stay gathered.
        if states_of(training).is_pytorchs and engine_of(training).sharding(training) == 3 and training.pp == 1:
            together = VALUES["host.gathered"] * (1 - 1 / engine_of(training).blocks_gathered(training))
            gathers = host_s * VALUES["host.sharding"] * (1 - together)
        routed = experts.launching_s(training, host_s) if kind.routed else 0.0
        if not kind.routed or not experts.waits_for_router(training):
            return max(0.0, passes * launching + of_experts * routed + gathers - busy)
        forward = busy * layer.forward_s / (layer.forward_s + layer.backward_s + layer.again_s)
        on_gpu = layer.routed_s + exchange / of_experts
        late = max(routed, on_gpu) - on_gpu
        ahead = max(late, routed + launching - forward)
        backward = launching + routed + gathers - (busy - (of_experts - 1) * forward)
        return (of_experts - 1) * ahead + max(0.0, backward)

    def _tensor_parallel_s(self, training: Training, kind: LayerKind) -> float:
        """Seconds per layer of its all-reduces of T h values: two forward, two backward, two in recomputation,
        of the MLP alone one.
        Under sequence parallelism each is a reduce-scatter of the same bytes and an all-gather of operands, which are
        already cast (Transformer Engine; torchao's Float8ColwiseParallel); our model casts them after it."""
        if training.tp == 1:
            return 0.0
        size = training.tokens * training.shape.hidden
        # Attention, the MLP (of a layer with experts: the shared ones), and experts without exchanges of their own.
        parts = 1 + bool(mlp_width(kind)) + bool(kind.routed and not engine_of(training).sends_parts(training))
        times = (2 + recomputation(training.recompute).share) * parts + repeats_mlp(training, kind)
        shown = VALUES["overlap.tp"] if training.tp_overlap else 1.0
        is_cast = training.matmul != "none" and training.sequence_parallel and not is_ours(training)
        gathered = OPERAND_BYTES[training.matmul] if is_cast else training.width
        return shown * times * sum(self.links.ring_s(width * size, training.tp) for width in (training.width, gathered))

    def _context_parallel_s(self, training: Training, layer: LayerTime) -> float:
        """Seconds per layer in which the ranks of cp exchange attention's inputs, without the hidden part.

        A ring sends (cp - 1)/cp of all keys and values once forward and twice backward, because gradients go around,
        too; it does so during attention. Gathering keys sends as many bytes, before attention. Ranks that exchange
        heads for tokens send Q, K, V and the output, forward and backward (Jacobs et al. 2023, arXiv:2309.14509).

        Recomputation sends again. Our model (trainer/model/context_parallel.py) sends the output of attention in the
        backward pass rather than keep it twice, and always gathers keys there.
        """
        if training.cp == 1:
            return 0.0
        shape, tp, cp, ours = training.shape, training.tp, training.cp, is_ours(training)
        again = recomputation(training.recompute).share
        bytes_per_number = training.width * training.tokens
        queries, keys = bytes_per_number * shape.query_width / tp, 2 * bytes_per_number * kv_width(shape, tp)
        if training.cp_exchange == "ring" and states_of(training).is_pytorchs:
            keys = 2 * queries
        if training.cp_exchange == "heads":
            inputs, outputs = (3 if ours and training.recompute != "none" else 2 + again), 2 + again + ours
            takes = inputs * self.links.ring_s(queries + keys * training.key_copies, cp, tp)
            return takes + outputs * self.links.ring_s(queries, cp, tp)
        takes = (3 if ours else 3 + again) * self.links.ring_s(keys * cp, cp, tp)
        return takes if training.cp_exchange == "keys" else self._shown_s(takes, layer.core_s)

    def _shown_s(self, takes: float, hiding: float) -> float:
        """The part of `takes` seconds that `hiding` seconds of other work do not hide."""
        return max(0.0, takes - hiding) + self.constants.exposed * min(takes, hiding)

    def _sends_s(self, training: Training) -> tuple[float, float]:
        """Seconds per micro-batch to send activations to the next stage and gradients back, for all chunks of a stage:
        (over the slowest boundary, the mean over all boundaries). Each micro-batch waits for the first; filling the
        pipeline takes the second. Megatron sends each rank's part and gathers them inside the node (Narayanan et
        al. 2021, 4.1)."""
        if training.pp == 1:
            return 0.0, 0.0
        size: float = training.width * training.tokens * training.shape.hidden
        gathered = 0.0
        if engine_of(training).scatters_outputs or training.sequence_parallel:
            gathered = 0.0 if training.sequence_parallel else self.links.ring_s(size, training.tp)
            size /= training.tp
        stride = training.tp * training.data_ranks
        # Activations and gradients are sent in opposite directions at once; only a part of that is exposed.
        shown = VALUES["overlap.p2p"] if training.vp > 1 else 1.0
        sends = shown * (1 + self.constants.exposed) * training.vp
        slowest, on_average = self.links.send_s(size, stride, training.pp)
        return sends * (slowest + gathered), sends * (on_average + gathered)

    def _gathers_s(self, training: Training, number: int, busy: float) -> float:
        """Seconds per layer and micro-batch under ZeRO-3 and FSDP to all-gather parameters twice and reduce-scatter
        gradients, without the part that compute (`busy` seconds) hides."""
        one_by_one = engine_of(training).gathers_one_by_one
        if engine_of(training).sharding(training) < 3 or (training.shards == 1 and not one_by_one):
            return 0.0
        every, of_experts = training.params_of_kinds[number]
        params = every - of_experts
        gathered, reduced = 2.0 * training.width, engine_of(training).reduced_bytes(training)
        if training.whole_gradients:  # reduced once a step; in a pipeline weights stay gathered, too
            reduced /= training.micro_batches
            gathered /= training.micro_batches if training.pp > 1 else 1
        ahead = states_of(training).gathers_ahead
        takes = self._over_replicas_s(training, params, of_experts, gathered + reduced, self._reduction_b_s(ahead))
        if one_by_one:
            return float(takes * VALUES["host.per_parameter_cost"] + VALUES["host.per_parameter_s"])
        if of_experts and training.dropless and not ahead:  # the host, which waits for each router, gathers late
            return takes
        return self._shown_s(takes, busy)

    def _reduction_b_s(self, overlaps: bool) -> float:
        """Bytes/s of a node to the others in reductions and gathers; `overlaps`: of buckets beside the passes."""
        if not overlaps or generation_of(self.machine) not in ("hopper", "blackwell"):
            return self.links.reduction_b_s
        return self.links.reduction_b_s * (float(VALUES["overlap.gradients.reduction"]) / DEFAULT.reduction)

    def _over_replicas_s(
        self, training: Training, params: float, of_experts: float, bytes_each: float, rate: float
    ) -> float:
        """Seconds of an all-gather or a reduce-scatter of a rank's parameters: those of `of_experts` over the replicas
        of its experts, all others over the ranks of cp x dp that share them."""
        takes = self.links.ring_s(params * bytes_each, training.shards, training.tp, rate) if params else 0.0
        if of_experts:
            stride = training.ep * training.expert_tp
            takes += self.links.ring_s(of_experts * bytes_each, training.expert_replicas, stride, rate)
        return takes

    def _reduction_s(self, training: Training, params: float, of_experts: float, hidden_s: float) -> float:
        """Seconds per step of the all-reduce of a stage's gradients, or of their reduce-scatter and the all-gather of
        parameters, without the part that `hidden_s` seconds of compute hide."""
        facts = engine_of(training)
        if facts.sharding(training) >= 3 or training.data_ranks == 1:
            # Replicas of the shards reduce these once, under the last micro-batch's backward pass.
            shards, replicas = training.shards, training.data_ranks // training.shards
            size, stride = params * facts.reduced_bytes(training) / shards, training.tp * shards
            return self._shown_s(2 * self.links.ring_s(size, replicas, stride, self.links.reduction_b_s), hidden_s)
        summed, back = facts.update_traffic(training)
        if training.vp > 1:  # a chunk's reduction runs during the other chunks' last micro-batches
            hidden_s *= (1 + training.pp * (training.vp - 1)) / training.vp
        rate = self._reduction_b_s(training.dp_overlap)
        waiting = 0.0
        if facts.reduces_experts_last and training.ep > 1:
            waiting = sum(self._over_replicas_s(training, 0.0, of_experts, each, rate) for each in (summed, back))
            of_experts = 0.0
        takes = self._over_replicas_s(training, params, of_experts, summed, rate)
        gathers = self._over_replicas_s(training, params, of_experts, back, rate)
        if training.gathers_wait and training.sharded_optimizer and training.vp == 1:
            return self._shown_s(takes, hidden_s) + gathers
        takes += gathers
        if training.dp_overlap or facts.overlaps_reduction or (training.sharded_optimizer and training.vp > 1):
            # Hidden by the last micro-batch's backward pass, the gathers by the next step's first forward pass.
            return self._shown_s(takes, hidden_s) + waiting
        return takes

    def _update_s(self, training: Training, params: float) -> tuple[float, float]:
        """Returns (seconds of the update on the GPU, seconds to copy and update the offloaded part)."""
        facts, bytes_of = engine_of(training), partial(training.optimizer_facts.moved_bytes, training.optimizer_mode)
        rank_params, moved_bytes = params / facts.optimizer_ranks(training), bytes_of(training.hidden)
        if training.sharded_optimizer and (deals := facts.deals(training)):
            if training.experts_alone:  # which are in the deal of all
                return 0.0, 0.0
            rank_params, moved_bytes = 1.0, deals[0].fullest(lambda one: one.size * bytes_of(bool(one.matrices)))
        if training.offload == "none":
            memory_b_s = self.machine.memory_gb_s * 1e9 * self.constants.memory
            return rank_params * moved_bytes / memory_b_s, 0.0
        # All gradients are summed on the host.
        moved = rank_params * (4 + training.width) / self.links.host_b_s
        updated = rank_params * moved_bytes / (VALUES["host.memory_b_s"] / self.links.per_node)
        if training.offload == "full":
            moved += rank_params * 2 * training.width * training.micro_batches / self.links.host_b_s
        return 0.0, moved + updated

    def _products_s(self, training: Training) -> float:
        """Seconds of the products in the updates of the layers' matrices, which the ranks that share or repeat these
        divide among themselves, whole ones each; and of the way of each part to the matrix's rank and back."""
        if not training.optimizer_facts.product_sizes(1, 1):
            return 0.0
        rates = Rates(self.machine, self.constants, replace(training, dtype=training.muon_dtype, matmul="none"))

        @cache
        def matrix_s(rows: int, columns: int) -> float:
            sizes = training.optimizer_facts.product_sizes(rows, columns)
            return training.muon_steps * sum(rates.product_s(*size) for size in sizes)

        if deals := engine_of(training).deals(training):
            return sum(
                deal.fullest(lambda one: sum(count * matrix_s(*size) for count, *size in one.matrices))
                for deal in deals
            )
        total = 0.0
        for part, ep in ((training, 1), (training.of_experts, training.ep)):
            matrices = [
                (matrix, kind.count * matrix.copies / ep)
                for kind in training.shape.kinds
                for matrix in kind.matrices
                if matrix.split != "none" and matrix.is_routed is part.experts_alone
            ]
            takes = [matrix_s(matrix.rows, matrix.columns) for matrix, _ in matrices]
            ranks = training.tp * engine_of(training).optimizer_ranks(part)
            replicas = training.data_ranks // training.shards if training.program_states is None else 1
            if part.experts_alone:
                total += sum(math.ceil(count / ranks) * each for each, (_, count) in zip(takes, matrices, strict=True))
            else:
                units = [
                    (float(matrix.rows * matrix.columns * min(matrix.rows, matrix.columns)), each, int(count))
                    for each, (matrix, count) in zip(takes, matrices, strict=True)
                ]
                total += rounds_s(tuple(units), ranks * replicas)
            if training.tp > 1 or (engine_of(training).sharding(training) >= 3 and not part.experts_alone):
                numbers = sum(matrix.rows * matrix.columns * count for matrix, count in matrices)
                held = training.muon_width * numbers / ranks
                total += 2 * self.links.ring_s(held / replicas, ranks) + self.links.ring_s(held, replicas, ranks)
        return total

    def _band(self, training: Training, host_bound: bool, across: float) -> float:
        """The relative error that contains four of five rows of a source when constants are fitted to other sources
        (bench/plan.py). It is larger on several nodes and if the host is the limit, and grows most with
        the share of the step that depends on the network (`across`). Mixtures of experts depend on traits that few
        sources state."""
        band = float(VALUES["band.least"]) + across
        if training.shape.is_mixture:
            band += VALUES["band.mixture"]
        if training.gpus > self.links.per_node:
            band += VALUES["band.nodes"]
        if host_bound:
            band += VALUES["band.host"]
        return min(float(VALUES["band.most"]), band)


def _launches_beside_graphs(training: Training) -> float:
    """The share of a layer's launches that its CUDA graphs leave to the host."""
    if "full" in training.cuda_graphs:
        return 0.0
    return float(VALUES["host.beside_attention_graph"]) if "attn" in training.cuda_graphs else 1.0


class _Layer(NamedTuple):
    """Seconds of one layer for one micro-batch: `per_layer` in all, and the parts of it."""

    per_layer: float
    forward_s: float
    backward_s: float
    again_s: float
    tensor: float
    context: float
    exchange: float
    waited: float
    gathers: float


def _mean(values: Sequence[float], counts: Sequence[int]) -> float:
    """The mean of `values` over layers, weighted by the number of layers of each kind."""
    if len(values) == 1:
        return values[0]
    return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)


def _slowest(training: Training, per_layer: Sequence[float], head: float) -> tuple[Sequence[int], Sequence[int], bool]:
    """Returns (layers by kind of the first stage, the same of the slowest, whether the slowest is the last). The last
    stage also computes the head."""
    if len(per_layer) == 1:
        counts, each = layers_of_stages(training), per_layer[0]
        at_end = counts[-1] * each + head >= max(counts) * each
        return counts[:1], (counts[-1] if at_end else max(counts),), at_end
    stages = kinds_of_stages(training)
    slowest = max(set(stages), key=lambda stage: over_kinds(1, stage, per_layer))
    at_end = over_kinds(1, stages[-1], per_layer) + head >= over_kinds(1, slowest, per_layer)
    return stages[0], stages[-1] if at_end else slowest, at_end


def _stage_params(training: Training, counts: Sequence[int]) -> tuple[float, float]:
    """Returns (parameters outside routed experts, parameters of routed experts) of the first stage on one GPU,
    without positions and norms, which take hardly any time."""
    shape, params = training.shape, training.params_of_kinds
    copies = 1 if shape.tied or training.pp > 1 else 2
    of_experts = over_kinds(1, counts, [routed for _, routed in params])
    layers = over_kinds(1, counts, [every - routed for every, routed in params])
    return layers + copies * shape.padded_vocab * shape.hidden / training.tp, of_experts
