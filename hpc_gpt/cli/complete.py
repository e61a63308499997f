"""What the shell offers after TAB: experiments, profiles, runs, keys. Nothing here may fail or be slow."""

from __future__ import annotations

import contextlib
import re
from glob import escape, glob
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click


def experiments(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[Any]:
    """Names under experiments/, and the TOML files and folders of the current place."""
    from hpc_gpt.settings.experiment_file import list_experiments

    names = [name for name in list_experiments() if name.startswith(begun)]
    # What a shell would have to quote is left to its own completion of files.
    names += sorted(name for name in glob(f"{escape(begun)}*.toml") if re.fullmatch(r"[\w./+-]+", name))
    return _or_files(begun, names)


def _or_files(begun: str, names: list[str]) -> list[Any]:
    """The names, or what the shell finds as a path where there is none."""
    from click.shell_completion import CompletionItem

    # Items all of them, as click takes a list for strings by its first. The file leads: bash's script forgets what
    # came before it, and completes files where nothing follows.
    return [CompletionItem(begun, type="file"), *map(CompletionItem, names)]


def reported(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[Any]:
    """Runs, the sweeps that ship, and files."""
    from hpc_gpt.paths import experiments_dir
    from hpc_gpt.settings.experiment_file import SWEEP_FILE, list_experiments

    names = [name for name in list_experiments() if name.startswith(begun)]
    sweeps = [name for name in names if (experiments_dir() / name / SWEEP_FILE).is_file()]
    return _or_files(begun, runs(ctx, parameter, begun) + sweeps)


def runs_and_logs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[Any]:
    """Runs, and files."""
    return _or_files(begun, runs(ctx, parameter, begun))


def columns(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Sets of columns, then keys of a record."""
    from hpc_gpt.report.seed_tables import SEED_TABLES

    sets = [name for name in ("auto", "usual", "seed", *SEED_TABLES) if name.startswith(begun)]
    return sets + record_keys(ctx, parameter, begun)


def record_keys(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Keys of a record, after the commas that stand there."""
    from hpc_gpt.runs.record import RECORD_KEYS

    done, comma, last = begun.rpartition(",")
    minus = "-" if last.startswith("-") else ""
    return [f"{done}{comma}{minus}{key}" for key in RECORD_KEYS if key.startswith(last.removeprefix("-"))]


def rows(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Rows of the EXPERIMENT that stands in the line, the default one without, those that cannot run left out."""
    from hpc_gpt.settings.experiment_file import DEFAULT_EXPERIMENT, find_sweep

    with contextlib.suppress(OSError, ValueError):
        # click reads no argument of a line whose option has no value yet: it stays among what is left.
        experiment = ctx.params.get("experiment") or next(iter(ctx.args), DEFAULT_EXPERIMENT)
        sweep = find_sweep(experiment)
        return [row.name for row in sweep.possible if row.name.startswith(begun)] if sweep is not None else []
    return []


def profiles(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from hpc_gpt.settings.cluster import list_profiles

    return [name for name in list_profiles() if name.startswith(begun)]


def runs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Run ids, newest first, then sweeps'; and job ids where digits were begun that are neither."""
    from hpc_gpt.paths import logs_dir
    from hpc_gpt.runs.run_folder import job_ids, list_runs

    with contextlib.suppress(OSError, ValueError):
        found = list_runs(logs_dir())[::-1]
        names = [run.run_id for run in found] + [run.sweep_id for run in found if run.sweep_id]
        ids = [name for name in dict.fromkeys(names) if name.startswith(begun)]
        return ids or [job_id for run in found for job_id in job_ids(run) if job_id.startswith(begun)]
    return []


def keys(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from hpc_gpt.cli.topics import experiment_keys

    return [f"{key}=" for key, _, _ in experiment_keys() if key.startswith(begun)]
