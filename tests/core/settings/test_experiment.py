"""The rules of each key: may a resumed run change it, does config_hash hold it, is it a count or of one site?"""

from dataclasses import dataclass, replace

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.key_rules import key, key_rules
from hpc_gpt.core.settings.resolved import Resolved, config_hash, speed_hash
from hpc_gpt.launcher.descent import check_same_training


@dataclass(frozen=True)
class LongerTrain(Train):
    """[train] as a later version may have it."""

    new_speed: int = key(0, resume="never", affects=("speed",), least=0)
    new_schedule: int = key(0, resume="free", affects=("schedule",))
    new_nothing: int = key(0, resume="free", affects=())


def run() -> Resolved:
    small = Model(hidden=64, layers=2, heads=4)
    resolved = resolve(
        Experiment(model=small, layout=LayoutRequest(gpus=1), engine=Engine("ddp")), load_profile("local")
    )
    return replace(resolved, train=LongerTrain(**vars(resolved.train)))


def test_the_hashes_hold_what_decides_weights_and_speed():
    before = run()
    for name, rules in key_rules(LongerTrain).items():
        after = replace(before, train=replace(before.train, **{name: "another"}))
        assert (config_hash(before) != config_hash(after)) == (rules.affects != ()), name
        assert (speed_hash(before) != speed_hash(after)) == (rules.affects == ("speed",)), name


def test_a_resumed_run_may_change_what_is_free():
    before = run()
    for name, rules in key_rules(LongerTrain).items():
        after = replace(before, train=replace(before.train, **{name: "another"}))
        if rules.resume == "free":
            check_same_training(before, after)
            continue
        with pytest.raises(ConfigError, match=rf"^train\.{name} would be another, but is .* in the checkpoint's run$"):
            check_same_training(before, after)


def test_config_hash_is_as_it_was_when_runs_were_first_compared():
    resolved = resolve(
        Experiment(model=Model(preset="gpt2"), layout=LayoutRequest(gpus=4, tp=4)), load_profile("generic-slurm")
    )
    assert config_hash(resolved) == "c1c33c234e104edc"
    assert config_hash(replace(resolved, train=replace(resolved.train, log_every=1))) == "c1c33c234e104edc"
    assert config_hash(replace(resolved, train=replace(resolved.train, lr=1.0))) != "c1c33c234e104edc"
