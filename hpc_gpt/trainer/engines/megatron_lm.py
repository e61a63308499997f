"""Engine megatron-lm: starts and supervises one rank of pretrain_gpt.py from a checkout of Megatron-LM.

Megatron-LM handles SIGTERM itself (it saves, and its ranks leave together), and also its checkpoints and its log.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.ends.end_policy import SIGNALS, STOP, End
from hpc_gpt.core.ends.program_end import PrintedEnd, facts_of
from hpc_gpt.core.engines.base.megatron_program import (
    CONNECTIONS,
    PROGRAM,
    check_checkout,
    checkout_of,
    connections_of,
    megatron_arguments,
    option_names,
)
from hpc_gpt.core.errors import DataError
from hpc_gpt.core.network import MEETING_S
from hpc_gpt.core.runs.provenance import complete_run, git_state, versions_of
from hpc_gpt.core.runs.record import MIXTURE_FIGURES
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.data_source import evaluation_shares
from hpc_gpt.reader.lines.matches import float_of, values_of
from hpc_gpt.reader.programs.megatron import ITERATION
from hpc_gpt.trainer.program.process import ForeignLog, LastLines
from hpc_gpt.trainer.program.rank import ForeignRank, ProgramStart, Stop
from hpc_gpt.trainer.program.step_numbers import StepRow
from hpc_gpt.trainer.supervision.heartbeat import Heartbeat
from hpc_gpt.trainer.supervision.meeting import gpu_number
from hpc_gpt.trainer.supervision.signals import Signals
from hpc_gpt.trainer.tokens.run_data import data_path, ensure_data, located, sources_alone

# The file with the newest checkpoint's iteration; Megatron writes it last.
TRACKER = "latest_checkpointed_iteration.txt"
# The line of Megatron's own limit: --exit-duration-in-mins.
_LIMIT = re.compile(r"\[(exiting program after [\d.]+ minutes)\b")
_ITERATION = re.compile(ITERATION.regex)
# The values that metrics.jsonl gets; tokens/s follow from the batch and the time.
_METRICS = ("step", "step_s", "loss", "grad_norm", *MIXTURE_FIGURES, "lr", "skipped", "nan", "global_batch")
_BEGINS = "before the start of training step"
_ABORT_S = 3.0
# Slurm sends signals to every process of a step. This process handles those that would kill Megatron: all but SIGTERM,
# on which Megatron saves.
_IGNORED = " ".join(number.name for number in SIGNALS if number != signal.SIGTERM)


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
        train, is_first = self._resolved.train, self._place.rank == 0
        checkout = checkout_of(self._resolved, os.environ)
        arguments = megatron_arguments(self._resolved, str(self._saved), self._await_data())
        resumed = saved_iteration(self._saved)
        check_checkout(checkout, option_names(arguments) if is_first else ())
        connections, warning = connections_of(arguments, self._resolved.layout, os.environ)
        if is_first:
            if warning:
                print(f"note: {warning}", flush=True)
            complete_run(self._run.path, self._resolved)
            self._report_start(checkout, resumed)
        ignoring = ["bash", "-c", f'trap "" {_IGNORED}; exec "$@"', "rank"]
        paths = [str(checkout), os.environ.get("PYTHONPATH")]
        environment = {
            "PYTHONFAULTHANDLER": "1",  # after a hang SIGABRT ends it, and its faulthandler writes the stacks
            **os.environ,
            CONNECTIONS: connections,
            **self._place.variables,
            # Megatron takes the GPU of this number.
            "LOCAL_RANK": str(gpu_number(self._place.local_rank, self._resolved.job.srun, os.environ)),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **self.rendezvous(),
        }
        return ProgramStart(
            [*ignoring, sys.executable, str(checkout / PROGRAM), *arguments],
            environment,
            self.log(resumed),
            Heartbeat(train.hang_multiple, train.hang_floor_s),
            resumed,
            pauses=(train.eval_every, train.save_every),
        )

    def log(self, resumed: int) -> ForeignLog:
        """The log of pretrain_gpt.py; its last rank prints the iterations."""
        log_every = self._resolved.train.log_every

        def read(line: str) -> StepRow | None:
            row = read_iteration(line)
            # Megatron also logs an attempt's first iteration, and counts it again in the next line.
            return None if row is None or row["step"] % log_every else row

        def take(line: str) -> None:
            self._lines.add(line)
            if _BEGINS in line:
                (self._attempt.folder / ForeignLog.TRAINS).touch()

        return ForeignLog(self._attempt, self._resolved, self._place.rank, read, take, resumed)

    def stacks(self, process: subprocess.Popen[bytes], log: ForeignLog) -> str:
        """The stacks that Python's faulthandler writes on SIGABRT. Kills the process."""
        process.send_signal(signal.SIGABRT)
        until = time.monotonic() + _ABORT_S
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
        log.finish()
        return self._lines.stacks()

    def ask_to_end(self, stop: Stop) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM if stop.save else signal.SIGKILL)

    def failure(self, code: int) -> tuple[str, str, bool]:
        return self._lines.failure(code)

    def end_of_all(self) -> End:
        limit = self._lines.find(_LIMIT)
        by_limit = PrintedEnd(limit=limit[1] if limit else "")
        return self.end_by(replace(facts_of(self._attempt, 0, self._resolved.train.steps, by_limit), spacing=0))

    def unsaved(self, stop: Stop, code: int) -> str:
        if stop.save and (not code or self._has_saved()):
            return ""
        how = "before its first iteration" if not stop.save else f"with exit code {code}"
        return f"{PROGRAM} ended {how}, unsaved"

    def _has_saved(self) -> bool:
        """Whether there is a checkpoint since stop.json was written.

        A rank may get its signal while it already leaves; then Python dies of it at the very end.
        """
        try:
            return (self._saved / TRACKER).stat().st_mtime >= (self._attempt.folder / STOP).stat().st_mtime
        except FileNotFoundError:
            return False

    def _await_data(self) -> str | list[str] | None:
        """The values of --data-path: the prefix of Megatron's data, or for a mixture a weight and a prefix per source.

        The first rank of each node makes missing data. None for mock data.
        """
        resolved = located(self._resolved, self._run.data_beside)
        if self._place.local_rank == 0:
            ensure_data(resolved)
        if resolved.data.mix is None:
            path = data_path(resolved)
            return None if path is None else self._await_pair(path)
        pairs = []
        shares = evaluation_shares(resolved.data.mix, ())
        for name, alone in sources_alone(resolved).items():
            path = data_path(alone)
            assert path is not None
            pairs += [str(shares[name]), self._await_pair(path)]
        return pairs

    def _await_pair(self, path: Path) -> str:
        index = path.with_name(path.name + ".idx")
        self.await_file(index, DataError(f"{index} was not made in {MEETING_S} s", "did the node's first rank fail?"))
        return os.path.abspath(path)

    def _report_start(self, checkout: Path, resumed: int) -> None:
        resolved, (sha, dirty) = self._resolved, git_state(checkout, PROGRAM)
        facts = {"torch": versions_of(["torch"]).get("torch"), "params": resolved.model.params}
        lm = {"path": str(checkout), "git_sha": sha, "git_dirty": dirty}
        device = self.report_start(resumed, {**facts, "megatron_lm": lm})
        batch = resolved.batch.global_batch
        print(
            f"{resolved.name}: {resolved.layout} on {resolved.gpus} x {device}, Megatron-LM "
            f"in {checkout} ({(sha or 'no commit')[:12]}), global batch {batch} x {resolved.model.seq} tokens",
            flush=True,
        )
        if resumed:
            print(f"resumed after step {resumed} of {resolved.train.steps}", flush=True)


def read_iteration(line: str) -> StepRow | None:
    """The figures of an iteration line; None for any other line, or for one that is cut off before its time."""
    match = _ITERATION.search(line)
    values = values_of(line, match, ITERATION) if match else {}
    row = {name: value for name in _METRICS if (value := float_of(values, name)) is not None}
    return row if "step_s" in row else None


def saved_iteration(folder: Path) -> int:
    """The iteration of Megatron's newest checkpoint; 0 without one."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


RANK = MegatronRank
