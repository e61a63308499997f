"""Restarts in the job of a program, Megatron-LM's stand-in, a job script, and an element of an array.

Each has the losses of an undisturbed one. Runs of our engines are in test_restarts_in_job, a program's own process a
GPU in test_command.
"""

import signal
import subprocess

import pytest

from hpc_gpt.core.process import start_time
from hpc_gpt.core.processes.find_processes import recorded
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.command.mine import experiment, kill, loss_of_loop
from tests.megatron_lm.checkout import make_checkout
from tests.megatron_lm.stand_in import START
from tests.processes import send
from tests.programs import put
from tests.slurm.launcher import SAVED, SINGLE, Job, paused
from tests.slurm.stories import Teller, storied
from tests.slurm.test_restarts_in_job import starts

pytestmark = pytest.mark.long
SOON = ("--set", "job.retry_pause_s=1", "--time", "1:00:00")


def restarted(job: Job, ended: str = "error") -> None:
    """The job is done, after one failure and one restart in it."""
    job.wait_end()
    assert job.ended() == [ended, "done"], job.log()
    assert starts(job) == [(0, 0), (0, 1)]


@storied
def test_a_program_of_one_process_restarts_on_all_nodes(teller: Teller) -> None:
    """A program like mpirun has no preflight; a step on both nodes ends the processes that are left there."""
    tables = {"layout": {"gpus": 2, "nodes": 2}}
    path = experiment(teller.launcher.place("one-process-in-job"), "loop", tables=tables)
    job = teller.launcher.submit(str(path), *SOON, STEPS="40", STEP_S="0.1")
    job.wait_step(13)
    kill(job.run, "loop.sh")
    restarted(job)
    assert job.losses() == {step: loss_of_loop(step) for step in range(1, 41)}

    def sizes() -> list[str]:
        return teller.cluster.run("sacct", "-n", "-P", "-o", "NNodes", f"--jobs={job.id}").stdout.split()

    of = ["1", "1", "1", "2", "2"]  # the script, a step of each attempt; the job, and a step between them
    job.wait("its steps in the accounting", lambda: sorted(sizes()) == of)


@storied
def test_megatron_lm_restarts_in_its_job(teller: Teller) -> None:
    checkout = make_checkout(teller.launcher.place("megatron-in-job") / "Megatron-LM")
    sizes = ("--gpus", "2", "--nodes", "2", "--tp", "1", "--pp", "1", "--set", "engine.name=megatron-lm")
    train = {"steps": 40, "log_every": 1, "save_every": 10, "eval_every": 0, "warmup_steps": 2}
    keys = [word for key, value in train.items() for word in ("--set", f"train.{key}={value}")]
    job = teller.launcher.submit("demo", *sizes, *keys, *SOON, MEGATRON_LM=str(checkout), STAND_IN_STEP_S="0.2")
    job.wait_step(13)
    kill(job.run, "pretrain_gpt.py")
    restarted(job)
    assert min(job.metrics(2)) > 10, "from a checkpoint"
    weight, expected = START, {}
    for step in range(1, 41):
        weight *= 0.99
        expected[step] = float(f"{weight:.6E}")
    assert job.losses() == expected


# It goes on where it was, kills itself twice, and puts itself back once.
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=kills-itself -N 1 --ntasks=1 --input=in.txt --requeue --output=own.out
echo "${SLURM_RESTART_COUNT:-none} $(cat)" >>starts
step=$(cat step 2>/dev/null || echo 0)
while ((step < 20)); do
  step=$((step + 1))
  echo "step $step loss $(awk "BEGIN {print 4 / $step}")"
  echo "$step" >step
  echo "$step" >"step-$step.ckpt"
  case "$step" in
  6 | 12) kill -KILL $$ ;;
  16) scontrol requeue "$SLURM_JOB_ID"; sleep 600 ;;
  esac
done
"""


@storied
def test_a_job_script_starts_again_in_its_job(teller: Teller) -> None:
    folder = teller.launcher.place("script-in-job")
    put(folder / "kills-itself.sh", SCRIPT)
    (folder / "in.txt").write_text("all of its input\n")
    asked = (*SOON, "--set", "job.restart_in_job=true", "--checkpoints", "step-*.ckpt", "kills-itself.sh")
    job = teller.launcher.submit(*asked, cwd=folder)
    job.wait("its requeue", lambda: job.restarts == 1)
    job.start_soon()
    job.wait_end()
    assert job.ended() == ["error", "error", "requeued", "done"], job.log()
    assert starts(job) == [(0, 0), (0, 1), (0, 2), (1, 0)], [one.verdict() for one in job.run.attempts()]
    counts = [f"{count} all of its input" for count in ("none", 1, 2, 3)]  # a file named by it is never another start's
    assert (folder / "starts").read_text().splitlines() == counts
    assert job.losses() == {step: loss_of_loop(step) for step in range(1, 21)}
    text = (folder / "own.out").read_text()
    assert all(line.startswith("step ") for line in text.splitlines()), text


# Its srun is killed, and the task on the other node holds what the next srun needs.
SPREAD = """\
#!/bin/bash
#SBATCH --job-name=spread -N 2 --ntasks-per-node=1
if [ ! -e tried ]; then
  touch tried
  srun env -i "$(command -v sleep)" 3000 &
  until squeue -h --steps "--jobs=$SLURM_JOB_ID" -o %i | grep -q "\\.[0-9]"; do sleep 0.2; done
  until [ -e beside ]; do sleep 0.2; done
  echo "step 1 loss 2.0"
  kill -KILL "$!"
  exit 1
fi
srun true && echo "step 2 loss 1.0"
until [ -e shown ]; do sleep 0.2; done
"""


@storied
def test_a_scripts_steps_on_other_nodes_are_ended_first(teller: Teller) -> None:
    folder = teller.launcher.place("spread-in-job")
    put(folder / "spread.sh", SPREAD)
    job = teller.launcher.submit(*SOON, "--set", "job.restart_in_job=true", "spread.sh", cwd=folder)
    job.wait("its step", lambda: numbered(teller, job))
    shell = ["srun", f"--jobid={job.id}", "--overlap", "--ntasks=1", "--nodes=1", "sleep", "3000"]
    with subprocess.Popen(shell, env=teller.launcher.environment) as own:
        try:
            job.wait("a shell of the user's own", lambda: len(numbered(teller, job)) == 2)
            (folder / "beside").touch()
            job.wait("a step of the second attempt", lambda: job.last_step(2) == 2)
            assert own.poll() is None, "it ends with the job alone"
            (folder / "shown").touch()
            restarted(job)
        finally:
            own.kill()


def numbered(teller: Teller, job: Job) -> list[str]:
    steps = teller.cluster.run("squeue", "-h", "--steps", f"--jobs={job.id}", "-o", "%i").stdout.split()
    return [step for step in steps if step.rpartition(".")[2].isdecimal()]


ROWS = '\n[rows]\n"disturbed" = { train.keep_last = 2 }\n"left-alone" = { train.keep_last = 3 }\n'


@storied
def test_an_element_of_an_array_restarts_in_its_job(teller: Teller) -> None:
    """Two elements with equal losses, of which one loses its rank."""
    launcher = teller.launcher
    path = launcher.place("elements-in-job") / "elements.toml"
    path.write_text(launcher.experiment.read_text().replace('name = "tiny"', 'name = "elements"') + ROWS)
    said, _ = launcher.run("submit", "--sweep", str(path), *SINGLE, *SAVED, *SOON, **paused(12))
    assert "submitted 2 runs as array" in said
    folders = [next(launcher.logs.glob(f"elements-{row}/*")) for row in ("disturbed", "left-alone")]
    runs = [RunFolder(folder) for folder in folders]
    job, other = (Job(launcher.cluster, run, str(run.submissions()[-1]["job_id"])) for run in runs)
    assert "_" in job.id
    for each in (job, other):
        each.wait_paused()
    other.resume()
    (victim,) = job.ranks()
    send(victim, signal.SIGKILL)
    restarted(job)
    other.wait_end()
    assert (starts(other), other.ended()) == ([(0, 0)], ["done"])
    assert job.losses() == other.losses()


# It computes for longer than a step may take, and prints nothing meanwhile.
COMPUTES = """\
import time
for step in range(1, 31):
    print(f"step {step} loss {4 / step}", flush=True)
    until = time.monotonic() + (20 if step == 20 else 0.3)
    while time.monotonic() < until:
        time.sleep(0) if step == 20 else time.sleep(0.05)
"""


@storied
def test_what_srun_starts_is_alive_as_without_srun(teller: Teller) -> None:
    """Its tasks come from slurmstepd, not from the script's shell."""
    folder = teller.launcher.place("srun-computes")
    put(folder / "computes.py", COMPUTES)
    put(folder / "computes.sh", "#!/bin/bash\n#SBATCH -N 1 --ntasks=1\nsrun -u python3 computes.py\n")
    job = teller.launcher.submit("--time", "1:00:00", "--set", "train.hang_floor_s=2", "computes.sh", cwd=folder)
    job.wait_end()
    assert job.ended() == ["done"], job.log()
    assert len(job.losses()) == 30


# It starts a worker in a session of its own that overwrites its environment, and notes workers that are there already.
LEAVES_A_WORKER = """\
import ctypes, os, subprocess, sys, time
if sys.argv[1:] == ["work"]:
    begin, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
    ctypes.memset(begin, 0, end - begin)
    os.closerange(3, 1000)
    open(f"worker-{os.getpid()}", "w").close()
    time.sleep(3000)
for pid in [name[7:] for name in os.listdir() if name.startswith("worker-")]:
    if os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
        open("beside", "a").write(f"{pid} ")
is_first = not [name for name in os.listdir() if name.startswith("worker-")]
worker = subprocess.Popen([sys.executable, __file__, "work"], start_new_session=True)
while not os.path.exists(f"worker-{worker.pid}"):
    time.sleep(0.05)
for step in range(1, 4 if is_first else 7):
    print(f"step {step}/6 loss 2.0", flush=True)
while is_first:
    time.sleep(1)
"""


@storied
def test_a_worker_whose_supervisor_was_killed_is_ended(teller: Teller) -> None:
    """It has left the step, which has no cgroup, and overwritten its environment: the rank's record names it."""
    place = teller.launcher.place("titled-in-job")
    program = put(place / "p.py", LEAVES_A_WORKER)
    command = {"run": f"exec python3 -u {program}", "per": "job", "snapshot": False, "workdir": str(place)}
    job = teller.launcher.submit(str(experiment(place, "titled", command)), "--gpus", "1", "--nodes", "1", *SOON)
    job.wait("a worker in its record", lambda: len(recorded([job.run.attempt(1)])) > 1 and job.last_step(1) == 3)
    worker = int(next(place.glob("worker-*")).name[7:])
    job.wait("the worker in its record", lambda: worker in recorded([job.run.attempt(1)]))
    for rank in job.ranks():
        send(rank, signal.SIGKILL)
    restarted(job)
    assert not (place / "beside").exists()
    assert not start_time(worker)
    assert not list(job.run.path.glob("attempts/2/processes*"))
