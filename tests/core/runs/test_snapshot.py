"""The code of a run: what its archive holds, and that what is unpacked from it is what was submitted."""

import os
import py_compile
import re
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import read_json
from hpc_gpt.core.runs.snapshot import (
    archive_of,
    begin,
    check_path,
    code_environment,
    code_files,
    read_archive,
    ready_code,
    submitted_sha256,
    take_snapshot,
    unpack_code,
)
from hpc_gpt.core.runs.unpack import CODE_ARCHIVE, SUMS
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.launcher.render import render_script
from tests.conftest import REPOSITORY
from tests.programs import ran

FILES = {"hpc_gpt/__init__.py": b"x = 1\n", "hpc_gpt/trainer/a.py": b"", "templates/b.j2": "é {{ c }}\n".encode()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose archive is of FILES."""
    (folder := tmp_path / "run").mkdir()
    snapshot = archive_of(FILES)
    snapshot.place(folder)
    (folder / "provenance.json").write_text(f'{{\n "code_sha256": "{snapshot.sha256}"\n}}\n')
    return folder


def cut_off(archive: Path) -> None:
    """In this run alone: other runs of this process have a link to the same file."""
    begin = archive.read_bytes()[:100]
    archive.unlink()
    archive.write_bytes(begin)


def test_the_archive_holds_every_file_git_has_of_the_package() -> None:
    listed = ran("git", "-C", REPOSITORY, "ls-files", "-z", "hpc_gpt", "templates", code=0).stdout.split("\0")
    missing = {name for name in listed if name and (REPOSITORY / name).exists()} - set(code_files())
    assert not missing
    assert not [name for name in code_files() if "__pycache__" in name or name.endswith(".pyc")]


def test_the_runs_of_a_sweep_share_one_file(tmp_path: Path) -> None:
    snapshot = archive_of(FILES)
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        snapshot.place(folder)
    first, second = (folder / CODE_ARCHIVE for folder in folders)
    assert first.stat().st_ino == second.stat().st_ino
    assert read_archive(folders[1])[0] == snapshot.sha256
    (folders[1] / CODE_ARCHIVE).unlink()
    (folders[0] / CODE_ARCHIVE).unlink()  # the one that would be linked is gone
    snapshot.place(folders[1])
    assert read_archive(folders[1])[1][SUMS].count(b"\n") == len(FILES)


def test_what_is_unpacked_is_as_submitted_a_difference_set_aside(run: Path) -> None:
    code = unpack_code(run)
    assert (code / "templates/b.j2").read_bytes() == FILES["templates/b.j2"]
    (code / "hpc_gpt/__init__.py").write_text("edited")
    assert unpack_code(run) == code
    (aside,) = run.glob("code.changed-*")
    assert (aside / "hpc_gpt/__init__.py").read_text() == "edited"
    assert (code / "hpc_gpt/__init__.py").read_bytes() == FILES["hpc_gpt/__init__.py"]


def plant_cache(code: Path, ran: Path) -> None:
    """A cache of a module's that Python takes without a look at the source."""
    (source := code.parent / "layout.py").write_text(f"open({str(ran)!r}, 'w')")
    (cache := code / "hpc_gpt" / "core" / "settings" / "__pycache__").mkdir()
    cached = cache / f"layout.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(source), str(cached), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.unlink()


def import_from(code: Path) -> None:
    """As an attempt does."""
    environment = os.environ | code_environment(code, {})
    subprocess.run([sys.executable, "-c", "import hpc_gpt.core.settings.layout"], env=environment, check=True)


@pytest.mark.parametrize("link", [False, True])
def test_a_cache_put_beside_the_code_is_not_run_and_none_is_left(tmp_path: Path, link: bool) -> None:
    begin(tmp_path)
    code, mark = unpack_code(tmp_path), tmp_path / "mark"
    plant_cache(code, mark)
    import_from(code)
    assert mark.exists(), "it would run"
    mark.unlink()
    if link:
        cache = code / "hpc_gpt" / "core" / "settings" / "__pycache__"
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
    assert ready_code(tmp_path) == code
    import_from(code)
    assert not mark.exists()
    assert len(list(tmp_path.glob("code.changed-*"))) == 1
    assert not list(code.rglob("__pycache__"))


def test_another_archive_is_refused_and_so_is_a_damaged_one(run: Path) -> None:
    (run / CODE_ARCHIVE).unlink()
    archive_of({**FILES, "sitecustomize.py": b""}).place(run)
    with pytest.raises(RunFolderError, match="not what was submitted"):
        unpack_code(run)
    cut_off(run / CODE_ARCHIVE)
    with pytest.raises(RunFolderError, match="cannot read"):
        unpack_code(run)
    assert not (run / "code").exists()


def test_many_starts_at_once_end_with_one_whole_folder(run: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert {str(code) for code in pool.map(unpack_code, [run] * 16)} == {str(run / "code")}
    assert sorted(path.name for path in run.iterdir()) == ["code", CODE_ARCHIVE, "provenance.json"]


def test_a_run_of_plain_sbatch_gets_the_code_here_and_keeps_it(tmp_path: Path) -> None:
    begin(tmp_path)
    assert submitted_sha256(tmp_path) == take_snapshot().sha256 == read_archive(tmp_path)[0]
    assert read_json(tmp_path / "provenance.json")["versions"]["hpc-gpt"]
    (tmp_path / CODE_ARCHIVE).unlink()
    assert ready_code(tmp_path) == tmp_path / "code"  # the code here is still the same
    (tmp_path / CODE_ARCHIVE).unlink()
    text = (tmp_path / "provenance.json").read_text().replace(take_snapshot().sha256, "0" * 64)
    (tmp_path / "provenance.json").write_text(text)
    with pytest.raises(RunFolderError, match="is gone, and this machine's code is not the submitted code"):
        begin(tmp_path)


def test_a_path_that_pythonpath_cannot_carry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot carry the colon"):
        check_path(tmp_path / "a:b")


def test_sha256sum_agrees(run: Path) -> None:
    code = unpack_code(run)
    done = subprocess.run(["sha256sum", "--strict", "-c", SUMS], cwd=code, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with tarfile.open(run / CODE_ARCHIVE) as tar:
        assert {(entry.uid, entry.gid, entry.mtime, entry.mode) for entry in tar} == {(0, 0, 0, 0o644)}


@pytest.mark.parametrize("mask", [0o027, 0o077])
def test_what_is_written_keeps_the_umask(run: Path, mask: int) -> None:
    program = "import os, sys; os.umask(int(sys.argv[1])); from hpc_gpt.core.runs import snapshot"
    program += "; from pathlib import Path; run = Path(sys.argv[2]); snapshot.begin(run); snapshot.unpack_code(run)"
    for path in (run / CODE_ARCHIVE, run / "provenance.json"):
        path.unlink()
    subprocess.run([sys.executable, "-c", program, str(mask), str(run)], check=True, cwd=REPOSITORY)
    assert {path.name for path in run.iterdir()} == {"code", CODE_ARCHIVE, "provenance.json"}
    for path in run.rglob("*"):
        assert not path.stat().st_mode & mask, path


def test_job_sh_unpacks_the_same_way(tmp_path: Path) -> None:
    """Several starts at once, an edit, a file put beside, another sum: the part of a script that sees to the code."""
    (run := tmp_path / "a run").mkdir()
    begin(run)
    script = render_script(resolve(load_experiment("demo"), load_profile("generic-slurm")))
    part = re.search(r"^use_submitted_code\(\) \{.*?^\}$", script, re.MULTILINE | re.DOTALL)
    assert part
    head = 'set -o pipefail\nfail() { echo "refused: $1"; exit 1; }\npython=("$HPC_GPT_PYTHON")\n'
    command = ["bash", "-c", f'{head}{part[0]}\nuse_submitted_code\necho "$PYTHONPATH"']

    def start() -> str:
        environment = {
            "PATH": os.environ["PATH"], "HOSTNAME": "here", "HPC_GPT_RUN": str(run), "PYTHONPATH": "/behind",
            "HPC_GPT_PYTHON": sys.executable,
        }  # fmt: skip
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        assert {future.result() for future in [pool.submit(start) for _ in range(4)]} == {f"{run}/code:/behind"}
    assert sorted(path.name for path in run.iterdir()) == ["code", CODE_ARCHIVE, "provenance.json"]
    assert unpack_code(run) == run / "code"  # Python finds it whole, too
    (run / "code" / "hpc_gpt" / "batch.py").write_text("edited")
    assert start() == f"{run}/code:/behind"
    (aside,) = run.glob("code.changed-*")
    aside.rename(tmp_path / "aside")
    (run / "code" / "sitecustomize.py").write_text("put beside")
    assert start() == f"{run}/code:/behind"
    assert len(list(run.glob("code.changed-*"))) == 1
    assert not (run / "code" / "sitecustomize.py").exists()
    (aside,) = run.glob("code.changed-*")
    aside.rename(tmp_path / "beside")
    plant_cache(run / "code", tmp_path / "ran")
    assert start() == f"{run}/code:/behind"
    assert not (run / "code" / "hpc_gpt" / "__pycache__").exists()
    import_from(run / "code")
    assert not (tmp_path / "ran").exists()
    (run / "provenance.json").write_text('{"code_sha256": "0"}')
    assert start() == f"refused: {run}/{CODE_ARCHIVE} is not what was submitted: its SHA-256 differs"
    cut_off(run / CODE_ARCHIVE)
    assert start().startswith("refused: cannot ")
