"""Words that the shell offers after TAB: experiments, profiles, runs, keys, values, files.

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


def states(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The states of runs."""
    from hpc_gpt.core.ends.failures import ENDED

    return [state for state in ENDED if state.startswith(begun)]


def columns(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Sets of columns, then keys of a record."""
    from hpc_gpt.report.published_tables import PUBLISHED_TABLES

    sets = [name for name in ("auto", "all", "usual", "published", *PUBLISHED_TABLES) if name.startswith(begun)]
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


def keys_and_values(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Keys of an experiment, each with `=` after it and its meaning; after KEY= its values, or files."""
    from hpc_gpt.core.keys import keys_of
    from hpc_gpt.core.settings.experiment import Experiment

    name, equals, value = begun.partition("=")
    if equals:
        done, comma, last = value.rpartition(",") if parameter.name == "grid" else ("", "", value)
        return [CompletionItem(f"{name}={done}{comma}{text}") for text in _values_of(name, last)]
    return [CompletionItem(f"{key.name}=", help=key.means) for key in keys_of(Experiment) if key.name.startswith(begun)]


# Keys that name a file or a folder; the last part of data.mix.NAME.path is one.
_FILES = ("data.path", "model.hf", "train.init", "command.workdir", "command.script")


def _values_of(key: str, begun: str) -> list[str]:
    """The values of a key with a fixed choice, or files if the key names a file."""
    from hpc_gpt.core.keys import keys_of
    from hpc_gpt.core.settings.experiment import Experiment
    from hpc_gpt.core.settings.presets import PRESETS

    if key in _FILES or re.fullmatch(r"data\.mix\.[^.]+\.path", key):
        return _paths(begun)
    if key == "data.tokenizer":
        return _tokenizers(begun)
    described = next((candidate for candidate in keys_of(Experiment) if candidate.name == key), None)
    if key == "model.preset":
        choices = tuple(PRESETS)
    elif described is None or described.type.startswith("list of"):
        choices = ()
    else:
        choices = ("true", "false") if described.type == "true | false" else described.choices
    return [value for value in choices if value.startswith(begun)]


def values(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The values of an option that sets a key with a fixed choice; for --model files, too."""
    key = str(parameter.name).replace("__", ".")
    files = _paths(begun, lambda name: name.endswith("config.json")) if key == "model.preset" else []
    return _values_of(key, begun) + files


def until(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The measures of --until, with `=` after them."""
    return [f"{name}=" for name in ("tokens", "steps", "loss") if name.startswith(begun)]


def sources(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """`stdlib`, Python's own sources, and files."""
    return _or_files(begun, [name for name in ("stdlib",) if name.startswith(begun)] + _paths(begun))


def tokenizers(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Tokenizers by name, and their files."""
    return _or_files(begun, _tokenizers(begun))


def _tokenizers(begun: str) -> list[str]:
    names = [name for name in ("byte", "char", "tiktoken:") if name.startswith(begun)]
    return names + _paths(begun, lambda name: name.endswith(".json"))
