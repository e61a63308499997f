"""Kernels and bytes of a compiled block and of the loss, as Inductor generates them for an H200: no GPU is needed.

python tests/benchmarks/compiled_bytes.py [HIDDEN HEADS]      768 12, which is GPT-124M, if left out
python tests/benchmarks/compiled_bytes.py PRESET              a block of llama3.2-1b, qwen3-0.6b, …, beside the least

The graphs are traced and divided into forward and backward pass on the CPU, then lowered as if their tensors were on a
GPU of sm_90. Element-wise kernels and reductions are counted, and the Triton kernels of ours; matmuls and attention are
not. A unit is [tokens, hidden] in 16 bits. Nothing passes or fails here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import TensorParallel
from hpc_gpt.model.vocab_loss import VocabParallelLoss
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.settings.presets import preset
from hpc_gpt.train.engines import private_parts
from tests.model.triton_worker import find_triton

MICRO_BATCH, SEQ, VOCAB = 32, 1024, 50304
H200 = SimpleNamespace(
    type="cuda",
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=60 << 20,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
    total_memory=150 << 30,
)
CUDA = torch.device("cuda", 0)


class GeneratedError(Exception):
    """Ends a compilation once its code is there."""


def pretend_to_have_one() -> None:
    """Answers what Inductor asks of the device."""
    find_triton()
    import torch._dynamo.device_interface as interface
    from torch._inductor import compile_fx
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    torch.cuda.get_device_properties = torch.cuda._get_device_properties = lambda *_: H200  # type: ignore[attr-defined]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device, torch.cuda.device_count = (lambda: 0), (lambda: 1)
    torch.cuda._lazy_init = lambda: None  # type: ignore[attr-defined]
    interface.CudaInterface.Worker.get_device_properties = staticmethod(lambda *_: H200)
    interface.CudaInterface.is_available = staticmethod(lambda: True)
    interface.CudaInterface.get_compute_capability = staticmethod(lambda *_: 90)
    compile_fx._check_triton_bf16_support = lambda graph: None
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    driver._active = target


def on_gpu(value: Any) -> Any:
    """A fake tensor as if it were on the GPU."""
    if isinstance(value, Tensor):
        with value.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
    return type(value)(map(on_gpu, value)) if isinstance(value, (tuple, list)) else value


def flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool = False) -> Tensor:
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]
    return attended


def generate(function: Callable[..., Tensor], given: list[Tensor], options: dict[str, Any]) -> list[list[float]]:
    """The bytes of each kernel of the forward pass and of the backward pass."""
    import torch._functorch.config as how
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import compile_fx, config, graph
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    passes: list[list[float]] = []

    def note(self: Any) -> None:
        self.codegen()
        rows = []
        for node, words in self.count_bytes()[1]:
            operator = str(getattr(node.node, "op_overload", ""))
            if type(node).__name__ != "ExternKernelSchedulerNode" or operator.startswith("hpc_gpt"):
                rows.append(4.0 * words)
        passes.append(rows)
        raise GeneratedError

    def lower(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for node in module.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = on_gpu(node.meta["val"])
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": CUDA}
        module.recompile()
        try:
            compile_fx.compile_fx_inner(module, on_gpu(list(inputs)), is_backward=bool(passes), static_input_idxs=())
        except Exception as end:
            if "GeneratedError" not in repr(end):
                raise
        return lambda *_: None

    def divide(module: torch.fx.GraphModule, inputs: Any, **others: Any) -> Any:
        joint_graph_passes(module)
        return min_cut_rematerialization_partition(module, inputs, **{**others, "compiler": "inductor"})

    compiler = aot_autograd(
        fw_compiler=lower, bw_compiler=lower, partition_fn=divide, decompositions=select_decomp_table()
    )

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in module.graph.nodes:
            if node.target is torch._C._nn.scaled_dot_product_attention:
                node.target = flash
        module.recompile()
        return compiler(module, inputs)

    torch._dynamo.reset()
    graph.GraphLowering.compile_to_module = note  # type: ignore[assignment,method-assign]
    with config.patch({**options, "force_disable_caches": True}), how.patch(force_non_lazy_backward_lowering=True):
        try:
            torch.compile(function, backend=backend, dynamic=False)(*given)
        except Exception:
            # The code is never run: what was to be called returned nothing.
            if len(passes) < 2:
                raise
    return passes


def show(name: str, passes: list[list[float]], width: int) -> None:
    unit = 2.0 * MICRO_BATCH * SEQ * width
    counts = ", ".join(f"{len(rows)} kernels {sum(rows) / unit:5.1f}" for rows in passes)
    total = sum(map(sum, passes)) / unit
    print(f"{name:<38} {counts}; together {total:5.1f} units, {2 * width * total:,.0f} bytes a token", flush=True)


def least_bytes(shape: ModelShape) -> list[list[float]]:
    """The least that a block's element-wise work moves: each tensor between two matrix products read and written once.

    Forward: both norms read their input and write their output, and the second one adds the projection first, which it
    writes too; the rotation reads and writes queries and keys; SwiGLU reads gate and up and writes their product; the
    last sum reads two and writes one. Backward: of each the gradient of what it wrote and what it kept is read, and the
    gradient of what it read is written; the block's input and the sum after attention gather two gradients each.
    """
    tokens, hidden, ffn = 2.0 * MICRO_BATCH * SEQ, shape.hidden, shape.mlp_width
    heads = shape.query_width + shape.key_heads * shape.head_width
    values = shape.key_heads * shape.head_width
    forward = [2 * hidden, 2 * heads, 4 * hidden, 3 * ffn, 3 * hidden]
    # The gradients of query, key and value are joined for the product's backward pass: values are moved, too.
    backward = [5 * ffn, 4 * hidden, (4 if shape.qk_norm else 2) * heads + 2 * values, 4 * hidden]
    return [[tokens * width for width in forward], [tokens * width for width in backward]]


def show_preset(name: str) -> None:
    """A compiled block of a preset, beside the least.

    With `keep_residuals` it is the least, but for the rotation's forward pass: Inductor counts what a kernel reads of
    the product of queries, keys and values as more than the part that it reads. Without, the sum after attention is
    computed again in three kernels, and the second norm's weight gradient reads its two gradients once more.
    """
    shape = replace(preset(name), layers=1, seq=SEQ, vocab=VOCAB)
    block = Gpt(shape, 1).bfloat16().blocks[0]
    entering = torch.zeros(MICRO_BATCH, SEQ, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    print(f"a block of {name}, hidden {shape.hidden}: forward, backward; units of 2 x {shape.hidden} bytes a token")
    for how, options in {"as it is": {}, "keep_residuals": private_parts.keep_residuals()}.items():
        show(how, generate(block.compute, [entering], options), shape.hidden)  # type: ignore[operator]
    show("least", least_bytes(shape), shape.hidden)


def main() -> None:
    pretend_to_have_one()
    if len(sys.argv) == 2:
        show_preset(sys.argv[1])
        return
    hidden, heads = map(int, sys.argv[1:] or ("768", "12"))
    shape = ModelShape(hidden=hidden, layers=1, heads=heads, vocab=VOCAB, seq=SEQ)
    print(f"a block of hidden {hidden}: forward, backward; units of 2 x {hidden} bytes a token")
    for fused in (False, True):
        for keeps in (False, True):
            block = Gpt(shape, 1, techniques=Techniques(fused_bias_gradients=fused)).bfloat16().blocks[0]
            entering = torch.zeros(MICRO_BATCH, SEQ, hidden, dtype=torch.bfloat16, requires_grad=True)
            options = private_parts.keep_residuals() if keeps else {}
            names = ["fused_bias_gradients"] * fused + ["keep_residuals"] * keeps
            show(" + ".join(names) or "as it is", generate(block.compute, [entering], options), hidden)  # type: ignore[operator]
    print(f"the loss of logits in 16 bits, vocabulary {VOCAB}: units of 2 x {VOCAB} bytes a token")
    logits = torch.empty(MICRO_BATCH, SEQ, VOCAB, dtype=torch.bfloat16, requires_grad=True)
    loss = VocabParallelLoss(VOCAB, VOCAB, TensorParallel())
    targets = torch.zeros(MICRO_BATCH, SEQ, dtype=torch.int64)
    show("as it is", generate(loss.forward, [logits, targets], {}), VOCAB)
    # Counted by hand: a row's second read finds it in the cache, and its gradient overwrites it.
    show("one_pass_loss", [[4.0 * MICRO_BATCH * SEQ * VOCAB], []], VOCAB)


if __name__ == "__main__":
    main()
