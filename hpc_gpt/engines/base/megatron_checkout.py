"""A checkout of Megatron-LM that the user has: which it is, and whether its argument parser has the options of a run.

The parser's source is read, never run: importing it would take a GPU build of torch and minutes.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_gpt.errors import ConfigError
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


def check_is_checkout(checkout: Path) -> None:
    """ConfigError unless the folder is a Megatron-LM checkout."""
    if not (checkout / PROGRAM).is_file():
        raise _no_checkout(checkout, PROGRAM)


def _no_checkout(checkout: Path, missing: str) -> ConfigError:
    return ConfigError(
        f"{checkout} is no Megatron-LM checkout: there is no {missing} in it",
        "git clone https://github.com/NVIDIA/Megatron-LM, and name that folder",
    )


def check_options(checkout: Path, options: list[str]) -> None:
    """ConfigError for every option that the checkout's parser does not have, with similar names."""
    known = known_options(checkout)
    unknown = [option for option in options if option not in known]
    if unknown:
        lines = []
        for option in unknown:
            close = difflib.get_close_matches(option, sorted(known), n=2)
            lines.append(f"{checkout} does not know {option}" + (f"; it has {' and '.join(close)}" if close else ""))
        raise ConfigError("\n".join(lines), "use a checkout of 2023 or later: git -C … checkout core_v0.12.0")


def known_options(checkout: Path) -> set[str]:
    """Every option of the checkout's argument parser, read from its source.

    Some are calls of `add_argument("--name", …)`. Since 2025 others are fields of dataclasses passed to
    `ArgumentGroupFactory(Class, exclude=[…])`: `name: int = 1` becomes --name, `name: bool = True` becomes --no-name
    and --disable-name, and `metadata={"argparse_meta": {"arg_names": […]}}` gives other names.
    """
    parser = next((checkout / name for name in _PARSERS if (checkout / name).is_file()), None)
    if parser is None:
        raise _no_checkout(checkout, _PARSERS[0])
    tree = _parse(parser)
    options: set[str] = set()
    for call in _calls(tree, "add_argument"):
        options |= set(_texts(call.args))
        if any("BooleanOptionalAction" in ast.unparse(keyword.value) for keyword in call.keywords):
            options |= {f"--no-{name.removeprefix('--')}" for name in _texts(call.args)}
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for call in _calls(function, "ArgumentGroupFactory"):
            if call.args and isinstance(call.args[0], ast.Name):
                options |= _options_of_class(checkout, call.args[0].id, _excluded(function, call))
    return {name for name in options if name.startswith("--")}


def _options_of_class(checkout: Path, name: str, excluded: set[str]) -> set[str]:
    """The options that the fields of a dataclass of the checkout, and of its base classes, become."""
    definition = _find_class(checkout, name)
    if definition is None:
        return set()
    options: set[str] = set()
    for base in definition.bases:
        options |= _options_of_class(checkout, ast.unparse(base).rpartition(".")[2], excluded)
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id not in excluded:
            options |= _options_of_field(field.target.id, ast.unparse(field.annotation), field.value)
    return options


def _options_of_field(name: str, annotation: str, value: ast.expr | None) -> set[str]:
    default = value
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        settings = {keyword.arg: keyword.value for keyword in value.keywords}
        if "init" in settings and ast.unparse(settings["init"]) == "False":
            return set()
        default = settings.get("default")
        for node in ast.walk(settings.get("metadata", ast.Constant(None))):
            if isinstance(node, ast.Dict):
                named = dict(zip(map(_text, node.keys), node.values, strict=True))
                if isinstance(names := named.get("arg_names"), ast.List):
                    return set(_texts(names.elts))
    option = name.replace("_", "-")
    if annotation == "bool" and isinstance(default, ast.Constant) and default.value is True:
        return {f"--no-{option}", f"--disable-{option}"}
    return {f"--{option}"}


def _find_class(checkout: Path, name: str) -> ast.ClassDef | None:
    """The definition of a class in the checkout's package."""
    for path in sorted((checkout / "megatron").rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if f"class {name}(" in text or f"class {name}:" in text:
            for node in ast.walk(_parse(path)):
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return node
    return None


def _excluded(function: ast.FunctionDef, call: ast.Call) -> set[str]:
    """The texts in `exclude=[…]` of a call; the list may be a local variable of the function."""
    value: ast.expr | None = next((keyword.value for keyword in call.keywords if keyword.arg == "exclude"), None)
    if isinstance(value, ast.Name):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and value.id in map(ast.unparse, node.targets):
                value = node.value
                break
    return set(_texts(value.elts)) if isinstance(value, ast.List) else set()


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
            yield node


def _texts(nodes: list[ast.expr]) -> list[str]:
    return [text for text in map(_text, nodes) if text is not None]


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError as fault:
        raise ConfigError(f"{path}:{fault.lineno} is no Python: {fault.msg}", "is the checkout whole?") from None
