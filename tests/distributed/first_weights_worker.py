"""One rank of engines that begin from fp32 weights, given and drawn, and train a step that changes nothing.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the results' folder as argument; "llama" and "gpt2", folders of
weights, are beside it. Rank 0 writes which engines' checkpoints have other bits, and the names of the weights.
"""

import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.train.engines import protocol
from hpc_gpt.trainer.train.engines.deepspeed_setup import import_deepspeed
from tests import ALL_TESTS
from tests.distributed.equality_cases import CLIP, VOCAB, Case, micro_batches, zero
from tests.distributed.equality_worker import saved_weights
from tests.distributed.groups import finish, in_turn

GIVEN_SEED = 7
_ZERO, _HF = "deepspeed-zero", "hf-deepspeed"
DP, TP, PP = Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1)
HOW: dict[str, tuple[Layout, Engine]] = {
    "ddp": (DP, Engine(name="ddp")),
    "fsdp": (DP, Engine(name="fsdp")),
    "3d dp2": (DP, zero(1)),
    "3d pp2": (PP, zero(1)),
    "zero1 tp2": (TP, Engine(name=_ZERO, zero_stage=1)),
    "zero2 offloaded": (DP, Engine(name=_ZERO, zero_stage=2, offload="optimizer")),
    "zero3": (DP, Engine(name=_ZERO, zero_stage=3)),
    "zero3 tp2": (TP, Engine(name=_ZERO, zero_stage=3)),
    "zero3 tiles offloaded": (DP, Engine(name=_ZERO, zero_stage=3, offload="full", tiles=2)),
    "hf zero1": (DP, Engine(name=_HF, zero_stage=1)),
    "hf zero3": (DP, Engine(name=_HF)),
}
_DTYPES = (("bf16", "llama"), ("fp16", "gpt2"))
# (how, dtype, model, given). fp16 and bf16 differ in DeepSpeed's optimizer of ZeRO-1.
ALL_CASES = [(how, dtype, model, given) for how in HOW for dtype, model in _DTYPES for given in (True, False)]
# Each engine given and drawn, in every run of the tests.
SHORT = [(how, *_DTYPES[number // 2 % 2], number % 2 == 0) for number, how in enumerate(HOW)]
CASES = ALL_CASES if ALL_TESTS else SHORT


def name_of(how: str, dtype: str, model: str, given: bool) -> str:
    return f"{how} {dtype} {model} {'given' if given else 'drawn'}"


def settings(how: str, dtype: str, model: str, folder: Path | None) -> Resolved:
    layout, engine = HOW[how]
    resolved = Case(layout, engine, "bf16", clip=CLIP, tied=model == "gpt2", model=model).resolved
    init = None if folder is None else str(folder / model)
    train = replace(resolved.train, lr=0.0, min_lr=0.0, weight_decay=0.0, dtype=dtype, init=init)
    return replace(resolved, train=train)


@cache
def expected(model: str, seed: int) -> dict[str, Tensor]:
    """The weights that are drawn from a seed, in fp32."""
    shape = Case(DP, Engine(name="ddp"), tied=model == "gpt2", model=model).resolved.model
    return {name: weight.detach().clone() for name, weight in Gpt(shape, seed).named_parameters()}


def run(how: str, dtype: str, model: str, given: bool, folder: Path) -> list[str]:
    """The weights that have changed after a step at a rate of zero."""
    resolved = settings(how, dtype, model, folder.parent if given else None)
    # DeepSpeed asks oneDNN whether a CPU trains in fp16; torch computes it.
    with patch.object(protocol, "check_dtype_on"):
        engine = protocol.build_engine(resolved, torch.device("cpu"))
    result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, 0)))
    assert torch.isfinite(result.loss), result
    kept = saved_weights(engine, resolved, folder / name_of(how, dtype, model, given))
    wanted = expected(model, GIVEN_SEED if given else resolved.train.seed)
    if dist.get_rank():
        return []
    assert kept.keys() == wanted.keys()
    return [name for name, own in kept.items() if not torch.equal(stored(name, own), stored(name, wanted[name]))]


def stored(name: str, weight: Tensor) -> Tensor:
    """What a folder has of a weight: without the rows that pad the vocabulary."""
    return weight[:VOCAB] if name in ("embedding.weight", "head.weight") else weight


def main(folder: Path) -> None:
    import_deepspeed(torch.device("cpu")).accelerator.get_accelerator().is_fp16_supported = lambda: True
    found = in_turn(folder, "run", {name_of(*case): partial(run, *case, folder) for case in CASES})
    finish(folder, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
