"""A look inside a running job: `shell` and `top` on two nodes of a real cluster, before and after one of them dies."""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

import pytest

from tests.slurm.launcher import ENDLESS, PAIR, PYTHON, UNSAVED, Job, Launcher
from tests.slurm.stories import Teller, slow_story, story
from tests.terminal import on_a_terminal

pytestmark = pytest.mark.long
# What a shell has, as words: where it is, which rank it is beside and what it may use, what it does not have.
SHOW = (
    'echo "$SLURMD_NODENAME" rank "$HPC_GPT_RANK" pid "$HPC_GPT_RANK_PID" device "$HPC_GPT_DEVICE" '
    'gpus "$SLURM_GPUS_ON_NODE" visible "$CUDA_VISIBLE_DEVICES" world "${WORLD_SIZE:-none}" '
    'master "${MASTER_ADDR:-none}" code "$PYTHONPATH" iface "$GLOO_SOCKET_IFNAME" in "$PWD"; '
    'tr "\\0" "\\n" <"/proc/$HPC_GPT_RANK_PID/environ" | grep ^RANK='
)


class Inside(NamedTuple):
    """What commands in the job print, by name, and what `top` prints with two nodes, and after one has died."""

    job: Job
    nodes: list[str]
    shown: dict[str, str]
    refused: str
    top: str
    typed: str
    first_after: str
    note: str
    top_after: str


def shell(launcher: Launcher, job: Job, *words: str, code: int = 0) -> tuple[str, str]:
    return launcher.run("shell", job.run.run_id, *words, code=code)


@slow_story
def inside_of_two_nodes(teller: Teller) -> Inside:
    launcher = teller.launcher
    # With this floor a rank writes a heartbeat each second.
    job = launcher.submit(*PAIR, *ENDLESS, *UNSAVED, "--set", "train.hang_floor_s=20")
    job.wait_step(3)
    nodes = job.nodes()
    asked = {"first": (), "rank 1": ("--rank", "1"), "node 1": ("--node", nodes[1])}
    shown = {name: shell(launcher, job, *where, "--", "bash", "-c", SHOW)[0] for name, where in asked.items()}
    shell(launcher, job, "--", "bash", "-c", "exit 7", code=7)
    refused = shell(launcher, job, "--rank", "2", code=2)[1] + shell(launcher, job, "--node", "n99", code=2)[1]
    top = launcher.run("top", job.run.run_id)[0]
    variables = {**launcher.environment, "NO_COLOR": "1"}
    typed = on_a_terminal(
        *PYTHON[1:],
        "shell",
        job.run.run_id,
        type_in="hostname; tty && exit 5\n",
        after="rank 0 ",
        times=2,
        seconds=60,
        **variables,
    )
    with teller.cluster.without_power(nodes[1]):
        job.wait("a silent rank", lambda: " silent" in launcher.run("top", job.run.run_id)[0] or job.restarts)
        top_after = launcher.run("top", job.run.run_id)[0]
        first_after = shell(launcher, job, "--", "bash", "-c", SHOW)[0] if not job.restarts else ""
        note = shell(launcher, job, "--rank", "1", "--", "true", code=4)[1]
        teller.cluster.run("scancel", job.id, check=True)
        job.wait("its end", lambda: job.slurm_state not in ("RUNNING", "COMPLETING"))
    return Inside(job, nodes, shown, refused, top, str(typed), first_after, note, top_after)


@pytest.mark.story(inside_of_two_nodes)
def test_a_shell_is_beside_a_rank_with_its_environment_and_gpus(told: Teller) -> None:
    found = told(inside_of_two_nodes)
    for name, rank in (("first", 0), ("rank 1", 1), ("node 1", 1)):
        words = (
            rf"{found.nodes[rank]} rank {rank} pid \d+ device cpu gpus 4 visible 0,1,2,3 world none master none "
            rf"code {re.escape(str(found.job.run.path))}/code:\S* iface lo in \S+\nRANK={rank}\n"
        )
        assert re.fullmatch(words, found.shown[name]), found.shown[name]
    assert "has no rank 2\n" in found.refused
    assert "has no rank on node n99\n" in found.refused
    assert f"hint: it has ranks 0 to 1 on {found.nodes[0]}, {found.nodes[1]}" in found.refused


@pytest.mark.story(inside_of_two_nodes)
def test_a_shell_has_the_terminal(told: Teller) -> None:
    typed = told(inside_of_two_nodes).typed
    assert re.search(r"rank 0 on n\d+: \$HPC_GPT_RANK_PID is \d+, \$HPC_GPT_DEVICE is cpu", typed), typed
    assert "/dev/pts/" in typed
    assert typed.startswith("(5, ")


@pytest.mark.story(inside_of_two_nodes)
def test_top_shows_both_nodes_and_which_of_them_falls_silent(told: Teller) -> None:
    found = told(inside_of_two_nodes)
    assert "running  step " in found.top
    for rank, node in enumerate(found.nodes):
        assert re.search(rf"^{node} +1$", found.top, re.M), found.top
        assert re.search(rf"^{rank} +{node} +\d+ +training +\S+ s +\S+ s ago$", found.top, re.M), found.top
    assert "no GPU figures in the heartbeats" in found.top
    assert re.search(rf"^1 +{found.nodes[1]} .* ago +silent", found.top_after, re.M), found.top_after
    assert re.search(rf"^{found.nodes[1]} +1 +1$", found.top_after, re.M), found.top_after
    assert found.first_after.startswith(f"{found.nodes[0]} rank 0 pid ")
    silent = rf"rank 1 on {found.nodes[1]} has written no heartbeat for [\d.]+ s: it may be dead"
    assert re.match(rf"Error: {silent}, and no step starts on its node: \w.+\n\nhint: hpc-gpt logs ", found.note)


FROM_PYTHON = """
import sys, threading
from hpc_gpt.api import Run, read_runs, submit
single = {"engine.name": "ddp", "layout.gpus": 1, "layout.tp": 1, "layout.pp": 1}
held = submit(sys.argv[1], {**single, "job.sbatch": ["--begin=now+1hour"]}, cluster="site")
print(held.status().state, held.cancel(), held.wait().state, held.cancel())
found = []
short = {**single, "train.steps": 4}
thread = threading.Thread(target=lambda: found.append(submit(sys.argv[1], short, cluster="site")))
thread.start()
thread.join()
run = found[0]
print(run.result().ended, run.status().job_id == Run(run.id).status().job_id, len(run.metrics()["loss"]), run.done())
"""


@story
def from_python(teller: Teller) -> subprocess.CompletedProcess[str]:
    line = [PYTHON[0], "-c", FROM_PYTHON, str(teller.launcher.experiment)]
    where = {"env": teller.launcher.environment, "cwd": teller.launcher.folder, "stdin": subprocess.DEVNULL}
    return subprocess.run(line, **where, capture_output=True, text=True, check=False)


@pytest.mark.story(from_python)
def test_python_submits_waits_and_cancels(told: Teller) -> None:
    done = told(from_python)
    assert done.stdout == "pending True cancelled False\ndone True 4 True\n", done.stderr
    assert done.stderr == ""
