"""`hpc-gpt init --from` on a real cluster: Slurm takes the scripts of its results, and a command starts as before.

The programs are stand-ins that write their arguments down. The same script is submitted as it is, and as init made it.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.command import Done, in_process
from tests.scripts.test_public_scripts import JOBS, NAMES
from tests.slurm.cluster import Cluster, ClusterSpec, Nodes
from tests.slurm.conftest import running
from tests.slurm.launcher import REPOSITORY
from tests.slurm.services import Services

SPEC = ClusterSpec(
    "own",
    (Nodes("o", 6),),
    (
        "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=a100 Nodes=ALL MaxTime=INFINITE State=UP",
    ),
    accounts=("research", "abc123"),
)
# Their engine runs a checkout of Megatron-LM, not the script's command.
MEGATRON = ("megatron-gpt", "megatron-llama")
COMMANDS = [name for name in NAMES if name not in MEGATRON]
# Of each way to start it one: bash -c and a here-document, a script of its own, once a job, once a GPU.
SOME = ["hf-deepspeed", "megatron-deepspeed", "single", "wrapper"]
PROGRAMS = ("torchrun", "python", "accelerate", "deepspeed", "mpirun", "singularity")
# Writes what it was started with, and where.
STUB = """#!{python} -IS
import json, os, sys
said = {{name: os.environ.get(name, "") for name in ("MASTER_PORT", "SLURM_JOB_ID", "SLURM_NODELIST")}}
said |= {{"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "cwd": os.getcwd()}}
name = f"{{said['SLURM_JOB_ID']}}.{{os.environ.get('SLURM_PROCID', 0)}}.{{os.getpid()}}"
with open(os.path.join({folder!r}, name), "w") as file:
    json.dump(said, file)
"""
# Folders of the scripts' sites, as folders of the test.
SITE = ("/opt/", "/projects/", "/scratch/", "/data/", "/images/")
LIMIT_S = 400


class Own:
    """The scripts in a folder, the stand-ins, and hpc-gpt on the cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.said = cluster, folder, folder / "said"
        work = shutil.copytree(JOBS, folder / "work")
        for file in work.iterdir():
            text = file.read_text()
            for place in SITE:
                text = re.sub(rf"(?<![\w.~]){place}", f"{folder}{place}", text)
            file.write_text(text)
        (work / "experiments" / "tiny").mkdir(parents=True)
        (folder / "projects" / "llm" / "Megatron-DeepSpeed").mkdir(parents=True)
        (folder / "projects" / "llm" / "Megatron-LM").mkdir()
        for venv in ("opt/venvs/accelerate", "opt/venvs/megatron", "home/venvs/ddp"):
            (folder / venv / "bin").mkdir(parents=True)
            (folder / venv / "bin" / "activate").write_text(":\n")
        self.said.mkdir()
        stubs = folder / "stubs"
        stubs.mkdir()
        (folder / "opt" / "venvs" / "jax" / "bin").mkdir(parents=True)
        for path in (*(stubs / name for name in PROGRAMS), folder / "opt" / "venvs" / "jax" / "bin" / "python"):
            path.write_text(STUB.format(python=sys.executable, folder=str(self.said)))
            path.chmod(0o755)
        for name in ("conda", "dcgmi", "nvidia-smi"):
            (stubs / name).write_text("#!/bin/sh\n")
            (stubs / name).chmod(0o755)
        (stubs / "activate").write_text(":\n")  # `source activate NAME` looks for it on PATH
        own = {name: text for name, text in cluster.environment.items() if not name.startswith("HPC_GPT_")}
        self.environment = own | {
            "PATH": f"{stubs}:{own['PATH']}",
            "HOME": str(folder / "home"),
            "SCRATCH": str(folder / "scratch"),
            "BASH_FUNC_module%%": "() { :\n}",
            "HPC_GPT_CONFIG": str(folder / "config"),
            "HPC_GPT_STATE": str(folder / "state"),
            "HPC_GPT_LOGS": str(folder / "logs"),
            "HPC_GPT_CLUSTER": "",
            "HPC_GPT_MASTER_ADDR": "127.0.0.1",  # node names do not resolve here
            "PYTHONPATH": str(REPOSITORY),
            "HF_TOKEN": "",
            "HUB_TOKEN": "hf_ZyXwVuTsRqPoNmLkJiHgFeDc",  # as in the script
        }
        self.work = work

    def hpc_gpt(self, *arguments: str) -> Done:
        done = in_process(*arguments, cwd=self.work, environment=self.environment)
        assert done.code == 0, f"{arguments}: {done.stderr}"
        return done

    def init(self, name: str) -> tuple[str, str]:
        """(experiment, profile) of a script."""
        if not (self.work / f"{name}.toml").exists():
            self.hpc_gpt("init", "--from", f"{name}.slurm")
        return f"{name}.toml", f"{name}-cluster.toml"

    def wait(self) -> None:
        """Until no job is left."""
        end = time.monotonic() + LIMIT_S
        while listed := self.cluster.run("squeue", "-h", "-o", "%i %j %T %R").stdout:
            assert time.monotonic() < end, listed
            time.sleep(0.2)

    def started(self, job: str, port: str = "") -> list[tuple[str, ...]]:
        """The command lines of a job, with what differs from job to job replaced; `port` is the rendezvous' own."""
        found = [json.loads(path.read_text()) for path in self.said.glob(f"{job}.*")]
        if not found:
            return []
        first = self.cluster.run("scontrol", "show", "hostnames", found[0]["SLURM_NODELIST"]).stdout.split()[0]
        addresses = subprocess.run(
            ["hostname", "--ip-address"], capture_output=True, text=True, check=False
        ).stdout.split()
        hosts = {first, "127.0.0.1", socket.gethostname(), socket.gethostname().partition(".")[0], *addresses}
        return [tuple(self.plain(each["argv"], each, hosts, port or each["MASTER_PORT"])) for each in found]

    def plain(self, words: list[str], said: dict[str, str], hosts: set[str], port: str) -> Iterator[str]:
        for before, word in pairwise(["", *words]):
            word = word.replace(said["cwd"], "<work>")
            for host in sorted(hosts, key=len, reverse=True):
                word = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", "<host>", word)
            word = re.sub(rf"\b{port}\b", "<port>", word) if port else word
            word = re.sub(rf"\b{said['SLURM_JOB_ID']}\b", "<job>", word)
            word = re.sub(r"\b(20\d{6}|1\d{9})\b", "<time>", word)
            # $RANDOM in the batch script is one number for all nodes, as the job's id is.
            yield "<random>" if before == "--rdzv_id" and (word.isdigit() or word == "<job>") else word


@pytest.fixture(scope="module")
def own(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    for cluster in running(SPEC, services):
        yield Own(cluster, tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("name", NAMES)
def test_slurm_takes_the_rendered_script(own: Own, name: str) -> None:
    experiment, profile = own.init(name)
    script = own.hpc_gpt("render", experiment, "--cluster", profile).stdout
    path = own.folder / f"{name}.sh"
    path.write_text(script)
    for each in (path, own.work / f"{name}.slurm"):
        done = own.cluster.run("sbatch", "--test-only", str(each))
        assert done.returncode == 0, f"{each}: {done.stderr}"
    # The same nodes and processors as before.
    answers = [
        own.cluster.run("sbatch", "--test-only", str(each)).stderr for each in (path, own.work / f"{name}.slurm")
    ]
    asked = [re.findall(r"using (\d+) processors on nodes (\S+)", answer) for answer in answers]
    assert asked[0] == asked[1]


def starts_as_before(own: Own, names: list[str]) -> None:
    """Submits the scripts as they are, and as init made them, and compares what the programs were started with."""
    before, after = {}, {}
    for name in names:
        output = str(own.folder / f"{name}.out")
        words = ("sbatch", "--parsable", "--chdir", str(own.work), "-o", output, "-e", output)
        done = own.cluster.run(*words, str(own.work / f"{name}.slurm"), **own.environment)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        before[name] = done.stdout.strip()
        experiment, profile = own.init(name)
        said = own.hpc_gpt("submit", experiment, "--cluster", profile).stdout
        found = re.search(r"submitted (\S+) as job (\d+)", said)
        assert found, said
        after[name] = found[2]
    own.wait()
    differ = []
    for name in names:
        port = re.search(r"^MASTER_PORT=(\d+)$", (JOBS / f"{name}.slurm").read_text(), re.M)
        old = Counter(own.started(before[name], port[1] if port else ""))
        new = Counter(own.started(after[name]))
        # What runs before and after the training is left out, and of a loop or an array all but the first.
        kept = Counter({words: 1 if name == "sweep" else old[words] for words in new if words in old})
        if not new or new != kept:
            logs = "\n".join(path.read_text() for path in own.folder.glob(f"logs/{name}/*/attempts/*/log"))
            differ.append(
                f"{name}: before {old}\nafter {new}\n{logs[-3000:]}\n{(own.folder / f'{name}.out').read_text()}"
            )
    assert not differ, "\n\n".join(differ)


def test_a_command_starts_as_it_did_before(own: Own) -> None:
    starts_as_before(own, SOME)


@pytest.mark.long
def test_every_command_starts_as_it_did_before(own: Own) -> None:
    starts_as_before(own, [name for name in COMMANDS if name not in SOME])
