"""An adopted script as two TOML files, each key with the line that it is from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hpc_gpt.scripts.adoption import Adopted
from hpc_gpt.tables import toml_value
from hpc_gpt.words import plain

_WIDEST = 110
_ORDER = ("model", "data", "engine", "command", "layout", "train", "job")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
# {table: what follows its keys}.
_BELOW = {
    "command": """\
# If it does not resume by itself after a time limit or a failure, and how far its checkpoints are complete:
# checkpoints = "out/ckpt-*"
# resume = "--resume {checkpoint}"
# complete = "{checkpoint}/.done"
"""
}


def experiment_text(adopted: Adopted, script: str, profile: str) -> str:
    """The experiment's file. `script` is the file that it is from, `profile` the file of its cluster profile."""
    lines = [f"# From {plain(script)}: {plain(adopted.what)}."]
    if adopted.notes.left:
        lines += ["# Not taken from it:"]
        lines += [f"#   line {note.place}: {plain(f'{note.text}: {note.means}')}" for note in adopted.notes.left]
    lines += [f"# Its site is in {plain(profile)}. hpc-gpt help keys explains every key.", ""]
    lines += [f"name = {_value(adopted.name)}"]
    for table in _ORDER:
        keys = {key: value for key, value in adopted.experiment.items() if key.partition(".")[0] == table}
        if keys:
            lines += ["", f"[{table}]"]
            lines += [_line(key.partition(".")[2], value, adopted.places.get(key, "")) for key, value in keys.items()]
            lines += _BELOW.get(table, "").splitlines()
    return "\n".join(lines) + "\n"


def profile_text(adopted: Adopted, script: str) -> str:
    """The profile's file."""
    lines = [f"# The site of {plain(script)}. hpc-gpt help profile explains every key."]
    tables: dict[str, Mapping[str, Any]] = {}
    for key, value in adopted.profile.items():
        of, dot, name = key.partition(".")
        if dot:
            tables[of] = {**tables.get(of, {}), name: value}
        elif isinstance(value, dict):
            tables[of] = value
        else:
            lines.append(_line(key, value, ""))
    if "device" in adopted.profile:
        lines.append('# fabric = "infiniband 4x200G"  # what joins the nodes, for predictions')
    else:
        lines.append("# device, fabric: for utilisation and predictions; hpc-gpt profile detect looks them up")
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [_line(key if _BARE.fullmatch(key) else _value(key), value, "") for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, place: str) -> str:
    comment = "" if not place else f"  # {place}" if not place[-1].isdigit() else f"  # line {place}"
    if isinstance(value, str) and ("\n" in value or len(value) > _WIDEST - len(key)):
        return f"{key} = {_long_text(value)}{comment}"
    if isinstance(value, list) and (len(repr(value)) > _WIDEST or any("\n" in str(each) for each in value)):
        inner = "".join(f"    {_long_text(each) if chr(10) in str(each) else _value(each)},\n" for each in value)
        return f"{key} = [{comment}\n{inner}]"
    return f"{key} = {_value(value)}{comment}"


def _long_text(text: str) -> str:
    """A text over several lines: where a line ends in a backslash, TOML leaves the line's end out."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f").replace('\\"', '"')
    escaped = escaped.replace('"""', '""\\"').replace("\\n", "\n") if "\\\\n" not in escaped else escaped
    if escaped.endswith('"'):
        escaped = escaped[:-1] + '\\"'
    is_one = "\n" not in escaped
    wrapped = re.sub(r"(?<=[^\s\\]) (?=\"?--[A-Za-z])", " \\\\\n    ", escaped) if is_one else escaped
    return f'"""\\\n    {wrapped}"""'


def _value(value: Any) -> str:
    """A value as TOML writes it; a text with double quotes between single ones."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
        return f"'{value}'"
    return toml_value(value).replace("\x7f", "\\u007f")
