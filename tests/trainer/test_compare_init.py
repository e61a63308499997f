"""What doctor says of weights: equal to transformers' logits, or the first layer that differs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.weights.classes import WINDOWS
from hpc_gpt.core.weights.config_keys import ARCHITECTURES, PLAN_ONLY
from hpc_gpt.core.weights.config_keys import MIXTURES as MIXED
from hpc_gpt.launcher.doctor.checks import check_init
from hpc_gpt.trainer import compare_init
from hpc_gpt.trainer.compare_init import compare_logits
from hpc_gpt.trainer.model import attention
from hpc_gpt.trainer.model.attention import Rotation, attention_core
from hpc_gpt.trainer.model.dispatch import RoutingChoice
from hpc_gpt.trainer.model.experts import Experts
from hpc_gpt.trainer.model.router import Router
from tests.trainer.launch import settings
from tests.trainer.test_experts_folders import FAMILIES as MIXTURES
from tests.trainer.test_experts_folders import made_by_its_class
from tests.trainer.test_hf_folders import FAMILIES, write

pytest.importorskip("transformers")


def run_of(name: str, folder: Path, **changed: Any) -> Resolved:
    shape = replace(FAMILIES[name], seq=4096 if name != "gpt2" else 256, **changed)
    write(shape, folder)
    resolved = settings(Path("none"), {"gpus": 1}, Engine(name="ddp"))
    return replace(resolved, model=shape, train=replace(resolved.train, init=str(folder)))


@pytest.mark.parametrize(
    ("name", "changed"), [("gpt2", {}), ("llama", {}), ("llama", {"window": 9, "window_layers": "LS"})]
)
def test_they_are_equal(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    found = compare_logits(run_of(name, tmp_path / "out", **changed))
    assert found["level"] == "ok", found["words"]


def run_of_experts(name: str, folder: Path) -> Resolved:
    shape = MIXTURES[name]
    made_by_its_class(shape, folder)
    resolved = settings(Path("none"), {"gpus": 1}, Engine(name="ddp"))
    return replace(resolved, model=shape, train=replace(resolved.train, init=str(folder)))


def test_a_decision_between_equal_scores_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of_experts("Glm4Moe", tmp_path / "out")
    choose, turned = Router._choose, []

    def other(self: Router, scores: Tensor) -> Tensor:
        """The worst expert for some tokens instead of the first."""
        chosen = choose(self, scores)
        chosen[0, :many, 0] = scores[0, :many].argmin(-1)
        turned.append(many)
        return chosen

    monkeypatch.setattr(Router, "_choose", other)
    many = 0
    found = compare_logits(run)
    assert (found["level"], "otherwise" in found["words"]) == ("ok", False), found["words"]
    many = 1
    monkeypatch.setattr(compare_init, "MOST_FLIPS", 0.05)
    assert "; 2 of 48 routing decisions fell otherwise" in compare_logits(run)["words"]
    many = 9
    found = compare_logits(run)
    assert (found["level"], "in 18 of 48 decisions" in found["words"]) == ("fail", True)
    assert turned


def test_another_weight_of_an_expert_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of_experts("Qwen3Moe", tmp_path / "out")
    apply = Experts.forward

    def without_last(self: Experts, hidden: Tensor, weights: Tensor, chosen: Tensor, *kept: RoutingChoice) -> Tensor:
        return apply(self, hidden, weights.masked_fill(chosen == 7, 0), chosen, *kept)

    monkeypatch.setattr(Experts, "forward", without_last)
    found = compare_logits(run)
    assert (found["level"], "first in layer 0" in found["words"]) == ("fail", True)


def test_a_scaling_that_only_far_positions_show_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The slowest pair of channels alone is scaled: it turns by 6e-5 up to the 64th position, by 4e-3 up to the last.
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 2_000_000)
    run = run_of("llama", tmp_path / "out", rope_theta=1.6e7, rope_scaling=scaling)
    whole = Rotation.__init__
    monkeypatch.setattr(
        Rotation, "__init__", lambda self, width, seq, theta, scaling: whole(self, width, seq, theta, None)
    )
    from hpc_gpt.trainer.model import attention

    attention._rotation.cache_clear()
    found = compare_logits(run)
    attention._rotation.cache_clear()
    assert found["level"] == "fail"
    assert "first in layer 0" in found["words"]


CLASSES = {
    "gpt2": FAMILIES["gpt2"],
    **{name: replace(FAMILIES["llama"], tied=False) for name in ("llama", "mistral")},
    **{name: FAMILIES[name] for name in ("qwen2", "qwen3", "smollm3")},
    "mixtral": MIXTURES["Mixtral"],
    "qwen3_moe": MIXTURES["Qwen3Moe"],
    "qwen2_moe": MIXTURES["Qwen2Moe"],
    "olmoe": MIXTURES["Olmoe"],
    "dots1": MIXTURES["Dots1"],
    "glm4_moe": MIXTURES["Glm4Moe"],
}
SEQ, WINDOW = 200, 96


def scaled(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    return attention_core(1.1 * query, key, value, **how)


def unmasked(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    parts = [part.transpose(1, 2) for part in (query, key, value)]
    return torch.nn.functional.scaled_dot_product_attention(*parts, enable_gqa=True).transpose(1, 2).flatten(2)


def unbounded(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    return attention_core(query, key, value, **how | {"sight": None})


def turned_back(self: Rotation, heads: Tensor, by_halves: bool = False) -> Tensor:
    is_whole = self.cosines.shape[-1] == heads.shape[-1]  # of a part it calls itself
    return ROTATE(self._of(self.cosines, -self.sines) if is_whole else self, heads, by_halves)


ROTATE = Rotation.rotate
# {a fault of our attention: (where it is, what takes its place)}
FAULTS = {
    "scale": (attention, "attention_core", scaled),
    "mask": (attention, "attention_core", unmasked),
    "window": (attention, "attention_core", unbounded),
    "rotation": (Rotation, "rotate", turned_back),
}


def test_the_table_has_each_class_that_trains_here() -> None:
    assert {*CLASSES} == {*ARCHITECTURES, *MIXED} - {*PLAN_ONLY}


@pytest.mark.parametrize("kind", CLASSES)
def test_each_fault_of_attention_is_found_in_each_class(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = (ARCHITECTURES | MIXED)[kind]
    shape = replace(CLASSES[kind], seq=SEQ, window=WINDOW if name in WINDOWS else None)
    if kind == "smollm3":
        shape = replace(shape, window_layers="LS")
    if shape.is_mixture:
        made_by_its_class(shape, tmp_path / "out")
    else:
        write(shape, tmp_path / "out", begun_as=name)
    resolved = settings(Path("none"), {"gpus": 1}, Engine(name="ddp"))
    run = replace(resolved, model=shape, train=replace(resolved.train, init=str(tmp_path / "out")))
    found = compare_logits(run)
    assert (found["level"], "beyond the window of 96" in found["words"]) == ("ok", name in WINDOWS), found["words"]
    for fault, (place, attribute, other) in FAULTS.items():
        if (fault == "window" and name not in WINDOWS) or (fault == "rotation" and kind == "gpt2"):
            continue
        with monkeypatch.context() as patched:
            patched.setattr(place, attribute, other)
            found = compare_logits(run)
        assert found["level"] == "fail", (fault, found["words"])
        assert (fault == "window") == found["words"].startswith("beyond the window of 96, "), found["words"]


@pytest.mark.long
def test_doctor_starts_it_and_says_what_is_wrong(tmp_path: Path) -> None:
    run = run_of("qwen2", tmp_path / "out")
    assert check_init(run).level == "ok"
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    found = check_init(run)
    assert (found.level, "norm_eps is 0.001 there" in found.words) == ("fail", True)
