"""What a node keeps of compiled kernels is in a folder that nobody else has made, or can write."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.train.node_cache import set_caches
from tests.conftest import REPOSITORY

NAME = f"hpc-gpt-cache-{os.getuid()}"


def caches(tmp_path: Path, **given: str) -> tuple[dict[str, str], str]:
    (tmp_path / "node").mkdir(exist_ok=True)
    environment = {"TMPDIR": str(tmp_path / "node"), **given}
    why = set_caches(tmp_path / "run", environment)
    return environment, why


def test_it_is_made_for_its_user_alone_and_stays_from_attempt_to_attempt(tmp_path: Path) -> None:
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


def test_inductor_and_triton_take_them(tmp_path: Path) -> None:
    found, _ = caches(tmp_path)
    asked = "from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir as triton; "
    done = subprocess.run(
        [sys.executable, "-c", f"{asked}print(cache_dir(), triton(0))"],
        env={**os.environ, **found, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [found["TORCHINDUCTOR_CACHE_DIR"], found["TRITON_CACHE_DIR"]]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles with g++, which is not here")
def test_ranks_share_what_they_compile(tmp_path: Path) -> None:
    """Two that compile at once, then one that compiles nothing, by Inductor's own counters."""
    own, _ = caches(tmp_path)
    command = [sys.executable, "-m", "tests.train.compiled_alone"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | own, stdout=subprocess.PIPE, text=True)

    def counted(rank: subprocess.Popen[str]) -> dict[str, int]:
        shown, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0
        found: dict[str, int] = json.loads(shown)
        return found

    first = [counted(rank) for rank in [start(), start()]]
    assert max(one["misses"] for one in first) > 0
    again = counted(start())
    assert (again["misses"], again["hits"] > 0) == (0, True)
