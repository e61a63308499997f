"""Trainings of one rank in which a use of private names is dropped, for `test_private_parts.py`.

`python -m tests.train.engines.plain_path_runs FOLDER`.
"""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import torch

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.train.engines import private_parts as parts
from hpc_gpt.trainer.train.engines.private_parts import Use
from tests import ALL_TESTS, without
from tests.distributed.equality_cases import CLIP, Case, micro_batches
from tests.distributed.groups import finish, meet
from tests.distributed.trainings import build
from tests.distributed.trainings import train as take_steps

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
    return Case(Layout(1, 1, 1), engine, dtype, CLIP).resolved


def train(settings: Resolved) -> dict[str, Any]:
    """Losses and norms of the steps, and what was printed on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        engine = build(settings)
        losses, norms, _ = zip(*take_steps(engine, settings, range(STEPS)), strict=True)
        engine.evaluate(iter(micro_batches(settings, 0, STEPS)), 2)
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
    meet(folder, "all")
    torch.set_num_threads(1)
    found = {}
    for name, (engine, dtype, uses) in CASES.items():
        settings = resolved(engine, dtype)
        found[name] = {"usual": train(settings)} | {use.purpose: train_without(use, settings) for use in uses}
    finish(folder, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
