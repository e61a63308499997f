"""One rank on its own, in the test's process: the ranks and the engine that checkpoints and the loop are given."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.engines.attention import AttentionKernels
from hpc_gpt.trainer.engines.protocol import MicroBatches, StepResult
from hpc_gpt.trainer.model.context_parallel import ContextParallel
from hpc_gpt.trainer.ranks import Peers, Ranks, StepReport


class _Alone(Peers):
    control = None


ALONE = cast(Ranks, _Alone())


class CountingEngine:
    """Trains nothing but its step count, which is what it saves; `loss` tells the loss after a step."""

    tp_rank = pp_rank = dp_rank = cp_rank = 0
    context = ContextParallel()
    device = torch.device("cpu")
    module = torch.nn.Module()
    attention = cast(AttentionKernels, SimpleNamespace(chosen="flash"))

    def __init__(self, loss: Callable[[int], float] = lambda step: 1.0) -> None:
        self.step = 0
        self.loss = loss

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        self.step += 1
        return StepResult(torch.tensor(self.loss(self.step)), 1.0, 1e-3, False)

    def evaluate(self, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        return torch.tensor(1.0)

    def measure(self, micro_batches: MicroBatches, count: int, token_bytes: object) -> torch.Tensor:
        return torch.stack([self.evaluate(micro_batches, count).double(), *torch.full((2,), torch.nan).double()])

    def save(self, files: RankFiles) -> None:
        files.put_bytes("step", b"%08d" % self.step)

    def load(self, folder: Path) -> None:
        self.step = int((folder / "step").read_text())


class OwnReport:
    """One rank's `Agreement`: its own report, read a step later."""

    def __init__(self, group: object, stages: int) -> None:
        self._pending = StepReport()

    def all_reduce(self, report: StepReport) -> StepReport:
        agreed, self._pending = self._pending, report
        return agreed

    def finish(self) -> StepReport:
        return self.all_reduce(StepReport())
