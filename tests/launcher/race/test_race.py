"""Races in one process: what the job's script is answered, what is printed and how it ends, word by word in races.txt.

A line `> ` there is what happens before the next question.
"""

import json
import re
import time
from pathlib import Path

import pytest

from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.processes.requests import write_request
from hpc_gpt.core.runs.race import read_visits
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.race.next_visit import main
from tests.made_runs import add_attempt, make_run

TEXT = Path(__file__).with_name("races.txt").read_text(encoding="utf-8")
STORIES = re.findall(r"^# (.*)\n(\d) rounds of ?(.*)\n((?:.+\n)*)", TEXT, re.MULTILINE)
SMALL = {"layout__gpus": 1, "layout__tp": 1, "layout__pp": 1, "engine__name": "ddp", "train__steps": 10}
PROGRAM = 'name = "nano"\nengine.name = "command"\nlayout.gpus = 1\ncommand.run = "true"\ncommand.snapshot = false\n'
SHARED = (
    "trained: 842,496 parameters, sequence 128, global batch 32, fp32, 1 rank\ndevice: CPU\nversions: hpc-gpt NOW\n"
)
# The three lines of a visit that nothing happens in are one.
VISIT = r"^round (./.)  (\w+): \2/ID\nhpc-gpt-next visit (\d+) RACE/\2/ID\n\2: "
# By a row's name: the seconds and the loss of its steps, or what it prints before it fails.
ROWS = {"quick": (0.1, 5.0), "near": (0.1004, 5.0), "slow": (0.2, 5.0), "other": (0.1, 6.0), "hangs": (0.1002, 5.0)}
ROWS |= {"oom": "torch.OutOfMemoryError: CUDA out of memory.\n", "dies": "srun: error: Node failure on n1\n"}
ROWS |= dict.fromkeys(("bad", "bad2"), "ValueError: no\n") | {"killed": "", "program": (0.102, 4.0)}
ROWS |= {"nan": (0.05, float("nan")), "same": (0.1, 5.0)}


class Raced:
    """A race by a clock of its own: a visit that trains takes 10 s, one that fails 1 s, one that hangs 30 s."""

    def __init__(self, names, rounds, monkeypatch, tmp_path):
        self.now, self.environment, self.shown = time.time(), monkeypatch, ""
        monkeypatch.setattr(time, "time", lambda: self.now)
        (of_program := tmp_path / "nano.toml").write_text(PROGRAM)
        asked = {"experiment": str(of_program)} if "program" in names else SMALL
        self.run, rows = make_run(logs_dir(), **asked), []
        for name in names:
            row = {
                "name": name,
                "folder": None,
                "cause": "pp8 needs 8 GPUs",
                "keys": {"row": name},
                "place": len(rows) + 1,
                "submit": f"hpc-gpt submit x --row {name}",
            }
            if name != "never":
                made = make_run(self.run.path / "rows", submit=False, name=name, **asked)
                (made.path / "predicted.json").write_text('{"step": {"step_s": 0.09}}' if name == "near" else "{}")
                row |= {"folder": str(made.path.relative_to(self.run.path)), "cause": None}
            rows.append(row)
        if rows:
            (self.run.path / "race.json").write_text(json.dumps({"rounds": rounds, "rows": rows}))
        self.do("begins n1")

    def do(self, what):
        """What its user, Slurm or the disk does."""
        verb, _, rest = what.partition(" ")
        if verb == "begins":
            add_attempt(self.run, [], ended=None, node_list=rest, started=self.now)
            self.last, self.code = "-", 0
        elif verb == "asks":
            write_request(self.run.attempts()[-1], rest)
        elif verb == "cancels":
            self.run.mark_cancelled("4711")
        elif verb == "spends":
            self.environment.setenv("HPC_GPT_STOP_AT", str(int(self.now)))
        elif verb == "shows":
            self.shown = rest
        elif verb == "forgets":
            self.last = "-"
        else:
            assert verb == "fills"
            (self.run.path / "bench.json").unlink()
            (self.run.path / "bench.json").mkdir()

    def train(self, place):
        """What the ranks of a visit do."""
        visit = RunFolder(Path(place))
        name, attempt = visit.path.parent.name, visit.attempts()[-1]
        of_race = self.run.attempts()[-1].started()
        assert attempt.started() == {**of_race, "attempt": 1, "in_job": 0, "started": read_visits(self.run)[-1].began}
        assert (attempt.folder / "flight").is_dir()
        does = ROWS[name]
        self.last, self.code, self.now = place, 0, self.now + 10
        if isinstance(does, str):
            attempt.log.write_text(does)
            self.now, self.code = self.now - 9, 1 if does else 143
        elif name == "hangs" and len(list(visit.path.parent.iterdir())) > 1:
            self.now, self.code = self.now + 20, 137
        else:
            again = len(list(visit.path.parent.iterdir())) - 1 if name == "program" else 0
            tokens = {} if "nano" in str(self.run.path) else {"tokens": 4096}
            lines = [
                {"step": at, "loss": does[1], "step_s": does[0] + 0.004 * again, **tokens, "time": at}
                for at in range(1, 11)
            ]
            attempt.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
            attempt.write_ended("done", None, 10)

    def kept(self, number):
        """What it keeps of its end, and the answers to its user."""
        attempt = self.run.attempt(number)
        end = {key: value for key, value in attempt.ended().items() if key != "time"}
        yield f"ended.json: {json.dumps(end)}"
        for path in sorted(attempt.asked.glob("*.done.json")):
            answer = {key: value for key, value in json.loads(path.read_text()).items() if key != "time"}
            yield f" {path.name}: {json.dumps(answer)}"
        if (file := self.run.path / "bench.json").is_file():
            race = json.loads(file.read_text())["race"]
            rows = [(row["keys"]["row"], row["losses_differ"]) for row in race.pop("rows")]
            race["differ"] = [name for name, differs in rows if differs]
            yield f" bench.json: {json.dumps(race)}"
        yield "\n"


@pytest.mark.parametrize(
    ("rounds", "names", "expected"), [story[1:] for story in STORIES], ids=[each[0] for each in STORIES]
)
def test_a_race_is_as_written(rounds, names, expected, monkeypatch, capsys, tmp_path):
    happens, asked = {}, 0
    for line in expected.splitlines():
        if line.startswith("> "):
            happens.setdefault(asked, []).append(line.removeprefix("> "))
        asked += bool(re.match(r"hpc-gpt-next|\d/\d", line))
    raced, said, questions, word = Raced(names.split(), int(rounds), monkeypatch, tmp_path), "", 0, "visit"
    while word == "visit" or questions in happens:
        for what in happens.get(questions, ()):
            raced.do(what)
            said += f"> {what}\n"
        number = raced.run.attempts()[-1].number
        code = main([str(raced.run.path), str(number), raced.last, str(raced.code), raced.shown])
        (answer, printed), questions = capsys.readouterr(), questions + 1
        said += printed + (answer or f"exit code {code}\n")
        _, word, *rest = answer.split() or ("", "end")
        if word == "visit":
            raced.train(rest[1])
        else:
            said += "".join(raced.kept(number))
    said = re.sub(r"\d{8}-\d{6}-\w+", "ID", said.replace(str(raced.run.path), "RACE"))
    said = re.sub(VISIT, r"\1 \2, \3 s: ", said, flags=re.MULTILINE)
    said = re.sub(r"(?<=versions: hpc-gpt ).*", "NOW", re.sub(" +$", "", said, flags=re.MULTILINE))
    assert said.replace(SHARED, "SHARED\n") == expected
