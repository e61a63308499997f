"""Engine deepspeed-zero with offload on a machine without a compiler, and what DeepSpeed's engines cannot go on with.

Their steps are in the equality table, their resumes and moves in test_promises.py.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.trainer.engines.build import module_of
from tests.distributed.equality_cases import STEPS, Case
from tests.distributed.ranks import Task, each
from tests.distributed.reference import reference
from tests.distributed.test_promises import DP2, PP2, hf, sharded, staged
from tests.distributed.trainings import Figures, build, complaint, new_folder, save_now, train

Found = Callable[[Task], Any]


def train_without_compilers(folder: Path, case: Case) -> Figures:
    """A training on a machine that has no compiler."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    with patch.dict(os.environ, {"PATH": str(folder)}), patch.object(OpBuilder, "jit_load", side_effect=AssertionError):
        for name in ("CC", "CXX"):
            os.environ.pop(name, None)
        engine = build(case.resolved)
        return train(engine, case.resolved, range(STEPS))


@each(train_without_compilers, [sharded(DP2, 3, offload="full")], [sharded(DP2, 1, offload="optimizer")])
def test_offload_builds_no_kernel(task: Task, found: Found) -> None:
    losses = [step[0] for step in found(task)]
    assert losses == pytest.approx(reference(task.given[0].resolved).losses, abs=2e-6)


def go_on(folder: Path, pipeline: Case, case: Case) -> str:
    """The complaint about a pipeline's checkpoint."""
    first = build(pipeline.resolved)
    kept = save_now(first, new_folder(folder / "of a pipeline"))
    return complaint(build(case.resolved), kept)


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(ConfigError, match="needs transformers, which is not installed") as refused:
        module_of("hf-deepspeed").build(hf().resolved, torch.device("cpu"))
    assert refused.value.hint == "pip install 'hpc-gpt[train]'"


@each(go_on, [(staged(PP2), sharded(DP2, 1))])
def test_deepspeed_prints_nothing(task: Task, found: Found, launch_of: Any) -> None:
    assert found(task) == ""
    assert launch_of(task).all_output() == ""
