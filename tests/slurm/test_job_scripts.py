"""A job script on a real cluster, by sbatch and by `hpc-gpt submit`: the same processes and the same signals.

The scripts of these tests end processes by their ids alone: they run as root beside everything else on this machine.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.ends.program_end import read_said
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.run_folder import RunFolder, job_ids
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.slurm.sbatch_words import array_numbers
from tests.around import around, events_of
from tests.programs import put
from tests.slurm.launcher import LONG_LEAD, Job, Launcher

RECORD = """\
import json, os, resource, signal, sys
def status():
    lines = (line.split(":", 1) for line in open("/proc/self/status"))
    return {key: value.strip() for key, value in lines if key in ("SigBlk", "SigIgn", "Umask")}
found = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "status": status()}
found["limits"] = [resource.getrlimit(each) for each in range(16)]
found["files"] = sorted(os.listdir("/proc/self/fd"))
found["input"] = os.readlink("/proc/self/fd/0") if sys.argv[1] == "batch" else ""
found["leader"] = os.getpgid(os.getppid()) == os.getppid()
found["task"] = os.environ["SLURM_TASK_PID"] in (str(os.getppid()), str(os.getpid()))
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("SLURM_ARRAY_TASK_ID", ""))
json.dump(found, open(f"{os.environ['REC']}/{sys.argv[1]}{rank}.json", "w"))
"""
# Named nodes: both ways on the same ones, of a partition where no test cuts the power of a node, or has one drained.
PROCESSES = """\
#!/bin/bash -f
#SBATCH --job-name=same -N 2 --ntasks-per-node=1 --gres=gpu:2
#SBATCH --time=9 --partition=quiet --nodelist=q[1-2]
umask 027
python3 -I "$REC/record.py" batch "$@" *
srun -n1 -N1 python3 -I "$REC/record.py" step "$@"
echo "step 1 loss 2.5"
echo "step 2 loss 2.0"
exit 3
"""
MPIRUN = """\
#!/bin/bash
#SBATCH --job-name=mpi -N 2 --ntasks-per-node=2 --gres=gpu:2
#SBATCH --time=9 --partition=quiet --nodelist=q[1-2]
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun --bind-to none python3 -I "$REC/record.py" rank "$@"
exit 3
"""
# Its second element asks for its own requeue: it comes back as the same element.
ELEMENTS = """\
#!/bin/bash
#SBATCH --job-name=elements --array=0-3%2 -N 1 --ntasks=1 --time=9 --partition=quiet --nodelist=q2
if [ "$SLURM_ARRAY_TASK_ID:$SLURM_RESTART_COUNT" = 1: ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_1"
  sleep 600
fi
scontrol show job "$SLURM_JOB_ID" | grep -m 1 -o "ArrayTaskThrottle=[0-9]*" >"$REC/throttle$SLURM_ARRAY_TASK_ID"
python3 -I "$REC/record.py" batch "$@"
"""
# Differ from job to job. Of the scheduler's own numbers, and mpirun's, nothing is compared.
OF_A_JOB = re.compile(
    r"REC|SLURM_(JOB_?ID|ARRAY_JOB_ID|TASK_PID|SRUN_COMM_PORT|STEP_LAUNCHER_PORT|(JOB|STEP)_GPUS)|GPU_DEVICE_ORDINAL"
    r"|\w+_VISIBLE_DEVICES|ZE_AFFINITY_MASK|PMIX_\w+|OMPI_(MCA_\w+_(uri|jobid|dir|transports)|FILE_LOCATION)"
)
NEEDS_MPIRUN = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here: openmpi-bin")
OURS = {"HPC_GPT_RUN", "HPC_GPT_ATTEMPT", "HPC_GPT_CHECKPOINTS"}
SIGNALS = """\
#!/bin/bash
#SBATCH --job-name=signals -N 1 --ntasks=1 --time=9
hear() { echo "$1" >>"$REC/$2"; }
for each in HUP INT USR1 USR2 TERM; do trap "hear $each shell" $each; done
python3 -I "$REC/hear.py" child &
(python3 -I "$REC/hear.py" grandchild; true) &
setsid python3 -I "$REC/hear.py" apart &
srun python3 -I "$REC/hear.py" step &
echo ready >>"$REC/shell"
for each in 1 2 3 4 5 6 7 8; do wait; done
"""
HEAR = """\
import os, signal, sys, time
file = open(f"{os.environ['REC']}/{sys.argv[1]}", "a", buffering=1)
for each in ("HUP", "INT", "USR1", "USR2", "TERM"):
    signal.signal(getattr(signal, f"SIG{each}"), lambda number, frame, each=each: file.write(each + "\\n"))
file.write("ready\\n")
end = time.monotonic() + 3000
while time.monotonic() < end and not os.path.exists(f"{os.environ['REC']}/over"):
    time.sleep(0.05)
"""
WHO = ("shell", "child", "grandchild", "apart", "step")
# {how it is sent: (the words of scancel, what arrives, at whom)}.
SENT = {
    "steps": (("--signal=USR1",), "USR1", ("step",)),
    "shell": (("--batch", "--signal=USR1"), "USR1", ("shell",)),
    "group": (("--full", "--signal=INT"), "INT", WHO[:3]),  # of a step srun alone hears it
    "all": ((), "TERM", WHO),
}


def folder_of(launcher: Launcher, name: str, **files: str) -> Path:
    (folder := launcher.folder / name).mkdir()
    for file, text in files.items():
        (folder / file.replace("_", ".")).write_text(text)
    return folder


def of_a_user(folder: Path) -> dict[str, str]:
    """The environment of a user's shell, with a logs folder of its own."""
    return {"REC": str(folder), "HPC_GPT_CLUSTER": "", "HPC_GPT_EXPERIMENT": "", "HPC_GPT_LOGS": str(folder / "logs")}


def submit(launcher: Launcher, way: str, folder: Path, *words: str) -> Job:
    """The job of `words`, from `train.slurm` on, by either way."""
    own = of_a_user(folder)
    if way == "submit" and "--array" not in (folder / "train.slurm").read_text():
        return launcher.submit(*words, cwd=folder, **own, HPC_GPT_STATE=launcher.environment["HPC_GPT_STATE"])
    if way == "submit":
        said = launcher.run("submit", *words, cwd=folder, **own)[0]
    else:
        command = ("env", "-C", str(folder), "sbatch", *words)
        said = launcher.cluster.run(*command, check=True, **{**launcher.environment, **own}).stdout
    found = re.search(r"(?:job|array) (\d+)", said)
    assert found, said
    return Job(launcher.cluster, RunFolder(folder), found[1])


def ends(job: Job) -> None:
    job.wait("its end", lambda: not job.cluster.run("squeue", "-h", "-j", job.id).stdout.strip())


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("script", "code", "who"),
    [
        pytest.param(PROCESSES, 3, ("batch", "step"), id="srun"),
        pytest.param(MPIRUN, 3, ("rank0", "rank1", "rank2", "rank3"), id="mpirun", marks=NEEDS_MPIRUN),
        pytest.param(ELEMENTS, 0, ("batch0", "batch1", "batch2", "batch3"), id="array"),
    ],
)
def test_a_script_has_the_processes_that_sbatch_gives_it(launcher, script, code, who, request):
    jobs = {}
    told = launcher.folder / f"{request.node.callspec.id}-told"
    for way in ("sbatch", "submit"):
        name = f"{request.node.callspec.id}-{way}"
        folder = folder_of(launcher, name, train_slurm=script, record_py=RECORD)
        words = ["--no-requeue"] if code else []
        words += around(told) if way == "submit" and script is PROCESSES else []
        jobs[way] = folder, submit(launcher, way, folder, *words, "--comment=it's", "train.slurm", "a b", "--lr", "*")
    found: dict[str, dict[str, Any]] = {}
    for way, (folder, job) in jobs.items():
        ends(job)
        assert job.shown()["ExitCode"] == f"{code}:0"
        for each in who:
            seen = json.loads((folder / f"{each}.json").read_text())
            names = set(seen["env"])
            assert (names & OURS == OURS) is (way == "submit")
            own = {name: "" if OF_A_JOB.fullmatch(name) else value for name, value in seen["env"].items()}
            seen["env"] = json.loads(json.dumps({name: own[name] for name in names - OURS}).replace(str(folder), "<>"))
            seen["cwd"] = seen["cwd"].removesuffix(way)
            found.setdefault(each, {})[way] = seen
        if script is ELEMENTS:
            throttles = [(folder / f"throttle{number}").read_text() for number in range(4)]
            assert throttles == ["ArrayTaskThrottle=2\n"] * 4
        else:
            assert (folder / f"slurm-{job.id}.out").exists()
    for each, ways in found.items():
        env, of_sbatch = ways["submit"].pop("env"), ways["sbatch"].pop("env")
        assert {name for name in {*env, *of_sbatch} if env.get(name) != of_sbatch.get(name)} == set(), each
        assert ways["submit"] == ways["sbatch"], each
    if script is PROCESSES:
        run = jobs["submit"][1].run
        first, failed = events_of(run, told)
        assert (first["event"], first["next"]) == ("first_step", "it trains")
        seen = [failed[key] for key in ("event", "ended", "step", "loss")]
        assert seen == ["failed", "error", 2, 2.0]


@pytest.mark.long(but="first")
@pytest.mark.parametrize("how", SENT)
def test_a_signal_reaches_whom_it_reaches_under_sbatch_and_once(launcher: Launcher, how: str) -> None:
    words, name, whom = SENT[how]
    for way in ("sbatch", "submit"):
        folder = folder_of(launcher, f"signals-{how}-{way}", train_slurm=SIGNALS, hear_py=HEAR)
        job = submit(launcher, way, folder, "train.slurm")

        def heard(folder: Path = folder) -> dict[str, list[str]]:
            return {who: (folder / who).read_text().split() for who in WHO if (folder / who).exists()}

        job.wait("its processes", lambda heard=heard: sorted(heard()) == sorted(WHO) and all(heard().values()))
        launcher.cluster.run("scancel", *words, job.id, check=True)
        job.wait("the signal", lambda heard=heard: all(name in heard()[who] for who in whom))
        if how != "all":  # a second one would have come by the time that a later signal has
            launcher.cluster.run("scancel", "--full", "--signal=USR2", job.id, check=True)
            job.wait("the later signal", lambda heard=heard: all("USR2" in heard()[who] for who in ("shell", "step")))
        (folder / "over").touch()
        job.wait("its end", lambda job=job: job.is_over)
        for who, words_of in heard().items():
            assert words_of.count(name) == (who in whom), (way, who, words_of)
            assert set(words_of) <= {"ready", name, "USR2"}, (way, who, words_of)


DEAF = """\
#!/bin/bash
#SBATCH --job-name=deaf -N 1 --ntasks=1 --time=60
trap '' TERM USR2
echo "start of attempt $HPC_GPT_ATTEMPT"
[ "$HPC_GPT_ATTEMPT" = 1 ] || exit 0
for step in {1..900}; do
  echo "step $step loss 2.5"
  sleep 0.5
done
"""


@pytest.mark.long
def test_a_script_that_ignores_signals_continues_after_its_limit(launcher: Launcher) -> None:
    """Slurm kills all of the job KillWait seconds after the limit: another attempt is asked for before any judging."""
    folder = folder_of(launcher, "deaf", train_slurm=DEAF)
    job = submit(launcher, "submit", folder, "--set", "chain=singleton", "train.slurm")
    job.wait_step(2)
    launcher.cluster.run("scontrol", "update", f"jobid={job.id}", "EndTime=now+1", check=True)
    job.wait("the next attempt", lambda: len(job.run.attempts()) > 1)
    last = launcher.job_of(job.run)
    last.far_from_its_limit()
    last.wait_end()
    assert last.ended() == ["walltime", "done"], job.log()
    assert (job.restarts, len(job_ids(job.run))) == (0, 2)
    assert not launcher.cluster.run("squeue", "--noheader", f"--name={last.shown()['JobName']}").stdout


LOOP = """\
#!/bin/bash
#SBATCH --job-name=loop -N 1 --ntasks=1
while :; do
  echo >>starts
  srun --output=out.txt python3 -uc 'import time
for step in range(1, 9000): print(f"step {step} loss 2.0"); time.sleep(0.1)'
done
"""


@pytest.mark.long
def test_a_stop_ends_a_loop_around_a_step(launcher: Launcher) -> None:
    folder = folder_of(launcher, "loop", train_slurm=LOOP)
    job = submit(launcher, "submit", folder, *LONG_LEAD, "train.slurm")
    job.wait_step(2)
    launcher.run("stop", str(job.run.path), "--wait")
    assert job.run.attempt(1).ended()["ended"] == "stopped"
    assert (folder / "starts").read_text() in ("\n", "\n\n")
    job.wait("its end", lambda: job.is_over)


ROUGH = """\
#!/bin/bash
#SBATCH --job-name=rough -N 1
trap 'echo caught' TERM
sleep 600 &
until [ -s "$HPC_GPT_RUN/attempts/$HPC_GPT_ATTEMPT/beats/0.json" ]; do sleep 0.1; done
watch=$(sed 's/.*"pid": *\\([0-9]*\\).*/\\1/' "$HPC_GPT_RUN/attempts/$HPC_GPT_ATTEMPT/beats/0.json")
tr '\\0' ' ' <"/proc/$watch/cmdline" | grep -q "script_watch $HPC_GPT_RUN" && kill -9 "$watch"
kill 0
sleep 600 &
[ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue "$SLURM_JOB_ID"; sleep 600; }
exit 7
"""


@pytest.mark.long
def test_neither_kill_0_nor_the_loss_of_the_watch_ends_the_chain(launcher: Launcher) -> None:
    folder = folder_of(launcher, "rough", train_slurm=ROUGH)
    job = submit(launcher, "submit", folder, "--set", "job.retry_pause_s=1", "--set", "chain=requeue", "train.slurm")
    job.wait("its end", lambda: job.ended()[1:] and job.slurm_state == "FAILED")
    assert job.ended()[:2] == ["requeued", "error"], job.log()  # requeued by itself, once
    assert job.shown()["ExitCode"] == "7:0"
    assert "caught" in job.log()
    assert not job.run.attempt(1).ended()["requeue"]


ARRAY = """\
#!/bin/bash
#SBATCH --array=3-7:2%2 -N 1 --job-name=many -e err-%a.txt -o out-%a.txt
echo "$SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT"
[ "$SLURM_ARRAY_TASK_ID" != 5 ] || [ -n "$SLURM_RESTART_COUNT" ] || { echo "step 1 loss 2.5" && exit 4; }
"""


def submit_array(launcher: Launcher, folder: Path, *words: str) -> tuple[str, dict[str, RunFolder]]:
    """(the array's id, {index: run}) of `train.slurm`, with a logs folder of its own."""
    said, _ = launcher.run("submit", *words, "train.slurm", cwd=folder, **of_a_user(folder))
    runs = {json.loads(path.read_text())["row"]: RunFolder(path.parent) for path in folder.glob("logs/*/*/sweep.json")}
    assert f"submitted {len(runs)} runs as array" in said
    return said.split()[-1], runs


@pytest.mark.long(always=True)
def test_an_array_is_one_array_of_runs_that_keep_their_indices(launcher: Launcher) -> None:
    folder = folder_of(launcher, "array", train_slurm=ARRAY)
    array, runs = submit_array(launcher, folder, "--set", "job.retry_pause_s=1")
    job = Job(launcher.cluster, runs["5"], array)
    ends(job)
    found = {row: [each.ended().get("ended") for each in run.attempts()] for row, run in runs.items()}
    assert found == {"3": ["done"], "5": ["error", "done"], "7": ["done"]}
    assert runs["5"].attempt(2).log.read_text() == "5 of 3\n"
    assert (folder / "out-5.txt").read_text() == "5 of 3\n"


REST = """\
#!/bin/bash
#SBATCH --job-name=rest --array=1-4%1 -N 1 --ntasks=1
echo "step 1 loss 2.5"
[ "$SLURM_ARRAY_TASK_ID" != 1 ] || scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"
"""


@pytest.mark.long
def test_the_cancelled_rest_of_an_array_is_cancelled(launcher: Launcher) -> None:
    folder = folder_of(launcher, "rest", train_slurm=REST)
    array, runs = submit_array(launcher, folder)
    ends(Job(launcher.cluster, runs["1"], array))
    rows, _ = launcher.run("status", "--json", str(folder / "logs"))
    records, _ = launcher.run("report", "--json", str(folder / "logs"))
    expected = {run.run_id: "done" if index == "1" else "cancelled" for index, run in runs.items()}
    assert {row["run"]: row["state"] for row in json.loads(rows)["runs"]} == expected
    assert {record["run"]: record["ended"] for record in json.loads(records)["records"]} == expected


CHAINED = """\
#!/bin/bash
#SBATCH -N 1 --ntasks=1 --job-name=chained
env >"$REC/env.$HPC_GPT_ATTEMPT"
echo "$PWD $* ${SLURM_ARRAY_TASK_ID:-}"
[ "$HPC_GPT_ATTEMPT" = 2 ] || { echo "step 1 loss 2.5" && exit 4; }
"""


@pytest.mark.long(always=True)
def test_a_chain_of_jobs_starts_the_script_in_one_environment(launcher: Launcher) -> None:
    folder = folder_of(launcher, "chained", train_slurm=CHAINED)
    chain = ("--set", "chain=singleton", "--set", "job.retry_pause_s=1")
    said, _ = launcher.run("submit", *chain, "--array=5", "train.slurm", "a b", cwd=folder, **of_a_user(folder))
    (path,) = {path.parent for path in (folder / "logs").glob("chained/*/resolved.json")}
    job = Job(launcher.cluster, RunFolder(path), said.split()[-1])
    job.wait("the second end", lambda: job.run.attempt(2).ended())
    assert job.ended() == ["error", "done"], job.log()
    for number in (1, 2):
        assert job.run.attempt(number).log.read_text().startswith(f"{folder} a b 5\n")
    first, second = (set((folder / f"env.{number}").read_text().splitlines()) for number in (1, 2))
    differ = {line.partition("=")[0] for line in first ^ second}
    of_a_job = (
        r"HPC_GPT_ATTEMPT|SLURM_JOB_DEPENDENCY|SLURM_(JOB_)?NODELIST|SLURM_TOPOLOGY_ADDR|SLURMD_NODENAME|HOSTNAME"
    )
    assert not {name for name in differ if not re.fullmatch(rf"{OF_A_JOB.pattern}|{of_a_job}", name)}


ELEMENT = """\
#!/bin/bash
#SBATCH --job-name=element --array=2,4 -N 1 --ntasks=1 --output=out-%a.txt
echo "$SLURM_ARRAY_TASK_ID" >>"$REC/starts"
[ -e "$REC/mended" ] || exit 4
"""


@pytest.mark.long
def test_one_element_of_an_array_is_resumed_alone(launcher: Launcher) -> None:
    folder = folder_of(launcher, "element", train_slurm=ELEMENT)
    array, runs = submit_array(launcher, folder, "--set", "chain=none")
    for run in runs.values():
        Job(launcher.cluster, run, array).wait("the end", run.attempt(1).verdict)
    (folder / "mended").touch()
    launcher.run("submit", "--resume", str(runs["4"].path), "--time", "7", **of_a_user(folder))
    job = Job(launcher.cluster, runs["4"], str(runs["4"].submissions()[-1]["job_id"]))
    job.wait("the second end", lambda: runs["4"].attempt(2).verdict())
    assert job.ended() == ["error", "done"], job.log()
    assert job.id.endswith("_4")
    assert sorted((folder / "starts").read_text().split()) == ["2", "4", "4"]
    assert len(runs["2"].attempts()) == 1


LIMITED = """\
#!/bin/bash
#SBATCH -N 1 --ntasks=1 --job-name=limited --time=9
squeue -h -j "$SLURM_JOB_ID" -o %l >>"$REC/limits"
case "$HPC_GPT_ATTEMPT" in
1) no-such-program; exit 0 ;;
2) echo "step 1 loss 2.5" && exit 4 ;;
esac
echo end
"""


@pytest.mark.long
def test_what_a_resumption_asks_holds_for_every_further_job(launcher: Launcher) -> None:
    folder = folder_of(launcher, "limited", train_slurm=LIMITED)
    chain = ("--set", "chain=singleton", "--set", "job.retry_pause_s=1")
    job = submit(launcher, "submit", folder, *chain, "train.slurm")
    run = job.run
    job.wait("the first end", run.attempt(1).verdict)
    # Not its exit code says that it failed, and it printed no line afterwards.
    assert run.attempt(1).ended()["cause"].startswith("exit code 0, but no-such-program: command not found")
    launcher.run("submit", "--resume", str(run.path), "--time", "7", **of_a_user(folder))
    job.wait("the third end", lambda: run.attempt(3).verdict())
    assert [attempt.verdict()["attempt_ended"] for attempt in run.attempts()] == ["user_error", "error", "done"]
    assert (folder / "limits").read_text().split() == ["9:00", "7:00", "7:00"]


QUICK = """\
#!/bin/bash
#SBATCH -N 1 --ntasks=1 --job-name=quick --output=quick.txt
echo "it was quick"
"""


@pytest.mark.long
def test_a_script_that_ends_before_its_watch_begins_has_its_file(launcher: Launcher) -> None:
    text = f'#!/bin/sh\ncase "$*" in *script_watch*) sleep 12 ;; esac\nexec {sys.executable} "$@"\n'
    python = put(launcher.folder / "slow-python", text)
    folder = folder_of(launcher, "quick", train_slurm=QUICK)
    job = launcher.submit("train.slurm", cwd=folder, **of_a_user(folder), HPC_GPT_PYTHON=str(python))
    job.wait_end("COMPLETED")
    assert (folder / "quick.txt").read_text() == "it was quick\n"


@pytest.mark.long
def test_names_in_any_script_stay_apart(launcher: Launcher) -> None:
    """Two scripts whose names differ by a letter, one with as long a name as its output's file can have."""
    names = ("实验一", "实验二", "मॉडल 🚀 " + "长" * 70)
    text = "#!/bin/bash\n#SBATCH -N 1 --ntasks=1 --time=9\n#SBATCH --output=%x-%j.txt\necho of $SLURM_JOB_NAME\n"
    folder = folder_of(launcher, "实验")
    for name in names:
        put(folder / "train.slurm", text)
        job = launcher.submit("-J", name, "train.slurm", cwd=folder, **of_a_user(folder))
        assert launcher.cluster.run("squeue", "-h", "-t", "all", "-j", job.id, "-o", "%j").stdout.strip() == name
        job.wait_end("COMPLETED")
        assert (folder / f"{name}-{job.id}.txt").read_text() == f"of {name}\n"
        assert job.run.path.parent.name == name.replace(" ", "_")
        (row,) = json.loads(launcher.run("status", name, "--json", **of_a_user(folder))[0])["runs"]
        assert row["run"] == job.run.run_id


def test_the_options_are_those_that_this_sbatch_knows(small) -> None:
    """getopt names what an abbreviation could mean: from the letters on, every option of the installed sbatch."""
    from hpc_gpt.core.slurm.directives import options_of

    named: set[str] = set()
    for letter in "abcdeghijklmnopqrstuvwx":
        said = small.run("sbatch", f"--{letter}").stderr
        named |= set(re.findall(r"'--([a-z-]+)'", said.partition("possibilities:")[2]))
    sbatch = options_of("sbatch")
    assert {"partition", "tasks-per-node", "cluster", "kill-on-invalid-dep"} <= {*named, "kill-on-invalid-dep"}
    assert {name for name in named if sbatch.named(name) not in sbatch.kinds} == set()
    for name in sorted(named):
        said = small.run("sbatch", f"--{name}=").stderr
        plain = "doesn't allow an argument" in said
        assert plain == (sbatch.kinds[sbatch.named(name)] == "plain"), (name, said)


HELD = """\
#!/bin/bash
#SBATCH -N 1 --ntasks=1 --time=9 --requeue
for step in 1 2 3; do echo "step $step/6 loss 2.$step"; done
[ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeuehold "$SLURM_JOB_ID"; sleep 600; }
for step in 4 5 6; do echo "step $step/6 loss 2.$step"; done
"""


def test_a_requeue_that_is_held_is_no_end(launcher: Launcher) -> None:
    folder = folder_of(launcher, "held", train_slurm=HELD)
    job = submit(launcher, "submit", folder, "--set", "chain=requeue", "train.slurm")
    job.wait("the hold", lambda: job.ended() and job.slurm_state in ("PENDING", "REQUEUE_HOLD"))
    (row,) = json.loads(launcher.run("status", job.run.run_id, "--json", **of_a_user(folder))[0])["runs"]
    assert row["state"] == "pending"
    assert "scontrol release lets it start" in row["cause"]
    launcher.cluster.run("scontrol", "release", job.id, check=True)
    job.start_soon()
    job.wait_end("COMPLETED")
    assert job.ended() == ["requeued", "done"]


ARRAYS = (
    *(
        "[2]",
        "[0-3]%2",
        "3,",
        ",3",
        "[3,]",
        "[0-3",
        "0-3]",
        "%2",
        "2%0",
        "3%x",
        "1-3%2:2",
        "[1-3]:2",
        "[0-6:3]",
        "0-3:8",
    ),
    *("+3", "1- 3", "1%1,2", "[1,2]%1,5", "[ 1]", "]", "[[2]]", "1-5:0", "5-1", "1:2", "-1", "1-", "0x3", "1 ,2", "3 "),
    *("1-2-3", "[1]5", "1--3", "0-2:", "[1-2]]", "3]4", " [1]", "3x", "\u0661"),
)
TIMES = (
    *(
        "2-",
        "-1",
        "0",
        "5",
        "5:3",
        "1:2:3",
        "1-2",
        "1-2:3",
        "1-2:3:4",
        "unlimited",
        "Infinite",
        "0-",
        "60:90",
        "5:",
        ":30",
    ),
    *(
        "1:2:",
        "1:2:3:4",
        "1-2:",
        "-",
        "2-x",
        "5m",
        "INVALID",
        " 5",
        "+5",
        "--1",
        "2--1",
        "1-:5",
        "::",
        "-1:00",
        "\u0661",
    ),
)


def test_arrays_and_time_limits_are_those_that_slurm_takes(small, tmp_path: Path) -> None:
    script = put(tmp_path / "job.sh", "#!/bin/bash\ntrue\n")
    for text in ARRAYS:
        taken = small.run("sbatch", "--test-only", f"--array={text}", str(script)).returncode == 0
        assert bool(array_numbers(text)) == taken, text
    for text in TIMES:
        taken = small.run("sbatch", "--test-only", f"--time={text}", str(script)).returncode == 0
        try:
            limit_s(text)
            assert taken, text
        except ConfigError:
            assert not taken, text
    for text in ("[2-3]%1", "3,", "1-3%2:2", "[1,2]%1,5"):
        job = small.run("sbatch", "--parsable", "--hold", f"--array={text}", str(script), check=True).stdout.strip()
        elements = small.run("squeue", "-h", "-r", "-j", job, "-o", "%K", check=True).stdout.split()
        small.run("scancel", job)
        assert array_numbers(text) == [*map(int, elements)], text


FILES = """\
#!/bin/bash
#SBATCH -N 1 --ntasks=1 --time=9 --job-name=files --output=%x-%j-%N-%t.out --error=%5j.err
stat -c %F files-* *.err >seen
echo said
echo bad >&2
mv files-*.out moved.out
echo more
cp moved.out own.out
"""


def test_output_files_are_there_before_the_first_line(launcher: Launcher) -> None:
    jobs = {}
    for way in ("sbatch", "submit"):
        folder = folder_of(launcher, f"files-{way}", train_slurm=FILES)
        jobs[way] = folder, submit(launcher, way, folder, "train.slurm")
    found = {}
    for way, (folder, job) in jobs.items():
        ends(job)
        subprocess.run(["gzip", "moved.out"], cwd=folder, check=True)
        names = [path.name.replace(job.id, "ID") for path in folder.iterdir() if path.name != "logs"]
        texts = [(folder / name).read_text() for name in ("seen", "own.out", f"{int(job.id):05}.err")]
        found[way] = sorted(names), texts, gzip.decompress((folder / "moved.out.gz").read_bytes())
    assert found["submit"] == found["sbatch"]
    assert found["submit"][1] == ["regular empty file\nregular empty file\n", "said\nmore\n", "bad\n"]
    run = jobs["submit"][1].run
    assert run.attempt(1).log.read_text().startswith("said\nmore\n")
    assert run.attempt(1).err.read_text() == "bad\n"
    # What Slurm shows leads to them.
    folder, job = jobs["submit"]
    shown = re.search(r"StdOut=(.*)", job.cluster.run("scontrol", "show", "job", job.id).stdout)[1]
    (line,) = [line for line in Path(shown).read_text().splitlines() if line.startswith("the script's output is in ")]
    node = job.run.attempt(1).started()["node_list"]
    files = f"{folder}/files-{job.id}-{node}-0.out and {folder}/{int(job.id):05}.err"
    assert line == f"the script's output is in {files}"


AGAIN = """\
#!/bin/bash
#SBATCH -N 1 --ntasks=1 --time=9 --requeue --output=out.txt
echo "start ${SLURM_RESTART_COUNT:-0}"
[ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue "$SLURM_JOB_ID"; sleep 600; }
"""
SCONTROL = """#!/bin/bash
{scontrol} "$@" | sed 's/^\\(JobFileAppend *= \\)0/\\11/'
exit "${{PIPESTATUS[0]}}"
"""


@pytest.mark.long
def test_an_earlier_file_is_treated_as_open_mode_says(launcher: Launcher) -> None:
    jobs = {}
    for mode in ("", "append"):
        for way in ("sbatch", "submit"):
            folder = folder_of(launcher, f"again-{mode}-{way}", train_slurm=AGAIN)
            (folder / "out.txt").write_text("of an earlier job\n")
            words = [f"--open-mode={mode}"] if mode else []
            jobs[mode, way] = folder, submit(launcher, way, folder, *words, "train.slurm")
    site = launcher.place("again-site")
    put(site / "scontrol", SCONTROL.format(scontrol=shutil.which("scontrol")))
    folder = folder_of(launcher, "again-site-submit", train_slurm=AGAIN)
    (folder / "out.txt").write_text("of an earlier job\n")
    own = {"PATH": f"{site}:{os.environ['PATH']}", "HPC_GPT_CLUSTER": "", "HPC_GPT_EXPERIMENT": ""}
    jobs["site", "submit"] = folder, launcher.submit("train.slurm", cwd=folder, **own)
    found = {}
    for key, (folder, job) in jobs.items():
        ends(job)
        assert job.restarts == 1
        lines = (folder / "out.txt").read_text().splitlines()
        found[key] = [line for line in lines if line.startswith(("start", "of an"))]
    kept = ["of an earlier job", "start 0", "start 1"]
    for mode, lines in {"": ["start 1"], "append": kept}.items():
        assert found[mode, "sbatch"] == found[mode, "submit"] == lines
    assert found["site", "submit"] == kept  # JobFileAppend=1 in slurm.conf
    for (_, way), (_, job) in jobs.items():
        if way == "submit":
            starts = [re.findall(r"^start .", each.log.read_text(), re.MULTILINE) for each in job.run.attempts()]
            assert starts == [["start 0"], ["start 1"]]


QUEUES = """\
#!/bin/bash
#SBATCH --job-name=queues -N 1 --ntasks=1 --time=9
if [ -z "$SLURM_JOB_ID" ]; then sbatch "$0"; exit; fi
bash fit.sh
later() { sbatch --begin=now+1hour --job-name="$@"; }
later self "$0"
later file train.slurm
later resume resume.slurm
later stdin <train.slurm
later other eval_train.slurm
later wrap --wrap "python3 evaluate.py"
python3 evaluate.py || true
sbatch --wrap true
"""


def test_a_successor_is_told_from_the_other_jobs_of_a_script(launcher: Launcher) -> None:
    files = {"train_slurm": QUEUES, "resume_slurm": "#!/bin/bash\nbash fit.sh --resume\n"}
    folder = folder_of(launcher, "queues", **files, fit_sh="echo step 3/9 loss 2.0\n")
    (folder / "eval_train.slurm").write_text("#!/bin/bash\npython3 evaluate.py\n")
    job = submit(launcher, "submit", folder, "train.slurm")
    try:
        ends(job)
        names = dict(line.split("|") for line in launcher.cluster.run("squeue", "-ho", "%i|%j").stdout.splitlines())
        said = read_said(job.run.attempts()[0])
        assert sorted(names[one] for one in said.queued.split(", ")) == ["file", "resume", "self", "stdin"]
        assert sorted(names.get(one, "over") for one in said.others.split(", ")) == ["other", "over", "wrap"]
    finally:
        launcher.cluster.run("scancel", "--name=self,file,resume,stdin,other,wrap")
