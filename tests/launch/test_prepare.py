"""The one preparation of a run: each experiment is resolved once, a length by --until is as one that a file states."""

from collections.abc import Callable
from typing import Any

import pytest

from hpc_gpt.errors import ConfigError
from hpc_gpt.launch.prepare import finish, lengthen, load_row, prepare
from hpc_gpt.launch.request import Request
from hpc_gpt.launch.until import Until
from hpc_gpt.settings import resolve as resolving
from hpc_gpt.settings.batch import Batch
from hpc_gpt.settings.cluster import load_profile
from hpc_gpt.settings.experiment_file import cut_warmup, load_experiment, read_experiment
from hpc_gpt.settings.resolve import resolve


def asked(experiment: str = "demo", cluster: str = "generic-slurm", **more: Any) -> Request:
    return Request(experiment, cluster, None, more.pop("overrides", {}), **more)


@pytest.fixture
def resolutions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engine of each experiment that is resolved."""
    found: list[str] = []
    real: Callable[..., Any] = resolving._resolve_layout

    def counted(layout: Any, engine: Any, *more: Any) -> Any:
        found.append(engine.name)
        return real(layout, engine, *more)

    monkeypatch.setattr(resolving, "_resolve_layout", counted)
    return found


@pytest.mark.parametrize(
    ("request_", "times"),
    [
        (asked(), 1),
        (asked(cluster="a100-80g-8"), 1),
        (asked(until=Until(steps=7)), 1),
        (asked(until=Until(tokens=10**6, loss=2.0)), 1),
        (asked(smoke=True), 2),  # at full size, and small
        (asked("gpt2-meg-ds-3d", "jean-zay-v100-32g", overrides={"engine.recompute": None}), 1),
        (asked("gpt2-meg-ds-3d", "a100-80g-8", overrides={"model.preset": "gpt2-xl"}, names_experiment=False), 1),
    ],
    ids=["rules", "planned and as good", "until steps", "until tokens", "smoke", "from plan", "defaults"],
)
def test_each_experiment_is_resolved_once(resolutions, request_, times):
    prepared = prepare(request_)
    assert len(resolutions) == times
    assert any("from plan: " in note for note in prepared.notes) == (request_.experiment != "demo")


def test_the_plan_keeps_every_size_of_the_batch_that_is_given():
    """With micro_batches given the micro-batch is the rules', or the plan would change micro_batches with it."""
    overrides = {"model.preset": "gpt2-xl", "layout.gpus": 16, "layout.micro_batches": 4}
    batch = prepare(asked("gpt2-meg-ds-3d", "a100-80g-8", overrides=overrides, names_experiment=False)).resolved.batch
    assert batch == Batch(micro_batch=1, micro_batches=4, global_batch=64)


@pytest.mark.parametrize("steps", [5, 21, 300])
@pytest.mark.parametrize("engine", ["deepspeed-3d", "megatron-lm"])
def test_a_length_by_until_is_as_one_in_the_file(steps, engine):
    """A warm-up of 20 steps is cut to it, and to no other length on the way."""
    file, profile = read_experiment("demo"), load_profile("generic-slurm")
    overrides = {"engine.name": engine, "layout.gpus": 1, "layout.tp": 1, "layout.pp": 1, "engine.zero_stage": None}
    experiment = load_row(file, overrides, None, steps_elsewhere=True)
    resolved = resolve(cut_warmup(experiment)[0], profile)
    resolved, notes = lengthen(resolved, experiment, Until(steps=steps), {})
    stated, cut = cut_warmup(load_experiment(file, overrides | {"train.steps": steps}))
    assert resolved == resolve(stated, profile)
    assert notes == (f"until: {Until(steps=steps).words(resolved.batch, resolved.model.seq)}", *cut)


def test_what_resolve_refuses_of_a_length_is_refused_of_until():
    experiment = load_experiment("demo", {"engine.name": "megatron-lm", "engine.zero_stage": None})
    with pytest.raises(ConfigError, match="Megatron-LM stops at a step, not at a loss"):
        lengthen(resolve(experiment, load_profile("generic-slurm")), experiment, Until(loss=2.0), {})


def test_two_sizes_of_a_batch_win_over_the_third_that_the_file_states():
    file = read_experiment("gpt2-meg-ds-3d")
    stated = {"layout.micro_batch": 4, "layout.micro_batches": 256, "layout.global_batch": 1024}
    file = type(file)(file.path, file.text, file.overridden(stated, None), None, file.stated)
    assert load_row(file, {"layout.micro_batches": 8}, None).layout.global_batch is None
    assert load_row(file, {"layout.global_batch": 512}, None).layout.micro_batches is None
    own = load_row(file, {"layout.micro_batch": 2}, None).layout
    assert (own.micro_batch, own.micro_batches, own.global_batch) == (2, 256, 1024)
    assert load_row(file, {"layout.micro_batch": 2}, None, batch_follows=True).layout.global_batch is None


def test_what_is_ready_has_its_script_and_its_prediction():
    profile = load_profile("a100-80g-8")
    resolved = resolve(load_experiment("demo"), profile)
    prepared = finish(resolved, profile, "name = 'demo'\n", ("a note",))
    assert prepared.resolved is resolved
    assert prepared.messages[0] == "a note"
    assert prepared.messages[1].startswith("predicted: ")
    assert resolved.to_json() in prepared.script
    assert prepared.jobs == 1
