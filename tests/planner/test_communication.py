"""Seconds of each exchange of a step, counted by hand, on links of one rate and without latency."""

from dataclasses import replace

import pytest

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.shape_split import kind_params
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.machine import DEFAULT
from hpc_gpt.planner.step_time import StepTime, predict_step
from tests.planner.machines import machine_named

RATE = 1e9  # bytes/s, in a node and between nodes; each GPU has a port
# So fast a device that it hides nothing and takes no time itself; nothing is overlapped but what is said to be.
MACHINE = replace(
    machine_named("h100-80g", 8, "infiniband 8x400G"), peak_tflops={"bf16": 1e12, "fp8": 1e12, "fp32": 1e12},
    memory_gb_s=1e12, node_gb_s=RATE / 1e9, network_gb_s=8 * RATE / 1e9, host_gb_s=RATE / 1e9, node_latency_s=0.0,
    network_latency_s=0.0,
)  # fmt: skip
EXACT = replace(DEFAULT, node=1.0, network=1.0, reduction=1.0, host_s=1e-15, step_s=1e-15)
H, LAYERS, SEQ, VOCAB = 512, 8, 256, 1024
RUN = Training(ModelShape(H, LAYERS, 8, vocab=VOCAB, seq=SEQ), micro_batches=4, flash=True, engine="deepspeed-3d")
STREAM = 2.0 * SEQ * H  # bytes of a micro-batch's activations between layers
LAYER, TABLE = kind_params(RUN.shape.kinds[-1], 1), VOCAB * H


def step(**changes) -> StepTime:
    return predict_step(replace(RUN, **changes), MACHINE, EXACT, ranged=False)


@pytest.mark.parametrize(
    ("changes", "part", "sent"),
    [
        # Four all-reduces of a layer and micro-batch, six with recomputation, each twice half of the bytes.
        ({"tp": 2}, "tp_s", 4 * LAYERS * 4 * 2 * STREAM / 2),
        ({"tp": 2, "recompute": "full"}, "tp_s", 4 * LAYERS * 6 * 2 * STREAM / 2),
        ({"tp": 4}, "tp_s", 4 * LAYERS * 4 * 2 * STREAM * 3 / 4),
        ({"tp": 2, "tp_overlap": True}, "tp_s", VALUES["overlap.tp"] * 4 * LAYERS * 4 * 2 * STREAM / 2),
        # Activations on, gradients back, of which a part is exposed.
        ({"pp": 2}, "p2p_s", 4 * (1 + DEFAULT.exposed) * STREAM),
        ({"pp": 2, "engine": "megatron-lm"}, "p2p_s", 4 * (1 + DEFAULT.exposed) * STREAM),
        ({"pp": 2, "tp": 2, "sequence_parallel": True}, "p2p_s", 4 * (1 + DEFAULT.exposed) * STREAM / 2),
        ({"pp": 2, "tp": 2, "engine": "megatron-lm"}, "p2p_s", 4 * (1 + DEFAULT.exposed) * (STREAM / 2 + STREAM / 2)),
        ({"pp": 2, "vp": 2, "engine": "megatron-lm"}, "p2p_s",
         4 * 2 * VALUES["overlap.p2p"] * (1 + DEFAULT.exposed) * STREAM),
        # Gradients of two bytes, a reduce-scatter and an all-gather; of a tied model the table is there once.
        ({"dp": 2}, "dp_s", 2 * 2 * (LAYERS * LAYER + TABLE) / 2),
        ({"dp": 4}, "dp_s", 2 * 2 * (LAYERS * LAYER + TABLE) * 3 / 4),
        ({"dp": 2, "grad_sum": "fp32"}, "dp_s", 2 * 4 * (LAYERS * LAYER + TABLE) / 2),
        ({"dp": 2, "shape": replace(RUN.shape, tied=False)}, "dp_s", 2 * 2 * (LAYERS * LAYER + 2 * TABLE) / 2),
        ({"dp": 2, "pp": 2}, "dp_s", 2 * 2 * (LAYERS / 2 * LAYER + TABLE) / 2),
        # FSDP gathers a layer twice and reduces it once for every micro-batch.
        ({"dp": 2, "engine": "fsdp"}, "dp_s", 4 * LAYERS * LAYER * (2 * 2 + 2) / 2),
        ({"dp": 2, "engine": "fsdp", "whole_gradients": True}, "dp_s", 4 * LAYERS * LAYER * (2 * 2 + 2 / 4) / 2),
        ({"dp": 2, "pp": 2, "engine": "fsdp", "whole_gradients": True}, "dp_s", LAYERS / 2 * LAYER * (2 * 2 + 2) / 2),
        # Kept on the host: there and back. Of three layers' activations what their passes do not hide, that is all.
        ({"activations_on_host": True}, "offload_s", 4 * LAYERS * 2 * STREAM / VALUES["host.copies"]),
    ],
)  # fmt: skip
def test_each_exchange_takes_its_bytes_over_the_rate(changes: dict, part: str, sent: float) -> None:
    assert getattr(step(**changes), part) == pytest.approx(sent / RATE, rel=1e-3)


def test_layers_on_the_host_are_copied_beside_the_others() -> None:
    three, six = (step(offloaded_layers=layers).offload_s for layers in (3, 6))
    assert 0 < three == pytest.approx(six / 2, rel=1e-3)
    slow = replace(MACHINE, memory_gb_s=1e-3)
    assert predict_step(replace(RUN, offloaded_layers=3), slow, EXACT).offload_s == 0.0


def test_all_that_is_offloaded_is_sent_for_every_micro_batch() -> None:
    some = {"dp": 2, "zero_stage": 3, "engine": "deepspeed-zero"}
    moved = [step(**some, offload=way).offload_s for way in ("optimizer", "full")]
    params = (LAYERS * LAYER + TABLE) / 2
    assert moved[1] - moved[0] == pytest.approx(params * 2 * 2 * 4 / VALUES["host.copies"] / RATE, rel=1e-3)


@pytest.mark.parametrize(
    ("gpus", "host_s", "band"), [(8, 1e-15, 0.12), (16, 1e-15, 0.16), (8, 1.0, 0.16), (16, 1.0, 0.2)]
)
def test_the_range_is_wider_on_several_nodes_and_by_the_host(gpus: int, host_s: float, band: float) -> None:
    """By 4 of a hundred each; and by the network's share of the step, of which a fast one has none."""
    fast = replace(MACHINE, network_gb_s=1e15, node_gb_s=1e15, memory_gb_s=1e3)
    run = replace(RUN, dp=gpus, engine="ddp")
    assert predict_step(run, fast, replace(EXACT, host_s=host_s), ranged=False).band == pytest.approx(band, abs=1e-3)
