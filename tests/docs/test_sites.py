"""docs/sites.md: what it says of sites is tried here, as far as this machine has it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.process import process_identity
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.launcher.local.gpus import needed, take_for, waiting
from tests.cli.command import error_of, hpc_gpt, in_process
from tests.conftest import REPOSITORY
from tests.launcher.local.conftest import SMALL, ended, newest, status_of
from tests.made_runs import add_attempt, make_run, metrics_line
from tests.programs import ran

PAGE = "docs/sites.md"
ALONE = ("--gpus", "1", "--tp", "1")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


def needs(program: str, package: str):
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program} of Debian's {package}")


# --- nodes without internet


@pytest.mark.long
@needs_root
@needs("ip", "iproute2")
def test_a_training_needs_no_network_but_lo():
    line = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-m", "hpc_gpt"]
    line += ["submit", *SMALL, "--set", "train.steps=2", "--wait"]
    ran(*line, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, code=0)
    assert status_of(newest()).state == "done"


# --- modules


@pytest.mark.long
@needs("modulecmd", "environment-modules")
def test_ranks_load_a_profiles_module_and_end_without_it(tmp_path, monkeypatch):
    (tmp_path / "modules" / "site").mkdir(parents=True)
    (tmp_path / "modules" / "site" / "1").write_text('#%Module\nsetenv OF_MODULE "site 1"\n')
    monkeypatch.setenv("MODULEPATH", str(tmp_path / "modules"))
    for name in ("MODULESHOME", "LOADEDMODULES", "_LMFILES_"):
        monkeypatch.delenv(name, raising=False)
    text = '{% extends "base.sh.j2" %}{% block launch %}\necho "module gave $OF_MODULE"; exit 9\n{% endblock %}'
    (tmp_path / "ranks.sh.j2").write_text(text)
    profiles = Path(os.environ["HPC_GPT_CONFIG"]) / "clusters"
    profiles.mkdir(parents=True, exist_ok=True)
    for name, module in (("good", "site/1"), ("bad", "site/2")):
        (profiles / f"{name}.toml").write_text(f'extends = "local"\nmodules = ["{module}"]\n')
        given = ("--cluster", name, *ALONE, "--template", tmp_path / "ranks.sh.j2")
        assert hpc_gpt("submit", *SMALL, *given).code == 0
        assert ended(newest()).state == "error"
        log = newest().attempts()[-1].log.read_text()
        assert ("module gave site 1" in log) == (name == "good")
        assert ("Error: module load failed on " in log) == (name == "bad")


# --- users


def as_user(uid: int, work) -> int:
    """The exit code of `work` in a process of that user, in the group of the folder."""
    if (child := os.fork()) == 0:
        code = 99
        try:
            os.setgroups([12000])
            os.setgid(12000)
            os.setuid(uid)
            os.umask(0o002)
            code = work()
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def project(monkeypatch) -> Iterator[Path]:
    """A folder of runs of one group."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    for name in ("logs", "config", "state", "data"):
        monkeypatch.setenv(f"HPC_GPT_{name.upper()}", str(folder / name))
    (folder / "logs").mkdir()
    os.chown(folder / "logs", 0, 12000)
    (folder / "logs").chmod(0o2775)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_two_of_a_group_with_one_state_folder_share_out_the_gpus(project):
    (project / "state").mkdir()
    os.chown(project / "state", 0, 12000)
    (project / "state").chmod(0o2775)
    runs = [make_run(project / "warm") for _ in range(2)]
    asked = replace(runs[0].resolved(), gpus=2)
    assert needed(asked, "01") == 2

    def take(number: int) -> str:
        return take_for(runs[number].run_id, 2, {"0": "0", "1": "1"}, waiting())[1]

    reads, writes = os.pipe()

    def hold() -> int:
        os.write(writes, b"held" if not take(0) else b"not held")
        signal.pause()
        return 0

    if (holder := os.fork()) == 0:
        os._exit(as_user(12001, hold))
    assert os.read(reads, 8) == b"held"
    assert as_user(12002, lambda: take(1) != f"waits for 2 of GPUs 0,1; taken: 0,1 by run {runs[0].run_id}") == 0
    child = int(Path(f"/proc/{holder}/task/{holder}/children").read_text())
    os.kill(child, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert as_user(12002, lambda: bool(take(1))) == 0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


@needs_root
def test_one_of_a_group_reads_anothers_run_but_cannot_cancel_it(project, sleeper):
    warm = make_run(project / "warm")
    for verb in ("status", "why", "report", "save", "cancel"):  # all that is needed is imported as root
        in_process(verb, warm.path)
    said = project / "logs" / "said"
    line = {"scheduler": "local", "job_id": str(sleeper.pid), "pid": sleeper.pid, "refused": None}

    def first() -> int:
        run = make_run(logs_dir())
        run.add_submission({**line, **process_identity(sleeper.pid), "host": os.uname().nodename})
        lines = [metrics_line(step) for step in range(1, 9)]
        add_attempt(run, lines, ended=None, job_id=str(sleeper.pid)).log.write_text("log\n")
        return 0

    assert as_user(12001, first) == 0
    (run,) = list_runs(logs_dir())

    def second() -> int:
        for verb, *more in (("status",), ("why",), ("logs",), ("report",), ("save",), ("stop",)):
            done = in_process(verb, run.run_id, *more)
            if done.code:
                said.write_text(f"{verb}: {done.stderr}")
                return 1
        done = in_process("cancel", run.run_id, "--yes")
        said.write_text(done.stderr)
        return done.code

    assert as_user(12002, second) == 1
    message, hint = error_of(type("Said", (), {"stderr": said.read_text()}))
    assert message == f"cannot end process {sleeper.pid} of run {run.run_id}: Operation not permitted"
    assert "another user" in hint
    assert not list(run.path.glob("cancelled.*"))
    assert (run.path / "record.json").stat().st_uid == 12002
