"""What a rank is refused before or while it trains: each line and hint to the letter."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer import attempt, export
from hpc_gpt.trainer.__main__ import _find_attempt
from hpc_gpt.trainer.checkpoints import training_state
from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.trainer.engines.attention import AttentionKernels
from hpc_gpt.trainer.engines.build import build_engine, check_dtype_on, check_matmul_on
from hpc_gpt.trainer.engines.kernels import check_compilers
from hpc_gpt.trainer.ranks import choose_device
from hpc_gpt.trainer.supervision.meeting import RankIdentity
from tests.refusals import Row, check_refusal
from tests.trainer.alone import ALONE, CountingEngine
from tests.trainer.checkpoints.test_training_state import write
from tests.trainer.engines.test_attention import asking
from tests.trainer.launch import new_run, settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FOUR = settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 4})
SAVED = settings(Path("none.tokens"), {"tp": 2, "pp": 1, "dp": 2})
RESUME = "resume with the settings it was saved with, or start a new run"
IT_IS_DAMAGED = "the checkpoint is damaged; remove it: then the one before it is used"
REMOVE_IT = "remove the checkpoint: then the one before it is used"
SUBMIT = "start runs with hpc-gpt submit, or sbatch job.sh"
OTHER = "was it written by another version? submit again with the version in resolved.json"
NO_DOCUMENTS = 'use engine.attention = "auto", or data.mask_documents = false'
NO_COMPILER = 'or use engine.compile_backend = "aot_eager" or engine.compile = "none"'
GPUS = ClusterProfile(name="jean-zay", device="v100-32g")


def on(
    act: Callable[[], Any], card: tuple[int, int] = (9, 0), name: str = "H100", **node: Any
) -> Callable[[Path], Any]:
    """On a node with such GPUs, with such a torch and such variables."""
    visible, version, hip = node.pop("visible", 4), node.pop("version", "2.13.0"), node.pop("hip", None)
    triton = node.pop("triton", True)

    def do(at: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda device: card)
            patch.setattr(torch.cuda, "get_device_name", lambda device: name)
            patch.setattr(torch.cuda, "device_count", lambda: visible)
            patch.setattr(torch, "__version__", version)
            patch.setattr(torch.version, "hip", hip)
            patch.setattr("importlib.util.find_spec", lambda name: triton or None)
            for key in ("CC", "CXX"):
                patch.delenv(key, raising=False)
            for key, value in node.items():
                patch.setenv(key, value)
            return act()

    return do


def compiles(device: torch.device = CPU, cp: int = 1, **engine: Any) -> Callable[[], Any]:
    return lambda: check_compilers(Engine(**{"compile": "block"} | engine), device, cp)


def device_of_rank_3(device: str = "v100-32g") -> Any:
    return choose_device(RankIdentity(3, 4, 3), replace(FOUR, cluster=replace(GPUS, device=device)))


def builds(name: str, **engine: Any) -> Callable[[], Any]:
    """What is offloaded is on the host, where no Triton is needed: the device is that which computes."""
    asked = Engine(name, **engine, offload="none" if name == "ddp" else "full")
    return lambda: build_engine(replace(FOUR, engine=asked, train=replace(FOUR.train, dtype="bf16")), CUDA)


def packs(**changes: Any) -> Callable[[], Any]:
    """The choice of flash alone for documents in a row."""
    resolved = asking("flash")
    asked = replace(resolved, **{name: replace(getattr(resolved, name), **each) for name, each in changes.items()})
    kernels = AttentionKernels(resolved, CPU)
    return lambda: kernels._pack(asked, CUDA, asked.model.window)


def resumes(resolved: Resolved, before: Resolved = SAVED) -> Callable[[Path], Any]:
    """With other settings than those of the checkpoint."""

    def act(at: Path) -> Any:
        write(at, before)
        training_state.open_checkpoint(at, resolved)

    return act


def differing(part: str, **changes: Any) -> Resolved:
    return replace(SAVED, **{part: replace(getattr(SAVED, part), **changes)})


HALF = differing("train", dtype="bf16", optimizer="sgd")


def cut(name: str, load: Callable[[Path], Any], text: str = '{"step": 2') -> Callable[[Path], Any]:
    return lambda at: [(at / name).write_text(text), load(at)]


def lies(at: Path) -> Any:
    checkpoints, engine = Checkpoints(at, ALONE), CountingEngine()
    engine.step = 9
    checkpoints.save(engine, Progress(10))
    checkpoints.resume(engine)


def exported(*weights: str) -> Callable[[Path], Any]:
    """The weights of an export, of which an engine reads these."""

    def act(at: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            found = [(name, torch.zeros(1)) for name in weights]
            patch.setattr(export, "read_weights", lambda *words: found)
            return list(export._weights(at, SAVED))

    return act


def starts(step: int | None, *others: str, init: str | None = None) -> Callable[[Path], Any]:
    """A run that continues others, or begins from train.init; nothing of either can be read."""

    def act(at: Path) -> Any:
        run = new_run(at, replace(FOUR, train=replace(FOUR.train, init=init)))
        sources = [(run, None), *((RunFolder(at / name), step) for name in others)]
        here: Any = SimpleNamespace(_run=run)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attempt, "checkpoint_sources", lambda run: sources)
            engine: Any = SimpleNamespace(given_weights=None)
            return attempt.Trainer._resume(here, run.resolved(), engine, ALONE, Checkpoints(run.checkpoints, ALONE))

    return act


# fmt: off
ROWS: dict[str, Row] = {
    # what the device cannot do
    "fp16 of DeepSpeed on a CPU": (lambda at: check_dtype_on("fp16", CPU, "deepspeed-3d"),
     'train.dtype is fp16, but DeepSpeed does not train in fp16 on a CPU | use train.dtype = "fp32" or "bf16", or '
     'engine.name = "ddp" or "fsdp"'),
    "bf16 before Ampere": (on(lambda: check_dtype_on("bf16", CUDA, "ddp"), (7, 5), "Tesla T4"),
     "train.dtype is bf16, but Tesla T4 (compute capability 7.5) has no bf16 arithmetic, which came with 8.0 | use "
     'train.dtype = "fp16"'),
    "FP8 before Ada": (on(lambda: check_matmul_on("fp8-tensor", CUDA), (8, 8), "A100"),
     "train.matmul is fp8-tensor, but A100 (compute capability 8.8) has no units for its FP8 (e4m3fn, e5m2), which "
     "came with 8.9 | leave train.matmul out"),
    "FP8 of another maker": (on(lambda: check_matmul_on("fp8-tensor", CUDA), (9, 4), "MI300X", hip="6.2"),
     "train.matmul is fp8-tensor, but MI300X (compute capability 9.4) has no units for its FP8 (e4m3fn, e5m2), "
     "which came with 9.5 | leave train.matmul out"),
    "a job that sees no GPU": (on(device_of_rank_3, visible=0),
     "profile jean-zay has GPUs (v100-32g), but rank 3 sees none | is torch 2.13.0 a build with CUDA, and does "
     "nvidia-smi list the GPUs within a job?"),
    "a job that sees too few": (on(device_of_rank_3, visible=1),
     "4 ranks on this node, but rank 3 sees 1 of its GPUs | request all GPUs of the node: gpu_flag and gpus_per_node "
     'in the cluster profile; or give each task its own: srun = ["--gpus-per-task=1", "--gpu-bind=closest"]'),
    "a job that sees no AMD GPU": (on(lambda: device_of_rank_3("mi250x"), visible=0),
     "profile jean-zay has GPUs (mi250x), but rank 3 sees none | is torch 2.13.0 a build for ROCm, and does "
     "rocm-smi list the GPUs within a job?"),
    # what cannot be compiled
    "sequences in parallel on an old torch": (on(compiles(compile="whole", sequence_parallel=True), version="2.12.1"),
     "engine.sequence_parallel with engine.compile = whole gives wrong gradients on torch 2.12.1 | use torch 2.13 "
     'or newer, engine.compile = "none", or engine.sequence_parallel = false'),
    "parts of samples on an old torch": (on(compiles(cp=2), version="2.11.0"),
     "layout.cp 2 with engine.compile = block is not tested on torch 2.11.0 | use torch 2.13 or newer, or "
     'engine.compile = "none"'),
    "Inductor without the compiler that is named": (on(compiles(compile="whole"), PATH="/none", CXX="icpx"),
     'engine.compile_backend is "inductor", which needs a C++ compiler for a CPU, but there is no icpx on PATH | '
     f"put one on PATH or load its module, {NO_COMPILER}"),
    "Inductor without a C compiler": (on(compiles(CUDA), PATH="/none"),
     'engine.compile_backend is "inductor", which needs a C compiler for a GPU, but there is no gcc or clang on '
     f"PATH | put one on PATH or load its module, {NO_COMPILER}"),
    "Inductor without the C compiler that is named": (on(compiles(CUDA), PATH="/none", CC="icx"),
     'engine.compile_backend is "inductor", which needs a C compiler for a GPU, but there is no icx on PATH | put '
     f"one on PATH or load its module, {NO_COMPILER}"),
    "one pass without Triton": (on(builds("ddp", one_pass_loss=True), triton=False),
     "engine.one_pass_loss is true, which needs Triton for a GPU, but it is not installed | install torch's CUDA "
     "wheel, which brings it, or use engine.one_pass_loss = false"),
    "Inductor without Triton": (on(builds("deepspeed-zero", zero_stage=3, compile="block"), triton=False),
     "engine.compile_backend is \"inductor\", which needs Triton for a GPU, but it is not installed | install torch's "
     f"CUDA wheel, which brings it, {NO_COMPILER}"),
    "Inductor without a C++ compiler": (on(compiles(), PATH="/none"),
     'engine.compile_backend is "inductor", which needs a C++ compiler for a CPU, but there is no g++ on PATH | put '
     f"one on PATH or load its module, {NO_COMPILER}"),
    # attention
    "a kernel that a CPU lacks": (lambda at: AttentionKernels(asking("cudnn"), CPU),
     "engine.attention is cudnn, but that kernel cannot run here: a CPU does not have it | use engine.attention = "
     '"auto"'),
    "documents in fp32": (on(packs()),
     "engine.attention is flash, but that kernel cannot keep documents apart here: it computes in 16 bits, "
     f"but train.dtype is fp32 | {NO_DOCUMENTS}"),
    "documents before Ampere": (on(packs(train={"dtype": "bf16"}), (7, 5)),
     "engine.attention is flash, but that kernel cannot keep documents apart here: it needs compute capability "
     f"8.0, but the GPU has 7.5 | {NO_DOCUMENTS}"),
    "documents with wide heads": (on(packs(train={"dtype": "bf16"}, model={"head_dim": 257})),
     "engine.attention is flash, but that kernel cannot keep documents apart here: it takes heads up to 256 "
     f"wide, but they are 257 wide | {NO_DOCUMENTS}"),
    # checkpoints
    "another model": (resumes(differing("model", heads=2)),
     f"HERE is a checkpoint of another model: model.heads is 4 in it and 2 in this run | {RESUME}"),
    "other arithmetic, and what may differ": (resumes(replace(HALF, engine=Engine(zero_stage=0))),
     "HERE is a checkpoint of another arithmetic: train.dtype is fp32 in it and bf16 in this run "
     f"| {RESUME}"),
    "no json": (cut("states.json", lambda at: training_state.open_checkpoint(at, SAVED)),
     f"HERE: states.json cannot be read: Expecting ',' delimiter: line 1 column 11 (char 10) | {IT_IS_DAMAGED}"),
    "another step than it says": (lies, f"HERE/step-00000010 says step 10, but holds step 9 | {REMOVE_IT}"),
    # an attempt
    "no run": (lambda at: _find_attempt(None, "1"), f"HPC_GPT_RUN is None, which is not a run folder | {SUBMIT}"),
    "no attempt": (lambda at: _find_attempt(str(new_run(at, FOUR).path), "7"),
     f"HPC_GPT_ATTEMPT is '7', but HERE/tiny/.../attempts has no such folder | {SUBMIT}"),
    "nothing left to continue": (starts(None, "other"),
     "the run continues HERE/other, which no longer has a sound checkpoint | submit a new run instead of starting "
     "this one from step 0"),
    "nothing left to branch from": (starts(8, "other", "another"),
     "the run continues HERE/other, which no longer has a sound checkpoint of step 8 | submit a new run instead of "
     "starting this one from step 0"),
    "no checkpoint, and begun from weights": (starts(None, init="/hf"),
     "no checkpoint of the run could be loaded, and its weights were not read from train.init | start it again: "
     "damaged checkpoints are set aside, so it begins from train.init"),
    # an export
    "a weight that is none": (exported("embedding.weight", "nosuch"),
     f"HERE holds nosuch, which is not a parameter of the model | {OTHER}"),
    "weights that are missing": (exported("embedding.weight"),
     f"HERE lacks position.weight, blocks.0.norm1.weight, blocks.0.norm1.bias | {OTHER}"),
}
# fmt: on


@pytest.mark.parametrize("name", ROWS)
def test_it_is_refused_so(name: str, tmp_path: Path) -> None:
    check_refusal(ROWS[name], tmp_path)
