"""Context parallelism, products in 8 and 4 bits, and the traits of a run: what each changes, and what is refused."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from hpc_gpt.core.engines import states_of
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.planner.machine import DEFAULT, Rates
from hpc_gpt.planner.memory import layers_of_stages, predict_memory
from hpc_gpt.planner.step_time import StepTime, layer_time, predict_step
from tests.conftest import REPOSITORY
from tests.core.engines.trainings import LLAMA
from tests.planner.machines import machine_named

H100 = machine_named("h100-80g", 8, "infiniband 8x400G")
GB200 = machine_named("gb200", 4, "infiniband 4x400G")
LONG = Training(
    replace(LLAMA, seq=65536), tp=2, pp=2, dp=4, micro_batches=8, flash=True, sharded_optimizer=True,
    sequence_parallel=True,
)  # fmt: skip


def allocated(training: Training) -> float:
    return max(stage.allocated for stage in predict_memory(training).stages)


def step(training: Training) -> StepTime:
    return predict_step(training, H100)


def test_cp_divides_tokens_and_shares_states_as_dp_does() -> None:
    halved, doubled = replace(LONG, cp=2), replace(LONG, dp=8)
    assert halved.gpus == doubled.gpus == 2 * LONG.gpus
    first, other, whole = (predict_memory(each).stages[0] for each in (halved, doubled, LONG))
    assert first.optimizer == other.optimizer == whole.optimizer / 2
    assert first.activations == pytest.approx(whole.activations / 2)
    # A rank's products and attention are half, and there are as many micro-batches.
    assert step(halved).compute_s == pytest.approx(step(LONG).compute_s / 2, rel=0.05)


def test_a_ring_hides_what_gathered_keys_and_heads_show() -> None:
    ring, keys, heads = (step(replace(LONG, cp=4, cp_exchange=way)).cp_s for way in ("ring", "keys", "heads"))
    assert 0 < ring < heads
    assert ring < keys
    # Eight key heads of 32: Q and the output are most of what heads exchange. Without groups a ring sends more.
    assert step(replace(LONG, shape=replace(LONG.shape, kv_heads=None), cp=4, cp_exchange="ring")).cp_s > ring
    assert step(LONG).cp_s == 0


@pytest.mark.parametrize("exchange", ["ring", "keys"])
def test_a_ring_over_nodes_waits_where_attention_is_short(exchange: Any) -> None:
    short = replace(LONG, shape=replace(LONG.shape, seq=4096), tp=8, pp=1, cp=4, cp_exchange=exchange)
    slow = machine_named("h100-80g", 8, "infiniband 1x100G")
    assert predict_step(short, slow).cp_s > 5 * step(short).cp_s


def test_fewer_bits_are_faster_on_units_that_have_them() -> None:
    plain = Training(replace(LLAMA, hidden=8192, heads=64, ffn=28672), tp=4, micro_batches=8, flash=True)
    times = [predict_step(replace(plain, matmul=way), GB200).step_s for way in ("none", "mxfp8", "nvfp4")]
    assert times[0] > 1.3 * times[1] > 1.5 * times[2]
    a100 = machine_named("a100-80g", 8, None)
    assert predict_step(replace(plain, matmul="fp8-tensor"), a100).step_s >= predict_step(plain, a100).step_s
    kept = [predict_memory(replace(plain, matmul=way)).stages[0].activations for way in ("none", "fp8-tensor", "nvfp4")]
    assert kept[0] > kept[1] > kept[2] > kept[0] / 2


@pytest.mark.parametrize(("engine", "held"), [("megatron-lm", 2 * (1 / 2 + 1 / 16)), ("fsdp", 0)])
def test_weights_in_four_bits_are_held_beside_those_in_sixteen(engine: str, held: float) -> None:
    """Megatron-Bridge's bf16_with_nvfp4_mixed keeps its parameters in bf16 (fp8_param_gather = False), and Transformer
    Engine two copies of a layer's, by rows and by columns, a scale of a byte for each 16 values."""
    shape = replace(LLAMA, hidden=8192, heads=64, ffn=28672, layers=8)
    pipeline = {"pp": 2} if engine == "megatron-lm" else {"dp": 4, "zero_stage": 3}
    plain = Training(shape, tp=2, micro_batches=8, flash=True, engine=engine, **pipeline)
    bf16, nvfp4 = (predict_memory(replace(plain, matmul=way)).stages[0] for way in ("none", "nvfp4"))
    layers = layers_of_stages(plain)[0]
    copies = layers * held * shape.layer_weights / plain.tp / 2**30
    assert nvfp4.parameters - bf16.parameters == pytest.approx(copies)


@pytest.mark.parametrize(("engine", "moved"), [("megatron-lm", 20), ("fsdp", 40)])
def test_a_ring_moves_the_output_of_each_block_that_it_merges(engine: str, moved: float) -> None:
    """Of three other ranks' keys, forward once and backward twice; PyTorch's operators twice as much as a kernel, and
    they send the keys of every head (torch/distributed/tensor/experimental/_attention.py)."""
    long = replace(LONG, engine=engine, pp=1, cp=4)
    rates = Rates(H100, DEFAULT, long)
    ring, keys = (layer_time(replace(long, cp_exchange=way), rates).core_s for way in ("ring", "keys"))
    assert ring - keys == pytest.approx(9 * moved * long.tokens * long.shape.query_width / long.tp / rates.bytes)


def test_products_in_fp8_under_ddp_gain_what_one_h100_measured() -> None:
    """docs/models-and-engines.md: four layers of Llama 3.1 8B at 85,998 tokens/s in bf16, 1.326 times that in FP8."""
    shape = replace(LLAMA, hidden=4096, heads=32, kv_heads=8, ffn=14336, layers=4, vocab=16032, seq=8192, tied=False)
    switches = {"compiled": True, "compiled_loss": True, "compiled_head": True, "one_pass_loss": True}
    plain = Training(shape, micro_batch=2, engine="ddp", flash=True, optimizer_mode="compiled", **switches)  # type: ignore[arg-type]
    bf16, fp8 = (predict_step(replace(plain, matmul=way), H100).step_s for way in ("none", "fp8-tensor"))
    assert bf16 / fp8 == pytest.approx(1.326, rel=0.03)
    assert plain.global_batch * shape.seq / bf16 == pytest.approx(85_998, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "batches", "share"),
    [
        (ModelShape(768, 12, 12), (32, 1), 0.66),
        (ModelShape(1600, 48, 25), (8, 2), 0.61),
    ],
)
def test_short_layers_wait_for_the_hooks_of_fsdp(shape: ModelShape, batches: tuple[int, int], share: float) -> None:
    """docs/models-and-engines.md, one H100: tokens/s of fsdp over ddp's, in rounds that differ by 17 %. Its one rank
    had hooks, and has none now; two ranks have them, and hide what they send."""
    fast = {"compiled": True, "compiled_loss": True, "compiled_head": True, "one_pass_loss": True}
    plain = Training(shape, micro_batch=batches[0], micro_batches=batches[1], flash=True, **fast)  # type: ignore[arg-type]
    ddp, fsdp = (replace(plain, engine=name, zero_stage=stage) for name, stage in (("ddp", 0), ("fsdp", 3)))
    ddp2, fsdp2 = replace(ddp, dp=2), replace(fsdp, dp=2, gather_blocks=1)
    assert step(ddp2).step_s / step(fsdp2).step_s == pytest.approx(share, rel=0.17)
    assert step(fsdp2).step_s > step(replace(fsdp2, gather_blocks=3)).step_s
    assert step(fsdp).step_s == pytest.approx(step(ddp).step_s)


@pytest.mark.parametrize(("engine", "share"), [("megatron-lm", 0.75), ("fsdp", 1.0)])
def test_sequence_parallelism_gathers_what_is_cast(engine: str, share: float) -> None:
    """Of 16 bits that are scattered and 8 that are gathered, three quarters; ours cast after the gather."""
    plain = Training(replace(LLAMA, hidden=8192, heads=64, ffn=28672), tp=8, sequence_parallel=True, engine=engine)
    bf16, fp8 = (step(replace(plain, matmul=way, micro_batch=8)).tp_s for way in ("none", "fp8-tensor"))
    assert fp8 / bf16 == pytest.approx(share, rel=0.05)


# A trait: (its value, what else the training is, memory over that without it, time over that without it); 1: no change.
MEMORY_LESS, SAME, MORE = (0.0, 0.999), (1.0, 1.0), (1.001, 3.0)
TRAITS = {
    "grad_sum": ("bf16", {"dtype": "bf16"}, MEMORY_LESS, MEMORY_LESS),
    "tp_overlap": (True, {}, SAME, MEMORY_LESS),
    "fused_loss": ("kernel", {"pp": 1}, MEMORY_LESS, MEMORY_LESS),
    "states": ("bf16", {}, MEMORY_LESS, SAME),
    "offloaded_layers": (16, {}, MEMORY_LESS, (1.0, 3.0)),
    "whole_logits": (True, {"pp": 1, "micro_batch": 4}, MORE, SAME),
    "whole_gradients": (True, {"engine": "fsdp", "pp": 1, "sharded_optimizer": False}, MORE, (0.0, 1.0)),
    "attention": ("fa2", {}, SAME, MORE),
}


@pytest.mark.parametrize("name", TRAITS)
def test_a_trait_changes_what_it_says(name: str) -> None:
    value, others, memory, time = TRAITS[name]
    plain = replace(LONG, shape=replace(LLAMA, seq=8192), **others)
    stated = replace(plain, **{name: value})
    for found, (least, most) in (
        (allocated(stated) / allocated(plain), memory),
        (step(stated).step_s / step(plain).step_s, time),
    ):
        assert least <= found <= most


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
        replace(LONG, **fields)
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.hint


def test_a_row_with_an_unlisted_value_ends_the_benchmark_with_2(tmp_path) -> None:
    (path := tmp_path / "rows.json").write_text('{"rows": [{"id": "a-1", "attention": "fa9"}]}')
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "benchmarks" / "plan.py", "--rows", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "Error: a-1: attention is 'fa9', which is not listed"
    assert "hint: use one of unfused, triton" in done.stderr


def test_gradients_reduced_once_are_gathered_for_all_along() -> None:
    """Weights are gathered in each pass, gradients are reduced in the last micro-batch alone; until then a rank holds
    whole ones, whose place their shards take."""
    each = Training(LLAMA, dp=2, micro_batches=8, flash=True, engine="fsdp", grad_sum="fp32", states="fp32")
    once = replace(each, whole_gradients=True)
    slow = machine_named("h100-80g", 1, "infiniband 1x100G")
    exposed = [predict_step(run, slow).dp_s for run in (each, once)]
    assert 0.3 * exposed[0] < exposed[1] < 0.6 * exposed[0]
    pipelined = [replace(run, pp=2) for run in (each, once)]
    assert predict_step(pipelined[1], slow).dp_s < predict_step(pipelined[0], slow).dp_s / 4
    shards, whole = (predict_memory(run).stages[0] for run in (each, once))
    assert whole.gradients == 2 * shards.gradients
    assert whole.reserved == pytest.approx(shards.reserved + shards.gradients)


def test_our_fsdp_does_not_pay_deepspeeds_synchronizations() -> None:
    alike = [Training(LLAMA, dp=8, flash=True, engine=name) for name in ("fsdp", "deepspeed-3d")]
    assert states_of(alike[0]).synchronizations == states_of(replace(alike[0], engine="ddp")).synchronizations
    assert states_of(alike[0]).synchronizations < states_of(alike[1]).synchronizations
