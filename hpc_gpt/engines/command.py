"""Any program: the one that `[command]` says. What it computes, and how, is its own."""

from __future__ import annotations

from hpc_gpt.engines.base.facts import EngineFacts
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Data
from hpc_gpt.settings.model_shape import ModelShape


class Command(EngineFacts):
    order = 70
    trains_our_model = False
    is_program = True
    takes_command = True
    axes = frozenset({"tp", "pp"})  # as the program splits; nothing here does
    switches = frozenset({"recompute"})  # for the record's FLOPs
    no_save = "a program of your own saves when it does by itself; stop and requeue send it command.stop_signal"

    def shape_fault(self, shape: ModelShape) -> str | None:
        return None

    def data_of(self, data: Data) -> Data:
        """None of ours: the program reads its own."""
        return Data(source="random")

    def is_searched(self, profile: ClusterProfile | None) -> bool:
        return False


ENGINE = Command()
