"""The command hpc-gpt. Verbs parse, call and print. A verb's module is imported when it runs or shows its help."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from hpc_gpt import __version__
from hpc_gpt.errors import UserError


class Verb(NamedTuple):
    """A verb's module, and the first sentence of its help, so that verbs are listed without importing them."""

    module: str
    short_help: str


# In the order of a run's life. The command has the verb's name in its module, or the name with `_command`.
VERBS = {
    "plan": Verb(
        "plan", "Find the layouts that fit in memory and predict how fast each is, before anything is queued."
    ),
    "doctor": Verb("doctor", "Check what could go wrong before EXPERIMENT is submitted."),
    "render": Verb("render", "Print the job script of EXPERIMENT."),
    "rehearse": Verb("rehearse", "Run the whole life of EXPERIMENT's job on this machine, before it waits in a queue."),
    "submit": Verb("submit", "Submit EXPERIMENT to Slurm, or start it here."),
    "status": Verb("status", "Show the state of runs."),
    "logs": Verb("status", "Print RUN's log."),
    "stop": Verb("control", "Ask runs to save a checkpoint and end."),
    "save": Verb("control", "Ask runs to save a checkpoint now and continue."),
    "requeue": Verb("control", "Ask runs to save a checkpoint and go back to the queue."),
    "cancel": Verb("control", "Cancel runs, queued or running."),
    "report": Verb(
        "report",
        "Print the records of runs and of any program's logs: step time, TFLOPs, memory, loss, how they ended.",
    ),
    "compare": Verb("compare", "Say whether one run is faster than another, and how their settings differ."),
    "bench": Verb("bench", "Train EXPERIMENT on random tokens on this machine, and print its speed and memory."),
    "why": Verb("why", "Say why RUN ended: the first cause over all ranks."),
    "verify": Verb("compare", "Say what has changed since RUN was submitted."),
    "export": Verb("data", "Write the weights of RUN for transformers."),
    "data": Verb("data", "Make a token file from SOURCE."),
    "profile": Verb("profile", "List, show and detect cluster profiles."),
    "completion": Verb("completion", "Print a shell's completion script."),
    "help": Verb(
        "topics",
        "List the keys of an experiment and of a record, the engines, a template's variables, how runs end; how to "
        "write a sweep and published rows.",
    ),
}


class VerbGroup(click.Group):
    """Imports a verb's module only when the verb runs or its own help is shown."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f"hpc_gpt.cli.{VERBS[name].module}")
        command = getattr(module, f"{name}_command", None) or getattr(module, name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from hpc_gpt.tables import close_matches

            hint = close_matches(args[0], VERBS) or f"verbs: {', '.join(VERBS)}"
            raise UserError(f"no verb {args[0]!r}", hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        room = formatter.width - 6 - max(map(len, VERBS))  # as click's own
        with formatter.section("Commands"):
            formatter.write_dl([(name, _shortened(verb, room)) for name, verb in VERBS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        begun = [(name, verb) for name, verb in VERBS.items() if name.startswith(incomplete)]
        items = [CompletionItem(name, help=_shortened(verb)) for name, verb in begun]
        return items + click.Command.shell_complete(self, ctx, incomplete)


def _shortened(verb: Verb, room: int = 45) -> str:
    """The short help cut to `room` columns as click cuts it; click gives a shell 45."""
    return click.Command(None, help=verb.short_help).get_short_help_str(room)


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"hpc-gpt {__version__}")
        ctx.exit()


@click.group(
    cls=VerbGroup,
    name="hpc-gpt",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback with an error.")
@click.option("--no-color", is_flag=True, expose_value=False, help="No colour; NO_COLOR does the same.")
def group() -> None:
    """Train GPTs with tensor, pipeline and data parallelism on Slurm clusters, or on this machine.

    \b
    hpc-gpt plan --model 48b --gpus 64 --cluster jean-zay-v100-32g   which layouts fit, and the fastest of them
    hpc-gpt submit demo --cluster local --wait                       a small run, on this machine
    hpc-gpt submit --gpus 64 --pp 16                                 the default experiment, on your cluster
    hpc-gpt render demo > job.sh                                     a script for plain sbatch
    hpc-gpt report logs/                                             what the runs achieved

    Exit codes: 0 ok, 1 failure, 2 usage, 3 a job failed, 4 Slurm not reachable, 5 no such run, 130 Ctrl-C.
    """


def main(arguments: list[str] | None = None) -> None:
    """Runs the command and exits. A user's mistake is printed as `Error: …`, an empty line and `hint: …`."""
    # A shell can close these with `<&-` and `>&-`. The first file opened would then get their descriptor.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given[: given.index("--")] if "--" in given else given
    debug = "--debug" in own
    if "--no-color" in own:
        os.environ["NO_COLOR"] = "1"
    # These two options are accepted anywhere on the command line.
    given = [word for word in own if word not in ("--debug", "--no-color")] + given[len(own) :]
    sys.exit(_run(given, debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        code = group.main(args=arguments, prog_name="hpc-gpt", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as fault:
        if debug:
            raise
        _complain(str(fault), fault.hint)
        return fault.exit_code
    except click.exceptions.NoArgsIsHelpError as fault:
        click.echo(fault.format_message(), err=True)
        return 2
    except click.UsageError as fault:
        path = fault.ctx.command_path if fault.ctx else "hpc-gpt"
        message, hint = fault.format_message(), f"{path} --help"
        if isinstance(fault, click.NoSuchOption) and (keys := _keys_meant(fault)):
            message = f"No such option {fault.option_name!r}."
            hint = f"use --set {' or '.join(f'{key}=VALUE' for key in keys)}"
        _complain(message, hint)
        return 2
    except click.ClickException as fault:
        _complain(fault.format_message(), "")
        return 1
    except (click.Abort, KeyboardInterrupt):
        if sys.stderr.isatty():
            click.echo("", err=True)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe, as `| head` does. Otherwise Python prints a second error when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as fault:
        if debug:
            raise
        where = f"{fault.filename}: " if fault.filename else ""
        _complain(f"{where}{fault.strerror or fault}", "--debug shows where")
        return 1
    except Exception as fault:
        if debug:
            raise
        _complain(f"{type(fault).__name__}: {fault}", "this is a bug in hpc-gpt; --debug shows where")
        return 1


def _keys_meant(fault: click.NoSuchOption) -> list[str]:
    """The experiment's keys that an unknown option may mean; none if the verb has no --set."""
    if fault.ctx is None or not any("--set" in parameter.opts for parameter in fault.ctx.command.params):
        return []
    from hpc_gpt.settings.experiment import experiment_keys

    name = fault.option_name.lstrip("-").replace("-", "_")
    return [key for key, _, _ in experiment_keys() if name in (key, key.rpartition(".")[2])]


def _complain(message: str, hint: str) -> None:
    click.echo(f"Error: {message}", err=True)
    if hint:
        click.echo(f"\nhint: {hint}", err=True)
