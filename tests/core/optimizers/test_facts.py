"""Each optimizer's facts agree with its trainer and with the keys of [train]."""

from pathlib import Path

import pytest

import hpc_gpt
from hpc_gpt.core.keys import keys_of
from hpc_gpt.core.optimizers import OptimizerFacts, optimizer_named
from hpc_gpt.core.settings.experiment import Experiment, Train
from hpc_gpt.core.settings.key_rules import key_rules
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.services import OPTIMIZER_NAMES
from hpc_gpt.core.settings.shape_split import hidden_share

EACH = pytest.mark.parametrize("facts", map(optimizer_named, OPTIMIZER_NAMES), ids=OPTIMIZER_NAMES)


@EACH
def test_a_module_trains_and_its_keys_are_keys(facts: OptimizerFacts) -> None:
    (choices,) = (key.choices for key in keys_of(Experiment) if key.name == "train.optimizer")
    assert facts.name in choices
    assert (Path(hpc_gpt.__file__).parent / f"trainer/optimizers/{facts.name.replace('-', '_')}.py").is_file()
    assert facts.keys <= key_rules(Train).keys()
    own = facts.keys - optimizer_named("adamw").keys  # which are refused beside another optimizer; others get a note
    assert {key.partition("_")[0] for key in own} <= {facts.name}


# Of AdamW's parameters and of hidden matrices, fused and foreach.
MOVED = {"adamw": [38, 38, 90, 90], "sgd": [22, 22, 22, 22], "muon": [38, 60, 90, 60]}


@pytest.mark.parametrize("name", MOVED)
def test_the_bytes_that_an_update_moves(name: str) -> None:
    found = [optimizer_named(name).moved_bytes(mode, hidden) for mode in ("fused", "foreach") for hidden in (0.0, 1.0)]
    assert found == MOVED[name]


@pytest.mark.parametrize(("name", "held"), [("adamw", 8 * 23 + 8 * 77), ("sgd", 0), ("muon", 8 * 23 + 4 * 77)])
def test_the_states_of_hidden_matrices_and_of_all_else(name: str, held: int) -> None:
    assert optimizer_named(name).moment_bytes(0.77) == pytest.approx(held / 100)


def test_hidden_matrices_are_those_of_layers_without_routers() -> None:
    gpt2, mixture = preset("gpt2"), preset("qwen3-30b-a3b")
    assert hidden_share(gpt2) == 12 * 12 * 768**2 / gpt2.params
    experts = 48 * 128 * 3 * 2048 * 768
    attention = 48 * 2 * 2048 * (32 + 4) * 128
    assert hidden_share(mixture, of_experts=True) == 1
    assert hidden_share(mixture, of_experts=False) == attention / (mixture.params - experts)
    assert hidden_share(mixture) == (attention + experts) / mixture.params
