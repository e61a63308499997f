"""What a submission, a process that waits and a visit of a race leave, whole: records, texts and exit codes."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.errors import SlurmUnreachable
from hpc_gpt.core.files import read_json_lines
from hpc_gpt.core.process import process_identity
from hpc_gpt.core.runs.race import Visit
from hpc_gpt.launcher import executor
from hpc_gpt.launcher.local import queue
from hpc_gpt.launcher.race.next_visit import Race
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


@pytest.mark.parametrize(
    ("ended", "cause", "limit_s", "said", "dropped", "of_race"),
    [
        ("done", "all steps", None, "quick: done", False, None),
        ("nan", "loss is NaN", 9, "quick: hang: not over within 9 s, 3 times the leader's visit", False, None),
        ("nan", "loss is NaN", 1e6, "quick: nan: loss is NaN", False, None),
        ("stopped", "hpc-gpt stop", None, "quick: stopped", True, "hpc-gpt stop, in a visit of quick"),
        ("node_failure", None, None, "quick: node_failure", True, "node_failure, in a visit of quick"),
        ("done", None, 9, "quick: done", False, None),
    ],
)
def test_how_a_visit_ended(ended, cause, limit_s, said, dropped, of_race, tmp_path: Path, capsys) -> None:
    race: Any = object.__new__(Race)
    race.run, race.rows = SimpleNamespace(path=tmp_path), [SimpleNamespace(name="quick")]
    end = race.conclude(Visit("v1", 0, 0, 1, "n1", time.time() - 60, limit_s), End(ended, cause, node="n1"))
    assert (capsys.readouterr().err, end and end.cause) == (f"{said}\n", of_race)
    (line,) = (line for file in tmp_path.iterdir() for line in read_json_lines(file))
    word = said.split(": ")[1]
    node = None if word == "hang" else "n1"  # of nobody's fault
    assert [line[key] for key in ("ended", "visit", "node", "dropped")] == [word, "v1", node, dropped]
