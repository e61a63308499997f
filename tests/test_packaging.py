"""What an installed hpc-gpt carries: every package, template, profile and experiment of the tree."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch

import pytest

from tests.cli.command import hpc_gpt
from tests.conftest import REPOSITORY


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
    assert named == packages | {"hpc_gpt.templates", "hpc_gpt.experiments"}


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


def test_the_built_wheel_finds_its_templates_profiles_and_experiments(tmp_path):
    source = tmp_path / "source"
    parts = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("hpc_gpt", "templates", "experiments"):
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=parts)
    for file in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / file, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    installed = tmp_path / "installed"
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(installed)
    shutil.rmtree(source)
    for arguments in (["render", "--gpus", "64", "--pp", "16"], ["render", "demo", "--cluster", "local"]):
        done = subprocess.run(
            [sys.executable, "-m", "hpc_gpt", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        here = hpc_gpt(*arguments)
        assert done.stdout == here.stdout
