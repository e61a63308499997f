"""What the tests of engines ddp and fsdp ask of the launches they share."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.sharded_runs import CLIP, STEPS, TRAININGS, launched, reference

_FOLDERS: list[Path] = []


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder of all launches, one for the session."""
    if not _FOLDERS:
        _FOLDERS.append(factory.mktemp("sharded"))
    return _FOLDERS[0]


def found_by(folder: Path) -> dict[int, dict[str, Any]]:
    """What the launches found, by world size."""
    return launched(folder)


def check_near(found: dict[str, Any], dtype: str) -> None:
    """Losses, norms and the evaluation are the reference's, whose clipping acts on every step."""
    plain = reference()
    assert min(plain.norms) > CLIP
    losses, norms, skipped = zip(*found["figures"], strict=True)
    exact = dtype == "fp32"
    assert losses == pytest.approx(plain.losses, abs=2e-6 if exact else 1e-2, rel=0)
    assert norms == pytest.approx(plain.norms, rel=1e-5 if exact else 5e-2)
    assert found["loss_eval"] == pytest.approx(plain.loss_eval, abs=2e-6 if exact else 1e-2, rel=0)
    assert not any(skipped)
    assert found["step"] == STEPS
    assert found["parameters"] == sum(weight.numel() for weight in plain.weights.values())


def check_weights(read_weights: Callable[..., Any], folder: Path, world: int, name: str) -> None:
    """The weights that one process reads from the checkpoint of that training are the reference's, in fp32."""
    resolved, plain = TRAININGS[world][name], reference()
    weights = dict(read_weights(folder / "checkpoints" / f"trained {world} {name}", resolved))
    assert weights.keys() == plain.weights.keys()
    limit = 1e-5 if resolved.train.dtype == "fp32" else 1e-2
    for key, weight in weights.items():
        assert weight.dtype == torch.float32
        far = (weight - plain.weights[key]).abs()
        # The K bias has a gradient of zero but for rounding, which Adam makes much of.
        third = len(far) // 3
        k_bias = key.endswith("qkv.bias")
        assert float(far.max() if not k_bias else max(far[:third].max(), far[2 * third :].max())) <= limit, key


def check_resumed(found: dict[str, Any]) -> None:
    """Three steps, a save and three more are six unbroken ones, bit by bit."""
    assert found["step"] == 3
    assert found["resumed"] == found["unbroken"]
    assert found["same_weights"]
    assert found["same_scale"]
    assert found["same_random"]


def check_moved(found: dict[str, Any], dtype: str = "fp32") -> None:
    """The steps after the move are the reference's."""
    exact = dtype == "fp32"
    losses, norms, _ = zip(*found["figures"], strict=True)
    assert found["step"] == 3
    assert losses == pytest.approx(reference().losses[3:], abs=2e-6 if exact else 1e-2, rel=0)
    assert norms == pytest.approx(reference().norms[3:], rel=1e-5 if exact else 5e-2)


def check_broken(found: dict[str, Any], fp16: bool) -> None:
    """The step is skipped on every rank, changes nothing, and halves fp16's scale; training goes on."""
    for ((_, norm, skipped),) in found["bad"]:
        assert skipped
        assert not math.isfinite(norm)
    assert found["weights_kept"]
    assert found["moments_kept"]
    assert set(found["scales"]) == ({32768.0} if fp16 else {None})
    assert found["step"] == 5
    for _, norm, skipped in found["good"] + found["then"]:
        assert math.isfinite(norm)
        assert not skipped
