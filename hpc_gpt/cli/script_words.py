"""The command line of a verb that takes a job script: which words are the verb's, sbatch's, and the script's.

`[OPTIONS] FILE [ARGS…]`: FILE is the first word that is no option, and a job script if it begins with `#!`. Before it
stand the verb's options and sbatch's; after it the script's own words.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpc_gpt.cli.option_groups import GroupedCommand
from hpc_gpt.errors import ConfigError

# In click's context: (file, its words, sbatch's words).
META = "hpc_gpt.script"
# What a script takes of a verb's options; all others are of an experiment.
_TAKEN = {
    "--cluster", "--set", "--dry-run", "--script", "--yes", "-y", "--wait", "--max-gpu-hours", "--checkpoints",
    "--here", "--json", "--probe", "--keep", "--quick", "--help", "--force",
}  # fmt: skip
# sbatch has these, too, but a verb's own mean more here.
_OURS = {"--wait", "-W"}


class ScriptCommand(GroupedCommand):
    """A verb that takes an EXPERIMENT or a job script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        found = None if ctx.resilient_parsing else split(args, self.params)
        if found is None:
            return super().parse_args(ctx, args)
        ours, asked, path, words = found
        ctx.meta[META] = (path, tuple(words), tuple(asked))
        return super().parse_args(ctx, ours)


def split(
    words: Sequence[str], parameters: Sequence[click.Parameter]
) -> tuple[list[str], list[str], Path, list[str]] | None:
    """(the verb's words, sbatch's, the script, the script's words); None if the line names no job script.

    Raises ConfigError for an option that a job script does not take.
    """
    if not any(_may_be_script(word) for word in words):
        return None
    from hpc_gpt.program.job_script import is_job_script
    from hpc_gpt.slurm.directives import options_of

    known = options_of("sbatch")
    kinds, letters = known
    own = {name: each for each in parameters if isinstance(each, click.Option) for name in each.opts}
    ours: list[str] = []
    asked: list[str] = []
    left, refused = list(words), ""
    while left:
        word = left.pop(0)
        if word == "--" and left:
            word = left.pop(0)
        elif word.startswith("-") and len(word) > 1:
            name, equals, _ = word.partition("=") if word.startswith("--") else (word[:2], "", "")
            long = known.named(name[2:]) if name.startswith("--") else letters.get(word[1], "")
            if name in _OURS:
                ours.append("--wait")
            elif name in own and name in _TAKEN:
                ours.append(word)
                if not equals and not _is_flag(own[name]) and left:
                    ours.append(left.pop(0))
            elif long in kinds:
                asked.append(word)
                if kinds[long] == "valued" and not equals and (word.startswith("--") or len(word) == 2) and left:
                    asked.append(left.pop(0))
            elif name in own:
                refused = refused or name
                if not equals and not _is_flag(own[name]) and left:
                    left.pop(0)
            else:
                asked.append(word)  # sbatch knows options of plugins
                has_value = left and not equals and not left[0].startswith("-") and not is_job_script(Path(left[0]))
                asked += [left.pop(0)] if has_value and word.startswith("--") else []
            continue
        path = Path(word)
        if not is_job_script(path):
            return None
        if refused:
            raise ConfigError(f"{refused} is of an experiment, and {word} is a job script, which runs as it is",
                              "leave it out; options of sbatch and --set are taken")  # fmt: skip
        return ours, asked, path, left
    return None


def _is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False) or getattr(parameter, "count", False))


def _may_be_script(word: str) -> bool:
    """Whether a word names a file that begins with `#!`: looked at here, as help must load in 0.15 s."""
    try:
        with open(word, "rb") as file:
            return file.read(2) == b"#!"
    except (OSError, ValueError):
        return False
