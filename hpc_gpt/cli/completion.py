"""hpc-gpt completion"""

import click
from click.shell_completion import get_completion_class

PLACE = 200


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell's completion script.

    It completes verbs, options, experiments, profiles, runs, keys and
    values.

    \b
    eval "$(hpc-gpt completion bash)"             in ~/.bashrc
    eval "$(hpc-gpt completion zsh)"              in ~/.zshrc
    hpc-gpt completion fish | source              in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    group = click.get_current_context().find_root().command
    click.echo(kind(group, {}, "hpc-gpt", "_HPC_GPT_COMPLETE").source())
