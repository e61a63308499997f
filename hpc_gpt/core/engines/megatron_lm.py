"""Megatron-LM: its rules, states and communication; `base.megatron_program` has its arguments and the checkout."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.engines.base.megatron_experts import (
    OVERLAP,
    broken_by_overlap,
    expert_fault,
    overlap_faults,
    split_faults,
    stated_traits,
    values_of,
)
from hpc_gpt.core.engines.base.megatron_program import (
    INTERLEAVED,
    check_checkout,
    checkout_of,
    chunks_of,
    layers_of_chunk,
    megatron_arguments,
    option_names,
    splits_edges,
    words_of,
)
from hpc_gpt.core.engines.base.megatron_recompute import recompute_faults, stated_recompute
from hpc_gpt.core.engines.base.training import LOGIT_BYTES, StateBytes, Training, plain_states
from hpc_gpt.core.errors import Fault
from hpc_gpt.core.optimizers import OptimizerFacts
from hpc_gpt.core.recomputation import Recompute, recomputation
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Command, Data, Engine, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import SCHEDULES
from hpc_gpt.core.settings.services import Plan
from hpc_gpt.core.settings.shape_split import context_fault, split_fault
from hpc_gpt.core.settings.sized import Sized

# Releases that train mixtures of experts write the softmax over the fp32 copy, and the gradient over the softmax
# (megatron/core/tensor_parallel/cross_entropy.py).
LOGIT_IN_PLACE = 6.0


class MegatronLm(EngineFacts):
    order, plan_order = 60, 50
    trains_our_model = False
    is_program = True
    packages = ()
    axes = frozenset({"tp", "pp", "cp", "ep", "etp"})
    shape_parts = frozenset({"experts", "mtp_layers", "rotated"})
    cp_exchanges = ("heads", "keys", "ring")
    no_save = "Megatron-LM saves as often as train.save_every says, and when it ends: stop or requeue it"
    least_steps_after_warmup = 1
    counts_evaluation = False
    switches = frozenset({"recompute", "sequence_parallel", "sharded_optimizer", "cp_exchange", "megatron_args"})
    alternatives = {"zero_stage": "engine.sharded_optimizer = true is Megatron's distributed optimizer"}
    compiles_edges = False
    recomputes_parts = True
    has_dropout = True
    has_fused_kernels = True
    has_fused_gate = True
    scatters_outputs = True  # each rank sends its part and gathers them inside the node (Narayanan et al. 2021, 4.1)
    has_chunks = True
    saves_weights_again = True
    unfollowed = EngineFacts.unfollowed | {"pad_token_id"}

    def data_of(self, data: Data) -> Data:
        """Megatron's own token files, by default of the standard library; a weighted mixture of them; or mock data."""
        return replace(data, source="megatron", path="stdlib") if data.source == "stdlib" else data

    def table_faults(self, command: Command, plan: Plan, data: Data) -> Iterator[Fault]:
        yield from super().table_faults(command, plan, data)
        if data.mix is not None:
            if others := [name for name in sorted(data.mix) if data.mix[name].source != "megatron"]:
                yield Fault(
                    f"data.mix.{others[0]}.source is {data.mix[others[0]].source}, but Megatron-LM reads only its own "
                    "token files",
                    f"make one: hpc-gpt data SOURCE -o PREFIX --format megatron, then data.mix.{others[0]}.source = "
                    '"megatron"',
                )
            if data.phases:
                yield Fault(
                    "data.phases is given, but Megatron-LM has one set of weights for a run",
                    "leave data.phases out, or use another engine",
                )
        elif data.source not in ("megatron", "random", "stdlib"):
            yield Fault(
                f"data.source is {data.source}, but Megatron-LM reads only its own token files",
                'set data.source = "megatron" and data.path to the path before .bin and .idx, or data.path = "stdlib"',
            )

    def shape_fault(self, shape: ModelShape) -> str | None:
        """The reason why Megatron-LM cannot train a shape. Its options fix all figures of Llama 3.1's rotation except
        the factor, and take a whole number as the base
        (megatron/core/models/common/embeddings/rotary_pos_embedding.py)."""
        if (fault := super().shape_fault(shape)) is not None:
            return fault
        if shape.rope_theta != int(shape.rope_theta):
            return f"model.rope_theta is {shape.rope_theta:g}, and --rotary-base takes a whole number"
        scaling = shape.rope_scaling
        if scaling is not None and replace(scaling, factor=8.0) != RopeScaling("llama3", 8.0, 1.0, 4.0, 8192):
            return "it scales a rotation only by low 1, high 4 and 8192 positions"
        return expert_fault(shape)

    def context_fault(self, shape: ModelShape, layout: Layout, engine: Engine) -> Fault | None:
        """The reason why Megatron-LM cannot split samples over cp: it splits a sample into two chunks per rank whatever
        is exchanged (megatron/training/arguments.py), and does not repeat key heads."""
        cp, keys = layout.cp, max(1, shape.key_heads // layout.tp)
        if (fault := super().context_fault(shape, layout, engine)) is not None:
            return fault
        if engine.cp_exchange == "heads" and keys % cp:
            others = f"use --cp {math.gcd(keys, cp)}, " if math.gcd(keys, cp) > 1 else ""
            return split_fault(
                "Megatron-LM does not repeat keys over cp",
                f"cp {cp} does not divide {shape.key_heads} kv_heads / tp {layout.tp} = {keys}, and Megatron-LM's a2a "
                "does not repeat them",
                f'{others or "use "}{"or " if others else ""}engine.cp_exchange = "ring" or "keys"',
            )
        return context_fault(shape, layout, "ring", engine.sequence_parallel)

    def own_faults(self, engine: Engine, layout: Layout, train: Train, shape: ModelShape) -> Iterator[Fault]:
        """The faults of experts and of recomputation, in Megatron-LM's own words."""
        own = values_of(words_of(engine.megatron_args))
        if shape.is_mixture:
            yield from split_faults(engine, layout, train.dtype)
            yield from overlap_faults(layout, train.dtype, own)
        layers = layers_of_chunk(engine, shape.layers, layout.pp)
        yield from recompute_faults(engine.recompute, layers, shape, train.dtype, own)

    def sized_faults(self, resolved: Sized) -> Iterator[Fault]:
        layout, shape, train = resolved.layout, resolved.model, resolved.train
        if shape.is_mixture and shape.bias == "all" and layout.expert_tp > 1:
            yield Fault(
                f"{layout.expert_tp} ranks share an expert with biases, which Megatron-LM does not divide",
                "use layout.etp = 1, or model.bias = none",
                of_layout=True,
            )
        if layout.tp > shape.key_heads:
            yield Fault(
                f"tp {layout.tp} is more than the {shape.key_heads} kv_heads, which Megatron-LM does not divide",
                f"use --tp {shape.key_heads} or less, or engine deepspeed-3d",
                of_layout=True,
            )
        if shape.layers % layout.pp and not splits_edges(shape.layers, layout.pp):
            yield Fault(
                f"pp {layout.pp} does not divide the {shape.layers} layers: Megatron-LM needs stages of equal depth",
                f"use --pp {max(pp for pp in range(1, layout.pp) if shape.layers % pp == 0)}, or "
                f"model.layers = {-(-shape.layers // layout.pp) * layout.pp}",
                of_layout=True,
            )
        if SCHEDULES[train.decay].megatron is None:
            known = [name for name, schedule in SCHEDULES.items() if schedule.megatron is not None]
            yield Fault(
                f"train.decay is {train.decay}, a schedule that Megatron-LM does not have",
                f"use train.decay = {', '.join(known[:-1])} or {known[-1]}, or another engine",
            )
        if train.warmup_steps >= train.steps:
            yield Fault(
                f"train.warmup_steps is {train.warmup_steps} of {train.steps} steps, but Megatron-LM needs fewer",
                f"use train.warmup_steps = {train.steps - 1} or less",
            )
        for key, value, why in (
            ("save_last", not train.save_last and "false", "saves whenever it ends"),
            ("until_loss", train.until_loss is not None and f"{train.until_loss:g}", "stops at a step, not at a loss"),
        ):
            if value:
                yield Fault(f"train.{key} is {value}, but Megatron-LM {why}", "leave it out")
        yield from self._argument_faults(resolved)

    def notes(self, resolved: Sized) -> Iterator[str]:
        if resolved.model.is_mixture and resolved.train.dtype != "bf16":
            yield f"--moe-grouped-gemm is for bf16 alone: in {resolved.train.dtype} experts are multiplied one by one"

    def _argument_faults(self, resolved: Sized) -> Iterator[Fault]:
        """The faults of engine.megatron_args: an option that follows from other keys of the experiment, and an
        attention that does not run with cp."""
        extra = resolved.engine.megatron_args
        if resolved.layout.cp > 1 and "--transformer-impl local" in " ".join(extra).replace("=", " "):
            yield Fault(
                f"cp is {resolved.layout.cp}, but engine.megatron_args has --transformer-impl local, whose attention "
                "has no context parallelism",
                "leave it out, or use --cp 1",
            )
        arguments = megatron_arguments(resolved, "checkpoints", "prefix")
        ours = option_names(arguments[: len(arguments) - len(extra)])
        twice = sorted(set(ours).intersection(option_names(extra)))
        if twice:
            yield Fault(
                f"engine.megatron_args holds {', '.join(twice)}, which follows from the experiment's other keys",
                "set those keys (hpc-gpt help keys), so that the record says what ran",
            )

    def check_program(self, resolved: Resolved, environment: Mapping[str, str]) -> None:
        """Raises ConfigError unless the run's checkout has a parser that knows every option of the run.

        A checkout in a container's image cannot be read from outside, and is not checked.
        """
        checkout = checkout_of(resolved, environment)
        if resolved.cluster.container is None:
            check_checkout(checkout, option_names(megatron_arguments(resolved, "checkpoints", "prefix")))

    # --- as the planner sees it

    def is_searched(self, profile: ClusterProfile | None) -> bool:
        """Whether the profile has a checkout, which it needs."""
        return profile is not None and profile.megatron_lm is not None

    def keeps_scores(self, engine: Engine, device: str | None) -> bool:
        """True on a V100: the kernels that keep no scores need an Ampere or newer device."""
        return (device or "").startswith("v100")

    def splits_edges(self, layers: int, pp: int) -> bool:
        return splits_edges(layers, pp)

    def chunks(self, engine: Engine, layers: int, pp: int) -> int:
        return chunks_of(engine, layers, pp)

    def stated_traits(self, engine: Engine) -> dict[str, Any]:
        """The traits that Megatron-LM's own arguments state (megatron/training/arguments.py)."""
        words = words_of(engine.megatron_args)
        own = values_of(words)
        traits: dict[str, Any] = {"dispatcher": "alltoall"}  # unless the user's own arguments name another
        if "--overlap-grad-reduce" in own:  # which --overlap-param-gather requires
            traits |= {"dp_overlap": True, "gathers_wait": "--overlap-param-gather" not in own}
        if "--tp-comm-overlap" in own:
            traits["tp_overlap"] = True
        if "--grad-reduce-in-bf16" in own:
            traits["grad_sum"] = "bf16"
        if "--cross-entropy-loss-fusion" in own:
            traits["fused_loss"] = "kernel" if own.get("--cross-entropy-fusion-impl") == "te" else "jit"
        backend = own.get("--attention-backend")
        if backend in ("unfused", "local") or own.get("--transformer-impl") == "local":
            traits |= {"flash": False, "attention": "unfused"}
        elif backend in ("flash", "fused"):
            traits["attention"] = {"flash": "fa2", "fused": "cudnn"}[backend]
        if (layers := own.get("--cpu-offloading-num-layers", "")).isdigit():
            traits["offloaded_layers"] = int(layers)
        return traits | stated_traits(words)

    def stated_recompute(self, engine: Engine) -> Recompute | None:
        return stated_recompute(words_of(engine.megatron_args))

    def overlaps(self, training: Training) -> tuple[tuple[str, ...], dict[str, Any]]:
        arguments: list[str] = []
        changed = {}
        if training.data_ranks > 1 and not training.dp_overlap:
            arguments.append("--overlap-grad-reduce")
        waits = training.gathers_wait or not training.dp_overlap
        if training.data_ranks > 1 and training.sharded_optimizer and waits:
            arguments.append("--overlap-param-gather")
        if arguments:
            changed = {"dp_overlap": True, "gathers_wait": False}
        if training.tp > 1 and training.sequence_parallel and not training.tp_overlap:
            arguments.append("--tp-comm-overlap")
            changed["tp_overlap"] = True
        pairs = training.micro_batches > 1 and not recomputation(training.recompute).repeats("moe")
        broken = broken_by_overlap(training.layout, training.vp > 1, training.dispatcher, training.dtype)
        if pairs and not broken and not training.ep_overlap:
            arguments.append(OVERLAP)
            changed["ep_overlap"] = True
        return tuple(arguments), changed

    def with_chunks(self, engine: Engine, training: Training) -> Engine:
        """Megatron-LM's own arguments, with the training's chunks instead of earlier ones."""
        arguments = engine.megatron_args
        others = [
            argument
            for before, argument in zip(("", *arguments), arguments, strict=False)
            if INTERLEAVED not in (before, argument.partition("=")[0])
        ]
        if training.vp > 1:
            places = training.shape.layers + 2 * splits_edges(training.shape.layers, training.pp)
            others += [INTERLEAVED, str(places // (training.pp * training.vp))]
        return replace(engine, megatron_args=tuple(others))

    def has_optimizer(self, optimizer: OptimizerFacts) -> bool:
        return optimizer.megatron_options(Train()) is not None

    def rule(self, training: Training) -> str:
        return "fp32" if training.dtype == "fp32" else "megatron"

    def state_bytes(self, training: Training) -> StateBytes:
        return plain_states(training) if training.dtype == "fp32" else one_gradient_buffer(training)

    def logit_bytes(self, training: Training) -> float:
        """2 + 4 + 4 for the logits in 16 bits, in fp32, and the softmax
        (Megatron-Core, vocab_parallel_cross_entropy)."""
        if training.fused_loss in LOGIT_BYTES:
            return LOGIT_BYTES[training.fused_loss]
        if training.dtype == "fp32":
            return 16.0
        return LOGIT_IN_PLACE if training.shape.is_mixture else 10.0

    def reduced_bytes(self, training: Training) -> float:
        # Sums of bf16 are fp32 by accumulate_allreduce_grads_in_fp32; else they have the weights' dtype.
        summed = training.grad_sum or ("fp16" if training.dtype == "fp16" else "fp32")
        return 4.0 if summed == "fp32" else 2.0

    def engine_with_deepspeed(self, has_stages: bool) -> str | None:
        return "deepspeed-3d" if has_stages else "deepspeed-zero"


ENGINE = MegatronLm()


def one_gradient_buffer(training: Training) -> StateBytes:
    """States with one fp32 gradient buffer, 2 + 4 + 12; with the distributed optimizer 6 + 12/dp (Megatron-LM, docs of
    dist_optimizer)."""
    held = 4 + training.moments
    return StateBytes(2, 4, held / training.data_ranks if training.sharded_optimizer else held, 4, 0)
