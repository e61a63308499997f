"""Grouped products of a mixture's experts on one GPU, by rows and width, beside one plain product of as many FLOPs.

python -m bench.gpu.experts OUT --limit 60

OUT gets a JSON line for each shape as it is measured: experts, rows of an expert, inputs and outputs; milliseconds of
the grouped product (forward, then backward of inputs and weights together) and of the plain one, TFLOP/s, and `ratio`,
the time of the plain product over that of the grouped one. Rows are dealt evenly, or with `skewed` by a load whose
fullest expert has twice the mean. Shapes that do not fit in memory are left out. On a CPU the sizes are tiny, and the
figures mean nothing.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hpc_gpt.trainer.model.experts import GroupedLinear
from hpc_gpt.trainer.preflight.measurements import seconds_each

EXPERTS = 32
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
WIDTHS = (768, 1024, 1408, 1536, 2048, 4096, 14336)  # of an expert, up from HIDDEN
HIDDEN = 2048
MOST_GIB = 40.0  # of weights, rows and their gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--limit", type=float, default=60.0)
    options = parser.parse_args()
    ends = time.monotonic() + options.limit
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    named = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    for shape in _shapes(device):
        if time.monotonic() > ends:
            return
        with Path(options.out).open("a") as file:
            file.write(json.dumps({**measure(device, *shape), "device": named}) + "\n")


def _shapes(device: torch.device) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yields (experts, rows of an expert, inputs, outputs, skewed): `up` and `down` of each width, the middle first."""
    experts, rows, widths, hidden = EXPERTS, ROWS, WIDTHS, HIDDEN
    if device.type == "cpu":
        experts, rows, widths, hidden = 4, (16, 64), (32, 64), 64
    for count in sorted(rows, key=lambda count: abs(count - 1024)):
        for width in widths:
            numbers = experts * (count * (hidden + 2 * width) + 2 * width * hidden)
            if 2 * 2 * numbers / 2**30 <= MOST_GIB:
                yield experts, count, hidden, 2 * width, False
                yield experts, count, width, hidden, False
        yield experts, count, hidden, 2 * widths[0], True


def measure(device: torch.device, experts: int, rows: int, inputs: int, outputs: int, skewed: bool) -> dict[str, Any]:
    """The figures of one shape."""

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True)

    loads = torch.full((experts,), rows)
    if skewed:  # from twice the mean down to none
        loads = torch.linspace(2 * rows, 0, experts).round().long()
    total = int(loads.sum())
    ends = loads.cumsum(0).to(device, torch.int32)
    grouped = GroupedLinear(torch.nn.Parameter(numbers(experts, outputs, inputs).detach()))
    plain = torch.nn.Parameter(numbers(outputs, inputs).detach())
    x, dy = numbers(total, inputs), numbers(total, outputs).detach()

    def backward(product: Callable[[], Tensor], weight: Tensor) -> Callable[[], Any]:
        out = product()
        return lambda: torch.autograd.grad(out, (x, weight), dy, retain_graph=True)

    def by_expert() -> Tensor:
        return grouped(x, ends)

    def as_one() -> Tensor:
        return F.linear(x, plain)

    works = (by_expert, backward(by_expert, grouped.weight), as_one, backward(as_one, plain))
    ms = [1e3 * seconds_each(device, work) for work in works]
    size = {"experts": experts, "rows": rows, "inputs": inputs, "outputs": outputs, "skewed": skewed}
    tflops = 6 * total * inputs * outputs / (ms[0] + ms[1]) / 1e9
    return {**size, "ms": ms[:2], "plain_ms": ms[2:], "tflops": tflops, "ratio": sum(ms[2:]) / sum(ms[:2])}


if __name__ == "__main__":
    main()
