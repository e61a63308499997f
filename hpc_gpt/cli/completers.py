"""What the shell offers after TAB: experiments, profiles, runs, keys, values.

Many verbs import this module, and `--help` and TAB must be fast, so each function imports what it needs. A function
that completes never raises.
"""

import contextlib
import re
from glob import escape, glob

import click
from click.shell_completion import CompletionItem


def experiments(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Names under experiments/, and the TOML files and folders of the current folder."""
    from hpc_gpt.core.settings.experiment_file import list_experiments

    names = [name for name in list_experiments() if name.startswith(begun)]
    # The shell completes names that need quoting by itself.
    names += sorted(name for name in glob(f"{escape(begun)}*.toml") if re.fullmatch(r"[\w./+-]+", name))
    return _or_files(begun, names)


def _or_files(begun: str, names: list[str]) -> list[CompletionItem]:
    """The names, or the paths that the shell finds if there is no name."""
    # click looks at the first item to tell strings from items, so all are items. The file item comes first: bash's
    # script drops what came before it, and completes files if nothing follows.
    return [CompletionItem(begun, type="file"), *map(CompletionItem, names)]


def reported(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Runs, the sweeps that ship, and files."""
    from hpc_gpt.core.files import experiments_dir
    from hpc_gpt.core.settings.experiment_file import SWEEP_FILE, list_experiments

    names = [name for name in list_experiments() if name.startswith(begun)]
    sweeps = [name for name in names if (experiments_dir() / name / SWEEP_FILE).is_file()]
    return _or_files(begun, runs(ctx, parameter, begun) + sweeps)


def runs_and_logs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Runs, and files."""
    return _or_files(begun, runs(ctx, parameter, begun))


def columns(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Sets of columns, then keys of a record."""
    from hpc_gpt.reader.report.published_tables import PUBLISHED_TABLES

    sets = [name for name in ("auto", "usual", "published", *PUBLISHED_TABLES) if name.startswith(begun)]
    return sets + record_keys(ctx, parameter, begun)


def record_keys(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Keys of a record, after the keys and commas already typed."""
    from hpc_gpt.core.runs.record import RECORD_KEYS

    done, comma, last = begun.rpartition(",")
    minus = "-" if last.startswith("-") else ""
    return [f"{done}{comma}{minus}{key}" for key in RECORD_KEYS if key.startswith(last.removeprefix("-"))]


def rows(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The possible rows of the EXPERIMENT on the line, else of the default experiment."""
    from hpc_gpt.core.settings.experiment_file import DEFAULT_EXPERIMENT, find_sweep

    with contextlib.suppress(OSError, ValueError):
        # While an option still lacks its value, click leaves the arguments in ctx.args.
        experiment = ctx.params.get("experiment") or next(iter(ctx.args), DEFAULT_EXPERIMENT)
        sweep = find_sweep(experiment)
        return [row.name for row in sweep.possible if row.name.startswith(begun)] if sweep is not None else []
    return []


def profiles(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from hpc_gpt.core.settings.cluster import list_profiles

    return [name for name in list_profiles() if name.startswith(begun)]


def runs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Run ids, newest first, then sweep ids, then experiments; job ids if none of these starts with `begun`."""
    from hpc_gpt.core.files import logs_dir
    from hpc_gpt.core.runs.find_runs import list_runs
    from hpc_gpt.core.runs.run_folder import job_ids

    with contextlib.suppress(OSError, ValueError):
        found = list_runs(logs_dir())[::-1]
        names = [run.run_id for run in found] + [run.sweep_id for run in found if run.sweep_id]
        names += [run.path.parent.name for run in found]
        ids = [name for name in dict.fromkeys(names) if name.startswith(begun)]
        return ids or [job_id for run in found for job_id in job_ids(run) if job_id.startswith(begun)]
    return []


def complete_keys(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Keys of an experiment, each with `=` after it, and what it means."""
    from hpc_gpt.core.keys import keys_of
    from hpc_gpt.core.settings.experiment import Experiment

    return [CompletionItem(f"{key.name}=", help=key.means) for key in keys_of(Experiment) if key.name.startswith(begun)]


def values(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The values of an option that sets a key with a choice of them."""
    from hpc_gpt.core.keys import choices_of
    from hpc_gpt.core.settings.experiment import Experiment
    from hpc_gpt.core.settings.presets import PRESETS

    key = str(parameter.name).replace("__", ".")
    found = tuple(PRESETS) if key == "model.preset" else choices_of(Experiment, key)
    return [value for value in found if value.startswith(begun)]


def complete_engines(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Engines, after those and commas already typed."""
    from hpc_gpt.core.settings.services import ENGINE_NAMES

    done, comma, last = begun.rpartition(",")
    return [f"{done}{comma}{name}" for name in ENGINE_NAMES if name.startswith(last)]
