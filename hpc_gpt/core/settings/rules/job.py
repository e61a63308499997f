"""The rules of the tables around the training: [notify] and [track]."""

from collections.abc import Iterator

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import Fault
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.key_rules import number_faults
from hpc_gpt.core.settings.program_text import command_faults, texts_of
from hpc_gpt.core.settings.services import Notify, Track

_DEFAULT = "leave it out for its default"


def service_faults(experiment: Experiment, profile: ClusterProfile) -> Iterator[Fault]:
    """The faults of the two tables."""
    if experiment.notify != Notify():
        yield from _notify_faults(experiment.notify)
    command = engine_named(experiment.engine.name).program_of(experiment.command)
    if "saved" in experiment.notify.on and command is not None and command.checkpoints is None:
        yield Fault(
            "notify.on has saved, but nothing says where the program's checkpoints are",
            'set command.checkpoints, such as "{run}/step-*"',
            keys=("notify", "command.checkpoints"),
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
