"""Peak memory of every pipeline stage, part by part.

The peak is at one of three moments. In the passes: states, activations of the micro-batches in flight, the backward
pass of one layer or the logits, buckets, and gathered layers. In the optimizer step: states, the fp32 copies of
gradients, and the temporaries of the update. In an evaluation: the memory that a step leaves allocated, one layer's
forward pass or the logits, and gathered layers. PyTorch reserves more than it allocates: memory that is freed and
allocated again in every step leaves holes into which the next allocation does not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, overload

from hpc_gpt.core.engines import engine_of, states_of
from hpc_gpt.core.engines.base.training import StateBytes, Training, stated_states
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.shape_split import outer_params, stage_kinds, stage_layers, vocab_rows
from hpc_gpt.planner import experts
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.layer_bytes import (
    OPERAND_BYTES,
    LayerBytes,
    gradients_of_layer,
    kept_of_layer,
    layer_bytes,
    recomputed_at_once,
    weights_on,
)
from hpc_gpt.planner.machine import Machine


@lru_cache(maxsize=1024)
def largest_matrix(shape: ModelShape, tp: int, joined: int | None = None) -> float:
    """Parameters of a layer's largest weight on one GPU; Q, K and V count as one, and so do gate and up, and each
    expert counts alone, unless those of each of `joined` ranks are one weight."""
    return max(
        sum(matrix.size_on(tp) / (joined if joined and matrix.is_routed else matrix.copies) for matrix in parts)
        for kind in shape.kinds
        for parts in kind.products.values()
    )


def layers_of_stages(training: Training) -> tuple[int, ...]:
    """The number of transformer layers of every stage, over all its chunks."""
    edges = training.edges_as_layers and training.pp > 1
    return training.stage_layers or _even(training.shape.layers, training.pp, edges)


@lru_cache(maxsize=1024)
def _even(layers: int, pp: int, edges: bool) -> tuple[int, ...]:
    """Layers per stage, as even as possible. `edges`: embedding and head take the place of a layer each."""
    if not edges:
        return tuple(stage_layers(layers, pp))
    first, *middle, last = stage_layers(layers + 2, pp)
    return (first - 1, *middle, last - 1)


def kinds_of_stages(training: Training) -> tuple[tuple[int, ...], ...]:
    """The number of layers of each kind on every stage."""
    return _by_kind(training.shape, layers_of_stages(training))


_by_kind = lru_cache(maxsize=4096)(stage_kinds)


def stage_params(training: Training, stage: int) -> float:
    """Parameters on one GPU of a stage."""
    shape, counts = training.shape, kinds_of_stages(training)[stage]
    layers = over_kinds(1, counts, [params for params, _ in training.params_of_kinds])
    outside = outer_params(shape, training.tp, training.pp, stage)
    if shape.mtp_layers and stage == training.pp - 1:
        # Such a layer has a projection of 2 h to h, and shares embedding and head.
        layer = training.params_of_kinds[-1][0] + 2 * shape.hidden**2 / training.tp
        outside += shape.mtp_layers * layer
    return layers + outside


def stage_expert_params(training: Training, stage: int) -> float:
    """The parameters of routed experts of a stage on one GPU."""
    counts, later = kinds_of_stages(training)[stage], training.shape.mtp_layers if stage == training.pp - 1 else 0
    of_experts = [routed for _, routed in training.params_of_kinds]
    return over_kinds(1, counts, of_experts) + later * of_experts[-1]


def over_kinds(factor: float, counts: Sequence[int], values: Sequence[float]) -> float:
    """The sum of `factor` x layers of a kind x a value of the kind over all kinds."""
    if len(counts) == 1:
        return factor * counts[0] * values[0]
    return sum(factor * count * value for count, value in zip(counts, values, strict=True))


def in_flight(training: Training, stage: int) -> float:
    """The number of micro-batches whose activations a stage holds at once in all its layers.

    1F1B: min(m, pp - stage) (Narayanan et al. 2021, section 2.2). Interleaved over v chunks, the first stage holds
    1 + (pp - 1)/(pp v) times pp micro-batches (Korthikanti et al. 2022, section 4.2.3), each later stage
    two chunks fewer.
    """
    pp, chunks = training.pp, training.vp
    if chunks == 1:
        return min(training.micro_batches, pp - stage)
    chunks_in_flight = 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
    return min(training.micro_batches * chunks, chunks_in_flight) / chunks


Moment = Literal["backward pass", "optimizer step", "evaluation"]
RENEWED_SLACK, REPEATED_SLACK, LEAST_SLACK = (VALUES[f"allocator.{name}"] for name in ("renewed", "repeated", "least"))


@dataclass(frozen=True)
class StageMemory:
    """GiB on one GPU of a pipeline stage. `allocated` is the peak: the sum of all parts from parameters to buffers.

    `moment`: when the peak is. `evaluation`: allocated memory at the peak of an evaluation; 0 for another program.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    reserved: float
    nvidia_smi: float
    host: float = 0.0  # offloaded by this GPU to the host's memory
    evaluation: float = 0.0
    moment: Moment = "backward pass"

    @property
    def allocated(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class Memory:
    """The memory of all stages, first to last. `extremes`: the stages that can need the most; None means all."""

    stages: Sequence[StageMemory]
    extremes: Sequence[int] | None = None

    @cached_property
    def deciding(self) -> int:
        """The number of the stage that needs the most."""
        candidates = range(len(self.stages)) if self.extremes is None else self.extremes
        return max(candidates, key=lambda stage: (self.stages[stage].nvidia_smi, -stage))


def predict_memory(training: Training, machine: Machine | None = None) -> Memory:
    """The parts of every stage at its peak; a stage is computed when it is read.

    PyTorch gives free blocks back before it runs out of memory. So on a `machine`, reserved memory stays within the
    card as long as allocated memory does.
    """
    layers = layers_of_stages(training)
    by_kind = kinds_of_stages(training) if len(training.shape.kinds) > 1 else layers
    return Memory(_Stages(training, layers, machine), _extremes(by_kind))


@lru_cache(maxsize=4096)
def _extremes(layers: tuple[Any, ...]) -> tuple[int, ...]:
    """The stages that can need the most: the first, the last, and for each number of layers (of each kind) the first
    stage between them that has it, with the most micro-batches in flight."""
    first_of = {count: stage for stage, count in reversed([*enumerate(layers)][1:-1])}
    return tuple(sorted({0, len(layers) - 1, *first_of.values()}))


def host_need_gib(training: Training, memory: Memory, machine: Machine) -> float:
    """GiB that a host's GPUs offload to it; 0 if they offload nothing."""
    if not training.activations_on_host and training.offload == "none":
        return 0.0
    gpus = min(machine.gpus_per_node // machine.hosts, training.gpus)
    return gpus * max(stage.host for stage in memory.stages)


class _Stages(Sequence[StageMemory]):
    """The stages of one training. Shared values are computed once, in bytes, and each stage when it is first read."""

    def __init__(self, training: Training, layers: Sequence[int], machine: Machine | None) -> None:
        shape, tp = training.shape, training.tp
        self._training, self._layers = training, layers
        self._cached: dict[int, StageMemory] = {}
        self._card_gib = machine.memory_gib if machine else None
        self._facts, self._states = engine_of(training), states_of(training)
        parts = (training, training.of_experts) if shape.is_mixture else (training,)
        sharding = self._facts.sharding(training)
        states = [stated_states(part, self._states.state_bytes(part), sharding) for part in parts]
        self._state_bytes, self._bytes_of_both = (
            states[0],
            [*zip(*(vars(each).values() for each in states), strict=True)],
        )
        kinds = shape.kinds
        layers_bytes = [layer_bytes(training, kind) for kind in kinds]
        self._layer = layer = layers_bytes[0] if len(kinds) == 1 else max(layers_bytes, key=lambda one: one.kept)
        gathered_in_layers, gathered_in_loss = self._facts.gathered(training)
        kept = [kept_of_layer(training, one) for one in layers_bytes]
        offloaded = 1.0 if training.activations_on_host else training.offloaded_layers / shape.layers
        self._on_gpu = [(1 - offloaded) * each for each in kept]
        self._on_host = [offloaded * each for each in kept]
        joined = training.ep if experts.are_joined(training) else None
        self._matrix, rows = largest_matrix(shape, tp, joined), vocab_rows(shape, tp)
        half = training.width
        # One layer's backward pass: recomputed activations, gradients of activations and of the largest matrix.
        self._layer_work = recomputed_at_once(training, layer) + gradients_of_layer(layer) + gathered_in_layers
        self._layer_work += half * (training.layer_params if self._states.copies_by_layer(training) else self._matrix)
        self._loss_work = gathered_in_loss
        ours = training.program_states is None
        if ours and self._facts.overwrites_logits(training):
            # The gradient of the head's weight, made together with the logits' gradient; with several pieces also their
            # sum, which in one pass is in fp32.
            summed = 0 if training.loss_chunks == 1 else 4 if training.one_pass_loss else half
            self._loss_work += (half + summed) * rows * shape.hidden
        elif not ours and self._facts.sharding(training) < 3:
            self._loss_work += half * rows * shape.hidden  # the gradient of the head's weight
        # The optimizer's fp32 copy of one gradient, while the previous copy is not freed yet.
        self._step_work = 4 * self._matrix if self._state_bytes.step_gradients > self._state_bytes.gradients else 0.0
        logits = training.tokens / training.loss_chunks * (vocab_rows(shape, 1) if training.whole_logits else rows)
        self._logits = logits * self._states.logit_bytes(training)
        self._keeps_logits = self._states.keeps_logits(training)
        self._evaluates = ours and self._facts.counts_evaluation
        # Without gradients: one layer's forward pass, or the logits and the inputs of the last norm and the head.
        in_layers, in_loss = self._facts.gathered(training, gradients=False)
        self._layer_evaluated, self._loss_evaluated = layer.kept + in_layers, 2 * layer.stream + in_loss
        self._logits_evaluated = logits * self._facts.evaluated_logit_bytes(training)
        # The mask of a micro-batch: one for all layers of a stage, kept as long as its activations; of documents
        # another one for layers with a window.
        of_documents = training.micro_batch * len({kind.window for kind in kinds})
        mask = {"none": 0, "documents": half * of_documents, "full": half * training.micro_batch, "window": half}
        self._mask = mask.get(training.mask, 1) * shape.seq**2  # of layers: booleans
        # Weights by rows and by columns, in addition to 16-bit weights, which 8-bit formats replace (Megatron-Bridge's
        # bf16_with_nvfp4_mixed has fp8_param_gather = False). Under FSDP they come and go with the gathered layer.
        both = training.matmul == "nvfp4" and self._facts.sharding(training) < 3
        self._narrow = (
            [2 * OPERAND_BYTES[training.matmul] * weights_on(training, kind) for kind in kinds] if both else []
        )
        self._context = context_gib(training, machine)
        self._table = rows * shape.hidden
        self._lasting_bucket = self._states.lasting_bucket(training)

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, stage: int) -> StageMemory: ...

    @overload
    def __getitem__(self, stage: slice) -> Sequence[StageMemory]: ...

    def __getitem__(self, stage: int | slice) -> StageMemory | Sequence[StageMemory]:
        if isinstance(stage, slice):
            return [self[number] for number in range(len(self))[stage]]
        if (computed := self._cached.get(stage)) is None:
            number = range(len(self))[stage]
            computed = self._cached[number] = self._stage(number)
        return computed

    def _counts(self, stage: int, last: bool) -> Sequence[int]:
        """Layers of each kind on the stage; layers for later tokens are of the last kind."""
        counts, later = kinds_of_stages(self._training)[stage], self._training.shape.mtp_layers
        return (*counts[:-1], counts[-1] + later) if last and later else counts

    def _states_of(self, stage: int, params: float) -> StateBytes:
        """Bytes per parameter of the stage: the mean over its experts' parameters and all others."""
        of_experts = stage_expert_params(self._training, stage) if self._training.shape.is_mixture else 0.0
        if not of_experts:
            return self._state_bytes
        share = of_experts / params
        return StateBytes(*[other * (1 - share) + expert * share for other, expert in self._bytes_of_both])

    def _stage(self, stage: int) -> StageMemory:
        training, last = self._training, stage == len(self._layers) - 1
        params = stage_params(training, stage)
        states, counts = self._states_of(stage, params), self._counts(stage, last)
        flying = in_flight(training, stage)
        activations = over_kinds(flying, counts, self._on_gpu)
        buffers = self._states.buckets(training, params) + sent_between_stages(training, self._layer, flying, stage)
        if stage == 0 and self._layer.dropout:
            # Masks of the dropout after the embedding: sbh bytes per micro-batch (Korthikanti et al. 2022, 4.3).
            buffers += flying * self._layer.stream / 2
        buffers += flying * self._mask
        logits = self._logits if last else 0.0
        kept_logits = logits if self._keeps_logits else 0.0
        work, work_logits = self._layer_work, kept_logits
        if logits + self._loss_work > kept_logits + work:
            work, work_logits = self._loss_work, logits
        table = self._table if last or stage == 0 else 0.0
        step_work = self._step_work + self._states.update_bytes(training, params, self._matrix, table)
        gradients = states.gradients * params
        holes = RENEWED_SLACK * states.renewed * params
        narrow = over_kinds(1, counts, self._narrow) if self._narrow else 0.0
        weights, optimizer = states.parameters * params + narrow, states.optimizer * params
        in_passes = weights + optimizer + gradients + activations + buffers + kept_logits
        comes_and_goes = work + work_logits - kept_logits
        in_step = weights + optimizer + states.step_gradients * params + step_work + kept_logits + self._lasting_bucket
        # Gradients that the step does not free.
        left = (max(states.gradients, states.step_gradients) - states.renewed) * params
        in_evaluation = work_evaluated = logits_evaluated = 0.0
        if self._evaluates:
            work_evaluated = self._layer_evaluated
            if last and self._loss_evaluated + self._logits_evaluated > work_evaluated:
                work_evaluated, logits_evaluated = self._loss_evaluated, self._logits_evaluated
            in_evaluation = weights + optimizer + left + self._lasting_bucket + self._mask
            in_evaluation += work_evaluated + logits_evaluated
        allocated = max(in_passes + comes_and_goes, in_step, in_evaluation)
        # The temporaries of a layer fit into the holes; activations in flight do not.
        reserved = max(in_passes + max(comes_and_goes, holes), in_step + holes, in_evaluation + holes)
        moment: Moment = "backward pass"
        if in_evaluation == allocated:
            moment, gradients = "evaluation", left
            activations, buffers, work, work_logits = 0.0, self._lasting_bucket, work_evaluated, logits_evaluated
            buffers += self._mask
        elif in_step > in_passes + comes_and_goes:
            moment, gradients = "optimizer step", states.step_gradients * params
            activations, buffers, work, work_logits = 0.0, self._lasting_bucket, step_work, kept_logits
        on_host = over_kinds(flying, counts, self._on_host)
        reserved += REPEATED_SLACK * (activations + work_logits + buffers + work)
        reserved /= GIB
        if self._card_gib is not None:
            reserved = min(reserved, max(self._card_gib - self._context, allocated / GIB * (1 + LEAST_SLACK)))
        return StageMemory(
            parameters=weights / GIB,
            gradients=gradients / GIB,
            optimizer=optimizer / GIB,
            activations=activations / GIB,
            logits=work_logits / GIB,
            buffers=(buffers + work) / GIB,
            reserved=reserved,
            nvidia_smi=reserved + self._context,
            host=(states.host * params + on_host) / GIB,
            evaluation=in_evaluation / GIB,
            moment=moment,
        )


def sent_between_stages(training: Training, layer: LayerBytes, flying: float, stage: int) -> float:
    """Bytes of the outputs that a stage keeps until their gradients arrive, in addition to its layers' inputs: one
    stream per micro-batch.

    DeepSpeed splits them over the tensor-parallel group (pipe/engine.py, PartitionedTensor).
    """
    if stage == training.pp - 1:
        return 0.0
    return flying * layer.stream / (training.tp if engine_of(training).keeps_partitioned_outputs else 1)


def context_gib(training: Training, machine: Machine | None = None) -> float:
    """GiB that nvidia-smi shows in addition to PyTorch's reserved memory: CUDA's context, and NCCL's buffers for the
    world and for every axis that is split."""
    split = sum(size > 1 for size in (training.tp, training.pp, training.data_ranks))
    is_volta = machine is not None and "bf16" not in machine.peak_tflops
    context = VALUES["context.volta_gib" if is_volta else "context.gib"]
    return float(context + VALUES["context.communicator_gib"] * (split + 1 if split > 1 else split))
