"""A run in Megatron-LM's terms: the arguments of its pretrain_gpt.py, and the data it can read.

Source of the names: megatron/training/arguments.py and megatron/training/config/ of NVIDIA/Megatron-LM (main of August
2026), megatron/arguments.py before March 2024. Those taken here have gone by these names since 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_gpt.errors import ConfigError, LayoutError
from hpc_gpt.settings.experiment import Data, Train
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape

if TYPE_CHECKING:
    from hpc_gpt.settings.resolve import Resolved

NAME = "megatron-lm"


def megatron_data(data: Data) -> Data:
    """`[data]` as this engine reads it: Megatron's own token files, the standard library's by default, or mock data."""
    if data.source in ("megatron", "random"):
        return data
    if data.source == "stdlib":
        return replace(data, source="megatron", path="stdlib")
    raise ConfigError(
        f"data.source is {data.source}, but Megatron-LM reads its own token files alone",
        'set data.source = "megatron" and data.path to what stands before .bin and .idx, or data.path = "stdlib"',
    )


def check_run(layout: Layout, shape: ModelShape, train: Train) -> None:
    """Refuses what Megatron-LM would, hours later: stages of unequal depth, a warm-up that is the whole run."""
    if shape.layers % layout.pp:
        raise LayoutError(
            f"pp {layout.pp} does not divide the {shape.layers} layers: Megatron-LM wants stages of one depth",
            f"use --pp {max(pp for pp in range(1, layout.pp) if shape.layers % pp == 0)}, or "
            f"model.layers = {-(-shape.layers // layout.pp) * layout.pp}",
        )
    if train.warmup_steps >= train.steps:
        raise ConfigError(
            f"train.warmup_steps is {train.warmup_steps} of {train.steps} steps, but Megatron-LM wants fewer",
            f"use train.warmup_steps = {train.steps - 1} or less",
        )
    if not train.save_last:
        raise ConfigError("train.save_last is false, but Megatron-LM saves whenever it ends", "leave it out")
    if train.matmul_rate:
        raise ConfigError(
            "train.matmul_rate is true, but Megatron-LM's processes are its own, and nothing of ours runs in them",
            "leave it out",
        )
    if train.until_loss is not None:
        raise ConfigError(
            f"train.until_loss is {train.until_loss:g}, but Megatron-LM stops at a step, not at a loss",
            "leave it out, and set train.steps",
        )


def megatron_arguments(resolved: Resolved, checkpoints: str, data_prefix: str | None) -> list[str]:
    """The arguments of pretrain_gpt.py. `checkpoints` is the folder it saves in and resumes from, `data_prefix`
    the path before .bin and .idx; None for mock data.

    The vocabulary is padded to the rows our engines have. NullTokenizer's `--vocab-size` leaves out the end of
    document in versions before 2026 and counts it since; one less than ours is right for both, as the rows show.
    """
    model, layout, batch, train, engine = (
        resolved.model, resolved.layout, resolved.batch, resolved.train, resolved.engine
    )  # fmt: skip
    arguments: dict[str, object] = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": 4 * model.hidden,
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
        "--save-interval": train.save_every or train.steps,  # --save does not go without; the last one is always saved
        "--split": _split(resolved.data.eval_fraction),
    }
    if data_prefix is not None:
        arguments["--data-path"] = data_prefix
    if train.optimizer == "sgd":
        arguments |= {"--optimizer": "sgd", "--sgd-momentum": 0.0}
    else:
        betas = {"--adam-beta1": train.beta1, "--adam-beta2": train.beta2, "--adam-eps": train.eps}
        arguments |= {"--optimizer": "adam", **betas}
    if train.dtype == "fp16":
        # As our own engines scale (ds_config).
        arguments |= {"--initial-loss-scale": 65536, "--loss-scale-window": 1000, "--hysteresis": 2}
    if engine.recompute == "full":
        arguments |= {
            "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1
        }  # fmt: skip
    elif engine.recompute == "selective":
        arguments["--recompute-granularity"] = "selective"
    flags = {
        "--fp16": train.dtype == "fp16",
        "--bf16": train.dtype == "bf16",
        "--untie-embeddings-and-output-weights": not model.tied,
        "--sequence-parallel": engine.sequence_parallel,
        "--use-distributed-optimizer": engine.sharded_optimizer,
        "--deterministic-mode": train.deterministic,
        "--mock-data": data_prefix is None,
        # SIGTERM becomes a save and an end at the next iteration's edge, on all ranks together.
        "--exit-signal-handler": True,
    }
    words = [word for name, value in arguments.items() for word in (name, str(value))]
    words += [name for name, wanted in flags.items() if wanted]
    return [*words, *engine.megatron_args]


def names_of(arguments: Sequence[str]) -> list[str]:
    """The options among the words of a command line."""
    return [word.split("=")[0] for word in arguments if word.startswith("--")]


def check_own_words(resolved: Resolved) -> None:
    """ConfigError if engine.megatron_args holds an option that the experiment's other keys decide."""
    own = resolved.engine.megatron_args
    words = megatron_arguments(resolved, "checkpoints", "prefix")
    twice = sorted(set(names_of(words[: len(words) - len(own)])).intersection(names_of(own)))
    if twice:
        raise ConfigError(
            f"engine.megatron_args holds {', '.join(twice)}, which follows from the experiment's other keys",
            "set those keys (hpc-gpt help keys), so that the record says what ran",
        )


def _split(eval_fraction: float) -> str:
    """Shares of training, validation and test, in the thousand.

    >>> _split(0.05)
    '950,50,0'
    """
    evaluation = round(1000 * eval_fraction)
    return f"{1000 - evaluation},{evaluation},0"
