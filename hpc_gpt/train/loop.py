"""The training loop of an attempt: train, evaluate, save, log, and stop when all ranks agree."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.tokens.run_data import Samples
from hpc_gpt.tokens.shard_stream import ShardSet
from hpc_gpt.train.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.train.data import open_stream
from hpc_gpt.train.ending import (
    CANCELLED,
    INTERRUPTED,
    PREEMPTED,
    REQUEUED,
    STOPPED,
    WALLTIME,
    End,
    budget_end,
    budget_over,
    minutes_over,
)
from hpc_gpt.train.engines.protocol import Engine
from hpc_gpt.train.heartbeat import EVALUATING, LEAVING, SAVING, TRAINING, WARM_UP, Heartbeat
from hpc_gpt.train.measurements import DeviceProbe, GpuWatch
from hpc_gpt.train.metrics import Metrics
from hpc_gpt.train.ranks import Agreement, Ranks, StepReport
from hpc_gpt.train.saver import Saver
from hpc_gpt.train.signals import Inbox, Signals


class Loop:
    """Trains from `progress` on. `step` is the number of optimizer steps done, skipped ones included.

    `is_preemption` is called on rank 0 and returns whether a SIGTERM is a preemption; otherwise it is a cancel.
    """

    def __init__(
        self,
        resolved: Resolved,
        ranks: Ranks,
        engine: Engine,
        samples: Samples | ShardSet,
        checkpoints: Checkpoints,
        progress: Progress,
        metrics: Path,
        signals: Signals,
        is_preemption: Callable[[], bool],
        watch: GpuWatch,
        inbox: Inbox | None = None,
        heart: Heartbeat | None = None,
    ) -> None:
        self.step = progress.step
        self._train = resolved.train
        self._job = resolved.job
        self._budget_end = budget_end(os.environ, resolved.job.signal_lead_s)
        self._batch = resolved.batch
        self._ranks = ranks
        self._engine = engine
        self._identity = samples.identity
        self._stream = open_stream(samples, resolved, engine.dp_rank, engine.device, self._reports)
        self._stream.restore(progress.positions)
        self._metrics = Metrics(metrics, resolved, engine.device)
        self._agreement = Agreement(ranks.control, resolved.layout.pp)
        self._stages = resolved.layout.pp
        self._signals = signals
        self._is_preemption = is_preemption
        self._watch = watch
        self._inbox = inbox or Inbox(None)
        self._heart = heart or Heartbeat(0, 0)
        self._probe = DeviceProbe(engine.device)
        self._checkpoints = checkpoints
        self._saver = Saver(
            checkpoints, engine, ranks, self._metrics, self._inbox, resolved.train.max_failed_saves, progress.step
        )
        self._peaks: tuple[int, int] = 0, 0
        self._first_step_began: float | None = None
        # train.minutes counts the time of all attempts, with evaluations and saves.
        self._began = time.monotonic() - progress.train_s

    def run(self) -> End:
        train, metrics = self._train, self._metrics
        first = self.step
        warm = first + WARM_UP
        if self._ranks.is_first:
            metrics.recall(self.step)
        self._first_step_began = time.time()
        metrics.begin_clock()
        while self.step < train.steps:
            self._signals.hold(self.step - first)
            self._heart.enter(TRAINING)
            result = self._engine.train_step(self._stream.step(self.step))
            step = self.step = self.step + 1
            self._heart.stepped(step)
            metrics.add(step, result)
            agreed = self._agreement.all_reduce(self._report(step))
            metrics.memory = agreed.allocated_bytes, agreed.reserved_bytes
            if self._checkpoints.is_saving and not agreed.writing:
                # Completing a checkpoint and removing old ones may take the file system longer than a step.
                self._heart.enter(SAVING)
            self._saver.poll(agreed.writing)
            if step == warm:
                self._watch.begin()
            last = step == train.steps
            if train.eval_every and (step % train.eval_every == 0 or last):
                self._evaluate()
            if self._saver.gave_up or (agreed.asks_to_stop() and not (last and not agreed.bad_steps)):
                return self._stop(agreed)
            if last:
                return self._stop(None, agreed.save)
            saves = agreed.save or (train.save_every and step % train.save_every == 0)
            if saves:
                self._save(asked=agreed.save)
            if step % train.log_every == 0:
                self._log()
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
        bad, minutes = self._train.max_bad_steps, self._train.minutes
        signals, is_first = self._signals, self._ranks.is_first
        asked = self._inbox.look() if is_first else frozenset()
        return StepReport(
            walltime=signals.walltime,
            terminated=signals.terminated,
            interrupted=signals.interrupted,
            minutes=is_first and minutes is not None and self._train_s() >= 60 * minutes,
            bad_steps=is_first and 0 < bad <= self._metrics.bad_in_row,
            budget=is_first and self._budget_end is not None and time.time() >= self._budget_end,
            target=is_first and self._metrics.target.reached is not None,
            stop="stop" in asked,
            requeue="requeue" in asked,
            save="save" in asked,
            writing=self._checkpoints.busy,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
        )

    def _end(self, agreed: StepReport) -> End:
        """The end that the agreed report asks for; if there are several, the first that applies."""
        if agreed.bad_steps:
            return End("nan", f"{self._train.max_bad_steps} steps in a row were skipped or not finite")
        if agreed.interrupted:
            return INTERRUPTED
        if agreed.stop:
            return STOPPED
        if agreed.terminated:
            if self._ranks.share(self._ranks.is_first and self._is_preemption()):
                return PREEMPTED
            return CANCELLED
        if agreed.target:
            return End("done", self._metrics.target.reached)
        if agreed.budget:
            return budget_over(self._job.max_gpu_hours)
        if agreed.requeue:
            return REQUEUED
        if agreed.walltime:
            return WALLTIME
        return minutes_over(self._train.minutes)

    def _evaluate(self) -> None:
        train = self._train
        self._heart.enter(EVALUATING, as_steps=train.eval_batches)
        loss = self._engine.evaluate(
            self._stream.evaluation(train.eval_batches), train.eval_batches * self._batch.micro_batches
        )
        self._metrics.add_evaluation(loss)
        self._metrics.begin_clock()

    def _log(self) -> None:
        """Fetches, writes and prints the figures since the last log line on rank 0; the other ranks drop theirs."""
        self._probe.measure()
        self._heart.probe_s = self._probe.probe_s
        if self._ranks.is_first:
            self._metrics.fetch()
            print(self._metrics.log_line(), flush=True)
            self._metrics.write()
        else:
            self._metrics.forget()

    def _save(self, asked: bool = False, wait: bool = False) -> bool:
        """Begins a save, or with `wait` completes it. Returns False if the weights are not finite."""
        self._heart.enter(SAVING)

        def progress(train_s: float) -> Progress:
            return Progress(self.step, train_s, self._identity, self._position())

        return self._saver.save(self.step, self._train_s(), progress, asked, wait)

    def _save_last(self, asked: bool) -> bool:
        """Saves at the end, unless train.save_last is false. Returns False if the weights are not finite."""
        if self._train.save_last or asked:
            return self._save(wait=True)
        self._heart.enter(SAVING)
        return self._saver.leave_out(self.step)

    def _stop(self, agreed: StepReport | None, asked: bool = False) -> End:
        """Does the last save, fetch and log line of an attempt, and returns its end.

        `agreed` is None if all steps are done. `asked`: all ranks know of a request to save.
        """
        asked = self._agreement.finish().save or asked or (agreed is not None and agreed.save)
        saver = self._saver
        # The save comes first: asking Slurm may take 15 s, and few are left after a SIGTERM.
        sound = saver.gave_up or (not (agreed and agreed.bad_steps) and self._save_last(asked))
        self._heart.enter(LEAVING)
        end = saver.gave_up or (self._end(agreed) if agreed else End("done"))
        if self._ranks.is_first:
            self._metrics.fetch()
            if self._metrics.has_lines():
                print(self._metrics.log_line(), flush=True)
            self._metrics.write()
        if saver.gave_up or saver.saved_step == self.step:
            return end
        if not sound and end.ended == "done":
            return End("nan", "the last loss or gradient is not finite")
        if not self._train.save_last:
            return saver.left_out(end)
        return saver.unsaved(end) if sound else end

    @property
    def tenth_step(self) -> float | None:
        """End of the attempt's tenth step in epoch seconds, less the evaluations and saves before it.

        None until rank 0 has fetched that step, and on the other ranks.
        """
        began, seconds = self._first_step_began, self._metrics.first_steps_s
        return None if began is None or seconds is None else began + seconds

    @property
    def skipped_shards(self) -> dict[int, int]:
        """{dp rank: shards its stream left early, in all attempts}; empty unless this rank reports for its dp rank."""
        return {self._engine.dp_rank: self._stream.skipped_shards} if self._reports else {}

    def _position(self) -> dict[int, dict[str, Any]]:
        """{dp rank: position of its stream}; empty likewise, and if the step alone determines the position."""
        position = self._stream.position() if self._reports else None
        return {} if position is None else {self._engine.dp_rank: position}

    @property
    def _reports(self) -> bool:
        """Whether this rank is the first of the ranks with its dp rank, which all read the same data."""
        return self._engine.tp_rank == self._engine.pp_rank == 0

    def _train_s(self) -> float:
        return time.monotonic() - self._began
