"""`Resolved`: the complete settings of one run, their text, and the hash that identifies repeats.

Rendering, submission, training and reporting share this object; its text is `resolved.json` in the run folder. It
contains no run id, time, host or path of the machine that made it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.gone import split_gone
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.rules.shape import check_shape
from hpc_gpt.core.settings.services import SERVICES
from hpc_gpt.core.settings.sized import (
    NO_BATCH,
    NO_MODEL,
    Sized,
    batch_table,
    known_shape,
    model_table,
    program_tables,
)
from hpc_gpt.core.typed_tables import from_tables

# The minor versions whose resolved.json this one reads: the one before, and its own. The rule also holds for scripts,
# as each carries its resolved.json.
_READABLE = ("0.4", "0.5")
# The most bytes of a file's name on Linux' file systems.
NAME_BYTES = 255
# The most bytes of a job's name: its output %x-%j.out also contains a number, or the two of an array.
JOB_NAME_BYTES = NAME_BYTES - len("-4294967295_4294967295.out")


class OtherVersion(ConfigError):
    """The settings were written by a version that is too old for this one, or newer."""


@dataclass(frozen=True)
class Resolved(Sized):
    """The complete settings of one run, which nothing changes afterwards.

    `gone`: settings that an earlier version's run has and this version does not, as `key = value`; never written.
    """

    gone: tuple[str, ...] = field(default=(), compare=False)

    @staticmethod
    def of(sized: Sized, **decided: Any) -> Resolved:
        """The run with an experiment's sizes, and the fields that are decided after them."""
        return Resolved(**{entry.name: getattr(sized, entry.name) for entry in fields(sized)} | decided)

    @property
    def slug(self) -> str:
        """The experiment's name as a folder name."""
        return folder_name(self.name)

    @property
    def files_mode(self) -> int:
        """The mode of the files that hold the settings, within the umask: for their owner alone if command lines of the
        user's own are in them, as these may contain a secret that nobody knows as one."""
        lines = (self.command, self.script, self.cluster.setup, self.notify.command)
        return 0o600 if any(lines) else 0o666

    def to_json(self) -> str:
        """The text of resolved.json, the same bytes for the same settings."""
        return self._json

    @functools.cached_property
    def _json(self) -> str:
        return json.dumps(self.to_tables(), indent=1, ensure_ascii=True) + "\n"

    def to_tables(self) -> dict[str, Any]:
        """The tables of resolved.json."""
        tables: dict[str, Any] = asdict(self) | {"model": model_table(self) or None, "batch": batch_table(self) or None}
        del tables["gone"]
        by_default = asdict(ClusterProfile(self.cluster.name))
        tables["cluster"] = {
            key: value for key, value in tables["cluster"].items() if key == "name" or value != by_default[key]
        }
        for name in ("data", "engine", "layout", "train", "job", *SERVICES, *program_tables(self)):
            tables[name] = {
                key: value for key, value in tables[name].items() if value not in self.key_rules(name)[key].defaults
            }
        nones: dict[str, Any] = {"command": None, "script": None, "data_from": 0}
        for name, none in (*nones.items(), *((name, {}) for name in SERVICES)):
            if tables[name] == none:
                del tables[name]
        return tables

    @staticmethod
    def from_json(text: str) -> Resolved:
        """The object from the text of `to_json`. Raises ConfigError if it is damaged, OtherVersion for another
        version's."""
        try:
            tables = json.loads(text)
            version = str(tables["version"])
            if ".".join(version.split(".")[:2]) not in _READABLE:
                raise OtherVersion(
                    f"resolved.json is of hpc-gpt {version}, this version reads {' and '.join(_READABLE)}",
                    f"use the version that wrote it: {version}",
                )
            tables, gone = split_gone(tables)
            for name, unknown in (("model", NO_MODEL), ("batch", NO_BATCH)):
                tables[name] = asdict(unknown) if tables[name] is None else tables[name]
            resolved: Resolved = replace(from_tables(Resolved, tables), gone=gone)
            _check_stored(resolved)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
            if isinstance(fault, ConfigError):
                raise
            fault_text = f"not JSON: {fault}" if isinstance(fault, json.JSONDecodeError) else repr(fault)
            fault_text = fault_text if text.strip() else "it is empty"
            raise ConfigError(
                f"resolved.json cannot be read: {fault_text}", "the run folder is damaged; submit again"
            ) from None
        return resolved


def folder_name(name: str, most: int = NAME_BYTES) -> str:
    """A folder's name of at most `most` bytes, in Unicode's normal form C: letters, digits and signs of any script
    stay, in ASCII only letters, digits, dots, dashes and underscores; anything else becomes `_`.

    >>> folder_name("../x y"), folder_name("实验一: größe")
    ('_x_y', '实验一__größe')
    """
    letters = (letter if is_name_letter(letter) else "_" for letter in unicodedata.normalize("NFC", name))
    return cut_name("".join(letters).lstrip(".-") or "experiment", most, name)


def cut_name(name: str, most: int, whole: str = "") -> str:
    """A name cut to at most `most` bytes of UTF-8. A longer name ends with digits of the hash of `whole`, by default of
    itself, so that different names stay different.

    >>> cut_name("x" * 20, 14), cut_name("实" * 20, 14)
    ('xxxxx-27ad4247', '实-a2e2274b')
    """
    data = name.encode("utf-8", "surrogatepass")
    if len(data) <= most:
        return name
    digits = f"{zlib.crc32((whole or name).encode('utf-8', 'surrogatepass')):08x}"
    return f"{data[: most - len(digits) - 1].decode('utf-8', 'ignore')}-{digits}"


def is_name_letter(letter: str) -> bool:
    """Whether a folder's name may contain the character: not a blank, control or formatting character, nor a sign of
    ASCII that has a meaning in a shell or a pattern."""
    if letter.isascii():
        return letter.isalnum() or letter in "._-"
    return letter.isprintable()


def config_hash(resolved: Sized) -> str:
    """16 hex digits of the settings that decide weights and speed; equal for runs that count as repeats."""
    return _hash_of(resolved, ("speed", "schedule"))


def speed_hash(resolved: Sized) -> str:
    """The cluster, and a hash of the settings that decide speed; equal for runs that should be equally fast."""
    return f"{resolved.cluster.name} {_hash_of(resolved, ('speed',))}"


def _hash_of(resolved: Sized, effects: Collection[str]) -> str:
    hashed: dict[str, Any] = {"nodes": resolved.nodes, "device": resolved.cluster.device}
    for name in ("model", "data", "engine", "layout", "batch", "train", *program_tables(resolved)):
        of_keys = resolved.key_rules(name)
        part = getattr(resolved, name)
        table = part.table() if isinstance(part, ModelShape) else vars(part)
        hashed[name] = {
            key: value
            for key, value in table.items()
            if any(effect in effects for effect in of_keys[key].affects) and value not in of_keys[key].defaults
        }
    if resolved.data_from and "schedule" in effects:
        hashed["data_from"] = resolved.data_from
    if resolved.script is not None:
        hashed["script"] = {"body": resolved.script.body, "tasks": resolved.script.tasks}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=asdict).encode()).hexdigest()[:16]


def _check_stored(resolved: Resolved) -> None:
    """Raises ValueError or LayoutError for settings that `resolve` never returns."""
    if (shape := known_shape(resolved)) is not None:
        check_shape(shape)
    for name, size in {"gpus": resolved.gpus, "nodes": resolved.nodes, **batch_table(resolved)}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}")
    if resolved.engine.zero_stage is None:
        raise ValueError("engine.zero_stage is null")
