"""What pip installs carries its templates, profiles and experiments, and finds them far from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source: building leaves files beside it."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("hpc_gpt", "templates", "experiments"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, copy)
    return copy


def check_installed(site: Path, folder: Path) -> None:
    """The command, run from `folder` with the package in `site`, renders, and knows its profiles."""
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "hpc_gpt", *arguments]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import hpc_gpt; print(hpc_gpt.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", where], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    assert Path(shown.stdout.strip()).is_relative_to(site)
    assert "#SBATCH --constraint=v100-32g" in run("render", "--cluster", "jean-zay-v100-32g")
    assert run("render", "demo", "--cluster", "local").startswith("#!/bin/bash")


@pytest.mark.parametrize("kind", ["folder", "wheel"])
def test_an_installed_package_is_complete(checkout: Path, tmp_path: Path, kind: str) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    source = checkout
    if kind == "wheel":
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(checkout))
        (source,) = tmp_path.glob("hpc_gpt-*.whl")
    pip("install", "--no-deps", "--no-build-isolation", "--target", str(site), str(source))
    check_installed(site, elsewhere)


def test_an_editable_install_finds_what_stands_beside_it(checkout: Path, tmp_path: Path) -> None:
    """What an editable install amounts to: the package on the path, its files at the top of the checkout."""
    check_installed(checkout, tmp_path)
