"""What a submission and a process that waits leave, whole: records, texts and exit codes."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_gpt.core.errors import SlurmUnreachable
from hpc_gpt.core.process import process_identity
from hpc_gpt.launcher import executor
from hpc_gpt.launcher.local import queue
from tests.launcher.test_shell_functions import program
from tests.made_runs import make_run, unsubmitted_run


def test_a_lost_job_is_looked_for_with_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sbatch", "kill -9 $$")
    program(tmp_path, "squeue", f"echo asked >>'{tmp_path}/asked'")
    program(tmp_path, "srun", "")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("HPC_GPT_SLURM_S", "300")
    monkeypatch.setattr(executor, "_TIMES", 1)
    pauses: list[float] = []
    clock = SimpleNamespace(time=time.time, sleep=pauses.append, monotonic=lambda: 100.0 * len(pauses))
    monkeypatch.setattr(executor, "time", clock)
    run = make_run(tmp_path / "logs", "generic-slurm", submit=False)
    with pytest.raises(SlurmUnreachable) as fault:
        executor.submit_to_slurm(run, run.resolved())
    assert (len(pauses), set(pauses)) == (3, {executor._POLL_S}), "as long as Slurm has patience"
    assert (tmp_path / "asked").exists()
    assert str(fault.value) == "sbatch sent the job and got no answer (it ended with -9): it may be queued"
    assert fault.value.hint == f"do not submit it again: hpc-gpt status {run.run_id} finds it once Slurm answers"
    (line,) = run.submissions()
    keys = ("job_id", "refused", "lost", "element", "script", "clusters")
    assert [line[key] for key in keys] == [None, None, "it ended with -9", "", str(run.job_script), None]


def test_a_process_that_waits_is_noted_as_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "QUEUE", "this")  # a module that ends at once
    monkeypatch.setattr(queue, "look_for_turn", lambda *_: (None, "waits for GPU 7"))
    run = unsubmitted_run()
    job_id, waits = queue.start_here(run, run.resolved())
    (line,) = run.submissions()
    assert (line["queue"], line["job_id"]) == (process_identity(int(job_id)), job_id)
    assert waits == json.loads(run.waits_for.read_text())["words"] == "waits for GPU 7"
