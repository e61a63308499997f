"""The command line of a verb that takes a job script, split into the parts for the verb, for sbatch and for the script.

`[OPTIONS] FILE [ARGS]…`: FILE is the first word that is not an option, and a job script if it begins with `#!`. The
options of the verb and of sbatch come before it, the script's arguments after it. After FILE, an option of the verb is
refused, unless scripts have one of that name (`_OF_SCRIPTS`): passed on to the script, it might queue a job that should
only be shown, or end the script. If the option is also before FILE, the one after it belongs to the script. All words
after a first `--`, which is dropped, belong to the script.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hpc_gpt.cli.option_groups import GroupedCommand
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.secrets import hide_secrets

# In click's context: (file, its arguments, sbatch's options).
META = "hpc_gpt.script"
# The options of a verb that a script takes; all others belong to experiments.
_TAKEN = {
    "--cluster", "--set", "--dry-run", "--script", "--yes", "-y", "--wait", "--max-gpu-hours", "--checkpoints",
    "--json", "--probe", "--keep", "--quick", "--help", "--force",
}  # fmt: skip
# Scripts may have these options of a verb, too: trainers and launchers take the sizes of a model and of a batch, a
# layout, how they train and how long, and programs that sample take --top. Those of sbatch belong to a script, too:
# sbatch itself passes them on.
_OF_SCRIPTS = {
    "--model", "--hidden", "--layers", "--heads", "--vocab", "--seq", "--seq-length", "--micro-batch-size", "--mbs",
    "--global-batch-size", "--gbs", "--gas", "--gpus", "--nodes", "--tensor-model-parallel-size", "--tp", "--dp",
    "--ep", "--cp", "--pp", "--pipeline-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size",
    "--data-parallel-size", "--engine", "--zero-stage", "--recompute", "--offload", "--steps", "--top", "--help",
}  # fmt: skip
# sbatch has these, too, but the verb's own option has a wider meaning.
_OURS = {"--wait", "-W"}


class ScriptCommand(GroupedCommand):
    """A verb that takes an EXPERIMENT or a job script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        parts = None if ctx.resilient_parsing else split(args, self.params)
        if parts is None:
            return super().parse_args(ctx, args)
        ours, for_sbatch, path, after_file = parts
        before_file = {word.partition("=")[0] for word in ours}
        left = [parameter for parameter in self.params if before_file.isdisjoint(parameter.opts)]
        of_verb = {name: parameter for parameter in left for name in parameter.opts if not _may_be_scripts(name)}
        ctx.meta[META] = (
            path,
            tuple(_script_arguments(ctx.command_path, args, after_file, of_verb)),
            tuple(for_sbatch),
        )
        return super().parse_args(ctx, ours)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[ARGS]…"]


def _may_be_scripts(option: str) -> bool:
    from hpc_gpt.core.slurm.directives import options_of

    sbatch = options_of("sbatch")
    of_sbatch = option[2:] in sbatch.kinds if option.startswith("--") else option[1:] in sbatch.letters
    return option in _OF_SCRIPTS or (of_sbatch and option not in _TAKEN)


def _script_arguments(
    verb: str, line: Sequence[str], after_file: Sequence[str], options: Mapping[str, click.Parameter]
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
        if name in options and not equals and not _is_flag(options[name]):
            moved += [left.pop(0) for _ in left[:1]]
    if moved:
        *before, file = line[: len(line) - len(after_file)]
        of_verb = [*before, *moved, file, *for_script, *after_file[end:]]
        of_script = [*before, file, "--", *after_file[:end], *after_file[end + 1 :]]
        first, option, then = (hide_secrets(shlex.join(words)) for words in (of_verb, moved[:1], of_script))
        experiments = any(word.startswith("-") and word.partition("=")[0] not in _TAKEN for word in moved)
        raise ConfigError(
            f"{option} is after {file}, so it would go to the script: nothing was done",
            f"{'leave it out, as a job script runs as it is' if experiments else f'{verb} {first}'}, "
            f"or for the script: {verb} {then}",
        )
    return [*for_script, *after_file[end + 1 :]]


def split(
    line: Sequence[str], parameters: Sequence[click.Parameter]
) -> tuple[list[str], list[str], Path, list[str]] | None:
    """(the verb's options, sbatch's, the script, the script's arguments); None if the line names no job script.

    Raises ConfigError for an option that a job script does not take.
    """
    if not any(may_be_script(word) for word in line):
        return None
    from hpc_gpt.core.slurm.directives import is_job_script, options_of

    sbatch = options_of("sbatch")
    kinds, letters = sbatch
    options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    of_verb = {name: option for option in options for name in option.opts}
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
            if name in _OURS:
                ours.append("--wait")
            elif name in of_verb and name in _TAKEN:
                ours.append(word)
                if not equals and not _is_flag(of_verb[name]) and left:
                    ours.append(left.pop(0))
            elif long in kinds:
                for_sbatch.append(word)
                if kinds[long] == "valued" and not equals and (word.startswith("--") or len(word) == 2) and left:
                    for_sbatch.append(left.pop(0))
            elif name in of_verb:
                refused = refused or name
                if not equals and not _is_flag(of_verb[name]) and left:
                    left.pop(0)
            else:
                for_sbatch.append(word)  # sbatch knows options of plugins
                has_value = left and not equals and not left[0].startswith("-") and not is_job_script(Path(left[0]))
                for_sbatch += [left.pop(0)] if has_value and word.startswith("--") else []
            continue
        path = Path(word)
        if not is_job_script(path):
            return None
        if refused:
            raise ConfigError(f"{refused} needs an experiment; {word} is a job script, which runs as it is",
                              "leave it out; options of sbatch and --set are allowed")  # fmt: skip
        return ours, for_sbatch, path, left
    return None


def _is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False) or getattr(parameter, "count", False))


def may_be_script(word: str) -> bool:
    """Whether a word names a file that begins with `#!`. The check is here, as help must load in 0.15 s."""
    try:
        with open(word, "rb") as file:
            return file.read(2) == b"#!"
    except (OSError, ValueError):
        return False
