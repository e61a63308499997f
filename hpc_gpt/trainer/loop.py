"""The training loop of an attempt: trains, evaluates, saves, logs, and stops when all ranks agree."""

import json
import platform
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpc_gpt.core.ends.end_policy import End, end_for, first_reason, limits_reached
from hpc_gpt.core.errors import DataError
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.trainer.curves import Curves
from hpc_gpt.trainer.data import open_stream
from hpc_gpt.trainer.engines.protocol import TrainingEngine
from hpc_gpt.trainer.measurements import DeviceProbe, Profiling
from hpc_gpt.trainer.metrics import Metrics
from hpc_gpt.trainer.ranks import Agreement, Ranks, StepReport
from hpc_gpt.trainer.saving import SaveClock, Saver
from hpc_gpt.trainer.supervision.gpus import GpuReader
from hpc_gpt.trainer.supervision.heartbeat import EVALUATING, LEAVING, SAVING, TRAINING, WARM_UP, Heartbeat, name_ranks
from hpc_gpt.trainer.supervision.signals import Inbox, Signals
from hpc_gpt.trainer.tokens.samples import Samples
from hpc_gpt.trainer.tokens.shard_stream import ShardSet

# The looks for a SIGTERM that only some ranks have got, and the seconds before each: 5 s of the 30 until Slurm kills.
_SIGTERM_LOOKS, _SIGTERM_PAUSE_S = 20, 0.25


@dataclass
class Supervision:
    """The objects that watch an attempt while it trains, and those that may request a save or its end.

    `end_of_sigterm` is called on rank 0 and returns the end that a SIGTERM means for the attempt. `first_step_ended` is
    called once the figures of the first step are fetched, unless that step is also the last one.
    """

    signals: Signals
    end_of_sigterm: Callable[[str], End]
    gpus: GpuReader
    inbox: Inbox = field(default_factory=lambda: Inbox(None))
    heart: Heartbeat = field(default_factory=lambda: Heartbeat(0, 0))
    first_step_ended: Callable[[], None] = lambda: None


class Loop:
    """Trains from `progress` on, and writes `metrics`. `step` is the number of optimizer steps done, with skipped
    ones."""

    def __init__(
        self,
        resolved: Resolved,
        ranks: Ranks,
        engine: TrainingEngine,
        samples: Samples | ShardSet,
        checkpoints: Checkpoints,
        progress: Progress,
        metrics: Path,
        supervision: Supervision,
        curves: Curves | None = None,
    ) -> None:
        self.step = progress.step
        self._train = resolved.train
        self._resolved = resolved
        self._attempt = Attempt(metrics.parent)
        self._ranks = ranks
        self._engine = engine
        self._samples = samples
        self._stream = open_stream(samples, resolved, engine.dp_rank, engine.device, self._reports, engine.context.part)
        self._stream.restore(progress.positions)
        self._metrics = Metrics(metrics, resolved, engine.device, curves)
        self._agreement = Agreement(ranks.control, resolved.layout.pp)
        self._stages = resolved.layout.pp
        self._signals = supervision.signals
        self._end_of_sigterm = supervision.end_of_sigterm
        self._gpus = supervision.gpus
        self._inbox = supervision.inbox
        self._heart = supervision.heart
        self._first_step_ended = supervision.first_step_ended
        self._probe = DeviceProbe(engine.device)
        self._checkpoints = checkpoints
        self._saver = Saver(checkpoints, engine, ranks, self._metrics, self._inbox, progress.step)
        self._clock = SaveClock(resolved, checkpoints.folder)
        self._profiling = Profiling(resolved, ranks, metrics.parent, engine.device)
        self._peaks: tuple[int, int] = 0, 0
        self._first_step_began: float | None = None
        # train.minutes counts the time of all attempts, with evaluations and saves.
        self._began = time.monotonic() - progress.train_s

    def run(self) -> End:
        """Trains until the last step, or until a reason ends the attempt, and returns how it ended.

        A step is one update of the weights from `global_batch` samples; it counts, too, if the update is skipped for a
        gradient that is not finite. In this order, on every rank:

        1. The engine trains the step's micro-batches and updates the weights. The loss stays on the device.
        2. The all-reduce of the ranks' reports begins: signals, requests, limits, a save that is due, memory. What they
           agreed on in the step before is read; so all ranks act on a report one step later, and nobody waits.
        3. A checkpoint that all ranks have written is completed.
        4. An evaluation, on every `eval_every`-th step and the last one.
        5. After the last step, or with a reason to end, the last save and log line, and the return.
        6. A save begins if its step or its time has come, or if it was requested.
        7. Rank 0 fetches, writes and prints the figures, on every `log_every`-th step and the first one.
        """
        train, metrics = self._train, self._metrics
        first = self.step
        warm = first + WARM_UP
        if self._ranks.is_first:
            metrics.recall(self.step)
        self._first_step_began = time.time()
        metrics.begin_clock()
        while self.step < train.steps:
            self._heart.enter(TRAINING)
            self._profiling.before(self.step + 1)
            result = self._engine.train_step(self._stream.step(self.step))
            step = self.step = self.step + 1
            self._profiling.after(step)
            self._heart.stepped(step)
            self._probe.measure()
            self._heart.probe = self._probe.result
            metrics.add(step, result)
            agreed = self._agreement.all_reduce(self._report(step))
            metrics.memory = agreed.allocated_bytes, agreed.reserved_bytes
            if self._checkpoints.is_saving and "writing" not in agreed.flags:
                # Completing a checkpoint and removing old ones may take longer than a step.
                self._heart.enter(SAVING)
            self._saver.poll("writing" in agreed.flags)
            if step == warm:
                self._gpus.begin(self._resolved.ranks_per_node if self._engine.device.type == "cuda" else 0)
            last = step == train.steps
            if train.eval_every and (step % train.eval_every == 0 or last):
                self._evaluate()
            requested, reason = "save" in agreed.flags, first_reason(agreed.flags)
            if self._saver.gave_up or (reason and not (last and reason != "bad_steps")):
                return self._stop(reason, requested)
            if last:
                return self._stop(None, requested)
            by_step = (train.save_every and step % train.save_every == 0) or step in train.save_at
            saves = requested or by_step or "save_due" in agreed.flags
            if saves:
                self._save(requested)
            # The first line of an attempt comes at once: it shows that the ranks train.
            if step % train.log_every == 0 or step == first + 1:
                self._log()
                if step == first + 1:
                    self._first_step_ended()
            elif saves:
                # A resume begins after this step, so no later attempt writes its line.
                metrics.write()
            elif self._ranks.is_first and train.max_bad_steps:
                # With a large log_every, a training that diverges must be noticed before the next log line.
                metrics.look_back(begin=step % train.max_bad_steps == 0)
        return self._stop(None)

    def _report(self, step: int) -> StepReport:
        """This rank's report at the end of `step`. Memory peaks are read only before a log line."""
        if self._engine.device.type == "cuda" and (step <= 2 or (step + 1) % self._train.log_every == 0):
            self._peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        allocated, reserved = (
            tuple(peak if stage == self._engine.pp_rank else 0 for stage in range(self._stages)) for peak in self._peaks
        )
        reasons = set(self._signals.raised)
        self._heart.asked_by = "SIGTERM" if "terminated" in reasons else ""
        if self._ranks.is_first:
            reasons |= self._inbox.look()
            reasons |= limits_reached(self._resolved, self._train_s, self._attempt, self._heart.stopped_s)
            if 0 < self._train.max_bad_steps <= self._metrics.bad_in_row:
                reasons.add("bad_steps")
            if self._metrics.target.reached is not None:
                reasons.add("target")
            if self._clock.restart_if_due():
                reasons.add("save_due")
        if self._checkpoints.busy:
            reasons.add("writing")
        return StepReport(frozenset(reasons), allocated, reserved)

    def _agree_on_sigterm(self) -> End:
        """Agrees on the end by a SIGTERM. It may come to one rank after the other: the others have some seconds, before
        it is a signal to some of them alone."""
        heard = self._ranks.all_gather("terminated" in self._signals.raised)
        for _ in range(_SIGTERM_LOOKS):  # not by a clock: each look is a collective
            if all(heard):
                break
            time.sleep(_SIGTERM_PAUSE_S)
            heard = self._ranks.all_gather("terminated" in self._signals.raised)
        alone = "" if all(heard) else name_ranks([rank for rank, has_heard in enumerate(heard) if has_heard])
        return self._ranks.broadcast(self._end_of_sigterm(alone) if self._ranks.is_first else End("cancelled"))

    def _evaluate(self) -> None:
        batches, sources = self._train.eval_batches, self._samples.token_bytes
        self._heart.enter(EVALUATING, as_steps=batches * len(sources))
        count = batches * self._resolved.batch.micro_batches
        measure, read = self._engine.measure, self._stream.evaluation
        self._metrics.add_evaluation({name: measure(read(batches, name), count, sources[name]) for name in sources})

    def _log(self) -> None:
        """Fetches, writes and prints the figures since the last log line on rank 0; the other ranks drop theirs."""
        if self._ranks.is_first:
            self._metrics.fetch()
            print(self._metrics.log_line(), flush=True)
            self._metrics.write()
        else:
            self._metrics.forget()

    def _save(self, requested: bool = False, wait: bool = False) -> bool:
        """Begins a save, or with `wait` completes it. Returns False if the weights are not finite."""
        self._heart.enter(SAVING)
        self._compare_samples()

        def progress(train_s: float) -> Progress:
            return Progress(self.step, train_s, self._samples.identity, self._position())

        sound = self._saver.save(self.step, self._train_s(), progress, requested, wait)
        self._clock.restart()
        return sound

    def _compare_samples(self) -> None:
        """Raises DataError unless the ranks that read the same data have taken the same samples: a rank that reads a
        damaged or older copy has not. Such a state must not be saved."""
        if self._resolved.layout.dp == self._resolved.layout.gpus:
            return
        engine, stream = self._engine, self._stream
        position = stream.position() or {}
        # The skipped shards without their reasons: the texts differ between versions of a library.
        place = zlib.crc32(
            json.dumps({**position, "faults": sorted(position.get("faults", ()))}, sort_keys=True).encode()
        )
        first: dict[int, tuple[int, str, tuple[int, ...]]] = {}
        for rank, (dp_rank, host, taken) in enumerate(
            self._ranks.all_gather((engine.dp_rank, platform.node(), (*stream.taken, place)))
        ):
            if not taken[0]:
                continue  # a stage in the middle of a pipeline takes no samples
            other, other_host, others = first.setdefault(dp_rank, (rank, host, taken))
            if taken != others:
                raise DataError(
                    f"ranks {other} on {other_host} and {rank} on {host} read the same data, but have taken different "
                    f"samples by step {self.step}; it is not saved",
                    "compare the files on both hosts: they differ, are damaged, or were changed while they were read",
                )

    def _save_last(self, requested: bool) -> bool:
        """Saves at the end, unless train.save_last is false. Returns False if the weights are not finite."""
        if self._train.save_last or requested:
            return self._save(wait=True)
        self._heart.enter(SAVING)
        return self._saver.leave_out(self.step)

    def _stop(self, reason: str | None, requested: bool = False) -> End:
        """Does the last save, fetch and log line of an attempt, and returns its end.

        All ranks know the `reason`, None if all steps are done, and whether a save is `requested`.
        """
        requested |= "save" in self._agreement.finish().flags
        saver = self._saver
        # The save and its step's line come first: asking Slurm may take 15 s, and after a SIGTERM few seconds are left.
        sound = saver.gave_up or (reason != "bad_steps" and self._save_last(requested))
        self._heart.enter(LEAVING)
        if self._ranks.is_first:
            self._metrics.fetch()
            if self._metrics.has_lines():
                print(self._metrics.log_line(), flush=True)
            self._metrics.write()
        end = saver.gave_up or End("done")
        if reason and not saver.gave_up:
            end = end_for(reason, self._resolved, self._agree_on_sigterm, self._metrics.target.reached)
        if saver.gave_up or saver.saved_step == self.step:
            return end
        if not sound and end.ended == "done":
            return End("nan", "the last loss or gradient is not finite")
        if not self._train.save_last:
            return saver.left_out(end)
        return saver.unsaved(end) if sound else end

    @property
    def tenth_step(self) -> float | None:
        """End of the attempt's tenth step in epoch seconds, minus the time of evaluations and saves before it.

        None until rank 0 has fetched that step, and on the other ranks.
        """
        began, seconds = self._first_step_began, self._metrics.first_steps_s
        return None if began is None or seconds is None else began + seconds

    @property
    def skipped_shards(self) -> dict[int, int]:
        """{dp rank: number of shards that its stream left early, in all attempts}; empty unless this rank reports for
        it."""
        return {self._engine.dp_rank: self._stream.skipped_shards} if self._reports else {}

    def _position(self) -> dict[int, dict[str, Any]]:
        """{dp rank: position of its stream}; empty unless this rank reports for it, or if the step determines the
        position."""
        position = self._stream.position() if self._reports else None
        return {} if position is None else {self._engine.dp_rank: position}

    @property
    def _reports(self) -> bool:
        """Whether this rank is the first of the ranks with its dp rank, which all read the same data."""
        engine = self._engine
        return engine.tp_rank == engine.pp_rank == engine.cp_rank == 0

    def _train_s(self) -> float:
        return time.monotonic() - self._began
