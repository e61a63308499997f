"""A launcher without what trains: each verb runs once in a Python that cannot import the packages of `[train]`."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.cli import verbs
from tests.cli.command import hpc_gpt, without_slurm
from tests.conftest import REPOSITORY

BLOCKED = ("torch", "deepspeed", "transformers", "safetensors", "tokenizers")
INSTALL = "pip install 'hpc-gpt[train]'"
# {command: its exit code, words of its answer}; RUN is the run of the job script that the first one starts.
COMMANDS = {
    "submit --cluster local --wait train.slurm": (0, "run folder"),
    "plan --model gpt2 --gpus 8 --device h200": (0, "tp1-pp1-dp8"),
    "init small --model gpt2 --gpus 8 --cluster h100-80g-8": (0, "wrote small.toml"),
    "data words.txt -o words.tokens": (0, "tokenizer byte"),
    "render demo --cluster generic-slurm": (0, "#SBATCH"),
    "submit demo --dry-run --cluster generic-slurm": (0, "dry run"),
    "submit small.toml --dry-run --cluster h100-80g-8": (0, "dry run"),
    "doctor --cluster local train.slurm": (0, "0 failed"),
    "status": (0, "RUN"),
    "top RUN": (0, "RUN"),
    "logs RUN": (0, "loss 2.5"),
    "why RUN": (0, "RUN"),
    "report": (0, "RUN"),
    "compare RUN RUN": (0, "RUN"),
    "stop RUN": (1, "RUN"),
    "save RUN": (1, "RUN"),
    "requeue RUN": (1, "RUN"),
    "cancel RUN": (1, "RUN"),
    "clean RUN": (0, "RUN"),
    "profile list": (0, "local"),
    "completion bash": (0, "hpc-gpt"),
    "help engines": (0, "fsdp"),
    # What needs them is refused, and says how to install them.
    "data words.txt --tokenizer words.json -o other.tokens": (2, INSTALL),
    "export RUN": (2, "its program's own: nothing to export"),
    "submit demo --cluster local": (2, INSTALL),
    "doctor demo --cluster local": (1, f"torch is missing in {sys.executable}"),
}
DRIVER = """
import json, sys
from tests.cli.command import in_process
for words in json.load(sys.stdin):
    print(json.dumps(vars(in_process(*words))))
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    lines = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED}))\n"
    (folder / "sitecustomize.py").write_text(lines)
    (folder / "words.txt").write_text("some words\n" * 100)
    (folder / "words.json").write_text("{}")
    script = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=1\nfor step in 1 2; do echo step $step loss 2.5; done\n"
    (folder / "train.slurm").write_text(script)
    return folder


def test_each_launcher_verb_runs_without_the_packages_of_train(here: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{here}:{REPOSITORY}"}
    environment |= {name: str(here / name.lower()) for name in ("HPC_GPT_LOGS", "HPC_GPT_DATA", "HPC_GPT_STATE")}
    first, *others = COMMANDS
    started = hpc_gpt(*shlex.split(first), cwd=here, environment=environment)
    assert started.code == 0, started.stdout + started.stderr
    (run,) = (here / "hpc_gpt_logs" / "train").iterdir()
    lines = [[run.name if word == "RUN" else word for word in shlex.split(line)] for line in others]
    before = {path.name for path in here.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=json.dumps(lines), cwd=here, env=environment | without_slurm(here),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for line, answer in zip(others, answers, strict=True):
        code, words = COMMANDS[line]
        said = " ".join((answer["stdout"] + answer["stderr"]).split())
        assert answer["code"] == code, (line, said)
        assert words.replace("RUN", run.name) in said, (line, said)
        assert "Traceback" not in said, (line, said)
    assert {path.name for path in here.iterdir()} - before == {"bin", "small.toml", "words.tokens"}
    assert {line.split()[0] for line in COMMANDS} == set(verbs())
