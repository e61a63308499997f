"""What `submit --here` and `shell` say and start in a job that is there, whole: stand-ins of Slurm's clients answer.

tests/slurm/test_here.py and test_inside.py do the same with a real Slurm, which is slow.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_gpt.core.errors import JobFailed, UserError
from hpc_gpt.core.files import read_text, templates_dir
from hpc_gpt.core.runs.heartbeats import write_heartbeat
from hpc_gpt.launcher.launch import here, shell
from hpc_gpt.launcher.launch.here import AllocatedNode, Allocation
from hpc_gpt.launcher.watch.status import NO_ANSWER, read_status
from tests.launch.test_render import resolved_demo
from tests.launch.test_shell_functions import program
from tests.made_runs import add_attempt, make_run
from tests.watch.test_top import BEAT

STEP = '"${here[@]}"'
NODES = (AllocatedNode("n1", 9, 4), AllocatedNode("n2", 11, 5), AllocatedNode("n3", 3, 4))
QUEUED = "without --here a job is queued"
OWN = "without --here a job of its own is queued"
LEAD = {"job.signal_lead_s": 60}
TP4 = "tp2-pp2-dp1"


def answered(call, *arguments: object, **more: object) -> object:
    try:
        return call(*arguments, **more)
    except UserError as fault:
        return f"{type(fault).__name__}: {fault}|{fault.hint}"


@pytest.mark.parametrize(
    ("nodes", "end_s", "settings", "profile", "script", "words"),
    [
        (NODES, None, {}, "generic-slurm", STEP, "on n1 of allocation 7, which has no time limit"),
        (NODES[1:], 9000, {"job.signal_lead_s": 0}, "generic-slurm", STEP,
         "on n2 of allocation 7, which ends at {}"),
        (NODES, 9000, LEAD, "generic-slurm", STEP,
         "on n1 of allocation 7, which ends at {}, and is to save 60 s before"),
        (NODES, 9000, LEAD, "local", STEP, "ConfigError: --here runs on the nodes of allocation 7, and profile local "
         "starts processes on this machine|leave out --here, or name the cluster's profile, as --cluster "
         "generic-slurm"),
        (NODES, 9000, LEAD, "generic-slurm", "srun", "ConfigError: this job.sh, of an earlier version or an own "
         f"template, does not start its ranks with {STEP}|submit it as a new run; {QUEUED}"),
        (NODES, 60.5, LEAD, "generic-slurm", STEP,
         "on n1 of allocation 7, which ends at {}, and is to save 60 s before"),
        (NODES, 60, LEAD, "generic-slurm", STEP, "ConfigError: allocation 7 ends in 60 s, and the run is to save 60 s "
         f"before|a new allocation, or a smaller --set job.signal_lead_s=…; {OWN}"),
        (NODES, -9, LEAD, "generic-slurm", STEP, "ConfigError: allocation 7 ends in 0 s, and the run is to save 60 s "
         f"before|a new allocation, or a smaller --set job.signal_lead_s=…; {OWN}"),
        (NODES[2:], None, {}, "generic-slurm", STEP, f"ConfigError: {TP4} needs 1 node for 4 ranks each, and "
         "allocation 7 has 1 (n3) with at most 3 CPUs and 4 GPUs each: 0 can hold them|a smaller --gpus or --nodes, or "
         f"a larger allocation; {OWN}"),
        (NODES, None, {"job.spare_nodes": 2}, "generic-slurm", STEP, f"ConfigError: {TP4} needs 3 nodes, 2 of them "
         "spare, for 4 ranks each, and allocation 7 has 3 (n1, n2, n3) with at most 11 CPUs and 5 GPUs each: 2 can "
         f"hold them|a smaller --gpus or --nodes, or a larger allocation; {OWN}"),
    ],
)  # fmt: skip
def test_where_a_run_would_run_or_why_not(nodes, end_s, settings, profile, script, words, monkeypatch) -> None:
    now = time.time()
    monkeypatch.setattr(here, "time", SimpleNamespace(time=lambda: now))
    end = None if end_s is None else now + end_s
    resolved = resolved_demo(settings, profile)
    shown = "" if end is None else here.clock(end, now)
    assert answered(Allocation("7", nodes, end).where_text, resolved, script) == words.replace("{}", shown)


@pytest.mark.parametrize(("gpus", "nodes"), [(4, NODES[:1]), (8, NODES[:2])])
def test_job_sh_has_the_variables_of_a_job(gpus: int, nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    monkeypatch.delenv("HPC_GPT_PYTHON", raising=False)
    run, resolved = make_run(tmp_path, "generic-slurm"), resolved_demo({"layout.gpus": gpus, "job.name": "mine"})
    found = here._environment("7-9", Allocation("7", NODES, None), nodes, run, resolved)
    count, times = len(nodes), "" if gpus == 4 else "(x2)"
    values = {
        **dict.fromkeys(("JOB_ID", "JOBID"), "7"), "JOB_NAME": "mine", "SUBMIT_DIR": os.getcwd(), "OVERLAP": "1",
        **dict.fromkeys(("JOB_NODELIST", "NODELIST"), "n1" if gpus == 4 else "n1,n2"),
        **dict.fromkeys(("JOB_NUM_NODES", "NNODES"), str(count)), **dict.fromkeys(("NTASKS", "NPROCS"), str(gpus)),
        "NTASKS_PER_NODE": "4", "CPUS_PER_TASK": "2", "TASKS_PER_NODE": f"4{times}", "JOB_CPUS_PER_NODE": f"8{times}",
    }  # fmt: skip
    assert {name: text for name, text in found.items() if name.startswith("SLURM_")} == {
        f"SLURM_{name}": text for name, text in values.items()
    }
    own = {"HPC_GPT_RUN": str(run.path), "HPC_GPT_START": "7-9", "HPC_GPT_PYTHON": sys.executable}
    assert own.items() <= found.items()


SHOWN = "JobId=70 JobState={} EndTime=2030-01-02T00:00:00 Nodes=n[1-2] CPU_IDs=0-3,6 Mem=0 GRES=gpu:a100:2(IDX:0-1)"
SHOWN += "   Nodes=n4 CPU_IDs=0 Mem=9 GRES="


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (f"echo '{SHOWN.format('RUNNING')}'", Allocation("70", (AllocatedNode("n1", 5, 2), AllocatedNode("n2", 5, 2),
                                                                AllocatedNode("n4", 1, 0)), 1893542400.0)),
        (f"echo '{SHOWN.format('COMPLETED')}'", "ConfigError: allocation 7 is COMPLETED|salloc gives another one"),
        ("echo 'JobId=7 JobState=RUNNING EndTime=Unknown'", "ConfigError: Slurm names no nodes of allocation 7|"
         "scontrol show --details job shows them"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "ConfigError: allocation 7 is "
         "slurm_load_jobs error: Invalid job id specified|salloc gives another one"),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "SlurmUnreachable: scontrol "
         "cannot reach Slurm: slurm_load_jobs error: Unable to contact slurm controller|"
         "try again when slurmctld is up"),
    ],
)  # fmt: skip
def test_an_allocation_is_read(told: str, expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "scontrol", f'[[ "$*" = "--oneliner --details show job 7" ]] || exit 9\n{told}')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert answered(here.read_allocation) == expected
    monkeypatch.delenv("SLURM_JOB_ID")
    assert answered(here.read_allocation) == (
        "ConfigError: --here runs on the nodes of an allocation, and this is none: SLURM_JOB_ID is not set|"
        f"salloc --nodes=… --time=… gives one; {QUEUED}"
    )


# What each signal does to a supervisor that got those before it: lines on stderr, seconds until SIGKILL, interrupts.
SIGNALS = {
    "": ([], None, 0),
    "INT": (["", "Ctrl-C: the run is asked to save and stop; once more cancels", "asked"], None, 1),
    "INT INT": (["", "Ctrl-C again: the run is cancelled"], here.KILL_WAIT_S, 2),
    "INT INT INT": (["", "Ctrl-C again: the run is killed"], 0.0, 3),
    "TERM": ([], here.KILL_WAIT_S, 0),
    "HUP INT": (["", "Ctrl-C: the run is asked to save and stop; once more cancels", "asked"], here.KILL_WAIT_S, 1),
}


@pytest.mark.parametrize("got", SIGNALS)
def test_what_a_signal_does(got: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(here, "ask_runs", lambda runs, verb, say: say({"stop": "asked"}[verb]))
    run = make_run(tmp_path, "generic-slurm")
    supervisor = here._Supervisor(Allocation("7", NODES, None), run, run.resolved())
    for name in got.split():
        capsys.readouterr()
        supervisor._answer(getattr(signal, f"SIG{name}"))
    lines, kill_s, interrupts = SIGNALS[got]
    assert capsys.readouterr().err.splitlines() == lines
    left = None if supervisor._kill_at is None else supervisor._kill_at - time.time()
    assert left == (None if kill_s is None else pytest.approx(kill_s, abs=5))
    assert (supervisor.interrupts, run.is_cancelled(supervisor.start_id)) == (interrupts, interrupts > 1)


@pytest.mark.parametrize(
    ("end_s", "kill_s", "sent"),
    [(None, None, ""), (90, None, ""), (59, None, "USR2"), (9e3, 9, "TERM"), (9e3, -1, "KILL")],
)
def test_what_is_due_is_sent_to_the_runs_steps(end_s, kill_s, sent: str, tmp_path: Path, monkeypatch) -> None:
    run, now = make_run(tmp_path, "generic-slurm"), time.time()
    end = None if end_s is None else now + end_s
    supervisor = here._Supervisor(Allocation("7", NODES, end), run, resolved_demo(LEAD))
    program(tmp_path, "scontrol", "exit 1")
    steps = f"echo '7.1 {supervisor.start_id}'; echo '7.2 other'; echo 7.3; echo '7.4 {supervisor.start_id}'"
    program(tmp_path, "squeue", f"[[ \"$*\" = '--steps --jobs=7 --noheader --format=%i %j' ]] && {{ {steps}; }}")
    program(tmp_path, "scancel", f"echo \"$*\" >>'{tmp_path}/sent'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    supervisor._kill_at = None if kill_s is None else now + kill_s
    supervisor._look()
    found = (tmp_path / "sent").read_text() if sent else (tmp_path / "sent").exists()
    assert found == (f"--signal={sent} 7.1 7.4\n" if sent else False)


@pytest.mark.parametrize("begins", [True, False])
def test_job_sh_that_ends_without_a_word(begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is noted of the start, and how the attempt ends: job.sh made one, or none."""
    for name in ("scontrol", "squeue"):
        program(tmp_path, name, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    run = make_run(tmp_path / "logs", "generic-slurm", submit=False)
    start = f"7-{os.getpid()}"
    if begins:
        add_attempt(run, 2, None, job_id=start)
    run.job_script.write_text(f": {STEP}; exit 3\n")
    words = answered(here.run_in, Allocation("7", NODES, None), run, run.resolved())
    (line,) = run.submissions()
    keys = ("scheduler", "job_id", "allocation", "command", "refused", "pid", "cluster")
    assert {key: line[key] for key in keys} == {
        "scheduler": "local", "job_id": start, "allocation": "7", "command": ["bash", str(run.job_script)],
        "refused": None, "pid": os.getpid(), "cluster": "generic-slurm",
    }  # fmt: skip
    if not begins:
        assert words == f"JobFailed: run {run.run_id}: job.sh ended before its attempt began|see {run.path}"
        return
    assert str(words).startswith(JobFailed.__name__)
    end = run.attempts()[0].ended()
    assert (end["ended"], end["cause"], end["step"]) == ("error", "job.sh ended with exit code 3 and wrote no end", 2)


SRUN = "srun --jobid=70 --overlap --nodes=1 --ntasks=1 --nodelist=n1"
SILENT = "rank 1 on n1 has written no heartbeat for 30 min: it may be dead"


@pytest.mark.parametrize(
    ("rank", "host", "cluster", "terminal", "starts", "expected"),
    [
        (0, "n1", None, False, "", f"{SRUN} --cpus-per-task=5 --chdir={{run}} --gres=gpu:2"),
        (0, "n1", None, True, "", f"{SRUN} --cpus-per-task=5 --chdir={{run}} --gres=gpu:2 --pty"),
        (0, "n1", "far", True, "", f"{SRUN} --clusters=far --cpus-per-task=5 --chdir={{run}} --gres=gpu:2 --pty"),
        (0, "n4", None, False, "", f"{SRUN.replace('n1', 'n4')} --cpus-per-task=1 --chdir={{run}}"),
        (0, "n9", None, False, "", "ConfigError: job 7 has no node n9 any more|hpc-gpt status {id}"),
        (1, "n1", "far", False, "", f"{SRUN} --clusters=far --cpus-per-task=5 --chdir={{run}} --gres=gpu:2"),
        (1, "n1", None, False, "echo 'srun: error: no; never' >&2; exit 1", f"SlurmUnreachable: {SILENT}, and no step "
         "starts on its node: srun: error: no|hpc-gpt logs {id} has what the rank printed"),
        (1, "n1", None, False, "sleep 9", f"SlurmUnreachable: {SILENT}, and no step starts on its node: srun gave no "
         "answer in 0 s|hpc-gpt logs {id} has what the rank printed"),
        (2, "n1", None, False, "", "ConfigError: run {id} has no rank 2|it has ranks 0 to 1 on n1"),
    ],
)  # fmt: skip
def test_a_shell_is_a_step_of_these_words(
    rank, host, cluster, terminal, starts, expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "scontrol", f"echo '{SHOWN.format('RUNNING')}'")
    program(tmp_path, "srun", f"echo \"$*\" >>'{tmp_path}/tried'\n{starts}")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(shell, "_STARTS_S", 0.4 if "sleep" in starts else 20.0)
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
    tried = f"{expected.partition(' --cpus')[0].removeprefix('srun ')} true\n"
    assert (tmp_path / "tried").exists() == bool(rank)
    assert not rank or (tmp_path / "tried").read_text() == tried
    for state, cause, refusal in (
        ("pending", None, f"ConfigError: run {run.run_id}: nothing to look into, it is pending|hpc-gpt status says why "
         "it waits"),
        ("running", NO_ANSWER, f"SlurmUnreachable: run {run.run_id}: {NO_ANSWER}|try again when slurmctld is up"),
    ):  # fmt: skip
        changed = replace(status, state=state, cause=cause)
        monkeypatch.setattr(shell, "read_own_status", lambda _, changed=changed: changed)
        assert answered(shell.enter, run, None, rank, words, terminal) == refusal
