"""The bytes that each engine's rules give, branch by branch, and the words that it hands its program: sums by hand."""

from dataclasses import astuple, replace
from typing import Any

import pytest

from hpc_gpt.core.engines import engine_of, engines
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.presets import PRESETS
from hpc_gpt.core.settings.shape_split import kind_params, outer_params
from tests.core.engines.trainings import LLAMA, SMALL

M = 1e6
LLAMA_8B = PRESETS["llama3.1-8b"]
TABLE = 50304 * 2048  # SMALL's embedding
ALONE = {"dp": 1}
HOST: dict[str, Any] = {"offload": "optimizer"}


def deepspeed(stage: int, dtype: str = "bf16", engine: str = "deepspeed-zero", dp: int = 4, **more: Any) -> Training:
    return Training(more.pop("shape", SMALL), dp=dp, zero_stage=stage, dtype=dtype, engine=engine, **more)


@pytest.mark.parametrize(
    ("training", "held"),
    [
        # (weights, gradients, optimizer, gradients in the step, of them allocated anew, on the host) of a parameter
        (deepspeed(0, "fp32"), (4, 4, 8, 4, 4, 0)), (deepspeed(1, "fp32"), (4, 4, 3, 4, 4, 0)),
        (deepspeed(2, "fp32"), (4, 1, 3, 1, 1, 0)), (deepspeed(3, "fp32"), (1, 1, 3, 1, 0, 0)),
        (deepspeed(0), (2, 4, 3, 4, 0, 0)), (deepspeed(1), (2, 4, 3, 4, 0, 0)), (deepspeed(2), (2, 1, 3, 1, 1, 0)),
        (deepspeed(3), (0.5, 1, 3, 1, 0, 0)), (deepspeed(1, "fp16"), (2, 2, 3, 3, 3, 0)),
        (deepspeed(2, "fp16"), (2, 0.5, 3, 1.5, 1.5, 0)), (deepspeed(3, "fp16"), (0.5, 0.5, 3, 1.5, 1, 0)),
        # Of 2.008e9 parameters a rank a group of 1e9 is copied at a time; over tp 4 too a rank has but one group.
        (deepspeed(3, "fp16", shape=LLAMA_8B), (0.5, 0.5, 3, 0.5 + 1 / 2.00756531, 1 / 2.00756531, 0)),
        (deepspeed(3, "fp16", shape=LLAMA_8B, tp=4), (0.5, 0.5, 3, 1.5, 1, 0)),
        # The host has 16 / dp, under ZeRO-1 and -2 the copy that is sent back and the sums of a step, too.
        (deepspeed(1, **HOST), (2, 4, 0, 4, 4, 5.5)), (deepspeed(2, **HOST), (2, 0, 0, 0, 0, 5.5)),
        (deepspeed(2, "fp16", **HOST), (2, 0, 0, 0, 0, 4.5)),
        (deepspeed(2, "fp16", micro_batches=2, **HOST), (2, 0, 0, 0, 0, 5)),
        (deepspeed(2, "fp32", micro_batches=2, **HOST), (4, 0, 0, 0, 0, 6)),
        (deepspeed(3, **HOST), (0.5, 0, 0, 0, 0, 4)), (deepspeed(3, "fp16", **HOST), (0.5, 0, 0, 0, 0, 4.5)),
        (deepspeed(3, offload="full"), (0, 0, 0, 0, 0, 4.5)),
        (deepspeed(3, offload_ratio=0.25, **HOST), (0.5, 0, 3, 0, 0, 1)),
        (Training(SMALL, dp=4), (2, 4, 12, 4, 0, 0)),
        (Training(SMALL, dp=4, sharded_optimizer=True), (2, 4, 3, 4, 0, 0)),
        (Training(SMALL, dp=4, dtype="fp32"), (4, 4, 8, 4, 4, 0)),
        (Training(SMALL, dp=4, dtype="fp32", sharded_optimizer=True), (4, 4, 2, 4, 4, 0)),
    ],
)  # fmt: skip
def test_the_states_of_a_parameter(training: Training, held: tuple[float, ...]) -> None:
    facts = engine_of(training)
    assert astuple(facts.state_bytes(training)) == pytest.approx(held)
    assert facts.optimizer_ranks(training) == (4 if training.zero_stage or training.sharded_optimizer else 1)


@pytest.mark.parametrize(
    ("training", "buckets"),
    [
        # Of 300 M parameters; a bucket has 500 M on several ranks and 50 M on one, and is then shorter than the table.
        (deepspeed(0, "fp32"), 4 * 300 * M), (deepspeed(0, "fp32", **ALONE), 0), (deepspeed(1), 4 * 300 * M),
        (deepspeed(1, **ALONE), 0), (deepspeed(1, "fp32"), 4 * 500 * M), (deepspeed(1, "fp32", **ALONE), 4 * 50 * M),
        (deepspeed(1, "fp16"), 2 * 500 * M), (deepspeed(1, "fp16", engine="deepspeed-3d"), 2 * 2 * 500 * M),
        (deepspeed(1, **HOST), 4 * 500 * M), (deepspeed(2), (2 * 2 * 500 + 6 * 300) * M),
        (deepspeed(2, **HOST), (2 * 500 + 6 * 300) * M), (deepspeed(2, **ALONE), 2 * 50 * M + 6 * TABLE),
        (deepspeed(2, **ALONE, **HOST), 2 * 50 * M + 6 * TABLE + 8 * TABLE),
        (deepspeed(2, "fp16"), (2 * 2 * 500 + 2 * 300) * M), (deepspeed(2, "fp16", **ALONE), 2 * 50 * M),
        (deepspeed(2, "fp16", micro_batches=2, **ALONE), (2 * 50 + 2 * 300) * M),
        (deepspeed(2, "fp16", micro_batches=2, **ALONE, **HOST), 2 * 50 * M + 8 * TABLE),
        (deepspeed(2, "bf16", micro_batches=2, **ALONE), 2 * 50 * M + 6 * TABLE),
        (deepspeed(2, "fp32", micro_batches=2), (2 * 4 * 500 + 4 * 300) * M),
        (deepspeed(2, "fp32", micro_batches=2, **ALONE), (4 * 50 + 4 * 300) * M),
        (deepspeed(3), (4 * 500 + 4 * 300 * 1.25 + 2 * 50) * M), (deepspeed(3, **ALONE), 4 * 50 * M + 4 * TABLE * 2),
        (deepspeed(3, "fp16", dp=2), (2 * 500 + 2 * 300 * 1.5 + 2 * 50) * M),
        (deepspeed(3, "fp32", dp=2), (4 * 500 + 4 * 300 * 1.5 + 4 * 50) * M),
        (deepspeed(3, shape=LLAMA, **ALONE, **HOST), (4 * 50 + 4 * 300 * 2 + 8 * 250) * M),
        (deepspeed(3, shape=LLAMA, tp=8, **ALONE), 4 * 50 * M + 4 * 128256 * 512 * 2),
    ],
)  # fmt: skip
def test_the_buckets_of_a_reduction(training: Training, buckets: float) -> None:
    facts = engine_of(training)
    assert facts.buckets(training, 300 * M) == pytest.approx(buckets, rel=1e-9)
    bucket = 500 * M if training.dp > 1 else 50 * M
    lasting = bucket * (2 if training.dtype == "fp16" else 4) if training.zero_stage == 3 else 0
    assert facts.lasting_bucket(training) == lasting


@pytest.mark.parametrize(
    ("stage", "dtype", "modes"),
    [
        # Bytes of the update for each of its modes, in 75 M parameters of 300 M on 4 ranks.
        (1, "bf16", (0, 4, 8)), (2, "bf16", (0, 4, 8)), (3, "bf16", (0, 4, 8)), (3, "fp16", (0, 4, 8)),
        (2, "fp16", (2, 2, 6)), (1, "fp32", (4, 4, 8)), (3, "fp32", (0, 4, 8)),
    ],
)  # fmt: skip
def test_the_temporaries_of_an_update(stage: int, dtype: str, modes: tuple[float, ...]) -> None:
    for mode, bytes_each in zip(("fused", "foreach", "for-loop"), modes, strict=True):
        training = deepspeed(stage, dtype, optimizer_mode=mode)
        facts = engine_of(training)
        assert facts.update_bytes(training, 300 * M, 7.0, 9.0) == bytes_each * 75 * M
        assert facts.update_bytes(replace(training, **HOST), 300 * M, 7.0, 9.0) == 0
        share = 1000 if stage == 3 else 2000  # ZeRO-3 updates groups of 1000 M
        assert facts.update_bytes(training, 8000 * M, 7.0, 9.0) == bytes_each * share * M


def test_the_temporaries_of_pytorchs_update() -> None:
    for training in (deepspeed(0, "fp32"), Training(SMALL, engine="ddp", dp=4)):
        for mode, size in (("fused", 0.0), ("foreach", 1200 * M), ("for-loop", 84.0)):
            each = replace(training, optimizer_mode=mode)
            assert engine_of(each).update_bytes(each, 300 * M, 7.0, 9.0) == size
            sharded = replace(each, sharded_optimizer=True)
            assert engine_of(each).update_bytes(sharded, 300 * M, 7.0, 9.0) == (size / 4 if mode == "foreach" else size)
        loop = replace(training, optimizer_mode="for-loop")
        assert engine_of(loop).update_bytes(loop, 300 * M, 7.0, 90.0) == 4 * 2 * 90


def test_what_zero_3_gathers() -> None:
    facts = engines()["deepspeed-zero"]
    large = replace(LLAMA, hidden=8192, heads=64)
    few = replace(SMALL, layers=2)
    for training, live in (
        (deepspeed(3), 1000 * M),
        (deepspeed(3, shape=few), 2 * kind_params(few.kinds[-1], 1) + outer_params(few, 1, 1, 0)),
        (deepspeed(3, "fp32", shape=large), 1000 * M),
        (deepspeed(3, offload="full", **ALONE), 1000 * M),
    ):
        shape, width = training.shape, 4 if training.dtype == "fp32" else 2
        layer, outer = kind_params(shape.kinds[-1], 1), outer_params(shape, 1, 1, 0)
        loss = max(live, layer + outer)
        assert facts.gathered(training, gradients=False) == (width * live, width * loss)
        assert facts.gathered(training) == (width * (live + layer), width * (loss + outer))
    for training in (deepspeed(2), deepspeed(3, **ALONE), deepspeed(3, **ALONE, **HOST)):
        assert facts.gathered(training) == (0, 0)


@pytest.mark.parametrize(
    ("more", "logit", "evaluated", "overwrites"),
    [
        # Of our loss, in 16 bits and in fp32.
        ({}, (12, 12), (10, 12), False), ({"tp": 2}, (10, 8), (6, 8), False),
        ({"compiled_loss": True}, (4, 8), (2, 4), False),
        ({"one_pass_loss": True}, (2, 4), (2, 4), True), ({"compiled_head": True}, (2, 4), (10, 12), True),
        ({"compiled_loss": True, "loss_chunks": 2}, (2, 4), (2, 4), True),
        ({"loss_chunks": 2}, (12, 12), (10, 12), False),
        ({"compiled_head": True, "tp": 2}, (10, 8), (6, 8), False),
    ],
)  # fmt: skip
def test_the_bytes_of_a_logit(more: dict[str, Any], logit: tuple, evaluated: tuple, overwrites: bool) -> None:
    facts = engines()["ddp"]
    odd = replace(SMALL, vocab=50000)
    for place, dtype in enumerate(("bf16", "fp32")):
        training = Training(odd, engine="ddp", dtype=dtype, **more)
        assert facts.logit_bytes(training) == logit[place]
        assert facts.evaluated_logit_bytes(training) == evaluated[place]
        assert facts.overwrites_logits(training) is overwrites
    whole = Training(replace(SMALL, vocab=SMALL.padded_vocab), engine="ddp", dtype="fp32", **more)
    assert facts.evaluated_logit_bytes(whole) == (8 if evaluated[1] == 12 else evaluated[1])  # nothing to cut off


def test_the_bytes_that_are_reduced_and_a_logit_of_megatron() -> None:
    facts = engines()["megatron-lm"]
    for dtype, reduced, logit in (("bf16", 4, 10), ("fp16", 2, 10), ("fp32", 2, 16)):
        training = Training(SMALL, dtype=dtype)
        assert (facts.reduced_bytes(training), facts.logit_bytes(training)) == (reduced, logit), dtype
        assert facts.reduced_bytes(replace(training, grad_sum="fp32")) == 4
        assert facts.reduced_bytes(replace(training, grad_sum="bf16")) == 2
    plain = engines()["ddp"]
    assert [plain.reduced_bytes(Training(SMALL, engine="ddp", grad_sum=each)) for each in ("fp32", None)] == [4, 2]


REDUCE, GATHER, PRODUCTS = "--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap"
OF_DP, OF_TP = {"dp_overlap": True, "gathers_wait": False}, {"tp_overlap": True}
SHARDED: dict[str, Any] = {"dp": 2, "sharded_optimizer": True}
SPLIT: dict[str, Any] = {"tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("more", "arguments", "changed"),
    [
        ({}, (), {}), ({"sharded_optimizer": True}, (), {}), ({"dp": 2}, (REDUCE,), OF_DP),
        ({"cp": 2}, (REDUCE,), OF_DP),
        (SHARDED, (REDUCE, GATHER), OF_DP), ({**SHARDED, "dp_overlap": True}, (), {}),
        ({**SHARDED, "dp_overlap": True, "gathers_wait": True}, (GATHER,), OF_DP),
        ({"dp": 2, "dp_overlap": True, "gathers_wait": True}, (), {}), ({"tp": 2}, (), {}),
        (SPLIT, (PRODUCTS,), OF_TP), ({**SPLIT, "tp_overlap": True}, (), {}),
        ({**SHARDED, **SPLIT}, (REDUCE, GATHER, PRODUCTS), OF_DP | OF_TP),
    ],
)  # fmt: skip
def test_what_hides_communication_is_what_is_not_hidden(more: dict, arguments: tuple, changed: dict) -> None:
    assert engines()["megatron-lm"].overlaps(Training(SMALL, **more)) == (arguments, changed)


def test_chunks_are_an_argument() -> None:
    facts, option = engines()["megatron-lm"], "--num-layers-per-virtual-pipeline-stage"
    for words, chunks in (((), 1), ((option, "3"), 4), ((f"{option}=2",), 6), ((option, "0"), 1), ((option, "x"), 1),
                          ((option, "24"), 1), ((option,), 1)):  # fmt: skip
        assert facts.chunks(Engine("megatron-lm", megatron_args=words), 24, 2) == chunks, words
    given = Engine("megatron-lm", megatron_args=("--a", option, "4", f"{option}=2", "--b", "5"))
    for vp, added in ((1, ()), (3, (option, "4"))):
        engine = facts.with_chunks(given, Training(SMALL, pp=2, vp=vp))
        assert engine.megatron_args == ("--a", "--b", "5", *added)
