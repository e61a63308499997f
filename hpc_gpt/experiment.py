"""An experiment: what to train and how, as one TOML file that may extend another.

The tables are the dataclasses below. A key that is None is not settled by the experiment: the cluster
profile, a rule of `resolve`, or the default named beside it settles it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from hpc_gpt.errors import ConfigError
from hpc_gpt.paths import experiments_dir

Dtype = Literal["fp32", "bf16", "fp16"]
EngineName = Literal["deepspeed-3d", "deepspeed-zero", "fsdp", "ddp", "hf-deepspeed", "megatron-lm"]
Recompute = Literal["none", "selective", "full"]
T = TypeVar("T")
_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Model:
    """`[model]`: a preset by name, an explicit shape, or a preset with some sizes of one's own."""

    __pydantic_config__ = _STRICT

    preset: str | None = None
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    vocab: int | None = None
    seq: int | None = None
    tied: bool | None = None
    vocab_multiple: int | None = None


@dataclass(frozen=True)
class Data:
    """`[data]`: where the tokens come from. The last `eval_fraction` of them is kept for evaluation.

    `tokens` is a token file, `megatron` a pair of Megatron's .bin and .idx, `stream` text, jsonl, gzip and zstd files
    that are tokenised as they are read, by `workers` processes a rank. `path = "stdlib"` means for both the standard
    library's own sources, prepared where they are missing.
    """

    __pydantic_config__ = _STRICT

    source: Literal["stdlib", "tokens", "random", "megatron", "stream"] = "stdlib"
    path: str | None = None
    eval_fraction: float = 0.05
    tokenizer: str = "byte"
    workers: int = 0
    on_bad_shard: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class Engine:
    """`[engine]`: which trainer runs the steps, and its switches. `hpc_gpt.engines` says which engine takes which.

    `partition` deals blocks out to pipeline stages: evenly, by parameters, or as a list of blocks a stage.
    `offload_path` is a folder on NVMe to offload to, None the host's memory; `offload_ratio` the share of the
    optimizer that is offloaded (ZeRO-3). `tiles` splits every linear layer's outputs (ZeRO-3 gathers one at a time).
    """

    __pydantic_config__ = _STRICT

    name: EngineName = "deepspeed-3d"
    zero_stage: int | None = None
    recompute: Recompute = "none"
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    compile: Literal["none", "block", "whole"] = "none"
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    sequence_parallel: bool = False
    partition: Literal["layers", "parameters"] | tuple[int, ...] = "layers"
    offload: Literal["none", "optimizer", "full"] = "none"
    offload_path: str | None = None
    offload_ratio: float = 1.0
    tiles: int = 1
    activation_offload: bool = False
    loss_chunks: int = 1
    sharded_optimizer: bool = False
    prefetch: bool = True
    reshard: bool = True


@dataclass(frozen=True)
class LayoutRequest:
    """`[layout]`: GPUs, how they are split, and the batch. What is left out follows by the rules of `resolve`."""

    __pydantic_config__ = _STRICT

    gpus: int | None = None
    nodes: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    global_batch: int | None = None
    allow_tp_across_nodes: bool = False


@dataclass(frozen=True)
class Train:
    """`[train]`: length, arithmetic, optimizer, and how often to log, evaluate and save (0: never)."""

    __pydantic_config__ = _STRICT

    steps: int = 1000
    minutes: float | None = None
    dtype: Dtype = "bf16"
    seed: int = 1
    deterministic: bool = False
    tf32: bool = False
    optimizer: Literal["adamw", "sgd"] = "adamw"
    optimizer_mode: Literal["fused", "foreach", "for-loop"] = "fused"
    lr: float = 3e-4
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay: Literal["cosine", "constant"] = "cosine"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    log_every: int = 10
    eval_every: int = 0
    eval_batches: int = 4
    save_every: int = 0
    max_bad_steps: int = 20


@dataclass(frozen=True)
class Job:
    """`[job]`: what the scheduler is asked for. None leaves it to the cluster profile."""

    __pydantic_config__ = _STRICT

    name: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    comment: str | None = None
    mem: str | None = None
    cpus_per_task: int | None = None
    dependency: str | None = None
    exclusive: bool | None = None
    signal_lead_s: int | None = None
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """One TOML file, its parents folded in and its overrides applied."""

    __pydantic_config__ = _STRICT

    name: str = "experiment"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    engine: Engine = field(default_factory=Engine)
    layout: LayoutRequest = field(default_factory=LayoutRequest)
    train: Train = field(default_factory=Train)
    job: Job = field(default_factory=Job)


DEFAULT_EXPERIMENT = "gpt2-meg-ds-3d"


def find_experiment(name: str) -> Path:
    """The TOML file that EXPERIMENT means: a file, a folder's first row, or either under `experiments/`."""
    for base in (Path(), experiments_dir()):
        for path in (base / name, base / f"{name}.toml"):
            if path.is_file():
                return path
            if path.is_dir() and (rows := sorted(path.glob("*.toml"))):
                return rows[0]
    known = list_experiments()
    raise ConfigError(
        f"no experiment {name!r}: neither a file, a folder with a TOML in it, nor a name under experiments/",
        close_matches(name, known) or f"known: {', '.join(known)}",
    )


def list_experiments() -> list[str]:
    """Names under `experiments/`, without the suffix, sorted."""
    top = experiments_dir()
    return sorted(str(path.relative_to(top).with_suffix("")) for path in top.rglob("*.toml"))


def load_experiment(name: str, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Reads the experiment `name` with dotted-key `overrides` (`{"train.steps": 20}`) laid over it.

    Raises ConfigError with every fault of the file at once.
    """
    path = find_experiment(name)
    tables = _read_with_parents(path, ())
    tables.setdefault("name", _default_name(path))
    for key, value in (overrides or {}).items():
        _set_dotted(tables, key, value)
    return check_tables(tables, Experiment, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; ConfigError with file and line where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as fault:
        raise ConfigError(f"{path}: {fault}", "mend the TOML there; strings need quotes") from None
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: not UTF-8 at byte {fault.start}", "TOML files are UTF-8") from None
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror}", "give a file that can be read") from None


def parse_override(text: str) -> tuple[str, Any]:
    """`train.steps=20` as (key, value). The value is TOML where the key wants no text, and TOML can read it; nothing
    behind the `=` takes the key back to its default (None)."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {text!r} is not KEY=VALUE", "for example --set train.steps=20")
    if not raw:
        return key, None
    if _wants_text(key) and raw[0] not in "\"'":
        return key, raw
    try:
        return key, tomllib.loads(f"value = {raw}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return key, raw


def _wants_text(key: str) -> bool:
    """Whether an experiment's key holds a text, so that `job.time=90` needs no quotes."""
    kind: Any = Experiment
    for part in key.split("."):
        kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
    return kind in (str, str | None)


def check_tables(tables: Mapping[str, Any], kind: type[T], where: str) -> T:
    """The tables as dataclass `kind`. ConfigError lists every fault at once, unknown keys with close matches."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(tables)
    except ValidationError as failure:
        lines = [_fault_line(kind, fault["loc"], fault["type"], fault["msg"]) for fault in failure.errors()]
    raise ConfigError("\n".join(f"{where}: {line}" for line in lines), "hpc-gpt help keys lists every key")


def _fault_line(kind: type, loc: tuple[int | str, ...], fault: str, message: str) -> str:
    key = ".".join(str(part) for part in loc)
    if fault not in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key}: {message[0].lower()}{message[1:]}"
    table: Any = kind
    for part in loc[:-1]:
        table = get_type_hints(table).get(str(part)) if is_dataclass(table) else None
    name, known = str(loc[-1]), _field_names(table)
    # A key that another table has was put in the wrong one.
    elsewhere = [f"{other}.{name}" for other, of in get_type_hints(kind).items() if name in _field_names(of)]
    match = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else close_matches(name, known)
    return f"unknown key {key}" + (f"; {match}" if match else f"; known here: {', '.join(known)}" if known else "")


def _field_names(table: Any) -> list[str]:
    return [entry.name for entry in fields(table)] if is_dataclass(table) else []


def close_matches(name: str, known: Iterable[str]) -> str:
    """`did you mean …?` for the names nearest to `name`, or nothing."""
    known = list(known)
    begun = [other for other in known if len(name) > 2 and _letters(other).startswith(_letters(name))]
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or begun[:3]
    return f"did you mean {' or '.join(matches)}?" if matches else ""


def _letters(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def _read_with_parents(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's tables over those of the file it extends, found beside it or under `experiments/`."""
    if path.resolve() in seen:
        chain = " -> ".join(step.name for step in (*seen, path))
        raise ConfigError(f"{path}: extends goes round in a circle: {chain}", "take one `extends` out")
    tables = read_toml(path)
    parent = tables.pop("extends", None)
    if parent is None:
        return tables
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: extends must be the name of one experiment, not {parent!r}", 'for example "base"')
    beside = [path.parent / parent, path.parent / f"{parent}.toml"]
    found = next((file for file in beside if file.is_file()), None) or find_experiment(parent)
    inherited = _read_with_parents(found, (*seen, path.resolve()))
    inherited.pop("name", None)
    return merge_tables(inherited, tables)


def merge_tables(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, table by table."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_tables(merged[key], value) if both else value
    return merged


def _set_dotted(tables: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        table = tables.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {part} is a value, not a table", "give the key as table.key")
        tables = table
    if value is None:
        tables.pop(last, None)
    else:
        tables[last] = value


def _default_name(path: Path) -> str:
    """The path below `experiments/` without its suffix, or the file's own name elsewhere."""
    try:
        return "-".join(path.resolve().relative_to(experiments_dir().resolve()).with_suffix("").parts)
    except ValueError:
        return path.stem
