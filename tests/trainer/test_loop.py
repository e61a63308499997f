"""In which order the loop saves, asks, writes and looks at its figures; one rank, and an engine that only counts."""

import gzip
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpc_gpt.core.checkpoints.retention import Retention
from hpc_gpt.core.ends.end_policy import REASONS, SIGNALS, End, end_for
from hpc_gpt.core.processes.requests import answer_of, write_request
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.trainer.engines.megatron_lm import MegatronRank
from hpc_gpt.trainer.engines.protocol import StepResult
from hpc_gpt.trainer.loop import Loop, Supervision
from hpc_gpt.trainer.supervision.gpus import GpuReader
from hpc_gpt.trainer.supervision.signals import Inbox, Signals
from hpc_gpt.trainer.tokens.samples import Samples
from tests.made_runs import make_run
from tests.trainer.alone import ALONE, CountingEngine, OwnReport
from tests.trainer.launch import settings

SAMPLES = cast(Samples, SimpleNamespace(identity="the same", token_bytes={None: None}))


class Begun:
    """A loop in `folder`, with what a test looks at."""

    def __init__(
        self,
        folder: Path,
        end_of_sigterm: Callable[[str], End] = lambda alone: End("cancelled", "SIGTERM"),
        progress: Progress | None = None,
        inbox: Inbox | None = None,
        **train: Any,
    ) -> None:
        self.engine, self.signals = CountingEngine(), Signals()
        self.engine.step = progress.step if progress else 0
        self.checkpoints, self.metrics = folder / "checkpoints", folder / "metrics.jsonl"
        self.loop = Loop(
            settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 1}, **train),
            ALONE,
            self.engine,
            SAMPLES,
            Checkpoints(self.checkpoints, ALONE),
            progress or Progress(),
            self.metrics,
            Supervision(self.signals, end_of_sigterm, GpuReader(), inbox or Inbox(None)),
        )

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("step-*"))

    def lines(self, key: str = "step") -> list[Any]:
        return [json.loads(line)[key] for line in self.metrics.read_text().splitlines()]


class Clock:
    """Stands for the module `time`: steps take 2 s, evaluations 100 s, saves 1000 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 5000.0
        self.monotonic = self.perf_counter = self.time = lambda: self.now
        for module in ("saving", "loop", "metrics", "checkpoints.checkpoint", "checkpoints.save"):
            monkeypatch.setattr(f"hpc_gpt.trainer.{module}.time", self)

    def drive(self, begun: Begun) -> None:
        def slow(method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
            def call(*words: Any) -> Any:
                self.now += seconds
                return method(*words)

            return call

        engine: Any = begun.engine
        for name, seconds in (("train_step", 2.0), ("evaluate", 100.0), ("save", 1000.0)):
            setattr(engine, name, slow(getattr(engine, name), seconds))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_gpt.trainer.loop.Agreement", OwnReport)


def test_a_sigterm_is_saved_before_slurm_is_asked(tmp_path: Path) -> None:
    """Slurm may take its time, and after the grace time nothing is left."""
    asked: list[tuple[list[str], list[int]]] = []

    def end_of_sigterm(alone: str) -> End:
        asked.append((begun.saved(), begun.lines()))
        return End("preempted")

    begun = Begun(tmp_path, end_of_sigterm, steps=9)
    begun.signals.raised.add("terminated")
    end = begun.loop.run()
    assert (end.ended, end.requeue) == ("preempted", True)
    assert asked == [(["step-00000002"], [1, 2])] == [(begun.saved(), begun.lines())]


@pytest.mark.parametrize(("late", "alone"), [(3, ""), (10**6, "rank 0")])
def test_a_sigterm_may_come_to_the_ranks_one_after_the_other(tmp_path: Path, monkeypatch, late: int, alone: str):
    """Rank 1 of 2 has it only at a later look, or never."""
    told, looks = [], itertools.count()
    begun = Begun(tmp_path, lambda alone: told.append(alone) or End("cancelled"), steps=9)  # type: ignore[func-returns-value]

    def gather(own: object) -> list[object]:
        return [own, next(looks) >= late] if own is True else [own]

    monkeypatch.setattr(begun.loop._ranks, "all_gather", gather, raising=False)
    monkeypatch.setattr("hpc_gpt.trainer.loop._SIGTERM_PAUSE_S", 0.001)
    begun.signals.raised.add("terminated")
    assert begun.loop.run().ended == "cancelled"
    assert told == [alone]


def test_of_two_reasons_the_first_counts_for_every_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our loop, and the rank that supervises Megatron-LM, which knows no loss."""
    run = make_run(tmp_path, layout__tp=1, layout__pp=1, job__max_gpu_hours=1.0, train__minutes=1.0)
    resolved, trained_s = run.resolved(), [0.0]
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", resolved.gpus)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("hpc_gpt.trainer.program.rank.trained_s", lambda _: trained_s[0])
    monkeypatch.setattr(Loop, "_train_s", lambda _: trained_s[0])
    for pair in itertools.combinations([reason for reason in REASONS if reason not in ("bad_steps", "target")], 2):
        attempt = run.new_attempt()
        begun = Begun(attempt.folder, inbox=Inbox(attempt), steps=99)
        begun.loop._resolved = resolved
        trained_s[0] = 60.0 if "minutes" in pair else 0.0
        monkeypatch.setenv("HPC_GPT_STOP_AT", "7" if "budget" in pair else "")
        for reason in pair:
            if reason in ("stop", "requeue"):
                write_request(attempt, reason)
            elif reason in SIGNALS.values():
                begun.signals.raised.add(reason)
        assert MegatronRank(run, attempt, begun.signals).reason() == pair[0], pair
        assert begun.loop.run() == end_for(pair[0], resolved, lambda: End("cancelled", "SIGTERM")), pair


def test_a_saved_step_has_its_line(tmp_path: Path) -> None:
    """A resume begins after it, so nobody else would write it."""
    begun = Begun(tmp_path, steps=9, save_every=3, log_every=10)

    def die(step: int) -> float:
        if step == 5:
            raise KeyboardInterrupt
        return 1.0

    begun.engine.loss = die
    with pytest.raises(KeyboardInterrupt):
        begun.loop.run()
    assert (begun.saved(), begun.lines()) == (["step-00000003"], [1, 2, 3])


@pytest.mark.parametrize(("log_every", "save_every"), [(1000, 0), (1000, 7), (4, 0), (1, 1)])
def test_a_training_that_runs_off_ends_at_any_logging_interval(tmp_path, log_every, save_every):
    begun = Begun(tmp_path, steps=1000, max_bad_steps=3, log_every=log_every, save_every=save_every)
    begun.engine.loss = lambda step: 1.0 if step < 5 else math.nan
    end = begun.loop.run()
    assert (end.ended, end.exit_code) == ("nan", 1)
    # Seen within max_bad_steps after the third, and agreed upon a step later.
    assert 7 < begun.loop.step <= 7 + 3 + 2
    assert begun.lines() == list(range(1, begun.loop.step + 1))


def test_the_last_step_is_logged_once_saved_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = Begun(tmp_path, steps=6, save_every=3, log_every=5)
    assert (begun.loop.run().ended, begun.lines()) == ("done", [1, 2, 3, 4, 5, 6])
    said = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert said == ["step 1/6", "step 5/6", "step 6/6"], "the first one, too: it shows that the ranks train"


@pytest.mark.parametrize(
    ("free_gib", "saved"),
    [(None, [6, 12, 18, 20]), (1e6, [6, 12, 18, 20]), (0.0, [20])],
    ids=["unknown", "space", "full"],
)
def test_the_clock_saves_while_there_is_room(tmp_path, monkeypatch, capsys, free_gib, saved):
    """Due after 10 s of steps of 2 s, agreed upon a step later; the time of a save does not count."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("hpc_gpt.trainer.saving.free_gib", lambda _: free_gib)
    begun = Begun(tmp_path, steps=20, save_minutes=10 / 60)
    clock.drive(begun)
    assert begun.loop.run().ended == "done"
    assert begun.saved() == [f"step-{step:08d}" for step in saved]
    refused = "0 bytes are free in" in capsys.readouterr().out
    assert refused == (free_gib == 0.0)


def test_named_steps_are_saved_and_kept(tmp_path: Path) -> None:
    begun = Begun(tmp_path, steps=9, save_every=2, save_at=(3, 7))
    begun.loop.run()
    assert begun.saved() == [f"step-{step:08d}" for step in (2, 3, 4, 6, 7, 8, 9)]
    folder = begun.checkpoints
    removed = Retention(keep_last=1, keep_every=4, keep_at=(3, 7)).apply(folder, 9)
    assert removed == ["step-00000006", "step-00000002"]


def test_a_profile_of_two_steps_is_in_the_attempts_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = Begun(tmp_path, steps=6, profile_steps=(2, 3))
    begun.loop.run()
    with gzip.open(tmp_path / "trace-rank0.json.gz", "rt") as file:
        assert json.load(file)["traceEvents"]
    assert "profiled steps 2 to 3: " in capsys.readouterr().out


def test_minutes_count_over_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    begun = Begun(tmp_path, progress=Progress(10, 80.0), steps=1000, minutes=1.5)
    clock.drive(begun)
    assert begun.loop.run().cause == "train.minutes = 1.5 are over"
    # 90 s are over after the fifth step, agreed upon a step later.
    assert begun.loop.step == 10 + 5 + 1


def test_a_run_ends_at_the_loss_that_was_asked_for(tmp_path: Path) -> None:
    begun = Begun(tmp_path, steps=1000, until_loss=5.2, log_every=3)
    begun.engine.loss = lambda step: 6.0 - 0.02 * step
    end = begun.loop.run()
    # The mean of 20 steps up to the 50th; looked at after the line of the 51st, and agreed on a step later.
    assert (end.ended, begun.loop.step) == ("done", 53)
    assert str(end.cause).endswith("train.until_loss = 5.2")
    assert begun.saved() == ["step-00000053"]


def test_a_budget_that_runs_out_ends_a_link_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead of the signal is what saving may take: so much earlier it begins."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("hpc_gpt.core.ends.end_policy.time", clock)
    monkeypatch.setattr("hpc_gpt.core.ends.end_policy.host_clock", lambda: ("this boot", clock.now))
    begun = Begun(tmp_path, steps=1000)
    begun.loop._resolved = replace(begun.loop._resolved, job=replace(begun.loop._resolved.job, max_gpu_hours=9.0))
    lead = begun.loop._resolved.job.signal_lead_s
    assert lead
    monkeypatch.setenv("HPC_GPT_STOP_AT", f"{clock.now + lead + 20:.0f}")
    clock.drive(begun)
    assert (begun.loop.run().ended, begun.loop.step) == ("budget", 11)
    assert begun.saved() == ["step-00000011"]


def test_an_evaluation_is_of_as_many_micro_batches_as_it_has(tmp_path: Path) -> None:
    begun = Begun(tmp_path, steps=2, eval_every=2, eval_batches=3)
    counts: list[int] = []
    engine: Any = begun.engine

    def evaluate(micro_batches: Any, count: int) -> torch.Tensor:
        counts.append(count)
        return torch.tensor(1.0)

    engine.evaluate = evaluate
    begun.loop.run()
    assert counts == [3 * 2]


def test_steps_skipped_to_the_very_end_are_no_done_run(tmp_path: Path) -> None:
    """fp16 whose scale never fits leaves the weights finite, and untrained."""
    begun = Begun(tmp_path, steps=5, max_bad_steps=3)
    engine: Any = begun.engine

    def skip(micro_batches: Any) -> StepResult:
        engine.step += 1
        return StepResult(torch.tensor(1.0), math.inf, 1e-3, True)

    engine.train_step = skip
    end = begun.loop.run()
    # Three are seen after the third step, said at the fourth, and agreed upon at the last.
    assert (begun.loop.step, end.ended, begun.saved()) == (5, "nan", [])


def test_without_its_last_save_a_run_is_done_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = Begun(tmp_path, steps=6, save_every=3, save_last=False)
    end = begun.loop.run()
    assert (end.ended, end.cause, end.exit_code) == ("done", None, 0)
    assert (begun.saved(), begun.lines()) == (["step-00000003"], [1, 2, 3, 4, 5, 6])
    assert "not saved after step 6: train.save_last is false" in capsys.readouterr().out


def test_no_end_saves_where_the_last_save_is_left_out(tmp_path: Path) -> None:
    words = "not saved: train.save_last is false"
    for wish, ended in (("walltime", "walltime"), ("interrupted", "stopped"), ("terminated", "cancelled")):
        begun = Begun(tmp_path / wish, steps=9, save_last=False)
        begun.metrics.parent.mkdir()
        begun.signals.raised.add(wish)
        end = begun.loop.run()
        assert (end.ended, str(end.cause).rpartition("; ")[2], begun.saved()) == (ended, words, [])


def test_an_end_right_behind_a_save_has_nothing_to_leave_out(tmp_path: Path) -> None:
    begun = Begun(tmp_path, steps=9, save_every=1, save_last=False)
    save: Any = begun.loop._save

    def save_and_warn(asked: bool = False) -> bool:
        if begun.loop.step >= 2:
            begun.signals.raised.add("walltime")
        return save(asked)

    begun.loop._save = save_and_warn
    end = begun.loop.run()
    # Seen at the third step's edge, agreed upon at the fourth's, whose own save it comes before.
    assert (begun.loop.step, begun.saved()[-1]) == (4, "step-00000003")
    assert end.cause == f"{REASONS['walltime'][1]}; not saved: train.save_last is false"


def test_a_loss_that_is_no_number_is_no_done_run_unsaved_too(tmp_path: Path) -> None:
    begun = Begun(tmp_path, steps=5, save_last=False)
    begun.engine.loss = lambda step: 1.0 if step < 5 else math.nan
    assert begun.loop.run() == End("nan", "the last loss or gradient is not finite")


@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize("save_last", [True, False])
def test_a_save_asked_for_during_the_last_steps_is_answered(tmp_path, monkeypatch, at, save_last):
    """Its word goes round for a step, and the folder is looked at once in a while: the loop may be over by then."""
    monkeypatch.setattr("hpc_gpt.trainer.supervision.signals._LOOK_S", 1e9)
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    begun = Begun(tmp_path, steps=5, save_last=save_last, inbox=Inbox(attempt))
    requests = []

    def ask_once(step: int) -> float:
        if step == at:
            requests.append(write_request(attempt, "save"))
        return 1.0

    begun.engine.loss = ask_once
    assert begun.loop.run() == End("done")
    said = answer_of(attempt, requests[0])
    if at == 1:  # seen at the first look, agreed upon a step later
        assert (said["step"], said["done"]) == (2, True)
    elif save_last:
        assert (said["step"], said["done"], said["words"]) == (5, True, "")
    else:
        assert (said["done"], said["words"]) == (False, "not saved after step 5: train.save_last is false")
        assert begun.saved() == []


@pytest.mark.parametrize("at", [4, 5])
def test_a_save_asked_for_at_the_last_step_is_done_in_any_case(tmp_path, at, monkeypatch):
    monkeypatch.setattr("hpc_gpt.trainer.supervision.signals._LOOK_S", 0.0)
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    begun = Begun(tmp_path, steps=5, save_last=False, inbox=Inbox(attempt))
    begun.engine.loss = lambda step: float(step == at and write_request(attempt, "save") is not None)
    assert (begun.loop.run(), begun.saved()) == (End("done"), ["step-00000005"])


def test_a_run_that_is_through_saves_nothing_again(tmp_path: Path) -> None:
    begun = Begun(tmp_path, progress=Progress(4), steps=4)
    assert (begun.loop.run().ended, begun.saved()) == ("done", [])


def test_gpus_are_watched_once_the_steps_that_warm_up_are_done(tmp_path: Path) -> None:
    begun = Begun(tmp_path, progress=Progress(3), steps=9)
    began: list[tuple[int, int]] = []
    begun.loop._gpus = cast(GpuReader, SimpleNamespace(begin=lambda count: began.append((begun.loop.step, count))))
    begun.loop.run()
    assert began == [(5, 0)], "a run on a CPU counts no GPU of its machine"


@pytest.mark.parametrize(
    ("tp_rank", "pp_rank", "cp_rank", "speaks"), [(0, 0, 0, True), (1, 0, 0, False), (0, 1, 0, False), (0, 0, 1, False)]
)
def test_one_rank_of_those_that_read_the_same_speaks_for_it(tmp_path, tp_rank, pp_rank, cp_rank, speaks):
    begun = Begun(tmp_path, steps=1)
    engine = begun.engine
    engine.tp_rank, engine.pp_rank, engine.cp_rank = tp_rank, pp_rank, cp_rank
    assert begun.loop.skipped_shards == ({0: 0} if speaks else {})
