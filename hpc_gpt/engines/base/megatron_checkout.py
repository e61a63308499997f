"""A checkout of Megatron-LM that the user has: which it is, and whether its argument parser has the options of a run.

The parser's source is read, never run: importing it would take a GPU build of torch and minutes.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from hpc_gpt.errors import ConfigError, raise_faults
from hpc_gpt.settings.resolved import Resolved

VARIABLE = "MEGATRON_LM"
PROGRAM = "pretrain_gpt.py"
# The parser since March 2024, and before.
_PARSERS = ("megatron/training/arguments.py", "megatron/arguments.py")


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
    if not (checkout / PROGRAM).is_file():
        raise _no_checkout(checkout, PROGRAM)
    known = sorted(known_options(checkout)) if options else ()
    faults = {}
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=2)
            message = f"{checkout} does not know {option}" + (f"; it has {' and '.join(close)}" if close else "")
            faults[message] = "use a checkout of 2023 or later: git -C … checkout core_v0.12.0"
    raise_faults(faults)


def _no_checkout(checkout: Path, missing: str) -> ConfigError:
    return ConfigError(
        f"{checkout} is no Megatron-LM checkout: there is no {missing} in it",
        "git clone https://github.com/NVIDIA/Megatron-LM, and name that folder",
    )


def known_options(checkout: Path) -> set[str]:
    """The options of the checkout's argument parser, read from its source.

    Some are calls of `add_argument("--name", …)`. Since 2025 others are fields of dataclasses passed to
    `ArgumentGroupFactory(Class, …)`: `name: int = 1` becomes --name, `name: bool = True` becomes --no-name and
    --disable-name, and texts such as "--other" in the field are its names. A field that the factory is told to leave
    out counts as known.
    """
    parser = next((checkout / name for name in _PARSERS if (checkout / name).is_file()), None)
    if parser is None:
        raise _no_checkout(checkout, _PARSERS[0])
    options: set[str] = set()
    for call in ast.walk(_parse(parser)):
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if name == "add_argument":
            named = _names_in(call)
            options |= named
            if "BooleanOptionalAction" in ast.unparse(call):
                options |= {f"--no-{option.removeprefix('--')}" for option in named}
        elif name == "ArgumentGroupFactory":
            options |= _options_of_class(checkout, ast.unparse(call).partition("(")[2].partition(",")[0].rstrip(")"))
    return options


def _options_of_class(checkout: Path, name: str) -> set[str]:
    """The options that the fields of a dataclass of the checkout, and of its base classes, become."""
    for path in sorted((checkout / "megatron").rglob("*.py")):
        if not re.search(rf"^class {name}\b", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            continue
        found = next(node for node in _parse(path).body if isinstance(node, ast.ClassDef) and node.name == name)
        options = [_options_of_class(checkout, ast.unparse(base).rpartition(".")[2]) for base in found.bases]
        options += [_options_of_field(node) for node in found.body if isinstance(node, ast.AnnAssign)]
        return set().union(*options)
    return set()


def _options_of_field(field: ast.AnnAssign) -> set[str]:
    option = ast.unparse(field.target).replace("_", "-")
    is_on = re.search(r": bool = (True|.*default=True)", ast.unparse(field))
    return _names_in(field) or ({f"--no-{option}", f"--disable-{option}"} if is_on else {f"--{option}"})


def _names_in(tree: ast.AST) -> set[str]:
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"--\w[\w-]*", text)}


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError as fault:
        raise ConfigError(f"{path}:{fault.lineno} is no Python: {fault.msg}", "is the checkout whole?") from None
