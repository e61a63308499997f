"""The code of a run: what its archive holds, that it is what was submitted, and that every process imports from it."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import read_json
from hpc_gpt.core.runs.code_archive import CODE_ARCHIVE, check_code, read_code, submitted_sha256
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.snapshot import (
    CodeArchive,
    begin,
    check_path,
    code_environment,
    code_files,
    ready_code,
    take_snapshot,
)
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.render import render_script
from tests.conftest import REPOSITORY
from tests.programs import ran

FILES = {
    "hpc_gpt/__init__.py": b"x = 1\n",
    "hpc_gpt/trainer/a.py": b"",
    "hpc_gpt/templates/b.j2": "é {{ c }}\n".encode(),
}
# Imports the modules that a job runs, but the trainer, from the archive, and reads what the package has besides Python.
IMPORTS = """
import importlib, pkgutil, hpc_gpt, hpc_gpt.core, hpc_gpt.launcher
for package in (hpc_gpt.core, hpc_gpt.launcher):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.services import ENGINE_NAMES
from hpc_gpt.launcher.render import _environment
from hpc_gpt.planner.machine import link_gb_s
from hpc_gpt.reader.lines.dialects import dialects
_environment().get_template("base.sh.j2")
print(hpc_gpt.__file__, len(DEVICES), *ENGINE_NAMES, len(dialects()), link_gb_s("nvlink", 4))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder whose archive is of FILES."""
    (folder := tmp_path / "run").mkdir()
    (folder / "resolved.json").write_text(resolve(load_experiment("demo"), load_profile("local")).to_json())
    snapshot = CodeArchive(FILES)
    snapshot.place(folder)
    (folder / "provenance.json").write_text(json.dumps({"code_sha256": snapshot.sha256}))
    return RunFolder(folder)


@pytest.fixture
def bare(run: RunFolder) -> RunFolder:
    """A run folder as a script makes that plain sbatch starts."""
    for name in (CODE_ARCHIVE, "provenance.json"):
        (run.path / name).unlink()
    return run


def test_the_archive_holds_every_file_git_has_of_the_package() -> None:
    listed = ran("git", "-C", REPOSITORY, "ls-files", "-z", "hpc_gpt", "templates", code=0).stdout.split("\0")
    there = {
        re.sub("^templates", "hpc_gpt/templates", name) for name in listed if name and (REPOSITORY / name).exists()
    }
    assert not there - set(code_files())
    assert not [name for name in code_files() if "__pycache__" in name or name.endswith(".pyc")]


def test_the_runs_of_a_sweep_share_one_file(tmp_path: Path) -> None:
    snapshot = CodeArchive(FILES)
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        snapshot.place(folder)
    first, second = (folder / CODE_ARCHIVE for folder in folders)
    assert first.stat().st_ino == second.stat().st_ino
    first.unlink()
    second.unlink()  # the one that would be linked is gone
    snapshot.place(folders[1])
    assert read_code(folders[1]) == FILES


def test_every_module_is_imported_from_the_archive(bare: RunFolder) -> None:
    code = ready_code(bare)
    environment = os.environ | code_environment(code, {})
    found, here = (
        subprocess.run([sys.executable, "-c", IMPORTS], env=given, cwd=cwd, capture_output=True, text=True, check=True)
        for given, cwd in ((environment, bare.path), ({**os.environ, "PYTHONPATH": str(REPOSITORY)}, REPOSITORY))
    )
    place, *figures = found.stdout.split()
    assert (place, figures) == (f"{code}/hpc_gpt/__init__.py", here.stdout.split()[1:])
    assert {path.name for path in bare.path.iterdir()} == {CODE_ARCHIVE, "provenance.json", "resolved.json"}


def changed(run: RunFolder, how: str) -> None:
    """Changes the archive in this run alone: other runs of this process have a link to the same file."""
    path = run.path / CODE_ARCHIVE
    content = path.read_bytes()
    path.unlink()
    if how == "another":
        CodeArchive({**FILES, "sitecustomize.py": b""}).place(run.path)
    elif how != "gone":
        path.write_bytes(content[:100] if how == "cut" else content)
    if how in ("added", "twice"):
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("hpc_gpt/a.pyc" if how == "added" else "hpc_gpt/__init__.py", b"")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("how", "said"),
    [("another", "not what was submitted: its SHA-256"), ("added", "not what was submitted: its SHA-256"),
     ("twice", "not what was submitted: hpc-gpt writes no such"), ("cut", "cannot read"),
     ("gone", "is gone, and this machine's code is not the submitted code")],
)  # fmt: skip
def test_another_archive_is_refused_and_so_is_a_damaged_one(run: RunFolder, how: str, said: str) -> None:
    assert ready_code(run) == run.path / CODE_ARCHIVE
    changed(run, how)
    with pytest.raises(RunFolderError, match=said):
        ready_code(run)


def test_a_run_of_plain_sbatch_gets_the_code_here_and_keeps_it(bare: RunFolder) -> None:
    begin(bare)
    assert submitted_sha256(bare.path) == take_snapshot().sha256
    assert read_json(bare.path / "provenance.json")["versions"]["hpc-gpt"]
    (bare.path / CODE_ARCHIVE).unlink()
    assert ready_code(bare) == check_code(bare.path)  # the code here is still the same


def test_a_path_that_pythonpath_cannot_carry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot carry the colon"):
        check_path(tmp_path / "a:b")


@pytest.mark.parametrize("mask", [0o027, 0o077])
def test_what_is_written_keeps_the_umask(bare: RunFolder, mask: int) -> None:
    program = "import os, sys; os.umask(int(sys.argv[1])); from hpc_gpt.core.runs import snapshot"
    program += "; from hpc_gpt.core.runs.run_folder import RunFolder; from pathlib import Path"
    program += "; snapshot.ready_code(RunFolder(Path(sys.argv[2])))"
    subprocess.run([sys.executable, "-c", program, str(mask), bare.path], check=True, cwd=REPOSITORY)
    for name in (CODE_ARCHIVE, "provenance.json"):
        assert not (bare.path / name).stat().st_mode & mask, name


def test_job_sh_checks_the_code_the_same_way(bare: RunFolder) -> None:
    """The part of a script that sees to the code: as made, of another sum, cut off."""
    begin(bare)
    script = render_script(resolve(load_experiment("demo"), load_profile("generic-slurm")))
    part = re.search(r"^use_submitted_code\(\) \{.*?^\}$", script, re.MULTILINE | re.DOTALL)
    assert part
    head = 'set -o pipefail\nfail() { echo "refused: $1"; exit 1; }\npython=("$HPC_GPT_PYTHON")\n'
    command = ["bash", "-c", f'{head}{part[0]}\nuse_submitted_code\necho "$PYTHONPATH"']

    def start() -> str:
        environment = {
            "PATH": os.environ["PATH"], "HOSTNAME": "here", "HPC_GPT_RUN": str(bare.path), "PYTHONPATH": "/behind",
            "HPC_GPT_PYTHON": sys.executable,
        }  # fmt: skip
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()

    archive = bare.path / CODE_ARCHIVE
    assert start() == f"{archive}:/behind"
    (bare.path / "provenance.json").write_text('{"code_sha256": "0"}')
    assert start() == f"refused: {archive} is not what was submitted: its SHA-256 differs"
    changed(bare, "cut")
    assert start().startswith("refused: cannot ")
