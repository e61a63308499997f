"""One rank of two: the Triton kernels, run by Triton's interpreter, beside the plain path."""

import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model import vocab_loss
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel

SPLIT = ModelShape(hidden=32, layers=1, heads=4, vocab=61, seq=16)  # padded to 64: the second rank has padding
PADDING = ModelShape(hidden=32, layers=1, heads=4, vocab=61, seq=16, vocab_multiple=128)  # the second has nothing else
SHAPES = {"split": SPLIT, "padding": PADDING}
# Of a whole vocabulary: (columns, of them real), by dtype. The fourth is read in two pieces, one of them padding; the
# last has a row a multiprocessor.
ROWS = ((64, 61), (100, 100), (256, 130), (8200, 8190), (60_032, 60_001))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter takes seconds for each of the wide rows.
TOO_LONG = [f"{dtype} {rows} {real}" for dtype in DTYPES for rows, real in ROWS[3:]]
CASES = [
    *(f"{dtype} {rows} {real}" for dtype in DTYPES for rows, real in ROWS),
    *(f"multiply {dtype}" for dtype in DTYPES),
    *SHAPES,
]
_BESIDE = Path(sys.prefix) / "triton"  # torch's CPU build comes without Triton, so that its own start stays as it is


def has_triton() -> bool:
    """Whether Triton can be imported, perhaps from the folder where `.ci/make-venv test` installs it."""
    return importlib.util.find_spec("triton") is not None or _BESIDE.is_dir()


def find_triton() -> None:
    """Adds that folder to the path, for this process."""
    if importlib.util.find_spec("triton") is None:
        sys.path.append(str(_BESIDE))


def _whole(dtype: torch.dtype, rows: int, real: int, kernels: Any) -> float:
    logits = (5 * torch.randn(7, rows)).to(dtype)
    targets = torch.randint(0, real, (7,))
    ours, plain = logits.clone(), logits.clone()
    losses = kernels.overwrite_with_gradient(ours, targets, real, TensorParallel(), 0.37)
    expected = vocab_loss.plain_overwrite(plain, targets, real, TensorParallel(), 0.37)
    read = kernels.losses_of(logits, targets, real, TensorParallel())
    far = (losses - expected).abs().max() / 10, (ours.float() - plain.float()).abs().max(), (read - losses).abs().max()
    return float(max(far))


def _product(dtype: torch.dtype, kernels: Any) -> float:
    values, factor = torch.rand(5000).to(dtype), torch.tensor(1 / 3)
    return float((kernels.multiply(values, factor, torch.float32) - values.float() / 3).abs().max())


def _split(kernels: Any, shape: ModelShape, tp: TensorParallel) -> float:
    """Of a model on both ranks: differences of loss and gradients between the kernels and the plain path."""
    tokens = torch.randint(0, shape.vocab, (3, shape.seq + 1), generator=torch.Generator().manual_seed(1))
    found = []
    for elementwise in (vocab_loss._Plain, kernels):
        vocab_loss._elementwise = lambda device, chosen=elementwise: chosen
        model = Gpt(shape, 1, tp, Techniques(one_pass_loss=True))
        given = tokens[:, :-1], tokens[:, 1:].contiguous()
        loss = model(*given)
        loss.backward()
        with torch.no_grad():
            evaluated = model(*given)
        found.append([loss.detach(), evaluated, *(parameter.grad for parameter in model.parameters())])
    return max(float((ours - plain).abs().max()) for plain, ours in zip(*found, strict=True))


def main(folder: Path) -> None:
    if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
        # torch's CUDA build has imported Triton, which reads the variable as it is imported.
        again = [sys.executable, "-m", "tests.trainer.model.triton_worker", str(folder)]
        os.execve(sys.executable, again, {**os.environ, "TRITON_INTERPRET": "1"})
    os.environ["TRITON_INTERPRET"] = "1"
    find_triton()
    from hpc_gpt.trainer.model import triton_kernels

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(1)
    tp = TensorParallel(rank, 2, dist.group.WORLD)
    alone = {f"{dtype} {rows} {real}": partial(_whole, dtype, rows, real) for dtype in DTYPES for rows, real in ROWS}
    alone |= {f"multiply {dtype}": partial(_product, dtype) for dtype in DTYPES}
    names = json.loads((folder / "asked.json").read_text())
    # What one process computes is shared out: the other's figure is 0.
    asked = [far for name, far in alone.items() if name in names]
    figures = [far(triton_kernels) if number % 2 == rank else 0.0 for number, far in enumerate(asked)]
    figures += [_split(triton_kernels, SHAPES[name], tp) for name in names if name in SHAPES]
    worst: list[Any] = [None, None]
    dist.all_gather_object(worst, figures)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(dict(zip(names, map(max, *worst), strict=True))))
    dist.barrier()
    os._exit(0)  # see techniques_worker


if __name__ == "__main__":
    main(Path(sys.argv[1]))
