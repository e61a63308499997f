"""What a run that goes on from another's checkpoint keeps, what it may change, and what it is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.checkpoints.find_checkpoints import newest_step
from hpc_gpt.core.checkpoints.lineage import Parent, find_ancestors, parent_of
from hpc_gpt.core.engines import engines
from hpc_gpt.core.errors import ConfigError, LayoutError, RunFolderError, UserError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.run_folder import RESUMED_FROM, RunFolder
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Engine, Experiment, Job, LayoutRequest, Model, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.launcher.descent import descend
from tests.made_runs import add_checkpoint, with_checkpoints

SITE = ClusterProfile(name="site", scheduler="slurm", gpus_per_node=4, partition="gpu", account="abc", sbatch=("--x",))
OTHER = ClusterProfile(name="other", scheduler="slurm", gpus_per_node=8, partition="h100")


def parent(
    engine: Engine | None = None, profile: ClusterProfile = SITE, experts: int | None = None, **layout: int
) -> Resolved:
    """tp2-pp2-dp2 on two nodes, 32 = 2 x 8 x 2 samples a step."""
    sizes = {"gpus": 8, "tp": 2, "pp": 2, "dp": 2, "micro_batch": 2, "global_batch": 32, **layout}
    mixture = {"experts": experts, "experts_per_token": 2, "expert_ffn": 64, "bias": "none"} if experts else {}
    experiment = Experiment(
        name="tiny",
        model=Model(hidden=64, layers=8, heads=8, vocab=256, seq=32, **mixture),
        data=Data(source="random"),
        engine=engine or Engine(),
        layout=LayoutRequest(**sizes),
        train=Train(steps=50, save_every=10),
        job=Job(time="1:00", constraint="v100", comment="mine", dependency="afterok:1", sbatch=("--y",)),
    )
    return resolve(experiment, profile)


def test_what_is_a_fault_of_a_new_file_is_none_of_a_made_run():
    site = replace(SITE, cpus_per_node=2, environment={"HF_TOKEN": "opensesame"})
    made = parent(profile=site)
    made = replace(made, train=replace(made.train, min_lr=1.0, warmup_steps=60))
    resolved = descend(Resolved.from_json(made.to_json()), {"layout.tp": 1}, made.cluster, 20)
    assert (resolved.train, resolved.cluster) == (made.train, made.cluster)


@pytest.mark.parametrize(
    ("changes", "layout", "nodes", "micro_batches"),
    [
        ({"layout.tp": 1}, Layout(1, 2, 4), 2, 4),
        ({"layout.pp": 1}, Layout(2, 1, 4), 2, 4),
        ({"layout.tp": 1, "layout.pp": 1, "layout.dp": 2}, Layout(1, 1, 2), 1, 8),
        ({"layout.dp": 1}, Layout(2, 2, 1), 1, 16),
        ({"layout.cp": 2}, Layout(2, 2, 1, cp=2), 2, 16),
        ({"layout.cp": 2, "layout.tp": 1, "layout.dp": 2}, Layout(1, 2, 2, cp=2), 2, 8),
        ({"layout.gpus": 16}, Layout(2, 2, 4), 4, 4),
        ({"layout.nodes": 1, "layout.gpus": None}, Layout(2, 2, 1), 1, 16),
        ({"layout.tp": 4, "layout.pp": 4, "layout.gpus": 16}, Layout(4, 4, 1), 4, 16),
        ({"layout.micro_batch": 4}, Layout(2, 2, 2), 2, 4),
        ({"layout.micro_batches": 4}, Layout(2, 2, 2), 2, 4),
        ({"engine.zero_stage": 0}, Layout(2, 2, 2), 2, 8),
    ],
)
def test_what_is_not_given_follows_and_a_step_keeps_its_samples(changes, layout, nodes, micro_batches):
    resolved = descend(parent(), changes, SITE, 20)
    assert (resolved.layout, resolved.nodes, resolved.batch.micro_batches) == (layout, nodes, micro_batches)
    assert resolved.batch.global_batch == 32
    assert (resolved.model, resolved.data, resolved.train) == (parent().model, parent().data, parent().train)
    assert resolved.name == "tiny"


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, Layout(1, 1, 8, shard=2)),
        ({"layout.shard": 4}, Layout(1, 1, 8, shard=4)),
        ({"layout.shard": None}, Layout(1, 1, 8)),
        ({"layout.tp": 2}, Layout(2, 1, 4, shard=2)),
        ({"layout.dp": 2, "layout.gpus": 2}, Layout(1, 1, 2)),
        ({"layout.dp": 1, "layout.gpus": 1}, Layout(1, 1, 1)),
    ],
)
def test_shards_with_replicas_stay_where_they_fit(changes, layout):
    hybrid = parent(Engine(name="fsdp"), tp=1, pp=1, dp=8, shard=2, micro_batch=1)
    assert descend(Resolved.from_json(hybrid.to_json()), changes, SITE, 20).layout == layout


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, Layout(1, 1, 8, ep=4)),
        ({"layout.ep": 2}, Layout(1, 1, 8, ep=2)),
        ({"layout.ep": 1}, Layout(1, 1, 8)),
        ({"layout.tp": 2}, Layout(2, 1, 4, ep=4)),
        ({"layout.tp": 2, "layout.cp": 2}, Layout(2, 1, 2, 2, ep=4)),
        ({"layout.dp": 2, "layout.gpus": 2}, Layout(1, 1, 2, ep=2)),
        ({"layout.dp": 1, "layout.gpus": 1}, Layout(1, 1, 1)),
    ],
)
def test_experts_stay_divided_as_far_as_the_ranks_allow(changes, layout):
    wide = parent(Engine(name="fsdp"), tp=1, pp=1, dp=8, ep=4, experts=8, micro_batch=1)
    assert descend(Resolved.from_json(wide.to_json()), changes, SITE, 20).layout == layout


def test_nothing_changed_is_the_same_run_but_for_its_moment():
    settings = parent()
    job = replace(settings.job, dependency=None)
    assert descend(settings, {}, SITE, 20) == replace(settings, job=job)
    again = Resolved.from_json(settings.to_json())
    assert descend(again, {}, again.cluster, 20) == replace(settings, job=job)


def test_another_cluster_gets_its_account_and_the_users_wishes():
    resolved = descend(parent(), {}, OTHER, 20)
    job = resolved.job
    assert (job.partition, job.account, job.constraint) == ("h100", None, None)
    assert (job.time, job.comment, job.sbatch, job.dependency) == ("1:00", "mine", ("--y",), None)
    assert (resolved.gpus, resolved.nodes) == (8, 1)
    given = descend(parent(), {"job.partition": "big", "job.dependency": "afterok:2"}, OTHER, 20).job
    assert (given.partition, given.dependency) == ("big", "afterok:2")


def test_nodes_alone_are_those_of_the_site_it_goes_to():
    assert descend(parent(), {"layout.nodes": 1, "layout.gpus": None}, OTHER, 20).gpus == 8


def test_tp_across_nodes_stays_allowed_for_the_same_tp():
    spread = parent(tp=8, pp=1, dp=1, allow_tp_across_nodes=True)
    assert descend(spread, {"layout.micro_batch": 4}, SITE, 20).layout == Layout(8, 1, 1)
    with pytest.raises(LayoutError, match="nodes"):
        descend(parent(gpus=16, tp=4, pp=2), {"layout.tp": 8}, SITE, 20)
    with pytest.raises(LayoutError, match="nodes"):
        descend(spread, {"layout.tp": 16, "layout.gpus": 16}, SITE, 20)


def test_every_engine_goes_on_from_any_other():
    fsdp = parent(Engine("fsdp"), tp=1, pp=1, gpus=4, dp=4)
    assert descend(fsdp, {"layout.tp": 2}, SITE, 20).layout == Layout(2, 1, 2)
    stage_3 = parent(Engine("hf-deepspeed"), tp=1, pp=1, gpus=4, dp=4)
    assert descend(stage_3, {"engine.zero_stage": 1}, SITE, 20).engine.zero_stage == 1
    for name in engines():
        if not engines()[name].is_program:
            assert descend(fsdp, {"engine.name": name, "engine.zero_stage": None}, SITE, 20).engine.name == name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layout.global_batch": 64}, "20 steps x 32 = 640 samples; with global_batch 64 .* which is step 10"),
        ({"layout.global_batch": 48}, "640 = 13.3333 x 48, which is within step 14"),
        ({"layout.tp": 3}, "tp 3 x pp 2 = 6 does not divide 8 GPUs: 8 / 6 = 1.33"),
        ({"layout.micro_batch": 3}, "global_batch 32 stays, and is not a multiple of micro_batch x dp = 3 x 2 = 6"),
        ({"model.layers": 4}, "model.layers would be 4, but is 8 in the checkpoint's run"),
        ({"train.dtype": "fp32"}, "train.dtype would be fp32, but is bf16"),
        ({"train.decay": "constant"}, "train.decay would be constant, but is cosine"),
        ({"model.preset": "48b"}, "preset 48b is not the model of the checkpoint: hidden 8192, not 64; layers"),
        ({"data.source": "stdlib"}, "data.source would be stdlib, but is random"),
        ({"engine.zero_stage": 2}, "pp 2 with ZeRO-2 cannot run"),
        ({"engine.nosuch": 2}, "engine.nosuch"),
        ({"layout.nosuch": 2}, "layout.nosuch"),
        ({"nosuch.tp": 2}, "unknown key nosuch.tp"),
    ],
)
def test_another_training_is_refused_before_anything_is_queued(changes, said):
    with pytest.raises(UserError, match=said) as caught:
        descend(parent(), changes, SITE, 20)
    assert isinstance(caught.value, LayoutError | ConfigError)
    assert caught.value.hint


def test_the_hint_is_the_micro_batch_that_fits():
    with pytest.raises(LayoutError) as caught:
        descend(parent(micro_batch=8), {"layout.tp": 1, "layout.pp": 1}, SITE, 20)
    assert caught.value.hint == "use --micro-batch-size 4"
    with pytest.raises(LayoutError) as caught:
        descend(parent(), {"layout.tp": 1, "layout.pp": 1, "layout.gpus": 12}, SITE, 20)
    assert caught.value.hint == "use a dp that divides 32"


def run_with(folder: Path, *steps: int, parent: RunFolder | None = None) -> RunFolder:
    """A run folder that holds complete checkpoints of these steps."""
    run = RunFolder(folder)
    with_checkpoints(run, *steps)
    if parent is not None:
        write_once(run.path / RESUMED_FROM, json.dumps({"run": parent.run_id, "path": str(parent.path), "step": 1}))
    return run


def test_the_newest_checkpoint_is_the_parents_or_a_run_befores(tmp_path):
    first = run_with(tmp_path / "first", 2, 10)
    (first.checkpoints / "step-00000012").mkdir()  # never completed
    second = run_with(tmp_path / "second", parent=first)
    third = run_with(tmp_path / "third", 14, parent=second)
    assert [newest_step(run) for run in (first, second, third)] == [10, None, 14]
    assert find_ancestors(third) == [second, first]
    assert parent_of(second)[0] == Parent("second", str(second.path), 10)
    assert parent_of(third)[0].step == 14


def test_a_damaged_checkpoint_is_passed_over_unless_all_are(tmp_path):
    first = run_with(tmp_path / "first", 2)
    add_checkpoint(first, 4, damaged=True)
    parent, point = parent_of(first)
    assert (parent.step, newest_step(first)) == (2, 4)
    assert point.notes == ("checkpoint step-00000004 is not sound, and is passed over: weights has 300 bytes, not 700",)
    (first.checkpoints / "step-00000002" / "weights").write_bytes(b"Weights" * 100)
    for run in (first, run_with(tmp_path / "second", parent=first)):
        with pytest.raises(ConfigError, match=f"run {run.run_id} has no sound checkpoint") as refusal:
            parent_of(run)
        assert "\ncheckpoint step-00000004: weights has 300 bytes, not 700" in str(refusal.value)
        assert "\ncheckpoint step-00000002: weights has CRC-32 " in str(refusal.value)
        assert f"submit --resume {run.run_id} --from-start" in refusal.value.hint


def test_a_checkpoint_too_large_to_read_is_checked_by_sizes(tmp_path, monkeypatch):
    run = run_with(tmp_path / "first", 2)
    monkeypatch.setattr("hpc_gpt.core.checkpoints.lineage.MOST_READ_BYTES", 699)
    (run.checkpoints / "step-00000002" / "weights").write_bytes(b"Weights" * 100)
    _, point = parent_of(run)
    assert "only the sizes of the files of step-00000002" in point.notes[0]
    (run.checkpoints / "step-00000002" / "weights").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="no sound checkpoint"):
        parent_of(run)


def test_a_run_without_checkpoints_or_its_own_parent_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="run none has no checkpoint to resume from"):
        parent_of(run_with(tmp_path / "none"))
    first = run_with(tmp_path / "first")
    write_once(first.path / RESUMED_FROM, json.dumps({"path": str(tmp_path / "second")}))
    second = run_with(tmp_path / "second", parent=first)
    with pytest.raises(RunFolderError, match="resumes from itself"):
        find_ancestors(second)


def test_how_far_to_train_may_change_where_that_is_asked_for():
    """By --until, or by its key."""
    further = descend(parent(), {"layout.tp": 1}, SITE, 20, {"steps": 200, "until_loss": 2.0})
    assert (further.train.steps, further.train.until_loss) == (200, 2.0)
    assert further.train.lr == parent().train.lr
    assert descend(parent(), {"train.steps": 200}, SITE, 20).train == replace(parent().train, steps=200)
    with pytest.raises(ConfigError, match=r"train\.lr would be"):
        descend(parent(), {"train.lr": 1.0}, SITE, 20, {"steps": 200})
