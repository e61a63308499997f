"""One task of a program that is not ours: what it is asked, how it ends, what it writes at its start."""

import json
import os
import platform
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.ends.program_end import PrintedEnd
from hpc_gpt.core.errors import LayoutError, UserError
from hpc_gpt.core.processes.find_processes import Tree
from hpc_gpt.core.processes.requests import write_request
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.engines import command
from hpc_gpt.trainer.engines.command import CommandRank
from hpc_gpt.trainer.program import rank as module
from hpc_gpt.trainer.program.process import ForeignLog
from hpc_gpt.trainer.program.rank import ForeignRank, ProgramStart, Stop, _find_wait
from hpc_gpt.trainer.program.signs_of_life import ForeignHeartbeat
from hpc_gpt.trainer.supervision.heartbeat import LEAVING, SAVING, TRAINING
from hpc_gpt.trainer.supervision.signals import Signals
from tests.made_runs import unsubmitted_run
from tests.waiting import LIMIT_S, wait_for


class Task(ForeignRank):
    """Its program's last words are `fails`; a stop is over after so many presses."""

    fails: Any = ("error", "it broke", False)
    presses, how, prints, asked = 2, "", PrintedEnd(), ()

    def ask_to_end(self, stop: Stop) -> None:
        self.asked += (stop,)
        self.program.stdin.close()

    def kill_if_late(self) -> None:
        self.presses -= 1

    def rest_is_over(self) -> bool:
        return self._stop is None or self.presses <= 0

    def failure(self, code: int) -> tuple[str, str, bool]:
        return self.fails

    def end_of_all(self) -> End:
        return End("done", "all of it")

    def said(self) -> PrintedEnd:
        return self.prints

    def unsaved(self, stop: Stop, code: int) -> str:
        return self.how


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch):
    """A task of the demo, which has 4; of `run`, if it is given."""
    for name in ("_GRACE_S", "_HEARS_S", "_ENDED_S"):
        monkeypatch.setattr(module, name, getattr(module, name) / 20)

    def make(rank: int = 0, run: RunFolder | None = None, cluster: str = "local", **keys: Any) -> Task:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank % 2), ("WORLD_SIZE", 4)):
            monkeypatch.setenv(name, str(value))
        run = run or unsubmitted_run(cluster, **keys)
        return Task(run, run.attempts()[-1] if run.attempts() else run.new_attempt(), Signals())

    return make


def step(task: Task, number: int) -> None:
    task._attempt.metrics.write_text(json.dumps({"step": number}) + "\n")


def test_a_task_looks_as_often_as_all_may_together(task, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (task(0)._look_s, task(1)._look_s, task(0)._pause_s) == (1.0, 1.0, 0.1)
    run = unsubmitted_run()
    for rank, local, look_s in ((8, 0, 2.5), (9, 1, 20.0)):
        large = SimpleNamespace(tasks=1600, layout="x", nodes=200)
        own = SimpleNamespace(path=run.path, resolved=lambda large=large: large, sweep_note=dict)
        monkeypatch.setenv("WORLD_SIZE", "1600")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local))
        found = Task(own, run.new_attempt(), Signals())
        assert (found._look_s, found._pause_s) == (look_s, 0.32)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LayoutError, match=r"^3 ranks were started, but layout tp2-pp2-dp1 has 4$") as refused:
        Task(run, run.new_attempt(), Signals())
    assert refused.value.hint == "start one task for each GPU of the layout"


def test_a_programs_signal_may_reach_its_task_later(task) -> None:
    """Slurm signals each process of a step by itself; not that of a program which has done all its steps."""
    here, first = task(), task(cluster="generic-slurm")
    other, late = task(1, first._run), module._HEARS_S
    assert [each._may_hear_s(code) for each in (here, first, other) for code in (0, 1)] == [0, 0, late, late, 0, late]
    step(first, first._resolved.train.steps)
    assert [first._may_hear_s(code) for code in (0, 1)] == [0, late]


def test_the_first_that_is_asked_decides_for_all(task) -> None:
    first = task(0)
    other = task(1, first._run)
    assert (first._look_for_stop(), other._look_for_stop()) == (None, None)
    other._signals.raised |= {"walltime", "terminated"}
    assert other._look_for_stop() == Stop("terminated", False)
    write_request(first._attempt, "stop")
    first._inbox._looked = None
    assert (first.reason(), first._look_for_stop()) == ("stop", Stop("terminated", False))
    assert json.loads((first._attempt.folder / "stop.json").read_text()) == {"reason": "terminated", "save": False}
    for mark in ("metrics.jsonl", ForeignLog.TRAINS):
        late = task(0, other._run)
        late._attempt = other._run.new_attempt()
        (late._attempt.folder / mark).touch()
        late._signals.raised.add("interrupted")
        assert late._look_for_stop() == Stop("interrupted", True)


def test_a_task_learns_a_stop_from_its_nodes_first_one(task) -> None:
    first, other = task(0), task(1)
    other._looked = time.monotonic()
    other._mates = SimpleNamespace(heard=b'{"stop": {"reason": "stop", "save": true}, "step": 7}', is_first=False)
    assert other._look_for_stop() == Stop("stop", True)
    other._say(step=9)
    assert not hasattr(other._mates, "says")
    first._mates = SimpleNamespace(heard=b"", is_first=True, says=b"")
    first._say(step=9)
    first._say(stop={"reason": "stop"})
    assert json.loads(first._mates.says) == {"step": 9, "stop": {"reason": "stop"}}
    assert first._heard == {}


def test_a_visit_ends_at_its_target(task) -> None:
    first = task(0, train__steps=10)
    step(first, 10)
    assert first.reason() is None
    first._is_visit = True
    assert first.reason() == "target"
    first._stop = Stop("target", True)
    assert first._end(0) == End("done", "the 10 steps of its visit")
    step(first, 9)
    assert first.reason() is None


@pytest.mark.parametrize(
    ("rank", "code", "steps", "planned", "cluster", "seconds"),
    [
        (0, 0, 10, 0, "generic-slurm", 0.1), (0, 0, 9, 0, "generic-slurm", 0.0), (0, 0, 0, 12, "generic-slurm", 0.1),
        (0, 0, 0, 9, "generic-slurm", 0.0), (0, 0, 0, 0, "generic-slurm", 0.1), (0, 1, 9, 0, "generic-slurm", 0.1),
        (1, 0, 10, 0, "generic-slurm", 0.0), (1, 1, 10, 0, "generic-slurm", 0.1), (0, 1, 10, 0, "local", 0.0),
    ],
)  # fmt: skip
def test_how_long_a_signal_may_still_come(task, rank, code, steps, planned, cluster, seconds) -> None:
    found = task(rank, cluster=cluster, train__steps=steps or 9)
    if not steps:
        found._resolved = SimpleNamespace(train=SimpleNamespace(steps=0), cluster=found._resolved.cluster)
    found.prints = PrintedEnd(planned=planned)
    step(found, 9)
    assert found._may_hear_s(code) == seconds


def test_all_are_over_if_each_has_said_so(task) -> None:
    tasks = [task(0)]
    tasks += [task(rank, tasks[0]._run) for rank in (1, 2, 3)]
    assert [each.note_end() for each in (tasks[0], *tasks[1:3])] == [False, True, True]
    assert not tasks[0].note_end()
    tasks[3].note_end()
    assert tasks[0].note_end()
    assert sorted(path.name for path in (tasks[0]._attempt.folder / "over").iterdir()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("fails", "code", "exits", "ended", "cause"),
    [
        (("error", "it broke", False), 3, 3, "error", "rank 1: it broke"),
        (("error", "rank 5 on n2 was ended by SIGKILL", False), -9, 1, "error", "rank 5 on n2 was ended by SIGKILL"),
        (("port_taken", "in use", False), 1, 1, "port_taken", "rank 1: in use (the rendezvous' port is 4711)"),
        (("port_taken", "4711 in use", False), 1, 1, "port_taken", "rank 1: 4711 in use"),
        (("error", "hf_AbCdEfGhIjKlMnOpQrStUvWxYz", False), 1, 1, "error", "rank 1: [removed]"),
        (("error", "lost it", True), 1, 1, "error", "rank 1: lost it"),
    ],
)  # fmt: skip
def test_a_failure_is_written_with_who_and_why(task, monkeypatch, fails, code, exits, ended, cause) -> None:
    monkeypatch.setenv("MASTER_PORT", "4711")
    monkeypatch.setenv("HF_TOKEN", "hf_AbCdEfGhIjKlMnOpQrStUvWxYz")
    found = task(1)
    step(found, 9)
    (found._attempt.folder / ".reserve").write_text("x")
    found.fails, clock = fails, [0.0]
    ticks = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda s: clock.__setitem__(0, clock[0] + s))
    monkeypatch.setattr(module, "time", ticks)
    assert found._report_failure(code) == exits
    end = found._attempt.ended()
    assert (end["ended"], end["cause"], end["step"]) == (ended, cause, 9)
    assert (clock[0] >= module._ENDED_S) == fails[2], "who lost another one waits for its end"
    found._attempt.folder.joinpath("ended.json").unlink()
    found._attempt.write_ended("data", "rank 0: why", 3)
    assert found._report_failure(code) == exits
    assert found._attempt.ended()["cause"] == "rank 0: why"


@pytest.mark.parametrize(
    ("stop", "how", "end"),
    [
        (None, "", End("done", "all of it")),
        (Stop("interrupted", True), "", End("stopped", "Ctrl-C")),
        (Stop("stop", True), "it did not save", End("stopped", "hpc-gpt stop; it did not save")),
        (Stop("walltime", True), "", End("walltime", "SIGUSR2: the time limit is near")),
        (Stop("terminated", True), "", End("cancelled")),
    ],
)
def test_its_end_is_that_of_the_stop_and_how_it_took_it(task, stop, how: str, end: End) -> None:
    found = task(1 if stop == Stop("terminated", True) else 0)
    found._stop, found.how = stop, how
    assert found._end(0) == end


def test_the_heart_counts_the_steps_and_knows_the_pauses(task) -> None:
    found = task(0, train__log_every=5)
    log = SimpleNamespace(chunks=1, is_more=True, has_steps=False, stepped_boot_s=0.0)
    log.flush_steps = log.pass_step = lambda: None
    heart = ForeignHeartbeat(20, 300.0, None)
    start = ProgramStart([], {}, log, heart, 0, pauses=(0, 20))  # type: ignore[arg-type]
    found._mates = SimpleNamespace(is_first=True, says=b"", heard=b"")

    def follow(number: int, chunks: int = 1, later: bool = True) -> tuple[int, str, int]:
        log.moves = chunks
        step(found, number)
        if later:
            found._followed = found._read = 0.0
        found._follow(start)
        return heart.step, heart.phase, heart.moves

    assert follow(0) == (0, "starting", 1)  # its output moves it
    assert follow(0) == (0, "starting", 1)
    assert follow(0, 2) == (0, "starting", 2)
    assert follow(5, 2) == (5, "compiling", 3)
    assert follow(9, 2, later=False) == (5, "compiling", 3)  # at most once a second
    assert follow(15, 2)[:2] == (15, SAVING)  # that of step 20 comes before the next line
    assert json.loads(found._mates.says) == {"step": 15, "at_total": False}
    assert follow(20, 2)[:2] == (20, SAVING)  # or of this one
    assert follow(25, 2)[:2] == (25, TRAINING)
    found._mates = SimpleNamespace(is_first=False, heard=b'{"step": 31}')
    found._followed, found._read = 0.0, time.monotonic()
    found._follow(start)
    assert heart.step == 31
    found._leaving(start)
    assert heart.phase == LEAVING
    assert follow(40)[0] == 31


@pytest.mark.parametrize("asked", [False, True])
def test_it_waits_for_the_program_and_what_it_left(task, asked: bool) -> None:
    found = task(0)
    log = ForeignLog(found._attempt, found._resolved, 0, lambda line: None)
    for rank in (1, 2, 3):  # the first one waits for them
        task(rank, found._run).note_end()
    with subprocess.Popen(["sh", "-c", "read x; exit 0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        found.program = process
        log.follow(process)
        if asked:
            found._signals.raised.add("interrupted")
        else:
            process.stdin.close()
        heart = ForeignHeartbeat(20, 300.0, None)
        assert found._wait(ProgramStart([], {}, log, heart, 0), process) == 0
    stops = (Stop("interrupted", False),) if asked else ()
    assert (found.asked, heart.phase, found.presses) == (stops, LEAVING, 0 if asked else 2)


def test_what_its_start_writes_and_where_it_meets(task, monkeypatch: pytest.MonkeyPatch) -> None:
    found = task(0)
    assert found.report_start(7, {"params": 3}) == "cpu"
    path = found._attempt.folder / "trainer.json"
    assert json.loads(path.read_text()) == {"device": "cpu", "host": platform.node(), "resumed_step": 7, "params": 3}
    monkeypatch.setattr(module, "ask_gpus", lambda: ([{"name": "NVIDIA X"}], ""))
    found._attempt = found._run.new_attempt()
    assert found.report_start(0, {}) == "NVIDIA X"
    monkeypatch.undo()
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    first = found.rendezvous()
    assert first == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": found._port, "GLOO_SOCKET_IFNAME": "lo"}
    assert found._attempt.rendezvous.read_text() == f"127.0.0.1 {found._port}\n"
    assert found._held.getsockname()[1] == int(found._port)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert task(1, found._run).rendezvous() == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": found._port}
    monkeypatch.setenv("MASTER_PORT", "9")
    assert found.rendezvous() == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_a_file_of_another_task_is_awaited_or_refused(task, tmp_path: Path, monkeypatch) -> None:
    found, fault = task(1), UserError("it did not come", "why?")
    for limit_s in (0.05, 600):
        monkeypatch.setattr(module, "MEETING_S", limit_s)
        with pytest.raises(UserError) as refused:
            found.await_file(tmp_path / "file", fault)
        assert refused.value is fault
        found._attempt.write_ended("error", "x", 0)
    (tmp_path / "file").touch()
    found.await_file(tmp_path / "file", fault)


def test_where_a_program_waits_is_seen_from_outside() -> None:
    with subprocess.Popen(["sleep", "3600"]) as process:
        assert _find_wait(process.pid) == ("its program", f"process {process.pid}")
        os.kill(process.pid, signal.SIGSTOP)
        wait_for("its stop", lambda: _find_wait(process.pid) == ("", "a process that is stopped"))
        process.kill()


def test_a_training_of_nan_up_to_its_end_is_that(task) -> None:
    found = task(0)
    assert found._seen_as_nan("done", "x") == ("done", "x")
    found._attempt.metrics.write_text('{"step": 4, "loss": 2.5}\n{"step": 5, "loss": NaN}\n{"step": 6, "loss": NaN}\n')
    assert found._seen_as_nan("done", None) == ("nan", "nan since step 5")
    assert found._seen_as_nan("error", "x") == ("nan", "nan since step 5; x")
    assert found._seen_as_nan("data", "x") == ("data", "x"), "another end is known"


@pytest.mark.parametrize("reaches", [True, False])
def test_slurms_signal_is_passed_on_where_it_does_not_reach(monkeypatch, reaches: bool) -> None:
    """proctrack/cgroup signals the task alone, proctrack/linuxproc all that it has started, which must not get two."""
    monkeypatch.setattr(command, "_REACHES_S", LIMIT_S if reaches else 0.2)
    witness, program = (subprocess.Popen(["sleep", "3600"]) for _ in range(2))
    try:
        if reaches:
            witness.terminate()
        rank = SimpleNamespace(_tree=Tree([program.pid]), _witness=witness)
        rank._signal, rank._resolved = signal.SIGTERM, SimpleNamespace(cluster=SimpleNamespace(scheduler="slurm"))
        rank._slurm_tells_all = lambda: CommandRank._slurm_tells_all(rank)
        CommandRank.ask_to_end(rank, Stop("terminated", True))
        if not reaches:
            assert program.wait(LIMIT_S) == -signal.SIGTERM
        assert program.poll() == (None if reaches else -signal.SIGTERM)
    finally:
        for each in (witness, program):
            each.kill()
            each.wait()
