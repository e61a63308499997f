"""hpc-gpt completion"""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell's completion script.

    It completes verbs, options, experiments, profiles, runs and keys.

    \b
    eval "$(hpc-gpt completion bash)"             in ~/.bashrc
    eval "$(hpc-gpt completion zsh)"              in ~/.zshrc
    hpc-gpt completion fish | source              in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    from hpc_gpt.cli import group

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(group, {}, "hpc-gpt", "_HPC_GPT_COMPLETE").source())
