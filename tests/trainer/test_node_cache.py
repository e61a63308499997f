"""What a node keeps of compiled kernels is in a folder that nobody else has made, or can write."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime import cache_dir_utils

from hpc_gpt.trainer.node_cache import drop_cut_libraries, set_caches
from tests.conftest import REPOSITORY

NAME = f"hpc-gpt-cache-{os.getuid()}"


def caches(tmp_path: Path, amd: bool = False, **given: str) -> tuple[dict[str, str], str]:
    (tmp_path / "node").mkdir(exist_ok=True)
    environment = {"TMPDIR": str(tmp_path / "node"), **given}
    why = set_caches(tmp_path / "run", environment, amd)
    return environment, why


def test_it_is_its_users_alone_and_stays_between_attempts(tmp_path: Path) -> None:
    first, why = caches(tmp_path)
    own = tmp_path / "node" / NAME
    assert (why, first["TRITON_CACHE_DIR"], first["TORCHINDUCTOR_CACHE_DIR"]) == (
        "",
        f"{own}/triton",
        f"{own}/inductor",
    )
    assert own.stat().st_mode & 0o777 == 0o700
    assert caches(tmp_path) == (first, "")
    given, _ = caches(tmp_path, TRITON_CACHE_DIR="/mine")
    assert (given["TRITON_CACHE_DIR"], given["TORCHINDUCTOR_CACHE_DIR"]) == ("/mine", f"{own}/inductor")


def test_on_amd_miopen_and_aiter_have_theirs(tmp_path: Path) -> None:
    own = tmp_path / "node" / NAME
    found, _ = caches(tmp_path, amd=True, AITER_JIT_DIR="/mine")
    assert (found["MIOPEN_USER_DB_PATH"], found["MIOPEN_CUSTOM_CACHE_DIR"]) == (f"{own}/miopen", f"{own}/miopen")
    assert (found["AITER_JIT_DIR"], (own / "miopen").is_dir()) == ("/mine", True)
    assert found["TRITON_CACHE_DIR"] == f"{own}/triton"
    assert caches(tmp_path, amd=True)[0]["AITER_JIT_DIR"] == f"{own}/aiter"
    assert not any(name.startswith(("MIOPEN", "AITER")) for name in caches(tmp_path)[0])


@pytest.mark.parametrize("kind", ["another's", "link", "open", "file"])
def test_one_that_another_may_have_filled_is_not_used(tmp_path: Path, kind: str) -> None:
    (own := tmp_path / "node" / NAME).parent.mkdir()
    if kind == "link":
        (tmp_path / "theirs").mkdir()
        own.symlink_to(tmp_path / "theirs")
    elif kind == "file":
        own.touch()
    else:
        own.mkdir()
        own.chmod(0o777 if kind == "open" else 0o755)
    if kind == "another's":
        if os.getuid():
            pytest.skip("needs root")
        os.chown(own, 4711, 4711)
    found, why = caches(tmp_path)
    assert found["TRITON_CACHE_DIR"] == f"{tmp_path}/run/cache/{os.uname().nodename}/triton"
    assert found["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{tmp_path}/run/cache/")
    assert str(own) in why


def test_one_on_a_noexec_disk_is_not_used(tmp_path: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,noexec", small_disk], check=True)
    (tmp_path / "node").symlink_to(small_disk)
    found, why = caches(tmp_path)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/run/cache/{os.uname().nodename}/inductor"
    assert "is on a disk that is mounted noexec" in why


def test_inductor_and_triton_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = caches(tmp_path)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    taken = cache_dir_utils.cache_dir(), cache_dir_utils.triton_cache_dir(0)
    assert taken == (found["TORCHINDUCTOR_CACHE_DIR"], found["TRITON_CACHE_DIR"])


compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles with g++, which is not here")


def elf(path: Path, size: int = 600) -> Path:
    """A shared object's header, whose sections end after 600 bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = b"\x7fELF\x02\x01" + bytes(34) + (344).to_bytes(8, "little") + bytes(10) + bytes([64, 0, 4, 0])
    path.write_bytes((header + bytes(600))[:600][:size])
    return path


def test_what_a_killed_compiler_left_is_dropped(tmp_path: Path) -> None:
    whole, empty = elf(tmp_path / "ab" / "cab.main.so"), elf(tmp_path / "ab" / "cac.so", 0)
    begun, cut = elf(tmp_path / "cd" / "ccd.main.so", 40), elf(tmp_path / "cd" / "cce.main.so", 599)
    written, text = elf(tmp_path / "ef" / "cef.main.so", 300), tmp_path / "ef" / "cef.main.cpp"
    text.write_text("x")
    (tmp_path / "locks").mkdir()
    with (tmp_path / "locks" / "cef.lock").open("w") as lock:  # its compiler still writes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        drop_cut_libraries(tmp_path)
    assert [path.exists() for path in (whole, text, written, empty, begun, cut)] == [True, True, True] + 3 * [False]
    drop_cut_libraries(tmp_path)
    assert not written.exists()
    drop_cut_libraries(tmp_path / "none")


@pytest.mark.long
@pytest.mark.timeout(600)
@compiles
def test_ranks_share_what_they_compile_and_mend_what_was_cut(tmp_path: Path) -> None:
    """Two that compile at once, one that compiles nothing, by Inductor's own counters, and one that compiles again what
    a kill cut off."""
    own, _ = caches(tmp_path)
    command = [sys.executable, "-m", "tests.trainer.compiled_alone"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | own, stdout=subprocess.PIPE, text=True)

    def counted(rank: subprocess.Popen[str]) -> dict[str, int]:
        shown, _ = rank.communicate()
        assert rank.returncode == 0
        found: dict[str, int] = json.loads(shown)
        return found

    first = [counted(rank) for rank in [start(), start()]]
    assert max(one["misses"] for one in first) > 0
    again = counted(start())
    assert (again["misses"], again["hits"] > 0) == (0, True)
    libraries = list(Path(own["TORCHINDUCTOR_CACHE_DIR"]).glob("*/*.so"))
    assert len(libraries) > 4
    whole = {path: path.stat().st_size for path in libraries}
    for path in libraries:
        os.truncate(path, 1000)
    counted(start())
    assert {path: path.stat().st_size for path in libraries} == whole
