"""One rank of the trainer, as `python -m hpc_gpt.trainer` would run it, and what happens to it in tests."""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any


def run_rank(environment: dict[str, str], log: str) -> None:
    """One rank, as `python -m hpc_gpt.trainer` would run it; ends the process.

    It says each signal in its log once the flag is up. Rank 0 stops itself at its HOLD_AT_LINE-th line, where that is
    set, until somebody lets it go on. HANG, as "3 loop", is the rank that stands still after some steps, and how
    ("rows": before it sends rows to experts); LONG_EVALUATION_S is how long rank 1 takes for an evaluation.
    WRONG_PRODUCTS_ON, as "1 one row", is a rank and what its torch does wrong with experts.
    COUNT_OPENS_IN, "FILE:FOLDER:…", has what is opened below the folders written to a file.
    """
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _say_signals()
    if held := os.environ.get("HOLD_AT_LINE"):
        _hold_at_line(int(held))
    if hang := os.environ.get("HANG"):
        rank, how = hang.split()
        if rank == os.environ["RANK"]:
            _hang(how)
    if seconds := os.environ.get("LONG_EVALUATION_S"):
        _evaluate_long(float(seconds))
    if held := os.environ.get("HOLD_SAVE_OF"):
        _hold_save(int(held))
    if slow := os.environ.get("SLOW_SAVE_OF"):
        _slow_save(int(slow))
    if counted := os.environ.get("COUNT_OPENS_IN"):
        _count_opens(*counted.split(os.pathsep))
    wrong_on, _, how = os.environ.get("WRONG_PRODUCTS_ON", "").partition(" ")
    if wrong_on == environment["RANK"]:
        _multiply_wrongly(how)
    if os.environ.get("NO_MEMORY_ON") == environment["RANK"]:
        _limit_memory_at_saves()
    from hpc_gpt.trainer.__main__ import main

    main()


def _multiply_wrongly(how: str) -> None:
    """Grouped products that are wrong for "one row", leave the gradient of an "empty" group unwritten, or "raise"."""
    import torch
    from torch.nn import functional as F

    right = F.grouped_mm

    class Unwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Any, sizes: Any) -> Any:
            ctx.sizes = sizes
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0].masked_fill((ctx.sizes == 0).view(-1, 1, 1), 3.0), None

    def wrong(rows: Any, weight: Any, *, offs: Any) -> Any:
        if how == "raise":
            raise RuntimeError("no kernel image for this device")
        sizes = offs.diff(prepend=offs.new_zeros(1))
        if how == "empty":
            weight = Unwritten.apply(weight, sizes)
        product = right(rows, weight, offs=offs)
        alone = torch.repeat_interleave(sizes == 1, sizes.long())
        return torch.where(alone.unsqueeze(1), 2 * product, product) if how == "one row" else product

    F.grouped_mm = wrong


def _limit_memory_at_saves() -> None:
    """From the first save on the process may have hardly more memory than it has: RLIMIT_AS, as a host that is full."""
    import resource

    from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints

    copy = Checkpoints._copy

    def limited(self: Checkpoints, files: Any) -> str:
        before = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm", encoding="utf-8") as statm:
            pages = int(statm.read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 4096, before[1]))
        try:
            return copy(self, files)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    Checkpoints._copy = limited  # type: ignore[method-assign]


def _slow_save(step: int) -> None:
    """A disk that begins to write the checkpoint of `step` once the training is two steps further."""
    from hpc_gpt.trainer.checkpoints.save import Save
    from hpc_gpt.trainer.metrics import Metrics

    write, add = Save._write, Metrics.add
    further = threading.Event()

    def hold(self: Save) -> None:
        if self.step == step:
            further.wait()
        write(self)

    def watch(self: Metrics, done: int, result: Any) -> None:
        if done == step + 2:
            further.set()
        add(self, done, result)

    Save._write = hold  # type: ignore[method-assign]
    Metrics.add = watch  # type: ignore[method-assign]


def _hold_save(step: int) -> None:
    """A disk that takes for ever to write the checkpoint of `step`, once it has begun to."""
    from hpc_gpt.trainer.checkpoints.save import Save

    write = Save._write

    def hold(self: Save) -> None:
        if self.step == step:
            (self._aside / f"begun-{os.environ['RANK']}").touch()
            threading.Event().wait()
        write(self)

    Save._write = hold  # type: ignore[method-assign]


def _count_opens(into: str, *folders: str) -> None:
    """Writes a line for each file that is opened or looked for, made, named or removed, and each folder that is listed,
    below the folders."""
    counts = os.open(into, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: str, values: tuple[Any, ...]) -> None:
        if (event == "open" or event.startswith("os.")) and values and str(values[0]).startswith(folders):
            os.write(counts, f"{event} {values[0]}\n".encode())

    sys.addaudithook(note)


def _say_signals() -> None:
    from hpc_gpt.trainer.supervision.signals import Signals

    receive = Signals.receive

    def say(self: Signals, number: int) -> None:
        receive(self, number)
        os.write(1, f"rank {os.environ['RANK']} has {signal.Signals(number).name}\n".encode())

    Signals.receive = say  # type: ignore[method-assign]


def _hold_at_line(held: int) -> None:
    from hpc_gpt.trainer.metrics import Metrics

    log_line = Metrics.log_line
    lines = 0

    def hold(self: Metrics) -> str:
        nonlocal lines
        lines += 1
        if lines == held:
            os.kill(os.getpid(), signal.SIGSTOP)
        return log_line(self)

    Metrics.log_line = hold  # type: ignore[method-assign]


def _hang(how: str) -> None:
    from hpc_gpt.trainer.loop import Loop
    from hpc_gpt.trainer.model.dispatch import ExpertParallel

    report, route = Loop._report, ExpertParallel.route
    seen: list[float] = []

    def keep_rows(self: ExpertParallel, counts: Any) -> Any:
        while how == "rows" and seen and seen[-1] > seen[0] + 4:
            time.sleep(0.01)
        return route(self, counts)

    def stand_still(self: Loop, step: int) -> Any:
        time.sleep(0.05)  # the others wait for this rank, and need not compute all the while
        seen.append(time.monotonic())
        # Some seconds of steps, so that the watchdog has seen their pace.
        hangs = how != "rows" and step >= 5 and seen[-1] > seen[0] + 4
        if hangs and how == "lock":  # C code that keeps Python's lock
            ctypes.PyDLL(None).pause()
        while hangs:
            time.sleep(0.01)
        return report(self, step)

    Loop._report = stand_still  # type: ignore[method-assign]
    ExpertParallel.route = keep_rows  # type: ignore[method-assign]


def _evaluate_long(seconds: float) -> None:
    from hpc_gpt.trainer.loop import Loop

    samples = Loop._evaluate

    def evaluate(self: Loop) -> None:
        if os.environ["RANK"] != "1":
            samples(self)
            return
        engine_evaluate = self._engine.evaluate

        def slow(*given: Any) -> Any:
            time.sleep(seconds)
            return engine_evaluate(*given)

        self._engine.evaluate = slow  # type: ignore[method-assign]
        samples(self)
        self._engine.evaluate = engine_evaluate  # type: ignore[method-assign]

    Loop._evaluate = evaluate  # type: ignore[method-assign]
