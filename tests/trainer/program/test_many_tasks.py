"""How often the tasks of a large job look at the shared disk, and what they learn from their node's first one.

Two tasks of one node run for real; the others are only counted on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder, create_run
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest
from hpc_gpt.core.settings.resolve import resolve

NODES = 200
TASK = """
import os, sys
from pathlib import Path
from hpc_gpt.core.runs.run_folder import RunFolder
folder, into = sys.argv[1:]
counts = os.open(into, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(event, values):
    if event.startswith(("open", "os.")) and values and str(values[0]).startswith(folder):
        os.write(counts, f"{event} {values[0]}\\n".encode())
sys.addaudithook(note)
from hpc_gpt.trainer.program.process import ForeignLog
from hpc_gpt.trainer.program.rank import ForeignRank, ProgramStart
from hpc_gpt.trainer.program.signs_of_life import ForeignHeartbeat
from hpc_gpt.trainer.supervision.signals import Signals
class Task(ForeignRank):
    def prepare(self):
        log = ForeignLog(self._attempt, self._resolved, self._place.rank, lambda line: None)
        return ProgramStart(["sleep", "600"], os.environ, log, ForeignHeartbeat(20, 3.0, None), 0)
    def turn(self):
        print(f"at {self._heart.step}", flush=True)
    def ask_to_end(self, stop):
        print("asked by", stop.reason, flush=True)
        os._exit(0)
run = RunFolder(Path(folder))
Task(run, run.attempts()[-1], Signals()).train()
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Callable[[int], tuple[RunFolder, list[Path], list[Path]]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(nodes: int) -> tuple[RunFolder, list[Path], list[Path]]:
        asked = Experiment(
            name="many", engine=Engine(name="command"), layout=LayoutRequest(gpus=8 * nodes),
            command=Command(run="true", per="gpu", workdir=str(tmp_path), snapshot=False),
        )  # fmt: skip
        run = create_run(tmp_path / str(nodes), resolve(asked, ClusterProfile(name="far", gpus_per_node=8)), "", "", {})
        run.new_attempt()
        calls, logs = ([tmp_path / f"{what}-{nodes}-{rank}" for rank in (8, 9)] for what in ("calls", "log"))
        for local, (noted, log) in enumerate(zip(calls, logs, strict=True)):
            numbers = {
                "RANK": str(8 + local),
                "WORLD_SIZE": str(8 * nodes),
                "LOCAL_RANK": str(local),
                "MASTER_PORT": "1",
            }
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", TASK, str(run.path), str(noted)],
                    env={**os.environ, **numbers, "SLURMD_NODENAME": "n1"},
                    stdout=log.open("wb"),
                    stderr=subprocess.STDOUT,
                )
            )
        return run, calls, logs

    yield start
    for task in started:
        task.kill()
        task.wait()


def wait(happened: Callable[[], bool], logs: list[Path]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until, [log.read_text()[-2000:] for log in logs]
        time.sleep(0.05)


def test_tasks_of_a_node_learn_from_its_first_one(tasks) -> None:
    began = time.monotonic()
    run, calls, logs = tasks(NODES)
    attempt = run.attempts()[-1]
    wait(lambda: all("at 0" in log.read_text() for log in logs), logs)
    attempt.metrics.write_text(json.dumps({"step": 7}) + "\n")
    wait(lambda: all("at 7" in log.read_text() for log in logs), logs)
    (attempt.folder / "stop.json").write_text(json.dumps({"reason": "stop", "save": True}))
    wait(lambda: all("asked by stop" in log.read_text() for log in logs), logs)
    looks = [
        sum("stop.json" in call or "metrics" in call for call in noted.read_text().splitlines()) for noted in calls
    ]
    assert looks[1] <= 2 + 2 * (time.monotonic() - began) / (8 * NODES / 80), "it looks at the start, then each 20 s"
