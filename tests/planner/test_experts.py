"""Mixtures of experts in a plan: parameters and memory by stage, rows, dispatch, launches, and the search over ep."""

from dataclasses import replace
from unittest import mock

import pytest

from hpc_gpt.core.engines import states_of
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import LayoutError
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.planner import experts
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.links import Links
from hpc_gpt.planner.machine import DEFAULT, Rates
from hpc_gpt.planner.memory import kinds_of_stages, predict_memory, stage_expert_params, stage_params
from hpc_gpt.planner.question import Question
from hpc_gpt.planner.search import search
from hpc_gpt.planner.step_time import _StepModel, predict_step
from hpc_gpt.planner.table import other_ep_text
from tests.planner.machines import machine_named

GIB = 2**30
H100, B200 = (machine_named(device, 8, "infiniband 8x400G") for device in ("h100-80g", "b200"))
QWEN = preset("qwen3-30b-a3b")
DEEPSEEK = replace(preset("deepseek-v3"), mtp_layers=0)
BALANCED = Training(
    QWEN, dp=16, ep=16, micro_batches=8, flash=True, sharded_optimizer=True, routing="forced balance",
)  # fmt: skip


def test_experts_are_divided_by_ep_and_all_else_is_not():
    whole = 48 * 128 * 3 * 2048 * 768
    assert stage_expert_params(BALANCED, 0) == whole / 16
    assert stage_params(BALANCED, 0) - whole / 16 == pytest.approx(QWEN.params - whole)
    # Megatron-LM: experts over their own 1 replica have 6 + 12 bytes, all else 6 + 12 / 16.
    memory = predict_memory(BALANCED).stages[0]
    states = memory.parameters + memory.gradients + memory.optimizer
    assert states == pytest.approx((whole / 16 * 18 + (QWEN.params - whole) * 6.75) / GIB)


def test_the_dense_prefix_lies_on_the_first_stages():
    split = Training(DEEPSEEK, pp=16, dp=8, ep=8, micro_batches=16)
    assert kinds_of_stages(split)[:2] == ((3, 1), (0, 4))
    held = sum(stage_params(replace(split, ep=1), stage) for stage in range(16))
    assert held == pytest.approx(DEEPSEEK.params)
    assert stage_params(split, 0) < stage_params(split, 1)


def test_a_layer_for_later_tokens_is_on_the_last_stage():
    shape = replace(DEEPSEEK, mtp_layers=1)
    plain, later = (Training(one, pp=16, dp=8, ep=8, micro_batches=16, flash=True) for one in (DEEPSEEK, shape))
    assert stage_params(later, 15) - stage_params(plain, 15) > 1.3e9
    assert stage_params(later, 0) == stage_params(plain, 0)
    assert predict_memory(later).stages[15].allocated > predict_memory(plain).stages[15].allocated


def test_the_worst_load_counts_in_real_routing_alone():
    worst = VALUES["experts.worst_load"]
    real, alone, dropped = (replace(BALANCED, routing="real", **each) for each in ({}, {"ep": 1}, {"dropless": False}))
    assert [experts.worst_load(run) for run in (BALANCED, real, alone, dropped)] == [1, worst, 1, 1]


def test_a_copy_of_a_token_goes_to_each_node_or_to_each_expert():
    by_node, everywhere = (replace(BALANCED, dispatcher=name) for name in ("deepep", "alltoall"))
    links = Links(H100, DEFAULT)
    assert experts.copies_sent(everywhere, links)[1] == 4  # of 8 experts, half are on the other node
    assert experts.copies_sent(by_node, links)[1] == pytest.approx(1 - 0.5**8)
    assert experts.exchange_s(by_node, links) < experts.exchange_s(everywhere, links)
    # DeepSeek's tokens go to 4 of 8 groups of experts: to 4 of 8 nodes, one of them its own in half of the cases.
    grouped = Training(DEEPSEEK, dp=64, ep=64, flash=True)
    assert experts.copies_sent(grouped, links)[1] == pytest.approx(4 * 7 / 8)
    assert experts.copies_sent(replace(grouped, shape=replace(DEEPSEEK, expert_groups=None)), links)[1] > 4


def test_the_host_launches_each_expert_of_a_rank():
    def launching(**changes):
        return experts.launching_s(replace(BALANCED, **changes), 1e-3)

    few, many = launching(ep=16), launching(ep=1)
    assert many - few == pytest.approx(1e-3 * VALUES["experts.each"] * 120)
    biased = launching(shape=replace(QWEN, bias="all"))
    assert biased - few == pytest.approx(1e-3 * VALUES["experts.each"] * 8)
    assert launching(cuda_graphs=("full",)) == 0
    assert launching(cuda_graphs=("moe_router",)) < few


def waited(**changes):
    """Seconds of an expert layer in which the GPU waits for the host."""
    run, model = replace(BALANCED, **changes), _StepModel(H100, DEFAULT)
    return model._layer(run, Rates(H100, DEFAULT, run), 0).waited


def test_a_gpu_waits_where_the_host_waits_for_a_router():
    """The more experts a rank has, and the fewer rows they have, the longer."""
    few = {"ep": 2, "micro_batch": 2}  # 64 experts on a rank
    assert 0 < waited(**few) < waited(ep=1, micro_batch=2)
    assert waited(ep=2, micro_batch=4) < waited(**few)
    assert waited(**few, cuda_graphs=("full",)) == waited(ep=16, micro_batch=8) == 0
    ahead = [replace(BALANCED, **each) for each in ({"ep_overlap": True}, {"dropless": False})]
    assert [experts.waits_for_router(run) for run in (BALANCED, *ahead)] == [True, False, False]


def test_an_overlapped_exchange_hides_at_most_the_passes():
    def exchange(**changes):
        run, model = replace(BALANCED, **changes), _StepModel(H100, DEFAULT)
        layer = model._layer(run, Rates(H100, DEFAULT, run), 0)
        return layer.exchange, layer.forward_s + layer.backward_s

    for changes in ({"ep": 2}, {"dp": 128, "ep": 128, "dispatcher": "alltoall"}):
        (shown, _), (takes, passes) = exchange(**changes, ep_overlap=True), exchange(**changes)
        assert shown == pytest.approx(max(0, takes - passes) + DEFAULT.exposed * min(takes, passes))
        assert shown < takes


def test_rows_are_sorted_padded_and_biased():
    def moved(shape=QWEN, **changes):
        return experts.expert_pass_bytes(replace(BALANCED, shape=shape, **changes), shape.kinds[-1], 6)

    tokens, rows = BALANCED.tokens, 8 * BALANCED.tokens
    assert moved(dispatcher="alltoall") - moved(dispatcher="deepep") == pytest.approx(8 * QWEN.hidden * rows)
    assert moved(matmul="mxfp8") - moved() == pytest.approx(8 * QWEN.hidden * rows)
    assert moved(replace(QWEN, bias="all")) - moved() == pytest.approx(28 * QWEN.hidden * rows)
    # Ranks that share an expert send their own rows, and sort nothing that arrives if it is for one expert.
    one = {"dp": 128, "tp": 4, "ep": 128, "dispatcher": "alltoall", "sequence_parallel": True}
    less = moved(**one, etp=1) - 6 * 768 * rows / 4
    assert moved(**one, etp=4) - 6 * 768 / 4 * rows == pytest.approx(less)
    assert less == pytest.approx((4 * QWEN.hidden * 9 + VALUES["experts.router_bytes"] * 128) * tokens / 4)


def test_grouped_products_in_8_bits_are_slower_on_hopper_alone():
    def takes(machine, **changes):
        run = replace(BALANCED, **changes)
        return experts.expert_products_s(run, Rates(machine, DEFAULT, run), QWEN.kinds[-1])

    with mock.patch.dict(VALUES, {"experts.eight_bits.hopper": 0.5}):
        slower = [takes(machine, matmul="fp8-tensor") for machine in (H100, B200)]
        assert takes(H100) == takes(H100, matmul="none")
    with mock.patch.dict(VALUES, {"experts.eight_bits.hopper": 1.0}):
        usual = [takes(machine, matmul="fp8-tensor") for machine in (H100, B200)]
    assert slower == pytest.approx([2 * usual[0], usual[1]])


def test_the_loss_of_a_mixture_is_in_place():
    """Megatron-LM without a fused loss: 6 bytes a logit, where a dense model is counted with 10."""
    assert states_of(BALANCED).logit_bytes(BALANCED) == 6
    assert states_of(BALANCED).logit_bytes(replace(BALANCED, shape=preset("gpt2"), ep=1)) == 10


def test_who_gathers_ahead_hides_experts_under_fsdp(monkeypatch):
    run = replace(BALANCED, engine="fsdp", sharded_optimizer=False, zero_stage=3, ep=2)
    late = _StepModel(H100, DEFAULT)._gathers_s(run, 0, 1.0)
    monkeypatch.setattr(type(states_of(run)), "gathers_ahead", True)
    ahead = _StepModel(H100, DEFAULT)._gathers_s(run, 0, 1.0)
    assert 0 < ahead < DEFAULT.exposed * late


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": 3}, "ep 3"),
        ({"ep": 32}, "ep 32"),
        ({"shape": preset("gpt2"), "ep": 2}, "the model has none"),
    ],
)
def test_an_ep_that_does_not_divide_is_refused(changes, message):
    with pytest.raises(LayoutError, match=message):
        replace(BALANCED, **changes)


TRAITS = {
    "megatron-lm": {
        "flash": True,
        "fused_loss": "kernel",
        "grad_sum": "bf16",
        "routing": "forced balance",
        "dispatcher": "hybridep",
    }
}


def asked(shape, gpus, batch, machine=H100, **fixed):
    return Question(
        shape, gpus, machine.gpus_per_node, "bf16", batch, engines=("megatron-lm",), traits=TRAITS, fixed=fixed,
        matmul="fp8-tensor",
    ).of(shape)  # fmt: skip


def test_the_search_finds_the_ep_that_others_measured_as_best():
    """Megatron-Bridge trains qwen3-30b-a3b on 16 H100 with ep 16, or with pp 2 and ep 8, equally fast."""
    found = search(asked(QWEN, 16, 1024), H100)
    first, *others = [candidate.layout for candidate in found.best_of_layouts]
    assert (first.pp, first.ep) in ((1, 16), (2, 8))
    assert {Layout(1, 1, 16, ep=16), Layout(1, 2, 8, ep=8)} <= {first, *others[:3]}
    text = other_ep_text(found)
    assert text.startswith(f"ep {first.ep} is best of this tp, pp and cp: ")
    assert "does not fit" in text
    assert "times as long, " in text


def test_a_given_ep_is_not_searched():
    found = search(asked(QWEN, 16, 1024, ep=4, tp=1), H100)
    assert {candidate.training.ep for candidate in (*found.candidates, *found.too_large)} == {4}
    refused = search(asked(QWEN, 16, 1024, ep=3, tp=1), H100)
    assert not refused.candidates
    assert any("ep" in reason for reason in refused.left_out)


def test_a_search_over_ep_stays_quick():
    found = search(asked(preset("qwen3-235b-a22b"), 256, 1024), H100)
    assert found.best is not None
    assert found.memory_predictions < 8_000  # 3 s on a slow core


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_plan_asks_what_megatron_refuses_of_a_mixture(dtype: str) -> None:
    asked = Question(QWEN, 16, 8, dtype, 64, engines=("megatron-lm",))
    ways = {(layout.tp, layout.ep) for layout, why in asked.layouts() if why is None for _ in asked.ways(layout)}
    assert (max(ep for _, ep in ways) > 1) is (dtype == "bf16")
    assert {tp for tp, _ in ways} >= {1, 2}
    assert {parallel for parallel, _ in asked.techniques("megatron-lm", 2)} == {True}


def test_a_share_is_planned_for_whole_layers_of_each_chunk() -> None:
    asked = Question(QWEN, 16, 8, "bf16", 64, engines=("megatron-lm",), fixed={"recompute": "1/4"})
    runs = [run for layout, why in asked.layouts() if why is None for run in asked.ways(layout)]
    assert {run.pp for run in runs} >= {1, 2, 4}
    assert all(48 // (run.pp * run.vp) % 4 == 0 for run in runs)


def test_a_token_goes_once_to_each_rank_by_deepep():
    """Of 8 experts a token on 16 ranks, of two nodes of 8: less than a copy an expert, and more ranks need more."""
    links = Links(H100, DEFAULT)
    by_expert = experts.copies_sent(replace(BALANCED, dispatcher="alltoall"), links)
    by_rank = experts.copies_sent(replace(BALANCED, dispatcher="deepep"), links)
    reached = 16 * (1 - (15 / 16) ** 8)
    assert by_rank[0] == pytest.approx(reached * 7 / 8)
    assert by_rank[0] < QWEN.experts_per_token * 7 / 8
    assert by_rank[1] < by_expert[1]


def test_an_overlapped_exchange_takes_processors_from_the_passes():
    run = replace(BALANCED, dispatcher="deepep", ep_overlap=True)
    taken = predict_step(run, H100).ep_s
    with mock.patch.dict(VALUES, {"experts.taken.deepep": 0.0}):
        alone = predict_step(run, H100).ep_s
    assert alone < taken < predict_step(replace(run, ep_overlap=False), H100).ep_s
