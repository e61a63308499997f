"""What job.sh is told before and after an attempt, from run folders as they are left; the words of it in status."""

import json
import os
import subprocess
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.ends.end_policy import end_by_accounting
from hpc_gpt.core.ends.program_end import PrintedEnd, facts_of
from hpc_gpt.core.ends.run_state import retry_note
from hpc_gpt.core.files import logs_dir, replace_whole
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.find_processes import end_processes
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder, create_run
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest
from hpc_gpt.core.slurm.environment import own_job
from hpc_gpt.launcher.attempts.decisions import classify
from hpc_gpt.launcher.attempts.draft import ShownJob
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.judge import gpu_hours
from hpc_gpt.launcher.attempts.may_start import SlurmStates, decide_start, read_slurm
from hpc_gpt.launcher.attempts.may_start import main as ask_to_start
from hpc_gpt.launcher.attempts.script_end import end_script
from hpc_gpt.launcher.attempts.what_next import decide_next
from hpc_gpt.launcher.local import by_hand
from hpc_gpt.launcher.local.controller import judge_and_note
from hpc_gpt.launcher.watch import status
from hpc_gpt.launcher.watch.status import read_status
from tests.made_runs import add_attempt, metrics_line, unsubmitted_run, with_attempt, with_job
from tests.trainer.filling import fill

NOW = 1_700_003_600.0  # an hour after made_runs' attempts begin


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_GPT_STATE", str(tmp_path / "state"))


KILLED = "rank 0 on n3 was ended by SIGKILL, by hand or by the kernel's memory killer (srun: n3: task 0: Killed)"


def slurm_run(job_id: str = "7", chain: str | None = None, **settings: Any) -> RunFolder:
    run = unsubmitted_run("generic-slurm", **settings)
    if chain is not None:
        resolved = json.loads((run.path / "resolved.json").read_text())
        resolved["cluster"]["chain"] = chain
        replace_whole(run.path / "resolved.json", json.dumps(resolved))
    with_job(run, job_id)
    return run


def start(run: RunFolder, ended: str | None = None, saved: int = 0, job_id: str = "7", **more: Any) -> Attempt:
    """An attempt on 4 GPUs, at work unless it ended; with a checkpoint of step `saved`."""
    attempt = add_attempt(run, [metrics_line(5)], ended, job_id=job_id, node_list="n[3-4]", **more)
    if saved:
        (place := run.checkpoints / f"step-{saved:08d}").mkdir(parents=True)
        (place / "complete.json").write_text(json.dumps({"step": saved}))
    return attempt


def after(
    run: RunFolder, attempt: Attempt, slurm: str = "error", words: str = "n3: task 0: Killed", **more: Any
) -> list[str]:
    line = decide_next(run, attempt, slurm, words, ShownJob(**more), NOW)
    mark, *parts = line.split()
    assert mark == "hpc-gpt-next"
    assert len(parts) == 4
    return parts


def before(run: RunFolder, attempt: Attempt, *words: str, now: float = NOW) -> list[str]:
    return decide_start(run, attempt, read_slurm(words), now).split()[1:]


def test_a_killed_rank_is_retried_once_and_then_no_more() -> None:
    run = slurm_run()
    first = start(run)
    assert after(run, first) == ["again", "30", "-", "-"]
    assert first.ended()["ended"] == "error"
    verdict = first.verdict()
    assert (verdict["go_on"], verdict["why"], verdict["begin"]) == (True, KILLED, NOW + 30)
    assert verdict["gpu_hours"] == pytest.approx(run.resolved().gpus, rel=1e-3)
    second = start(run)
    assert after(run, second)[0] == "stop"
    assert (second.ended()["ended"], second.verdict()["ended"]) == ("error", "no_progress")


def test_progress_is_what_a_checkpoint_keeps() -> None:
    run = slurm_run()
    assert after(run, start(run, saved=10))[:2] == ["again", "30"]
    assert after(run, start(run, resumed_step=10))[:2] == ["again", "60"]
    assert after(run, start(run, saved=20, resumed_step=10))[:2] == ["again", "30"]
    assert [past.progressed for past in read_history(run, 4, NOW)] == [True, False, True]


def test_the_trainers_word_stands_and_slurms_beats_a_vague_one() -> None:
    run = slurm_run()
    assert after(run, start(run, "nan", cause="20 steps in a row"))[0] == "stop"
    killed = start(run, "error", cause="rank 1: RuntimeError: Connection closed by peer")
    killed.log.write_text("srun: error: Node failure on n4\n")
    answer = after(run, killed, "node_failure", "a node of the job died")
    assert answer == ["again", "30", "=n4", "-"]
    assert (killed.verdict()["attempt_ended"], killed.verdict()["exclude"]) == ("node_failure", ["n4"])
    assert bad_nodes.listed("generic-slurm")["n4"].times == 1


def test_a_requeue_by_hand_looks_like_a_cancel_from_inside() -> None:
    run = slurm_run()
    attempt = start(run, "cancelled", cause="SIGTERM")
    assert after(run, attempt, "requeued", "put back", put_back=True)[0] == "again"
    assert attempt.verdict()["attempt_ended"] == "requeued"
    assert after(run, start(run, "cancelled", cause="SIGTERM"), "cancelled", "COMPLETING")[0] == "stop"


@pytest.mark.parametrize(
    ("line", "ended", "go_on"),
    [
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0.", "host_memory", "stop"),
        (
            "[rank2]:[E1120 10:00:00.000000000 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600003 "
            "milliseconds before timing out.",
            "collective_timeout",
            "again",
        ),
        ("srun: error: n3: task 0: Killed", "error", "again"),
        ('fit.sh: 9: Syntax error: "fi" unexpected', "user_error", "stop"),
    ],
)
def test_where_only_the_log_knows(line: str, ended: str, go_on: str) -> None:
    run = slurm_run()
    attempt = start(run)
    attempt.log.write_text(f"step 5/40 | loss 3.0\n{line}\n")
    assert after(run, attempt)[0] == go_on
    assert attempt.verdict()["attempt_ended"] == ended


@pytest.mark.parametrize(("left", "code", "ended"), [(0, 0, "done"), (1, 0, "walltime"), (0, 1, "walltime")])
def test_a_script_asked_to_end_is_done_after_its_last_step(left: int, code: int, ended: str) -> None:
    run = slurm_run()
    last = run.resolved().train.steps - left
    attempt = add_attempt(run, [metrics_line(last)], None, job_id="7", node_list="n3")
    (attempt.folder / "stop.json").write_text('{"reason": "walltime"}')
    end_script(run, attempt, code, "JobState=RUNNING Restarts=0")
    assert attempt.ended()["ended"] == ended


def test_a_refusal_that_cannot_be_written_is_one(small_disk, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HPC_GPT_LOGS", str(small_disk))
    run = slurm_run()
    add_attempt(run, [metrics_line(run.resolved().train.steps)], None, job_id="7", node_list="n3")
    attempt = start(run, job_id="7")
    run.mark_cancelled("7")
    fill(small_disk)
    said = decide_start(run, attempt, read_slurm([]), NOW)
    assert said == "hpc-gpt-next stop 0 -"
    assert not attempt.verdict()
    assert "not started: " in capsys.readouterr().err


@pytest.mark.parametrize("job", ["7", None])
def test_what_another_job_has_started_is_left_alone(job: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that the script submits inherits its variables, and may be on the same node."""
    run = slurm_run()
    attempt = start(run)
    monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    marks = {"HPC_GPT_ATTEMPT": str(attempt.number), "HPC_GPT_CHECKPOINTS": f"{run.path}/checkpoints"}
    of_child, of_own, of_nobody = (
        subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], **own})
        for own in (
            {**marks, "SLURM_JOB_ID": "8"},
            {**marks, **({"SLURM_JOB_ID": job} if job else {})},
            {**marks, "HPC_GPT_ATTEMPT": "99"},
        )
    )
    try:
        end_processes(run, attempt, own_job())
        assert of_own.wait(60) == -9
        assert of_child.poll() is None
        assert of_nobody.poll() is None
    finally:
        for each in (of_child, of_own, of_nobody):
            each.kill()
            each.wait()


def test_a_process_of_another_job_is_known_by_its_cgroup_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's program may have unset its variables."""
    cgroup = Path(f"/sys/fs/cgroup/freezer/job_99{os.getpid()}")  # of no other session on this machine
    try:
        cgroup.mkdir()
    except OSError:
        pytest.skip("no cgroup can be made here")
    run = slurm_run()
    attempt = start(run)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    marks = {"HPC_GPT_ATTEMPT": str(attempt.number), "HPC_GPT_CHECKPOINTS": f"{run.path}/checkpoints"}
    process = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], **marks})
    try:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        end_processes(run, attempt, own_job())
        assert process.poll() is None
        (cgroup.parent / "cgroup.procs").write_text(str(process.pid))
        end_processes(run, attempt, own_job())
        assert process.wait(60) == -9
    finally:
        process.kill()
        process.wait()
        cgroup.rmdir()


TORCHRUN = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-24_20:21:24
  host      : n3
  rank      : 1 (local_rank: 0)
  exitcode  : -9 (pid: 8699)
"""


@pytest.mark.parametrize("words", ["exit code 1", "n3: task 0: Exited with exit code 1"])
def test_a_killed_worker_and_what_was_raised_beat_an_exit_code(words: str) -> None:
    run = slurm_run()
    killed, raised = start(run), start(run)
    killed.log.write_text(TORCHRUN)
    raised.log.write_text("ValueError: Can't find a valid checkpoint at out/checkpoint-20\n")
    after(run, killed, words=words)
    assert killed.verdict()["cause"] == "rank 1 on n3 was ended by SIGKILL, by hand or by the kernel's memory killer"
    after(run, raised, words=words)
    found = "ValueError: Can't find a valid checkpoint at out/checkpoint-20"
    assert raised.verdict()["cause"].removeprefix("rank 0: ") == found


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("ConnectionResetError: [Errno 104] Connection reset by peer", None),
        ("BrokenPipeError: [Errno 32] Broken pipe", None),
        ("RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.3]:5021", None),
        ("subprocess.CalledProcessError: Command 'x' returned non-zero exit status 75.", None),
        ("the licence server lic3 is not reachable", "exit code 75: the licence server lic3 is not reachable"),
        ("+ exit 75", "exit code 75"),
        ("step 3 loss 2.5", "exit code 75"),
    ],
)
def test_a_scripts_last_words_are_better_than_its_code(printed: str, cause: str | None) -> None:
    attempt = add_attempt(with_job(own_program("generic-slurm"), "7"), 3, None, job_id="7")
    attempt.log.write_text(f"step 1 loss 2.5\nstep 2 loss 2.5\n{printed}\n\n")
    end = classify(attempt, "error", "exit code 75")
    assert (end.ended, str(end.cause).removeprefix("rank 0: ")) == ("error", cause or printed)


def test_an_exclusion_keeps_the_users_and_drops_expired_ones(monkeypatch) -> None:
    run = slurm_run()
    first = start(run, saved=10)
    first.log.write_text("srun: error: Node failure on n4\n")
    assert after(run, first, "node_failure", "died", excluded=["n9"])[2] == "=n4,n9"
    second = start(run, saved=20, resumed_step=10)
    assert after(run, second, excluded=["n4", "n9"])[2] == "-"
    third = start(run, saved=30, resumed_step=20)
    monkeypatch.setattr("tests.launcher.attempts.test_decisions.NOW", time.time() + 25 * 3600)
    assert after(run, third, excluded=["n4", "n9"])[2] == "=n9"
    assert third.verdict()["exclude"] == []


@pytest.mark.parametrize(
    ("srun", "cause"),
    [
        ("n3: task 0: Exited with exit code 1", "rank 0: RuntimeError: the shards differ"),
        ("n3: task 0: Killed", "rank 0 on n3 was ended by SIGKILL"),
    ],
)
def test_a_programs_own_error_outranks_sruns_exit_code(tmp_path: Path, srun: str, cause: str) -> None:
    attempt = add_attempt(with_job(own_program("generic-slurm"), "7"), 3, None, job_id="7")
    attempt.log.write_text(f"srun: error: {srun}\n")
    (output := tmp_path / "7-0.out").write_text(
        'Traceback (most recent call last):\n  File "fit.py", line 3, in <module>\nRuntimeError: the shards differ\n'
    )
    attempt.elsewhere.mkdir()
    (attempt.elsewhere / "001").symlink_to(output)
    end = classify(attempt, "error", srun)
    assert (end.ended, str(end.cause).partition(", by hand")[0]) == ("error", cause)


def own_program(cluster: str) -> RunFolder:
    """A run of a program that alone knows its checkpoints."""
    asked = Experiment(engine=Engine("command"), layout=LayoutRequest(gpus=1), command=Command(run="x"))
    return create_run(logs_dir(), resolve(asked, load_profile(cluster)), "", "", {})


def test_a_step_that_is_only_logged_is_progress_but_no_save() -> None:
    run = with_job(own_program("generic-slurm"), "7")
    assert after(run, add_attempt(run, 6, "error", job_id="7"))[0] == "again"
    second = add_attempt(run, [metrics_line(step) for step in range(4, 10)], "error", job_id="7")
    assert after(run, second)[0] == "again", "it came further"
    assert [attempt.verdict()["saved_step"] for attempt in run.attempts()] == [None, None]
    assert [(row.resumed, row.saved) for row in read_history(run, 1, NOW)] == [(0, 6), (6, 9)]
    third = add_attempt(run, [metrics_line(step) for step in range(7, 10)], "error", job_id="7")
    assert after(run, third)[0] == "again"
    fourth = add_attempt(run, [metrics_line(step) for step in range(7, 9)], "error", job_id="7")
    assert after(run, fourth)[0] == "stop"
    begun = run.new_attempt()
    assert facts_of(begun, 0, 0, PrintedEnd()).step == 9, "before its first step"


def test_here_a_logged_step_is_no_reason_to_start_again() -> None:
    run = own_program("local")
    assert not judge_and_note(run, add_attempt(run, 6, "error"), run.resolved())
    assert not run.attempt(1).verdict()["go_on"]


def test_a_script_that_asks_twice_hears_the_same_and_notes_once() -> None:
    run = slurm_run()
    attempt = start(run)
    attempt.log.write_text("srun: error: Node failure on n4\n")
    assert after(run, attempt, "node_failure") == after(run, attempt, "node_failure") == ["again", "30", "=n4", "-"]
    assert bad_nodes.listed("generic-slurm")["n4"].times == 1


def test_a_chain_of_none_and_a_cancel_stop() -> None:
    run = slurm_run(chain="none")
    attempt = start(run, "walltime", requeue=False)
    assert after(run, attempt)[0] == "stop"
    assert 'chain = "none"' in attempt.verdict()["why"]
    cancelled = slurm_run()
    cancelled.cancelled_mark("7").touch()
    assert after(cancelled, start(cancelled, "walltime"))[0] == "stop"


def test_two_runs_in_one_allocation_have_two_ports(capsys, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ports = set()
    for pid in (os.getpid(), os.getppid()):  # of two scripts
        monkeypatch.setenv("HPC_GPT_ALLOCATION", str(pid))
        monkeypatch.setattr("sys.stdin", StringIO())
        run = slurm_run()
        ask_to_start([str(run.path), str(start(run).number), "1", "asked"])
        ports.add(capsys.readouterr().out.split()[-1])
    assert len(ports) == 2
    after(run, start(run, "port_taken"))
    why = run.attempts()[-1].verdict()["why"]
    assert "profile" not in why
    assert "it runs in an allocation of your own" in why


def test_a_second_script_in_the_allocation_waits_for_the_first(capsys, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = slurm_run()
    said = []
    for pid in (os.getppid(), os.getpid()):
        monkeypatch.setenv("HPC_GPT_ALLOCATION", str(pid))
        monkeypatch.setattr("sys.stdin", StringIO())
        ask_to_start([str(run.path), str(start(run).number), "1", "asked"])
        said.append(capsys.readouterr())
    assert [each.out.split()[1] for each in said] == ["go", "stop"]
    assert f"run {run.run_id} is being trained by process {os.getppid()} on " in said[1].err
    assert not run.attempt(1).verdict(), "the first one's is its own"


def test_the_links_of_a_chain_are_named() -> None:
    run = slurm_run()
    for job_id in ("8", "9"):
        with_job(run, job_id)
    assert after(run, start(run, "done"))[3] == "8,9"


# --- before


def test_a_second_job_steps_aside_and_the_first_one_counts(monkeypatch) -> None:
    run = slurm_run()
    first, second = start(run), start(run, job_id="8")
    assert before(run, first, "squeue 7 RUNNING", "squeue 8 RUNNING") == ["go", "-"]
    assert before(run, second, "squeue 7 RUNNING", "squeue 8 RUNNING") == ["stop", "1", "-"]
    assert second.ended()["ended"] == "refused"
    assert "job 7 already runs this run, as attempt 1" in second.ended()["cause"]
    monkeypatch.setattr(status, "_slurm_states", lambda *_: ({"7": ("RUNNING", ""), "8": ("COMPLETED", "")}, ""))
    row = read_status([run])[0]
    assert (row.state, row.job_id) == ("running", "7")
    first.write_ended("done", None, 40)
    monkeypatch.setattr(status, "_slurm_states", lambda *_: ({}, ""))
    assert read_status([run])[0].state == "done"


def test_a_job_waits_for_one_that_is_leaving() -> None:
    run = slurm_run()
    start(run)
    second = start(run, job_id="8")
    assert before(run, second, "squeue 7 COMPLETING") == ["wait"]
    (run.path / "attempts" / "3").mkdir()  # someone who has not yet said which job it is
    assert before(run, start(run, job_id="9"), "squeue 7 CANCELLED", now=time.time()) == ["wait"]


@pytest.mark.parametrize(
    ("words", "ended"),
    [
        (("squeue 7 RUNNING", "sacct 7 NODE_FAIL", "sacct 7 RUNNING"), "node_failure"),
        (("squeue 7 RUNNING", "sacct 7 PREEMPTED", "sacct 7 RUNNING"), "preempted"),
        (("squeue 7 RUNNING", "sacct 7 RUNNING"), "requeued"),
        (("squeue 7 RUNNING",), "requeued"),
    ],
)
def test_an_attempt_whose_script_was_lost_is_settled_by_the_next(words: tuple[str, ...], ended: str) -> None:
    run = slurm_run()
    lost = start(run)
    assert before(run, start(run), *words) == ["go", "-"]
    assert lost.ended()["ended"] == lost.verdict()["attempt_ended"] == ended
    assert lost.verdict()["node"] == ("n3" if ended == "node_failure" else None)


def test_a_link_behind_a_lost_one_settles_it_too() -> None:
    run = slurm_run()
    lost = start(run)
    assert before(run, start(run, job_id="8"), "squeue 8 RUNNING", "sacct 7 TIMEOUT") == ["go", "-"]
    assert lost.verdict()["attempt_ended"] == "walltime"


@pytest.mark.parametrize(("submitted", "answer"), [(NOW - 5, "go"), (NOW - 20, "stop")])
def test_after_a_cancel_only_what_is_submitted_later_starts(submitted: float, answer: str) -> None:
    run = slurm_run()
    lost = start(run)
    run.cancelled_mark("7").touch()
    os.utime(run.cancelled_mark("7"), (NOW - 10, NOW - 10))
    with_job(run, "8", time=submitted)
    assert before(run, start(run, job_id="8"), "sacct 7 FAILED")[0] == answer
    assert lost.ended()["ended"] == lost.verdict()["ended"] == "cancelled"


def test_a_run_that_is_done_is_not_trained_again_its_links_end(monkeypatch) -> None:
    (run := slurm_run()).add_submission({"scheduler": "slurm", "job_id": "8", "refused": None})
    with_job(run, "9")
    first = start(run, "done")
    after(run, first)
    second = start(run, job_id="8")
    (output := run.path / "slurm-8.out").write_text("run folder …, attempt 2\n")
    assert before(run, second) == ["stop", "0", "7,9"]
    assert [path.name for path in (run.path / "attempts").iterdir()] == ["1"], "nothing is left of the second"
    assert output.read_text().endswith("not started: attempt 1 has finished the training\n")
    assert before(run, second) == ["stop", "0", "7,8,9"], "a script that asks twice hears the same"
    monkeypatch.setattr(status, "_slurm_states", lambda *_: ({"8": ("COMPLETED", "")}, ""))
    assert read_status([run])[0].state == "done"


def test_a_script_run_by_hand_finds_its_run_done(capsys) -> None:
    run = with_attempt(unsubmitted_run(), [metrics_line(5)], "done")
    assert by_hand.main([str(run.path)]) == 0
    assert capsys.readouterr().out == "not started: attempt 1 has finished the training\n"
    assert len(run.attempts()) == 1
    assert not run.submissions()


def test_a_chains_left_link_stays_off_a_new_submission_does_not() -> None:
    (run := slurm_run()).add_submission({"scheduler": "slurm", "job_id": "8", "refused": None, "time": NOW - 1})
    after(run, start(run, "nan"))
    left = start(run, job_id="8")
    assert before(run, left)[:2] == ["stop", "1"]
    assert (left.verdict()["ended"], left.ended()["ended"]) == ("nan", "refused")
    with_job(run, "9", time=NOW + 1)
    assert before(run, start(run, job_id="9"))[0] == "go"


@pytest.mark.parametrize(("attempts_before", "answer"), [(1, "go"), (0, "stop")])
@pytest.mark.parametrize("behind_s", [-30, 30])
def test_whether_a_job_came_after_the_end_is_no_matter_of_clocks(attempts_before, answer, behind_s) -> None:
    run = slurm_run()
    line = {"scheduler": "slurm", "job_id": "8", "refused": None, "attempts_before": attempts_before}
    run.add_submission({**line, "time": NOW - behind_s})  # by the clock of the login node
    after(run, start(run, "nan"))
    assert before(run, start(run, job_id="8"))[0] == answer


def test_a_start_that_just_made_its_folder_is_waited_for() -> None:
    run = slurm_run()
    made = run.new_attempt()
    os.utime(made.folder, (NOW - 900, NOW - 900))  # by the clock of the file server
    own = start(run, job_id="8")
    for left, answer in ((40, "wait"), (34, "wait"), (33, "go"), (1, "go")):
        assert decide_start(run, own, read_slurm([]), NOW, left).split()[1] == answer


def test_a_job_that_slurm_puts_back_after_its_runs_end_stays_off() -> None:
    run = slurm_run()
    after(run, start(run, "nan"), "requeued", "put back", put_back=True)
    assert before(run, start(run))[:2] == ["stop", "1"]
    by_hand = slurm_run()
    after(by_hand, start(by_hand, "nan"))
    assert before(by_hand, start(by_hand))[0] == "go", "somebody requeued it after its end"


@pytest.mark.parametrize(("mark", "ended"), [("stop_mark", "stopped"), ("cancelled_mark", "cancelled")])
def test_a_job_that_was_to_end_before_it_began(mark: str, ended: str) -> None:
    run = slurm_run()
    getattr(run, mark)("7").touch()
    attempt = start(run)
    assert before(run, attempt)[:2] == ["stop", "0"]
    assert attempt.ended()["ended"] == ended


def test_who_requeues_a_stopped_job_by_hand_wants_it_to_run() -> None:
    waited, ran, put_back = slurm_run(), slurm_run(), slurm_run()
    for run in (waited, ran, put_back):
        run.stop_mark("7").touch()
    assert before(waited, start(waited))[0] == "stop"
    after(ran, start(ran, "stopped"))
    after(put_back, start(put_back, "stopped"), "requeued", "put back", put_back=True)
    assert (before(waited, start(waited))[0], before(ran, start(ran))[0]) == ("go", "go")
    assert before(put_back, start(put_back))[0] == "stop", "Slurm does it by itself"


def test_a_budget_is_checked_before_every_link() -> None:
    run = slurm_run(job__max_gpu_hours=10.0, job__signal_lead_s=60)
    gpus = run.resolved().gpus
    first = start(run, saved=10)
    assert before(run, first) == ["go", f"{NOW + 36000 / gpus:.0f}"]
    after(run, first, "walltime")
    spent = gpu_hours(read_history(run, gpus, NOW))
    assert spent == pytest.approx(gpus)
    second = start(run)
    (stop_at,) = before(run, second)[1:]
    assert float(stop_at) == pytest.approx(NOW + 3600 * (10 - gpus) / gpus, abs=1)
    poor = slurm_run(job__max_gpu_hours=float(gpus), job__signal_lead_s=60)
    after(poor, start(poor, saved=10), "walltime")
    refused = start(poor)
    assert before(poor, refused)[:2] == ["stop", "0"]
    assert refused.ended()["ended"] == "budget"


@pytest.mark.parametrize(
    "odd",
    [
        {"pause_s": float("inf"), "node": "-rf x"},
        {"pause_s": "x", "attempt_ended": [1]},
        {"exclude": ["n1 n2", "--user=root", "\nn3", ["n4"]]},
    ],
)
def test_anothers_verdict_neither_breaks_the_script_nor_gets_out(odd: dict[str, Any]) -> None:
    run = slurm_run()
    attempt = start(run, "error", saved=5)
    (attempt.folder / "next.json").write_text(json.dumps({"go_on": True, "ended": "error", "why": "w", **odd}))
    assert after(run, attempt) == ["again", "0", "-", "-"]
    again = start(run)
    assert before(run, again) == ["go", "-"]
    assert after(run, again)[2] == "-"


def test_words_that_are_none_are_left_out() -> None:
    assert read_slurm(["", "squeue", "noise", "squeue 7", "sacct 7 CANCELLED by 0"]) == SlurmStates(
        None, {"7": ["CANCELLED"]}
    )


# --- in words


def test_status_says_what_a_waiting_run_goes_on_from(monkeypatch) -> None:
    run = slurm_run()
    after(run, start(run, saved=10))
    second = start(run, "hang", cause="rank 1 is silent", resumed_step=10)
    second.log.write_text("")
    replace_whole(second.folder / "ended.json", json.dumps({**second.ended(), "node": "n3"}))
    after(run, second)
    words = retry_note(second, NOW)
    assert words is not None
    at = time.strftime("%H:%M", time.localtime(NOW + 60))
    assert words == f"continues after hang, at {at}, without n3; 2nd failure in a row"
    monkeypatch.setattr(status, "_slurm_states", lambda *_: ({"7": ("PENDING", "BeginTime")}, ""))
    row = read_status([run])[0]
    assert (row.state, row.cause) == (
        "pending",
        "attempt 2 ended as hang: rank 1 is silent; continues, without n3; 2nd failure in a row",
    )
    monkeypatch.setattr(status, "_slurm_states", lambda *_: ({"7": ("PENDING", "Resources")}, ""))
    assert read_status([run])[0].cause == f"{row.cause}; its nodes are busy (Resources)"


def test_a_job_takes_its_runs_lock_unless_another_has_it(monkeypatch, capsys) -> None:
    run = slurm_run()
    attempt = start(run)
    lock.take(run, lock.job_holder("6"))
    ask_to_start([str(run.path), "1", "40", ""])
    assert capsys.readouterr().out == "hpc-gpt-next ask 6\n"
    assert before(run, attempt, "squeue 6 RUNNING", "squeue 7 RUNNING") == ["stop", "1", "-"]
    assert attempt.ended()["cause"] == "job 6 already runs this run"
    attempt = start(run)
    assert before(run, attempt, "squeue 6 COMPLETED", "squeue 7 RUNNING")[0] == "go"
    assert lock.holder(run) == lock.job_holder("7")
    # Its next start, after all of the job's processes were lost, has it too.
    assert before(run, start(run), "squeue 7 RUNNING")[0] == "go"
    lock.release(run, lock.job_holder("7"))
    assert lock.holder(run) is None


def test_a_start_waits_while_another_job_is_not_known() -> None:
    run = slurm_run()
    first, own = start(run, job_id="7"), start(run, job_id="8")

    def answer(left: int, *words: str) -> str:
        return decide_start(run, own, read_slurm(words), NOW, left).split()[1]

    assert [answer(left) for left in (40, 2)] == ["wait"] * 2
    assert [answer(40, "sacct 7 RUNNING"), answer(40, "sacct 7 COMPLETING")] == ["wait"] * 2
    assert answer(1, "sacct 7 RUNNING") == "stop"
    assert (own.ended()["ended"], first.verdict()) == ("refused", {})
    assert own.ended()["cause"] == ("it is not known whether job 7, attempt 1, has ended: squeue gave no answer")
    assert not lock.holder(run)


@pytest.mark.parametrize(
    ("words", "ends", "declares"),
    [(["answered"], False, False), (["squeue 8 RUNNING"], False, False), (["sacct 7 NODE_FAIL"], False, False),
     ([], True, False), ([], False, True)],
)  # fmt: skip
def test_only_what_is_known_to_be_gone_lets_another_start(words: list[str], ends: bool, declares: bool) -> None:
    run = slurm_run()
    first, own = start(run, job_id="7"), start(run, job_id="8")
    lock.take(run, lock.job_holder("7"))
    if ends:  # it wrote its end and left the lock
        first.write_ended("error", "its cause", 5)
        lock.release(run, lock.job_holder("7"))
    if declares:
        run.declare_gone("7")
    assert before(run, own, *words)[0] == "go"
    assert lock.holder(run) == lock.job_holder("8")


def test_a_job_that_took_the_lock_later_is_asked_about(monkeypatch, capsys) -> None:
    run = slurm_run()
    own = start(run, job_id="8")
    lock.take(run, lock.job_holder("9"))

    def answer(left: int, jobs: str, words: str) -> str:
        monkeypatch.setattr("sys.stdin", StringIO(words))
        assert ask_to_start([str(run.path), str(own.number), str(left), jobs]) == 0
        return capsys.readouterr().out.removeprefix("hpc-gpt-next ").strip()

    assert answer(40, "", "") == answer(40, "7", "answered\nsqueue 8 RUNNING\n") == "ask 9"
    assert answer(39, "9", "") == "wait"
    assert answer(38, "9", "squeue 9 RUNNING\n").startswith("stop 1")
    assert own.ended()["cause"] == "job 9 already runs this run"


@pytest.mark.parametrize(
    ("line", "ended"),
    [("ModuleNotFoundError: No module named 'einops'", "user_error"), ("torch.OutOfMemoryError: CUDA", "gpu_memory")],
)
def test_here_the_logs_say_what_the_ranks_have_not(line: str, ended: str) -> None:
    run = own_program("local")
    attempt = add_attempt(run, 6, "error", cause="rank 1 ended with exit code 1")
    attempt.log.write_text(f"Traceback (most recent call last):\n{line}\n")
    assert not judge_and_note(run, attempt, run.resolved())
    assert (run.attempt(1).verdict()["attempt_ended"], read_status([run])[0].state) == (ended, ended)


@pytest.mark.parametrize(
    ("log", "named"),
    [
        ("requeing job 4711...", "requeing job 4711..."),
        ("+ scontrol requeue 4711", "+ scontrol requeue 4711"),
        ("SLURM auto-requeueing enabled. Setting signal handlers.", ""),
        ("slurmstepd: error: *** JOB 4711 ON n1 CANCELLED DUE TO JOB REQUEUE ***", ""),
        ("step 3 loss 2.0", ""),
    ],
)
def test_an_unknown_end_names_the_scripts_own_requeue(log: str, named: str) -> None:
    attempt = add_attempt(slurm_run(), 3, None)
    attempt.log.write_text(f"step 1 loss 3.0\n{log}\n")
    ended, cause = end_by_accounting(attempt, "", False)
    assert (ended, cause.partition(", by its log: ")[2]) == ("", named)
