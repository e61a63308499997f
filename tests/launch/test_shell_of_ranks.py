"""How the ranks start and how a job asks to be put back, in bash with stand-ins: each word, port, variable and code."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, Job, LayoutRequest
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.launcher.launch.render import render_script
from tests.launch.test_shell_functions import program
from tests.launch.test_shell_table import ran
from tests.programs import ran as run

# A step of one task, which is told its place; the trainer says what it got.
SRUN = (
    'echo "srun $*" >>asked\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 "$@"'
)
TRAINER = """echo "$* | $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"; trap -p
echo "$SLURM_JOB_NODELIST $SLURM_JOB_NUM_NODES $SLURM_NTASKS $SLURM_TASKS_PER_NODE ${SLURM_PROCID:-}"
"""
COMMAND = Experiment(name="demo", engine=Engine("command"), command=Command(run="mpirun train", per="job"),
                     layout=LayoutRequest(gpus=8))  # fmt: skip
DEMO = load_experiment("demo", {"layout.gpus": 8, "data.source": "random"})
ARE = "-m hpc_gpt.trainer.train | 5 8 1 {} n1 {}"
TRAPS = ["trap -- '' SIGUSR2", "trap -- '' SIGTERM"]


@pytest.mark.parametrize(
    ("experiment", "variables", "said", "step"),
    [
        (DEMO, {}, ["8 ranks on n[1-2], rendezvous n1:10007", ARE.format(4, 10007), *TRAPS, "n[1-2] 2 8 4(x2) 5"],
         "--ntasks=8 --ntasks-per-node=4"),
        (DEMO, {"SLURM_JOB_ID": "40009", "MASTER_PORT": "", "HPC_GPT_MASTER_ADDR": "n1"},
         ["8 ranks on n[1-2], rendezvous n1:10009", ARE.format(4, 10009), *TRAPS, "n[1-2] 2 8 4(x2) 5"],
         "--ntasks=8 --ntasks-per-node=4"),
        (replace(DEMO, layout=LayoutRequest(gpus=1), job=Job(srun=("--a=b", "--c"))), {"MASTER_PORT": "99"},
         ["1 rank on n[1-2], rendezvous n1:99", ARE.format(1, 99), *TRAPS, "n[1-2] 2 8 4(x2) 5"],
         "--ntasks=1 --ntasks-per-node=1 --a=b --c"),
        (replace(DEMO, job=Job(preflight=True)), {},
         ["8 ranks on n3,n4, rendezvous n1:10007", ARE.format(4, 10007), *TRAPS, "n[1-2] 2 8 4(x2) 5"],
         "--ntasks=8 --ntasks-per-node=4 --nodes=2 --nodelist=n3,n4"),
        # One task for all: its program sees the job's nodes and slots, not those of its own step.
        (COMMAND, {}, ["8 ranks on n[1-2], rendezvous n1:10007", ARE.format(1, 10007), *TRAPS, "n[1-2] 2 2 4(x2) "],
         "--ntasks=1 --ntasks-per-node=1 --cpus-per-task=12 --overlap --nodes=1 --nodelist=n1 --mpi=none"),
        (replace(COMMAND, job=Job(preflight=True)), {},
         ["8 ranks on n3,n4, rendezvous n1:10007", ARE.format(1, 10007), *TRAPS, "n3,n4 2 8 4(x2) "],
         "--ntasks=1 --ntasks-per-node=1 --cpus-per-task=12 --overlap --nodes=1 --nodelist=n3 --mpi=none"),
    ],
)  # fmt: skip
def test_each_rank_gets_its_place(tmp_path: Path, experiment, variables: dict, said: list[str], step: str) -> None:
    script = render_script(resolve(experiment, load_profile("generic-slurm")))
    start = script.index("  # Rendezvous:")
    launch = script[start : script.index("hpc_gpt.trainer.train\n", start)] + "hpc_gpt.trainer.train\n"
    functions = script[script.index("# === ") : script.index("# --- settings")]
    for name, text in (("srun", SRUN), ("the-python", TRAINER), ("getent", ""), ("scontrol", "echo n1; echo n2")):
        program(tmp_path, name, text)
    environment = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "rc": "1",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_CPUS_PER_TASK": "3",
        "attempt": str(tmp_path), "sound": "n3,n4", **variables,
    }  # fmt: skip
    end = f'python=(the-python)\nstart() {{\n{launch}}}\nstart; exit "$rc"'
    done = run("bash", "-c", f"set -o pipefail\n{functions}\n{end}", env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == said
    asked = (tmp_path / "asked").read_text().splitlines()[0].partition(" bash -c ")[0]
    assert asked == f"srun --export=ALL --kill-on-bad-exit=1 {step}"


AGAIN, PAUSE, ASKS = "scontrol requeue 7", "sleep 3", "scontrol --oneliner --local show job 7"


@pytest.mark.parametrize(
    ("said", "code", "printed", "asked", "refused"),
    [
        ("exit 0", 0, [], [AGAIN], False),
        ("echo Job execution still pending execution; exit 1", 0, ["Job execution still pending execution"], [AGAIN],
         False),
        ("echo Access denied; exit 1", 1, ["Access denied"], [AGAIN], True),
        # The controller restarts: its list is looked at, and a job that it has put back is not asked for again.
        ("[ -e t ] && exit; touch t; echo Unable to contact; exit 1", 0, ["Unable to contact"],
         [AGAIN, PAUSE, ASKS, AGAIN], False),
        ("touch t; exit 1", 0, [""], [AGAIN, PAUSE, ASKS], False),
        ("exit 1", 1, [""] * 20, [AGAIN, PAUSE, ASKS] * 20, False),
    ],
)  # fmt: skip
def test_a_job_is_put_back_once(
    tmp_path: Path, said: str, code: int, printed: list, asked: list, refused: bool
) -> None:
    restarts = "4" if said == "touch t; exit 1" else "3"
    scontrol = f'case "$*" in *show*) echo "JobState=RUNNING Restarts={restarts}" ;; *) {said} ;; esac'
    end = 'attempt=run/attempts; requeue_job; code=$?; echo "$code"; requeue_job >/dev/null; exit "$?"'
    last, found, calls = ran(tmp_path, "requeue", end.replace("; requeue_job >/dev/null", "") if not refused else end,
                             scontrol=scontrol)  # fmt: skip
    assert (found, calls) == ([*printed, str(code)], asked)
    assert (tmp_path / "run/attempts/requeue-refused").exists() is refused
    assert last == (1 if refused else 0)  # what is refused is asked once
