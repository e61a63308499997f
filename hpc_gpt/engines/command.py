"""Any program: the one that `[command]` says. What it computes, and how, is its own."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from hpc_gpt.engines.base.facts import EngineFacts, Fault
from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.around import Plan
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.command import check_command, with_values
from hpc_gpt.settings.experiment import Command, Data, Engine, Train
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.settings.shape_split import Obstacle

# The keys of [train] that say something of the attempt, or of the record's figures.
_OF_TRAIN = ("steps", "minutes", "dtype", "hang_multiple", "hang_floor_s")
_FOLLOWS = ("optimizer_mode",)  # `resolve` gives it a value
_NO_DATA = Data(source="random")


class CommandEngine(EngineFacts):
    order = 70
    trains_our_model = False
    is_program = True
    takes_command = True
    axes = frozenset({"tp", "pp", "cp"})  # as the program splits; nothing here does
    switches = frozenset({"recompute"})  # for the record's FLOPs
    unfollowed = frozenset()  # as far as is known here
    no_save = "a program of your own saves when it does by itself; stop and requeue send it command.stop_signal"

    def shape_fault(self, shape: ModelShape) -> str | None:
        return None

    def context_obstacle(self, shape: ModelShape, layout: Layout, engine: Engine) -> Obstacle | None:
        return None

    def own_faults(self, engine: Engine, layout: Layout, train: Train) -> Iterator[Fault]:
        """What the program would not hear of."""
        plain = Train()
        for entry in fields(Train):
            if entry.name not in _OF_TRAIN + _FOLLOWS and getattr(train, entry.name) != getattr(plain, entry.name):
                yield Fault(
                    f"train.{entry.name} is {getattr(train, entry.name)}, but a program of your own is not told of it",
                    f"put it into command.run; of [train] count here {', '.join(_OF_TRAIN)}",
                )

    def data_of(self, data: Data) -> Data:
        """None of ours: the program reads its own. Raises ConfigError for what it would not be told of."""
        if data not in (Data(), _NO_DATA):
            raise ConfigError("[data] is given, but a program of your own is not told of it", "put it into command.run")
        return _NO_DATA

    def program_of(self, command: Command) -> Command:
        command = with_values(command)
        check_command(command)
        return command

    def check_plan(self, plan: Plan) -> None:
        """Nothing else says what the program does."""

    def planned_as(self, plan: Plan) -> str | None:
        if plan.like in (None, self.name):
            self.refuse_program(
                "plan knows neither its memory nor its time",
                "say in [plan] which engine it is like, and how it runs (hpc-gpt help plan-traits); or submit it",
            )
        return plan.like

    def check_program(self, resolved: Resolved, environment: Mapping[str, str]) -> None:
        """ConfigError if its folder is not there; on a node without it the attempt ends so."""
        command = resolved.program
        if resolved.cluster.container is None and not Path(command.workdir).is_dir():
            raise ConfigError(
                f"command.workdir is {command.workdir}, which is no folder here", "name the program's folder"
            )
        if resolved.cluster.container is None:
            for name in command.link:
                if not Path(command.workdir, name).exists():
                    raise ConfigError(f"command.link has {name}, which is not in {command.workdir}", "correct its name")

    def why_not(self, verb: str, resolved: Resolved) -> str:
        if verb in ("stop", "requeue") and resolved.program.stop_signal == "none":
            return f"command.stop_signal is none: nothing tells this program to {verb}; hpc-gpt cancel ends it"
        return super().why_not(verb, resolved)

    def is_searched(self, profile: ClusterProfile | None) -> bool:
        return False


ENGINE = CommandEngine()
