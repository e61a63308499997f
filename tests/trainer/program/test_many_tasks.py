"""How often the tasks of a large job look at the shared disk, and what they learn from their node's first one.

Two tasks of one node run for real; the others are only counted on."""

import json
import os
import subprocess
import sys
from pathlib import Path

from hpc_gpt.core.runs.run_folder import create_run
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest
from tests.waiting import wait_for

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
        line = ["bash", "-c", "while kill -0 $PPID; do sleep 1; done"]
        return ProgramStart(line, os.environ, log, ForeignHeartbeat(20, 3.0, None), 0)
    def turn(self):
        if os.environ["LOCAL_RANK"] != "0":
            self._look_s = 1e9  # of 1,600 tasks it is 20 s; so it looks at its start alone, whatever all this takes
        print(f"at {self._heart.step}", flush=True)
    def ask_to_end(self, stop):
        print("asked by", stop.reason, flush=True)
run = RunFolder(Path(folder))
Task(run, run.attempts()[-1], Signals()).train()
"""


def test_tasks_of_a_node_learn_from_its_first_one(tmp_path: Path) -> None:
    asked = Experiment(
        name="many", engine=Engine(name="command"), layout=LayoutRequest(gpus=8 * NODES),
        command=Command(run="true", per="gpu", workdir=str(tmp_path), snapshot=False),
    )  # fmt: skip
    run = create_run(tmp_path / "run", resolve(asked, ClusterProfile(name="far", gpus_per_node=8)), "", "", {})
    attempt, tasks = run.new_attempt(), []
    calls, logs = ([tmp_path / f"{what}-{rank}" for rank in (8, 9)] for what in ("calls", "log"))
    for local, (noted, log) in enumerate(zip(calls, logs, strict=True)):
        own = {"RANK": f"{8 + local}", "WORLD_SIZE": f"{8 * NODES}", "LOCAL_RANK": f"{local}", "MASTER_PORT": "1"}
        line = [sys.executable, "-c", TASK, str(run.path), str(noted)]
        env = os.environ | own | {"SLURMD_NODENAME": "n1"}
        tasks.append(subprocess.Popen(line, env=env, stdout=log.open("wb"), stderr=subprocess.STDOUT))

    def both_say(words: str) -> None:
        read = lambda: [log.read_text() for log in logs]  # noqa: E731
        wait_for(words, lambda: all(words in text for text in read()), lambda: [text[-2000:] for text in read()])

    try:
        both_say("at 0")
        attempt.metrics.write_text(json.dumps({"step": 7}) + "\n")
        both_say("at 7")
        (attempt.folder / "stop.json").write_text(json.dumps({"reason": "stop", "save": True}))
        both_say("asked by stop")
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    looks = [call for call in calls[1].read_text().splitlines() if "stop.json" in call or "metrics" in call]
    assert len(looks) <= 2, looks
