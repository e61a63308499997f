"""One rank's part in an attempt, from the rendezvous to ended.json; and the seconds of each part of its start."""

import contextlib
import functools
import json
import os
import platform
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from hpc_gpt.core.checkpoints.find_checkpoints import list_complete
from hpc_gpt.core.checkpoints.lineage import checkpoint_sources, find_ancestors
from hpc_gpt.core.checkpoints.retention import Retention
from hpc_gpt.core.errors import CheckpointError, DataError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.network import check_open_files, use_interface
from hpc_gpt.core.process import stat_of
from hpc_gpt.core.runs.full_disk import reserve, when_there_is_space
from hpc_gpt.core.runs.provenance import check_weights_of, complete_run, config_notes
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.environment import ALLOCATION
from hpc_gpt.trainer.checkpoints.checkpoint import Background, Checkpoints, Progress
from hpc_gpt.trainer.curves import Curves
from hpc_gpt.trainer.engines.build import build_engine
from hpc_gpt.trainer.engines.library_patches import without_compiler
from hpc_gpt.trainer.engines.protocol import TrainingEngine
from hpc_gpt.trainer.loop import Loop, Supervision
from hpc_gpt.trainer.measurements import write_measured
from hpc_gpt.trainer.model.experts import GroupedLinear
from hpc_gpt.trainer.ranks import Ranks, choose_device, leave, write_flight_record
from hpc_gpt.trainer.supervision.ending import end_of_sigterm, write_end
from hpc_gpt.trainer.supervision.gpus import GpuReader
from hpc_gpt.trainer.supervision.heartbeat import STARTING, Heartbeat
from hpc_gpt.trainer.supervision.meeting import RankIdentity
from hpc_gpt.trainer.supervision.signals import Inbox, Signals
from hpc_gpt.trainer.supervision.watchdog import Watchdog
from hpc_gpt.trainer.tokens.run_data import LookedUp, ensure_data, located
from hpc_gpt.trainer.tokens.samples import Samples, open_samples
from hpc_gpt.trainer.tokens.shard_stream import ShardSet

# Seconds in which a rank that leaves a hang must print and announce it.
_LEAVE_S = 8.0
# Longest wait for the removal of old checkpoints, if the end of the attempt leaves time for it.
_TIDY_S = 600.0
# Longest wait for the services of [track], and the wait if the attempt has failed or must end quickly.
_CURVES_S, _FEW_S = 30.0, 3.0
_START_FILE = "start.json"
# The parts of a start, in their order. `script`: from the job's start to the start of this rank's process, with a
# preflight, but without the `staging` that a profile's `stage` requests. `imports`: until the rank's modules are
# loaded. `rendezvous`: until all ranks have met. `build`: data, model, engine and checkpoint, until the first step
# begins.
START_PARTS = ("script", "staging", "imports", "rendezvous", "build", "first_step")


class StartClock:
    """Rank 0's clock of the start. `end(part)` is called where a part ends; the last part writes the attempt's
    start.json.

    A part without an end has 0 s; its time counts for the next part.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._process_start = process_start()
        self._job_start = min(_job_start(attempt.started()) or self._process_start, self._process_start)
        # In a local run the script becomes this process (exec), so the process began before the script did its work.
        staging_s, until = _staging()
        # A staging that ended before the job's start was that of an earlier attempt.
        staging_s = staging_s if until > self._job_start else 0.0
        until = max(until, self._process_start)
        self._ends = {"script": until - staging_s, "staging": until}

    def end(self, part: str) -> None:
        """Notes that a part of START_PARTS ends now; a second call for the same part changes nothing."""
        if part in self._ends:
            return
        self._ends[part] = time.time()
        if part == START_PARTS[-1]:
            when_there_is_space(
                lambda: write_once(self._attempt.folder / _START_FILE, json.dumps(self.figures()) + "\n"), _START_FILE
            )

    def figures(self) -> dict[str, object]:
        """`start_s`, and `start_parts`: seconds by part, whose sum is `start_s` but for rounding."""
        parts, began = {}, self._job_start
        for part in START_PARTS:
            ended = max(self._ends.get(part, began), began)
            parts[part] = round(ended - began, 3)
            began = ended
        return {"start_s": round(began - self._job_start, 3), "start_parts": parts}


def _staging() -> tuple[float, float]:
    """Returns (seconds that the script's staging took, the epoch seconds of its end); zeros without one."""
    try:
        seconds, until = map(float, os.environ.get("HPC_GPT_STAGING", "0 0").split())
    except ValueError:
        return 0.0, 0.0
    return max(0.0, seconds), until


def process_start() -> float:
    """The time at which this process started, in epoch seconds."""
    since_boot = float(stat_of("self")[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def _job_start(started: Mapping[str, object]) -> float | None:
    """The time at which the attempt's job started, in epoch seconds: Slurm's if the attempt is a job of its own, else,
    and after a restart in the job, the time at which its script made attempt.json."""
    noted = started.get("started")
    job = str(started.get("job_id", "")).partition("_")[0]
    slurm = os.environ.get("SLURM_JOB_START_TIME", "")
    is_own = bool(job) and job in (os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_ARRAY_JOB_ID"))
    is_own &= ALLOCATION not in os.environ
    if slurm.isdigit() and is_own and not started.get("in_job"):
        return float(slurm)
    return float(noted) if isinstance(noted, int | float) else None


class Trainer:
    """One rank's part in an attempt."""

    def __init__(self, run: RunFolder, attempt: Attempt, identity: RankIdentity, signals: Signals) -> None:
        self.ranks: Ranks | None = None
        self._loop: Loop | None = None
        self._run = run
        self._attempt = attempt
        self._identity = identity
        self._signals = signals

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        return self._loop.step if self._loop else 0

    def train(self, resolved: Resolved) -> int:
        """Trains to the end or to an interruption, and returns the exit code. The caller reports exceptions."""
        self._identity.check(resolved.tasks, resolved.layout)
        clock = StartClock(self._attempt) if self._identity.rank == 0 else None
        heart = Heartbeat(resolved.train.hang_multiple, resolved.train.hang_floor_s)
        device, ranks, gpus = self._meet(resolved, heart, clock)
        resolved, samples = self._open_data(resolved, ranks)
        heart.enter(STARTING)
        shows = ranks.is_first and resolved.track.is_asked
        curves = Curves(self._run, self._attempt, resolved) if shows else None
        engine = self._build(resolved, ranks, device)
        heart.enter(STARTING)
        checkpoints = _checkpoints_of(resolved, self._run, ranks)
        progress = self._resume(resolved, engine, ranks, checkpoints)
        if ranks.is_first:
            # The last attempt may have had to end before it could remove old checkpoints.
            checkpoints.retain()
            self._report_start(resolved, engine, progress, samples, heart)
        if clock is not None:
            clock.end("build")
        supervision = Supervision(
            self._signals,
            functools.partial(end_of_sigterm, self._run, self._attempt, self._signals),
            gpus,
            Inbox(self._attempt),
            heart,
            functools.partial(clock.end, "first_step") if clock is not None else lambda: None,
        )
        loop = self._loop = Loop(
            resolved, ranks, engine, samples, checkpoints, progress, self._attempt.metrics, supervision, curves
        )
        try:
            end = loop.run()
        except BaseException:
            if curves is not None:
                curves.close(_FEW_S)
            raise
        if clock is not None and loop.step > progress.step:
            clock.end("first_step")  # the loop does not call it in an attempt of one step
        # Before all else: the calls below are collective, and may fail or be cut short.
        if ranks.is_first:
            write_end(self._run, self._attempt, end, self.step)
        shards, tenth_step = loop.skipped_shards, loop.tenth_step
        write_measured(self._attempt, ranks, gpus.sums, device, shards, tenth_step)
        leaves_time = end.leaves_time and self._signals.terminated_at is None
        if ranks.is_first and leaves_time:
            checkpoints.retain()
            # The other ranks wait for this one to leave.
            checkpoints.await_removal(min(_TIDY_S, heart.limit_s() / 2 or _TIDY_S))
        if curves is not None:
            curves.close(min(_CURVES_S, heart.limit_s() / 2 or _CURVES_S) if leaves_time else _FEW_S)
        return end.exit_code

    def _meet(
        self, resolved: Resolved, heart: Heartbeat, clock: StartClock | None
    ) -> tuple[torch.device, Ranks, GpuReader]:
        """Returns this rank's device, its peers, once all ranks have met, and the reader of the node's GPUs. A watchdog
        watches `heart` from the beginning."""
        rank, size = self._identity.rank, self._identity.size
        if rank == 0:
            check_open_files(size)
        if clock is not None:
            clock.end("imports")
        record = functools.partial(write_flight_record, self._attempt, rank)
        watchdog = Watchdog(self._attempt, rank, size, heart, self._leave_hanging, write_record=record)
        watchdog.start()
        device = choose_device(self._identity, resolved)
        _share_cores(device, resolved)
        use_interface(resolved.nodes, self._identity.local_rank)
        self.ranks = ranks = Ranks(self._identity, device, self._attempt, heart.patience_s)
        heart.enter(STARTING)
        if clock is not None:
            clock.end("rendezvous")
            reserve(self._attempt)
            when_there_is_space(lambda: complete_run(self._run.path, resolved), "the rest of the run folder")
            for note in config_notes(self._run.path, resolved):
                print(note, flush=True)
        return device, ranks, watchdog.gpus

    def _build(self, resolved: Resolved, ranks: Ranks, device: torch.device) -> TrainingEngine:
        with without_compiler() if resolved.engine.compile == "none" else contextlib.nullcontext():
            return build_engine(self._to_build(resolved, ranks), device)

    def _resume(self, resolved: Resolved, engine: TrainingEngine, ranks: Ranks, checkpoints: Checkpoints) -> Progress:
        """Resumes from the newest sound checkpoint of this run (`checkpoints`), else of the nearest run that it
        continues.

        A branch begins from the checkpoint that it names. If its data are not the checkpoint's, they begin at their
        first sample.
        """
        sources = ranks.broadcast(checkpoint_sources(self._run) if ranks.is_first else [])
        for run, step in sources:
            is_own = run.path == self._run.path
            source = checkpoints if is_own else Checkpoints(run.checkpoints, ranks)
            progress = source.resume(engine, is_own, step)
            if progress.step:
                other_data = progress.step <= resolved.data_from
                return replace(progress, data="", positions={}) if other_data else progress
        if len(sources) > 1:
            run, step = sources[1]
            of_step = "" if step is None else f" of step {step}"
            raise CheckpointError(
                f"the run continues {run.path}, which no longer has a sound checkpoint{of_step}",
                "submit a new run instead of starting this one from step 0",
            )
        if resolved.train.init is not None and engine.given_weights is None:
            raise CheckpointError(
                "no checkpoint of the run could be loaded, and its weights were not read from train.init",
                "start it again: damaged checkpoints are set aside, so it begins from train.init",
            )
        return Progress()

    def _to_build(self, resolved: Resolved, ranks: Ranks) -> Resolved:
        """The settings from which the engine is built. They lack train.init if there is a checkpoint to load, so a
        resumption does not need its folder any more. Raises ConfigError if the folder has changed since the run was
        submitted."""
        if resolved.train.init is None:
            return resolved
        resumes = False
        if ranks.is_first:
            resumes = any(
                True for run in [self._run, *find_ancestors(self._run)] for _ in list_complete(run.checkpoints)
            )
            if not resumes:
                check_weights_of(self._run.path, resolved)
        resumes = ranks.broadcast(resumes)
        if not resumes and ranks.is_first:
            print(f"begins from the weights in {resolved.train.init}", flush=True)
        return replace(resolved, train=replace(resolved.train, init=None)) if resumes else resolved

    def _leave_hanging(self, message: str) -> None:
        """Ends this rank from the watchdog's thread. Nothing here may wait for the main thread."""
        # A main thread that hangs in a print holds the lock that a flush needs.
        threading.Timer(_LEAVE_S, os._exit, (1,)).start()
        print(message, flush=True)
        if self.ranks is not None:
            announcement = threading.Thread(target=self.ranks.announce_failure, args=(1,), daemon=True)
            announcement.start()
            announcement.join(_LEAVE_S / 2)
        leave(1)

    def quit(self) -> None:
        """Writes ended.json for an attempt that ends at once, without a save."""
        self._attempt.write_ended("stopped", "Ctrl-C twice: left without saving", self.step)

    def _open_data(self, resolved: Resolved, ranks: Ranks) -> tuple[Resolved, Samples | ShardSet]:
        """Returns the settings with the paths of the data files, and the run's samples.

        One rank of each node looks the files up and makes missing ones. All ranks compare the SHA-256 of their data
        with rank 0's.
        """
        looked_up: LookedUp = {}
        looks = self._identity.local_rank == 0
        if looks:
            ensure_data(resolved, beside=self._run.data_beside, looked_up=looked_up)
        resolved = located(resolved, ranks.broadcast(self._run.data_beside if ranks.is_first else None))
        ranks.barrier()
        looked_up_by_first = ranks.broadcast(looked_up)
        samples = open_samples(resolved, looked_up if looks else looked_up_by_first)
        first = ranks.broadcast(samples.identity)
        if samples.identity != first:
            raise DataError(
                f"the data on {platform.node()} have SHA-256 {samples.identity[:12]}…, rank 0's {first[:12]}…",
                "let all nodes read the same data: set HPC_GPT_DATA to a folder on a shared file system",
            )
        return resolved, samples

    def _report_start(
        self,
        resolved: Resolved,
        engine: TrainingEngine,
        progress: Progress,
        samples: Samples | ShardSet,
        heart: Heartbeat,
    ) -> None:
        """Writes trainer.json and prints the first lines."""
        name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu"
        attention = engine.attention.chosen
        start = {
            "device": name,
            "host": platform.node(),
            "torch": torch.__version__,
            "params": resolved.model.params,
            "resumed_step": progress.step,
            "data": samples.identity,
            "attention_used": attention,
            **({"experts_by_loop": GroupedLinear.refused} if GroupedLinear.refused else {}),
        }
        path = self._attempt.folder / "trainer.json"
        when_there_is_space(lambda: write_once(path, json.dumps(start) + "\n"), path.name)
        print(
            f"{resolved.name}: {resolved.layout} on {resolved.gpus} x {name}, {resolved.model.params:,} parameters, "
            f"{resolved.train.dtype}, global batch {resolved.batch.global_batch} x {resolved.model.seq} tokens, "
            f"attention {attention}",
            flush=True,
        )
        print(_limits(heart), flush=True)
        if progress.step:
            print(f"resumed after step {progress.step} of {resolved.train.steps}", flush=True)
        if progress.data and progress.data != samples.identity:
            print(
                f"warning: the data differ from those of the checkpoint (SHA-256 {samples.identity[:12]}… now, "
                f"{progress.data[:12]}… in the checkpoint)",
                flush=True,
            )


def _limits(heart: Heartbeat) -> str:
    """A line on the time limits: a collective's, and the watchdog's, which ends the attempt."""
    watch = "hangs are not watched for (train.hang_multiple is 0)"
    if heart.multiple:
        watch = (
            f"a hang is found after {heart.limit_s() / 60:g} min while starting, compiling or saving, else after the "
            f"time of {heart.multiple:g} steps, at least {heart.floor_s:g} s"
        )
    return f"a collective may take {heart.patience_s / 60:g} min; {watch}"


def _checkpoints_of(resolved: Resolved, run: RunFolder, ranks: Ranks) -> Checkpoints:
    """The run's checkpoints, with the settings for saving and retention."""
    train = resolved.train
    retention = Retention(train.keep_last, train.keep_every, train.save_at)
    background = Background(resolved.train.save_in_background, resolved.ranks_per_node)
    return Checkpoints(run.checkpoints, ranks, background, retention)


def _share_cores(device: torch.device, resolved: Resolved) -> None:
    """Gives each rank on a CPU an even share of the cores, unless OMP_NUM_THREADS is set."""
    if device.type == "cpu" and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // resolved.ranks_per_node))
