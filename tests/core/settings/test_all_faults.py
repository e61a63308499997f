"""All faults of an experiment are found at once, each by its own keys; what only follows from another is left out.

What a command prints of several faults is in tests/cli/refused/many.txt."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError, Fault, LayoutError, UserError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import size_run
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.rules import TABLES, keys_of
from hpc_gpt.core.settings.sweep_rows import faults_of_rows

PROFILE = ClusterProfile(name="four")
SOUND = {"train.decay": "wsd", "notify.command": "x", "track.wandb": "gpt"}
# {key: a value that it cannot have}; an unknown key of each table, and every number with bounds.
WRONG: dict[str, Any] = {
    "model.layers": 0, "model.heads": "x", "model.positions": "y", "data.source": "x", "data.eval_fraction": 2.0,
    "engine.recompute": "some", "layout.micro_batch": 0, "layout.dp": -1, "track.wandb": "yes",
    "notify.on": ["never"], "plan.like": "x",
    **{f"{table}.nosuch": 1 for table in TABLES},
    **{f"{table}.{name}": float("inf") if rules.least is None else rules.least - 1
       for table in ("train", "data", "job", "notify")
       for name, rules in TABLES[table].items() if (rules.least, rules.above, rules.below) != (None, None, None)},
}  # fmt: skip


def faults_of(keys: dict[str, Any], profile: ClusterProfile = PROFILE) -> list[Fault]:
    found: list[Fault] = []
    experiment = load_experiment("demo", {**SOUND, **keys}, faults=found)
    try:
        size_run(experiment, profile, faults=found)
    except UserError as error:
        return list(error.faults)
    return []


@pytest.mark.parametrize("key", WRONG)
def test_a_faulty_key_is_named_alone(key: str) -> None:
    assert [keys_of(fault) for fault in faults_of({key: WRONG[key]})] == [(key,)]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([*itertools.combinations(WRONG, 2)]))
def test_of_two_faulty_keys_both_are_named(pair: tuple[str, str]) -> None:
    named = [key for fault in faults_of({key: WRONG[key] for key in pair}) for key in keys_of(fault)]
    assert sorted(named) == sorted(pair)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        # the heads decide whether tp divides them
        ({"model.heads": 0, "layout.tp": 3, "layout.gpus": 3, "layout.pp": 1}, ["model.heads"]),
        # the batch is not tried without its sizes
        ({"layout.micro_batch": 0, "layout.global_batch": 7}, ["layout.micro_batch"]),
        # no rule of an engine that does not exist
        ({"engine.name": "x", "engine.tiles": 2, "train.lr": -1.0}, ["engine.name", "train.lr"]),
        ({"train.steps": 0, "train.warmup_steps": 5}, ["train.steps"]),
        # the layout is tried with the sound keys, and its fault is the last
        ({"layout.gpus": 4, "layout.tp": 3, "train.lr": -1.0}, ["train.lr", "layout"]),
    ],
)
def test_what_follows_from_a_faulty_key_is_left_out(keys: dict[str, Any], named: list[str]) -> None:
    assert [key for fault in faults_of(keys) for key in keys_of(fault)] == named


def test_what_was_decided_is_checked_beside_other_faults() -> None:
    messages = [fault.message for fault in faults_of({"train.lr": -1.0, "engine.tiles": 2, "layout.gpus": 4})]
    assert messages == [
        "train.lr is -1.0, but must not be negative",
        "engine.tiles is 2, which engine deepspeed-3d does not have",
        "engine.tiles is 2, but only ZeRO-3 gathers weights tile by tile",
    ]


def test_a_fault_of_every_row_is_said_once() -> None:
    both, one = Fault("a is 1", "use 2"), Fault("b is 1", "use 3", keys=("b",))
    of_y: UserError = LayoutError("a is 1", "use 2", [both])
    errors = {"x": ConfigError("a is 1\nb is 1", "use 2; use 3", [both, one]), "y": of_y}
    assert faults_of_rows(errors, 2).faults == (both, one._replace(message="row 'x': b is 1"))
    assert faults_of_rows(errors, 3).faults[0].message == "rows 'x', 'y': a is 1"


# A faulty key of the layout, or none; a layout that contradicts itself, or none; a fault that no layout has a part in.
LAYOUTS = [{}, *({f"layout.{key}": 0} for key in ("tp", "pp", "dp", "gpus", "micro_batch", "global_batch"))]
CONTRADICTIONS = [{}, {"layout.gpus": 4, "layout.tp": 3}, {"layout.global_batch": 7, "layout.micro_batch": 2}]
OF_NO_LAYOUT = [
    {"engine.tiles": 2},
    {"engine.zero_stage": 3},
    {"engine.gather_blocks": 0, "train.z_loss": 0.1},
    {"engine.name": "fsdp", "engine.offload": "optimizer"},
    {"train.balance": "bias"},
]


@pytest.mark.parametrize("of_no_layout", OF_NO_LAYOUT, ids=str)
@pytest.mark.parametrize("contradiction", CONTRADICTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_user_needs_more_than_two_runs(layout, contradiction, of_no_layout) -> None:
    """Each run's faults are mended before the next: only a contradiction follows from a faulty key of the layout."""
    keys, runs = {**contradiction, **layout, **of_no_layout}, 0
    while (named := {key for fault in faults_of(keys) for key in keys_of(fault)}) and runs < 3:
        runs += 1
        # Whoever reads that a key is faulty gives it as it should be, and whoever reads of a contradiction resolves it.
        mended = layout if named & set(layout) else contradiction if "layout" in named else {}
        left = {key: value for key, value in keys.items() if key not in {*named, *mended}}
        keys = {**contradiction, **left} if mended is layout and layout else left
    assert runs <= 2
