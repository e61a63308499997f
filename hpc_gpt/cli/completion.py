"""hpc-gpt completion"""

import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from hpc_gpt.cli.verb import verb


@add_completion_class
class WholeWords(BashComplete):
    """Completion for bash, with words as a command gets them: bash itself splits at `=` and `:`, so that
    `--cluster=NAME` has three words. No space follows `FOLDER/`."""

    name = "bash"
    source_template = """\
%(complete_func)s() {
    local type value
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                COMPREPLY+=("$value")
                case $value in */) compopt -o nospace ;; esac ;;
        esac
    done < <(env COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
    # The part of the last word that bash keeps as it is.
    _before = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ.get("COMP_LINE", "")
        if not line:  # the user's own completion function, as for another machine, sets no COMP_LINE
            return super().get_completion_args()
        args = split_arg_string(line)[1:]
        last = args.pop() if args and not line[-1].isspace() else ""
        breaks = [char for char in "=:" if char in os.environ.get("COMP_WORDBREAKS", "=:")]
        self._before = last[: max((last.rfind(char) + 1 for char in breaks), default=0)]
        return args, last

    def format_completion(self, item: CompletionItem) -> str:
        of_option = self._before.partition("=")[2] if self._before.startswith("--") else self._before
        value = str(item.value).removeprefix(of_option) if item.type == "plain" else item.value
        return f"{item.type},{value}"


@verb(200)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell's completion script.

    It completes verbs, options, experiments, job scripts, profiles, runs,
    models and files.

    \b
    eval "$(hpc-gpt completion bash)"             in ~/.bashrc
    eval "$(hpc-gpt completion zsh)"              in ~/.zshrc
    hpc-gpt completion fish | source              in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    group = click.get_current_context().find_root().command
    click.echo(kind(group, {}, "hpc-gpt", "_HPC_GPT_COMPLETE").source())
