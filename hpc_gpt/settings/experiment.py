"""The tables of an experiment: what to train, and how. Each key has a default and a nature.

A key that is None is open: the cluster profile, a rule of `resolve`, or the plan gives it a value.
`experiment_file` reads these tables from TOML.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hpc_gpt.errors import ConfigError

Dtype = Literal["fp32", "bf16", "fp16"]
EngineName = Literal["deepspeed-3d", "deepspeed-zero", "fsdp", "ddp", "hf-deepspeed", "megatron-lm"]
Recompute = Literal["none", "selective", "full"]
Compile = Literal["none", "block", "edges", "whole"]
Partition = Literal["layers", "parameters"] | tuple[int, ...]
_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Nature:
    """What may be done with a key, and what depends on it.

    `resume`: whether a run that resumes from another run's checkpoint may change the key; "converted" if the engine
    converts its checkpoints accordingly (`runs.lineage.CONVERTIBLE`).
    `decides`: "speed" keys decide the weights or the time of a step; "schedule" keys do not change the time of a step;
    "nothing" keys are not in `config_hash`.
    `least`: the least value of a number, if nothing else is checked of it.
    `of_site`: the key belongs to one cluster, so a run that resumes on another one drops it.
    `unhashed`: values that are not part of `config_hash`. A key that is added later has its default here, so that runs
    made before keep their hash.
    """

    resume: Literal["never", "converted", "free"]
    decides: Literal["speed", "schedule", "nothing"]
    least: int | None = None
    of_site: bool = False
    unhashed: tuple[Any, ...] = ()


def key(
    default: Any,
    resume: Literal["never", "converted", "free"],
    decides: Literal["speed", "schedule", "nothing"],
    least: int | None = None,
    of_site: bool = False,
    added: bool = False,
) -> Any:
    """A key of a table: its default and its nature; `added` if there were runs before the key existed."""
    return field(default=default, metadata={"nature": Nature(resume, decides, least, of_site, (default,) * added)})


def natures(table: Any) -> dict[str, Nature]:
    """The nature of each key of a table, in the order of its fields."""
    return {entry.name: entry.metadata["nature"] for entry in fields(table)}


@dataclass(frozen=True)
class Model:
    """`[model]`: a preset by name, an explicit shape, or a preset with some sizes changed."""

    __pydantic_config__ = _STRICT

    preset: str | None = key(None, "never", "nothing")
    hidden: int | None = key(None, "never", "speed")
    layers: int | None = key(None, "never", "speed")
    heads: int | None = key(None, "never", "speed")
    vocab: int | None = key(None, "never", "speed")
    seq: int | None = key(None, "never", "speed")
    tied: bool | None = key(None, "never", "speed")
    vocab_multiple: int | None = key(None, "never", "speed")


@dataclass(frozen=True)
class Data:
    """`[data]`: where the tokens come from. The last `eval_fraction` of the tokens, or of a stream's files, is kept for
    evaluation.

    `tokens` is a token file, `megatron` a pair of Megatron's .bin and .idx. `stream` reads text, jsonl, gzip and zstd
    files, and `workers` processes a rank tokenise them as they are read. `path = "stdlib"` means for the last two the
    sources of the standard library, prepared if they are missing. A relative `path` in an experiment's file is looked
    for beside that file first, then in the current folder, then in the data folder. `tokenizer` is "byte", "char", a
    table FILE.vocab.json, a tokenizer.json, or "tiktoken:NAME"; a token file has its own. At a damaged file a stream
    stops the run, or skips the rest of the file and counts it.
    """

    __pydantic_config__ = _STRICT

    source: Literal["stdlib", "tokens", "random", "megatron", "stream"] = key("stdlib", "never", "speed")
    path: str | None = key(None, "never", "speed")
    eval_fraction: float = key(0.05, "never", "speed")
    tokenizer: str = key("byte", "never", "speed")
    workers: int = key(0, "free", "speed")
    on_bad_shard: Literal["stop", "skip"] = key("stop", "free", "speed")


@dataclass(frozen=True)
class Engine:
    """`[engine]`: the trainer of the steps and its switches; `settings.engines` says which engine takes which switch.

    `partition` divides the blocks among pipeline stages: evenly, by parameters, or as a list of blocks a stage.
    `offload_path` is a folder on NVMe to offload to, None the host's memory; `offload_ratio` is the share of the
    optimizer that is offloaded (ZeRO-3). `tiles` splits the outputs of every linear layer (ZeRO-3 gathers one tile at a
    time). `compile` compiles each block and the loss (block), also the embedding, the last norm and the head (edges),
    or the model as one (whole). Compiled, `keep_residuals` keeps the residual after attention instead of computing it
    again in the backward pass. `loss_chunks` computes the logits in pieces, and again in the backward pass;
    `one_pass_loss` computes the loss and its gradients together, each piece once; `fused_bias_gradients` computes the
    gradients of QKV and of GELU together with those of their biases. `sharded_optimizer` shards the moments over dp.
    `prefetch` gathers the next block's weights during the backward pass, `reshard` frees a block's weights after its
    forward pass. `megatron_args` are further arguments of pretrain_gpt.py.
    """

    __pydantic_config__ = _STRICT

    name: EngineName = key("deepspeed-3d", "converted", "speed")
    zero_stage: int | None = key(None, "converted", "speed")
    recompute: Recompute = key("none", "free", "speed")
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = key("auto", "free", "speed")
    compile: Compile = key("none", "free", "speed")
    compile_backend: Literal["inductor", "aot_eager"] = key("inductor", "free", "speed")
    keep_residuals: bool = key(False, "free", "speed", added=True)
    sequence_parallel: bool = key(False, "free", "speed")
    partition: Partition = key("layers", "converted", "speed")
    offload: Literal["none", "optimizer", "full"] = key("none", "free", "speed")
    offload_path: str | None = key(None, "free", "speed")
    offload_ratio: float = key(1.0, "free", "speed")
    tiles: int = key(1, "converted", "speed")
    activation_offload: bool = key(False, "free", "speed")
    loss_chunks: int = key(1, "free", "speed")
    one_pass_loss: bool = key(False, "free", "speed", added=True)
    fused_bias_gradients: bool = key(False, "free", "speed", added=True)
    sharded_optimizer: bool = key(False, "free", "speed")
    prefetch: bool = key(True, "free", "speed")
    reshard: bool = key(True, "free", "speed")
    megatron_args: tuple[str, ...] = key((), "free", "speed")


@dataclass(frozen=True)
class LayoutRequest:
    """`[layout]`: the GPUs, how they are split, and the batch. The rules of `resolve` give the other values."""

    __pydantic_config__ = _STRICT

    gpus: int | None = key(None, "free", "speed")
    nodes: int | None = key(None, "free", "speed")
    tp: int | None = key(None, "converted", "speed")
    pp: int | None = key(None, "converted", "speed")
    dp: int | None = key(None, "converted", "speed")
    micro_batch: int | None = key(None, "free", "speed")
    micro_batches: int | None = key(None, "free", "speed")
    global_batch: int | None = key(None, "never", "speed")
    allow_tp_across_nodes: bool = key(False, "free", "nothing")


@dataclass(frozen=True)
class Train:
    """`[train]`: length, arithmetic, optimizer, and how often to log, evaluate and save (0: never).

    `optimizer_mode` is how the update is computed. `host` is the processor's own kernel, for offloaded states.
    `compiled` updates master weights, moments and half-precision weights in one compiled pass (engine ddp, bf16 or
    fp16); `fused` stays the default until both have been measured on a GPU.
    `until_loss` ends the run as done when an evaluation, or without any the mean loss of the last 20 steps, is at most
    that. Without `save_last` an attempt saves no checkpoint at its end. The last `keep_last` checkpoints are kept (0:
    all), and those whose step `keep_every` divides (0: none). A save that the disk refuses is skipped;
    `max_failed_saves` in a row end the attempt. With `matmul_rate` an attempt measures the device's own rate at its
    start and at its end, the record's `matmul_tflops_before` and `_after`. If no rank completes a step for
    `hang_multiple` times the median step, and for at least `hang_floor_s`, the attempt ends as a hang (0: never).

    Keys that are free on resume change neither the weights nor the order of the data, except `steps` and `until_loss`:
    a run that is done must change one of them to train further, and its decaying learning rate then differs from that
    of an unbroken run.
    """

    __pydantic_config__ = _STRICT

    steps: int = key(1000, "free", "schedule", least=1)
    minutes: float | None = key(None, "free", "nothing")
    dtype: Dtype = key("bf16", "never", "speed")
    seed: int = key(1, "never", "schedule")
    deterministic: bool = key(False, "free", "speed")
    tf32: bool = key(False, "free", "speed")
    optimizer: Literal["adamw", "sgd"] = key("adamw", "never", "speed")
    optimizer_mode: Literal["fused", "foreach", "for-loop", "host", "compiled"] | None = key(None, "free", "speed")
    lr: float = key(3e-4, "never", "schedule", least=0)
    min_lr: float = key(0.0, "never", "schedule", least=0)
    warmup_steps: int = key(0, "never", "schedule", least=0)
    decay: Literal["cosine", "constant"] = key("cosine", "never", "schedule")
    weight_decay: float = key(0.1, "never", "schedule", least=0)
    beta1: float = key(0.9, "never", "schedule")
    beta2: float = key(0.95, "never", "schedule")
    eps: float = key(1e-8, "never", "schedule", least=0)
    clip: float = key(1.0, "never", "speed", least=0)
    log_every: int = key(10, "free", "nothing", least=1)
    eval_every: int = key(0, "free", "schedule", least=0)
    eval_batches: int = key(4, "free", "speed", least=0)
    save_every: int = key(0, "free", "nothing", least=0)
    save_last: bool = key(True, "free", "nothing")
    save_in_background: bool = key(True, "free", "nothing")
    keep_last: int = key(0, "free", "nothing", least=0)
    keep_every: int = key(0, "free", "nothing", least=0)
    max_failed_saves: int = key(3, "free", "nothing", least=1)
    max_bad_steps: int = key(20, "free", "nothing", least=0)
    until_loss: float | None = key(None, "free", "nothing")
    matmul_rate: bool = key(False, "free", "nothing")
    hang_multiple: float = key(20.0, "free", "nothing", least=0)
    hang_floor_s: float = key(300.0, "free", "nothing", least=0)


@dataclass(frozen=True)
class Job:
    """`[job]`: what is requested of the scheduler. None takes the value of the cluster profile.

    `max_gpu_hours` is a budget over all attempts of a run. `preflight` probes every node before the ranks start;
    `spare_nodes` are requested in addition to those of the layout, to replace a node that fails the preflight.
    `retry_pause_s` is the first pause before a retry; it doubles with each failure in a row.
    """

    __pydantic_config__ = _STRICT

    name: str | None = key(None, "free", "nothing")
    time: str | None = key(None, "free", "nothing")
    partition: str | None = key(None, "free", "nothing", of_site=True)
    account: str | None = key(None, "free", "nothing", of_site=True)
    qos: str | None = key(None, "free", "nothing", of_site=True)
    constraint: str | None = key(None, "free", "nothing", of_site=True)
    reservation: str | None = key(None, "free", "nothing", of_site=True)
    nodelist: str | None = key(None, "free", "nothing", of_site=True)
    exclude: str | None = key(None, "free", "nothing", of_site=True)
    comment: str | None = key(None, "free", "nothing")
    mem: str | None = key(None, "free", "nothing")
    cpus_per_task: int | None = key(None, "free", "nothing")
    dependency: str | None = key(None, "free", "nothing")
    exclusive: bool | None = key(None, "free", "nothing")
    signal_lead_s: int | None = key(None, "free", "nothing")
    max_gpu_hours: float | None = key(None, "free", "nothing")
    retry_pause_s: int | None = key(None, "free", "nothing")
    preflight: bool | None = key(None, "free", "nothing")
    spare_nodes: int | None = key(None, "free", "nothing")
    sbatch: tuple[str, ...] = key((), "free", "nothing")
    srun: tuple[str, ...] = key((), "free", "nothing")


@dataclass(frozen=True)
class Experiment:
    """One TOML file with the files that it extends, and with overrides applied."""

    __pydantic_config__ = _STRICT

    name: str = "experiment"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    engine: Engine = field(default_factory=Engine)
    layout: LayoutRequest = field(default_factory=LayoutRequest)
    train: Train = field(default_factory=Train)
    job: Job = field(default_factory=Job)


def experiment_keys() -> list[tuple[str, Any, str]]:
    """(dotted key, default, type as text) of every key of an experiment."""
    return _keys_of(Experiment, "")


def _keys_of(kind: Any, prefix: str) -> list[tuple[str, Any, str]]:
    rows: list[tuple[str, Any, str]] = []
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if is_dataclass(hint):
            rows += _keys_of(hint, f"{prefix}{entry.name}.")
        else:
            default = None if entry.default is MISSING else entry.default
            rows.append((prefix + entry.name, default, _type_words(hint)))
    return rows


def _type_words(hint: Any) -> str:
    """A type as text for the user."""
    if get_origin(hint) is Literal:
        return " | ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {_type_words(get_args(hint)[0])}s"
    options = [option for option in get_args(hint) if option is not type(None)]
    if options:
        return " | ".join(_type_words(option) for option in options)
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true | false"}.get(
        getattr(hint, "__name__", ""), str(hint)
    )


# --- job.time

_TIME_FORMS = (
    (re.compile(r"(?P<m>\d+)(:(?P<s>\d+))?"), "minutes[:seconds]"),
    (re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)"), "hours:minutes:seconds"),
    (re.compile(r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?"), "days-hours[:minutes[:seconds]]"),
)
_SECONDS_OF = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def limit_s(text: str | None) -> int | None:
    """Seconds of a time limit in one of sbatch's forms; None for no limit. ConfigError for any other text.

    >>> limit_s("1:30:00"), limit_s("90"), limit_s("2-12")
    (5400, 5400, 216000)
    """
    if text is None or text.lower() in ("unlimited", "infinite"):
        return None
    for form, _ in _TIME_FORMS:
        if found := form.fullmatch(text):
            seconds = sum(_SECONDS_OF[unit] * int(size) for unit, size in found.groupdict().items() if size)
            return seconds or None  # sbatch takes 0 as no limit
    forms = ", ".join(name for _, name in _TIME_FORMS)
    raise ConfigError(f"job.time {text!r} is no time limit: {forms}", "for example 02:00:00")
