"""Trainings of one rank in which a use of private names is dropped, for `test_private_parts.py`.

`python -m tests.train.engines.plain_path_runs FOLDER`.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.settings.resolve import resolve
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.engines import private_parts as parts
from hpc_gpt.train.engines.private_parts import Use
from hpc_gpt.train.engines.protocol import build_engine
from tests import ALL_TESTS, without

STEPS = 4
_TORCH = (parts.FUSED, parts.FOREACH)
_TORCH_TOO = _TORCH if ALL_TESTS else ()  # ddp drops them in every run of the tests
_ZERO = Engine("deepspeed-zero", 3)
# Name: engine, dtype, and the uses that it has.
EVERY_CASE: dict[str, tuple[Engine, str, tuple[Use, ...]]] = {
    "ddp fp32": (Engine("ddp"), "fp32", _TORCH),
    "ddp bf16": (Engine("ddp"), "bf16", _TORCH),
    "zero 0": (Engine("deepspeed-zero", 0), "fp32", (*_TORCH_TOO, parts.NO_REDUCTION)),
    "zero 1 bf16": (
        Engine("deepspeed-zero", 1),
        "bf16",
        (*_TORCH_TOO, parts.STEP_WITHOUT_HOST_BF16, parts.NO_REDUCTION),
    ),
    "zero 1": (Engine("deepspeed-zero", 1), "fp32", (*_TORCH_TOO, parts.STEP_WITHOUT_HOST_12)),
    "zero 2 bf16": (Engine("deepspeed-zero", 2), "bf16", (parts.STEP_WITHOUT_HOST_12,)),
    "zero 3": (_ZERO, "fp32", (*_TORCH_TOO, parts.STEP_WITHOUT_HOST_3, parts.ZERO_3_SUMS, parts.BUILT_IN_PARTS)),
    "zero 3 bf16": (_ZERO, "bf16", (parts.STEP_WITHOUT_HOST_3, parts.ZERO_3_SUMS, parts.BUILT_IN_PARTS)),
    "zero 3 offloaded": (Engine("deepspeed-zero", 3, offload="optimizer"), "fp32", (parts.ZERO_3_SUMS,)),
    "3d": (Engine("deepspeed-3d", 1), "bf16", (parts.LOGITS, parts.NO_REDUCTION, parts.STEP_WITHOUT_HOST_BF16)),
}
# Each use at least once in every run of the tests.
TOO_LONG = ("ddp bf16", "zero 0", "zero 1", "zero 3 bf16", "zero 3 offloaded")
CASES = without(EVERY_CASE, *TOO_LONG)


def resolved(engine: Engine, dtype: str) -> Resolved:
    return resolve(
        Experiment(
            name="plain",
            model=Model(hidden=32, layers=2, heads=4, vocab=61, seq=16),
            engine=engine,
            layout=LayoutRequest(gpus=1, tp=1, pp=1, dp=1, micro_batch=2, micro_batches=2),
            train=Train(steps=STEPS, dtype=dtype, lr=1e-3, clip=0.25),  # type: ignore[arg-type]
        ),
        ClusterProfile(name="test", scheduler="local", gpus_per_node=1),
    )


def train(settings: Resolved) -> dict[str, Any]:
    """Losses and norms of the steps, and what was printed on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        engine = build_engine(settings, torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        losses, norms = [], []
        for _ in range(STEPS):
            tokens = torch.randint(0, 61, (2, 2, 17), generator=generator)
            result = engine.train_step((one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens)
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
        engine.evaluate(((one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens), 2)
    return {"losses": losses, "norms": norms, "said": said.getvalue()}


def train_without(use: Use, settings: Resolved) -> dict[str, Any]:
    """The same with the first of the use's names gone."""
    is_there = parts._is_there
    parts._is_there = lambda name: name != use.names[0] and is_there(name)
    parts.can_use.cache_clear()
    try:
        return train(settings)
    finally:
        parts._is_there = is_there
        parts.can_use.cache_clear()


def main(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    found = {}
    for name, (engine, dtype, uses) in CASES.items():
        settings = resolved(engine, dtype)
        found[name] = {"usual": train(settings)} | {use.purpose: train_without(use, settings) for use in uses}
    (folder / "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
