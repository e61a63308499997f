"""Of which model, layout and arithmetic a checkpoint is; its generators."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.states import FORMAT, INDEX
from hpc_gpt.trainer.checkpoints.training_state import Generators, identity, open_checkpoint
from hpc_gpt.trainer.ranks import Peers
from tests.trainer.launch import settings

CPU = torch.device("cpu")
RESOLVED = settings(Path("none.tokens"), {"tp": 2, "pp": 1, "dp": 2})


def write(folder: Path, resolved: Resolved) -> None:
    """An index alone."""
    index = {"format": FORMAT, "step": 20, "settings": identity(resolved), "optimizer": {"step": 20}}
    index["parameters"] = {"norm.weight": {"kinds": {"weight": {}, "exp_avg": {}, "exp_avg_sq": {}}}}
    (folder / INDEX).write_text(json.dumps(index))


def test_engine_and_layout_may_be_others(tmp_path: Path) -> None:
    write(tmp_path, RESOLVED)
    for other in ({"layout": Layout(2, 1, 4)}, {"layout": Layout(2, 1, 2, 2)}, {"engine": Engine(name="ddp")}):
        saved, is_alike = open_checkpoint(tmp_path, replace(RESOLVED, **other))  # type: ignore[arg-type]
        assert (saved.about["step"], is_alike) == (20, False)
    assert open_checkpoint(tmp_path, RESOLVED)[1]


def test_another_optimizers_states_are_none(tmp_path: Path) -> None:
    write(tmp_path, RESOLVED)
    saved, is_alike = open_checkpoint(tmp_path, RESOLVED)
    assert (saved.kinds("norm.weight"), saved.optimizer, is_alike) == (["exp_avg", "exp_avg_sq"], {"step": 20}, True)
    other = replace(RESOLVED, train=replace(RESOLVED.train, optimizer="sgd"))
    saved, is_alike = open_checkpoint(tmp_path, other)
    assert (saved.kinds("norm.weight"), saved.optimizer, is_alike) == ([], {}, True)


def test_a_models_keys_are_compared_both_ways(tmp_path: Path) -> None:
    """A default is in neither, so a key may be in the checkpoint's alone."""
    plain = replace(RESOLVED.model, mlp="swiglu", norm="rmsnorm", positions="rope", bias="none")
    plain = replace(plain, experts=4, experts_per_token=2, expert_ffn=8)
    for key, value in {
        "norm_topk": True, "router": "sigmoid", "router_scale": 2.5, "expert_groups": 2, "rotated": 0.5,
        "rope_theta": 5e5, "norm_eps": 1e-6, "nope_every": 2, "pad_token": 3,
    }.items():  # fmt: skip
        other = replace(plain, **{key: value})
        default = getattr(plain, key)
        for saved, resumed, words in (
            (other, plain, f"{value} in it and {default}"),
            (plain, other, f"{default} in it and {value}"),
        ):
            write(tmp_path, replace(RESOLVED, model=saved))
            assert open_checkpoint(tmp_path, replace(RESOLVED, model=saved))[1]
            with pytest.raises(CheckpointError, match=re.escape(f"model.{key} is {words} in this run")):
                open_checkpoint(tmp_path, replace(RESOLVED, model=resumed))


def drawn() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), np.random.random()


def saved_generators(generators: Generators, folder: Path, rank: int = 0) -> list[str]:
    """The files that a rank adds: without asking another rank."""
    files = RankFiles(cast(Peers, SimpleNamespace(rank=rank)))
    generators.put(files)
    return list(files.write(folder))


def test_generators_from_which_nothing_draws_are_not_saved(tmp_path: Path) -> None:
    generators = Generators(CPU)
    assert saved_generators(generators, tmp_path) == []
    (tmp_path / "states.json").write_text("{}")
    generators.load(tmp_path, 0, 1)
    assert saved_generators(generators, tmp_path) == []


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.random])
def test_each_rank_has_its_own_file_once_something_draws(draw: Callable[[], Any], tmp_path: Path) -> None:
    (tmp_path / "states.json").write_text("{}")
    generators = Generators(CPU)
    draw()
    assert saved_generators(generators, tmp_path, rank=3) == ["generators-00003.bin"]
    expected = drawn()
    again = Generators(CPU)
    again.load(tmp_path, 3, 4)
    (tmp_path / "later").mkdir()
    assert saved_generators(again, tmp_path / "later", rank=3) == ["generators-00003.bin"], "the next resume needs it"
    assert drawn() == expected


def test_the_generators_of_0_4_0_are_read(tmp_path: Path) -> None:
    """One file, with the records of all ranks one after the other."""
    (tmp_path / "states.json").write_text("{}")
    records = []
    for _ in range(2):
        generators = Generators(CPU)
        records.append(generators._record())
        expected = drawn()
    (tmp_path / "generators.bin").write_bytes(b"".join(records))
    generators.load(tmp_path, 1, 2)
    assert drawn() == expected
