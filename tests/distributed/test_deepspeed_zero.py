"""Engine deepspeed-zero with a part of the states on the GPU, and what DeepSpeed's engines cannot go on with.

Their steps are in the equality table, their resumes and moves in test_promises.py.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hpc_gpt.core.engines.base import ds_config
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.trainer.engines import deepspeed_zero
from hpc_gpt.trainer.engines.protocol import module_of
from tests.distributed.equality_cases import STEPS, Case
from tests.distributed.ranks import Task, each
from tests.distributed.reference import reference
from tests.distributed.test_promises import DP2, PP2, hf, sharded, staged
from tests.distributed.trainings import SAVED, Figures, build, complaint, new_folder, save_now, train

Found = Callable[[Task], Any]


@contextmanager
def part_on_the_gpu() -> Iterator[None]:
    """A context in which an engine is built as if the ranks had GPUs: `offload_ratio` leaves tensors on "cpu:0".

    DeepSpeed's CPU Adam computes with torch's AdamW, as its own kernel takes minutes to compile.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def adam_update(
        _: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        corrects: bool,
        *tensors: Tensor,
    ) -> None:
        assert type(step) is int  # as C++ demands
        assert corrects
        weights, gradients, first, second = ([one] for one in tensors)
        done = torch.tensor(step - 1.0)
        how: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "lr": lr, "weight_decay": decay, "eps": eps}
        adamw(weights, gradients, first, second, [], [done], fused=True, amsgrad=False, maximize=False, **how)

    kernel = SimpleNamespace(adam_update=adam_update, create_adam=Mock(), destroy_adam=Mock())
    with (
        patch.object(CPUAdamBuilder, "load", lambda self: kernel),
        patch.object(deepspeed_zero, "check_compiler"),
        patch.object(get_accelerator(), "_name", "cpu:0"),
        patch("cpuinfo.get_cpu_info", dict),  # a Python each time, for a warning about AMD's fp16
    ):
        yield


def offload_partly(folder: Path, case: Case) -> dict[str, Any]:
    """Trainings with a share of the states on the host, and what resumes of them with other shares do."""

    def build_at(ratio: float, seed: int = 1) -> Any:
        with part_on_the_gpu():
            return build(replace(case, engine=replace(case.engine, offload_ratio=ratio)).resolved, seed)

    def train_and_save(engine: Any) -> tuple[Figures, Path]:
        figures = train(engine, engine._resolved, range(SAVED))
        kept = save_now(engine, new_folder(folder / f"offloaded {engine._resolved.engine.offload_ratio}"))
        return figures + train(engine, engine._resolved, range(SAVED, STEPS)), kept

    def resume_at(ratio: float, kept: Path) -> Figures:
        engine = build_at(ratio, seed=2)
        engine.load(kept)
        return train(engine, engine._resolved, range(SAVED, STEPS))

    # A deep model's groups are layers at any ratio.
    with patch.object(ds_config, "_SUB_GROUPS_TO_PLACE", 1):
        (whole, of_whole), part = train_and_save(build_at(1.0)), build_at(0.5)
        partly, of_part = train_and_save(part)
        resumed = {"1 at 0.5": resume_at(0.5, of_whole)}
        resumed |= {"0.5 at 0.5": resume_at(0.5, of_part), "0.5 at 1": resume_at(1.0, of_part)}
    resumed["0.5 at 0.2 in other groups"] = resume_at(0.2, of_part)
    return {
        "devices": list(part._engine.optimizer.subgroup_to_device.values()),
        "rates": [group["lr"] for group in part._engine.optimizer.backup_optimizer.param_groups],
        "whole": whole,
        "part": partly,
        "resumed": resumed,
    }


OFFLOADED = sharded(DP2, 3, offload="optimizer")


@each(offload_partly, [], [OFFLOADED])
def test_states_on_the_gpu_train_and_resume_as_on_the_host(task: Task, found: Found) -> None:
    """Over warm-up and decay, and resumes with other shares in the same groups and in other groups,
    with the same share and with none."""
    one = found(task)
    assert set(one["devices"]) == {"cpu:0", "cpu"}
    assert one["rates"] == [reference(OFFLOADED.resolved).lrs[-1]] * 2
    losses, norms, skipped = zip(*one["whole"], strict=True)
    assert [step[0] for step in one["part"]] == pytest.approx(losses, abs=1e-6)
    assert [step[1] for step in one["part"]] == pytest.approx(norms, rel=1e-6)
    assert not any(skipped)
    for ratios, steps in one["resumed"].items():
        assert [step[0] for step in steps] == pytest.approx(losses[SAVED:], abs=1e-6), ratios


def refuse(folder: Path, pipeline: Case, case: Case) -> dict[str, str]:
    """What is said where nothing can go on: with a pipeline's checkpoint, and on this machine."""
    first = build(pipeline.resolved)
    kept = save_now(first, new_folder(folder / "of a pipeline"))
    engine = build(case.resolved)
    others = {
        "layers": replace(case.resolved, model=replace(case.resolved.model, layers=2)),
        "engine": hf(1).resolved,
    }
    said = {key: complaint(engine, kept, other) for key, other in others.items()}
    try:
        build(sharded(DP2, 3, offload="optimizer", offload_ratio=0.5).resolved)
    except ConfigError as fault:
        said["ratio"] = str(fault)
    return said


@each(refuse, [(staged(PP2), sharded(DP2, 1))])
def test_what_cannot_go_on_says_why(task: Task, found: Found) -> None:
    said = found(task)
    assert "another model: model.layers is 3 in it and 2 in this run" in said["layers"]
    assert "engine.name is deepspeed-3d in it and hf-deepspeed in this run" in said["engine"]
    assert "g++ and ninja cannot be found" in said["ratio"]


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(ConfigError, match="needs transformers, which is not installed") as refused:
        module_of("hf-deepspeed").build(hf().resolved, torch.device("cpu"))
    assert refused.value.hint == "pip install 'hpc-gpt[hf]'"


@each(refuse, [(staged(PP2), sharded(DP2, 1))])
def test_deepspeed_prints_nothing(task: Task, launch_of: Any) -> None:
    assert launch_of(task).all_output() == ""
