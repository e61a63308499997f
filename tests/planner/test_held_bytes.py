"""What `plan` says is allocated, beside what one rank of every kind really holds on a CPU: every byte counted."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.planner.memory import StageMemory, predict_memory
from hpc_gpt.planner.training import training_of
from tests import marked
from tests.chosen import asked
from tests.planner.held_bytes import ALL, CASES, HAS_COMPILER, INDUCTOR, LOGITS, OFFLOADED, TOO_LONG

pytestmark = [pytest.mark.xdist_group("held-bytes"), pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
NEED_COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here, which Inductor needs on a CPU")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A file for each case that this session's tests read: one launch."""
    folder = tmp_path_factory.mktemp("held")
    cases = [name for name in asked(request, "name") if name in ALL]
    words = [sys.executable, "-m", "tests.planner.held_bytes", str(folder), *cases]
    subprocess.run(words, check=True, capture_output=True, cwd=ROOT)
    return folder


def long(names: Iterable[str]) -> list[Any]:
    return marked(names, [name for name in names if name in TOO_LONG])


def predicted(resolved: Resolved) -> StageMemory:
    return predict_memory(training_of(resolved)).stages[0]


@pytest.mark.parametrize("name", long(CASES))
def test_the_peak_is_what_is_allocated(name: str, held: Path) -> None:
    """Within what the activations of one layer make of so small a model."""
    found = json.loads((held / name).read_text())
    assert predicted(CASES[name]).allocated * 2**30 == pytest.approx(found["peak"], rel=0.02)


@pytest.mark.long
@NEED_COMPILER
def test_a_kept_residual_replaces_what_it_is_the_sum_of() -> None:
    """What two compiled layers keep is the same with it and without, and what `plan` counts."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.planner.kept_by_layers"], check=True, capture_output=True, cwd=ROOT, text=True
    )
    without, kept, planned = json.loads(done.stdout)
    assert without == kept == planned


@pytest.mark.parametrize("name", long(OFFLOADED))
def test_what_is_offloaded_is_the_host_and_the_rest(name: str, held: Path) -> None:
    """On a CPU both are the host's."""
    found = json.loads((held / name).read_text())
    stage = predicted(OFFLOADED[name])
    assert (stage.allocated + stage.host) * 2**30 == pytest.approx(found["peak"], rel=0.02)


@pytest.mark.parametrize(
    "name", [*long(LOGITS), *(pytest.param(name, marks=[NEED_COMPILER, pytest.mark.long]) for name in INDUCTOR)]
)
def test_a_loss_and_its_evaluation_are_what_is_allocated(name: str, held: Path) -> None:
    """Each engine, each kind of loss; the evaluation is never the peak."""
    found, stage = json.loads((held / name).read_text()), predicted((LOGITS | INDUCTOR)[name])
    assert stage.moment == "backward pass"
    assert stage.allocated * 2**30 == pytest.approx(found["peak"], rel=0.02)
    assert stage.evaluation * 2**30 == pytest.approx(found["evaluation"], rel=0.02)
    assert found["evaluation"] <= found["peak"]
