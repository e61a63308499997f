"""The follower: which checkpoints get a job, once each, and what a job that cannot be submitted leaves."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.core.errors import JobRefused
from hpc_gpt.core.process import Life
from hpc_gpt.core.runs.after_jobs import AfterJob, after_table, held_steps, list_after
from hpc_gpt.core.runs.retention import Retention
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.after import CheckpointFollower, ProcessQueue, SlurmQueue, gpus_asked_by
from hpc_gpt.launcher.local.gpus import take_for, waiting
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, add_checkpoint, make_run, with_checkpoints
from tests.programs import put, ran
from tests.trainer.filling import fill
from tests.waiting import wait_for


def follower_of(run: RunFolder, ended: str | None = None) -> CheckpointFollower:
    return CheckpointFollower(run, add_attempt(run, [], ended=ended), run.resolved(), ProcessQueue())


@pytest.fixture(autouse=True)
def this_code(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("HPC_GPT_PYTHON", sys.executable)


def steps(run: RunFolder) -> list[int]:
    return [job.step for job in list_after(run.path)]


def test_each_nth_checkpoint_gets_one_job_over_all_attempts(tmp_path):
    run = make_run(tmp_path, after__run="echo {step} >>{run}/ran", after__every=2)
    with_checkpoints(run, 10, 20, 30)
    follower_of(run).look()
    assert steps(run) == [20]
    add_checkpoint(run, 40)
    again = follower_of(run)
    again.look()
    assert steps(run) == [20, 40]
    again.finish()
    wait_for("their states", lambda: [row["state"] for row in after_table(run.path)] == ["done", "done"])
    assert sorted((run.path / "ran").read_text().split()) == ["20", "40"]
    wait_for("the jobs have left", lambda: all(job.has_left for job in list_after(run.path)))


def test_beyond_most_a_checkpoint_gets_none_with_a_line(tmp_path, capfd):
    run = make_run(tmp_path, after__run="until [ -e {run}/go ]; do sleep 0.05; done; exit 3", after__most=2)
    follower = follower_of(run)
    with_checkpoints(run, 1, 2, 3)
    follower.look()
    assert steps(run) == [1, 2]
    assert capfd.readouterr().err == "after: step 3: it gets no job, as 2 jobs have not ended (after.most is 2)\n"
    assert [row["state"] for row in after_table(run.path)] == ["running", "running"]
    (run.path / "go").touch()
    wait_for("the jobs have left", lambda: all(job.has_left for job in list_after(run.path)))
    assert [(row["state"], row["code"]) for row in after_table(run.path)] == [("error", 3)] * 2
    add_checkpoint(run, 4)
    follower.finish()
    assert steps(run) == [1, 2, 4]


class Refusing(ProcessQueue):
    """Takes nothing until it is open."""

    is_open = False

    def submit(self, job: AfterJob) -> None:
        if not self.is_open:
            raise JobRefused("the partition is drained")
        super().submit(job)


def test_what_is_refused_counts_for_nothing_and_is_tried_again(tmp_path, capfd):
    run = make_run(tmp_path, after__run="true", after__most=2)
    queue = Refusing()
    follower = CheckpointFollower(run, add_attempt(run, []), run.resolved(), queue)
    for step in range(1, 6):
        add_checkpoint(run, step)
    follower.look()
    follower._submit_again(0.0)
    said = capfd.readouterr().err
    assert said.count("the partition is drained; it is tried again, or submit it yourself: bash") == 5
    assert said.count("no further job is tried: Slurm also refused those of 2 newer checkpoints") == 3
    assert [row["state"] for row in after_table(run.path)] == ["refused"] * 3 + ["unsubmitted"] * 2
    assert held_steps(run.path, range(1, 6)) == {4, 5}
    queue.is_open = True
    follower.finish()
    wait_for("their states", lambda: [row["state"] for row in after_table(run.path)] == ["refused"] * 3 + ["done"] * 2)
    first, second = (AfterJob(run.path / "after" / f"step-{step}").noted()["time"] for step in (5, 4))
    assert first < second
    assert capfd.readouterr().err == ""


def test_one_that_gets_no_job_goes_once_it_was_looked_at(tmp_path):
    run = make_run(tmp_path, after__run="true", after__every=3)
    follower = follower_of(run)
    with_checkpoints(run, 1, 2)
    Retention(keep_last=1).apply(run.checkpoints, 2)
    assert len(list(run.checkpoints.iterdir())) == 2
    follower.finish()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(("ended", "jobs"), [("done", [20]), ("error", []), ("stopped", [])])
def test_of_every_zero_only_a_done_runs_last_checkpoint_has_one(tmp_path, ended, jobs):
    run = make_run(tmp_path, after__run="true", after__every=0)
    with_checkpoints(run, 10, 20)
    follower = follower_of(run, ended)
    follower.look()
    assert steps(run) == []
    assert follower.is_judged()
    follower.finish()
    follower.finish()
    assert steps(run) == jobs


def test_a_job_that_died_without_an_end_leaves_its_checkpoint(tmp_path, capfd):
    run = make_run(tmp_path, after__run="kill -KILL $PPID; sleep 60")
    follower = follower_of(run)
    add_checkpoint(run, 1)
    follower.look()
    (job,) = list_after(run.path)
    wait_for("the job has left", lambda: job.life() is Life.GONE)
    follower._note_left(0.0)
    assert after_table(run.path)[0]["state"] == "unknown"
    gone = r"after: step 1: its job \d+ has left the queue without reporting its end: unknown"
    assert re.search(gone, capfd.readouterr().err)
    assert job.has_left


def test_an_own_list_is_executed_and_knows_nothing_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("HPC_GPT_ATTEMPT", "1")
    given = [
        "python3",
        "-c",
        "import os, sys; print(sys.argv[1:], *sorted(os.environ), os.environ['CUDA_VISIBLE_DEVICES'])",
        "{checkpoint}",
        "$a {{step}}",
    ]
    run = with_checkpoints(make_run(tmp_path / "it's a $place", after__run=given), 1)
    follower_of(run).look()
    wait_for("its end", lambda: after_table(run.path)[0]["state"] == "done")
    (job,) = list_after(run.path)
    said, _, names = job.log.read_text().partition("] ")
    assert said == f"[{str(run.checkpoints / 'step-00000001')!r}, '$a {{step}}'"
    gone = {"RANK", "SLURM_JOB_ID", "HPC_GPT_ATTEMPT", "HPC_GPT_RUN", "PYTHONSAFEPATH"}
    assert not gone & set(names.split())
    assert "HOME" in names.split()
    assert "5" not in names.split(), "of the run's GPU it has nothing, as it asks for none"


def test_a_job_here_that_asks_for_gpus_waits_for_its_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_GPT_GPU_CHOICE", "0,1")
    monkeypatch.setenv("HPC_GPT_GPU_UUIDS", "GPU-a,GPU-b")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    shows = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER >{run}/seen; until [ -e {run}/go ]; do sleep 0.05; done"
    options = ["--gres=gpu:a100:1", "--time=9"]
    run = with_checkpoints(make_run(tmp_path, after__run=shows, after__sbatch=options), 1)
    assert gpus_asked_by(run.resolved().after.sbatch) == 1
    both, _ = take_for("training", 2, {"0": "GPU-a", "1": "GPU-b"}, {})
    CheckpointFollower(run, add_attempt(run, []), run.resolved(), ProcessQueue(1)).look()
    (job,) = list_after(run.path)
    wait_for("its place in the queue", lambda: list(waiting()) == [job.name])
    assert after_table(run.path)[0]["state"] == "pending"
    both.free()
    wait_for("it runs", lambda: (run.path / "seen").exists() and after_table(run.path)[0]["state"] == "running")
    seen, order = (run.path / "seen").read_text().split()  # the two are freed one after the other
    assert (seen in ("0", "1"), order) == (True, "PCI_BUS_ID")
    words = f"waits for 2 of GPUs 0,1; taken: {seen} by run {job.name}"
    assert take_for("training", 2, {"0": "GPU-a", "1": "GPU-b"}, {}) == (None, words)
    (run.path / "go").touch()
    wait_for("its end", lambda: after_table(run.path)[0]["state"] == "done")


def test_the_checkpoints_of_a_program_are_followed(tmp_path):
    program = {"engine__name": "command", "command__run": "true", "command__workdir": str(tmp_path)}
    program |= {"command__checkpoints": "{run}/at-*", "command__snapshot": False, "after__run": "pwd; ls {checkpoint}"}
    run = make_run(tmp_path / "logs", experiment=_program(tmp_path), **program)
    follower = follower_of(run)
    for step in (5, 15):
        (run.path / f"at-{step}").write_text("weights")  # an empty one is not whole
    follower.look()
    wait_for("their states", lambda: [row["state"] for row in after_table(run.path)] == ["done", "done"])
    assert steps(run) == [5, 15]
    assert AfterJob(run.path / "after" / "step-5").log.read_text() == f"{tmp_path}\n{run.path}/at-5\n"


def _program(folder: Path) -> str:
    (file := folder / "mine.toml").write_text('name = "mine"\n[layout]\ngpus = 1\n')
    return str(file)


def test_a_fault_of_its_own_is_not_taken_for_the_trainings(tmp_path):
    run = make_run(tmp_path, after__run="true")
    attempt = add_attempt(run, [])
    attempt.ranks_ended.touch()
    (run.path / "after").write_text("no folder")
    command = [sys.executable, "-m", "hpc_gpt.launcher.after", str(run.path), str(attempt.number)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"after: cannot use \S+/after: File exists; the run continues without it\n", done.stderr)


# --- under Slurm: what the script asks for

SBATCH = """#!/bin/bash
env >>"$SEEN"
[ -e "$ALLOW" ] || { echo "sbatch: error: Batch job submission failed: Invalid qos specification" >&2; exit 1; }
echo "Submitted batch job 4242"
"""
SQUEUE = '#!/bin/bash\n[[ "$*" = *--name=* ]] || echo "4242|PENDING|Priority"\n'


def ask_script(run: RunFolder, tmp_path: Path, sbatch: str = SBATCH, judging: str = "") -> str:
    """What the script's part prints beside an attempt whose ranks have ended; `judging` comes after them."""
    for name, text in {"sbatch": sbatch, "squeue": SQUEUE, "sacct": "#!/bin/bash\nexit 1\n"}.items():
        put(tmp_path / "bin" / name, text)
    attempt = add_attempt(run, [], ended="done")
    verdict = json.dumps({"ended": "done", "go_on": False})
    (attempt.folder / ("next.json" if not judging else "verdict")).write_text(verdict)
    wanted = r"^(?:start_follower|say_ranks_ended|end_beside|within)\(\) \{.*?^\}$"
    functions = re.findall(wanted, run.job_script.read_text(), re.MULTILINE | re.DOTALL)
    assert len(functions) == 4
    lines = [*functions, f"python=({sys.executable})", "start_follower", "say_ranks_ended", judging, "end_beside 60"]
    own = {"HPC_GPT_RUN": str(run.path), "n": str(attempt.number), "attempt": str(attempt.folder)}
    own["answer"] = "stop 0 - - 0"
    own |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen")}
    own |= {"SLURM_JOB_ID": "77", "SBATCH_EXPORT": "NONE", "SLURM_CONF": "/its", "ALLOW": str(tmp_path / "allow")}
    done = ran("bash", "-c", "\n".join(lines), env={**os.environ, **own}, code=0)
    return done.stdout + done.stderr


def test_a_refused_job_is_a_line_and_the_next_attempt_submits_it(tmp_path):
    run = make_run(tmp_path / "logs of mine", "generic-slurm", after__run="true", after__sbatch=["--qos=none"])
    add_checkpoint(run, 1)
    script = run.path / "after" / "step-1" / "job.sh"
    said = ask_script(run, tmp_path)
    assert said == (
        "after: step 1: sbatch refused the job: Batch job submission failed: Invalid qos specification; "
        f"it is tried again, or submit it yourself: sbatch '{script}'\n"
    )
    assert after_table(run.path) == [{"step": 1, "job": None, "state": "unsubmitted", "code": None}]
    (tmp_path / "allow").touch()
    assert ask_script(run, tmp_path) == ""
    assert after_table(run.path) == [{"step": 1, "job": "4242", "state": "pending", "code": None}]
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_CONF=/its" in seen
    assert "SLURM_JOB_ID" not in seen
    assert "SBATCH_EXPORT" not in seen
    assert "#SBATCH --qos=none\n" in script.read_text()


def test_one_that_waits_for_a_late_verdict_still_submits_its_job(tmp_path):
    run = with_checkpoints(make_run(tmp_path / "logs", "generic-slurm", after__run="true", after__every=0), 1)
    (tmp_path / "allow").touch()
    # It is judged a minute later, by the script's clock, and sbatch takes its time.
    slow = SBATCH.replace("env >>", "sleep 4\nenv >>")
    assert (
        ask_script(run, tmp_path, slow, 'SECONDS=$((SECONDS + 60)); mv "$attempt/verdict" "$attempt/next.json"') == ""
    )
    assert after_table(run.path) == [{"step": 1, "job": "4242", "state": "pending", "code": None}]


def test_an_answer_without_a_line_break_is_one(tmp_path):
    run = with_checkpoints(make_run(tmp_path / "logs", "generic-slurm", after__run="true"), 1)
    assert ask_script(run, tmp_path, sbatch='#!/bin/bash\nprintf "Submitted batch job 4242"\n') == ""
    assert after_table(run.path) == [{"step": 1, "job": "4242", "state": "pending", "code": None}]


def test_on_a_full_disk_it_waits_and_each_checkpoint_has_its_job(tmp_path, small_disk):
    run = make_run(small_disk, after__run="true")
    attempt = add_attempt(run, [])
    for name in ("after", "after/step-1"):
        (run.path / name).mkdir()  # of an earlier attempt, which could not submit it
    (run.path / "after" / "step-1" / "job.sh").write_text(f"echo >{run.path}/ran\n")
    with_checkpoints(run, 1, 2)
    filler = fill(small_disk)
    command = [sys.executable, "-m", "hpc_gpt.launcher.after", str(run.path), str(attempt.number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert re.fullmatch(r"after: cannot \S+ .*: No space left on device\n", said)
        assert process.poll() is None
        filler.unlink()
        wait_for("both jobs", lambda: steps(run) == [1, 2] and all(job.noted() for job in list_after(run.path)))
        attempt.ranks_ended.touch()
        assert process.wait() == 0
        assert "continues without it" not in process.stdout.read()
    wait_for("the jobs have left", lambda: all(job.has_left or job.step == 1 for job in list_after(run.path)))


# --- refused at the submission


def test_a_banner_before_squeues_answer_is_no_job():
    asks = io.StringIO()
    queue = SlurmQueue(
        asks, io.StringIO("hpc-gpt-end 0\nAuthorized use only\nmaintenance on 7 May\n4711\nhpc-gpt-end 0\n"), ()
    )
    assert queue.find(AfterJob(Path("step-3"))) == "4711"
