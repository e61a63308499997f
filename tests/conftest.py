"""Shared by all tests: a clean environment of our own variables, and the real files beside the repository."""

import itertools
import os
import shutil

# Before anything imports torch: threads that wait for each other on a busy machine take the time of those that work.
os.environ["OMP_NUM_THREADS"] = "1"
# With an empty cache Inductor first builds a program and runs it to see whether vector instructions work: 5 s of CPU.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.session import (  # noqa: F401  (hooks, found by name)
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_unconfigure,
)
from tests.waiting import LIMIT_S

# A time limit per example would fail on a busy machine; with CI=true the examples are the same each time.
hypothesis.settings.register_profile(
    "ours",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ours")

# Of one test (pytest-timeout).
os.environ.setdefault("PYTEST_TIMEOUT", str(LIMIT_S))

# A shell's background job ignores Ctrl-C, and hands that on to every process that a test sends one.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def shared() -> Path:
    """The folder of real files: `$HPC_GPT_SHARED`, else `../shared`. Skips, visibly, where there is neither."""
    for folder in (os.environ.get("HPC_GPT_SHARED"), REPOSITORY.parent / "shared"):
        if folder and (Path(folder) / "seeds").is_dir():
            return Path(folder)
    pytest.skip("neither HPC_GPT_SHARED nor ../shared holds the real files")


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files, shared by all tests of the session: the standard library's is built once."""
    return tmp_path_factory.mktemp("data")


_numbers = itertools.count()


class Disk:
    """A disk of its own that can stop answering: what writes to it then waits in the kernel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", self.folder], check=True)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", self.folder], capture_output=True, check=False)


@pytest.fixture
def disk_that_hangs(tmp_path: Path) -> Iterator[Disk]:
    if shutil.which("mkfs.ext4") is None:  # a user's PATH on Debian has no /usr/sbin
        pytest.skip("a disk of its own cannot be made here: no mkfs.ext4")
    image, folder = tmp_path / "disk.image", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", image], capture_output=True, text=True, check=False)
    made = (made.returncode and made) or subprocess.run(
        ["mount", "-o", "loop", image, folder], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a disk of its own cannot be mounted here: {made.stderr.strip()}")
    disk = Disk(folder)
    yield disk
    disk.thaw()
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    (folder := tmp_path / "small").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a file system of its own needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(autouse=True)
def own_folders(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No test reads or writes the user's own profiles, data, kept states or runs.

    They are in the test's tmp_path; for one that asks for none, where nothing is: most write nothing.
    """
    if "tmp_path" in request.fixturenames:
        folder: Path = request.getfixturevalue("tmp_path")
    else:
        folder = tmp_path_factory.getbasetemp() / f"unasked-{next(_numbers)}"
    for name in list(os.environ):
        if name.startswith("HPC_GPT_") and name != "HPC_GPT_SHARED":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HPC_GPT_CONFIG", str(folder / "config"))
    monkeypatch.setenv("HPC_GPT_STATE", str(folder / "state"))
    monkeypatch.setenv("HPC_GPT_DATA", str(data_folder))
    monkeypatch.setenv("HPC_GPT_LOGS", str(folder / "logs"))


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """No test sees what another one has left in the process.

    What is called in it sets variables, as for a rank of its own. A function that torch has compiled eight times runs
    as it is from then on.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)
    if (torch := sys.modules.get("torch")) is not None:
        torch.use_deterministic_algorithms(False)
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()
