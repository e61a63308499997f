"""Words that the shell offers after TAB: experiments, profiles, runs, models, files.

Many verbs import this module, and `--help` and TAB must be fast, so each function imports what it needs. A function
that completes never raises.
"""

import contextlib
import os
import re
from collections.abc import Callable
from glob import escape, glob
from pathlib import Path

import click
from click.shell_completion import CompletionItem


def experiments(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Names under experiments/, and the TOML files, job scripts and folders of the current folder."""
    from hpc_gpt.core.settings.experiment_file import list_experiments
    from hpc_gpt.core.slurm.directives import is_job_script

    names = [name for name in list_experiments() if name.startswith(begun)]
    return _or_files(begun, names + _paths(begun, lambda name: name.endswith(".toml") or is_job_script(Path(name))))


def _paths(begun: str, is_wanted: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Lists the files that are wanted; once a path has begun, folders too, each with a / at its end. The shell
    itself completes names that need quoting."""
    paths = sorted(name for name in glob(f"{escape(begun)}*") if re.fullmatch(r"[\w./+@-]+", name))
    folders = {name for name in paths if os.path.isdir(name)}
    shown = [name for name in paths if (begun if name in folders else is_wanted(name))]
    return [f"{name}/" if name in folders else name for name in shown]


def _or_files(begun: str, names: list[str]) -> list[CompletionItem]:
    """The names, or the paths that the shell finds if there is no name."""
    # click looks at the first item to tell strings from items, so all are items. The file item comes first: bash's
    # script drops what came before it, and completes files if nothing follows.
    return [CompletionItem(begun, type="file"), *map(CompletionItem, names)]


def reported(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Runs, packaged sweeps, and files."""
    from hpc_gpt.core.files import experiments_dir
    from hpc_gpt.core.settings.experiment_file import SWEEP_FILE, list_experiments

    names = [name for name in list_experiments() if name.startswith(begun)]
    sweeps = [name for name in names if (experiments_dir() / name / SWEEP_FILE).is_file()]
    return _or_files(begun, runs(ctx, parameter, begun) + sweeps)


def runs_and_logs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Runs, and files."""
    return _or_files(begun, runs(ctx, parameter, begun))


def profiles(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Profiles by name."""
    from hpc_gpt.core.settings.cluster import list_profiles

    return [name for name in list_profiles() if name.startswith(begun)]


def profiles_and_files(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Profiles by name and by file."""
    return profiles(ctx, parameter, begun) + _paths(begun, lambda name: name.endswith(".toml"))


def runs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Run ids, newest first, then sweep ids, then experiments; job ids if none of these starts with `begun`."""
    from hpc_gpt.core.files import logs_dir
    from hpc_gpt.core.runs.find_runs import list_runs
    from hpc_gpt.core.runs.run_folder import job_ids

    with contextlib.suppress(OSError, ValueError):
        newest_first = list_runs(logs_dir())[::-1]
        names = [run.run_id for run in newest_first] + [run.sweep_id for run in newest_first if run.sweep_id]
        names += [run.path.parent.name for run in newest_first]
        ids = [name for name in dict.fromkeys(names) if name.startswith(begun)]
        return ids or [job_id for run in newest_first for job_id in job_ids(run) if job_id.startswith(begun)]
    return []


def models(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Models by name, and the config.json of others."""
    from hpc_gpt.core.settings.presets import PRESETS

    named = [name for name in PRESETS if name.startswith(begun)]
    return named + _paths(begun, lambda name: name.endswith("config.json"))


def files(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Files, as the shell itself finds them."""
    return _or_files(begun, [])
