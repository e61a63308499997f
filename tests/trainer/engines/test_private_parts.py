"""Each private name of torch and DeepSpeed, taken away in turn, is refused with the version to install."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpc_gpt
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.trainer.engines import library_patches
from hpc_gpt.trainer.engines import private_parts as parts
from hpc_gpt.trainer.engines.deepspeed_3d import Deepspeed3D
from hpc_gpt.trainer.engines.deepspeed_zero import DeepspeedZero
from hpc_gpt.trainer.engines.private_parts import NEWEST, STATES, TESTED, Use, check_version, require
from tests.conftest import REPOSITORY

USES = [use for use in (*vars(parts).values(), *STATES.values()) if isinstance(use, Use)]
NAMES = [(use, name) for use in USES for name in use.names]
# Private names that are not torch's or DeepSpeed's: of our own classes, of the standard library, of transformers.
OURS = {"_attn_implementation", "_current_frames", "_exit", "_experts_implementation", "_replace"}


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    check_version.cache_clear()
    yield
    check_version.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def _deepspeed() -> None:
    """DeepSpeed's version is that of the package if it is imported."""
    from hpc_gpt.trainer.engines.deepspeed_setup import import_deepspeed

    import_deepspeed(torch.device("cpu"))


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As if a newer or older package had another name for it."""
    is_there = parts._is_there
    monkeypatch.setattr(parts, "_is_there", lambda one: one != name and is_there(one))


def test_everything_is_there_in_the_tested_versions(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    assert {name: tested[name] for name in TESTED} == TESTED
    for use in USES:
        require(use)
    for package in TESTED:
        check_version(package)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("use", "name"), NAMES, ids=[f"{use.purpose}: {name}" for use, name in NAMES])
def test_without_a_name_it_is_refused(monkeypatch, use, name):
    hide(monkeypatch, name)
    with pytest.raises(
        ConfigError, match=rf"{use.package} {re.escape(TESTED[use.package])}\S* lacks {name}"
    ) as refused:
        require(use)
    assert refused.value.hint == f"install the tested version: pip install '{use.package}=={TESTED[use.package]}'"


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("2.13.0+cu130", False), ("2.11.0", False), ("2.13.1", False), ("2.14.0a0+git1", True), ("3.0", True),
        ("2.9.1", False),
    ],
)  # fmt: skip
def test_a_newer_version_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: Any, version: str, newer: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setitem(NEWEST, "torch", "2.13")
    for _ in range(2):
        check_version("torch")
    said = f"note: torch {version} is newer than 2.13, the newest tested\n"
    assert capsys.readouterr().err == (said if newer else "")


def test_a_fused_kernel_that_no_longer_listens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes that are assigned under an old name are no error: it is tried what they do."""
    import torch.optim.adam as module

    adam = module.adam
    monkeypatch.setattr(module, "adam", lambda *words, found_inf=None, **more: adam(*words, found_inf=None, **more))
    with pytest.raises(ConfigError, match="fused optimizers that clip or skip a step on the device"):
        require(parts.FUSED)


@pytest.mark.parametrize("engine", [DeepspeedZero, Deepspeed3D])
def test_a_step_lists_the_replaced_parts_that_are_there(engine: type) -> None:
    listed = re.findall(r"^ +- `(\w+)`", engine.train_step.__doc__, re.MULTILINE)
    assert "skip_gradient_average" in listed
    assert [name for name in listed if not hasattr(library_patches, name)] == []


def test_no_module_touches_a_private_name_that_is_not_listed() -> None:
    """Of anything but `self`, and of nothing that our own classes define."""
    listed = {part for use in USES for name in use.names for part in name.split(".")}
    own, touched = set(OURS), {}
    for path in PACKAGE.glob("trainer/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    own.add(node.attr)
                else:
                    touched.setdefault(node.attr, path.name)
    assert {name: file for name, file in touched.items() if name not in own | listed} == {}


PACKAGE = Path(hpc_gpt.__file__).parent
