"""The command line of a verb that takes a job script, split into the parts for the verb, for sbatch and for the script.

`[OPTIONS] FILE [ARGS]…`: FILE is the first word that is not an option, and a job script if it begins with `#!`. The
options of the verb and of sbatch come before it, the script's arguments after it. After FILE, an option of the verb is
refused, unless scripts have one of that name (`Option.of_scripts`): passed on to the script, it might queue a job that
should only be shown, or end the script. If the option is also before FILE, the one after it belongs to the script. All
words after a first `--`, which is dropped, belong to the script.
"""

import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from hpc_gpt.cli.options import Option
from hpc_gpt.cli.verb import GroupedCommand
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.format import some
from hpc_gpt.core.secrets import hide_secrets

# Options of an experiment that makes several runs, and how several runs of a script are made.
_SEVERAL = dict.fromkeys(
    ("--grid", "--sweep", "--race", "--row"),
    "#SBATCH --array=0-3 starts the script with SLURM_ARRAY_TASK_ID 0 to 3; or an experiment has its program's line as "
    "command.run, with values in [command.values], and [rows]: hpc-gpt help keys command",
)
# In click's context: (file, its arguments, sbatch's options).
SCRIPT_LINE = "hpc_gpt.script"


class ScriptCommand(GroupedCommand):
    """A verb that takes an EXPERIMENT or a job script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        parts = None if ctx.resilient_parsing else split(args, self.params)
        if parts is None:
            return super().parse_args(ctx, args)
        ours, for_sbatch, path, after_file = parts
        before_file = {word.partition("=")[0] for word in ours}
        left = [each for each in self.params if isinstance(each, Option) and before_file.isdisjoint(each.opts)]
        of_verb = {name: option for option in left for name in option.opts if not _may_be_scripts(option, name)}
        ctx.meta[SCRIPT_LINE] = (
            path,
            tuple(_script_arguments(ctx.command_path, args, after_file, of_verb)),
            tuple(for_sbatch),
        )
        return super().parse_args(ctx, ours)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[ARGS]…"]


def _may_be_scripts(option: Option, name: str) -> bool:
    """Whether `name`, after the script, may be the script's own option: also one of sbatch, which sbatch passes on."""
    from hpc_gpt.core.slurm.directives import options_of

    sbatch = options_of("sbatch")
    of_sbatch = name[2:] in sbatch.kinds if name.startswith("--") else name[1:] in sbatch.letters
    return option.of_scripts or (of_sbatch and not option.before_script)


def _script_arguments(
    verb: str, line: Sequence[str], after_file: Sequence[str], options: Mapping[str, Option]
) -> list[str]:
    """The script's arguments: the words after its file, without the first `--`. Raises ConfigError if one of the verb's
    `options` is among the words before that."""
    if "--" in line[: len(line) - len(after_file)]:  # the options ended before the file
        return list(after_file)
    end = after_file.index("--") if "--" in after_file else len(after_file)
    left, moved, for_script = list(after_file[:end]), list[str](), list[str]()
    while left:
        word = left.pop(0)
        name, equals, _ = word.partition("=")
        (moved if name in options else for_script).append(word)
        if name in options and not equals and not options[name].is_flag:
            moved += [left.pop(0) for _ in left[:1]]
    if moved:
        *before, file = line[: len(line) - len(after_file)]
        of_verb = [*before, *moved, file, *for_script, *after_file[end:]]
        of_script = [*before, file, "--", *after_file[:end], *after_file[end + 1 :]]
        first, option, then = (hide_secrets(shlex.join(words)) for words in (of_verb, moved[:1], of_script))
        are_taken = all(
            options[word].before_script for word in (each.partition("=")[0] for each in moved) if word in options
        )
        raise ConfigError(
            f"{option} is after {file}, so it would go to the script: nothing was done",
            f"{f'{verb} {first}' if are_taken else 'leave it out, as a job script runs as it is'}, "
            f"or for the script: {verb} {then}",
        )
    return [*for_script, *after_file[end + 1 :]]


def split(
    line: Sequence[str], parameters: Sequence[click.Parameter]
) -> tuple[list[str], list[str], Path, list[str]] | None:
    """Returns (the verb's options, sbatch's, the script, the script's arguments); None if the line names no job script.

    Raises ConfigError for an option that a job script does not take.
    """
    if not any(map(os.path.isfile, line)):
        return None
    from hpc_gpt.core.slurm.directives import is_job_script, options_of

    sbatch = options_of("sbatch")
    kinds, letters = sbatch
    options = [parameter for parameter in parameters if isinstance(parameter, Option)]
    of_verb = {name: option for option in options for name in (*option.opts, option.sbatch)}
    ours: list[str] = []
    for_sbatch: list[str] = []
    left, refused = list(line), ""
    while left:
        word = left.pop(0)
        if word == "--" and left:
            word = left.pop(0)
        elif word.startswith("-") and len(word) > 1:
            name, equals, _ = word.partition("=") if word.startswith("--") else (word[:2], "", "")
            long = sbatch.named(name[2:]) if name.startswith("--") else letters.get(word[1], "")
            if name in of_verb and of_verb[name].before_script:
                ours.append(of_verb[name].opts[0] if name == of_verb[name].sbatch else word)
                if not equals and not of_verb[name].is_flag and left:
                    ours.append(left.pop(0))
            elif long in kinds:
                for_sbatch.append(word)
                if kinds[long] == "valued" and not equals and (word.startswith("--") or len(word) == 2) and left:
                    for_sbatch.append(left.pop(0))
            elif name in of_verb:
                refused = refused or name
                if not equals and not of_verb[name].is_flag and left:
                    left.pop(0)
            else:
                _check_own_name(name, of_verb)
                for_sbatch.append(word)  # sbatch knows options of plugins
                has_value = left and not equals and not left[0].startswith("-") and not is_job_script(Path(left[0]))
                for_sbatch += [left.pop(0)] if has_value and word.startswith("--") else []
            continue
        path = Path(word)
        if not is_job_script(path):
            _check_pattern(ours, word, left)
            return None
        if refused:
            hint = _SEVERAL.get(refused, "leave it out; options of sbatch and --set are allowed")
            raise ConfigError(f"{refused} needs an experiment; {word} is a job script, which runs as it is", hint)
        return ours, for_sbatch, path, left
    return None


def _check_own_name(name: str, of_verb: Mapping[str, Option]) -> None:
    """Raises ConfigError for an unknown option that is near to one of the verb's that a script takes: sbatch would
    refuse it, and on this machine the run would start."""
    from hpc_gpt.core.tables import close_matches

    if name == "--host":
        raise click.NoSuchOption(name)
    names = [long[2:] for long, option in of_verb.items() if option.before_script and long.startswith("--")]
    if hint := close_matches(name[2:], names, "--"):
        raise ConfigError(f"{name} is an option neither of hpc-gpt nor of Slurm", hint)


def _check_pattern(ours: Sequence[str], word: str, left: Sequence[str]) -> None:
    """Raises ConfigError if the shell has replaced the pattern of --checkpoints by the names that it matches."""
    from hpc_gpt.core.slurm.directives import is_job_script

    if ours[-2:-1] != ["--checkpoints"]:
        return
    words = (ours[-1], word, *left)
    names = list(itertools.takewhile(lambda name: os.path.exists(name) and not is_job_script(Path(name)), words))
    patterns = {re.sub(r"\d+(?=\D*$)", "*", name) for name in names}
    if len(names) > 1 and len(patterns) == 1:
        message = f"the shell has replaced the pattern of --checkpoints by {len(names)} names: {some(names, 3)}"
        raise ConfigError(message, f"quote it: --checkpoints '{patterns.pop()}'")
