"""Tables of TOML: read a file, merge tables, write values. `typed_tables` turns them into a dataclass."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import package_text

_DEEPEST = 50  # the deepest nesting of tables that is read; ours have at most 5 levels
# tomllib's messages for a key that is given twice, and the place that they name.
_TWICE = re.compile(r"Cannot (?:overwrite a value|declare .* twice|mutate|redefine)|Duplicate inline table key")
_LINE = re.compile(r"\(at line (\d+), column \d+\)")
_QUOTED = re.compile(r"'(.*)'")
# {key: its names in other programs}: nanoGPT, transformers, Megatron-LM, torchtitan, litgpt.
_CALLED = {
    "train.lr": "learning_rate max_lr peak_lr",
    "train.steps": "max_steps max_iters train_iters num_steps total_steps training_steps iterations",
    "train.warmup_steps": "warmup warmup_iters lr_warmup_iters num_warmup_steps",
    "train.decay": "schedule scheduler lr_scheduler lr_scheduler_type lr_decay_style",
    "train.clip": "grad_clip clip_grad max_grad_norm gradient_clipping gradient_clip_val",
    "train.dtype": "precision mixed_precision",
    "train.save_every": "save_interval save_steps checkpoint_interval",
    "train.eval_every": "eval_interval eval_steps",
    "train.log_every": "log_interval logging_steps",
    "layout.micro_batch": "batch_size per_device_train_batch_size micro_batch_size local_batch_size",
    "layout.global_batch": "batch_size global_batch_size train_batch_size",
    "layout.micro_batches": "grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps",
    "layout.gpus": "num_gpus ngpus n_gpus world_size",
    "layout.nodes": "num_nodes nnodes n_nodes",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "n_kv_head n_kv_heads num_key_value_heads num_query_groups",
    "model.experts": "moe mixture_of_experts mixture num_experts n_experts num_local_experts",
    "model.experts_per_token": "moe mixture_of_experts mixture top_k moe_topk num_experts_per_tok",
    "layout.ep": "moe mixture_of_experts mixture expert_parallel expert_model_parallel_size",
    "model.hidden": "n_embd n_embed d_model dim hidden_size",
    "model.ffn": "d_ff intermediate_size ffn_hidden_size",
    "model.seq": "block_size seq_len seq_length sequence_length context_length max_seq_len max_position_embeddings",
    "model.vocab": "vocab_size n_vocab padded_vocab_size",
    "engine.recompute": "gradient_checkpointing activation_checkpointing recompute_activations",
    "data.path": "dataset data_path dataset_path train_data",
    "data.workers": "num_workers dataloader_num_workers",
    "job.time": "walltime time_limit",
}


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a text in TOML. TOMLDecodeError also for tables within tables that are deeper than any of ours, and
    for a number of thousands of digits, with which Python fails in its own ways."""
    try:
        tables = tomllib.loads(text)
        level: list[Any] = [tables]
        for _ in range(_DEEPEST):
            inner = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
            level = [part for part in inner if isinstance(part, dict | list)]
    except RecursionError:
        level = [None]
    except ValueError as fault:
        raise tomllib.TOMLDecodeError(str(fault).partition(";")[0]) from None
    if level:
        raise tomllib.TOMLDecodeError(f"tables or lists within each other, more than {_DEEPEST} deep")
    return tables


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, with or without a byte order mark; ConfigError with file and line if it cannot be
    read."""
    text = ""
    try:
        text = package_text(path)
        return parse_toml(text)
    except tomllib.TOMLDecodeError as fault:
        if (twice := _given_twice(text, str(fault))) is not None:
            raise ConfigError(f"{path}: {twice}", "keep one of them") from None
        raise ConfigError(f"{path}: {fault}", "correct the TOML there; strings need quotes") from None
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: not UTF-8 at byte {fault.start}", "TOML files are UTF-8") from None
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror}", "give a file that can be read") from None


def _given_twice(text: str, fault: str) -> str | None:
    """A message with key and place if tomllib's `fault` says that a key or table is given twice; None for others.

    >>> _given_twice("a = 1\\na = [\\n2]", "Cannot overwrite a value (at end of document)")
    'a is given twice (at line 2, column 1)'
    """
    if not _TWICE.match(fault):
        return None
    lines = text.splitlines()
    match = _LINE.search(fault)
    first = int(match[1]) - 1 if match else len(lines) - 1
    while first and not _is_toml("\n".join(lines[:first])):  # the statement begins further up
        first -= 1
    statement = lines[first].lstrip()
    inline = _QUOTED.search(fault) if fault.startswith("Duplicate") else None
    key = statement.partition("#")[0].strip() if statement.startswith("[") else statement.partition("=")[0].strip()
    column = len(lines[first]) - len(statement) + 1
    return f"{inline[1] if inline else key} is given twice (at line {first + 1}, column {column})"


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def merge_tables(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of `under`, overridden key by key by those of `over`."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_tables(merged[key], value) if both else value
    return merged


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{dotted key: value} of nested tables; a list becomes its text."""
    values: dict[str, Any] = {}
    for quoted, value in settings.items():
        key = before + str(quoted).strip("\"' ")
        if isinstance(value, Mapping):
            values |= flat(value, f"{key}.")
        else:
            values[key] = json.dumps(value, default=str) if isinstance(value, list | tuple) else value
    return values


def value_at(tables: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, which may be a table; None if it does not exist."""
    value: Any = tables
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def set_dotted(tables: dict[str, Any], key: str, value: Any) -> None:
    """Sets a key such as `train.steps`; None removes it. ConfigError if a part of the key is not a table."""
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


def undotted(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with quoted dotted keys read as TOML reads them without quotes; ConfigError for one given twice.

    >>> undotted({"train.steps": 3, "train": {"lr": 1.0}})
    {'train': {'lr': 1.0, 'steps': 3}}
    """
    merged = dict(tables)
    for key in [key for key in tables if "." in key]:
        nested = merged.pop(key)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        if twice := set(flat(nested)) & set(flat(merged)):
            raise ConfigError(f"{', '.join(sorted(twice))} is given twice", "keep one of them")
        merged = merge_tables(merged, nested)
    return merged


def toml_value(value: Any) -> str:
    """A value in TOML. Strings, numbers and lists are as in JSON, but DEL must be escaped, and a character above U+FFFF
    must not be split into two surrogates.

    >>> print(toml_value({"a b": ["é😀", 1e-5, True], "c": "\\x7f"}))
    {"a b" = ["é😀", 1e-05, true], c = "\\u007f"}
    """
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(toml_lines(value)) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_lines(table: Mapping[str, Any]) -> list[str]:
    """`key = value` lines of the keys in a table that are not None."""
    keys = ((key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key), value) for key, value in table.items())
    return [f"{key} = {toml_value(value)}" for key, value in keys if value is not None]


def close_matches(name: str, names: Iterable[str], prefix: str = "") -> str:
    """`did you mean …?` with at most five names near to `name`, by letters and digits in any case: those that begin
    with it, in the order of `names`, else those that have it as a part, and those within one edit, or two from 8
    letters on. Empty if none is near. `prefix` goes before each name.

    >>> close_matches("h100", ["h800", "h100-80g", "h100-nvl"]), close_matches("7b", ["7.5b", "llama2-7b"])
    ('did you mean h100-80g or h100-nvl?', 'did you mean llama2-7b or 7.5b?')
    >>> close_matches("gtp2", ["gpt2", "ddp"]), close_matches("lrr", ["lr", "steps"], "train.")
    ('did you mean gpt2?', 'did you mean train.lr?')
    """
    typed, letters = _letters(name), {other: _letters(other) for other in names}
    begun = [other for other, its in letters.items() if len(name) > 2 and its.startswith(typed or "-")]
    parts = [other for other in letters if name.lower() in re.split("[-_/]", other.lower())]
    edits = {other: _edits(typed, its, 2 if max(len(typed), len(its)) >= 8 else 1) for other, its in letters.items()}
    alike = sorted((other for other, count in edits.items() if count is not None), key=lambda other: edits[other] or 0)
    matches = list(dict.fromkeys(begun or [*parts, *alike]))[:5]
    return f"did you mean {' or '.join(prefix + other for other in matches)}?" if matches else ""


def _edits(one: str, other: str, most: int) -> int | None:
    """The least number of letters to add, drop, change or swap with the next that make `one` the `other`; None above
    `most`."""
    if abs(len(one) - len(other)) > most:
        return None
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        earlier, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            swapped = i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted
            row.append(min(cost, earlier[j - 2] + 1) if swapped else cost)
    return row[-1] if row[-1] <= most else None


def keys_called(name: str) -> list[str]:
    """The keys of an experiment that have this name in other programs.

    >>> keys_called("--batch-size"), keys_called("lr")
    (['layout.micro_batch', 'layout.global_batch'], [])
    """
    plain = re.sub("[- ]", "_", name.strip("-")).lower()
    return [key for key, names in _CALLED.items() if plain in names.split()]


def _letters(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
