"""The pieces of a layer on one GPU: products in 16 bits and in FP8, and the casts, apart; and our own Triton kernels.

python -m bench.gpu.pieces OUT --limit 60

OUT gets a JSON line for each piece as it is measured: piece, rows, inputs, outputs, milliseconds (forward, gradient of
inputs, gradient of weights; or one), TFLOP/s or GB/s. On a CPU the sizes are tiny, and the figures mean nothing.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.trainer.model import fp8
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from hpc_gpt.trainer.preflight.measurements import seconds_each

# Rows, then inputs and outputs of each linear layer of a block.
MODELS = {
    "gpt2-xl": (8192, {"qkv": (1600, 4800), "out": (1600, 1600), "up": (1600, 6400), "down": (6400, 1600)}),
    "llama-8b": (16384, {"qkv": (4096, 6144), "out": (4096, 4096), "gate, up": (4096, 28672), "down": (14336, 4096)}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--limit", type=float, default=60.0)
    asked = parser.parse_args()
    ends = time.monotonic() + asked.limit
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def write(**fields: Any) -> None:
        named = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        with Path(asked.out).open("a") as file:
            file.write(json.dumps({**fields, "device": named}) + "\n")

    for model, (rows, lines) in MODELS.items():
        for name, (inputs, outputs) in lines.items():
            if time.monotonic() > ends:
                return
            sizes = (rows, inputs, outputs)
            if device.type == "cpu":
                sizes = (64, *(max(16, size // 1024 * 16) for size in sizes[1:]))
            _linear(device, f"{model} {name}", *sizes, write)
    if device.type == "cuda":
        _kernels(device, ends, write)


def _linear(device: torch.device, name: str, rows: int, inputs: int, outputs: int, write: Callable[..., None]) -> None:
    def numbers(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    x, dy, weight = numbers(rows, inputs), numbers(rows, outputs), numbers(outputs, inputs)
    size = {"rows": rows, "inputs": inputs, "outputs": outputs}

    def products(piece: str, *three: Callable[[], Any]) -> None:
        ms = [1e3 * seconds_each(device, one) for one in three]
        write(piece=f"{name} {piece}", **size, ms=ms, tflops=6 * rows * inputs * outputs / sum(ms) / 1e9)

    products("bf16", lambda: x @ weight.t(), lambda: dy @ weight, lambda: dy.t() @ x)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return

    def cast(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        small = fp8.cast(values, fp8.scale_of(values, dtype), dtype)
        return small, fp8.transposed_copy(small)

    compiled = torch.compile(cast, dynamic=False) if device.type == "cuda" else cast
    operands = ((x, fp8.FORWARD), (weight, fp8.FORWARD), (dy, fp8.BACKWARD))
    ms = [1e3 * seconds_each(device, lambda pair=pair: compiled(*pair)) for pair in operands]
    write(piece=f"{name} casts", **size, ms=ms, gb_s=6 * sum(one.numel() for one, _ in operands) / sum(ms) / 1e6)
    (x8, xt), (w8, wt), (d8, dt) = (compiled(*pair) for pair in operands)
    one = torch.ones((), device=device)

    def product(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
        return lambda: fp8.product(left, right, one, one, torch.bfloat16)

    products("fp8", product(x8, w8), product(d8, wt), product(dt, xt))


def _kernels(device: torch.device, ends: float, write: Callable[..., None]) -> None:
    """Ours at their own sizes: bytes that they must move, a second."""
    from hpc_gpt.trainer.model import triton_kernels as kernels  # needs Triton

    alone, half = TensorParallel(), torch.bfloat16

    def write_rate(piece: str, work: Callable[..., Any], moved: float, *tensors: Tensor) -> None:
        if time.monotonic() < ends:
            seconds = seconds_each(device, lambda: work(*tensors))
            size = {"rows": tensors[0].shape[0], "columns": tensors[0].shape[1]}
            write(piece=piece, **size, ms=[1e3 * seconds], gb_s=moved * tensors[0].nbytes / seconds / 1e9)

    def one_pass(logits: Tensor, targets: Tensor) -> Any:
        return kernels.overwrite_with_gradient(logits, targets, logits.shape[1], alone, 1 / len(targets))

    def losses(logits: Tensor, targets: Tensor) -> Any:
        return kernels.losses_of(logits, targets, logits.shape[1], alone)

    for count, columns in ((32768, 50304), (16384, 128256)):
        logits = torch.randn(count, columns, device=device, dtype=half)
        targets = torch.randint(0, columns, (count,), device=device)
        write_rate("losses alone", losses, 1, logits, targets)
        write_rate("one-pass loss", one_pass, 2, logits, targets)


if __name__ == "__main__":
    main()
