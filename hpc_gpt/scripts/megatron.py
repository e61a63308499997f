"""The arguments of Megatron-LM's pretrain_gpt.py as an experiment of engine `megatron-lm`.

The reverse of `engines.megatron_lm.megatron_arguments`. What an experiment has no key for is passed on in
`engine.megatron_args`; what the engine decides for itself is named, with the value that it has there. A training that
the engine would compute otherwise in its mathematics (another decay, experts, a blend of data) is refused with
`NotExpressible`, and stays a command.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_gpt.engines.megatron_lm import names_of
from hpc_gpt.scripts.notes import Notes
from hpc_gpt.scripts.pieces import Argument, known, quote
from hpc_gpt.secrets import is_secret
from hpc_gpt.settings.presets import PRESETS

# Megatron-LM's defaults (megatron/training/arguments.py, main of 2026) where ours differ or none is.
_DEFAULTS = {
    "--weight-decay": "0.01", "--adam-beta1": "0.9", "--adam-beta2": "0.999", "--adam-eps": "1e-8",
    "--clip-grad": "1.0", "--seed": "1234", "--log-interval": "100", "--eval-interval": "1000", "--eval-iters": "100",
    "--min-lr": "0.0", "--split": "969,30,1",
}  # fmt: skip
# {option: (table.key, type)}
_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--num-layers": ("model.layers", int),
    "--hidden-size": ("model.hidden", int),
    "--num-attention-heads": ("model.heads", int),
    "--seq-length": ("model.seq", int),
    "--ffn-hidden-size": ("model.ffn", int),
    "--num-query-groups": ("model.kv_heads", int),
    "--kv-channels": ("model.head_dim", int),
    "--norm-epsilon": ("model.norm_eps", float),
    "--layernorm-epsilon": ("model.norm_eps", float),
    "--rotary-base": ("model.rope_theta", float),
    "--tensor-model-parallel-size": ("layout.tp", int),
    "--pipeline-model-parallel-size": ("layout.pp", int),
    "--micro-batch-size": ("layout.micro_batch", int),
    "--global-batch-size": ("layout.global_batch", int),
    "--train-iters": ("train.steps", int),
    "--lr": ("train.lr", float),
    "--min-lr": ("train.min_lr", float),
    "--lr-warmup-iters": ("train.warmup_steps", int),
    "--weight-decay": ("train.weight_decay", float),
    "--adam-beta1": ("train.beta1", float),
    "--adam-beta2": ("train.beta2", float),
    "--adam-eps": ("train.eps", float),
    "--clip-grad": ("train.clip", float),
    "--seed": ("train.seed", int),
    "--log-interval": ("train.log_every", int),
    "--eval-interval": ("train.eval_every", int),
    "--eval-iters": ("train.eval_batches", int),
    "--save-interval": ("train.save_every", int),
    "--exit-duration-in-mins": ("train.minutes", float),
}
_FLAGS: dict[str, tuple[str, Any]] = {
    "--bf16": ("train.dtype", "bf16"),
    "--fp16": ("train.dtype", "fp16"),
    "--deterministic-mode": ("train.deterministic", True),
    "--swiglu": ("model.mlp", "swiglu"),
    "--qk-layernorm": ("model.qk_norm", True),
    "--untie-embeddings-and-output-weights": ("model.tied", False),
    "--use-rotary-position-embeddings": ("model.positions", "rope"),
    "--sequence-parallel": ("engine.sequence_parallel", True),
    "--use-distributed-optimizer": ("engine.sharded_optimizer", True),
    "--recompute-activations": ("engine.recompute", "selective"),
    "--checkpoint-activations": ("engine.recompute", "full"),
}
# {option: what the engine does in its place}.
_OWN = {
    "--save": "the run's own checkpoints/",
    "--load": "the run's own checkpoints/: a run begins from none, and resumes from its newest",
    "--exit-signal-handler": "the engine adds it",
    "--distributed-backend": "nccl is the default",
    "--make-vocab-size-divisible-by": "it follows from model.vocab_multiple",
    "--group-query-attention": "it follows from model.kv_heads",
    "--no-position-embedding": "it follows from model.positions",
    "--mock-data": "it follows from data.source",
}
# {option: (what the engine passes, Megatron-LM's own default)}: it changes the training's numbers.
_FIXED = {
    "--attention-dropout": ("0.0", "0.1"),
    "--hidden-dropout": ("0.0", "0.1"),
    "--init-method-std": ("0.02", "0.02"),
}
_TOKENIZER = ("--vocab-file", "--merge-file", "--tokenizer-model", "--tokenizer-type", "--vocab-size")
_OTHER_TRAINING = {
    "--num-experts": "mixtures of experts",
    "--expert-model-parallel-size": "expert parallelism",
    "--multi-latent-attention": "latent attention",
    "--spec": "a layer specification of its own",
    "--yaml-cfg": "a YAML file of settings",
    "--use-checkpoint-args": "arguments from a checkpoint",
    "--train-data-path": "data by split",
    "--per-split-data-args-path": "data by split",
    "--data-args-path": "a file of data paths",
    "--squared-relu": "a squared ReLU",
    "--rampup-batch-size": "a batch that grows",
    "--deepspeed": "DeepSpeed's fork",
    "--override-opt_param-scheduler": "a schedule from a checkpoint",
}
_SCALE = ("--initial-loss-scale", "--loss-scale-window", "--hysteresis", "--loss-scale")
_GPT2_VOCAB = 50257


class NotExpressible(ValueError):
    """Why a command line of Megatron-LM is no experiment of engine `megatron-lm`."""


@dataclass(frozen=True)
class OptionNotes:
    """Notes on options, each at the place where the script has it."""

    notes: Notes
    place_of: Callable[[str], str]

    def take(self, text: str, means: str) -> None:
        self.notes.take(self.place_of(text.split()[0]), text, means)

    def does(self, text: str, means: str) -> None:
        self.notes.does(self.place_of(text.split()[0]), text, means)

    def leave(self, text: str, means: str) -> None:
        self.notes.leave(self.place_of(text.split()[0]), text, means)


@dataclass
class MegatronRun:
    """The tables of an experiment by dotted key, and the place of each that the script gives."""

    keys: dict[str, Any] = field(default_factory=dict)
    defaults: list[str] = field(default_factory=list)


def read_arguments(
    arguments: Sequence[Argument], gpus: int, notes: OptionNotes, path_of: Callable[[str], str]
) -> MegatronRun:
    """The experiment of a command line on `gpus` GPUs. `path_of` makes a path of data absolute.

    Raises NotExpressible if the engine would train otherwise.
    """
    options = _options(arguments)
    for option, what in _OTHER_TRAINING.items():
        if option in options and options[option] not in (["1"], ["0"]):
            raise NotExpressible(f"{option}: {what}")
    found = MegatronRun()
    _plain_keys(found, options, notes)
    _model(found, options)
    _batch(found, options, gpus)
    _schedule(found, options, notes)
    _data(found, options, notes, path_of)
    _recompute(found, options, notes)
    _fixed(options, notes)
    found.keys["engine.megatron_args"] = _rest(options, notes, found)
    return found


def _options(arguments: Sequence[Argument]) -> dict[str, list[str | None]]:
    """{option: its values}, None for one that only the job knows."""
    found: dict[str, list[str | None]] = {}
    name = ""
    for argument in arguments:
        text = known(argument)
        if text is not None and text.startswith("--"):
            name, equals, value = text.partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(text)
        else:
            raise NotExpressible(f"{quote(argument)} before any option")
    return found


def _one(options: Mapping[str, list[str | None]], option: str) -> str | None:
    """The value of an option, None if it is not given. NotExpressible if only the job knows it."""
    if option not in options:
        return None
    values = options[option]
    if len(values) != 1 or values[0] is None:
        raise NotExpressible(f"{option} has no value that is known before the job")
    return values[0]


def _plain_keys(found: MegatronRun, options: dict[str, list[str | None]], notes: OptionNotes) -> None:
    for option, (key, kind) in _KEYS.items():
        value = _one(options, option)
        if value is None:
            if option in _DEFAULTS:
                found.keys[key] = kind(_DEFAULTS[option])
                found.defaults.append(key)
            continue
        try:
            found.keys[key] = kind(value)
        except ValueError:
            raise NotExpressible(f"{option} {value} is no number") from None
        notes.take(f"{option} {value}", key)
    for option, (key, value) in _FLAGS.items():
        if option in options:
            found.keys[key] = value
            notes.take(option, f"{key} = {str(value).lower()}")
    found.keys.setdefault("train.dtype", "fp32")
    for key in ("layers", "hidden", "heads", "seq"):
        if f"model.{key}" not in found.keys:
            raise NotExpressible(f"no --{ {'layers': 'num-layers', 'hidden': 'hidden-size'}.get(key, key) } is given")


def _model(found: MegatronRun, options: dict[str, list[str | None]]) -> None:
    keys = found.keys
    positions = _one(options, "--position-embedding-type") or "learned_absolute"
    if positions == "rope":
        keys["model.positions"] = "rope"
    elif positions != "learned_absolute":
        raise NotExpressible(f"--position-embedding-type {positions}")
    norm = _one(options, "--normalization")
    if norm == "RMSNorm":
        keys["model.norm"] = "rmsnorm"
    elif norm not in (None, "LayerNorm"):
        raise NotExpressible(f"--normalization {norm}")
    if "--disable-bias-linear" in options:
        keys["model.bias"] = "qkv" if "--add-qkv-bias" in options else "none"
    if keys.get("model.mlp") == "swiglu" and "model.ffn" not in keys:
        keys["model.ffn"] = int(4 * keys["model.hidden"] * 2 / 3 / 64) * 64
    if keys.get("model.head_dim", 0) * keys["model.heads"] == keys["model.hidden"]:
        del keys["model.head_dim"]
    if "--group-query-attention" not in options:
        keys.pop("model.kv_heads", None)
    keys.setdefault("model.tied", True)
    scaling = _one(options, "--rope-scaling-factor")
    if "--use-rope-scaling" in options:
        keys["model.rope_scaling"] = {
            "kind": "llama3", "factor": float(scaling or 8), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    keys["model.vocab"] = _vocab(options)
    multiple = int(_one(options, "--make-vocab-size-divisible-by") or 128)
    keys["model.vocab_multiple"] = multiple * keys.get("layout.tp", 1)


def _vocab(options: dict[str, list[str | None]]) -> int:
    """The vocabulary: as given, GPT-2's, or that of a published model whose name the tokenizer has."""
    kind, size = _one(options, "--tokenizer-type"), _one(options, "--vocab-size")
    if size is not None and size.isdigit():
        return int(size) + (kind == "NullTokenizer")
    if kind in (None, "GPT2BPETokenizer"):
        return _GPT2_VOCAB
    model = re.sub(r"[^a-z0-9]+", "", (_one(options, "--tokenizer-model") or "").lower())
    for name, shape in PRESETS.items():
        if len(name) > 6 and re.sub(r"[^a-z0-9]+", "", name) in model:
            return shape.vocab
    raise NotExpressible(f"--tokenizer-type {kind}: the script does not say how many tokens its vocabulary has")


def _batch(found: MegatronRun, options: dict[str, list[str | None]], gpus: int) -> None:
    keys = found.keys
    split = keys.setdefault("layout.tp", 1) * keys.setdefault("layout.pp", 1)
    context = _one(options, "--context-parallel-size")
    if context not in (None, "1"):
        raise NotExpressible(f"--context-parallel-size {context}")
    if "layout.micro_batch" not in keys:
        raise NotExpressible("no --micro-batch-size is given")
    if gpus % split == 0:
        keys.setdefault("layout.global_batch", keys["layout.micro_batch"] * (gpus // split))


def _schedule(found: MegatronRun, options: dict[str, list[str | None]], notes: OptionNotes) -> None:
    keys = found.keys
    decay = _one(options, "--lr-decay-style") or "linear"
    if decay not in ("cosine", "constant"):
        raise NotExpressible(f"--lr-decay-style {decay}" + ("" if "--lr-decay-style" in options else ", the default"))
    keys["train.decay"] = decay
    optimizer = _one(options, "--optimizer") or "adam"
    if optimizer != "adam":
        raise NotExpressible(f"--optimizer {optimizer}")
    batch = keys.get("layout.global_batch")
    for option, key in (("--train-samples", "train.steps"), ("--lr-warmup-samples", "train.warmup_steps")):
        value = _one(options, option)
        if value is not None and value.isdigit() and batch:
            keys[key] = int(value) // batch
            notes.take(f"{option} {value}", f"{key} = {keys[key]}, at {batch} samples a step")
    if "train.steps" not in keys:
        raise NotExpressible("neither --train-iters nor --train-samples is given")
    fraction = _one(options, "--lr-warmup-fraction")
    end, samples = _one(options, "--lr-decay-iters"), _one(options, "--lr-decay-samples")
    steps = int(end) if end and end.isdigit() else None
    if samples and samples.isdigit() and batch:
        steps = int(samples) // batch
    if fraction is not None:
        keys["train.warmup_steps"] = int(float(fraction) * (steps or keys["train.steps"]))
        notes.take(f"--lr-warmup-fraction {fraction}", f"train.warmup_steps = {keys['train.warmup_steps']}")
    if steps is not None:
        words = f"the engine decays over all {keys['train.steps']} steps"
        option = f"--lr-decay-iters {end}" if end is not None else f"--lr-decay-samples {samples}"
        note = notes.does if steps == keys["train.steps"] or decay == "constant" else notes.leave
        note(option, words)
    if keys["train.eval_batches"] == 0:
        keys["train.eval_every"] = 0
        del keys["train.eval_batches"]


def _data(
    found: MegatronRun,
    options: dict[str, list[str | None]],
    notes: OptionNotes,
    path_of: Callable[[str], str],
) -> None:
    keys = found.keys
    paths = options.get("--data-path", [])
    if "--mock-data" in options:
        keys["data.source"] = "random"
    elif not paths:
        raise NotExpressible("no --data-path is given")
    elif None in paths:
        raise NotExpressible("--data-path is known to the job alone")
    elif len(paths) > 1 and not (len(paths) == 2 and _is_number(paths[0])):
        raise NotExpressible(f"--data-path is a blend of {len(paths) // 2} data sets")
    else:
        keys["data.source"], keys["data.path"] = "megatron", path_of(str(paths[-1]))
        notes.take(f"--data-path {paths[-1]}", "data.path")
    given = _one(options, "--split") or _DEFAULTS["--split"]
    shares = [float(share) for share in re.split(r"[,/]", given) if _is_number(share)]
    total = math.fsum(shares)
    keys["data.eval_fraction"] = round(shares[1] / total, 3) if len(shares) > 1 and total else 0.0
    notes.take(f"--split {given}", f"data.eval_fraction = {keys['data.eval_fraction']:g}")
    if len(shares) > 2 and shares[2]:
        notes.leave(f"--split {given}", "the share of a test set is trained on: there is none")
    for option in _TOKENIZER:
        if option in options:
            value = _one(options, option)
            words = f"the data are tokens already: model.vocab = {keys['model.vocab']} is all that is needed"
            notes.does(f"{option} {value}", words)


def _is_number(text: str | None) -> bool:
    try:
        return text is not None and math.isfinite(float(text))
    except ValueError:
        return False


def _recompute(found: MegatronRun, options: dict[str, list[str | None]], notes: OptionNotes) -> None:
    granularity = _one(options, "--recompute-granularity")
    if granularity is None:
        return
    if granularity not in ("full", "selective"):
        raise NotExpressible(f"--recompute-granularity {granularity}")
    found.keys["engine.recompute"] = granularity
    notes.take(f"--recompute-granularity {granularity}", "engine.recompute")
    for option, ours in (("--recompute-method", "uniform"), ("--recompute-num-layers", "1")):
        given = _one(options, option)
        if given is not None and given != ours:
            notes.leave(f"{option} {given}", "the engine recomputes every layer by itself")


def _fixed(options: dict[str, list[str | None]], notes: OptionNotes) -> None:
    for option, (ours, default) in _FIXED.items():
        given = _one(options, option)
        value = given if given is not None else default
        if _is_number(value) and float(value) != float(ours):
            of = "" if given is not None else " (the default)"
            notes.leave(f"{option} {value}{of}", f"the engine trains with {ours}")
    if _one(options, "--seq-length") != (_one(options, "--max-position-embeddings") or _one(options, "--seq-length")):
        words = "the engine has as many positions as --seq-length"
        notes.leave(f"--max-position-embeddings {_one(options, '--max-position-embeddings')}", words)


def _rest(options: dict[str, list[str | None]], notes: OptionNotes, found: MegatronRun) -> list[str]:
    """The options that are passed on as they are."""
    read = {*_KEYS, *_FLAGS, *_FIXED, *_TOKENIZER, *_OTHER_TRAINING, "--position-embedding-type", "--normalization",
            "--disable-bias-linear", "--add-qkv-bias", "--use-rope-scaling", "--rope-scaling-factor",
            "--context-parallel-size", "--lr-decay-style", "--optimizer", "--train-samples", "--lr-warmup-samples",
            "--lr-warmup-fraction", "--lr-decay-iters", "--lr-decay-samples", "--data-path", "--split",
            "--recompute-granularity", "--recompute-method", "--recompute-num-layers",
            "--max-position-embeddings"}  # fmt: skip
    if found.keys["train.dtype"] == "fp16":
        for option in _SCALE:
            if option in options:
                notes.leave(f"{option} {_one(options, option)}", "the engine scales the loss from 65536")
        read.update(_SCALE)
    passed: list[str] = []
    for option in names_of([option for option in options if option not in read]):
        values = options[option]
        if option in _OWN:
            notes.does(" ".join([option, *map(str, values)]), _OWN[option])
        elif None in values:
            notes.leave(f"{option} …", "only the job knows its value, and engine.megatron_args are fixed texts")
        elif is_secret(option.lstrip("-")) and values:
            notes.leave(f"{option} …", "a secret is never copied")
        else:
            passed += [option, *map(str, values)]
            notes.take(" ".join([option, *map(str, values)]), "engine.megatron_args")
    return passed
