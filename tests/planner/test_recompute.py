"""Recomputation of modules and of a share of the layers: bytes freed and seconds added, for every subset of modules."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.engines.base.programs import Megatron
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.formulas import tflops_hardware
from hpc_gpt.core.recomputation import MODULES, recomputation
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.planner.figures import figures_of
from hpc_gpt.planner.layer_bytes import kept_of_layer, layer_bytes, recomputed_at_once
from hpc_gpt.planner.layer_time import head_s, layer_time
from hpc_gpt.planner.machine import DEFAULT, Rates
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.step_time import predict_step
from tests.planner.machines import machine_named

H100 = machine_named("h100-80g", 8, "infiniband 8x400G")
DENSE = Training(ModelShape(4096, 32, 32, vocab=51200, seq=2048), tp=2, dp=4)
QWEN = Training(preset("qwen3-30b-a3b"), tp=2, dp=8, ep=4, micro_batches=8, flash=True, sequence_parallel=True)
DEEPSEEK = Training(preset("deepseek-v3"), pp=8, dp=32, ep=8, micro_batches=16, flash=True)
RUNS = (DENSE, QWEN, replace(DEEPSEEK, matmul="mxfp8"), DEEPSEEK)
SUBSETS = st.lists(st.sampled_from(sorted(MODULES)), min_size=1, unique=True)


def kept(run: Training) -> list[float]:
    """Bytes that a layer of each kind keeps."""
    return [kept_of_layer(run, layer_bytes(run, kind)) for kind in run.shape.kinds]


def seconds(run: Training) -> float:
    return predict_step(run, H100).step_s


@given(run=st.sampled_from(RUNS), some=SUBSETS, more=SUBSETS)
def test_more_modules_keep_less_and_take_longer_up_to_full(run: Training, some: list[str], more: list[str]) -> None:
    ways = ["none", ",".join(some), ",".join(dict.fromkeys(some + more)), "full"]
    runs = [replace(run, recompute=way) for way in ways]
    for kind in range(len(run.shape.kinds)):
        freed = [kept(one)[kind] for one in runs]
        assert freed == sorted(freed, reverse=True)
        layers = [layer_bytes(one, one.shape.kinds[kind]) for one in runs]
        at_once = [recomputed_at_once(one, layer) for one, layer in zip(runs, layers, strict=True)]
        assert 0 == at_once[0] <= at_once[1] <= at_once[2] <= at_once[3]
    takes = [seconds(one) for one in runs]
    assert takes == pytest.approx(sorted(takes), rel=1e-12)


@pytest.mark.parametrize(
    ("run", "module", "does"),
    [
        (DENSE, "core_attn", True), (DENSE, "mlp", True), (DENSE, "layernorm", False), (DENSE, "moe", False),
        (QWEN, "core_attn", False), (QWEN, "layernorm", True), (QWEN, "moe_act", True), (QWEN, "moe", True),
        (QWEN, "mlp", False), (QWEN, "shared_experts", False), (QWEN, "mla_up_proj", False),
        (DEEPSEEK, "mlp", True), (DEEPSEEK, "shared_experts", True), (DEEPSEEK, "mla_up_proj", True),
    ],
)  # fmt: skip
def test_a_module_frees_memory_where_the_layer_has_it(run: Training, module: str, does: bool) -> None:
    again = replace(run, recompute=module)
    assert (sum(kept(again)) < sum(kept(run))) is does
    # With flash, attention's core keeps nothing, and is computed again all the same.
    rates = Rates(H100, DEFAULT, again)
    takes = sum(layer_time(again, rates, kind).again_s for kind in run.shape.kinds)
    assert (takes > 0) is (does or (module == "core_attn" and run.flash))


def test_the_bytes_of_a_module_are_those_of_its_outputs() -> None:
    tokens, shape = DEEPSEEK.tokens, DEEPSEEK.shape
    freed = layer_bytes(DEEPSEEK).of_modules
    assert freed["mla_up_proj"] == tokens * 2 * shape.heads * (192 + 192 + 128)  # queries, keys and values
    assert freed["layernorm"] == tokens * 2 * 2 * shape.hidden  # before attention and before experts
    assert layer_bytes(QWEN).of_modules["layernorm"] == QWEN.tokens * 2 * QWEN.shape.hidden / QWEN.tp
    # A graph of the router has the norm's output as its own, unless it sorts the tokens for an all-to-all, too.
    graphs = (
        replace(QWEN, cuda_graphs=("attn", "moe_router")),
        replace(QWEN, cuda_graphs=("moe_router", "moe_preprocess")),
    )
    assert [layer_bytes(run).of_modules["layernorm"] > 0 for run in graphs] == [False, False]
    assert layer_bytes(replace(graphs[1], dispatcher="alltoall")).of_modules["layernorm"] > 0


def test_experts_that_are_computed_again_are_sent_again() -> None:
    plain, act, whole, full = (
        predict_step(replace(QWEN, recompute=way), H100) for way in ("none", "moe_act", "moe", "full")
    )
    assert plain.ep_s == act.ep_s
    assert whole.ep_s == full.ep_s == pytest.approx(1.5 * plain.ep_s)


@pytest.mark.parametrize("run", RUNS)
def test_a_share_of_the_layers_is_between_none_and_full(run: Training) -> None:
    none, full = (replace(run, recompute=way) for way in ("none", "full"))
    share = replace(run, recompute="1/4")
    expected = [0.75 * all_kept + 0.25 * least for all_kept, least in zip(kept(none), kept(full), strict=True)]
    assert kept(share) == pytest.approx(expected)
    mean = 0.75 * predict_step(none, H100).recompute_s + 0.25 * predict_step(full, H100).recompute_s
    assert predict_step(share, H100).recompute_s == pytest.approx(mean)
    peaks = [predict_memory(one, H100).stages[0].allocated for one in (none, share, full)]
    assert peaks[2] < peaks[1] < peaks[0]


def test_flops_count_the_products_that_modules_repeat() -> None:
    sizes = {"layers": 2, "hidden": 64, "seq": 32, "vocab": 512, "global_batch": 4, "gpus": 1, "step_s": 1e-12}
    none, half, full = (tflops_hardware(**sizes, recompute=way) for way in ("none", "1/2", "full"))
    assert half == pytest.approx((none + full) / 2)
    again = tflops_hardware(**sizes, recompute="mlp", again_weights=2 * 8 * 64**2)
    assert again - none == 4 * 32 * 2 * 2 * 8 * 64**2  # tokens x 2 FLOPs x the MLP's weights
    counted = [
        figures_of(one, predict_step(one, H100), H100, 1e9).tflops_hardware * predict_step(one, H100).step_s
        for one in (replace(DENSE, recompute=way) for way in ("none", "layernorm", "mlp", "full"))
    ]
    assert counted[0] == pytest.approx(counted[1])
    assert counted[1] < counted[2] < counted[3]


def test_selective_is_attentions_core() -> None:
    assert recomputation("selective") == recomputation("core_attn")


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed-zero"])
def test_pytorchs_checkpoint_repeats_all_but_the_last_product(engine: str) -> None:
    """A compiled block of ours saves its tensors at its end: it is repeated whole."""
    run = Training(preset("llama3.2-1b"), dp=8, engine=engine, micro_batch=4, flash=True, recompute="full")
    early, whole = (
        layer_time(each, Rates(H100, DEFAULT, each)) for each in (run, replace(run, program_states=Megatron()))
    )
    rates = Rates(H100, DEFAULT, run)
    last = rates.layer_product_s(run.tokens, run.shape.hidden, run.shape.mlp_width)
    assert early.again_s == pytest.approx(early.forward_s - last)
    assert whole.again_s == whole.forward_s
    compiled = replace(run, compiled=True)
    time = layer_time(compiled, Rates(H100, DEFAULT, compiled))
    assert time.again_s == time.forward_s


def test_the_head_in_8_bits_is_faster() -> None:
    run = Training(preset("llama3.2-1b"), dp=8, micro_batch=4, flash=True, matmul="fp8-tensor")
    plain, in_8_bits = (head_s(each, Rates(H100, DEFAULT, each)) for each in (run, replace(run, fp8_head=True)))
    assert in_8_bits < plain
    of_16_bits = replace(run, matmul="none", fp8_head=True)
    assert head_s(of_16_bits, Rates(H100, DEFAULT, of_16_bits)) == plain
