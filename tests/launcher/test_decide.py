"""The one preparation of a run: after the last resolve nothing changes, a length by --until is as one in a file."""

from collections.abc import Callable
from typing import Any

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment, read_experiment
from hpc_gpt.core.settings.stored import experiment_of
from hpc_gpt.launcher import decide as preparing
from hpc_gpt.launcher.decide import load_row, prepare
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.request import Request, ScriptRequest
from hpc_gpt.launcher.until import Until


def asked(experiment: str = "demo", cluster: str = "generic-slurm", **more: Any) -> Request:
    return Request(experiment, cluster, None, more.pop("overrides", {}), **more)


@pytest.mark.parametrize(
    "request_",
    [
        asked(),
        asked(until=Until(steps=7)),
        asked(until=Until(tokens=10**6, loss=2.0), overrides={"job.max_gpu_hours": 10.0}),
        asked("gpt2-meg-ds-3d", "jean-zay-v100-32g", overrides={"engine.recompute": None}),
        asked("memory-ladder", "jean-zay-v100-32g"),
    ],
    ids=["rules", "until steps", "until tokens", "from plan", "row"],
)
def test_a_run_is_read_once_sized_twice_and_made_once(monkeypatch, request_):
    calls: list[tuple[str, Any]] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:
            calls.append((function.__name__, function(*words, **more)))
            return calls[-1][1]

        return call

    for name in ("load_experiment", "size_run", "PreparedRun"):
        monkeypatch.setattr(preparing, name, noted(getattr(preparing, name)))
    prepared = prepare(request_)
    assert [name for name, _ in calls] == ["load_experiment", "size_run", "size_run", "PreparedRun"]
    assert prepared is calls[-1][1]
    assert prepared.resolved == resolve(experiment_of(prepared.resolved), prepared.resolved.cluster, *row_of(prepared))
    assert any("from plan: " in note for note in prepared.notes) == (request_.experiment == "gpt2-meg-ds-3d")


def row_of(prepared: PreparedRun) -> tuple[str | None, str | None]:
    return prepared.resolved.sweep, prepared.resolved.row


def test_the_file_made_of_a_run_without_one_is_that_run(tmp_path):
    """Also where its forecast has decided the signal's lead."""
    asks = {"model.preset": "7.5b", "layout.gpus": 64, "job.time": "20:00:00"}
    request = asked("gpt2-meg-ds-3d", "a100-80g-8", overrides=asks, names_experiment=False, until=Until(steps=5000))
    prepared = prepare(request)
    (path := tmp_path / "made.toml").write_text(prepared.text)
    profile = load_profile("a100-80g-8")
    assert resolve(load_experiment(str(path)), profile) == prepared.resolved
    assert prepared.resolved.job.signal_lead_s != profile.signal_lead_s


def test_a_job_script_is_what_it_resolves_to(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\n#SBATCH --nodes=2 --time=00:01:00 --gres=gpu:4 -A mine\nsrun ./train\n")
    run = prepare(asked(cluster="jean-zay-v100-32g", script=ScriptRequest(path))).resolved
    assert run.job.signal_lead_s is None  # so short a job has no time for a signal
    assert resolve(experiment_of(run), run.cluster, script=run.script) == run


def test_the_plan_keeps_every_size_of_the_batch_that_is_given():
    """With micro_batches given the micro-batch is the rules', or the plan would change micro_batches with it."""
    overrides = {"model.preset": "gpt2-xl", "layout.gpus": 16, "layout.micro_batches": 4}
    batch = prepare(asked("gpt2-meg-ds-3d", "a100-80g-8", overrides=overrides, names_experiment=False)).resolved.batch
    assert (batch.micro_batches, batch.global_batch) == (4, 64)


@pytest.mark.parametrize(("engine", "steps"), [("deepspeed-3d", 5), ("megatron-lm", 300)])
def test_a_length_by_until_is_as_one_in_the_file(engine, steps):
    """A warm-up of 20 steps is cut to it, and to no other length on the way."""
    sizes = {"layout.gpus": 1, "layout.tp": 1, "layout.pp": 1, "engine.zero_stage": None, "train.save_every": 2}
    overrides = {"engine.name": engine, **sizes}
    by_until = prepare(asked(overrides=overrides, until=Until(steps=steps)))
    in_file = prepare(asked(overrides=overrides | {"train.steps": steps}, until=Until()))
    assert by_until.resolved.train == in_file.resolved.train
    resolved = by_until.resolved
    assert list(by_until.notes) == [*Until(steps=steps).notes(resolved.batch, resolved.model.seq), *in_file.notes]


def test_two_sizes_of_a_batch_win_over_the_files_third():
    file = read_experiment("gpt2-meg-ds-3d")
    stated = {"layout.micro_batch": 4, "layout.micro_batches": 256, "layout.global_batch": 1024}
    file = type(file)(file.path, file.text, file.overridden(stated, None), None, file.stated)
    assert load_row(file, {"layout.micro_batches": 8}, None).layout.global_batch is None
    assert load_row(file, {"layout.global_batch": 512}, None).layout.micro_batches is None
    own = load_row(file, {"layout.micro_batch": 2}, None).layout
    assert (own.micro_batch, own.micro_batches, own.global_batch) == (2, 256, 1024)
