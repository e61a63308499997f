"""On a GPU: engines and dtypes beside a plain process, checkpoints, fp16's scale, offloading, the flight recorder, the
attention kernels, predicted memory, evaluations, and a resume to the last digit. `pytest -m gpu tests/train`:
no network.
"""

import dataclasses
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_gpt.errors import ConfigError
from hpc_gpt.formulas import GIB
from hpc_gpt.model.attention import mix
from hpc_gpt.model.context_parallel import KeysGathered, SequencePart
from hpc_gpt.model.documents import Boundaries
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.plan.memory import predict_memory
from hpc_gpt.plan.training import training_of
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Data, Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.resolve import resolve
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.engines.attention import AttentionKernels, AttentionRead
from hpc_gpt.train.engines.deepspeed_zero import clear_error
from hpc_gpt.train.engines.protocol import build_engine
from hpc_gpt.train.ranks import write_flight_record
from hpc_gpt.weights.tensors import write_hf
from tests.distributed.equality_cases import END, MODELS, STEPS, Case, micro_batches
from tests.distributed.equality_worker import saved_weights
from tests.distributed.first_weights_worker import stored
from tests.distributed.reference import reference
from tests.distributed.save_now import save_now
from tests.distributed.trainings import SAVED
from tests.train.launch import PATIENCE_S, figures, lines, new_run, settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
ONE = Layout(1, 1, 1)
USUAL_DATA = Data()
# Largest difference of a loss from the plain process's in fp32, by dtype. fp32 has no TF32.
NEAR = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 5e-3}

DDP, FSDP = Engine("ddp"), Engine("fsdp")
HALF_OFFLOADED = Engine("deepspeed-zero", 3, offload="optimizer", offload_ratio=0.5)
ONE_PASS = [
    Engine("ddp", one_pass_loss=True),
    Engine("ddp", compile="edges", one_pass_loss=True),
    Engine("fsdp", one_pass_loss=True),
    Engine("deepspeed-zero", 3, one_pass_loss=True),
]
# What the expected rates are of, with the compiled update. Gated MLPs have no biases.
LEVERS = Engine("ddp", compile="edges", one_pass_loss=True, keep_residuals=True)
EVERY_LEVER = dataclasses.replace(LEVERS, fused_bias_gradients=True)
OTHERS = [model for model in MODELS if model != "gpt2"]
IN_EACH_DTYPE = [
    DDP,
    Engine("ddp", one_pass_loss=True),
    Engine("ddp", fused_bias_gradients=True),
    Engine("ddp", overlap_update=True),
    FSDP,
    Engine("fsdp", one_pass_loss=True),
    Engine(zero_stage=1),
]
COMPILED = [
    DDP,
    Engine("ddp", compile="edges", overlap_update=True),
    EVERY_LEVER,
]
CASES = [
    *(Case(ONE, engine, dtype, clip=0.25) for engine in IN_EACH_DTYPE for dtype in ("fp32", "bf16", "fp16")),
    *(Case(ONE, engine, "bf16", clip=0.25, optimizer_mode="compiled") for engine in COMPILED),
    Case(ONE, Engine("ddp", compile="edges", keep_residuals=True, fused_bias_gradients=True), "bf16", clip=0.25),
    *(Case(ONE, Engine("ddp", compile=how, loss_chunks=3), "bf16", clip=0.25) for how in ("block", "edges", "whole")),
    Case(ONE, Engine("fsdp", offload="full"), "bf16"),
    *(Case(ONE, Engine("deepspeed-zero", stage), "bf16", clip=0.25) for stage in (1, 2, 3)),
    Case(ONE, Engine("deepspeed-zero", 3), "fp32", clip=0.25),
    *(Case(ONE, Engine("deepspeed-zero", 3, one_pass_loss=True), dtype, clip=0.25) for dtype in ("fp32", "bf16")),
    *(
        Case(ONE, Engine(name, 1, fused_bias_gradients=True), dtype, clip=0.25)
        for name in ("deepspeed-3d", "deepspeed-zero")
        for dtype in ("fp32", "bf16")
    ),
    Case(ONE, Engine("deepspeed-zero", 2), "fp16", clip=0.25),
    Case(ONE, Engine("deepspeed-zero", 1, offload="optimizer"), "fp32"),
    Case(ONE, Engine("deepspeed-zero", 3, offload="full"), "bf16"),
    *(Case(ONE, HALF_OFFLOADED, dtype, clip=0.25) for dtype in ("fp32", "bf16")),
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


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """The first GPU, and a process group of this process alone."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "100"
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No test meets what another left in its process: code compiled for other sizes, which would now be for any, and
    tensors in cycles."""
    torch._dynamo.reset()
    gc.collect()


def skip_unless_installed(engine: Engine, model: str = "gpt2") -> None:
    """Skips the test if a part that only this engine or model needs is not installed beside the GPU."""
    if (engine.name == "hf-deepspeed" or model != "gpt2") and importlib.util.find_spec("transformers") is None:
        pytest.skip("no transformers")
    if engine.offload_ratio < 1 and not all(shutil.which(tool) for tool in ("g++", "ninja")):
        pytest.skip("no g++ or ninja for DeepSpeed's CPU Adam")


def train(engine: Any, resolved: Resolved, steps: range) -> list[float]:
    """The losses of the steps, none of which may be skipped."""
    losses = []
    for step in steps:
        here = torch.device("cuda", 0)
        pairs = [tuple(part.to(here) for part in micro_batch) for micro_batch in micro_batches(resolved, 0, step)]
        result = engine.train_step(iter(pairs))
        assert not bool(result.skipped), f"step {step}"
        losses.append(float(result.loss))
    return losses


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
    write_hf(resolved.model, ((name, stored(name, weight)) for name, weight in wanted.items()), tmp_path / "init")
    still = dataclasses.replace(resolved.train, lr=0.0, min_lr=0.0, weight_decay=0.0, init=str(tmp_path / "init"))
    resolved = dataclasses.replace(resolved, train=still)
    built = build_engine(resolved, device)
    train(built, resolved, range(1))
    kept = saved_weights(built, resolved, tmp_path / "checkpoint")
    assert kept.keys() == wanted.keys()
    assert [name for name in kept if not torch.equal(stored(name, kept[name]), stored(name, wanted[name]))] == []


@pytest.mark.parametrize("engine", [DDP, FSDP], ids=lambda engine: engine.name)
def test_a_loss_scale_that_is_too_high_is_halved_and_its_step_left_out(engine: Engine, device: torch.device) -> None:
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


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_states_left_on_the_gpu_resume_with_another_share(ratio: float, device: torch.device, tmp_path: Path) -> None:
    skip_unless_installed(HALF_OFFLOADED)
    resolved = Case(ONE, HALF_OFFLOADED, clip=0.25).resolved
    engine: Any = build_engine(resolved, device)
    devices = {flat.device.type for flat in engine._engine.optimizer.fp32_partitioned_groups_flat}
    assert devices == {"cpu", "cuda"}
    losses = train(engine, resolved, range(SAVED))
    save_now(engine, tmp_path)
    losses += train(engine, resolved, range(SAVED, STEPS))
    other = dataclasses.replace(resolved, engine=dataclasses.replace(resolved.engine, offload_ratio=ratio))
    resumed = build_engine(other, device)
    resumed.load(tmp_path)
    assert train(resumed, other, range(SAVED, STEPS)) == pytest.approx(losses[SAVED:], abs=NEAR["fp32"])


def test_after_a_failed_pin_the_next_kernel_runs(device: torch.device) -> None:
    """CUDA remembers the failure until somebody asks, and torch asks after the next launch."""
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(0, 1 << 20, 0)) != 0
    clear_error(device)
    assert float((torch.ones(3, device=device) * 2).sum()) == 6.0
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("flash", "bf16"), ("cudnn", "bf16"), ("efficient", "fp32"), ("math", "fp32")]
)
@pytest.mark.parametrize("mode", ["none", "block"])
def test_the_attention_kernel_that_ran_is_the_one_asked_for(kernel, dtype, mode, device, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    resolved = Case(ONE, Engine("ddp", attention=kernel, compile=mode), dtype).resolved
    engine = build_engine(resolved, device)
    read = AttentionRead(engine.module)
    train(engine, resolved, range(2))
    assert read.kernel == kernel


def long_sequences(
    attention: Any, dtype: Any, head: int, groups: int = 2, data: Data = USUAL_DATA, cp: int = 1
) -> Resolved:
    """Two heads of this size at 1,024 positions, a batch of two; `groups`: heads of keys and values."""
    experiment = Experiment(
        name="attention",
        model=Model(hidden=2 * head, layers=1, heads=2, kv_heads=groups, vocab=61, seq=1024),
        data=data,
        engine=Engine("ddp", attention=attention, cp_exchange="keys"),
        layout=LayoutRequest(gpus=cp, tp=1, pp=1, cp=cp, micro_batch=2, micro_batches=1),
        train=Train(steps=3, dtype=dtype, warmup_steps=0, decay="constant", lr=1e-3),
    )
    return resolve(experiment, ClusterProfile(name="test", scheduler="local", gpus_per_node=cp))


def train_long(resolved: Resolved, device: torch.device) -> tuple[list[float], str | None]:
    """The losses of three steps, and the kernel that ran."""
    engine = build_engine(resolved, device)
    read = AttentionRead(engine.module)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 61, (2, 1025), generator=torch.Generator().manual_seed(step))
        marks = [Boundaries.of(tokens[:, :-1], END).to(device)] if resolved.data.mask_documents else []
        tokens = tokens.to(device)
        losses.append(float(engine.train_step(iter([(tokens[:, :-1], tokens[:, 1:], *marks)])).loss))
    return losses, read.kernel


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((kernel, dtype) for kernel in ("flash", "cudnn", "efficient", "math") for dtype in ("bf16", "fp16")),
        *((kernel, "fp32") for kernel in ("efficient", "math")),
    ],
)
@pytest.mark.parametrize("groups", [2, 1])
def test_every_kernel_computes_the_same_at_1024_positions(kernel, dtype, head, groups, device):
    """With grouped queries as well, which a kernel takes or gets expanded."""
    losses, ran = train_long(long_sequences(kernel, dtype, head, groups), device)
    assert ran == kernel
    exact, _ = train_long(long_sequences("math", "fp32", head, groups), device)
    assert losses == pytest.approx(exact, abs=NEAR[dtype])


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("flash", "bf16"), ("flash", "fp16"), ("efficient", "bf16"), ("auto", "bf16")]
)
@pytest.mark.parametrize("groups", [2, 1])
def test_documents_in_a_row_are_what_the_mask_gives(kernel, dtype, head, groups, device):
    masked = Data(mask_documents=True, end_token=END)
    losses, ran = train_long(long_sequences(kernel, dtype, head, groups, masked), device)
    assert ran == ("efficient" if kernel == "efficient" else "flash")
    exact, how = train_long(long_sequences("math", "fp32", head, groups, masked), device)
    assert how == "math"
    assert losses == pytest.approx(exact, abs=NEAR[dtype])


def test_flash_is_refused_where_documents_need_a_mask(device):
    resolved = long_sequences("flash", "fp32", 64, 2, Data(mask_documents=True, end_token=END))
    with pytest.raises(ConfigError, match=r"cannot keep documents apart here: train\.dtype is fp32"):
        AttentionKernels(resolved, device)


def test_the_host_does_not_wait_for_the_device_to_find_documents(device):
    resolved = long_sequences("auto", "bf16", 64, 2, Data(mask_documents=True, end_token=END))
    kernels = AttentionKernels(resolved, device)
    tokens = torch.randint(0, 61, (2, 1024)).pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.documents(Boundaries.of(tokens, END).to(device))
    finally:
        torch.cuda.set_sync_debug_mode("default")


class InTurn(KeysGathered):
    """One process in the place of each rank of a group, one after the other: it has the keys and values of all, and
    adds up their gradients."""

    def __init__(self, part: SequencePart, whole: torch.Tensor) -> None:
        super().__init__(part)
        self.whole, self.slope = whole, torch.zeros_like(whole, dtype=torch.float32)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return self.whole

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        self.slope += partial
        return self.part.of(partial, 1)


@pytest.mark.parametrize(
    ("kernel", "ran", "dtype", "head"),
    [
        *(("auto", "flash", dtype, head) for dtype in ("bf16", "fp16") for head in (64, 128)),
        ("auto", "flash", "bf16", 20),  # the kernel's widths are multiples of 8
        ("efficient", "efficient", "bf16", 64),
        ("auto", "efficient", "fp32", 64),
    ],
)
@pytest.mark.parametrize("groups", [2, 1])
def test_ranks_that_gather_keys_attend_as_one_process_does(kernel, ran, dtype, head, groups, device):
    cp, kind = 2, getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype])
    resolved = long_sequences(kernel, dtype, head, groups, cp=cp)
    whole = [torch.randn(2, 1024, count, head, device=device, dtype=kind) for count in (2, groups, groups)]
    slope = torch.randn(2, 1024, 2 * head, device=device)
    exact = [part.float().clone().requires_grad_() for part in whole]
    expected = mix(*exact, expands=True)
    expected.backward(slope)
    ranks = [InTurn(SequencePart(rank, cp, True), torch.cat(whole[1:], 2)) for rank in range(cp)]
    for own in ranks:
        kernels = AttentionKernels(resolved, device, own)
        assert (kernels.chosen, kernels.failed) == (ran, {})
        query, key, value = (own.part.of(part, 1).requires_grad_() for part in whole)
        with kernels():
            mixed = own.attend(query, key, value, partial(mix, expands=kernels.expands, last=kernels.last))
            mixed.backward(own.part.of(slope, 1).to(kind))
        near(mixed, own.part.of(expected.detach(), 1), dtype)
        near(query.grad, own.part.of(exact[0].grad, 1), dtype)
    of_keys, of_values = sum(own.slope for own in ranks).chunk(2, 2)
    near(of_keys, exact[1].grad, dtype)
    near(of_values, exact[2].grad, dtype)


def near(found: torch.Tensor, exact: torch.Tensor, dtype: str) -> None:
    """Within some units in the last place of the largest number."""
    limit = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 2e-5}[dtype] * float(exact.abs().max())
    torch.testing.assert_close(found.float(), exact, atol=limit, rtol=0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head", [64, 128])
def test_autos_trial_keeps_no_memory_and_no_random_numbers(head, deterministic, device):
    resolved = long_sequences("auto", "bf16", head)
    resolved = dataclasses.replace(resolved, train=dataclasses.replace(resolved.train, deterministic=deterministic))
    AttentionKernels(resolved, device)  # what a library keeps from its first use on
    torch.cuda.empty_cache()
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    kernels = AttentionKernels(resolved, device)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == held
    for before, after in zip(states, (torch.get_rng_state(), torch.cuda.get_rng_state(device)), strict=True):
        assert torch.equal(before, after)
    assert kernels.failed == {}
    assert kernels.chosen in (("flash", "efficient") if deterministic else ("cudnn", "flash"))


def test_the_flight_recorder_has_a_record_of_nccl(device: torch.device, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(7, device=device))
    torch.cuda.synchronize()
    attempt = Attempt(tmp_path)
    write_flight_record(attempt, 0)
    entries = json.loads((tmp_path / "flight" / "0.json").read_text())["entries"]
    assert any(entry["profiling_name"] == "nccl:all_reduce" and [7] in entry["input_sizes"] for entry in entries)


def gpt2(engine: Engine, mode: Any = None) -> Resolved:
    """GPT-124M in bf16, micro-batch 8."""
    experiment = Experiment(
        name="memory",
        model=Model(preset="gpt2", seq=1024),
        engine=engine,
        layout=LayoutRequest(gpus=1, tp=1, pp=1, micro_batch=8, micro_batches=1),
        train=Train(steps=10, dtype="bf16", optimizer_mode=mode),
    )
    return resolve(experiment, ClusterProfile(name="test", scheduler="local", gpus_per_node=1))


def pair_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 50000, (8, 1025), generator=torch.Generator().manual_seed(step)).cuda()
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    ("engine", "mode"),
    [
        (DDP, None),
        (Engine("ddp", compile="block"), "compiled"),
        (Engine("ddp", compile="edges"), "compiled"),
        (Engine("ddp", compile="whole"), "compiled"),
        (Engine("ddp", compile="block", loss_chunks=4), "compiled"),
        (Engine("ddp", compile="block", one_pass_loss=True), "compiled"),
        (FSDP, None),
        (Engine("deepspeed-zero", 1), None),
        (Engine(zero_stage=1), None),
        (Engine("hf-deepspeed", 1), None),
    ],
    ids=[
        *("ddp", "ddp compiled", "ddp edges", "ddp whole", "ddp chunks", "ddp one pass", "fsdp", "zero1", "3d"),
        "transformers",
    ],
)
def test_predicted_memory_is_within_a_tenth(engine: Engine, mode: Any, device: torch.device) -> None:
    """The allocated peaks of three steps and of an evaluation, less what other tests have left."""
    skip_unless_installed(engine)
    resolved = gpt2(engine, mode)
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
def test_an_evaluation_takes_at_most_2_bytes_a_logit_beside_the_logits(engine: Engine, device: torch.device) -> None:
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
            command = [sys.executable, "-m", "hpc_gpt.train"]
            process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)
        started.append(process)
    return started, attempt


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_ranks_that_update_beside_the_next_forward_pass_lose_no_digit(dtype, tmp_path, tokens):
    found = []
    for overlapped in (False, True):
        engine = Engine("ddp", overlap_update=overlapped)
        resolved = settings(tokens, {"tp": 1, "pp": 1, "dp": 2}, engine, dtype=dtype, steps=30, deterministic=True)
        run = new_run(tmp_path / str(overlapped), resolved)
        ranks, attempt = start(run, 2)
        assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0], attempt.log.read_text()
        found.append(figures(run))
    assert found[0] == found[1]
    assert len(found[0]) == 30


def test_resumed_on_a_gpu_to_the_last_digit(tmp_path: Path, tokens: Path) -> None:
    """With train.deterministic, of engine deepspeed-3d in bf16."""
    one = {"tp": 1, "pp": 1, "dp": 1}
    resolved = settings(tokens, one, dtype="bf16", steps=200, deterministic=True, eval_every=70, save_every=50)
    unbroken, run = new_run(tmp_path / "unbroken", resolved), new_run(tmp_path / "broken", resolved)
    [rank], attempt = start(unbroken)
    assert rank.wait(PATIENCE_S) == 0, attempt.log.read_text()
    [rank], attempt = start(run)
    until = time.monotonic() + PATIENCE_S
    while "step 20/" not in attempt.log.read_text():
        assert rank.poll() is None, attempt.log.read_text()
        assert time.monotonic() < until, attempt.log.read_text()
        time.sleep(0.01)
    rank.send_signal(signal.SIGUSR2)
    assert rank.wait(PATIENCE_S) == 0
    assert attempt.ended()["ended"] == "walltime", attempt.log.read_text()
    [rank], attempt = start(run)
    assert rank.wait(PATIENCE_S) == 0, attempt.log.read_text()
    assert figures(run) == figures(unbroken)
    # A peak is known one step after it was looked up.
    assert all(line["memory_allocated_gib"] for line in lines(unbroken)[3:])
    measured = json.loads((run.attempts()[0].folder / "measured.json").read_text())
    assert measured["attention_used"] in ("flash", "efficient", "math")
