"""The loop of one rank under torch's profiler, see `test_waiting.py`.

Every case trains the same batches; between its two logging steps all is written down that makes the host wait for a
device: figures of `torch.profiler`, and calls of methods that it does not see.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.trainer.engines.build import build_engine
from hpc_gpt.trainer.loop import Loop, Supervision
from hpc_gpt.trainer.supervision.gpus import GpuReader
from hpc_gpt.trainer.supervision.signals import Signals
from hpc_gpt.trainer.tokens.samples import open_samples
from tests.trainer.alone import ALONE
from tests.trainer.launch import settings

LOG_EVERY = 4
STEPS = 2 * LOG_EVERY
CASES: dict[str, tuple[Engine, dict[str, Any]]] = {
    "ddp": (Engine("ddp"), {}),
    "ddp bf16": (Engine("ddp"), {"dtype": "bf16"}),
    "fsdp": (Engine("fsdp"), {}),
}
# Where the host sees the norm of each step: to call an optimizer that cannot be told on the device, or by ZeRO's step.
WAITING: dict[str, tuple[Engine, dict[str, Any]]] = {
    "ddp, not fused": (Engine("ddp"), {"optimizer_mode": "foreach"}),
    "deepspeed-zero 1": (Engine("deepspeed-zero", 1), {}),
}
# One of each kind of engine, in every run of the tests.
SHORT = ("ddp bf16", "fsdp", "deepspeed-zero 1")
# What brings a number to the host, by its name in a profile.
OPERATORS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal")
METHODS = ("tolist", "cpu", "numpy")
# The kernel of a CPU reads its count of steps there; that of a GPU reads it on the device.
CPU_KERNEL = "aten::_fused_adamw_"


def case_settings(tokens: Path, name: str) -> Resolved:
    engine, train = (CASES | WAITING)[name]
    one = {"tp": 1, "pp": 1, "dp": 1}
    return settings(tokens, one, engine, steps=STEPS, log_every=LOG_EVERY, max_bad_steps=2, save_last=False, **train)


class Window:
    """What happens between the log of step LOG_EVERY and that of the last step."""

    def __init__(self, loop: Loop) -> None:
        self.counts: Counter[str] = Counter()
        self._loop, self._log = loop, loop._log
        self._open: Any = None
        loop._log = self._log_at_an_edge

    def _log_at_an_edge(self) -> None:
        self.close()
        self._log()
        if self._loop.step == LOG_EVERY:
            self._open = self._look()
            self._open.__enter__()

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    @contextmanager
    def _look(self) -> Iterator[None]:
        # torch.tensor copies a number to the device, and waits for all that is to be done there before.
        calls: dict[tuple[Any, str], Any] = {(torch.Tensor, name): getattr(torch.Tensor, name) for name in METHODS}
        calls[torch, "tensor"] = torch.tensor
        for (owner, name), call in calls.items():
            setattr(owner, name, self._counted(name, call))
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            yield
        for (owner, name), call in calls.items():
            setattr(owner, name, call)
        for event in profile.events():
            above = _above(event)
            if event.name in OPERATORS and CPU_KERNEL not in above:
                self.counts[" < ".join([event.name, *above])] += 1

    def _counted(self, name: str, method: Any) -> Any:
        def call(*words: Any, **more: Any) -> Any:
            caller = sys._getframe(1).f_code
            self.counts[f"{name} {Path(caller.co_filename).stem}.{caller.co_name}"] += 1
            return method(*words, **more)

        return call


def _above(event: Any) -> list[str]:
    """What an event is part of, innermost first."""
    names = []
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    return names


def run(name: str, tokens: Path, folder: Path) -> dict[str, Any]:
    resolved = case_settings(tokens, name)
    samples = open_samples(resolved)
    engine = build_engine(resolved, torch.device("cpu"))
    folder.mkdir()
    loop = Loop(
        resolved,
        ALONE,
        engine,
        samples,
        Checkpoints(folder / "checkpoints", ALONE),
        Progress(),
        folder / "metrics.jsonl",
        Supervision(Signals(), lambda: False, GpuReader()),
    )
    window = Window(loop)
    # The last step is logged by the end of the attempt.
    finish = loop._stop
    loop._stop = lambda *words: (window.close(), finish(*words))[1]
    end = loop.run()
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"ended": end.ended, "losses": losses, "counts": window.counts}


def run_all(folder: Path, tokens: Path, names: list[str]) -> dict[str, Any]:
    """What each of these cases did, by its name."""
    torch.set_num_threads(1)
    return {name: run(name, tokens, folder / name) for name in names}
