"""On a GPU: engines and dtypes beside a plain process, checkpoints, fp16's scale, offloading, the flight recorder, the
attention kernels, predicted memory, evaluations, and a resume to the last digit. `pytest -m gpu tests/trainer`:
no network.
"""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.training import training_of
from hpc_gpt.trainer.engines.build import build_engine
from hpc_gpt.trainer.model.folder_tensors import write_hf
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.ranks import write_flight_record
from tests.distributed.equality_cases import MODELS, STEPS, Case, micro_batches
from tests.distributed.reference import reference
from tests.distributed.test_given_weights import unpadded
from tests.distributed.trainings import SAVED, save_now, saved_weights
from tests.trainer.gpu import NEAR, ON_GPU, train
from tests.trainer.launch import figures, lines, new_run, settings
from tests.waiting import wait_for

pytestmark = ON_GPU
ONE = Layout(1, 1, 1)

DDP, FSDP = Engine("ddp"), Engine("fsdp")
ONE_PASS = [
    Engine("ddp", one_pass_loss=True),
    Engine("ddp", compile="edges", one_pass_loss=True),
    Engine("fsdp", one_pass_loss=True),
    Engine("deepspeed-zero", 3, one_pass_loss=True),
]
# What the expected rates are of. Gated MLPs have no biases.
LEVERS = Engine("ddp", compile="edges", one_pass_loss=True, keep_residuals=True)
OTHERS = [model for model in MODELS if model != "gpt2"]
IN_EACH_DTYPE = [
    DDP,
    Engine("ddp", one_pass_loss=True),
    FSDP,
    Engine("fsdp", one_pass_loss=True),
    Engine(zero_stage=1),
]
CASES = [
    *(Case(ONE, engine, dtype, clip=0.25) for engine in IN_EACH_DTYPE for dtype in ("fp32", "bf16", "fp16")),
    *(Case(ONE, engine, "bf16", clip=0.25) for engine in (Engine("ddp", compile="edges"), LEVERS)),
    Case(ONE, Engine("ddp", compile="edges", keep_residuals=True), "bf16", clip=0.25),
    *(Case(ONE, Engine("ddp", compile=how, loss_chunks=3), "bf16", clip=0.25) for how in ("block", "edges", "whole")),
    Case(ONE, Engine("fsdp", offload="full"), "bf16"),
    *(Case(ONE, Engine("deepspeed-zero", stage), "bf16", clip=0.25) for stage in (1, 2, 3)),
    Case(ONE, Engine("deepspeed-zero", 3), "fp32", clip=0.25),
    *(Case(ONE, Engine("deepspeed-zero", 3, one_pass_loss=True), dtype, clip=0.25) for dtype in ("fp32", "bf16")),
    Case(ONE, Engine("deepspeed-zero", 2), "fp16", clip=0.25),
    Case(ONE, Engine("deepspeed-zero", 1, offload="optimizer"), "fp32"),
    Case(ONE, Engine("deepspeed-zero", 3, offload="full"), "bf16"),
    *(Case(ONE, Engine("deepspeed-zero", 3, offload="optimizer"), dtype, clip=0.25) for dtype in ("fp32", "bf16")),
    Case(ONE, Engine("hf-deepspeed", 3), "bf16"),
    *(Case(ONE, DDP, dtype, clip=0.25, model=model) for model in OTHERS for dtype in ("fp32", "bf16", "fp16")),
    *(
        Case(ONE, engine, "bf16", clip=0.25, tied=tied, model=model)
        for engine in (FSDP, Engine("deepspeed-zero", 3), Engine(zero_stage=1), LEVERS)
        for model, tied in (("llama", False), ("qwen3", True))
    ),
    Case(ONE, Engine("hf-deepspeed", 3), "bf16", model="llama"),
    # Rotation's tables within compiled blocks of which a part is computed again.
    *(
        Case(ONE, Engine(name, compile="block", recompute="selective"), dtype, clip=0.25, model="llama")
        for name in ("ddp", "fsdp")
        for dtype in ("fp32", "bf16")
    ),
    # Documents: in 16 bits by the kernel for documents in a row.
    *(
        Case(ONE, engine, dtype, clip=0.25, micro_batches=4, model=model, documents=True)
        for engine in (
            DDP,
            Engine("ddp", compile="block"),
            Engine("ddp", recompute="full", activation_offload=True),
            FSDP,
            Engine("deepspeed-zero", 3),
            Engine(zero_stage=1, recompute="selective"),
        )
        for model, dtype in (("gpt2", "bf16"), ("llama", "bf16"), ("llama", "fp32"))
    ),
]
BEGINNINGS = [DDP, FSDP, Engine(zero_stage=1), Engine("deepspeed-zero", 1), Engine("deepspeed-zero", 3)]


def skip_unless_installed(engine: Engine, model: str = "gpt2") -> None:
    """Skips the test if a part that only this engine or model needs is not installed beside the GPU."""
    if (engine.name == "hf-deepspeed" or model != "gpt2") and importlib.util.find_spec("transformers") is None:
        pytest.skip("no transformers")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_engine_trains_saves_and_resumes(case: Case, device: torch.device, tmp_path: Path) -> None:
    skip_unless_installed(case.engine, case.model)
    resolved = case.resolved
    engine = build_engine(resolved, device)
    losses = train(engine, resolved, range(SAVED))
    save_now(engine, tmp_path)
    losses += train(engine, resolved, range(SAVED, STEPS))
    # transformers' model has the same weights and another rounding.
    assert losses == pytest.approx(reference(resolved).losses, abs=NEAR[case.dtype])
    resumed = build_engine(resolved, device)
    resumed.load(tmp_path)
    assert resumed.step == SAVED
    assert train(resumed, resolved, range(SAVED, STEPS)) == pytest.approx(losses[SAVED:], abs=NEAR[case.dtype] / 10)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", BEGINNINGS, ids=lambda engine: f"{engine.name} {engine.zero_stage}")
def test_training_begins_from_a_folders_fp32_numbers(engine, dtype, device, tmp_path):
    """A step at a rate of zero keeps every bit of them, in bf16 in the masters."""
    pytest.importorskip("safetensors")
    resolved = Case(ONE, engine, dtype, clip=0.25).resolved
    wanted = {name: weight.detach() for name, weight in Gpt(resolved.model, 7).named_parameters()}
    write_hf(resolved.model, ((name, unpadded(name, weight)) for name, weight in wanted.items()), tmp_path / "init")
    still = dataclasses.replace(resolved.train, lr=0.0, min_lr=0.0, weight_decay=0.0, init=str(tmp_path / "init"))
    resolved = dataclasses.replace(resolved, train=still)
    built = build_engine(resolved, device)
    train(built, resolved, range(1))
    kept = saved_weights(built, resolved, tmp_path / "checkpoint")
    assert kept.keys() == wanted.keys()
    assert [name for name in kept if not torch.equal(unpadded(name, kept[name]), unpadded(name, wanted[name]))] == []


@pytest.mark.parametrize("engine", [DDP, FSDP], ids=lambda engine: engine.name)
def test_a_loss_scale_too_high_is_halved_and_its_step_left_out(engine: Engine, device: torch.device) -> None:
    resolved = Case(ONE, engine, "fp16").resolved
    built: Any = build_engine(resolved, device)
    built._scaler.restore({**built._scaler.read(), "scale": 2.0**40})
    before = [parameter.detach().clone() for parameter in built.module.parameters()]
    pairs = [(tokens.cuda(), targets.cuda()) for tokens, targets in micro_batches(resolved, 0, 0)]
    assert bool(built.train_step(iter(pairs)).skipped)
    assert built._scaler.read()["scale"] == 2.0**39
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, built.module.parameters(), strict=True))


def test_what_zero_3_offloads_is_pinned_in_place(device: torch.device) -> None:
    resolved = Case(ONE, Engine("deepspeed-zero", 3, offload="full"), "bf16").resolved
    resolved = dataclasses.replace(resolved, model=dataclasses.replace(resolved.model, hidden=256))
    pinned_before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    engine: Any = build_engine(resolved, device)
    wrapped = engine._engine.optimizer
    large = [flat.grad for flat in wrapped.fp32_partitioned_groups_flat if flat.grad.nbytes >= 1 << 20]
    large += [one for one in wrapped.param_groups_fp16_flat_cpu_memory if one.nbytes >= 1 << 20]
    assert large
    assert all(one.is_pinned() for one in large)
    # Not by torch, which would round each up to a power of two.
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - pinned_before < 1 << 20
    train(engine, resolved, range(2))


def test_the_flight_recorder_has_a_record_of_nccl(device: torch.device, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(7, device=device))
    torch.cuda.synchronize()
    attempt = Attempt(tmp_path)
    write_flight_record(attempt, 0)
    entries = json.loads((tmp_path / "flight" / "0.json").read_text())["entries"]
    assert any(entry["profiling_name"] == "nccl:all_reduce" and [7] in entry["input_sizes"] for entry in entries)


def gpt2(engine: Engine) -> Resolved:
    """GPT-124M in bf16, micro-batch 8."""
    experiment = Experiment(
        name="memory",
        model=Model(preset="gpt2", seq=1024),
        engine=engine,
        layout=LayoutRequest(gpus=1, tp=1, pp=1, micro_batch=8, micro_batches=1),
        train=Train(steps=10, dtype="bf16"),
    )
    return resolve(experiment, ClusterProfile(name="test", scheduler="local", gpus_per_node=1))


def pair_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 50000, (8, 1025), generator=torch.Generator().manual_seed(step)).cuda()
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    "engine",
    [
        DDP, Engine("ddp", compile="block"), Engine("ddp", compile="edges"), Engine("ddp", compile="whole"),
        Engine("ddp", compile="block", loss_chunks=4), Engine("ddp", compile="block", one_pass_loss=True), FSDP,
        Engine("deepspeed-zero", 1), Engine(zero_stage=1), Engine("hf-deepspeed", 1),
    ],
    ids=[
        *("ddp", "ddp compiled", "ddp edges", "ddp whole", "ddp chunks", "ddp one pass", "fsdp", "zero1", "3d"),
        "transformers",
    ],
)  # fmt: skip
def test_predicted_memory_is_within_a_tenth(engine: Engine, device: torch.device) -> None:
    """The allocated peaks of three steps and of an evaluation, less what other tests have left."""
    skip_unless_installed(engine)
    resolved = gpt2(engine)
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    built = build_engine(resolved, device)
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        built.train_step(iter([pair_of(step)]))
    peak = (torch.cuda.max_memory_allocated() - left) / GIB
    stage = predict_memory(training_of(resolved)).stages[0]
    assert stage.allocated == pytest.approx(peak, rel=0.1)
    built.evaluate(iter([pair_of(2)]), 1)  # compiles
    torch.cuda.reset_peak_memory_stats()
    built.evaluate(iter([pair_of(2)] * 2), 2)
    assert stage.evaluation == pytest.approx((torch.cuda.max_memory_allocated() - left) / GIB, rel=0.1)


@pytest.mark.parametrize("engine", ONE_PASS, ids=lambda engine: f"{engine.name} {engine.compile}")
def test_an_evaluation_takes_2_bytes_a_logit_beside_the_logits(engine: Engine, device: torch.device) -> None:
    """With the loss in one pass."""
    resolved = gpt2(engine)
    built, pair = build_engine(resolved, device), pair_of(1)
    built.train_step(iter([pair]))
    built.evaluate(iter([pair]), 1)  # compiles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    built.evaluate(iter([pair] * 2), 2)
    logits = 8 * 1024 * resolved.model.padded_vocab
    # A block's own tensors come before the logits; the hidden states, and what is gathered, are a tenth of them.
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * 4 * logits


def start(run: RunFolder, ranks: int = 1) -> tuple[list[subprocess.Popen[bytes]], Attempt]:
    """The ranks of an attempt, a GPU each, started as job.sh starts them."""
    attempt = run.new_attempt()
    started = []
    for rank in range(ranks):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "HPC_GPT_RUN": str(run.path),
            "HPC_GPT_ATTEMPT": str(attempt.number),
        }
        with open(attempt.log, "ab") as log:
            command = [sys.executable, "-m", "hpc_gpt.trainer"]
            process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)
        started.append(process)
    return started, attempt


def test_resumed_on_a_gpu_to_the_last_digit(tmp_path: Path, tokens: Path) -> None:
    """With train.deterministic, of engine deepspeed-3d in bf16."""
    one = {"tp": 1, "pp": 1, "dp": 1}
    resolved = settings(tokens, one, dtype="bf16", steps=200, deterministic=True, eval_every=70, save_every=50)
    unbroken, run = new_run(tmp_path / "unbroken", resolved), new_run(tmp_path / "broken", resolved)
    [rank], attempt = start(unbroken)
    assert rank.wait() == 0, attempt.log.read_text()
    [rank], attempt = start(run)
    wait_for("step 20", lambda: "step 20/" in attempt.log.read_text() or rank.poll() is not None)
    assert rank.poll() is None, attempt.log.read_text()
    rank.send_signal(signal.SIGUSR2)
    assert rank.wait() == 0
    assert attempt.ended()["ended"] == "walltime", attempt.log.read_text()
    [rank], attempt = start(run)
    assert rank.wait() == 0, attempt.log.read_text()
    assert figures(run) == figures(unbroken)
    # A peak is known one step after it was looked up.
    assert all(line["memory_allocated_gib"] for line in lines(unbroken)[3:])
    measured = json.loads((run.attempts()[0].folder / "measured.json").read_text())
    assert measured["attention_used"] in ("flash", "efficient", "math")
