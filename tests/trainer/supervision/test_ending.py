"""Which ends are requeued, and the class and exit code of a failure."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.ends.run_state import read_end
from hpc_gpt.core.errors import CheckpointError, ConfigError, DataError, RunFolderError
from hpc_gpt.core.files import append_line, write_once
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.trainer.supervision.ending import (
    classify_exception,
    end_of_sigterm,
    explain_exception,
    lost_peer,
    report_failure,
    write_end,
)
from hpc_gpt.trainer.supervision.meeting import RankIdentity, identify, read_rendezvous
from tests.made_runs import add_attempt, make_run


@pytest.mark.parametrize(
    ("end", "cluster", "requeued"),
    [
        ("walltime", "generic-slurm", True),
        ("preempted", "generic-slurm", True),
        ("cancelled", "generic-slurm", False),
        ("done", "generic-slurm", False),
        ("error", "generic-slurm", False),  # a retry is for the judge
        ("walltime", "local", False),  # chain = "none" in its profile
    ],
)
def test_only_a_run_that_can_go_on_goes_back_to_the_queue(tmp_path, end, cluster, requeued):
    run = make_run(tmp_path, cluster)
    attempt = run.new_attempt()
    write_end(run, attempt, End(end), step=7)
    said = attempt.ended()
    assert (said["ended"], said["step"], said["requeue"]) == (end, 7, requeued)
    assert read_end(attempt).facts.retried is requeued


def test_the_first_end_that_is_written_stays(tmp_path):
    run = make_run(tmp_path, "generic-slurm")
    attempt = run.new_attempt()
    attempt.write_ended("hang", "rank 3 is silent", 5)
    write_end(run, attempt, End("walltime"), step=7)
    assert attempt.ended()["ended"] == "hang"


def test_a_cancelled_run_neither_returns_nor_counts_preempted(tmp_path):
    """Slurm says of a job that is cancelled while it is preempted what it likes."""
    run = make_run(tmp_path, "generic-slurm")
    attempt = add_attempt(run, [], None)
    shown = "JobState=RUNNING PreemptTime=2026-11-20T10:01:00"
    preempting: Any = SimpleNamespace(job_at_sigterm=lambda: shown, terminated_at=None)
    assert end_of_sigterm(run, attempt, preempting).ended == "preempted"
    write_once(run.cancelled_mark("4710"), "")  # another job's
    assert end_of_sigterm(run, attempt, preempting).ended == "preempted"
    write_once(run.cancelled_mark("4711"), "")
    assert end_of_sigterm(run, attempt, preempting) == End("cancelled", "SIGTERM")
    write_end(run, attempt, End("walltime"), step=7)
    assert attempt.ended()["requeue"] is False


def test_only_a_training_that_ran_off_is_no_orderly_end():
    ends = ("nan", "walltime", "preempted", "cancelled", "done")
    assert [End(ended).exit_code for ended in ends] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("x"), ("data", 2)),
        (ConfigError("x"), ("user_error", 2)),
        (CheckpointError("x"), ("user_error", 2)),
        (MemoryError(), ("host_memory", 1)),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), ("host_memory", 1)),
        (torch.OutOfMemoryError("CUDA out of memory"), ("gpu_memory", 1)),
        (OSError(errno.ENOSPC, "No space left on device"), ("disk_full", 1)),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ("disk_full", 1)),
        (OSError(errno.EIO, "Input/output error"), ("error", 1)),
        (torch.distributed.DistBackendError("Watchdog caught collective operation timeout"), ("collective_timeout", 1)),
        (ZeroDivisionError("division by zero"), ("error", 1)),
    ],
)
def test_classes_and_exit_codes(error: BaseException, expected: tuple[str, int]) -> None:
    assert classify_exception(error) == expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_known_behind_our_own_words() -> None:
    with pytest.raises(RunFolderError) as caught:
        append_line(Path("/dev/full"), "x" * 100_000)
    assert classify_exception(caught.value) == ("disk_full", 1)


def test_the_first_rank_to_fail_names_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = Attempt(tmp_path)
    assert report_failure(DataError("too short", "give more"), 3, attempt, 7) == 2
    lost = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:16048")
    assert lost_peer(lost)
    assert report_failure(lost, 0, attempt, 7) == 1
    end = attempt.ended()
    assert (end["ended"], end["cause"], end["step"], end["requeue"]) == ("data", "rank 3: too short", 7, False)
    said = capsys.readouterr().out
    assert "rank 3: Error: too short\n\nhint: give more" in said
    assert "rank 0 lost another rank" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:16048", True),
        ("[pair.cc:534] Read error [127.0.0.1]:2: Connection reset by peer", True),
        ("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?", True),
        ("ncclRemoteError: possibly due to a network error or a remote process exiting prematurely", True),
        ("The server socket has failed to listen on any local network address. name: EADDRINUSE", False),
        ("The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 1).", False),
        ("failed to connect to node1: Connection reset by peer", False),
        ("unexpected pos 64 vs 0 in /home/speer/socket/model.pt", False),
    ],
)
def test_only_a_lost_connection_is_a_lost_peer(words: str, expected: bool) -> None:
    assert lost_peer(torch.distributed.DistNetworkError(words)) is expected


def test_a_bug_has_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        assert report_failure(error, 1, Attempt(tmp_path), 0) == 1
    assert "rank 1 failed:\nTraceback" in capsys.readouterr().out
    assert Attempt(tmp_path).ended()["cause"] == "rank 1: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), torch.OutOfMemoryError("CUDA out of memory"), DataError("x")]
)
def test_other_errors_stay_as_they_are(error: BaseException) -> None:
    assert explain_exception(error) is error


def test_a_python_without_torch_is_one_line_and_a_hint(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = run.new_attempt()
    without = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('hpc_gpt.trainer', run_name='__main__')"
    environment = os.environ | {"HPC_GPT_RUN": str(run.path), "HPC_GPT_ATTEMPT": str(attempt.number), "RANK": "0"}
    rank = subprocess.run([sys.executable, "-c", without], env=environment, capture_output=True, text=True, check=False)
    assert (rank.returncode, rank.stderr) == (2, "")
    assert rank.stdout.startswith(
        f"rank 0: Error: {sys.executable} has no torch\n\nhint: pip install 'hpc-gpt[train]' there"
    )
    assert attempt.ended()["ended"] == "user_error"


def test_who_a_rank_is() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    submitit = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_LOCALID": "1"}
    assert (identify(slurm), identify(submitit)) == (RankIdentity(5, 8, 1), RankIdentity(1, 2, 1))
    assert identify({**slurm, "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}) == RankIdentity(0, 4, 0)
    with pytest.raises(ConfigError, match="not a rank of a run"):
        identify({"RANK": "0"})


@pytest.mark.parametrize(("ended", "code"), [("data", 2), ("user_error", 2), ("gpu_memory", 1)])
def test_a_rank_that_comes_after_the_end_leaves_with_its_code(tmp_path: Path, capsys, ended: str, code: int) -> None:
    attempt = Attempt(tmp_path)
    attempt.write_ended(ended, "rank 0: why", 0)
    with pytest.raises(TimeoutError) as late:
        read_rendezvous(attempt)
    assert report_failure(late.value, 1, attempt, 0) == code
    assert capsys.readouterr().out == f"rank 1 leaves: the attempt has ended as {ended}\n"
