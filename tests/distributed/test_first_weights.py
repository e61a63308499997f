"""The weights with which a training begins: in fp32 in every engine, whatever the dtype of its forward pass."""

import json

import pytest

from hpc_gpt.core.weights.tensors import write_hf
from tests import marked
from tests.distributed.equality_cases import Case
from tests.distributed.first_weights_worker import ALL_CASES, DP, GIVEN_SEED, SHORT, expected, name_of, stored
from tests.distributed.ranks import launch_ranks

pytestmark = pytest.mark.xdist_group("first-weights")
pytest.importorskip("transformers")
LONG = [name_of(*case) for case in ALL_CASES if case not in SHORT]
NAMES = [name_of(*case) for case in ALL_CASES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    made = tmp_path_factory.mktemp("first")
    for model in ("llama", "gpt2"):
        shape = Case(DP, tied=model == "gpt2", model=model).resolved.model
        weights = expected(model, GIVEN_SEED).items()
        write_hf(shape, ((name, stored(name, weight)) for name, weight in weights), made / model)
    launch_ranks("tests.distributed.first_weights_worker", 2, made / "found")
    kept: dict[str, list[str]] = json.loads((made / "found" / "found.json").read_text())
    return kept


@pytest.mark.parametrize("name", marked(NAMES, LONG))
def test_a_step_at_a_rate_of_zero_keeps_every_bit(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == []
