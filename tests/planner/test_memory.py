"""Memory of every stage: what holds for every layout, and what others published. Each term is in test_parts.py."""

import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.engines import engine_named, engine_of
from hpc_gpt.core.engines.base.programs import program_states
from hpc_gpt.core.engines.base.training import OptimizerMode, Training
from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.planner.memory import StageMemory, layers_of_stages, predict_memory
from hpc_gpt.planner.search import candidate_of
from hpc_gpt.planner.step_time import predict_step
from tests.core.engines.trainings import LLAMA, SMALL, trainings
from tests.planner.machines import machine_named

MEGATRON = program_states("megatron-lm", None, "bf16", True)
MEGATRON_2021 = program_states("megatron-lm", None, "fp16", False)

GIB = 2.0**30
# Megatron-DeepSpeed's 18B: 40 layers of 6144, its vocabulary padded for tp 4.
MEGATRON_18B = Training(
    ModelShape(6144, 40, 32, vocab=50688, seq=1024), tp=4, pp=4, micro_batches=4, recompute="full", dtype="fp16",
    engine="megatron-lm", program_states=MEGATRON_2021,
)  # fmt: skip


def peak(training: Training) -> float:
    """GiB allocated on the stage that needs most."""
    return max(stage.allocated for stage in predict_memory(training).stages)


@given(trainings())
def test_every_part_is_a_number_and_the_kinds_are_in_order(training: Training) -> None:
    memory = predict_memory(training, machine_named("a100-80g", 8, "infiniband 8x200G"))
    assert len(memory.stages) == training.pp
    for stage in memory.stages:
        parts = [getattr(stage, entry.name) for entry in fields(StageMemory) if entry.name != "moment"]
        assert all(math.isfinite(part) and part >= 0 for part in parts)
        assert stage.allocated == pytest.approx(sum(parts[:6]))
        assert stage.allocated <= stage.reserved < stage.nvidia_smi


@given(trainings())
def test_the_deciding_stage_needs_most_of_all(training: Training) -> None:
    memory = predict_memory(training)
    assert memory.stages[memory.deciding].nvidia_smi == max(stage.nvidia_smi for stage in memory.stages)


@given(trainings(), st.integers(1, 8))
def test_a_larger_micro_batch_or_sequence_never_needs_less(training: Training, more: int) -> None:
    longer = replace(training, shape=replace(training.shape, seq=training.shape.seq + 256 * more))
    assert peak(replace(training, micro_batch=training.micro_batch + more)) >= peak(training)
    assert peak(longer) >= peak(training)


GPT2 = Training(ModelShape(768, 12, 12, vocab=50304, seq=1024), micro_batch=32, engine="ddp", flash=True)


@given(trainings())
def test_an_evaluation_never_needs_more_than_training(training: Training) -> None:
    """Of ours: what a user has planned survives its first evaluation."""
    for stage in predict_memory(training).stages:
        assert stage.moment != "evaluation"
        assert (stage.evaluation > 0) == engine_of(training).counts_evaluation
        assert stage.evaluation <= stage.allocated
    assert not predict_memory(replace(training, program_states=MEGATRON)).stages[0].evaluation


def test_an_evaluation_that_needs_more_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it did in one pass, uncompiled: 10 bytes a logit, and 2 in training."""
    training = replace(GPT2, one_pass_loss=True)
    before = predict_memory(training).stages[0]
    monkeypatch.setattr(type(engine_of(training)), "evaluated_logit_bytes", lambda facts, training: 10.0)
    [stage] = predict_memory(training).stages
    assert (before.moment, stage.moment) == ("backward pass", "evaluation")
    assert stage.logits == pytest.approx(32 * 1024 * 50304 * 10 / GIB)
    assert stage.evaluation == pytest.approx(stage.allocated)
    assert stage.activations == stage.gradients == 0
    assert stage.reserved > stage.allocated > before.allocated


@given(trainings())
def test_recomputing_more_never_keeps_more(training: Training) -> None:
    kept = [
        predict_memory(replace(training, recompute=way)).stages[0].activations for way in ("none", "selective", "full")
    ]
    peaks = [peak(replace(training, recompute=way)) for way in ("none", "selective", "full")]
    if training.pp == 1 and training.shape.layers > 2 and 0 not in kept:  # 0: the optimizer's step is the peak
        assert kept == sorted(kept, reverse=True)
    assert peaks[0] >= peaks[2] * 0.999


# Korthikanti et al. 2022, figure 1: GiB of activations on the first stage, and figure 7: percent of "none".
@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "pp", "vp", "batch", "gib", "percent"),
    [
        (6144, 48, 64, 1, 1, 4, 59.25, 7.64),
        (12288, 96, 96, 8, 3, 1, 66.84375, 8.71),
        (25600, 128, 160, 64, 1, 1, 131.25, 9.42),
    ],
)
def test_activations_are_korthikantis(
    hidden: int, layers: int, heads: int, pp: int, vp: int, batch: int, gib: float, percent: float
) -> None:
    shape = ModelShape(hidden, layers, heads, seq=2048)
    plain = Training(shape, tp=8, pp=pp, vp=vp, micro_batch=batch, micro_batches=64)
    none = predict_memory(plain).stages[0].activations
    assert none == pytest.approx(gib, rel=1e-3)
    full = predict_memory(replace(plain, recompute="full")).stages[0].activations
    assert 100 * full / none == pytest.approx(percent, rel=0.015)  # read off a plot


# Stage 0 and 1 of Megatron-DeepSpeed's 18B (gpt2.md, first row of 32 GB): peak allocated and reserved, GiB.
def test_a_published_stage() -> None:
    first, second, *_ = predict_memory(MEGATRON_18B).stages
    assert (first.allocated, second.allocated) == pytest.approx((25.59, 23.86), rel=0.05)
    assert (first.reserved, second.reserved) == pytest.approx((30.05, 28.63), rel=0.1)


# Megatron-DeepSpeed's 52B under DeepSpeed 3D, micro-batch 4: peak allocated by stage, GiB. The middle stages differ by
# what one micro-batch more in flight holds: 0.266, four layers' inputs and a quarter of the output; Megatron's by
# 0.314, five.
MEGATRON_52B = Training(
    ModelShape(8192, 64, 32, vocab=50688, seq=1024), tp=4, pp=16, micro_batch=4, micro_batches=256, recompute="full",
    dtype="fp16", engine="deepspeed-3d", program_states=program_states("deepspeed-3d", None, "fp16", False),
)  # fmt: skip


def test_the_published_stages_of_a_pipeline() -> None:
    stages = predict_memory(MEGATRON_52B).stages
    published = {0: 19.493, 1: 17.053, 2: 16.787, 8: 15.193, 14: 15.085, 15: 17.749}
    for stage, allocated in published.items():
        assert stages[stage].allocated == pytest.approx(allocated, rel=0.015)
    assert stages[1].allocated - stages[2].allocated == pytest.approx(0.266, rel=0.01)


def test_what_megatron_keeps_between_stages() -> None:
    megatron = replace(MEGATRON_52B, micro_batch=8, engine="megatron-lm", program_states=MEGATRON_2021)
    stages = predict_memory(megatron).stages
    assert stages[1].allocated - stages[2].allocated == pytest.approx(2 * 0.3137, rel=0.01)


@pytest.mark.parametrize(
    ("device", "dtype", "attention", "has"),
    [
        ("a100-80g", "bf16", "auto", False), ("h100-80g", "fp16", "flash", False),
        ("a100-80g", "bf16", "efficient", True), ("a100-80g", "fp32", "auto", True),
        ("v100-32g", "fp16", "auto", True), ("cpu", "bf16", "auto", True),
    ],
)  # fmt: skip
def test_only_what_cannot_take_documents_in_a_row_has_a_mask(device, dtype, attention, has) -> None:
    engine, shape = Engine("ddp", attention=attention), replace(SMALL, heads=8)
    mask = partial(engine_named("ddp").mask, engine, dtype=dtype, device=device)
    assert mask(shape=shape, documents=True) == ("documents" if has else "none")
    assert mask(shape=shape, documents=False) == "none"
    wide = ModelShape(hidden=1024, layers=2, heads=2)
    assert mask(shape=wide, documents=True) == "documents"
    # A window has FlexAttention, which is auto's alone.
    flexes = attention == "auto" and device in ("a100-80g", "h100-80g")
    in_all, in_some = (replace(shape, window=16, window_layers=layers) for layers in (None, "SL"))
    assert mask(shape=in_all, documents=False) == ("window" if has and not flexes else "none")
    assert mask(shape=in_all, documents=True) == ("documents" if has and not flexes else "none")
    with_flex = "full" if flexes else "documents"
    assert mask(shape=in_some, documents=True) == (with_flex if has else "none")


def test_a_window_in_transformers_class_costs_what_its_mask_does() -> None:
    """Mistral-7B at 32,768: SDPA gets booleans, so no block of the scores is left out, not even half for causality."""
    shape = replace(preset("mistral-7b"), seq=32768)
    windowed = replace(shape, window=4096)
    hf = Training(shape, dp=32, engine="hf-deepspeed", zero_stage=3, recompute="full", flash=True)
    ours = replace(hf, engine="deepspeed-zero")
    engine, machine = Engine("hf-deepspeed"), machine_named("h100-80g", 8, "infiniband 8x400G")
    of_engine = partial(engine_named("hf-deepspeed").mask, engine, dtype="bf16", device="h100-80g", documents=False)
    assert (of_engine(shape=shape), of_engine(shape=windowed)) == ("none", "layers")
    assert engine_named("megatron-lm").mask(Engine("megatron-lm"), windowed, "bf16", "h100-80g", False) == "none"
    masked = replace(hf, shape=windowed, mask="layers")
    plain, slow = (predict_step(one, machine).step_s for one in (hf, masked))
    assert predict_step(replace(ours, shape=windowed), machine).step_s < plain < slow
    both = [
        replace(one, shape=replace(one.shape, vocab=256)) for one in (hf, masked)
    ]  # a layer holds more than the loss
    held = [predict_memory(one).stages[0].allocated for one in both]
    # 1 GiB of booleans, and 2 GiB of numbers of the layer that is computed again.
    assert held[1] - held[0] == pytest.approx(3, rel=0.01)
    kept = [predict_memory(replace(one, recompute="none")).stages[0].allocated for one in both]
    assert kept[1] - kept[0] == pytest.approx(1 + 32 * 2, rel=0.01)


def test_what_is_reserved_stays_within_the_card() -> None:
    card = machine_named("v100-32g", 4, "omni-path 4x100G")
    # Megatron-DeepSpeed's 36B with micro-batch 6, which ran ("a very snag fit"): more is wished for than there is.
    training = replace(
        MEGATRON_18B, shape=ModelShape(8192, 48, 32, vocab=50688, seq=1024), pp=8, micro_batch=6, micro_batches=128
    )
    wished = predict_memory(training)
    assert wished.stages[wished.deciding].nvidia_smi > card.memory_gib
    assert candidate_of(training, card).fits
    assert not candidate_of(replace(training, micro_batch=16), card).fits


@settings(max_examples=20)
@given(trainings())
def test_stages_are_indexed_as_a_sequence(training: Training) -> None:
    stages = predict_memory(training).stages
    assert stages[-1] == stages[len(stages) - 1]
    assert list(stages[:2]) == [stages[number] for number in range(min(2, len(stages)))]
    with pytest.raises(IndexError):
        stages[len(stages)]


MODES = ("fused", "foreach", "for-loop")


@given(trainings(), st.sampled_from(MODES))
def test_no_update_needs_less_than_fused(training: Training, mode: OptimizerMode) -> None:
    other = replace(training, optimizer_mode=mode)
    assert peak(other) >= peak(training)
    published = replace(training, program_states=MEGATRON)
    assert peak(replace(published, optimizer_mode=mode)) == peak(published)


def test_edges_take_the_place_of_layers() -> None:
    shape = replace(LLAMA, layers=126)
    assert layers_of_stages(Training(shape, pp=16, edges_as_layers=True)) == (7, *[8] * 14, 7)
    assert layers_of_stages(Training(shape, pp=8, vp=4, edges_as_layers=True)) == (15, *[16] * 6, 15)
    assert layers_of_stages(Training(shape, edges_as_layers=True)) == (126,)
    assert layers_of_stages(Training(shape, pp=6, edges_as_layers=True)) == (21, 22, 21, 21, 21, 20)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"matmul": "fp8"}, ConfigError), ({"attention": "fa9"}, ConfigError), ({"states": "half"}, ConfigError),
        ({"cp": 3}, LayoutError), ({"cp": 32, "cp_exchange": "heads"}, LayoutError),
    ],
)  # fmt: skip
def test_what_no_run_has_is_refused_in_a_line_with_a_hint(fields: dict[str, Any], fault: type) -> None:
    with pytest.raises(fault) as raised:
        replace(Training(LLAMA, tp=2, dp=4), **fields)
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.hint
