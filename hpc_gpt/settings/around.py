"""What is to happen around a run: `[notify]` and `[track]`. Without its table nothing does.

No key of them decides weights or speed, so none is in `config_hash`, and each may change when a run resumes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from hpc_gpt.errors import raise_faults
from hpc_gpt.settings.key_rules import key, key_rules
from hpc_gpt.settings.program_text import text_faults, texts_of

Event = Literal["first_step", "ended", "failed", "retried", "stopped"]


@dataclass(frozen=True)
class Notify:
    """`[notify]`: a command that gets the events of the run, each as a line of JSON on its standard input."""

    command: str | tuple[str, ...] | None = key(None, resume="free", decides="nothing", added=True)
    'A line for bash, or a list that is executed as it is; for example "mail -s GPT me@example.org".'
    on: tuple[Event, ...] = key(("ended", "failed", "retried"), resume="free", decides="nothing", added=True)
    "The events that it gets: first_step, ended, failed, retried, stopped."
    timeout_s: float = key(20.0, resume="free", decides="nothing", added=True, above=0)
    "Seconds after which it is killed; for example 60."

    @property
    def is_asked(self) -> bool:
        return self.command is not None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command as a list; of a line for bash, bash's."""
        if isinstance(self.command, str):
            return "bash", "-c", self.command
        return self.command or ()


@dataclass(frozen=True)
class Track:
    """`[track]`: curves of the run in other programs while it trains."""

    tensorboard: bool = key(False, resume="free", decides="nothing", added=True)
    "TensorBoard's event files are written to tensorboard/ of the run."
    wandb: str | None = key(None, resume="free", decides="nothing", added=True)
    'A project of Weights & Biases to send to, as its own environment variables say; for example "gpt".'


# {name of the table in an experiment: the table without which nothing happens}
AROUND: dict[str, Any] = {"notify": Notify(), "track": Track()}


def changed_keys(table: Notify | Track) -> dict[str, Any]:
    """The keys of a table that do not have their defaults."""
    return {entry.name: value for entry in fields(table) if (value := getattr(table, entry.name)) != entry.default}


def check_around(notify: Notify, track: Track) -> None:
    """ConfigError with every fault of the two tables."""
    raise_faults(dict([*_notify_faults(notify), *_track_faults(track)]))


def _notify_faults(notify: Notify) -> Iterator[tuple[str, str]]:
    """(message, hint) of each fault of [notify]."""
    if notify.command is None:
        if notify != Notify():
            yield "[notify] has no command that gets the events", 'set notify.command = "…", or leave the table out'
        return
    yield from _command_faults("notify.command", notify.command)
    if fault := key_rules(Notify)["timeout_s"].fault(notify.timeout_s):
        yield f"notify.timeout_s {fault}", "leave it out for its default"


def _track_faults(track: Track) -> Iterator[tuple[str, str]]:
    """(message, hint) of each fault of [track]."""
    if track.wandb is not None and not track.wandb.strip():
        yield "track.wandb is empty, but names the project to send to", 'for example wandb = "gpt"'


def _command_faults(where: str, command: str | tuple[str, ...]) -> Iterator[tuple[str, str]]:
    texts = texts_of(where, command)
    if not any(text.strip() for text in list(texts.values())[:1]):
        yield f"{where} is empty", "say what is to run, or leave the table out"
    for of, text in texts.items():
        yield from text_faults(of, text)
