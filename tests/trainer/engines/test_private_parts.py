"""Each private name of torch and DeepSpeed, taken away in turn: one line says it, and the plain path gives the same."""

import ast
import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpc_gpt
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines import library_patches
from hpc_gpt.trainer.engines import private_parts as parts
from hpc_gpt.trainer.engines.deepspeed_3d import Deepspeed3D
from hpc_gpt.trainer.engines.deepspeed_zero import DeepspeedZero
from hpc_gpt.trainer.engines.optimizer import is_fused
from hpc_gpt.trainer.engines.private_parts import NEWEST, STATES, TESTED, Use, can_use, require
from hpc_gpt.trainer.engines.torch_private import for_each
from tests import marked
from tests.chosen import asked
from tests.conftest import REPOSITORY
from tests.distributed.equality_cases import CLIP, Case, micro_batches
from tests.distributed.ranks import run_together
from tests.distributed.trainings import build, train

USES = [use for use in (*vars(parts).values(), *STATES.values()) if isinstance(use, Use)]
OPTIONAL, REQUIRED = [use for use in USES if use.plain], [use for use in USES if not use.plain]
NAMES = [(use, name) for use in OPTIONAL for name in use.names]
NEEDED = [(use, name) for use in REQUIRED for name in use.names]
# Private names that are not torch's or DeepSpeed's: of our own classes, of the standard library, of transformers.
OURS = {"_attn_implementation", "_current_frames", "_exit", "_replace"}


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    can_use.cache_clear()
    yield
    can_use.cache_clear()


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
    assert all(can_use(use) for use in OPTIONAL)
    for use in REQUIRED:
        require(use)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("use", "name"), NAMES, ids=[name for _, name in NAMES])
def test_without_a_name_a_line_says_which_plain_path_is_taken(monkeypatch, capsys, use, name):
    hide(monkeypatch, name)
    assert [can_use(use), can_use(use)] == [False, False]
    [line] = capsys.readouterr().err.splitlines()
    version = sys.modules[use.package].__version__
    assert line.startswith(f"note: {use.purpose}: {use.package} {version}")
    assert f"lacks {name}" in line or (use is parts.FUSED and name in line)
    assert line.endswith(f"; plain path: {use.plain}")


@pytest.mark.parametrize(("use", "name"), NEEDED, ids=[f"{use.purpose}: {name}" for use, name in NEEDED])
def test_without_a_name_that_has_no_plain_path_it_is_refused(monkeypatch, use, name):
    hide(monkeypatch, name)
    with pytest.raises(
        ConfigError, match=rf"{use.package} {re.escape(TESTED[use.package])}\S* lacks {name}"
    ) as refused:
        require(use)
    assert refused.value.hint == f"install the tested version: pip install '{use.package}=={TESTED[use.package]}'"


@pytest.mark.parametrize("use", OPTIONAL, ids=lambda use: use.purpose)
def test_a_newer_version_takes_the_plain_path_and_says_so(monkeypatch, capsys, use):
    monkeypatch.setitem(NEWEST, use.package, "0.1.9")
    assert not can_use(use)
    [line] = capsys.readouterr().err.splitlines()
    assert "is newer than 0.1.9, the newest tested" in line
    assert use.names[0] in line


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("2.13.0+cu130", False), ("2.11.0", False), ("2.13.1", False), ("2.14.0a0+git1", True), ("3.0", True),
        ("2.9.1", False),
    ],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers(monkeypatch: pytest.MonkeyPatch, version: str, newer: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setitem(NEWEST, "torch", "2.13")
    assert can_use(parts.FOREACH) is not newer


def test_a_fused_kernel_that_no_longer_listens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes that are assigned under an old name are no error: it is tried what they do."""
    step = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True).step
    assert is_fused(step.__self__)
    can_use.cache_clear()
    import torch.optim.adam as module

    adam = module.adam
    monkeypatch.setattr(module, "adam", lambda *words, found_inf=None, **more: adam(*words, found_inf=None, **more))
    assert not is_fused(step.__self__)


@pytest.mark.parametrize("engine", [DeepspeedZero, Deepspeed3D])
def test_a_step_lists_the_replaced_parts_that_are_there(engine: type) -> None:
    listed = re.findall(r"^ +- `(\w+)`", engine.train_step.__doc__, re.MULTILINE)
    assert "average_nothing" in listed
    assert [name for name in listed if not hasattr(library_patches, name)] == []


def test_the_plain_operations_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensors(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(size, generator=generator) for size in ((3, 4), (7,))]

    def all_of_them() -> list[Tensor]:
        own = tensors(1)
        norms = for_each("norm", own)
        for_each("add_", own, tensors(2))
        for_each("div_", own, torch.tensor(3.0))
        copies = tensors(3)
        for_each("copy_", copies, own)
        for_each("zero_", own)
        return [*norms, *copies, *own]

    fast = all_of_them()
    hide(monkeypatch, "torch._foreach_norm")
    can_use.cache_clear()
    for one, other in zip(fast, all_of_them(), strict=True):
        torch.testing.assert_close(one, other)


def test_no_module_touches_a_private_name_that_is_not_listed() -> None:
    """Of anything but `self`, and of nothing that our own classes define."""
    listed = {part for use in USES for name in use.names for part in name.split(".")}
    own, touched = set(OURS), {}
    for path in [*PACKAGE.glob("train/**/*.py"), *PACKAGE.glob("model/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    own.add(node.attr)
                else:
                    touched.setdefault(re.sub(r"^_DeepSpeed\w+?__", "__", node.attr), path.name)
    assert {name: file for name, file in touched.items() if name not in own | listed} == {}


PACKAGE = Path(hpc_gpt.__file__).parent


STEPS = 4
_TORCH = (parts.FUSED, parts.FOREACH)
_ZERO = Engine("deepspeed-zero", 3)
# Name: engine, dtype, and the uses that it has.
CASES: dict[str, tuple[Engine, str, tuple[Use, ...]]] = {
    "ddp fp32": (Engine("ddp"), "fp32", _TORCH),
    "ddp bf16": (Engine("ddp"), "bf16", _TORCH),
    "zero 0": (Engine("deepspeed-zero", 0), "fp32", (*_TORCH, parts.NO_REDUCTION)),
    "zero 3": (_ZERO, "fp32", (parts.BUILT_IN_PARTS,)),
    "zero 3 bf16": (_ZERO, "bf16", (parts.BUILT_IN_PARTS,)),
    "3d": (Engine("deepspeed-3d", 1), "bf16", (parts.LOGITS, parts.NO_REDUCTION)),
}
# Each use at least once in every run of the tests.
SHORT = ("ddp fp32", "zero 3", "3d")


def train_here(settings: Resolved) -> dict[str, Any]:
    """Losses and norms of the steps, and what was printed on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        engine = build(settings)
        losses, norms, _ = zip(*train(engine, settings, range(STEPS)), strict=True)
        engine.evaluate(iter(micro_batches(settings, 0, STEPS)), 2)
    return {"losses": losses, "norms": norms, "said": said.getvalue()}


def train_without(use: Use, settings: Resolved) -> dict[str, Any]:
    """The same with the first of the use's names gone."""
    is_there = parts._is_there
    parts._is_there = lambda name: name != use.names[0] and is_there(name)
    parts.can_use.cache_clear()
    try:
        return train_here(settings)
    finally:
        parts._is_there = is_there
        parts.can_use.cache_clear()


def train_each_way(folder: Path, *names: str) -> dict[str, Any]:
    """What a training of each kind gives, as it is and with each use in turn that has no names."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        engine, dtype, uses = CASES[name]
        resolved = Case(Layout(1, 1, 1), engine, dtype, CLIP).resolved
        without_uses = {use.purpose: train_without(use, resolved) for use in uses}
        found[name] = {"usual": train_here(resolved)} | without_uses
    return found


@pytest.fixture(scope="module")
def plain_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, names = tmp_path_factory.mktemp("plain-path"), asked(request, "case")
    found: dict[str, dict[str, Any]] = run_together(train_each_way, 1, folder, *names)
    return found


def test_what_is_always_dropped_is_dropped_in_every_test_run() -> None:
    assert {use for name in SHORT for use in CASES[name][2]} == {use for case in CASES.values() for use in case[2]}


@pytest.mark.xdist_group("private-parts")
@pytest.mark.parametrize("case", marked(CASES, [name for name in CASES if name not in SHORT]))
def test_training_on_the_plain_path_gives_the_same_losses(plain_runs: dict[str, Any], case: str) -> None:
    found = plain_runs[case]
    assert found["usual"]["said"] == ""
    assert set(found) == {"usual", *(use.purpose for use in CASES[case][2])}
    # A norm whose last digit differs can round a 16-bit weight otherwise; which one, the processor decides.
    loss, norm = (2e-5, 2e-4) if CASES[case][1] == "bf16" else (2e-6, 1e-5)
    for purpose, run in found.items():
        assert run["losses"] == pytest.approx(found["usual"]["losses"], abs=loss), purpose
        assert run["norms"] == pytest.approx(found["usual"]["norms"], rel=norm), purpose
        assert (purpose == "usual") or purpose in run["said"]
