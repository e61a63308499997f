"""Engine megatron-lm: starts and supervises one rank of pretrain_gpt.py from a checkout of Megatron-LM.

Megatron-LM itself handles SIGTERM (it saves, and its ranks leave together), its checkpoints and its log.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

from hpc_gpt.engines.base.megatron_checkout import PROGRAM, check_checkout, checkout_of
from hpc_gpt.engines.megatron_lm import megatron_arguments, option_names
from hpc_gpt.errors import DataError
from hpc_gpt.readers.dialects.megatron import ITERATION
from hpc_gpt.readers.logs.matches import float_of, values_of
from hpc_gpt.runs.end_policy import SIGNALS, STOP, End, end_of_exit_0
from hpc_gpt.runs.provenance import complete_run, git_state, versions_of
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.tokens.run_data import data_path, ensure_data, located
from hpc_gpt.train.foreign_program import ForeignLog, ForeignWatch, LastLines, StepLine, abort, step_line_of
from hpc_gpt.train.foreign_rank import WAIT_S, ForeignRank, ProgramStart, Stop
from hpc_gpt.train.heartbeat import Heartbeat
from hpc_gpt.train.signals import Signals

# The newest checkpoint's iteration, which Megatron writes last.
TRACKER = "latest_checkpointed_iteration.txt"
# Its own limit: --exit-duration-in-mins.
_LIMIT = re.compile(r"\[(exiting program after [\d.]+ minutes)\b")
_ITERATION = re.compile(ITERATION.regex)
# What metrics.jsonl gets of it; tokens/s follow from the batch and the time.
_KEPT = ("step", "step_s", "loss", "grad_norm", "lr", "skipped")
_BEGINS = "before the start of training step"


class MegatronRank(ForeignRank):
    """One rank's part in an attempt."""

    def __init__(self, run: RunFolder, attempt: Attempt, signals: Signals) -> None:
        super().__init__(run, attempt, signals)
        self._saved = run.checkpoints / "megatron"
        self._lines = LastLines(PROGRAM)

    @property
    def step(self) -> int:
        """The last iteration in the log or in a checkpoint."""
        return max(super().step, saved_iteration(self._saved))

    def prepare(self) -> ProgramStart:
        resolved, is_first = self._resolved, self._place.rank == 0
        checkout = checkout_of(resolved, os.environ)
        prefix = self._await_data()
        arguments = megatron_arguments(resolved, str(self._saved), prefix)
        resumed = saved_iteration(self._saved)
        check_checkout(checkout, option_names(arguments) if is_first else ())
        if is_first:
            complete_run(self._run.path, resolved)
            self._report_start(checkout, resumed)
        log = MegatronLog(self._attempt, resolved, self._place.rank, resumed, self._lines)
        # Slurm sends signals to every process of a step. This process handles those that would end Megatron: all but
        # SIGTERM, after which it saves.
        names = " ".join(number.name for number in SIGNALS if number != signal.SIGTERM)
        ignoring = ["bash", "-c", f'trap "" {names}; exec "$@"', "rank"]
        command = [*ignoring, sys.executable, str(checkout / PROGRAM), *arguments]
        return ProgramStart(command, self._environment(checkout), log, resumed)

    def watch(self, start: ProgramStart) -> ForeignWatch:
        train, process = self._resolved.train, self._process
        assert process is not None

        def stacks() -> str:
            abort(process, start.log)
            return self._lines.stacks()

        heart = Heartbeat(train.hang_multiple, train.hang_floor_s)
        pauses = (train.eval_every, train.save_every)
        return ForeignWatch(self._attempt, process, start.log, heart, stacks, pauses, train.log_every)

    def ask_to_end(self, stop: Stop) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM if stop.save else signal.SIGKILL)

    def was_stopped(self, code: int) -> bool:
        return code in (-signal.SIGTERM, -signal.SIGKILL) or self.failure(code)[2]

    def ended_early(self, code: int) -> bool:
        return self.was_stopped(code) if code else self.step < self._resolved.train.steps

    def failure(self, code: int) -> tuple[str, str, bool]:
        return self._lines.failure(code)

    def end_of_all(self) -> End:
        limit = self._lines.find(_LIMIT)
        return end_of_exit_0(self.step, self._resolved.train.steps, 0, limit[1] if limit else "")

    def unsaved(self, stop: Stop, code: int) -> str:
        if stop.save and (not code or self._has_saved()):
            return ""
        how = "before its first iteration" if not stop.save else f"with exit code {code}"
        return f"{PROGRAM} ended {how}, unsaved"

    def _has_saved(self) -> bool:
        """Whether there is a checkpoint since stop.json was written.

        A rank may get its own signal while it already leaves, and python then dies of it at its very end.
        """
        try:
            return (self._saved / TRACKER).stat().st_mtime >= (self._attempt.folder / STOP).stat().st_mtime
        except FileNotFoundError:
            return False

    def _await_data(self) -> str | None:
        """The prefix of Megatron's data, which the first rank of each node makes if missing; None for mock data."""
        resolved = located(self._resolved, self._run.data_beside)
        path = data_path(resolved)
        if path is None:
            return None
        if self._place.local_rank == 0:
            path = ensure_data(resolved)
            assert path is not None
        index = path.with_name(path.name + ".idx")
        self.await_file(index, DataError(f"{index} was not made in {WAIT_S} s", "did the node's first rank fail?"))
        return os.path.abspath(path)

    def _environment(self, checkout: Path) -> dict[str, str]:
        """This process's environment, with the variables that Megatron-LM and torch's env:// rendezvous read."""
        place = self._place
        known = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
        environment = {**os.environ, **{name: str(number) for name, number in known.items()}}
        # After a hang SIGABRT ends it, and its faulthandler writes the stacks.
        environment.setdefault("PYTHONFAULTHANDLER", "1")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
        # Megatron requires it to overlap communication: kernels run in the order of their launch.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        return environment | self.rendezvous()

    def _report_start(self, checkout: Path, resumed: int) -> None:
        resolved, (sha, dirty) = self._resolved, git_state(checkout, PROGRAM)
        more = {"torch": versions_of(["torch"]).get("torch"), "params": resolved.model.params}
        lm = {"path": str(checkout), "git_sha": sha, "git_dirty": dirty}
        device = self.report_start(resumed, {**more, "megatron_lm": lm})
        batch = resolved.batch.global_batch
        print(
            f"{resolved.name}: {resolved.layout} on {resolved.gpus} x {device}, Megatron-LM "
            f"in {checkout} ({(sha or 'no commit')[:12]}), global batch {batch} x {resolved.model.seq} tokens",
            flush=True,
        )
        if resumed:
            print(f"resumed after step {resumed} of {resolved.train.steps}", flush=True)


class MegatronLog(ForeignLog):
    """The output of pretrain_gpt.py. Its last rank prints the iterations."""

    def __init__(self, attempt: Attempt, resolved: Resolved, rank: int, resumed: int, lines: LastLines) -> None:
        self._log_every = resolved.train.log_every
        self._lines = lines
        super().__init__(attempt, resolved, rank, self._iteration, self._take, resumed)

    def _take(self, line: str) -> None:
        self._lines.add(line)
        if _BEGINS in line:
            (self._attempt.folder / self.TRAINS).touch()

    def _iteration(self, line: str) -> StepLine | None:
        found = read_iteration(line)
        # Megatron also logs an attempt's first iteration, and counts it again in the next line.
        return None if found is None or found.step % self._log_every else found


def read_iteration(line: str) -> StepLine | None:
    """The figures of an iteration line; None for any other line, or one that is cut off before its time."""
    found = _ITERATION.search(line)
    values = values_of(line, found, ITERATION) if found else {}
    if "step_s" not in values:
        return None
    row = {name: value for name in _KEPT if (value := float_of(values, name)) is not None}
    return replace(step_line_of(row, 1), samples=int(float_of(values, "global_batch") or 0) or None)


def saved_iteration(folder: Path) -> int:
    """The iteration of Megatron's newest checkpoint; 0 without one."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


RANK = MegatronRank
