"""What the ranks of tests have in common: imported once, in the process they are forked from.

Each is a process of its own with its own environment, log and signals; only the seconds of importing torch are shared.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal

# Before torch, which counts its threads when it is imported.
os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TORCHINDUCTOR_COMPILE_THREADS="1")

# The last two are what building an optimizer and initialising DeepSpeed import on the way.
MODULES = (
    "hpc_gpt.train.trainer",
    "hpc_gpt.train.engines.deepspeed_3d",
    "hpc_gpt.model.pipeline",
    "deepspeed.runtime.pipe.topology",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._dynamo",
)
with contextlib.redirect_stdout(io.StringIO()):
    for module in MODULES:
        importlib.import_module(module)


def run_rank(environment: dict[str, str], log: str) -> None:
    """One rank, as `python -m hpc_gpt.train` would run it; ends the process.

    It says each signal in its log once the flag is up. Rank 0 stops itself at its HOLD_AT_LINE-th line, where that is
    set, until somebody lets it go on.
    """
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _say_signals()
    if held := os.environ.get("HOLD_AT_LINE"):
        _hold_at_line(int(held))
    from hpc_gpt.train.__main__ import main

    main()


def _say_signals() -> None:
    from hpc_gpt.train.signals import Signals

    receive = Signals.receive

    def say(self: Signals, number: int) -> None:
        receive(self, number)
        os.write(1, f"rank {os.environ['RANK']} has {signal.Signals(number).name}\n".encode())

    Signals.receive = say  # type: ignore[method-assign]


def _hold_at_line(held: int) -> None:
    from hpc_gpt.train.metrics import Metrics

    log_line = Metrics.log_line
    lines = 0

    def hold(self: Metrics) -> str:
        nonlocal lines
        lines += 1
        if lines == held:
            os.kill(os.getpid(), signal.SIGSTOP)
        return log_line(self)

    Metrics.log_line = hold  # type: ignore[method-assign]
