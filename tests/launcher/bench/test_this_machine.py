"""The advice after a run that ran out of memory."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.launcher.bench_rows import BenchRequest, prepare_cells
from hpc_gpt.launcher.this_machine import advice_on_memory, nearest_micro_batch, need_gib, profile_here
from tests.planner.machines import machine_named

V100 = profile_here(None, [{"name": "Tesla V100-SXM2-16GB"}])
SMALL = Training(ModelShape(768, 12, 12, vocab=50304), dtype="bf16", engine="ddp", flash=True)


def test_a_bench_stages_nothing():
    assert profile_here(replace(load_profile("local"), name="mine", stage="warm"), []).stage is None


def resolved(profile, micro_batch, model="gpt2"):
    asked = BenchRequest("bench", profile, {"model.preset": model}, micro_batches=[micro_batch], has_gpu=True)
    return prepare_cells(asked).cells[0].prepared.resolved


@given(st.integers(1, 4096), st.floats(0.5, 200))
def test_the_nearest_is_the_largest_that_fits(micro_batch, gib):
    machine = replace(machine_named("v100-16g", 1, None), memory_gib=gib)
    asked = replace(SMALL, micro_batch=micro_batch)
    nearest = nearest_micro_batch(asked, machine)
    assert 0 <= nearest < micro_batch
    assert nearest == 0 or need_gib(asked, machine, nearest) <= gib
    assert nearest + 1 == micro_batch or need_gib(asked, machine, nearest + 1) > gib


def test_of_a_gpu_the_nearest_that_plan_thinks_fits():
    words = advice_on_memory(resolved(V100, 64), V100, "gpu_memory")
    assert "v100-16g" in words
    nearest = int(words.split("--mbs ")[1].split(",")[0])
    assert 1 <= nearest < 64


def test_what_no_micro_batch_makes_fit():
    words = advice_on_memory(resolved(V100, 2, "gpt2-xl"), V100, "gpu_memory")
    assert "no micro-batch fits" in words


def test_where_plan_thinks_that_it_fits_half_of_it():
    assert advice_on_memory(resolved(V100, 2), V100, "gpu_memory").startswith("try --mbs 1; plan predicts")


def test_of_a_device_that_is_not_known_half_of_it():
    unknown = profile_here(None, [{"name": "A card of tomorrow"}])
    assert advice_on_memory(resolved(unknown, 64), unknown, "gpu_memory").startswith("try --mbs 32; plan cannot")


def test_of_the_host_half_of_it():
    assert advice_on_memory(resolved(profile_here(None, []), 64), V100, "host_memory") == "try --mbs 32"
