"""No secret of the environment reaches a file or a word of ours; what a run writes keeps the user's umask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.core.runs.unpack import CODE_ARCHIVE
from tests.benchmarks.sweep import make_stand_ins
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.xdist_group("planted-secrets")

# Made up; each has a part that nothing else has.
PLANTED = {
    "HF_TOKEN": "hf_plantedQx7Zk1",
    "WANDB_API_KEY": "plantedQx7Zk2aaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "AWS_SECRET_ACCESS_KEY": "wJalr/plantedQx7Zk3",
    "HTTPS_PROXY": "http://someone:plantedQx7Zk4@proxy.example:3128",
    "DEPLOY_KEY": "-----BEGIN OPENSSH PRIVATE KEY-----\nplantedQx7Zk5\n-----END OPENSSH PRIVATE KEY-----",
}
MARK = "plantedQx7Zk"
SMALL = ("demo", "--gpus", "1", "--tp", "1", "--pp", "1", "--set", "data.source=random", "--set", "train.steps=2")
SWEEP = "rows.toml"


class Session:
    """Commands with planted secrets, a cluster that takes every job, and all that they say."""

    def __init__(self, folder: Path, mask: int) -> None:
        self.folder, self.said, self.mask = folder, "", mask
        make_stand_ins(folder / "bin")
        own = {f"HPC_GPT_{key}": str(folder / key.lower()) for key in ("LOGS", "CONFIG", "STATE", "DATA")}
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.environment = {**os.environ, **PLANTED, **own, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
        self.environment["OMP_NUM_THREADS"] = "1"
        (folder / SWEEP).write_text(
            'extends = "demo"\nname = "rows"\n[rows]\n"a" = { train.seed = 1 }\n"b" = { train.seed = 2 }\n'
        )

    def run(self, *words: object) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "hpc_gpt", *map(str, words)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            umask=self.mask,
            timeout=300,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        self.said += done.stdout + done.stderr


@pytest.fixture(
    scope="module", params=[pytest.param(0o027, marks=pytest.mark.long), 0o077], ids=["umask 027", "umask 077"]
)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """One run here to its end, one in a queue, a sweep, and every verb that tells of them."""
    made = Session(tmp_path_factory.mktemp("planted"), request.param)
    made.run("submit", *SMALL, "--cluster", "local", "--wait")
    (here,) = (made.folder / "logs" / "demo").iterdir()
    made.run("submit", *SMALL, "--cluster", "generic-slurm")
    made.run("submit", "--sweep", SWEEP, *SMALL[1:], "--cluster", "generic-slurm")
    made.run("status", "--open")
    made.run("why", here, "--json")
    made.run("report", "logs", "--json")
    made.run("report", "logs", "--html", "page.html")
    made.run("verify", here, "--json")
    made.run("doctor", "--json")
    return made


def test_no_planted_secret_is_written_or_said(session: Session) -> None:
    files = [path for path in session.folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    wanted = {
        "job.sh",
        "array.sh",
        "provenance.json",
        "resolved.json",
        "record.json",
        "metrics.jsonl",
        "log",
        CODE_ARCHIVE,
    }
    assert wanted <= names, wanted - names
    assert not [path for path in files if MARK.encode() in path.read_bytes()]
    assert MARK not in session.said


def test_every_file_and_folder_of_a_run_keeps_the_umask(session: Session) -> None:
    logs = session.folder / "logs"
    wide = [path for path in (logs, *logs.rglob("*")) if not path.is_symlink() and path.stat().st_mode & session.mask]
    assert not wide
