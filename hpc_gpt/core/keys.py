"""The keys of a table that users write or read: name, default, type as text, and meaning, which is the string under the
field in the source of the table."""

import ast
import functools
import inspect
import sys
from dataclasses import MISSING, fields
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from hpc_gpt.core.typed_tables import table_in


class Key(NamedTuple):
    """A key by its dotted name; `means` is empty if its source has no string under it, `choices` if any value is
    allowed."""

    name: str
    default: Any
    type: str
    means: str
    choices: tuple[str, ...] = ()


def keys_of(kind: Any, prefix: str = "") -> list[Key]:
    """Every key of a dataclass and of the tables in it; a table whose name the user chooses is `NAME`.

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
            meaning = means.get(entry.name) or _sentence(entry.metadata.get("means", ""))
            rows.append(Key(prefix + entry.name, default, _type_words(hint), meaning, _literals(hint)))
    return tuple(rows)


def _sentence(means: str) -> str:
    """The meaning of a figure in tables as a sentence."""
    return f"{means[0].upper()}{means[1:]}." if means else ""


def names_of(kind: Any) -> list[str]:
    """The dotted names of `keys_of`."""
    return [key.name for key in keys_of(kind)]


def keys_meant(kind: Any, name: str) -> list[str]:
    """The dotted names of `keys_of` that equal `name`, or whose last part does."""
    return [key for key in names_of(kind) if name in (key, key.rpartition(".")[2])]


def _literals(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return tuple(str(choice) for choice in get_args(hint))
    return tuple(word for option in get_args(hint) for word in _literals(option))


@functools.cache
def _strings_under_fields(module: str) -> dict[str, dict[str, str]]:
    """{class: {field: the string under it}} in a module; its source is read once for all its tables."""
    classes: dict[str, dict[str, str]] = {}
    for definition in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(definition, ast.ClassDef):
            strings = classes[definition.name] = {}
            for above, below in zip(definition.body, definition.body[1:], strict=False):
                match above, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        strings[name] = text
    return classes


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
