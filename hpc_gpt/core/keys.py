"""The keys of a table that users write or read: name, default, type as text, and the meaning, which is the string under
the field in the table's source."""

import ast
import functools
import inspect
import sys
from dataclasses import MISSING, fields
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from hpc_gpt.core.typed_tables import table_in

# {key: what other programs call it}: nanoGPT, transformers, Megatron-LM, torchtitan, litgpt.
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
    "model.hidden": "n_embd n_embed d_model dim hidden_size",
    "model.ffn": "d_ff intermediate_size ffn_hidden_size",
    "model.seq": "block_size seq_len seq_length sequence_length context_length max_seq_len max_position_embeddings",
    "model.vocab": "vocab_size n_vocab padded_vocab_size",
    "engine.recompute": "gradient_checkpointing activation_checkpointing recompute_activations",
    "data.path": "dataset data_path dataset_path train_data",
    "data.workers": "num_workers dataloader_num_workers",
    "job.time": "walltime time_limit",
}


def keys_called(name: str) -> list[str]:
    """The keys of an experiment that other programs call so.

    >>> keys_called("--batch-size"), keys_called("lr")
    (['layout.micro_batch', 'layout.global_batch'], [])
    """
    plain = name.strip("-").replace("-", "_").lower()
    return [key for key, names in _CALLED.items() if plain in names.split()]


class Key(NamedTuple):
    """A key by its dotted name; `means` is empty if its source has no string under it, `choices` if it may be any
    text."""

    name: str
    default: Any
    type: str
    means: str
    choices: tuple[str, ...] = ()


def keys_of(kind: Any, prefix: str = "") -> list[Key]:
    """Every key of a dataclass, with those of the tables in it; of tables by a name of the user's as `NAME`.

    It reads the source, so only help calls it.
    """
    return list(_keys_of(kind, prefix))


@functools.cache
def _keys_of(kind: Any, prefix: str) -> tuple[Key, ...]:
    rows: list[Key] = []
    hints, means = get_type_hints(kind), _strings_under_fields(kind.__module__)[kind.__qualname__]
    for entry in fields(kind):
        hint = hints[entry.name]
        table, is_named = table_in(hint)
        if table is not None:
            rows += keys_of(table, f"{prefix}{entry.name}.{'NAME.' * is_named}")
        else:
            default = None if entry.default is MISSING else entry.default
            rows.append(
                Key(prefix + entry.name, default, _type_words(hint), means.get(entry.name, ""), _literals(hint))
            )
    return tuple(rows)


def names_of(kind: Any) -> list[str]:
    """The dotted names of `keys_of`."""
    return [key.name for key in keys_of(kind)]


def choices_of(kind: Any, name: str) -> tuple[str, ...]:
    """The words that the key of a dotted name can have; none if it has any text, or a number."""
    for part in name.split("."):
        kind = get_type_hints(kind)[part]
    return _literals(kind)


def _literals(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return tuple(str(choice) for choice in get_args(hint))
    return tuple(word for option in get_args(hint) for word in _literals(option))


@functools.cache
def _strings_under_fields(module: str) -> dict[str, dict[str, str]]:
    """{class: {field: the string under it}} of a module, whose source is read once for all of its tables."""
    found: dict[str, dict[str, str]] = {}
    for definition in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(definition, ast.ClassDef):
            strings = found[definition.name] = {}
            for above, below in zip(definition.body, definition.body[1:], strict=False):
                match above, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        strings[name] = text
    return found


def _type_words(hint: Any) -> str:
    """A type as text for the user."""
    if get_origin(hint) is Literal:
        return " | ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) in (tuple, list):
        of = get_args(hint)[0]
        return f"list of {_type_words(of)}{'' if get_origin(of) is Literal else 's'}"
    if get_origin(hint) is dict:
        return f"table of {_type_words(get_args(hint)[1])}s"
    options = [option for option in get_args(hint) if option is not type(None)]
    if options:
        return " | ".join(_type_words(option) for option in options)
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true | false"}.get(
        getattr(hint, "__name__", ""), "value"
    )
