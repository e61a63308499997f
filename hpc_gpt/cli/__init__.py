"""The command hpc-gpt. Each verb is a module of this package: it parses, calls and prints."""

import contextlib
import functools
import importlib
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from hpc_gpt import __version__
from hpc_gpt.core.errors import Fault, UserError
from hpc_gpt.core.gone import gone_fault
from hpc_gpt.core.output import OUTPUT, outlive_readers
from hpc_gpt.core.terminal import say

# Sections of `hpc-gpt --help`: (the verbs whose place is below this number, their title).
_GROUPS = ((50, "Before a run"), (120, "A run"), (190, "After a run"), (1000, "Set-up"))


# Options of sbatch that give the GPUs or the tasks per node.
_PER_NODE = ("gpus-per-node", "gpus-per-task", "ntasks-per-node", "ntasks-per-gpu", "gres")
# {option of sbatch that no experiment has: what to do instead}.
_INSTEAD = {
    "array": "--grid KEY=VALUE,VALUE or [rows] make several runs",
    "wrap": "write the command to a file that begins with #!/bin/bash: hpc-gpt submit --nodes=1 FILE",
}
_PROGRAM = re.compile(r"(?:python[\d.]*|torchrun|srun|mpirun|mpiexec|bash|sh|accelerate)")


_VERB = re.compile(r'^@verb\((\d+).*?^def (\w+?)(?:_command)?\(.*?"""(.*?\.)(?:\s|""")', re.M | re.S)


class Verb(NamedTuple):
    """The place of a verb in the list, its module, and the first sentence of its help."""

    place: int
    module: str
    short_help: str


@functools.cache
def verbs() -> dict[str, Verb]:
    """{name: verb}, in the order of a run's life. Read from the text of the modules: listing the verbs imports none.

    A verb is a function below `@verb(PLACE)`. It has the verb's name, or that name with `_command`.
    """
    by_name = {}
    for path in Path(__file__).parent.glob("*.py"):
        for place, name, sentence in _VERB.findall(path.read_text(encoding="utf-8")):
            by_name[name] = Verb(int(place), path.stem, " ".join(sentence.split()))
    return dict(sorted(by_name.items(), key=lambda item: item[1].place))


# {verb: names of other programs for it}.
_OTHER_NAMES = {
    "status": "ls list ps queue info",
    "submit": "run train start launch import adopt",
    "submit --resume RUN": "resume continue",
    "submit --branch RUN@STEP": "branch fork",
    "cancel": "kill",
    "clean RUN if it has ended, hpc-gpt cancel RUN if it runs": "delete remove rm",
    "logs": "log tail",
    "doctor": "check validate",
    "profile list": "clusters profiles",
    "status, or hpc-gpt profile show": "show",
    "init": "new",
    "export": "convert",
    "help models": "models model presets preset",
    "help engines": "engines engine",
    "help causes": "endings ends causes",
    "help keys": "keys config settings set options",
    "submit --sweep": "sweep",
    "submit --race": "race",
    "submit --smoke": "rehearse rehearsal",
    "submit --resume RUN --dry-run": "verify",
}

# They end runs, or delete files.
_HARM = {"cancel", "stop", "requeue", "clean"}


def verb_meant(name: str) -> str:
    """The hint for another program's name of a verb; empty for any other name."""
    meant = next((verb for verb, names in _OTHER_NAMES.items() if name in names.split()), "")
    return f"use hpc-gpt {meant}" if meant else ""


def near_verb(name: str) -> str:
    """The hint for a name that is not a verb; empty if no verb is near. A misspelled name never suggests a verb that
    ends runs or deletes files."""
    from hpc_gpt.core.tables import close_matches

    return verb_meant(name) or close_matches(name, verbs().keys() - _HARM)


class VerbGroup(click.Group):
    """Imports a verb's module only when the verb runs or its own help is shown."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(verbs())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in verbs():
            return None
        module = importlib.import_module(f"hpc_gpt.cli.{verbs()[name].module}")
        command = getattr(module, f"{name}_command", None) or getattr(module, name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] == "version":
            _version(ctx, self.params[0], True)
        if args and args[0] not in verbs() and not args[0].startswith("-"):
            none = f"no verb {args[0]!r}", near_verb(args[0]) or f"verbs: {', '.join(verbs())}"
            raise UserError(*(gone_fault(args[0]) or none))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        first = 0
        for last, title in _GROUPS:
            with formatter.section(title):
                rows = [(name, verb.short_help) for name, verb in verbs().items() if first <= verb.place < last]
                formatter.write_dl([(f"{name:{max(map(len, verbs()))}}", text) for name, text in rows])
            first = last

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        begun = [(name, verb) for name, verb in verbs().items() if name.startswith(incomplete)]
        # The same short help as click gives a shell for its own commands.
        items = [
            CompletionItem(name, help=click.Command(None, help=verb.short_help).get_short_help_str())
            for name, verb in begun
        ]
        return items + click.Command.shell_complete(self, ctx, incomplete)


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
    "--version", "-V", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.option("--host", metavar="NAME", expose_value=False, help="Run the verb on NAME, by ssh; '' is this machine.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback with an error.")
@click.option("--no-color", is_flag=True, expose_value=False, help="No colour; NO_COLOR does the same.")
def group() -> None:
    """Run your sbatch script, or a GPT training, as a chain of jobs on Slurm or on this machine; plan a model's layout
    before it queues; read any program's log.

    \b
    hpc-gpt submit --dry-run train.slurm                             what your script would ask of Slurm
    hpc-gpt submit train.slurm                                       queue it; then status, logs -f, why
    hpc-gpt report logs/                                             the figures of runs and of any logs
    hpc-gpt plan --model 48b --gpus 64 --cluster jean-zay-v100-32g   which layouts fit, and the fastest of them
    hpc-gpt submit demo --cluster local --wait                       a small training of ours, on this machine

    Exit codes: 0 ok, 1 failure, 2 usage, 3 a job failed, 4 Slurm not reachable, 5 no such run, 130 Ctrl-C.
    """


def main(arguments: list[str] | None = None) -> None:
    """Runs the command and exits. A user's mistake is printed as `Error: …`, an empty line and `hint: …`."""
    # A shell can close these with `<&-` and `>&-`. The first file opened would then get their descriptor.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    outlive_readers()
    line = list(sys.argv[1:] if arguments is None else arguments)
    before_dashes = line[: line.index("--")] if "--" in line else line
    debug = "--debug" in before_dashes
    if "--no-color" in before_dashes:
        os.environ["NO_COLOR"] = "1"
    # These two options are accepted anywhere before `--`.
    after_dashes = line[len(before_dashes) :]
    line = [word for word in before_dashes if word not in ("--debug", "--no-color")] + after_dashes
    sys.exit(_run(line, debug))


def _host(line: list[str]) -> str:
    """The host on which the verb is to run, empty for this machine; takes --host off the line. The default is
    HPC_GPT_HOST, else `host` of config.toml. What every shell asks needs none."""
    name = os.environ.get("HPC_GPT_HOST")
    while line and line[0].partition("=")[0] == "--host":
        word = line.pop(0)
        name = word.partition("=")[2] if "=" in word else line.pop(0) if line else ""
    if not line or line[0].startswith("-") or line[0] in ("completion", "help") or "--help" in line:
        return ""
    if name is None:
        from hpc_gpt.core.files import config_dir

        with contextlib.suppress(OSError, ValueError):  # what reads its other keys names the fault
            text = (config_dir() / "config.toml").read_text(encoding="utf-8")
            if "host" in text:  # else it is not parsed here
                import tomllib

                name = str(tomllib.loads(text).get("host", ""))
    return name or ""


def _run(arguments: list[str], debug: bool) -> int:
    line = arguments
    if completes := "_HPC_GPT_COMPLETE" in os.environ:
        importlib.import_module("hpc_gpt.cli.completion")  # registers the class that answers bash
        line = os.environ.get("COMP_WORDS", "").replace(" = ", "=").split()[1:]  # in bash --host=NAME is three words
    try:
        if arguments[:1] == [f"--from-host={__version__.rpartition('.')[0]}"]:
            from hpc_gpt.cli.ssh import watch_connection

            watch_connection()
            del arguments[0]
        elif host := _host(line):
            from hpc_gpt.cli.on_host import OnHost

            there = OnHost(host)
            verb = group.get_command(click.Context(group), arguments[0]) if arguments else None
            return there.complete() if completes else there.run(arguments, ["--debug"] * debug, verb)
        code = group.main(args=arguments, prog_name="hpc-gpt", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as fault:
        click.echo(fault.format_message(), err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except Exception as fault:
        if debug:
            import traceback

            traceback.print_exc()
        _print_error(fault, arguments)
        return _explained(fault, arguments)[0]


def _print_error(fault: Exception, arguments: list[str]) -> None:
    """Prints `Error: …`, an empty line and `hint: …`; of several faults with other hints each with its own below it."""
    _, message, hint = _explained(fault, arguments)
    faults = fault.faults if isinstance(fault, UserError) and hint == fault.hint else (Fault(message, hint),)
    groups = [(key, [one.message for one in group]) for key, group in itertools.groupby(faults, lambda one: one.hint)]
    said = set[str]()
    for place, (of_group, messages) in enumerate(groups):
        say("\n".join(messages), err=True, label="" if place else "Error: ", style="red")
        if of_group and of_group not in said:
            said.add(of_group)
            if len(groups) == 1:
                say("", err=True)
            say(of_group, err=True, label="hint: ", style="cyan")
        if place < len(groups) - 1:
            say("", err=True)
    if "--json" in arguments:
        listed = [{"message": one.message, "hint": one.hint, "keys": one.keys} for one in faults]
        say(json.dumps({"error": message, "hint": hint, "faults": listed}), err=True)


def _explained(fault: Exception, arguments: list[str]) -> tuple[int, str, str]:
    """Returns (exit code, message, hint) for the exception that ended a verb."""
    if isinstance(fault, UserError):
        gone = "the current folder was deleted: cd to a folder that exists"
        return fault.exit_code, str(fault), gone if _is_folder_deleted() else fault.hint
    if isinstance(fault, click.UsageError):
        # click gives no context for an option without its value.
        verb = [word for word in arguments[:1] if word in verbs()]
        path = fault.ctx.command_path if fault.ctx else " ".join(["hpc-gpt", *verb])
        if isinstance(fault, click.BadParameter) and (variable := _variable_of(fault)):
            return (
                2,
                f"Invalid value of {variable}={os.environ[variable]}: {fault.message}",
                f"correct it, or unset {variable}",
            )
        if _has_option(fault, "--dry-run") and (of_program := _program_in(arguments)):
            return 2, *of_program
        option = fault.option_name if isinstance(fault, click.NoSuchOption) else ""
        if option and _has_option(fault, "--dry-run") and (missing := _missing_script(arguments)) is not None:
            return 2, str(missing), missing.hint
        if option == "--host" and verb:
            return 2, "--host is after the verb", _host_first(arguments)
        if of_gone := gone_fault(f"{path.removeprefix('hpc-gpt ')} {option}"):
            return 2, *of_gone
        if isinstance(fault, click.NoSuchOption) and (keys := _keys_meant(fault)):
            hint = f"use --set {' or '.join(f'{key}=VALUE' for key in keys)}"
            return 2, f"No such option {fault.option_name!r}.", hint
        if isinstance(fault, click.NoSuchOption) and (of_sbatch := _as_sbatch(fault, arguments)):
            return 2, *of_sbatch
        if fault.message.startswith("Got unexpected extra argument") and _has_option(fault, "--set"):
            from hpc_gpt.core.settings.experiment_file import value_hint

            left = [word for word in arguments if word in fault.message]
            return 2, fault.format_message(), value_hint(left) or f"{path} --help"
        return 2, fault.format_message(), f"{path} --help"
    if isinstance(fault, click.ClickException):
        return 1, fault.format_message(), ""
    if isinstance(fault, FileNotFoundError) and _is_folder_deleted():
        return 1, "the current folder was deleted", "cd to a folder that exists"
    if isinstance(fault, OSError):
        where = f"{fault.filename}: " if fault.filename else ""
        hint = "--debug shows where" if fault.filename not in (None, OUTPUT) else ""
        return 1, f"{where}{fault.strerror or fault}", hint
    return 1, f"{type(fault).__name__}: {fault}", "this is a bug in hpc-gpt; --debug shows where"


def _missing_script(arguments: list[str]) -> UserError | None:
    """The fault of a line that names a job script which is not there: all words after it are the script's own."""
    from hpc_gpt.core.settings.experiment_file import SCRIPT_SUFFIXES, find_experiment

    for word in arguments[1:]:
        if Path(word).suffix in SCRIPT_SUFFIXES and not Path(word).exists():
            try:
                find_experiment(word)
            except UserError as fault:
                return fault
    return None


def _host_first(arguments: list[str]) -> str:
    """The hint with the line that has --host before the verb."""
    import shlex

    from hpc_gpt.core.secrets import hide_secrets

    at = next(at for at, word in enumerate(arguments) if word.partition("=")[0] == "--host")
    end = at + (1 if "=" in arguments[at] else 2)
    line = shlex.join(["hpc-gpt", *arguments[at:end], *arguments[:at], *arguments[end:]])
    return f"--host comes before the verb: {hide_secrets(line)}"


def _program_in(arguments: list[str]) -> tuple[str, str] | None:
    """Returns (message, hint) for a line that names a program in place of an experiment; None for any other."""
    at = next((at for at, word in enumerate(arguments) if _PROGRAM.fullmatch(Path(word).name)), None)
    if at is None or Path(arguments[at]).is_file():
        return None
    import shlex

    from hpc_gpt.core.secrets import hide_secrets

    line = hide_secrets(shlex.join(arguments[at:]))
    return (
        f"{arguments[at]} is a program: {arguments[0]} takes a job script or an experiment",
        f"write these two lines to train.slurm, and hpc-gpt submit --nodes=1 train.slurm; or the second as run under "
        f"[command] of an experiment\n#!/bin/bash\n{line}",
    )


def _variable_of(fault: click.BadParameter) -> str:
    """The environment variable that gave an option its bad value; empty if the command line did."""
    ctx, parameter = fault.ctx, fault.param
    if ctx is None or parameter is None or parameter.name is None:
        return ""
    if ctx.get_parameter_source(parameter.name) is not click.core.ParameterSource.ENVIRONMENT:
        return ""
    return str(parameter.envvar)


def _is_folder_deleted() -> bool:
    """Whether the current folder was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _has_option(fault: click.UsageError, name: str) -> bool:
    return fault.ctx is not None and any(name in parameter.opts for parameter in fault.ctx.command.params)


def _keys_meant(fault: click.NoSuchOption) -> list[str]:
    """The keys of an experiment that an unknown option may mean, by our name or another program's; none if the verb has
    no --set."""
    if not _has_option(fault, "--set"):
        return []
    from hpc_gpt.core.keys import keys_meant
    from hpc_gpt.core.settings.experiment import Experiment
    from hpc_gpt.core.tables import keys_called

    name = fault.option_name.lstrip("-").replace("-", "_")
    return keys_meant(Experiment, name) or keys_called(fault.option_name)


def _as_sbatch(fault: click.NoSuchOption, arguments: list[str]) -> tuple[str, str] | None:
    """Returns (message, hint) for an unknown option that sbatch has; None for any other, or if the verb has no
    --gpus."""
    if not _has_option(fault, "--gpus"):
        return None
    import shlex

    from hpc_gpt.core.secrets import hide_secrets
    from hpc_gpt.core.slurm.directives import options_of, why_not_added

    name, sbatch = fault.option_name, options_of("sbatch")
    long = sbatch.named(name[2:]) if name.startswith("--") else sbatch.letters.get(name[1:], "")
    if long not in sbatch.kinds:
        return None
    at = next((place for place, word in enumerate(arguments) if word.partition("=")[0] == name), len(arguments) - 1)
    value = arguments[at].partition("=")[2] or next(iter(arguments[at + 1 : at + 2]), "")
    if long in _PER_NODE:
        nodes = re.search(r"(?:^| )(?:-N ?|--nodes[= ])(\d+)", " ".join(arguments))
        count = re.search(r"(\d+)$", value)
        total = int(count[1]) * (int(nodes[1]) if nodes else 1) if count and long != "gpus-per-task" else None
        example = f"-G {total}" if total else "-G 8"
        return (
            f"{name} is sbatch's: hpc-gpt takes the GPUs in total, and the cluster profile says how many a node has",
            f"use {example}{f', {total} GPUs in all' if total else ''}; gpus_per_node in the profile is a node's",
        )
    if (owned := why_not_added(long)) or not _has_option(fault, "--account"):
        hint = _INSTEAD.get(long, "leave it out")
        return f"{name} is sbatch's: {owned or 'a plan requests no job'}", hint
    option = f"--{long}" + (f"={value}" if sbatch.kinds[long] == "valued" and value else "")
    return f"{name} is sbatch's", hide_secrets(f"use {shlex.join(['--set', f'job.sbatch={json.dumps([option])}'])}")
