"""`[calibration]` of a user's cluster profile: written there, and nothing else of the file touched."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.paths import clusters_dir, config_dir
from hpc_gpt.plan.calibrate import Calibrated
from hpc_gpt.plan.constants import constants_from
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.small_files import replace_whole

_TABLE = "calibration"
_HEADER = re.compile(r"^[ \t]*\[\[?[ \t]*([^\[\]#]{1,400}?)[ \t]*\]\]?[ \t]*(?:#.*)?$")
_NOTE = (
    "# Written by hpc-gpt plan --calibrate, whole each time: residuals are predicted over measured step time less 1."
)


def calibration_path(cluster: str) -> Path:
    """The user's file of a profile, which need not be there yet: the file itself where `cluster` is the path of one.

    Shipped profiles are never written: the user's copy of the name extends them.
    """
    if cluster.endswith(".toml") and Path(cluster).is_file():
        given = Path(cluster).resolve()
        if given.parent != clusters_dir().resolve():
            return given
        cluster = given.stem
    return config_dir() / "clusters" / f"{cluster}.toml"


def store_calibration(cluster: str, calibrated: Calibrated) -> Path:
    """Writes the constants and residuals into the user's copy of the profile, whole or not at all. Returns the file.

    ConfigError where the file's own [calibration] cannot be told from the rest of its text.
    """
    path = calibration_path(cluster)
    path = path.resolve() if path.is_symlink() else path
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else f'extends = "{path.stem}"\n'
        tables = tomllib.loads(before)
    except (OSError, ValueError) as fault:
        raise ConfigError(f"{path}: {' '.join(str(fault).split())[:300]}", "mend the file first") from None
    wanted = _finite(calibrated.to_tables())
    text = without_table(before, _TABLE).rstrip("\n") + "\n\n" + _block(wanted)
    rest = {key: value for key, value in tables.items() if key != _TABLE}
    try:
        sound = tomllib.loads(text) == {**rest, _TABLE: wanted}
    except tomllib.TOMLDecodeError:
        sound = False
    if not sound:
        raise ConfigError(
            f"{path}: its [{_TABLE}] cannot be replaced without touching the rest", f"take [{_TABLE}] out of it by hand"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise ConfigError(
            f"{path.parent}: {fault.strerror}", "set HPC_GPT_CONFIG to a folder that can be written"
        ) from None
    replace_whole(path, text)
    return path


def stored_calibration(profile: ClusterProfile) -> Calibrated:
    """The profile's [calibration] as `store_calibration` wrote it. ConfigError where it has none."""
    stored = profile.calibration
    if stored is None or not stored.constants:
        raise ConfigError(
            f"profile {profile.name} has no [calibration]",
            f"hpc-gpt plan --calibrate RECORDS --cluster {profile.name} writes one",
        )
    return Calibrated(
        name=profile.name,
        device=profile.device or "",
        gpus_per_node=profile.gpus_per_node,
        fabrics=frozenset({profile.fabric or ""}),
        sources=frozenset(),
        constants=constants_from(stored.constants),
        residuals=stored.residuals,
    )


def without_table(text: str, name: str) -> str:
    """TOML text without the table `name` and those within it; comments and all else stay as they are."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        header = _HEADER.match(line.rstrip("\r\n"))
        if header:
            inside = header.group(1).split(".")[0].strip(" \t\"'") == name
        if not inside and line.rstrip() != _NOTE:
            kept.append(line)
    return "".join(kept)


def _block(tables: Mapping[str, Any]) -> str:
    """The table's TOML, tables within it last."""
    lines = [_NOTE, f"[{_TABLE}]"]
    lines += [f"{key} = {_value(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_TABLE}.{key}]", *(f"{_key(name)} = {_value(part)}" for name, part in value.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _finite(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Without what TOML should not hold: nothing and numbers that are not finite. Rounded to six digits."""
    kept: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            kept[key] = _finite(value)
        elif isinstance(value, float):
            if math.isfinite(value):
                kept[key] = float(f"{value:.6g}")
        elif value is not None:
            kept[key] = value
    return kept
