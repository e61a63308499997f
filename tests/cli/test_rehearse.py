"""hpc-gpt rehearse, as a user runs it: a whole life, a run that fails, and Ctrl-C in the middle."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import hpc_gpt, in_process, said_of, without_slurm
from tests.conftest import REPOSITORY

# As large as a rehearsal leaves a run, so that its few steps last until it is interrupted.
EXPERIMENT = """
name = "tiny"
model = { hidden = 64, layers = 2, heads = 2, vocab = 256, seq = 64 }
engine = { name = "ddp" }
layout = { gpus = 1, micro_batch = 2, micro_batches = 4 }
train = { steps = 1000, dtype = "fp32", save_every = 100 }
"""
BROKEN = """{% extends "base.sh.j2" %}
{% block launch %}
no-such-launcher --ranks 2
rc=$?
{% endblock %}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (path := tmp_path / "tiny.toml").write_text(EXPERIMENT)
    return path


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Where a rehearsal has its folder."""
    (folder := tmp_path / "scratch").mkdir()
    return folder


def test_a_whole_life_leaves_nothing_but_what_is_kept(tiny: Path, scratch: Path, tmp_path: Path) -> None:
    """Of one rank: it starts four times."""
    kept = tmp_path / "kept"
    done = hpc_gpt("rehearse", tiny, "--json", "--keep", kept, environment={"TMPDIR": str(scratch)}, code=0)
    told = json.loads(done.stdout)
    assert told["ok"]
    assert told["cause"] is None
    names = [stage["name"] for stage in told["stages"]]
    life = ["submitted", "started", "saved", "signal", "saved", "requeued", "resumed", "preempted", "saved", "requeued",
            "resumed", "finished", "unbroken", "finished", "losses", "record", "left"]  # fmt: skip
    assert [name for name in names if name not in ("data", "slurm", "script")] == life
    said = {stage["name"]: stage["evidence"] for stage in told["stages"]}
    assert "to the last digit" in said["losses"]
    assert "restart 2" in said["requeued"]
    assert "attempts 3" in said["record"]
    runs = [path.parent for path in kept.glob("*/*/resolved.json")]
    assert sorted(len(list(run.glob("attempts/*"))) for run in runs) == [1, 3]
    (command,) = [line for line in said_of(done) if line.startswith("next: ")]
    dry = in_process(*shlex.split(command.removeprefix("next: hpc-gpt ")), "--dry-run", "--script",
                     environment=without_slurm(tmp_path))  # fmt: skip
    assert dry.code == 0, dry.stderr
    assert "# tiny: 2 layers of 64, " in dry.stdout
    assert "tp1-pp1-dp1 on 1 GPU" in dry.stdout
    for words in ("no GPU here", "whether Slurm accepts the job"):
        assert any(words in f"{each['what']}: {each['why']}" for each in told["not_rehearsed"])
    assert list(scratch.iterdir()) == []
    for own in ("HPC_GPT_LOGS", "HPC_GPT_STATE", "HPC_GPT_CONFIG"):
        assert not Path(os.environ[own]).exists(), own


def test_a_script_that_fails_is_caught_with_its_cause(tiny: Path, scratch: Path, tmp_path: Path) -> None:
    (template := tmp_path / "mine.sh.j2").write_text(BROKEN)
    done = hpc_gpt("rehearse", tiny, "--quick", "--template", template, environment={"TMPDIR": str(scratch)}, code=3)
    assert "started    FAILED: " in done.stdout
    assert "failed at started: ended user_error: no-such-launcher: command not found" in done.stderr
    assert "--keep DIR" in done.stderr
    assert list(scratch.iterdir()) == []


def test_ctrl_c_ends_all_of_it(tiny: Path, scratch: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_gpt", "rehearse", str(tiny)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    said = ""
    while " started " not in said:
        line = process.stdout.readline()
        said += line
        assert line, said
    (folder,) = scratch.iterdir()
    mark = f"HPC_GPT_REHEARSAL={folder}".encode()
    assert _with(mark), "its ranks"
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said + rest
    assert "Traceback" not in rest
    assert _with(mark) == []
    assert list(scratch.iterdir()) == []


def _with(mark: bytes) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=1:00:00 --output=log-%j.txt
set -e
n=$(ls out | sed 's/step-//' | sort -n | tail -n 1)
export n=${n:-0}
srun bash -c '
trap "touch out/step-$n; exit 0" TERM
while sleep 0.1; do
  n=$((n + 1))
  [ "$SLURM_PROCID" != 0 ] || echo "step $n | loss 1.0"
  [ $((n % 10)) != 0 ] || touch "out/step-$n"
  trap "touch out/step-$n; exit 0" TERM
done'
touch after.${SLURM_RESTART_COUNT:-0}
"""


REQUEUES = r"""#!/bin/bash
#SBATCH --ntasks=1 --time=1:00:00 --signal=B:USR1@90
trap 'scontrol requeue $SLURM_JOB_ID; exit 0' USR1
python3 -u -c '
import pathlib, time
last = pathlib.Path("last")
for n in range(int(last.read_text() or 0) + 1 if last.exists() else 1, 4000):
    print(f"step {n}/4000 loss 1.0")
    last.write_text(str(n))
    time.sleep(0.1)
' &
wait
"""


@pytest.mark.long
def test_a_handler_that_requeues_its_job_holds(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "fit.slurm").write_text(REQUEUES)
    done = hpc_gpt("rehearse", "--json", "fit.slurm", cwd=tmp_path, environment={"TMPDIR": str(scratch)}, code=0)
    said = {stage["name"]: stage["evidence"] for stage in json.loads(done.stdout)["stages"]}
    assert "attempt 1 ended requeued" in said["ended"]
    assert "the attempt before came to" in said["resumed"]


DIES = r"""#!/bin/bash
#SBATCH --ntasks=1 --time=1:00:00
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  python3 -c 'raise ValueError("the checkpoint cannot be read")'
else
  while sleep 0.1; do echo "step $((n += 1)) loss 1.0"; done
fi
echo over
"""


@pytest.mark.long
def test_a_second_start_that_dies_at_once_does_not_hold(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "fit.slurm").write_text(DIES)
    words = ("rehearse", "--cluster", "generic-slurm", "fit.slurm")
    done = hpc_gpt(*words, cwd=tmp_path, environment={"TMPDIR": str(scratch)}, code=3)
    assert "exit code 0, but ValueError: the checkpoint cannot be read" in done.stderr


@pytest.mark.long
def test_a_job_script_is_interrupted_comes_back_and_is_stopped(tmp_path: Path, scratch: Path) -> None:
    here = tmp_path / "here"
    (here / "out").mkdir(parents=True)
    (here / "train.slurm").write_text(SCRIPT)
    words = ("--json", "--checkpoints", "out/step-*", "train.slurm")
    done = hpc_gpt("rehearse", *words, cwd=here, environment={"TMPDIR": str(scratch)}, code=0)
    assert f"it runs as it is, in {here}" in done.stderr
    stages = json.loads(done.stdout)["stages"]
    life = ["submitted", "started", "signal", "ended", "requeued", "resumed", "stopped", "left"]
    assert [stage["name"] for stage in stages if stage["name"] != "slurm"] == life
    said = {stage["name"]: stage["evidence"] for stage in stages}
    assert "attempt 1 ended walltime" in said["ended"]
    assert re.search(r"its first step is \d+, the attempt before came to \d+; the newest checkpoint", said["resumed"])
    assert "attempt 2 ended stopped" in said["stopped"]
    # The lines after srun ran, both times, and no link to a log that has gone is left.
    assert sorted(path.name for path in here.iterdir()) == ["after.0", "after.1", "out", "train.slurm"]
    assert list(scratch.iterdir()) == []


@pytest.mark.long
def test_a_script_that_is_done_by_itself_shows_no_requeue(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "quick.slurm").write_text("#!/bin/bash\n#SBATCH -n 1 -t 10\necho hello\n")
    done = hpc_gpt("rehearse", "--json", "quick.slurm", cwd=tmp_path, environment={"TMPDIR": str(scratch)}, code=0)
    stages = {stage["name"]: stage["evidence"] for stage in json.loads(done.stdout)["stages"]}
    assert "nothing of its requeue" in stages["not shown"]
    assert "requeued" not in stages
