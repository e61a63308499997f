"""Every term of a prediction, of trainings that differ in one thing: `parts.txt`, to be read in review.

How near the sums are to what others measured is in test_published.py, and what a rank of ours really holds in
test_held_bytes.py. Here each constant and each branch shows: of the planner's step_time, layer_time, memory,
layer_bytes, links and experts, and of what engines hold: hpc_gpt.core.engines.base.deepspeed, hpc_gpt.core.engines.ddp,
hpc_gpt.core.engines.fsdp and hpc_gpt.core.engines.megatron_lm. A line is `BASE KEY=VALUE …: figures`; the figures are

layer     bytes that a token moves in one layer: forward, backward, core of attention, again, head; then its FLOPs
exchange  bytes that a step sends: tp, cp, p2p, dp, offload, where nothing is hidden and a link has no latency; bubble
step      ms of a step on eight a node of H100s, or of `on=DEVICE`: each part, and the share that it may err by
memory    bytes a parameter: weights, gradients, optimizer, in the step, of them anew, host; MB of 300 M parameters:
          buckets, update, gathered in the passes and at the loss; bytes of a logit, in an evaluation, of a gradient
          that is reduced; and MiB of the deciding stage: parameters to buffers, reserved, host

pytest tests/planner/test_parts.py --force-regen     after a change that is meant
"""

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_gpt.core.engines import engine_of, states_of
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.planner.layer_time import head_s, layer_time
from hpc_gpt.planner.machine import DEFAULT
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.step_time import StepTime, _StepModel, predict_step
from tests.core.engines.trainings import LLAMA, PROGRAMS, SMALL
from tests.planner.machines import machine_named

PARTS = Path(__file__).with_name("parts.txt")
# One byte a second, or one FLOP.
BYTES: Any = SimpleNamespace(bytes=1.0, forward=math.inf, backward=math.inf, plain=math.inf,
                             product_s=lambda *sizes: 0.0, layer_product_s=lambda *sizes: 0.0)  # fmt: skip
FLOPS: Any = SimpleNamespace(bytes=math.inf, forward=1.0, backward=1.0, plain=1.0,
                             product_s=lambda m, n, k, times=1: 2.0 * m * n * k * times,
                             layer_product_s=lambda m, n, k: 2.0 * m * n * k)  # fmt: skip
H100 = machine_named("h100-80g", 8, "infiniband 8x400G")
# So fast a device that it hides nothing, with links of 1 GB/s.
LINKS = replace(
    H100, peak_tflops={"bf16": 1e12, "fp8": 1e12, "fp32": 1e12}, memory_gb_s=1e12, node_gb_s=1.0, network_gb_s=8.0,
    host_gb_s=1.0, node_latency_s=0.0, network_latency_s=0.0,
)  # fmt: skip
EXACT = replace(DEFAULT, node=1.0, network=1.0, reduction=1.0, host_s=1e-15, step_s=1e-15)

THIN = Training(ModelShape(512, 4, 8, vocab=1024, seq=64), flash=True, engine="ddp", micro_batch=2)
SENT = Training(ModelShape(512, 8, 8, vocab=1024, seq=256), micro_batches=4, flash=True, engine="deepspeed-3d")
BASES = {
    "thin": THIN,
    "gated": replace(
        THIN, shape=replace(THIN.shape, mlp="swiglu", positions="rope", tied=False, kv_heads=2, ffn=1024, bias="none")
    ),
    "wide": replace(THIN, shape=replace(THIN.shape, heads=4)),  # heads of 128
    "sent": SENT,
    "grouped": replace(SENT, shape=replace(SENT.shape, kv_heads=2, tied=False)),
    "small": Training(SMALL, dp=4, engine="deepspeed-zero"),
    "sharded": Training(SMALL, dp=4, sharded_optimizer=True),
    "llama": Training(LLAMA, dp=4, engine="deepspeed-zero", flash=True),
    "published": Training(
        ModelShape(6144, 40, 32, vocab=50688, seq=1024), tp=4, pp=4, micro_batches=4, recompute="full", dtype="fp16",
        program_states=PROGRAMS["megatron-2021-fp16"],
    ),
    "gpt2": Training(preset("gpt2"), micro_batch=32, engine="ddp", flash=True),
    "gpt3": Training(ModelShape(12288, 96, 96, seq=2048), tp=8, pp=8, micro_batches=64, flash=True, dp=2),
    "long": Training(
        replace(LLAMA, seq=65536), tp=2, pp=2, dp=4, micro_batches=8, flash=True, sharded_optimizer=True,
        sequence_parallel=True,
    ),
    "mixture": Training(
        preset("qwen3-30b-a3b"), tp=2, dp=8, ep=4, micro_batches=8, flash=True, sequence_parallel=True,
        sharded_optimizer=True,
    ),
}  # fmt: skip


def of_layer(run: Training) -> Iterator[float]:
    tokens = run.micro_batch * run.shape.seq
    for rates in (BYTES, FLOPS):
        layer = layer_time(run, rates)
        parts = (layer.forward_s, layer.backward_s, layer.core_s, layer.again_s, head_s(run, rates))
        yield from (part / tokens for part in parts)


def of_exchange(run: Training) -> Iterator[float]:
    step = predict_step(run, LINKS, EXACT, ranged=False)
    yield from (1e9 * part for part in (step.tp_s, step.cp_s, step.p2p_s, step.dp_s, step.offload_s))
    yield step.bubble_s / step.step_s


def of_step(run: Training, device: str = "h100-80g") -> Iterator[float]:
    step = predict_step(run, machine_named(device, 8, "infiniband 8x400G"))
    yield from (1000 * getattr(step, part.name) for part in fields(StepTime) if part.name != "band")
    yield step.band


def of_memory(run: Training) -> Iterator[float]:
    facts = states_of(run)
    yield from astuple(facts.state_bytes(run))
    if run.program_states is None:
        facts = engine_of(run)
        mb = facts.buckets(run, 3e8), facts.update_bytes(run, 3e8, 7e6, 9e6), *facts.gathered(run)
        yield from (size / 1e6 for size in mb)
        yield facts.logit_bytes(run)
        yield facts.evaluated_logit_bytes(run) if facts.counts_evaluation else 0
        yield facts.reduced_bytes(run)
    memory = predict_memory(run, H100)
    stage = memory.stages[memory.deciding]
    parts = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "reserved", "host")
    yield from (1024 * getattr(stage, part) for part in parts)


KINDS: dict[str, Callable[..., Iterator[float]]] = {
    "layer": of_layer, "exchange": of_exchange, "step": of_step, "memory": of_memory,
}  # fmt: skip


def training_of(words: str) -> Training:
    """`BASE KEY=VALUE …`; `shape.KEY` is one of the shape, `of` names another program."""
    base, *changes = words.split()
    run = BASES[base]
    for change in changes:
        key, _, text = change.partition("=")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        if key.startswith("shape."):
            key, value = "shape", replace(run.shape, **{key.removeprefix("shape."): value})
        elif key == "of":
            key, value = "program_states", PROGRAMS[text]
        run = replace(run, **{key: value})
    return run


def test_every_term_of_a_prediction_is_as_written(request: pytest.FixtureRequest) -> None:
    text = PARTS.read_text(encoding="utf-8")
    lines, kind = [], ""
    for line in text.splitlines():
        words, colon, _ = line.partition(":")
        kind = line.strip("[]") if line.startswith("[") else kind
        if colon:
            base, _, device = words.partition(" on=")
            figures = KINDS[kind](training_of(base), *filter(None, [device]))
            line = f"{words}: {' '.join(f'{figure:.6g}' for figure in figures)}"
        lines.append(line)
    found = "\n".join(lines) + "\n"
    if request.config.getoption("force_regen"):
        PARTS.write_text(found, encoding="utf-8")
    assert found.splitlines() == PARTS.read_text(encoding="utf-8").splitlines()


def test_muons_products_are_by_matrix_and_shared_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps of 2 r^2 (2 c + r): gpt2 has four matrices of 768 x 768 and two of 768 x 3072 in each layer."""
    square, oblong = 10 * 768**2 * 3 * 768, 10 * 768**2 * (2 * 3072 + 768)
    run, model = replace(BASES["gpt2"], optimizer="muon"), _StepModel(LINKS, EXACT)
    monkeypatch.setattr("hpc_gpt.planner.step_time.Rates", lambda *_: FLOPS)
    assert model._products_s(run) == pytest.approx(12 * (4 * square + 2 * oblong))
    assert model._products_s(replace(run, dp=4)) == pytest.approx(3 * (4 * square + 2 * oblong))
    # The rank that updates the embedding, too, has fewer matrices, so the others have more.
    sharded = model._products_s(replace(run, dp=4, sharded_optimizer=True))
    assert 3 * (4 * square + 2 * oblong) < sharded < 4 * (4 * square + 2 * oblong)
    for many in (replace(run, dp=512), replace(run, dp=512, sharded_optimizer=True)):
        assert model._products_s(many) == oblong  # the rank with the largest matrix is waited for
    assert model._products_s(replace(run, optimizer="adamw")) == 0
