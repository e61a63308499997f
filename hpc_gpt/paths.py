"""The folders of the program (templates, cluster profiles, experiments) and of the user.

In a wheel `templates/` and `experiments/` are inside the package. In a checkout or an editable install they are beside
it, at the top of the tree.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _beside_or_inside(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def templates_dir() -> Path:
    """The folder of the Jinja templates."""
    return _beside_or_inside("templates")


def clusters_dir() -> Path:
    """The folder of the shipped cluster profiles."""
    return templates_dir() / "clusters"


def experiments_dir() -> Path:
    """The folder of the shipped experiments."""
    return _beside_or_inside("experiments")


def config_dir() -> Path:
    """The user's own folder: `$HPC_GPT_CONFIG`, else `hpc-gpt` under `$XDG_CONFIG_HOME` or `~/.config`."""
    return _user_folder("HPC_GPT_CONFIG", "XDG_CONFIG_HOME", ".config")


def data_dir() -> Path:
    """The folder of token files: `$HPC_GPT_DATA`, else `hpc-gpt/data` under `$XDG_CACHE_HOME` or `~/.cache`."""
    return _user_folder("HPC_GPT_DATA", "XDG_CACHE_HOME", ".cache", "hpc-gpt/data")


def state_dir() -> Path:
    """The folder of notes on clusters, such as bad nodes: `$HPC_GPT_STATE`, else `hpc-gpt` under `$XDG_STATE_HOME` or
    `~/.local/state`."""
    return _user_folder("HPC_GPT_STATE", "XDG_STATE_HOME", ".local/state")


def _user_folder(variable: str, xdg: str, below_home: str, name: str = "hpc-gpt") -> Path:
    if own := os.environ.get(variable):
        return Path(own)
    return Path(os.environ.get(xdg) or Path.home() / below_home) / name


def logs_dir() -> Path:
    """The folder of the runs: `$HPC_GPT_LOGS`, else `logs` in the current folder."""
    return Path(os.environ.get("HPC_GPT_LOGS") or "logs")


def logs_folder() -> Path:
    """`logs_dir`, absolute."""
    return Path(os.path.abspath(logs_dir()))
