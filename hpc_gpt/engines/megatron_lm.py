"""Megatron-LM: its rules, the arguments of its pretrain_gpt.py for a run, and the checkout that the run uses.

Source of the options: megatron/training/arguments.py and megatron/training/config/ of NVIDIA/Megatron-LM (main of
August 2026), megatron/arguments.py before March 2024. Those used here have had these names since 2023.

A checkout's parser is read, never run: importing it would take a GPU build of torch and minutes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_gpt.engines.base.facts import EngineFacts
from hpc_gpt.engines.base.training import StateBytes, Training, plain_states
from hpc_gpt.errors import ConfigError, LayoutError, raise_faults
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Data, Engine, RopeScaling, Train
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.settings.resolved import Resolved

VARIABLE, PROGRAM = "MEGATRON_LM", "pretrain_gpt.py"
# The parser since March 2024, and before.
_PARSERS = ("megatron/training/arguments.py", "megatron/arguments.py")
_OPTION = re.compile(r"""["'](--\w[\w-]*)["']""")
_FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)
_INTERLEAVED = "--num-layers-per-virtual-pipeline-stage"


class MegatronLm(EngineFacts):
    order, plan_order = 60, 50
    trains_our_model = False
    is_program = True
    axes = frozenset({"tp", "pp"})
    no_save = "Megatron-LM saves as often as train.save_every says, and when it ends: stop or requeue it"
    least_steps_after_warmup = 1
    fixed_train = {"save_last": True, "matmul_rate": False}
    counts_evaluation = False
    switches = frozenset({"recompute", "sequence_parallel", "sharded_optimizer", "megatron_args"})
    alternatives = {"zero_stage": "engine.sharded_optimizer = true is Megatron's distributed optimizer"}
    compiles_edges = False
    has_dropout = True
    has_fused_kernels = True
    has_fused_gate = True
    scatters_outputs = True  # each rank sends its part and gathers them inside the node (Narayanan et al. 2021, 4.1)
    has_chunks = True
    saves_weights_again = True

    def data_of(self, data: Data) -> Data:
        """Megatron's own token files, by default of the standard library, or mock data."""
        if data.source in ("megatron", "random"):
            return data
        if data.source == "stdlib":
            return replace(data, source="megatron", path="stdlib")
        raise ConfigError(
            f"data.source is {data.source}, but Megatron-LM reads only its own token files",
            'set data.source = "megatron" and data.path to the path before .bin and .idx, or data.path = "stdlib"',
        )

    def shape_fault(self, shape: ModelShape) -> str | None:
        """Its options have the other figures of Llama 3.1's rotation fixed, and a whole number as its base
        (megatron/core/models/common/embeddings/rotary_pos_embedding.py)."""
        if shape.embedding_norm:
            return "it has a norm after the embedding"
        if shape.rope_theta != int(shape.rope_theta):
            return f"model.rope_theta is {shape.rope_theta:g}, and --rotary-base takes a whole number"
        scaling = shape.rope_scaling
        if scaling is not None and replace(scaling, factor=8.0) != RopeScaling("llama3", 8.0, 1.0, 4.0, 8192):
            return "it scales a rotation by low 1, high 4 and 8192 positions alone"
        return None

    def check_run(self, layout: Layout, shape: ModelShape, train: Train) -> None:
        if layout.tp > shape.key_heads:
            raise LayoutError(
                f"tp {layout.tp} is more than the {shape.key_heads} kv_heads, which Megatron-LM does not divide",
                f"use --tp {shape.key_heads} or less, or engine deepspeed-3d",
            )
        if shape.layers % layout.pp:
            raise LayoutError(
                f"pp {layout.pp} does not divide the {shape.layers} layers: Megatron-LM needs stages of equal depth",
                f"use --pp {max(pp for pp in range(1, layout.pp) if shape.layers % pp == 0)}, or "
                f"model.layers = {-(-shape.layers // layout.pp) * layout.pp}",
            )
        if train.warmup_steps >= train.steps:
            raise ConfigError(
                f"train.warmup_steps is {train.warmup_steps} of {train.steps} steps, but Megatron-LM needs fewer",
                f"use train.warmup_steps = {train.steps - 1} or less",
            )
        for key, given, why in (
            ("save_last", not train.save_last and "false", "saves whenever it ends"),
            ("matmul_rate", train.matmul_rate and "true", "runs none of our code"),
            ("until_loss", train.until_loss is not None and f"{train.until_loss:g}", "stops at a step, not at a loss"),
        ):
            if given:
                raise ConfigError(f"train.{key} is {given}, but Megatron-LM {why}", "leave it out")

    def check_resolved(self, resolved: Resolved) -> None:
        """ConfigError if engine.megatron_args has an option that follows from other keys of the experiment."""
        own = resolved.engine.megatron_args
        words = megatron_arguments(resolved, "checkpoints", "prefix")
        twice = sorted(set(option_names(words[: len(words) - len(own)])).intersection(option_names(own)))
        if twice:
            raise ConfigError(
                f"engine.megatron_args holds {', '.join(twice)}, which follows from the experiment's other keys",
                "set those keys (hpc-gpt help keys), so that the record says what ran",
            )

    def check_program(self, resolved: Resolved, environment: Mapping[str, str]) -> None:
        """ConfigError unless the run's folder is a checkout whose parser knows every option of the run.

        A checkout in a container's image cannot be read from outside and is not checked.
        """
        checkout = checkout_of(resolved, environment)
        if resolved.cluster.container is None:
            check_checkout(checkout, option_names(megatron_arguments(resolved, "checkpoints", "prefix")))

    # --- as the planner sees it

    def is_searched(self, profile: ClusterProfile | None) -> bool:
        """It needs a checkout."""
        return profile is not None and profile.megatron_lm is not None

    def keeps_scores(self, engine: Engine, device: str | None) -> bool:
        """Its kernels that keep none need an Ampere or newer device."""
        return (device or "").startswith("v100")

    def chunks(self, engine: Engine, layers: int, pp: int) -> int:
        """By its own arguments."""
        arguments = [part for argument in engine.megatron_args for part in argument.split("=", 1)]
        if _INTERLEAVED not in arguments[:-1]:
            return 1
        deep = arguments[arguments.index(_INTERLEAVED) + 1]
        return max(1, layers // (pp * int(deep))) if deep.isdigit() and int(deep) else 1

    def with_chunks(self, engine: Engine, training: Training) -> Engine:
        """Its own arguments with the training's chunks instead of any given before."""
        arguments = engine.megatron_args
        kept = [
            argument
            for before, argument in zip(("", *arguments), arguments, strict=False)
            if _INTERLEAVED not in (before, argument.partition("=")[0])
        ]
        if training.vp > 1:
            kept += [_INTERLEAVED, str(training.shape.layers // (training.pp * training.vp))]
        return replace(engine, megatron_args=tuple(kept))

    def rule(self, training: Training) -> str:
        return "fp32" if training.dtype == "fp32" else "megatron"

    def state_bytes(self, training: Training) -> StateBytes:
        return plain_states(training) if training.dtype == "fp32" else one_gradient_buffer(training)

    def logit_bytes(self, training: Training) -> float:
        """2 + 4 + 4 for 16 bits, fp32, softmax (planner README, closed form 4)."""
        if training.fused_loss:
            return 4.0
        return 16.0 if training.dtype == "fp32" else 10.0

    def reduced_bytes(self, training: Training) -> float:
        return 4.0 if training.dtype == "bf16" else 2.0

    def engine_with_deepspeed(self, has_stages: bool) -> str | None:
        return "deepspeed-3d" if has_stages else "deepspeed-zero"


ENGINE = MegatronLm()


def one_gradient_buffer(training: Training) -> StateBytes:
    """2 + 4 + 12, one fp32 gradient buffer; with the distributed optimizer 6 + 12/dp (Megatron-LM, docs of
    dist_optimizer)."""
    return StateBytes(2, 4, 12 / training.dp if training.sharded_optimizer else 12, 4, 0)


def megatron_arguments(resolved: Resolved, checkpoints: str, data_prefix: str | None) -> list[str]:
    """The arguments of pretrain_gpt.py. `checkpoints` is the folder that it saves in and resumes from; `data_prefix` is
    the path before .bin and .idx, None for mock data.

    The embedding gets as many rows as in our engines. NullTokenizer's `--vocab-size` does not count the end-of-document
    token in versions before 2026, and counts it since then; one less than our vocabulary gives these rows in both.
    """
    model, layout, batch, train, engine = (
        resolved.model, resolved.layout, resolved.batch, resolved.train, resolved.engine
    )  # fmt: skip
    evaluation = round(1000 * resolved.data.eval_fraction)
    # {option: its value; True for one without, None or False for none}
    arguments: dict[str, object] = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.mlp_width,
        "--num-attention-heads": model.heads,
        "--seq-length": model.seq,
        "--max-position-embeddings": model.seq,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--init-method-std": 0.02,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": model.vocab - 1,
        "--make-vocab-size-divisible-by": model.padded_vocab // layout.tp,
        "--micro-batch-size": batch.micro_batch,
        "--global-batch-size": batch.global_batch,
        "--train-iters": train.steps,
        "--seed": train.seed,
        "--clip-grad": train.clip,
        "--weight-decay": train.weight_decay,
        "--lr": train.lr,
        "--min-lr": train.min_lr,
        "--lr-decay-style": train.decay,
        "--lr-decay-iters": train.steps,
        "--lr-warmup-iters": train.warmup_steps,
        "--log-interval": train.log_every,
        "--eval-interval": train.eval_every or train.steps,
        "--eval-iters": train.eval_batches if train.eval_every else 0,
        "--save": checkpoints,
        "--load": checkpoints,
        "--save-interval": train.save_every or train.steps,  # --save requires it; the last step is always saved
        "--split": f"{1000 - evaluation},{evaluation},0",  # thousandths for training, validation and test
    }
    if not model.is_gpt2:
        norm = "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"
        arguments |= {"--kv-channels": model.head_width, "--normalization": norm, "--norm-epsilon": model.norm_eps}
    if model.is_grouped:
        arguments["--num-query-groups"] = model.key_heads
    if model.positions == "rope":
        arguments |= {"--position-embedding-type": "rope", "--rotary-base": int(model.rope_theta)}
    if model.rope_scaling is not None:
        arguments["--rope-scaling-factor"] = model.rope_scaling.factor
    arguments |= {"--no-rope-freq": model.nope_every, "--data-path": data_prefix, "--optimizer": train.optimizer}
    if train.optimizer == "sgd":
        arguments["--sgd-momentum"] = 0.0
    else:
        arguments |= {
            "--optimizer": "adam", "--adam-beta1": train.beta1, "--adam-beta2": train.beta2, "--adam-eps": train.eps
        }  # fmt: skip
    if train.dtype == "fp16":
        # The loss scale of our own engines (ds_config).
        arguments |= {"--initial-loss-scale": 65536, "--loss-scale-window": 1000, "--hysteresis": 2}
    if engine.recompute != "none":
        arguments["--recompute-granularity"] = engine.recompute
    if engine.recompute == "full":
        arguments |= {"--recompute-method": "uniform", "--recompute-num-layers": 1}
    arguments |= {
        "--fp16": train.dtype == "fp16",
        "--bf16": train.dtype == "bf16",
        "--untie-embeddings-and-output-weights": not model.tied,
        "--sequence-parallel": engine.sequence_parallel,
        "--use-distributed-optimizer": engine.sharded_optimizer,
        "--deterministic-mode": train.deterministic,
        "--mock-data": data_prefix is None,
        "--swiglu": model.is_gated,
        "--disable-bias-linear": model.bias != "all",
        "--add-qkv-bias": model.bias == "qkv",
        "--group-query-attention": model.is_grouped,
        "--qk-layernorm": model.qk_norm,
        "--use-rope-scaling": model.rope_scaling is not None,
        # After SIGTERM all ranks save and end together after the current iteration.
        "--exit-signal-handler": True,
    }
    words = []
    for name, value in arguments.items():
        if value is not None and value is not False:
            words += [name] if value is True else [name, str(value)]
    return [*words, *engine.megatron_args]


def option_names(arguments: Sequence[str]) -> list[str]:
    """The names of the options in a command line."""
    return [word.split("=")[0] for word in arguments if word.startswith("--")]


# --- the checkout


def checkout_of(resolved: Resolved, environment: Mapping[str, str]) -> Path:
    """The checkout that a run uses, as its job finds it: $MEGATRON_LM, else the cluster profile's megatron_lm.

    ConfigError if neither names one, or if its path is not absolute.
    """
    profile = resolved.cluster
    named = profile.environment.get(VARIABLE) or environment.get(VARIABLE) or profile.megatron_lm
    if not named:
        raise ConfigError(
            f"engine megatron-lm runs a checkout of Megatron-LM, but neither {VARIABLE} nor profile {profile.name} "
            "names one",
            f'export {VARIABLE}=/path/to/Megatron-LM, or megatron_lm = "/path/to/Megatron-LM" in the cluster profile',
        )
    checkout = Path(named).expanduser()
    if not checkout.is_absolute():
        raise ConfigError(
            f"the checkout of Megatron-LM is {named}, but a job starts in another folder", "give an absolute path"
        )
    return checkout


def check_checkout(checkout: Path, options: Collection[str] = ()) -> None:
    """ConfigError unless it is a checkout whose argument parser has the options; similar names are in the message."""
    parser = next((checkout / name for name in _PARSERS if (checkout / name).is_file()), checkout / _PARSERS[0])
    for needed in (checkout / PROGRAM, *([parser] if options else [])):
        if not needed.is_file():
            raise ConfigError(
                f"{checkout} is no Megatron-LM checkout: there is no {needed.relative_to(checkout)} in it",
                "git clone https://github.com/NVIDIA/Megatron-LM, and name that folder",
            )
    known = known_options(parser, checkout / "megatron") if options else set()
    faults = {}
    for option in options:
        # `name: bool = True` has the options --no-name and --disable-name.
        if option not in known and re.sub(r"^--(no|disable)-", "--", option) not in known:
            close = difflib.get_close_matches(option, sorted(known), n=2)
            message = f"{checkout} does not know {option}" + (f"; it has {' and '.join(close)}" if close else "")
            faults[message] = "use a checkout of 2023 or later: git -C … checkout core_v0.12.0"
    raise_faults(faults)


def known_options(parser: Path, package: Path) -> set[str]:
    """The options of a checkout's argument parser, read from its source.

    Some are written there, as "--name". Since 2025 others are the fields of dataclasses of the `package` that are
    passed to `ArgumentGroupFactory(Class, …)`; every field in the package counts as known.
    """
    source = parser.read_text(encoding="utf-8", errors="replace")
    options = set(_OPTION.findall(source))
    for path in package.rglob("*.py") if "ArgumentGroupFactory(" in source else ():
        text = path.read_text(encoding="utf-8", errors="replace")
        options |= {f"--{field.replace('_', '-')}" for field in _FIELD.findall(text)} | set(_OPTION.findall(text))
    return options
