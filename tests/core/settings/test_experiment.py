"""The rules of each key: may a resumed run change it, does config_hash hold it, is it a count or of one site?"""

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from hpc_gpt.core.engines import engines
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.lineage import check_same_training
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment import Engine, Experiment, Job, LayoutRequest, Model, Train
from hpc_gpt.core.settings.key_rules import key, key_rules
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.settings.resolved import Resolved, config_hash, speed_hash

TABLES: dict[str, Any] = {entry.name: entry.default_factory for entry in fields(Experiment) if entry.name != "name"}


@dataclass(frozen=True)
class LongerTrain(Train):
    """[train] as a later version may have it."""

    new_speed: int = key(0, resume="never", affects=("speed",), least=0)
    new_schedule: int = key(0, resume="free", affects=("schedule",))
    new_nothing: int = key(0, resume="free", affects=())


def run(**train: Any) -> Resolved:
    small = Model(hidden=64, layers=2, heads=4)
    resolved = resolve(
        Experiment(model=small, layout=LayoutRequest(gpus=1), engine=Engine("ddp")), load_profile("local")
    )
    return replace(resolved, train=LongerTrain(**(vars(resolved.train) | train)))


@pytest.mark.parametrize("name", TABLES)
def test_each_key_of_each_table_has_its_rules(name):
    found = key_rules(TABLES[name])
    assert list(found) == [entry.name for entry in fields(TABLES[name])]
    for rules in found.values():
        assert rules.resume in ("never", "converted", "free")
        assert rules.affects in (("speed",), ("schedule",), ())
        assert rules.site_may_set is False or TABLES[name] is Job


def test_every_key_that_a_checkpoint_is_converted_in_says_so():
    converted = {
        f"{table}.{name}"
        for table, kind in TABLES.items()
        for name, rules in key_rules(kind).items()
        if rules.resume == "converted"
    }
    assert set().union(*(facts.converts for facts in engines().values())) | {"engine.name"} == converted


@pytest.mark.parametrize("name", [entry.name for entry in fields(LongerTrain)])
def test_the_hashes_hold_what_decides_weights_and_speed(name):
    before, rules = run(), key_rules(LongerTrain)[name]
    after = run(**{name: "another"})
    assert (config_hash(before) != config_hash(after)) == (rules.affects != ())
    assert (speed_hash(before) != speed_hash(after)) == (rules.affects == ("speed",))


@pytest.mark.parametrize("name", [entry.name for entry in fields(LongerTrain)])
def test_a_resumed_run_may_change_what_is_free(name):
    before, after = run(), run(**{name: "another"})
    if key_rules(LongerTrain)[name].resume == "free":
        check_same_training(before, after)
    else:
        with pytest.raises(ConfigError, match=rf"^train\.{name} would be another, but is .* in the checkpoint's run$"):
            check_same_training(before, after)


def test_config_hash_is_as_it_was_when_runs_were_first_compared():
    resolved = resolve(
        Experiment(model=Model(preset="gpt2"), layout=LayoutRequest(gpus=4, tp=4)), load_profile("generic-slurm")
    )
    assert config_hash(resolved) == "a72584cdb5af99e2"
    assert config_hash(replace(resolved, train=replace(resolved.train, log_every=1))) == "a72584cdb5af99e2"
    assert config_hash(replace(resolved, train=replace(resolved.train, lr=1.0))) != "a72584cdb5af99e2"
