"""The rules of the tables around the training: [notify], [after] and [track]."""

from collections.abc import Iterator

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import Fault
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.key_rules import number_faults
from hpc_gpt.core.settings.program_text import brace_faults, command_faults, texts_of
from hpc_gpt.core.settings.services import AFTER_BRACES, After, Notify, Track

_DEFAULT = "leave it out for its default"


def service_faults(experiment: Experiment, profile: ClusterProfile) -> Iterator[Fault]:
    """The faults of the three tables."""
    if experiment.notify != Notify():
        yield from _notify_faults(experiment.notify)
    if experiment.after != After():
        yield from _after_faults(experiment.after)
    command = engine_named(experiment.engine.name).program_of(experiment.command)
    if experiment.after.is_asked and command is not None and command.checkpoints is None:
        yield Fault(
            "[after] follows checkpoints, but nothing says where the program's are",
            'set command.checkpoints, such as "{run}/step-*"',
            keys=("after", "command.checkpoints"),
        )
    if experiment.track.is_asked:
        yield from _track_faults(experiment.track)


def _notify_faults(notify: Notify) -> Iterator[Fault]:
    """Each fault of [notify]."""
    if notify.command is None:
        yield Fault("[notify] has no command that gets the events", 'set notify.command = "…", or leave the table out')
        return
    yield from _command_faults("notify.command", notify.command)
    yield from number_faults("notify", notify, _DEFAULT)


def _after_faults(after: After) -> Iterator[Fault]:
    """Each fault of [after]."""
    if after.run is None:
        yield Fault("[after] has no run, the command of its job", 'set after.run = "…", or leave the table out')
        return
    yield from _command_faults("after.run", after.run)
    for where, text in texts_of("after.run", after.run).items():
        yield from brace_faults(where, text, AFTER_BRACES)
        if "{export}" in text.replace("{{export}}", "") and not after.export:
            yield Fault(f"{where} has {{export}}, but after.export is false", "set after.export = true")
    yield from command_faults("after.sbatch", after.sbatch)
    yield from number_faults("after", after, _DEFAULT)


def _track_faults(track: Track) -> Iterator[Fault]:
    """Each fault of [track]."""
    for name, what in (("wandb", "project"), ("mlflow", "experiment")):
        value = getattr(track, name)
        if value is not None and value.strip().lower() in ("", "true", "false", "yes", "no", "on", "off"):
            found = f"{value!r}" if value.strip() else "empty"
            yield Fault(f"track.{name} is {found}, but must name the {what} to send to", f'for example {name} = "gpt"')


def _command_faults(where: str, command: str | tuple[str, ...]) -> Iterator[Fault]:
    texts = texts_of(where, command)
    if not any(text.strip() for text in list(texts.values())[:1]):
        yield Fault(f"{where} is empty", "say what is to run, or leave the table out")
    yield from command_faults(where, command)
