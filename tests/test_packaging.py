"""What an installed hpc-gpt carries: every package, template, profile and experiment of the tree."""

import configparser
import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.cli.command import hpc_gpt
from tests.conftest import REPOSITORY

# One worker builds the wheel.
pytestmark = pytest.mark.xdist_group("packaging")


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg")
    return parser


def test_every_package_is_named(setup):
    named = set(setup["options"]["packages"].split())
    packages = {
        ".".join(path.parent.relative_to(REPOSITORY).parts) for path in (REPOSITORY / "hpc_gpt").rglob("__init__.py")
    }
    assert named == packages | {"hpc_gpt.templates", "hpc_gpt.experiments", "hpc_gpt.schemas"}


def test_every_data_file_among_the_code_is_carried(setup):
    data = setup["options.package_data"]
    for path in (REPOSITORY / "hpc_gpt").rglob("*.toml"):
        patterns = data[".".join(path.parent.relative_to(REPOSITORY).parts)].replace(",", " ").split()
        assert any(fnmatch(path.name, pattern) for pattern in patterns), f"no wheel has {path}"


@pytest.mark.parametrize("folder", ["templates", "experiments"])
def test_every_file_beside_the_code_is_carried(setup, folder):
    patterns = setup["options.package_data"][f"hpc_gpt.{folder}"].replace(",", " ").split()
    files = [
        path.relative_to(REPOSITORY / folder)
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".j2", ".toml", ".css", ".js")
    ]
    # setuptools' * stays within a folder, so a pattern must have as many parts as the path.
    missed = [
        file
        for file in files
        if not any(fnmatch(str(file), text) and len(file.parts) == text.count("/") + 1 for text in patterns)
    ]
    assert files
    assert missed == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that is built from the unpacked source distribution, as pip and an index build it."""
    place = tmp_path_factory.mktemp("package")
    source, built = place / "source", place / "built"
    built.mkdir()
    parts = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("hpc_gpt", "templates", "experiments"):
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=parts)
    shutil.copytree(REPOSITORY / "docs" / "schemas", source / "docs" / "schemas")
    for file in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / file, source)
    for kind in ("sdist", "wheel"):
        build = f"from setuptools import build_meta; build_meta.build_{kind}({str(built)!r})"
        subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
        if kind == "sdist":
            shutil.rmtree(source)
            (archive,) = built.glob("*.tar.gz")
            shutil.unpack_archive(archive, place, filter="data")
            source = place / archive.name.removesuffix(".tar.gz")
    shutil.rmtree(source)
    (found,) = built.glob("*.whl")
    return found


def pip(python, *words):
    """pip, for another environment."""
    return [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *map(str, words)]


def runs_installed(program, folder, environment):
    """`render` prints what it prints from the tree."""
    for arguments in (["render", "--gpus", "64", "--pp", "16"], ["render", "demo", "--cluster", "local"]):
        done = subprocess.run(
            [program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == hpc_gpt(*arguments).stdout


def test_the_sdists_wheel_installs_beside_what_it_needs(wheel, tmp_path):
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    python = fresh / "bin" / "python"
    # A path in a .pth file is not searched for .pth files of its own, so the tree's installation is not found.
    (site,) = fresh.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    subprocess.run(pip(python, "--no-deps", "--no-index", wheel), check=True)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    where = "import hpc_gpt; print(hpc_gpt.__file__)"
    found = subprocess.run([python, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert Path(found.stdout.strip()) == site / "hpc_gpt" / "__init__.py"
    runs_installed(fresh / "bin" / "hpc-gpt", tmp_path, environment)


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("version", "extra", "stays"),
    [("2.10.0+rocm7.1", "[train]", True), ("2.8.0+rocm6.4", "[train]", False), ("2.8.0+rocm6.4", "", True)],
)
def test_pip_leaves_the_sites_own_pytorch(wheel, tmp_path, version, extra, stays):
    """As LUMI's image has it, by a stand-in: a build for ROCm meets torch>=2.9, so no index is asked for another."""
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    (site,) = fresh.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (metadata := site / f"torch-{version}.dist-info").mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    words = pip(fresh / "bin" / "python", "--no-index", f"{wheel}{extra}")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == stays, done.stderr
    # pip would replace an older one: it looks for another, or finds one and cannot remove the stand-in.
    assert stays or re.search(r"No matching distribution found for torch>=2\.9|Cannot uninstall torch", done.stderr)
    assert [path.name for path in site.glob("torch-*")] == [metadata.name]


@pytest.mark.long(always=True)
def test_a_launcher_installs_alone_and_small(wheel, setup, tmp_path):
    """With what install_requires names and nothing of this machine's; without an index it is skipped, but not in CI."""
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    python, more = fresh / "bin" / "python", shlex.split(os.environ.get("PIP_ARGS", ""))
    pins = ("--constraint", REPOSITORY / "constraints.txt")
    subprocess.run(pip(python, "--no-deps", "--no-index", wheel), check=True)
    report = tmp_path / "report.json"
    needs = [*more, *pins, "--report", report, *setup["options"]["install_requires"].split()]
    done = subprocess.run(pip(python, *needs), capture_output=True, text=True, check=False)
    if done.returncode and os.environ.get("CI") != "true":
        pytest.skip(f"no index of packages: {done.stderr.strip().splitlines()[-1:]}")
    assert done.returncode == 0, done.stderr
    names = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    assert names.isdisjoint({"torch", "deepspeed", "transformers", "safetensors", "tokenizers"})
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    program = fresh / "bin" / "hpc-gpt"
    runs_installed(program, tmp_path, environment)
    for words in (
        ["plan", "--model", "gpt2", "--gpus", "8", "--device", "h200"],
        ["submit", "demo", "--dry-run", "--cluster", "generic-slurm"],
    ):
        done = subprocess.run(
            [program, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.long(always=True)
@pytest.mark.timeout(900)
def test_the_wheel_installs_with_all_that_it_needs_and_trains(wheel, tmp_path):
    """As README's first hour: from the indexes of this machine's pip, with PIP_ARGS."""
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    pins = ("--constraint", REPOSITORY / "constraints.txt")
    # DeepSpeed comes as source, which pip builds in an environment of its own.
    subprocess.run(pip(fresh / "bin" / "python", *more, *pins, f"{wheel}[train]"), check=True)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    runs_installed(fresh / "bin" / "hpc-gpt", tmp_path, environment)
    words = ["submit", "demo", "--cluster", "local", "--smoke", "--wait"]
    subprocess.run([fresh / "bin" / "hpc-gpt", *words], cwd=tmp_path, env=environment, check=True)


def test_the_metadata_are_what_an_index_takes(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(name))
    assert said["Requires-Python"] == ">=3.11"
    assert said["Summary"]
    assert said["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    # The licence is its owner's to choose, and nobody has stated an address.
    assert [key for key in ("License", "License-Expression", "Home-page", "Project-URL") if said[key]] == []
