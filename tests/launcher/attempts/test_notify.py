"""[notify]: which end is which event, what a command gets, that it gets it once, and what happens if it fails."""

import json
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.attempts.notify import event_of, leaves_to_next, main, send_event, send_saved
from hpc_gpt.launcher.render import render_script
from tests.around import EVENTS
from tests.command.mine import experiment
from tests.made_runs import add_attempt, add_checkpoint, make_run, metrics_line, unsubmitted_run
from tests.processes import state_of
from tests.programs import put, ran
from tests.waiting import patient, wait_for


def run_that_tells(command: Any, **notify: Any) -> RunFolder:
    keys = {"command": command, "on": list(EVENTS), **notify}
    return unsubmitted_run(**{f"notify.{name}": value for name, value in keys.items()})


def judged(run: RunFolder, ended: str, go_on: bool = False, pause_s: float = 0.0, **verdict: Any) -> Attempt:
    """An attempt of steps 1 and 2 that ended so and is judged."""
    attempt = add_attempt(run, [metrics_line(1, step_s=0.5), metrics_line(2, loss=3.5)], ended, cause="rank 1: lost")
    known = {"go_on": go_on, "ended": ended, "attempt_ended": ended, "pause_s": pause_s, "gpu_hours": 1.25, **verdict}
    (attempt.folder / "next.json").write_text(json.dumps({"why": "it is said", "cause": "rank 1: lost", **known}))
    return attempt


@pytest.mark.parametrize(
    ("verdict", "event"),
    [
        ({"ended": "done"}, "ended"),
        ({"ended": "error", "go_on": True}, "retried"),
        ({"ended": "node_failure", "go_on": True}, "retried"),
        ({"ended": "walltime", "go_on": True}, None),
        ({"ended": "preempted", "go_on": True}, None),
        ({"ended": "no_progress", "attempt_ended": "error"}, "failed"),
        ({"ended": "nan"}, "failed"),
        ({"ended": "budget"}, "failed"),
        ({"ended": "walltime"}, "failed"),
        ({"ended": "stopped"}, "stopped"),
        ({"ended": "cancelled"}, "stopped"),
        ({"ended": "refused"}, None),
    ],
)
def test_which_end_is_which_event(verdict: dict[str, Any], event: str | None) -> None:
    run = run_that_tells("true")
    assert event_of(run, judged(run, **verdict)) == event


def test_a_command_is_told_once_with_every_key(tmp_path: Path) -> None:
    run = run_that_tells(f"cat >>{tmp_path / 'told'}")
    attempt = judged(run, "error", go_on=True, pause_s=60)
    for _ in range(2):  # a script asks the chain twice
        assert main([str(run.path), "1", "after"]) == 0
    # So short an attempt may have ended before the process beside its ranks has seen its first step.
    first, line = (tmp_path / "told").read_text().splitlines()
    assert json.loads(first)["event"] == "first_step"
    steps = run.resolved().train.steps
    assert json.loads(line) == {
        "event": "retried", "run": run.run_id, "name": run.resolved().name, "folder": str(run.path), "attempt": 1,
        "job": attempt.started()["job_id"], "ended": "error", "cause": "rank 1: lost", "node": None, "rank": None,
        "share": None, "checkpoint": None, "step": 2, "steps": steps, "loss": 3.5,
        "gpu_hours": 1.25, "hours_left": round((steps - 2) * 0.5 / 3600, 4),
        "next": "attempt 2 in 60 s",
    }  # fmt: skip


def test_what_a_pause_has_no_time_for_is_told_at_the_next_start(tmp_path: Path) -> None:
    run = run_that_tells(["tee", "-a", str(tmp_path / "told")], timeout_s=20)
    assert leaves_to_next(judged(run, "error", go_on=True, pause_s=29), 20)
    main([str(run.path), "1", "after"])
    assert not (tmp_path / "told").exists()
    add_attempt(run, [metrics_line(3)], None)
    main([str(run.path), "2", "beside"])
    events = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [(each["event"], each["attempt"]) for each in events] == [
        ("first_step", 1),
        ("retried", 1),
        ("first_step", 2),
    ]
    assert events[2]["hours_left"] is not None
    assert events[2]["next"] == "it trains"


def test_a_run_stopped_while_waiting_is_silent_out_of_budget_not(tmp_path: Path) -> None:
    run = run_that_tells(f"cat >>{tmp_path / 'told'}")
    judged(run, "cancelled")
    main([str(run.path), "1", "refused"])
    assert not (tmp_path / "told").exists()
    judged(run, "budget")
    main([str(run.path), "2", "refused"])
    assert json.loads((tmp_path / "told").read_text())["ended"] == "budget"


def told_saved(path: Path) -> list[tuple[Any, ...]]:
    """Attempt, step and checkpoint of each event `saved` in a file."""
    told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(each["attempt"], each["step"], each["checkpoint"]) for each in told if each["event"] == "saved"]


def test_a_checkpoint_is_told_once_over_all_attempts(tmp_path: Path) -> None:
    """The first look at a checkpoint sends its event, also in the next attempt. A removed checkpoint has none."""
    run = run_that_tells(f"cat >>{tmp_path / 'told'}", on=["saved"])
    add_attempt(run, [metrics_line(step, step_s=0.5) for step in range(1, 31)], "error")
    first, second = (add_checkpoint(run, step) for step in (10, 20))
    main([str(run.path), "1", "after"])
    main([str(run.path), "1", "after"])
    assert told_saved(tmp_path / "told") == [(1, 10, str(first)), (1, 20, str(second))]
    event = json.loads((tmp_path / "told").read_text().splitlines()[0])
    assert (event["loss"], event["ended"], event["cause"], event["next"]) == (2.4, None, None, "no other attempt")
    assert event["hours_left"] == round((run.resolved().train.steps - 10) * 0.5 / 3600, 4)

    add_attempt(run, [metrics_line(31)], "done")
    third, fourth = (add_checkpoint(run, step) for step in (30, 40))
    shutil.rmtree(first)
    shutil.rmtree(third)
    add_checkpoint(run, 10)  # trained again
    main([str(run.path), "2", "beside"])
    main([str(run.path), "2", "after"])
    assert told_saved(tmp_path / "told")[2:] == [(2, 40, str(fourth))]


def test_a_run_that_was_moved_tells_none_again(tmp_path: Path) -> None:
    run = run_that_tells(f"cat >>{tmp_path / 'told'}", on=["saved"])
    add_attempt(run, 30, "done")
    add_checkpoint(run, 10)
    main([str(run.path), "1", "after"])
    moved = RunFolder(run.path.rename(tmp_path / run.run_id))
    main([str(moved.path), "1", "after"])
    assert len(told_saved(tmp_path / "told")) == 1


def test_with_a_full_disk_a_checkpoint_is_told_later(tmp_path: Path) -> None:
    run = run_that_tells(f"cat >>{tmp_path / 'told'}", on=["saved"])
    attempt = add_attempt(run, 30, None)
    add_checkpoint(run, 10)
    run.announced.touch()  # no mark can be written
    send_saved(run, run.resolved(), attempt)
    assert told_saved(tmp_path / "told") == []
    run.announced.unlink()
    send_saved(run, run.resolved(), attempt)
    assert len(told_saved(tmp_path / "told")) == 1


def test_of_a_programs_checkpoints_the_whole_ones_are_told(tmp_path: Path) -> None:
    """Two checkpoints of one step have two events; a file that is written anew has one for each step."""
    command = {"run": "true", "checkpoints": "{run}/*.pt", "complete": "{checkpoint}.whole"}
    told = {"command": f"cat >>{tmp_path / 'told'}", "on": ["saved"]}
    path = experiment(tmp_path, "saves", command, {"layout": {"gpus": 1}, "notify": told})
    run = make_run(tmp_path / "logs", experiment=str(path), submit=False)
    attempt = add_attempt(run, [metrics_line(7, time=1.0)], None)
    names = [run.path / name for name in ("step-5.pt", "best-step-5.pt", "step-9.pt", "last.pt")]
    for path in names:
        path.write_bytes(b"x")
    for path in (names[0], names[1], names[3]):
        put(path.with_name(f"{path.name}.whole"), "")
    send_saved(run, run.resolved(), attempt)
    told_first = told_saved(tmp_path / "told")
    assert sorted(told_first) == [(1, 5, str(names[1])), (1, 5, str(names[0])), (1, 7, str(names[3]))]
    attempt.metrics.write_text(json.dumps(metrics_line(8, time=2.0)) + "\n")
    put(names[2].with_name("step-9.pt.whole"), "")
    for _ in range(2):
        send_saved(run, run.resolved(), attempt)
    assert told_saved(tmp_path / "told")[3:] == [(1, 8, str(names[3])), (1, 9, str(names[2]))]


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    run = run_that_tells(f"cat >>{tmp_path / 'told'}")
    attempt = add_attempt(run, [metrics_line(1, loss=float("nan"))], "nan")
    send_event(run, run.resolved(), attempt, "failed")
    assert json.loads((tmp_path / "told").read_text(), parse_constant=pytest.fail)["loss"] is None


def test_only_the_events_that_are_asked_for_are_told(tmp_path: Path) -> None:
    run = run_that_tells(f"cat >>{tmp_path / 'told'}", on=["ended"])
    send_event(run, run.resolved(), judged(run, "error"), "failed")
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo no mail here >&2; exit 3", "notify: failed: the command ended with exit code 3: no mail here\n"),
        ("kill -9 $$", "notify: failed: the command ended with SIGKILL (exit code -9)\n"),
        (["no-such-mail"], "notify: failed: no-such-mail cannot be started: No such file or directory\n"),
        ("true", ""),
        ("printf 'no hf_%020d' 7; false", "notify: failed: the command ended with exit code 1: no [removed]\n"),
    ],
)
def test_a_command_that_fails_is_a_line(command: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_that_tells(command)
    send_event(run, run.resolved(), judged(run, "error"), "failed")
    assert capsys.readouterr().out == said


def test_of_what_a_command_prints_the_end_is_kept_alone(capsys, tmp_path, monkeypatch) -> None:
    """It waits for no process that the command leaves behind."""
    left = "echo its end >&2; sleep 6000 & echo $! >left; exit 3"
    monkeypatch.chdir(tmp_path)
    run = run_that_tells(f"yes of this | head -c 64M || exit 9; {left}", on=["ended"], timeout_s=patient(60))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # a larger file ends its writer
    try:
        send_event(run, run.resolved(), judged(run, "done"), "ended")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().out.startswith("notify: ended: the command ended with exit code 3")
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


def test_a_command_has_nothing_of_our_codes_environment(capsys, tmp_path, monkeypatch) -> None:
    put(tmp_path / "beside.py", "")
    hook = put(
        tmp_path / "hook.py",
        "import os, beside\n"
        "print([name for name in os.environ if name[:6] == 'PYTHON'], os.environ['PYTHONPATH'])\n"
        "exit(3)\n",
    )
    run = run_that_tells([sys.executable, str(hook)])
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        monkeypatch.delenv(name)
    for name in ("PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", f"{run.path}/code.zip:/mine:")
    send_event(run, run.resolved(), judged(run, "done"), "ended")
    assert capsys.readouterr().out == "notify: ended: the command ended with exit code 3: ['PYTHONPATH'] /mine\n"


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path, capsys):
    limit_s = patient(5)
    run = run_that_tells(f"sleep 6000 & echo $! >{tmp_path}/child; wait", timeout_s=limit_s)
    send_event(run, run.resolved(), judged(run, "error"), "failed")
    assert capsys.readouterr().out == f"notify: failed: the command had not ended after {limit_s:g} s and was killed\n"
    pid = int((tmp_path / "child").read_text())
    wait_for("the process has left", lambda: state_of(pid) in "ZX")


def test_the_script_waits_while_the_command_has_the_first_step(tmp_path: Path) -> None:
    script = render_script(resolve(load_experiment("demo", {"notify.command": "true"}), load_profile("generic-slurm")))
    functions = re.findall(r"^(?:start_notifier|send_event)\(\) \{.*?^\}$", script, re.MULTILINE | re.DOTALL)
    assert len(functions) == 2
    beside = "until [ -e after ]; do sleep 0.01; done; sleep 0.5; touch sent"
    python = put(tmp_path / "python", f'#!/bin/bash\ncase "$*" in *beside) {beside} ;; *after) touch after ;; esac\n')
    steps = [*functions, f"python=({python})", "start_notifier", "send_event after", "[ -e sent ] && echo sent"]
    done = ran("bash", "-c", "\n".join(steps), cwd=tmp_path, env={**os.environ, "HPC_GPT_RUN": "/run", "n": "1"})
    assert (done.stdout, done.stderr) == ("sent\n", "")
