"""Each optimizer's facts agree with its trainer and with the keys of [train]."""

from pathlib import Path

import pytest

import hpc_gpt
from hpc_gpt.core.keys import keys_of
from hpc_gpt.core.optimizers import OptimizerFacts, optimizers
from hpc_gpt.core.settings.experiment import Experiment, Train
from hpc_gpt.core.settings.key_rules import key_rules

EACH = pytest.mark.parametrize("facts", optimizers().values(), ids=optimizers())


@EACH
def test_a_module_trains_and_its_keys_are_keys(facts: OptimizerFacts) -> None:
    (choices,) = (key.choices for key in keys_of(Experiment) if key.name == "train.optimizer")
    assert facts.name in choices
    assert (Path(hpc_gpt.__file__).parent / f"trainer/optimizers/{facts.name.replace('-', '_')}.py").is_file()
    assert facts.keys <= key_rules(Train).keys()


@pytest.mark.parametrize(("name", "fused", "foreach"), [("adamw", 38, 90), ("sgd", 22, 22)])
def test_the_bytes_that_an_update_moves(name: str, fused: float, foreach: float) -> None:
    facts = optimizers()[name]
    assert [facts.moved_bytes(mode) for mode in ("fused", "foreach")] == [fused, foreach]
