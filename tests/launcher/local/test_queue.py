"""Runs that wait on this machine, for GPUs that other runs have or for other runs, or go back to the queue.

A stand-in for nvidia-smi makes up the GPUs. The ranks, the processes that wait and their locks are real.
"""

import os
import signal
from pathlib import Path

import pytest

from hpc_gpt.core.files import read_json_lines
from hpc_gpt.core.process import is_alive
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.local.gpus import waiting
from hpc_gpt.launcher.watch.control import cancel_run
from tests.cli.command import hpc_gpt, in_process
from tests.launcher.local.conftest import SMALL, ended, status_of, until
from tests.launcher.local.conftest import submit as submit_words
from tests.made_runs import read_run
from tests.programs import put, ran
from tests.trainer.filling import fill
from tests.waiting import wait_for

# Each rank notes its GPUs and ends once the file of that name is there; SIGTERM and SIGINT end it.
RANK = 'echo "$CUDA_VISIBLE_DEVICES" >>"$HPC_GPT_RUN/seen"; while [ ! -e "$HPC_GPT_RUN/go" ]; do sleep 0.1; done'
DONE = RANK + '\necho \'{"ended": "done", "step": 9}\' >"$HPC_GPT_RUN/attempts/$HPC_GPT_ATTEMPT/ended.json"'


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Makes up so many GPUs; None: those of a stand-in that is there."""

    def make(count: int | None) -> None:
        if count is not None:
            lines = "".join("echo 'Some GPU, 24576, 550.1'\n" for _ in range(count))
            put(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\n{lines}")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


@pytest.fixture
def submit(rank_template):
    def start(*arguments: object, text: str = RANK) -> RunFolder:
        return submit_words(*SMALL, "--template", rank_template(text), *arguments)

    return start


def seen(run: RunFolder) -> list[str]:
    """The GPUs that each rank of each attempt has seen, once all of it have."""
    file = run.path / "seen"
    wait_for(
        "each rank has noted its GPUs",
        lambda: file.is_file() and (count := file.read_text().count("\n")) and count % 2 == 0,
    )
    return file.read_text().split("\n")[:-1]


def has_seen(run: RunFolder, text: str) -> bool:
    return (run.path / "seen").exists() and (run.path / "seen").read_text() == text


def cause_has(run: RunFolder, words: str) -> bool:
    return words in (status_of(run).cause or "")


def until_cause(run: RunFolder, words: str) -> None:
    wait_for(f"it says {words!r}", lambda: cause_has(run, words), lambda: status_of(run))


def test_a_run_waits_for_taken_gpus_until_their_holder_is_killed(gpus, submit):
    gpus(3)
    first = submit()
    assert seen(first) == ["0,1"] * 2
    second = submit()
    wait_for("a place in the queue", lambda: list(waiting()) == [second.run_id])
    third = submit("--gpus", "1", "--tp", "1")
    assert [status_of(run).state for run in (first, second, third)] == ["running", "pending", "pending"]
    assert not second.attempts()
    until_cause(second, f"waits for 2 of GPUs 0,1,2; taken: 0,1 by run {first.run_id}")
    # One GPU is free, and no later run is to pass by an earlier one.
    until_cause(third, f"waits for 1 of GPUs 0,1,2, after run {second.run_id}")
    shown = in_process("status", second.run_id).stdout
    assert "pending" in shown
    assert f"taken: 0,1 by run {first.run_id}" in " ".join(shown.split())
    os.kill(first.submissions()[-1]["pid"], signal.SIGKILL)
    until(third, "running")
    assert seen(second) == ["0,1"] * 2
    wait_for("it no longer waits", lambda: status_of(second).state == "running" and not second.waits_for.exists())
    assert status_of(second).job_id == str(second.submissions()[0]["pid"])
    wait_for("its rank has seen its GPUs", lambda: has_seen(third, "2\n"))
    until(first, "error")
    for run in (second, third):
        in_process("cancel", run.run_id, "--yes", code=0)
        assert ended(run).state == "cancelled"


@pytest.mark.long
def test_a_run_is_refused_while_its_gpus_are_not_known(gpus, submit, tmp_path, rank_template):
    put(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\necho 'X, 1, 1, 1, GPU-b'; echo 'GPU is lost'; exit 15\n")
    gpus(None)
    refused = in_process("submit", *SMALL, "--template", rank_template(RANK))
    words = "it is not known which GPUs of this machine are free: nvidia-smi ended with exit code 15: GPU is lost"
    assert (refused.code, refused.stderr.count(words), refused.stderr.count("--now")) == (1, 1, 1)
    assert not list(Path(os.environ["HPC_GPT_LOGS"]).glob("*/*/submissions.jsonl"))
    assert seen(submit("--now")) == [""] * 2


@pytest.mark.long
def test_a_run_of_another_gpu_passes_by_and_a_uuid_is_its_gpu(gpus, submit, tmp_path, monkeypatch):
    rows = "".join(f"echo 'X, [N/A], 580.1, {n}, GPU-{n}{n}'\n" for n in range(3))
    put(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\n{rows}")
    gpus(None)
    one = ("--gpus", "1", "--tp", "1")
    first = submit()
    until(first, "running")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    second = submit(*one)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    until_cause(second, f"waits for 1 of GPUs GPU-1; taken: GPU-1 by run {first.run_id}")
    third = submit(*one)
    wait_for("its rank has seen its GPUs", lambda: has_seen(third, "2\n"))
    (first.path / "go").touch()
    wait_for("its rank has seen its GPUs", lambda: has_seen(second, "GPU-1\n"))


@pytest.mark.long
def test_a_run_whose_turn_comes_on_a_full_disk_waits_for_space(gpus, submit, small_disk, monkeypatch):
    ran("mount", "-o", "remount,size=64m", small_disk, code=0)  # each run has its code
    gpus(2)
    first = submit()
    monkeypatch.setenv("HPC_GPT_LOGS", str(small_disk))
    second = submit()
    until_cause(second, "taken: 0,1 by run")
    filler = fill(small_disk)
    (first.path / "go").touch()
    until_cause(second, "waits for space on the disk: ")
    assert status_of(second).state == "pending"
    filler.unlink()
    assert seen(second) == ["0,1"] * 2
    until(second, "running")
    assert len(second.attempts()) == 1
    cancel_run(second)


@pytest.mark.long
@pytest.mark.parametrize("verb", ["cancel", "stop"])
def test_stop_and_cancel_end_the_wait(gpus, submit, verb):
    gpus(2)
    first, second = submit(), submit()
    line = second.submissions()[-1]
    wait_for("a place in the queue", lambda: list(waiting()) == [second.run_id])
    hpc_gpt(verb, second.run_id, *(["--yes"] if verb == "cancel" else ["--wait"]), code=0)
    wait_for("its process has left", lambda: not is_alive(line["pid"], line["pid_start"]))
    assert status_of(second).state == "cancelled"
    assert "while it waited" in status_of(second).cause
    assert (waiting(), second.attempts()) == ({}, [])
    again = in_process(verb, second.run_id)
    assert (again.code, again.stderr) == (1, f"{second.run_id}: nothing to {verb}, it ended as cancelled\n")
    # What was cancelled is submitted again, and waits again.
    submit_words("--resume", second.run_id)
    until_cause(second, "taken: 0,1 by run")
    (first.path / "go").touch()
    until(second, "running")


@pytest.mark.long
def test_a_killed_wait_is_over_and_its_place_is_free(gpus, submit):
    gpus(2)
    first, second = submit(), submit()
    wait_for("a place in the queue", lambda: list(waiting()) == [second.run_id])
    third = submit()
    wait_for("a place in the queue", lambda: list(waiting()) == [second.run_id, third.run_id])
    os.kill(second.submissions()[-1]["pid"], signal.SIGKILL)
    until(second, "cancelled")
    assert status_of(second).cause == "the process that was to start it ended before its turn"
    (first.path / "go").touch()
    until(third, "running")


@pytest.mark.long
def test_now_waits_for_no_gpu_and_without_gpus_none_waits(gpus, submit):
    gpus(2)
    submit()
    beside = submit("--now")
    assert seen(beside) == [""] * 2
    gpus(0)
    assert status_of(submit()).state == "running"
    gpus(1)  # too few for two ranks, which run on the CPU
    assert status_of(submit()).state == "running"


def test_requeue_puts_a_run_at_the_end_of_the_queue(gpus, submit):
    gpus(2)
    ends = (
        'if [ "$HPC_GPT_ATTEMPT" = 1 ] && [ "$rank" = 0 ]; then\n'
        'while ! ls "$HPC_GPT_RUN"/attempts/1/asked/* 2>/dev/null; do sleep 0.1; done\n'
        'echo \'{"ended": "requeued", "cause": "hpc-gpt requeue", "step": 3, "requeue": true}\' '
        '>"$HPC_GPT_RUN/attempts/1/ended.json"; touch "$HPC_GPT_RUN/go"; fi\n'
    )
    first = submit(text=ends + RANK)
    second = submit()
    wait_for("a place in the queue", lambda: list(waiting()) == [second.run_id])  # before the run that goes to the end
    hpc_gpt("requeue", first.run_id, code=0)
    until(second, "running")
    until(first, "pending")
    until_cause(first, f"taken: 0,1 by run {second.run_id}")
    assert status_of(first).cause.startswith("continues after hpc-gpt requeue; waits for 2 of GPUs 0,1")
    (first.path / "go").unlink()
    (second.path / "go").touch()
    wait_for("a second attempt", lambda: len(first.attempts()) == 2)
    wait_for(
        "its ranks have seen their GPUs",
        lambda: status_of(first).state == "running" and (first.path / "seen").read_text().count("\n") == 4,
    )
    assert [attempt.started()["job_id"] for attempt in first.attempts()] == [str(first.submissions()[0]["pid"])] * 2
    assert [attempt.started()["restart"] for attempt in first.attempts()] == [0, 1]
    assert first.attempts()[0].verdict()["go_on"] is True
    assert seen(first)[-1] == "0,1"
    in_process("cancel", first.run_id, "--yes", code=0)
    assert ended(first).state == "cancelled"


@pytest.mark.long
def test_a_training_goes_on_where_its_requeue_has_saved_it(own_folders):
    profile = Path(os.environ["HPC_GPT_CONFIG"]) / "clusters" / "turns.toml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    profile.write_text('extends = "local"\nchain = "requeue"\nsignal_lead_s = 1\n')
    alone = ("--gpus", "1", "--tp", "1", "--set", "train.steps=100000")
    run = submit_words(*SMALL, *alone)
    wait_for("some steps", lambda: (status_of(run).step or 0) >= 2)
    hpc_gpt("requeue", run.run_id, "--wait", code=0)
    wait_for(
        "a second attempt trains",
        lambda: len(run.attempts()) == 2 and (run.attempts()[1].last_metrics().get("step") or 0) > 2,
    )
    hpc_gpt("stop", run.run_id, "--wait", code=0)
    steps = [line["step"] for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]
    assert steps == list(range(1, len(steps) + 1))
    assert [row["ended"] for row in read_run(run).attempts] == ["requeued", "stopped"]
    limited = submit_words(*SMALL, *alone, "--cluster", "turns", "--time", "0:00:30")
    wait_for("a second attempt", lambda: len(limited.attempts()) == 2)
    assert limited.attempts()[0].ended()["ended"] == "walltime"
    assert limited.attempts()[0].verdict()["go_on"] is True
    in_process("cancel", limited.run_id, "--yes", code=0)
    assert ended(limited).state == "cancelled"
