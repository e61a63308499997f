"""A profile's `stage` on this machine: ranks and programs run from an unpacked environment, and nothing of it stays."""

import json
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.launcher.local.conftest import SMALL, ended, submit
from tests.staged import make_archive
from tests.waiting import wait_for


def profile(folder: Path, archive: Path) -> Path:
    path = folder / "staged.toml"
    path.write_text(f'scheduler = "local"\ngpus_per_node = 2\nstage = {json.dumps(str(archive))}\n')
    return path


def start(folder: Path, archive: Path, *words: object) -> RunFolder:
    (folder / "tmp").mkdir()
    environment = {"TMPDIR": str(folder / "tmp"), "HPC_GPT_PYTHON": "/gone/python"}
    return submit(*words, "--cluster", profile(folder, archive), environment=environment)


def removed(folder: Path) -> None:
    wait_for("the unpacked environment is removed", lambda: not list((folder / "tmp").glob("hpc-gpt-[0-9]*")))


def test_a_program_of_ones_own_finds_the_unpacked_python_first(tmp_path):
    archive = make_archive(tmp_path / "an 'odd' $HOME.tar")
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\n[engine]\nname = "command"\n[layout]\ngpus = 1\n[command]\nworkdir = "."\n'
        'run = "python -c \\"import sys; print(sys.prefix); print(\'step 1 loss 2.0\')\\""\n'
    )
    run = start(tmp_path, archive, tmp_path / "mine.toml")
    assert ended(run).state == "done", run.attempt(1).log.read_text()
    assert f"{tmp_path}/tmp/hpc-gpt-" in run.attempt(1).log.read_text()
    removed(tmp_path)


@pytest.mark.long
def test_ranks_wait_for_the_first_and_its_seconds_count(tmp_path):
    archive = make_archive(tmp_path / "environment.tar")
    run = start(tmp_path, archive, *SMALL[:1], *SMALL[3:], "--set", "train.steps=2")
    assert ended(run).state == "done", run.attempt(1).log.read_text()
    assert run.attempt(1).log.read_text().count(" is unpacked on ") == 1
    found = json.loads((run.attempt(1).folder / "start.json").read_text())
    assert found["start_parts"]["staging"] > 0
    assert sum(found["start_parts"].values()) == pytest.approx(found["start_s"], rel=0.05)
    removed(tmp_path)


def test_a_damaged_archive_is_the_users_to_mend(tmp_path):
    (archive := tmp_path / "damaged.tar").write_bytes(b"no archive")
    run = start(tmp_path, archive, *SMALL[:1], *SMALL[3:])
    end = ended(run)
    assert end.state == "user_error"
    assert f": cannot unpack {archive}: " in str(end.cause)
    assert "hint: is the tar complete" in run.attempt(1).log.read_text()
    removed(tmp_path)
