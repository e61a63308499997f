"""Every engine answers every question so that its answers agree with each other, and with what there is."""

import ast
import configparser
import math
from dataclasses import asdict, fields, replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpc_gpt
from hpc_gpt.core.engines import engines
from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.keys import keys_of
from hpc_gpt.core.recomputation import RECOMPUTES
from hpc_gpt.core.settings.experiment import Engine, Experiment
from hpc_gpt.core.settings.services import ENGINE_NAMES
from tests.conftest import REPOSITORY
from tests.core.engines.trainings import OFFLOADS, PROGRAMS, trainings

EACH = pytest.mark.parametrize("facts", engines().values(), ids=engines())
SWITCHES = {entry.name for entry in fields(Engine)} - {"name", "zero_stage"}
CHOICES = {key.name: key.choices for key in keys_of(Experiment)}


def test_each_module_is_an_engine_with_a_place_of_its_own() -> None:
    assert set(engines()) == set(ENGINE_NAMES) == set(CHOICES["engine.name"])
    assert list(engines().values()) == sorted(engines().values(), key=lambda facts: facts.order)
    for first, second in combinations(engines().values(), 2):
        assert first.order != second.order


@EACH
def test_a_module_trains(facts: EngineFacts) -> None:
    path = Path(hpc_gpt.__file__).parents[1].joinpath(*facts.trainer.split(".")).with_suffix(".py")
    if facts.is_program:
        return
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:  # torch is not loaded
        names |= {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
        names |= {alias.asname or alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
        names |= {node.name} if isinstance(node, ast.FunctionDef) else set()
    assert "build" in names


@EACH
def test_its_switches_are_keys_and_alternatives_are_of_others(facts: EngineFacts) -> None:
    assert facts.axes <= {"tp", "pp", "cp", "ep", "etp"}
    assert facts.switches <= SWITCHES
    assert facts.alternatives.keys() <= (SWITCHES | {"zero_stage"}) - facts.switches
    assert not ("zero_stage" in facts.alternatives and facts.has_zero)
    assert all(facts.alternatives.values())
    assert set(facts.recomputes) <= set(RECOMPUTES)
    assert "none" in facts.recomputes
    assert (len(facts.recomputes) > 1) == ("recompute" in facts.switches)
    assert ("sequence_parallel" in facts.switches) <= facts.splits("tp")
    assert ("partition" in facts.switches) <= facts.splits("pp")
    assert ("tiles" in facts.switches) <= (3 in facts.zero_stages)


@EACH
def test_a_package_that_it_needs_is_an_extra(facts: EngineFacts) -> None:
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    assert all(f"\n{package}>=" in setup["options.extras_require"]["train"] for package in facts.packages)


@EACH
def test_what_it_offloads_it_has_a_switch_for(facts: EngineFacts) -> None:
    asked = [Engine(facts.name, zero_stage=stage, offload=how) for stage in facts.zero_stages for how in OFFLOADS[1:]]
    faults = [list(facts.offload_faults(each)) for each in asked]
    assert all(fault.message and fault.hint for each in faults for fault in each)
    if "offload" in facts.switches:
        assert not all(faults), "no ZeRO stage can offload anything"


@given(trainings(), st.floats(1e6, 1e11))
def test_bytes_are_numbers_and_sharding_divides_them(training: Training, params: float) -> None:
    facts = engines()[training.engine]
    training = replace(training, zero_stage=facts.stage_that_runs(training.zero_stage))
    held, matrix = facts.state_bytes(training), params / 10
    assert facts.rule(training)
    figures = [*asdict(held).values(), facts.update_bytes(training, params, matrix, 0.0), *facts.gathered(training),
               facts.buckets(training, params), facts.lasting_bucket(training)]  # fmt: skip
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures)
    assert held.host == 0
    assert facts.reduced_bytes(training) > 0
    # The weights that compute are at least 16 bits wide, and what is freed in a step was held.
    assert facts.sharding(training) in (0, 1, 2, 3)
    assert held.parameters >= 2 / (training.dp if facts.sharding(training) == 3 else 1)
    assert held.renewed <= held.step_gradients + held.gradients
    assert facts.optimizer_ranks(training) == (
        training.dp if facts.sharding(training) >= 1 or training.sharded_optimizer else 1
    )
    # With AdamW's two moments of fp32 somewhere.
    assert held.optimizer >= 8 / facts.optimizer_ranks(training)


def offloads_of(name: str) -> list[Engine]:
    """Each way in which the engine can offload."""
    facts = engines()[name]
    asked = [Engine(name, zero_stage=stage, offload=how) for stage in facts.zero_stages for how in OFFLOADS[1:]]
    return [each for each in asked if "offload" in facts.switches and not any(facts.offload_faults(each))]


@given(st.data(), trainings([name for name in engines() if offloads_of(name)]))
def test_what_is_offloaded_is_on_the_host(data: st.DataObject, training: Training) -> None:
    facts, asked = engines()[training.engine], data.draw(st.sampled_from(offloads_of(training.engine)))
    training = replace(training, zero_stage=facts.stage_that_runs(asked.zero_stage or 0))
    kept, moved = facts.state_bytes(training), facts.state_bytes(replace(training, offload=asked.offload))
    assert moved.host > 0
    assert moved.optimizer < kept.optimizer
    assert moved.parameters <= kept.parameters


@given(trainings())
def test_chunks_are_as_they_are_set(training: Training) -> None:
    facts = engines()[training.engine]
    if training.shape.layers % (training.pp * training.vp):
        training = replace(training, pp=1, vp=1)
    engine = facts.with_chunks(Engine(training.engine), training)
    assert facts.chunks(engine, training.shape.layers, training.pp) == training.vp


@given(trainings(), st.sampled_from(sorted(PROGRAMS)))
def test_another_programs_bytes_are_numbers(training: Training, name: str) -> None:
    states = PROGRAMS[name]
    figures = [*asdict(states.state_bytes(training)).values(), states.buckets(training, 1e9)]
    figures.append(states.lasting_bucket(training))
    assert states.rule(training)
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures)
