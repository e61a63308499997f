"""The question of a search: a model, a number of GPUs, and which settings are fixed or open."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_gpt.core.engines import engine_named, trainers
from hpc_gpt.core.engines import engines as all_engines
from hpc_gpt.core.engines.base.training import Offload, OptimizerMode, States, Training
from hpc_gpt.core.errors import Fault, LayoutError, UserError, check_sizes, raise_faults
from hpc_gpt.core.optimizers import optimizer_named
from hpc_gpt.core.recomputation import RECOMPUTES, Recompute, modules_of, recomputation
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import size_run
from hpc_gpt.core.settings.experiment import CpExchange, Engine, Experiment, Matmul, Partition, Train
from hpc_gpt.core.settings.layout import AXES, Layout, nodes_for
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.rules import keys_of
from hpc_gpt.core.settings.rules.engine import optimizer_faults
from hpc_gpt.core.settings.rules.shape import size_faults
from hpc_gpt.core.settings.services import Plan, ProgramKind
from hpc_gpt.core.settings.shape_split import partition_layers, split_faults
from hpc_gpt.planner.fast import with_fast_settings
from hpc_gpt.planner.training import PLANNED, traits_of, update_mode, with_choices

# In ascending order, as RECOMPUTES, so that the plainer of two equal candidates comes first.
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "full")
# Reasons why a layout cannot run, like those of `_obstacle`: keys of `plan --json`, which do not change.
NO_ENGINE = "no engine that is asked for splits so"
NO_GAIN = "a shorter cp is as fast"
DIVIDES_NO_BATCH = "dp does not divide the global batch"
TP_SPANS = "tp would span nodes"
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # tried if the global batch is open
_CHUNKS = (1, 2, 4)  # of uneven stages
_LOSS_CHUNKS = (8, 64)  # tried if the logits do not fit
_LEAST_TOKENS = 1024  # per rank under cp: published layouts have 4,096, and kernels need full tiles
_BATCH = ("micro_batch", "micro_batches")
# Keys of an experiment that fix the field of a Training with the same name.
_FIXABLE = (
    *(f"layout.{name}" for name in (*AXES, "ep", "etp", "shard", *_BATCH)),
    *(f"engine.{name}" for name in PLANNED if name != "name"),
)
_MOST = 10**9


@dataclass(frozen=True)
class Question:
    """`fixed`: values that are not searched, by the name of the Training's field. `global_batch` is None if `fixed` has
    micro_batches, from which it follows. `traits`: by engine, the fields that follow from its switches (`traits_of`).
    `plain`: by engine, their values without fast settings, for a loss in chunks, which has none by default.
    `savings`: names of switches that may be turned on where memory is short. `most_cp`: the largest cp that is tried.
    `usual_batch`: the default global batch on so many GPUs. `of_program`: it is about a program that is like the
    engines: it has their physics, and not their limits. `kind`: how it holds its states.
    """

    shape: ModelShape
    gpus: int
    gpus_per_node: int
    dtype: str
    global_batch: int | None
    engines: tuple[str, ...] = field(default_factory=lambda: searched_engines(None))
    fixed: Mapping[str, Any] = field(default_factory=dict)
    traits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plain: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tp_across_nodes: bool = False
    partition: Partition = "layers"
    optimizer: str = "adamw"
    optimizer_mode: OptimizerMode = "fused"
    matmul: Matmul = "none"
    savings: frozenset[str] = frozenset()
    most_cp: int = 1
    usual_batch: Callable[[int], int] | None = None
    of_program: bool = False
    kind: ProgramKind | None = None

    def of(self, shape: ModelShape) -> "Question":
        """The same question about another model, or another sequence length."""
        return replace(self, shape=shape, most_cp=max(1, shape.seq // _LEAST_TOKENS))

    def on(self, gpus: int) -> "Question":
        """The same question on so many GPUs."""
        batch = self.global_batch if self.usual_batch is None else self.usual_batch(gpus)
        return replace(self, gpus=gpus, global_batch=batch)

    def layouts(self) -> Iterator[tuple[Layout, str | None]]:
        """Every layout of the GPUs, each with the reason why it cannot run, or None."""
        powers = tuple(2**power for power in range(self.most_cp.bit_length()))
        for cp in self._choices("cp", powers):
            for tp in divisors(self.gpus // cp if self.gpus % cp == 0 else 0):
                for pp in divisors(self.gpus // (cp * tp)):
                    layout = Layout(tp, pp, self.gpus // (tp * cp * pp), cp)
                    if all(self.fixed.get(axis, getattr(layout, axis)) == getattr(layout, axis) for axis in AXES):
                        for ep, etp in self._expert_degrees(layout):
                            split = replace(layout, ep=ep, etp=etp) if ep > 1 or etp is not None else layout
                            yield split, self._obstacle(split)

    def _expert_degrees(self, layout: Layout) -> Iterator[tuple[int, int | None]]:
        """Each (ep, etp) that divides the experts and the ranks of a stage. Experts are divided over tp as all else is,
        or for an engine that can also stay whole; given degrees are tried although they do not divide."""
        ep, etp = self.fixed.get("ep"), self.fixed.get("etp")
        if not self.shape.experts:
            yield ep or 1, etp
            return
        whole = [1] if layout.tp > 1 and any(engine_named(name).splits("etp") for name in self.engines) else []
        for ranks in [etp] if "etp" in self.fixed else [None, *whole]:
            stage = layout.tp * layout.data_ranks
            if ep is not None:
                yield ep, ranks
                continue
            for size in divisors(self.shape.experts):
                if stage % (size * (ranks or layout.tp)) == 0:
                    yield size, ranks

    def trait(self, engine: str, name: str, default: Any) -> Any:
        """A field of a Training that follows from the engine's switches, or that the program states."""
        return self.traits.get(engine, {}).get(name, default)

    def replicas(self, layout: Layout) -> int:
        """The number of ranks that read samples of their own: dp, unless ep is an axis of its own in a program."""
        outside = self.of_program and any(self.trait(name, "ep_outside_dp", False) for name in self.engines)
        return layout.dp // layout.ep if outside else layout.dp

    def batches(self, dp: int) -> list[tuple[int, int]]:
        """Returns (micro_batch, micro_batches) for every way to divide the global batch, small micro-batches first."""
        if self.global_batch is None:
            return [(size, self.fixed["micro_batches"]) for size in self._choices("micro_batch", _MICRO_BATCHES)]
        if self.global_batch % dp:
            return []
        share = self.global_batch // dp
        pairs = [(size, share // size) for size in divisors(share)]
        fixed = tuple(self.fixed.get(name) for name in _BATCH)
        return [pair for pair in pairs if all(value in (None, size) for value, size in zip(fixed, pair, strict=True))]

    def ways(self, layout: Layout) -> Iterator[Training]:
        """A training for each allowed combination of engine, ZeRO stage, offload, sharded optimizer and chunks.

        Each has one micro-batch, no sequence parallelism and no recomputation.
        """
        for engine in self.engines:
            if not self.techniques(engine, layout.tp, layout.cp):
                continue
            for (stage, offload, sharded), exchange, shard in itertools.product(
                self._states(engine, layout), self._exchanges(engine, layout), self._shards(engine, layout)
            ):
                traits = self.traits.get(engine, {})
                if stage == 3:  # ZeRO-3 calls the head by itself
                    traits = {**traits, "compiled_head": False}
                for chunks in self._chunks(engine, layout.pp):
                    yield Training(
                        self.shape,
                        **{**vars(layout), "dp": self.replicas(layout), "shard": shard},
                        program_states=self._program_states(engine, sharded),
                        vp=chunks,
                        zero_stage=stage,
                        dtype=self.dtype,
                        engine=engine,
                        sharded_optimizer=sharded,
                        offload=offload,
                        stage_layers=self._stage_layers(layout.pp),
                        optimizer=self.optimizer,
                        optimizer_mode=self.optimizer_mode,
                        matmul=self.matmul,
                        cp_exchange=exchange,
                        **{
                            "edges_as_layers": self._splits_edges(engine, layout.pp),
                            **traits,
                        },
                    )

    def _program_states(self, engine: str, sharded: bool) -> States | None:
        if not self.of_program:
            return None
        from hpc_gpt.core.engines.base.programs import program_states  # loads several engines

        return program_states(engine, self.kind, self.dtype, sharded)

    def _splits_edges(self, engine: str, pp: int) -> bool:
        """Whether embedding and head each take a layer's place in the split over stages."""
        by_itself = not self.of_program and engine_named(engine).splits_edges(self.shape.layers, pp)
        return bool(self.trait(engine, "edges_as_layers", by_itself))

    def techniques(self, engine: str, tp: int, cp: int = 1) -> list[tuple[bool, Recompute]]:
        """Returns (sequence_parallel, recompute) for each way to save activations that the engine has with `tp` and
        `cp`."""
        facts = engine_named(engine)
        able = self.of_program or "sequence_parallel" in facts.switches
        can_split = able and tp > 1 and self.shape.seq % (tp * cp) == 0
        return [
            (parallel, recompute)
            for parallel in self._choices("sequence_parallel", (False, True))
            if (can_split or not parallel) and self._runs(engine, Layout(tp, 1, 1, cp), sequence_parallel=parallel)
            for recompute in self._choices("recompute", self._recomputes(engine))
            if self.of_program or facts.can_recompute(recompute)
        ]

    def _recomputes(self, engine: str) -> tuple[Recompute, ...]:
        """The recomputations to try. A mixture, which has many more layouts, is not tried with selective recomputation,
        which saves scores, if its attention keeps none."""
        keeps_none = self.traits.get(engine, {}).get("flash", False)
        return ("none", "full") if self.shape.is_mixture and keeps_none else RECOMPUTES

    def saved(self, training: Training) -> Iterator[Training]:
        """Yields variants of a training that does not fit, the fastest first: a loss in chunks, layers' inputs in the
        host's memory (under full recomputation layers keep nothing else), and both."""
        if not self.savings & engine_named(training.engine).switches:
            return
        chunks = _LOSS_CHUNKS if "loss_chunks" in self.savings else ()
        moved = (False, True) if "activation_offload" in self.savings and training.recompute == "full" else (False,)
        for on_host in moved:
            for pieces in (training.loss_chunks, *chunks):
                if on_host or pieces > training.loss_chunks:
                    plain = self.plain.get(training.engine, {}) if pieces > 1 else {}
                    yield replace(training, activations_on_host=on_host, loss_chunks=pieces, **plain)

    def can_run(self, layout: Layout) -> bool:
        """Whether any engine and batch can run with a layout that has no obstacle."""
        return bool(self.batches(self.replicas(layout))) and any(True for _ in self.ways(layout))

    def _choices(self, name: str, open_values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of a field to try: the fixed one alone, or all known ones."""
        return (self.fixed[name],) if name in self.fixed else open_values

    def _obstacle(self, layout: Layout) -> str | None:
        """The reason why the layout cannot run, by the rules of `check_split`, `check_nodes` and `solve_batch`."""
        if (fault := next(split_faults(self.shape, layout), None)) is not None:
            return fault.summary
        if isinstance(self.partition, tuple):
            blocks = self.partition
            if len(blocks) != layout.pp or sum(blocks) != self.shape.layers or min(blocks) < 1:
                return "engine.partition does not deal the layers out over pp"
        if min(self.gpus, self.gpus_per_node) % layout.tp and not self.tp_across_nodes:
            return TP_SPANS
        if self.global_batch is not None and self.global_batch % self.replicas(layout):
            return DIVIDES_NO_BATCH
        return None

    def _exchanges(self, engine: str, layout: Layout) -> list[CpExchange]:
        """The ways in which the ranks of cp can exchange attention's inputs; with cp 1 the default alone."""
        facts = engine_named(engine)
        if layout.cp == 1:
            return [self.fixed.get("cp_exchange", "heads")]
        possible = ("ring",) if "ring" in facts.cp_exchanges else facts.cp_exchanges  # attention hides a ring
        if self.of_program:
            heads = self.shape.heads // layout.tp
            splits = {"heads": heads % layout.cp == 0}  # the others have no such limit
            return [exchange for exchange in self._choices("cp_exchange", possible) if splits.get(exchange, True)]
        return [
            exchange
            for exchange in self._choices("cp_exchange", possible)
            if exchange in facts.cp_exchanges
            and facts.context_fault(self.shape, layout, Engine(name=engine, cp_exchange=exchange)) is None
        ]

    def _shards(self, engine: str, layout: Layout) -> list[int | None]:
        """The numbers of ranks over which the engine can shard: all of the data axis (None), and those of a node."""
        ranks, of_node = self.replicas(layout) * layout.cp, self.gpus_per_node // layout.tp
        possible = self._choices("shard", (None, of_node) if ranks * layout.tp > self.gpus_per_node else (None,))
        able = engine_named(engine).has_replicas
        shards = [None if shard == ranks else shard for shard in possible if able or shard in (None, ranks)]
        shards = [shard for shard in shards if shard is None or (shard > 1 and ranks % shard == 0)]
        return [shard for shard in shards if self._runs(engine, replace(layout, shard=shard))]

    def _runs(self, engine: str, layout: Layout, **switches: Any) -> bool:
        """Whether the engine can run a mixture in the layout, with the switches; it can run any other model."""
        if self.of_program or not self.shape.is_mixture:
            return True
        wanted = Engine(name=engine, **{"sequence_parallel": layout.tp > 1, **switches})
        train = Train(dtype=self.dtype)  # type: ignore[arg-type]
        return not any(engine_named(engine).own_faults(wanted, layout, train, self.shape))

    def _states(self, engine: str, layout: Layout) -> Iterator[tuple[int, Offload, bool]]:
        """Yields each (zero_stage, offload, sharded_optimizer) that the engine supports with the layout."""
        facts = engine_named(engine)
        if not self.of_program and not _can_split(facts.axes, layout):
            return
        for zero_stage in self._choices("zero_stage", facts.zero_stages):
            stage = zero_stage if self.of_program else facts.stage_that_runs(zero_stage)
            # A stage that would run as another one is tried only if the user requests it.
            searched_already = stage != zero_stage and "zero_stage" not in self.fixed
            if (
                zero_stage not in facts.zero_stages
                or (layout.pp > 1 and zero_stage > 1 and not self.of_program)
                or searched_already
            ):
                continue
            for offload in self._choices("offload", OFFLOADS):
                on_host = offload != "none" and optimizer_named(self.optimizer).needs_shares
                if on_host or not _can_offload(engine, stage, offload):
                    continue
                able = "sharded_optimizer" in facts.switches and layout.data_ranks > 1
                able = able and self._runs(engine, layout, sharded_optimizer=True)
                # A sharded optimizer needs less memory and no more time: a mixture is not tried without one.
                usual = (True,) if able and self.shape.is_mixture else (False, True)
                for sharded in self._choices("sharded_optimizer", usual):
                    if able or not sharded:
                        yield stage, offload, sharded

    def _chunks(self, engine: str, pp: int) -> list[int]:
        """The numbers of interleaved chunks per stage to try. With chunks, all stages and chunks are equally deep."""
        if self.of_program and "vp" in self.fixed:
            return [self.fixed["vp"]]
        if not engine_named(engine).has_chunks:
            return [chunks for chunks in self._choices("vp", (1,)) if chunks == 1]
        places = self.shape.layers + 2 * self._splits_edges(engine, pp)
        if places % pp:
            if engine_named(engine).shape_fault(self.shape) is None and not self.of_program:
                return []
            # A shape that is only planned: programs lay its stages out by hand, as DeepSeek's 61 layers.
            return [chunks for chunks in self._choices("vp", _CHUNKS) if pp * chunks <= self.shape.layers]
        deep = places // pp
        possible = divisors(deep) if pp > 1 else (1,)
        if self.shape.is_mixture and len(possible) > 3:  # it has many more layouts, and the others are hardly faster
            possible = (1, possible[len(possible) // 2], deep)
        share = recomputation(self.fixed.get("recompute", "none")).share  # of whole layers of each chunk
        return [
            chunks
            for chunks in self._choices("vp", possible)
            if deep % chunks == 0 and (share * (deep // chunks)).is_integer()
        ]

    def _stage_layers(self, pp: int) -> tuple[int, ...] | None:
        """The number of layers of each stage; None if they are as even as possible."""
        return None if self.partition == "layers" or pp == 1 else _blocks(self.shape, pp, self.partition)


def _can_split(axes: Collection[str], layout: Layout) -> bool:
    """Whether an engine with these axes splits a model so."""
    if layout.expert_tp != layout.tp and "etp" not in axes:
        return False
    return all(getattr(layout, axis) == 1 or axis in axes for axis in ("tp", "pp", "cp", "ep"))


def searched_engines(profile: ClusterProfile | None) -> tuple[str, ...]:
    """The engines that a plan for the profile tries by default."""
    return tuple(name for name, facts in all_engines().items() if facts.is_searched(profile))


@functools.cache
def _can_offload(name: str, stage: int, offload: Offload) -> bool:
    """Whether the engine can run `engine.offload` under a ZeRO stage."""
    if offload == "none":
        return True
    facts, engine = engine_named(name), Engine(name=name, zero_stage=stage, offload=offload)
    return "offload" in facts.switches and not any(facts.offload_faults(engine))


@functools.cache
def _blocks(shape: ModelShape, pp: int, partition: Partition) -> tuple[int, ...]:
    return tuple(partition_layers(shape, pp, partition))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return (*small, *(number // size for size in reversed(small) if size * size != number))


def question_of(
    experiment: Experiment,
    profile: ClusterProfile,
    holds: Collection[str] = (),
    engines: tuple[str, ...] | None = None,
    fast: bool = False,
    program: Plan | None = None,
) -> Question:
    """The question for an experiment: its model, GPUs, batch, dtype and switches; its layout is open.

    `fast`: with the fast settings that each engine has, except for the keys in `holds`.
    `holds`: dotted keys whose values are fixed. `engines`: engines to try, by default `searched_engines`; if `holds`
    has engine.name, only the experiment's. `program`: how a program runs that is like the experiment's engine. Raises
    LayoutError or ConfigError for values that contradict each other.
    """
    raise_faults(list(size_faults(experiment.model)))
    _check_sizes({"model": vars(experiment.model), "layout": vars(experiment.layout)})
    shape, gpus = resolve_shape(experiment.model), asked_gpus(experiment, profile)
    engine, batch = experiment.engine, experiment.layout.global_batch
    if "layout.micro_batches" in holds and "layout.global_batch" not in holds:
        batch = None
    elif batch is None:
        batch = _own_batch(experiment, profile)
    fixed = _fixed(experiment, holds)
    if "engine.name" in holds and program is None:
        stated = engine_named(engine.name).stated_recompute(engine)
        fixed |= {"recompute": stated} if stated is not None else {}
    engine = with_choices(engine, fixed, profile)
    switches = {key.partition(".")[2] for key in holds if key.startswith("engine.")} - set(PLANNED)
    tried = (engine.name,) if "engine.name" in holds else engines or searched_engines(profile)
    tried = tuple(name for name in tried if _takes(name, engine, switches))
    if "engine.name" not in holds:
        # Without an engine of our own for it, a mixture of experts is planned for those of other programs.
        able = [name for name, facts in trainers().items() if facts.shape_fault(shape) is None]
        tried = tuple(name for name in tried if name in able) or tuple(
            name for name in able if shape.special_keys and _takes(name, engine, switches)
        )
    if experiment.data.mask_documents:
        tried = tuple(name for name in tried if engine_named(name).trains_our_model or "engine.name" in holds)
    train = experiment.train
    optimizer = optimizer_named(train.optimizer)
    raise_faults(optimizer_faults(engine, train) if "engine.name" in holds else ())
    tried = tuple(name for name in tried if engine_named(name).has_optimizer(optimizer))
    if program is None and modules_of(fixed.get("recompute", "none")):
        faults = [_module_faults(replace(engine, name=name), train, shape) for name in tried]
        raise_faults(faults[0] if faults and all(faults) else ())
    plain = {
        name: traits_of(engine, name, device := profile.device)
        | {"mask": engine_named(name).mask(engine, shape, train.dtype, device, experiment.data.mask_documents)}
        | {"muon_steps": train.muon_steps, "muon_dtype": train.muon_dtype, "tf32": train.tf32}
        for name in tried
    }
    traits = plain
    if fast:
        faster = [
            with_fast_settings(replace(engine, name=name, zero_stage=None), shape, train, holds) for name in tried
        ]
        traits = {
            fast_engine.name: plain[fast_engine.name] | traits_of(fast_engine, fast_engine.name, profile.device)
            for fast_engine in faster
        }
    if program is not None:
        fixed |= {"vp": program.chunks} if program.chunks is not None else {}
        traits = plain = {name: _of_program(of_engine, name, engine, program) for name, of_engine in plain.items()}
    # A program's stages are as its experiment has them; ours are laid out anew for each pp.
    given_by_stage = isinstance(engine.partition, tuple) and "engine.partition" not in holds and program is None
    return Question(
        shape=shape,
        gpus=gpus,
        gpus_per_node=profile.gpus_per_node,
        dtype=train.dtype,
        global_batch=batch,
        engines=tried,
        fixed=fixed,
        traits=traits,
        plain={name: dict(plain[name].items() - traits[name].items()) for name in tried},
        tp_across_nodes=experiment.layout.allow_tp_across_nodes,
        partition="layers" if given_by_stage else engine.partition,
        optimizer=train.optimizer,
        optimizer_mode=update_mode(train),
        matmul=train.matmul,
        savings=frozenset({"loss_chunks", "activation_offload"} - {*fixed}),
        of_program=program is not None,
        kind=program.kind if program is not None else None,
    ).of(shape)


def _of_program(of_engine: Mapping[str, Any], name: str, engine: Engine, program: Plan) -> dict[str, Any]:
    """The fields of a program's Training, from those of the engine that it is like: without what that engine does by
    itself, such as its exchange of tokens and its loss, and with what [plan] states."""
    by_itself = {*engine_named(name).stated_traits(engine), "compiled_loss", "compiled_head"}
    return {field: value for field, value in of_engine.items() if field not in by_itself} | program.traits


def _module_faults(engine: Engine, train: Train, shape: ModelShape) -> list[Fault]:
    """The faults of the modules that the engine is to recompute, which are the same in every layout."""
    faults = engine_named(engine.name).own_faults(engine, Layout(1, 1, 1), train, shape)
    return [fault for fault in faults if "engine.recompute" in keys_of(fault)]


def _fixed(experiment: Experiment, holds: Collection[str]) -> dict[str, Any]:
    """The experiment's values of the keys in `holds`, as fields of a Training."""
    fixed = {}
    for key in (key for key in _FIXABLE if key in holds):
        table, _, name = key.partition(".")
        fixed[name] = getattr(experiment.layout if table == "layout" else experiment.engine, name)
    return {name: value for name, value in fixed.items() if value is not None}


def asked_gpus(experiment: Experiment, profile: ClusterProfile) -> int:
    """The requested number of GPUs, as `size_run` counts them: the same number on all nodes."""
    requested, per_node = experiment.layout, profile.gpus_per_node
    gpus = requested.gpus or (requested.nodes * per_node if requested.nodes else per_node)
    nodes = requested.nodes or nodes_for(gpus, per_node)
    if gpus > nodes * per_node or gpus % nodes:
        raise LayoutError(
            f"{gpus} GPUs do not spread over {nodes} nodes of {per_node}", f"use --nodes {nodes_for(gpus, per_node)}"
        )
    if profile.scheduler == "local" and nodes > 1:
        raise LayoutError(
            f"{gpus} GPUs need {nodes} nodes, but profile {profile.name} is this one machine",
            f"use --gpus {per_node} or fewer, or another --cluster",
        )
    return gpus


def _check_sizes(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises LayoutError for sizes that no machine has, before anything is divided by them or by all their divisors.
    Sizes of the model below 1 are those of `size_faults`, as some may be 0."""
    for table, sizes in tables.items():
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                continue
            if table == "layout":
                check_sizes({name: size}, "layout.")
            if size > _MOST:
                raise LayoutError(f"{table}.{name} is over {_MOST:,}, which no machine has", f"give a real {name}")


def _own_batch(experiment: Experiment, profile: ClusterProfile) -> int:
    """The global batch with the experiment's own layout; with one replica if that layout cannot run here."""
    try:
        return size_run(experiment, profile).batch.global_batch
    except UserError:
        return (experiment.layout.micro_batch or 1) * (experiment.layout.micro_batches or 1)


def _takes(name: str, engine: Engine, keys: Collection[str]) -> bool:
    """Whether the engine has every switch of `keys` that differs from its default."""
    plain = Engine()
    return all(
        key in engine_named(name).switches or getattr(engine, key, None) == getattr(plain, key, None) for key in keys
    )
