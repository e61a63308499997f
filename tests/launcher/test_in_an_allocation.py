"""What `submit --here` and `shell` say and start in a job that is there, whole: stand-ins of Slurm's clients answer."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_gpt.core.errors import JobFailed, UserError
from hpc_gpt.core.files import read_text, templates_dir
from hpc_gpt.core.runs.heartbeats import write_heartbeat
from hpc_gpt.launcher import here, shell
from hpc_gpt.launcher.here import AllocatedNode, Allocation
from hpc_gpt.launcher.watch.status import read_status
from tests.launcher.test_render import resolved_demo
from tests.launcher.test_shell_functions import program
from tests.launcher.watch.test_top import BEAT
from tests.made_runs import add_attempt, make_run

STEP = '"${here[@]}"'
NODES = (AllocatedNode("n1", 9, 4), AllocatedNode("n2", 11, 5), AllocatedNode("n3", 3, 4))
OWN = "without --here a job of its own is queued"
LEAD = {"job.signal_lead_s": 60}


def answered(call, *arguments: object, **more: object) -> object:
    try:
        return call(*arguments, **more)
    except UserError as fault:
        return f"{type(fault).__name__}: {fault}|{fault.hint}"


ENDS = "on n1 of allocation 7, which ends at {}; the run saves 60 s before"
SHORT = f"before the end|a new allocation, or a smaller --set job.signal_lead_s=…; {OWN}"
SMALL = f"|a smaller --gpus or --nodes, or a larger allocation; {OWN}"


@pytest.mark.parametrize(
    ("nodes", "end_s", "settings", "words"),
    [
        (NODES, None, {}, "on n1 of allocation 7, which has no time limit"),
        (NODES[1:], 9000, {"job.signal_lead_s": 0}, "on n2 of allocation 7, which ends at {}"),
        (NODES, 60.5, {}, ENDS),
        (NODES, 60, {}, f"ConfigError: allocation 7 ends in 60 s, but the run must save 60 s {SHORT}"),
        (NODES, -9, {}, f"ConfigError: allocation 7 ends in 0 s, but the run must save 60 s {SHORT}"),
        (NODES, 9000, {"profile": "local"}, "ConfigError: --here runs on the nodes of allocation 7, and profile "
         "local starts processes on this machine|leave out --here, or name the cluster's profile, as in --cluster "
         "generic-slurm"),
        (NODES, 9000, {"script": ""}, "ConfigError: this job.sh, from a template of your own, does "
         f"not start its ranks with {STEP}|submit it as a new run; without --here a job is queued"),
        (NODES[2:], None, {}, "ConfigError: tp2-pp2-dp1 needs 1 node for 4 ranks each, and allocation 7 has 1 (n3) "
         f"with at most 3 CPUs and 4 GPUs each: 0 can hold them{SMALL}"),
        (NODES, None, {"job.spare_nodes": 2}, "ConfigError: tp2-pp2-dp1 needs 3 nodes, 2 of them spare, for 4 ranks "
         f"each, and allocation 7 has 3 (n1, n2, n3) with at most 11 CPUs and 5 GPUs each: 2 can hold them{SMALL}"),
    ],
)  # fmt: skip
def test_where_a_run_would_run_or_why_not(nodes, end_s, settings, words: str, monkeypatch) -> None:
    now, settings = time.time(), {**LEAD, "profile": "generic-slurm", "script": STEP, **settings}
    monkeypatch.setattr(here, "time", SimpleNamespace(time=lambda: now))
    end = None if end_s is None else now + end_s
    profile, script = settings.pop("profile"), settings.pop("script")
    found = answered(Allocation("7", nodes, end).where_text, resolved_demo(settings, profile), script)
    assert found == words.replace("{}", "" if end is None else here.clock(end, now))


def test_job_sh_has_the_variables_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    run, resolved = make_run(tmp_path, "generic-slurm"), resolved_demo({"layout.gpus": 8, "job.name": "mine"})
    found = here._environment("7-9", Allocation("7", NODES, 1893456000.5), NODES[:2], run, resolved)
    assert {name[6:]: text for name, text in found.items() if name.startswith("SLURM_")} == {
        **dict.fromkeys(("JOB_ID", "JOBID"), "7"), "JOB_NAME": "mine", "SUBMIT_DIR": os.getcwd(), "OVERLAP": "1",
        **dict.fromkeys(("JOB_NODELIST", "NODELIST"), "n1,n2"), **dict.fromkeys(("JOB_NUM_NODES", "NNODES"), "2"),
        **dict.fromkeys(("NTASKS", "NPROCS"), "8"), "NTASKS_PER_NODE": "4", "CPUS_PER_TASK": "2",
        "TASKS_PER_NODE": "4(x2)", "JOB_CPUS_PER_NODE": "8(x2)", "JOB_END_TIME": "1893456000",
    }  # fmt: skip
    assert {"HPC_GPT_RUN": str(run.path), "HPC_GPT_START": "7-9"}.items() <= found.items()


SHOWN = (
    "JobId=70 JobState=RUNNING EndTime=2030-01-02T00:00:00 Nodes=n[1-2] CPU_IDs=0-3,6 Mem=0 GRES=gpu:a100:2(IDX:0-1)"
)
SHOWN += "   Nodes=n4 CPU_IDs=0 Mem=9 GRES="


def test_job_sh_that_ends_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scontrol", "squeue"):
        program(tmp_path, name, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    run = make_run(tmp_path / "logs", "generic-slurm", submit=False)
    start = f"7-{os.getpid()}"
    add_attempt(run, 2, None, job_id=start)
    run.job_script.write_text(f": {STEP}; exit 3\n")
    words = answered(here.run_in, Allocation("7", NODES, None), run, run.resolved())
    (line,) = run.submissions()
    keys = ("scheduler", "job_id", "allocation", "command", "refused", "pid", "cluster")
    assert {key: line[key] for key in keys} == {
        "scheduler": "local", "job_id": start, "allocation": "7", "command": ["bash", str(run.job_script)],
        "refused": None, "pid": os.getpid(), "cluster": "generic-slurm",
    }  # fmt: skip
    assert str(words).startswith(JobFailed.__name__)
    end = run.attempts()[0].ended()
    assert (end["ended"], end["cause"], end["step"]) == ("error", "job.sh ended with exit code 3 and wrote no end", 2)


SRUN = "srun --jobid=70 --overlap --nodes=1 --ntasks=1 --nodelist=n1 --job-name=hpc-gpt-shell"
SILENT = "rank 1 on n1 has written no heartbeat for 30 min: it may be dead"


@pytest.mark.parametrize(
    ("rank", "host", "cluster", "terminal", "starts", "expected"),
    [
        (0, "n1", None, False, "", f"{SRUN} --cpus-per-task=5 --chdir={{run}} --gres=gpu:2"),
        (0, "n1", "far", True, "", f"{SRUN} --clusters=far --cpus-per-task=5 --chdir={{run}} --gres=gpu:2 --pty"),
        (0, "n4", None, False, "", f"{SRUN.replace('n1', 'n4')} --cpus-per-task=1 --chdir={{run}}"),
        (0, "n9", None, False, "", "ConfigError: job 7 has no node n9 any more|hpc-gpt status {id}"),
        (1, "n1", None, False, "", f"{SRUN} --cpus-per-task=5 --chdir={{run}} --gres=gpu:2"),
        (1, "n1", None, False, "echo 'srun: error: no; never' >&2; exit 1", f"SlurmUnreachable: {SILENT}, and no step "
         "starts on its node: srun: error: no|hpc-gpt logs {id} has the output of the rank"),
        (2, "n1", None, False, "", "ConfigError: run {id} has no rank 2|it has ranks 0 to 1 on n1"),
    ],
)  # fmt: skip
def test_a_shell_is_a_step_of_these_words(
    rank, host, cluster, terminal, starts, expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "scontrol", f"echo '{SHOWN}'")
    program(tmp_path, "srun", starts)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    run = make_run(tmp_path / "logs", "generic-slurm", submit=False)
    run.add_submission({"scheduler": "slurm", "job_id": "7", "refused": None, "slurm_cluster": cluster})
    attempt = add_attempt(run, 1, None, job_id="7")
    attempt.heartbeats.mkdir()
    for number, silent_s in ((0, 1), (1, 1800)):
        beat = replace(BEAT, rank=number, host=host, pid=40 + number, time=time.time() - silent_s)
        write_heartbeat(attempt.heartbeats, beat)
    (status,) = read_status([run])
    monkeypatch.setattr(shell, "read_own_status", lambda _: replace(status, state="running", cause=None))
    words, places = ["nvidia-smi", "-l"], {"run": run.path, "id": run.run_id}
    found = answered(shell.enter, run, None, rank, words, terminal)
    if not isinstance(found, shell.Entry):
        assert found == expected.format(**places)
        return
    inside = ["bash", "-c", read_text(templates_dir() / "enter.sh"), "hpc-gpt", str(rank), str(40 + rank), *words]
    assert found.command == [*expected.format(**places).split(" "), *inside]
    assert found.note == (SILENT if rank else "")
