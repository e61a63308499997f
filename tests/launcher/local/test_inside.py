"""A look inside a run on this machine: a shell beside a rank, `top` on a terminal, a slow rank."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc_gpt.core.files import read_text, templates_dir
from hpc_gpt.core.runs.heartbeats import read_heartbeats
from tests.cli.command import hpc_gpt, in_process
from tests.launcher.local.conftest import ENDLESS, RESTING, SMALL, status_of, submit, until
from tests.terminal import on_a_terminal
from tests.waiting import wait_for

SHOW = (
    'echo "$HPC_GPT_RANK $HPC_GPT_DEVICE ${RANK:-none} ${WORLD_SIZE:-none} $OF_THE_USER $PYTHONPATH"; '
    'tr "\\0" "\\n" <"/proc/$HPC_GPT_RANK_PID/environ" | grep ^RANK='
)


@pytest.fixture
def endless(monkeypatch):
    monkeypatch.setenv("OF_THE_USER", "given at the submission")
    run = submit(*SMALL, *ENDLESS, "--set", "train.save_every=0", environment=RESTING)
    monkeypatch.delenv("OF_THE_USER")
    wait_for("some steps", lambda: (status_of(run).step or 0) > 2)
    return run


@pytest.mark.long
def test_a_shell_is_beside_a_rank_and_top_ends_with_q(endless):
    run = endless
    for rank, words in ((0, ()), (1, ("--rank", "1"))):
        said = hpc_gpt("shell", run.run_id, *words, "--", "bash", "-c", SHOW)
        code = run.path / "code"
        assert said.stdout.startswith(f"{rank} cpu none none given at the submission {code}"), said.stdout
        assert said.stdout.endswith(f"\nRANK={rank}\n")
        assert said.stderr == ""
    hpc_gpt("shell", run.run_id, "--", "bash", "-c", "exit 3", code=3)
    for words, why in (
        (("--rank", "7"), "has no rank 7\n\nhint: it has ranks 0 to 1 on "),
        (("--node", "n9"), "has no rank on node n9\n"),
        (("--node", "n9", "--rank", "0"), "--node and --rank both choose the node"),
    ):
        refused = hpc_gpt("shell", run.run_id, *words, code=2)
        assert why in refused.stderr
    typed = on_a_terminal("-m", "hpc_gpt", "shell", run.run_id, type_in="tty\nexit 5\n", after="rank 0 ", times=2)
    assert typed[0] == 5
    assert "/dev/pts/" in typed[1]
    code, shown = on_a_terminal("-m", "hpc_gpt", "top", run.run_id, type_in="q", after="heartbeat")
    assert code == 0
    assert re.search(r"running  step \d+/1000000", shown)
    assert status_of(run).state == "running"
    in_process("cancel", run.run_id, "--yes", code=0)
    until(run, "cancelled")
    ended = hpc_gpt("shell", run.run_id, code=2)
    assert ended.stderr.startswith(f"Error: run {run.run_id}: nothing to look into, it ended as cancelled\n\nhint: ")
    hpc_gpt("shell", "20200101-000000-dead", code=5)


def test_what_forbids_a_debugger_is_said_and_a_gone_process(tmp_path):
    def enter(text: str, pid: int) -> subprocess.CompletedProcess[str]:
        # The signal is the one that tells ranks of the time limit.
        line = ["bash", "-c", text, "hpc-gpt", "4", str(pid), "bash", "-c", "kill -USR2 $$; echo came here"]
        return subprocess.run(line, capture_output=True, text=True, check=True)

    own = read_text(templates_dir() / "enter.sh")
    assert enter(own, os.getpid()).stderr == ""
    # Root may attach to all, so what a site's kernel refuses is a path that cannot be opened.
    forbidden = enter(own.replace("/proc/$pid/mem", f"{tmp_path}/none"), os.getpid())
    assert forbidden.stderr.startswith(f"no debugger can attach to process {os.getpid()}: this site forbids ptrace")
    gone = enter(own, 2**30)
    assert re.match(rf"rank 4 has no process {2**30} on \S+ any more: this is not its environment\n", gone.stderr)
    assert {each.stdout for each in (forbidden, gone)} == {"came here\n"}


@pytest.mark.parametrize(
    ("variables", "device"),
    [
        ({}, "3"),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "7"),
        ({"CUDA_VISIBLE_DEVICES": "5"}, "5"),
        ({"HIP_VISIBLE_DEVICES": "0,2,4,6"}, "6"),
        ({"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "6"}, "6"),
    ],
)
def test_the_device_is_the_ranks_by_each_variable(variables, device):
    """Of a rank that is the fourth of its node."""
    text = read_text(templates_dir() / "enter.sh").replace("/dev/nvidiactl", "/dev/null")
    with subprocess.Popen(["sleep", "60"], env={"LOCAL_RANK": "3", "PATH": os.environ["PATH"], **variables}) as rank:
        try:
            line = ["bash", "-c", text, "hpc-gpt", "3", str(rank.pid), "bash", "-c", "echo $HPC_GPT_DEVICE"]
            assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == f"{device}\n"
        finally:
            rank.kill()


@pytest.mark.long
def test_a_slow_device_is_named_while_its_ranks_train(tmp_path: Path) -> None:
    """Three ranks whose probe command says 10 ms, but rank 2's 13 ms."""
    told = tmp_path / "told"
    command = """[ "$RANK" = 2 ] && echo '{"probe_s": 0.013}' || echo '{"probe_s": 0.010}'"""
    run = submit(
        "demo", "--cluster", "local", "--engine", "ddp", "--gpus", "3", "--tp", "1", "--pp", "1", *ENDLESS,
        *("--set", "data.source=random", "--set", "layout.micro_batches=1", "--set", "train.log_every=1"),
        *("--set", "train.hang_floor_s=20", "--set", f"notify.command=cat >>{told}", "--set", 'notify.on=["slow"]'),
        environment={"HPC_GPT_PROBE_COMMAND": command, "HPC_GPT_SLOW_S": "2", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for("the events are told", lambda: told.exists() and told.read_text().endswith("\n"))
    assert "2 on" in (status_of(run).slow or "")
    wait_for(
        "probes in all heartbeats",
        lambda: all(beat.probe_first_s for beat in read_heartbeats(run.attempt(1).heartbeats).values()),
    )
    in_process("cancel", run.run_id, "--yes", code=0)
    until(run, "cancelled")
    beats = read_heartbeats(run.attempt(1).heartbeats)
    seconds = {0: (0.010, 0.010), 1: (0.010, 0.010), 2: (0.013, 0.013)}
    assert {rank: (beat.probe_s, beat.probe_first_s) for rank, beat in beats.items()} == seconds
    (line,) = told.read_text().splitlines()
    assert (json.loads(line)["rank"], json.loads(line)["share"]) == (2, round(10 / 13, 4))
    (record,) = json.loads(in_process("report", run.path, "--json").stdout)["records"]
    assert record["flag_kinds"].count("slow_rank") == 1
