"""A trial of torch's grouped products on the device in use, before the first step of a mixture.

They have been wrong in silence: the gradient of an expert without tokens on compute capability 10.0 (pytorch#172439),
products that were never written on ROCm (pytorch PR 174314), NaN on MI355X (pytorch#194004). So each rank tries them
in its dtype and widths beside the loop over the experts; if one rank differs, all ranks take the loop.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines.master_weights import HALF
from hpc_gpt.trainer.model.experts import GroupedLinear, multiply_one_by_one, why_not_grouped

_ROWS = {"a group of one row": 1, "an empty group": 0, "a group of 129 rows": 129}
# The largest share of the device's memory; how many matrices of a trial exist at once, rounded up.
_SHARE_OF_MEMORY, _COPIES = 0.01, 16
_NUMBERS_ON_CPU = 1 << 14  # numbers in a matrix: a CPU's kernels do not depend on its width
# The largest difference of two orders of summation, in units of the dtype's last bit at the largest number.
_ROUNDINGS = 4


def try_grouped(resolved: Resolved, device: torch.device) -> None:
    """Tries the products of a mixture's experts and sets how they are multiplied. Prints what differs. Collective."""
    GroupedLinear.refused = ""
    shape, tp = resolved.model, resolved.layout.tp
    if shape.experts is None or shape.expert_ffn is None:
        return
    dtype, width = HALF.get(resolved.train.dtype, torch.float32), shape.expert_ffn // tp
    found, tried = "", False
    for outputs, inputs in ((width * (2 if shape.is_gated else 1), shape.hidden), (shape.hidden, width)):
        if not found and not why_not_grouped(device, dtype, outputs, inputs):
            found, tried = difference(device, dtype, outputs, inputs), True
    size, rank = dist.get_world_size(), dist.get_rank()
    first = torch.tensor(rank if found else size, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if (wrong := int(first)) < size:
        words = [f"on rank {wrong}, {_name(device)}, {dtype}, {found}"]
        dist.broadcast_object_list(words, src=wrong, device=device)
        GroupedLinear.refused = f"torch's grouped products are not those of the loop: {words[0]}"
    elif (
        tried
        and rank == 0
        and device.type == "cuda"
        and torch.version.hip is None
        and (dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10))
    ):  # pytorch#186620
        print(f"note: torch itself multiplies experts one by one in {dtype} on {_name(device)}, and waits for the "
              "device each time; bf16 on compute capability 9 or 10 does not", file=sys.stderr, flush=True)  # fmt: skip


def difference(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int) -> str:
    """What is wrong with grouped products by matrices [outputs, inputs], in words; empty if nothing is. Takes at most
    1 % of the device's memory, for which it tries narrower matrices, and leaves nothing allocated."""
    outputs, inputs = _narrowed(device, dtype, outputs, inputs)
    generator = torch.Generator(device).manual_seed(1)
    sizes = [*_ROWS.values()]
    shapes = ((sum(sizes), inputs), (len(sizes), outputs, inputs), (sum(sizes), outputs))
    drawn = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
    rows, weight, gradient = drawn[0].requires_grad_(), drawn[1].mul_(inputs**-0.5).requires_grad_(), drawn[2]
    ends = torch.tensor(sizes, device=device).cumsum(0).int()

    def unwritten_shows() -> None:
        for shape in shapes:
            torch.full(shape, torch.nan, device=device, dtype=dtype)

    def with_gradients(product: Tensor) -> tuple[Tensor, ...]:
        unwritten_shows()
        # Not by `grad_outputs`, for which torch imports sympy, half a second.
        return (product.detach(), *torch.autograd.grad((product * gradient).sum(), (rows, weight)))

    with torch.enable_grad():
        wanted = with_gradients(multiply_one_by_one(rows, weight, ends))
        unwritten_shows()
        try:
            found = with_gradients(F.grouped_mm(rows, weight.transpose(1, 2), offs=ends))
        except Exception as fault:
            return f"it raises {type(fault).__name__}: {str(fault).partition(chr(10))[0]:.200}"
    for number, what in enumerate(("product", "gradient of the rows", "gradient of the weights")):
        parts = [torch.split(one[number], sizes if number < 2 else 1) for one in (found, wanted)]
        for group, one, other in zip(_ROWS, *parts, strict=True):
            if wrong := _far(one, other):
                return f"the {what} of {group} {wrong}"
    return ""


def _far(found: Tensor, wanted: Tensor) -> str:
    if not found.numel():
        return ""
    largest, far = float(wanted.float().abs().max()), float((found.float() - wanted.float()).abs().max())
    limit = max(_ROUNDINGS * torch.finfo(found.dtype).eps, 1e-5) * largest
    return "" if far <= limit else f"differs by {far:.2g}, and its largest number is {largest:.2g}"


def _narrowed(device: torch.device, dtype: torch.dtype, *widths: int) -> Sequence[int]:
    most = _NUMBERS_ON_CPU
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        most = int(_SHARE_OF_MEMORY * memory / (_COPIES * dtype.itemsize))
    outputs, inputs = widths
    while outputs * inputs > most:
        outputs, inputs = (outputs // 128 * 64, inputs) if outputs > inputs else (outputs, inputs // 128 * 64)
    return outputs, inputs


def _name(device: torch.device) -> str:
    """The device with the versions on which its kernels depend."""
    if device.type != "cuda":
        return f"{device.type}, torch {torch.__version__}"
    file = Path("/sys/module/nvidia/version")
    driver = f", driver {file.read_text().strip()}" if file.exists() else ""
    library = f"ROCm {torch.version.hip}" if torch.version.hip is not None else f"CUDA {torch.version.cuda}{driver}"
    return f"{torch.cuda.get_device_name(device)}, {library}, torch {torch.__version__}"
