"""Megatron-LM: the arguments of its pretrain_gpt.py for a run, the data it can read, and the iteration line it prints.

Source of the options: megatron/training/arguments.py and megatron/training/config/ of NVIDIA/Megatron-LM (main of
August 2026), megatron/arguments.py before March 2024. Those used here have had these names since 2023.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_gpt.errors import ConfigError, LayoutError
from hpc_gpt.settings.experiment import Data, Train
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape

if TYPE_CHECKING:
    from hpc_gpt.settings.resolve import Resolved

NAME = "megatron-lm"


def megatron_data(data: Data) -> Data:
    """`[data]` for this engine: Megatron's own token files, by default of the standard library, or mock data."""
    if data.source in ("megatron", "random"):
        return data
    if data.source == "stdlib":
        return replace(data, source="megatron", path="stdlib")
    raise ConfigError(
        f"data.source is {data.source}, but Megatron-LM reads only its own token files",
        'set data.source = "megatron" and data.path to the path before .bin and .idx, or data.path = "stdlib"',
    )


def check_run(layout: Layout, shape: ModelShape, train: Train) -> None:
    """Refuse now what Megatron-LM would refuse after hours in the queue. Raises LayoutError, ConfigError."""
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
    if not train.save_last:
        raise ConfigError("train.save_last is false, but Megatron-LM saves whenever it ends", "leave it out")
    if train.matmul_rate:
        raise ConfigError(
            "train.matmul_rate is true, but Megatron-LM's processes run none of our code",
            "leave it out",
        )
    if train.until_loss is not None:
        raise ConfigError(
            f"train.until_loss is {train.until_loss:g}, but Megatron-LM stops at a step, not at a loss",
            "leave it out, and set train.steps",
        )


def megatron_arguments(resolved: Resolved, checkpoints: str, data_prefix: str | None) -> list[str]:
    """The arguments of pretrain_gpt.py. `checkpoints` is the folder that it saves in and resumes from; `data_prefix` is
    the path before .bin and .idx, None for mock data.

    The embedding gets as many rows as in our engines. NullTokenizer's `--vocab-size` does not count the end-of-document
    token in versions before 2026, and counts it since then; one less than our vocabulary gives these rows in both.
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
        "--save-interval": train.save_every or train.steps,  # --save requires it; the last step is always saved
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
        # The loss scale of our own engines (ds_config).
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
        # After SIGTERM all ranks save and end together after the current iteration.
        "--exit-signal-handler": True,
    }
    words = [word for name, value in arguments.items() for word in (name, str(value))]
    words += [name for name, wanted in flags.items() if wanted]
    return [*words, *engine.megatron_args]


def names_of(arguments: Sequence[str]) -> list[str]:
    """The names of the options in a command line."""
    return [word.split("=")[0] for word in arguments if word.startswith("--")]


def check_own_arguments(resolved: Resolved) -> None:
    """ConfigError if engine.megatron_args has an option that follows from other keys of the experiment."""
    own = resolved.engine.megatron_args
    words = megatron_arguments(resolved, "checkpoints", "prefix")
    twice = sorted(set(names_of(words[: len(words) - len(own)])).intersection(names_of(own)))
    if twice:
        raise ConfigError(
            f"engine.megatron_args holds {', '.join(twice)}, which follows from the experiment's other keys",
            "set those keys (hpc-gpt help keys), so that the record says what ran",
        )


def _split(eval_fraction: float) -> str:
    """The shares of training, validation and test, in thousandths.

    >>> _split(0.05)
    '950,50,0'
    """
    evaluation = round(1000 * eval_fraction)
    return f"{1000 - evaluation},{evaluation},0"


# --- the iteration line, in every form since 2020

HEAD = r"\biteration {1,20}(?P<step>\d{1,12}) ?/ {0,20}(?P<steps_planned>\d{1,12}) {0,4}\|"
# {key between the bars after the head: the field that it gives (readers/pattern.py)}. `lm loss` is missing if every
# iteration since the last line was skipped. `(s)` is BigScience's; the other throughputs, which are all of one GPU, are
# of forks too.
KEYS = {
    "consumed samples": "consumed_samples",
    "consumed tokens": "consumed_tokens",
    "elapsed time per iteration (ms)": "step_ms",
    "elapsed time per iteration (s)": "step_s",
    "elapsed time per iteration (sec)": "step_s",
    "learning rate": "lr",
    "global batch size": "global_batch",
    "lm loss": "loss",
    "lm-loss": "loss",
    "lm_loss": "loss",
    "loss": "loss",
    "loss scale": "loss_scale",
    "grad norm": "grad_norm",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
    "samples per second": "samples_per_s",
    "samples/sec": "samples_per_s",
    "tokens per second": "tokens_per_s",
    "tokens per gpu per second (tgs)": "tokens_per_s_gpu",
    "tokens per GPU per second": "tokens_per_s_gpu",
    "tokens per GPU (tokens/s/GPU)": "tokens_per_s_gpu",
    "tokens/s/GPU": "tokens_per_s_gpu",
    "tokens/sec/gpu": "tokens_per_s_gpu",
    "tokens-per-second-per-gpu": "tokens_per_s_gpu",
    "tokens/s/GPU inst/harmonic mean": "tokens_per_s_gpu",
    "TFLOPs": "tflops",
    "TFLOPS": "tflops",
    "throughput per GPU (TFLOP/s/GPU)": "tflops",
    "compute per GPU (TFLOP/s/GPU)": "tflops",
    "throughput (TFLOP/s/GPU)": "tflops",
    "model TFLOP/s/GPU": "tflops",
    "MFU": "mfu_percent",
    "mfu": "mfu_percent",
}
_HEAD = re.compile(HEAD)


@dataclass(frozen=True)
class IterationLine:
    """The figures of one line. Time and loss are means, `skipped` and `nan` counts, over the iterations since the last
    line. None if the line lacks a figure: the loss if every iteration was skipped, the batch in v1.1.5."""

    iteration: int
    iterations: int
    step_s: float
    lr: float | None
    loss: float | None
    grad_norm: float | None
    global_batch: int | None
    consumed_samples: int | None
    skipped: int
    nan: int


def read_iteration(line: str) -> IterationLine | None:
    """The figures of an iteration line, whatever is before it; None for any other line, or one that is cut off.

    >>> read_iteration(" iteration 30/ 1000 | elapsed time per iteration (ms): 2767.3 | lm loss: 3.2E+00 |").step_s
    2.7673
    >>> read_iteration(" iteration 30/ 1000 | elapsed time per iter") is None
    True
    """
    head = _HEAD.search(line)
    if head is None:
        return None
    found: dict[str, float] = {}
    # Without a closing bar the last piece may be cut off.
    for piece in line[head.end() :].split("|")[:-1]:
        key, _, text = piece.partition(":")
        name = KEYS.get(key.strip())
        if name is not None:
            with contextlib.suppress(ValueError):
                found.setdefault(name, float(text))
    step_s = found.get("step_s", found["step_ms"] / 1000 if "step_ms" in found else None)
    if step_s is None:
        return None

    def count(name: str) -> int | None:
        value = found.get(name)
        return int(value) if value is not None and math.isfinite(value) else None

    return IterationLine(
        iteration=int(head["step"]),
        iterations=int(head["steps_planned"]),
        step_s=step_s,
        lr=found.get("lr"),
        loss=found.get("loss"),
        grad_norm=found.get("grad_norm"),
        global_batch=count("global_batch"),
        consumed_samples=count("consumed_samples"),
        skipped=count("skipped") or 0,
        nan=count("nan") or 0,
    )
