"""Engine hf-deepspeed against the plain reference: stages, offloading, recomputation; saved and taken up again."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_gpt.errors import ConfigError
from hpc_gpt.train.engines.hf_deepspeed import build
from tests import marked
from tests.distributed.hf_worker import CASES, DP2, TOO_LONG
from tests.distributed.ranks import launch_ranks
from tests.distributed.zero_runs import reference, settings

pytestmark = pytest.mark.xdist_group("hf-deepspeed")

pytest.importorskip("transformers")
Results = tuple[dict[str, Any], dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("hf")
    output = launch_ranks("tests.distributed.hf_worker", 2, folder)
    assert output == "", "neither DeepSpeed nor transformers says anything"
    return json.loads((folder / "figures.json").read_text()), torch.load(folder / "weights.pt")


@pytest.mark.parametrize("name", marked(CASES, TOO_LONG[:-1]))
def test_it_equals_one_plain_process(results: Results, name: str) -> None:
    plain, found = reference(), results[0][name]
    losses, norms, skipped = zip(*found["steps"], strict=True)
    assert losses == pytest.approx(plain.losses, abs=2e-6)
    assert norms == pytest.approx(plain.norms, rel=1e-5)
    assert not any(skipped)
    assert found["loss_eval"] == pytest.approx(plain.loss_eval, abs=2e-6)
    assert found["step"] == 6


@pytest.mark.parametrize("name", marked(CASES, TOO_LONG[:-1]))
def test_its_checkpoint_gives_the_weights_back_in_our_layout(results: Results, name: str) -> None:
    plain, weights = reference().weights, results[1][name]
    assert weights.keys() == plain.keys()
    for key, weight in weights.items():
        assert weight.shape == plain[key].shape
        assert float((weight - plain[key]).abs().max()) <= 1e-5, key
    assert results[0][name]["parameters"] == sum(weight.numel() for weight in plain.values())


@pytest.mark.long
def test_bf16_is_near(results: Results) -> None:
    plain, found = reference(), results[0]["zero3 bf16"]
    losses, norms, _ = zip(*found["steps"], strict=True)
    assert losses == pytest.approx(plain.losses, abs=2e-2)
    assert norms == pytest.approx(plain.norms, rel=3e-2)


def test_a_resumed_run_equals_an_unbroken_one_to_the_last_digit(results: Results) -> None:
    found = results[0]["resume"]
    assert found["step"] == 3
    assert found["resumed"] == found["unbroken"]


def test_it_goes_on_at_another_stage(results: Results) -> None:
    found = results[0]["resume"]
    for (loss, norm, _), (unbroken, its_norm, _) in zip(found["elsewhere"], found["unbroken"], strict=True):
        assert loss == pytest.approx(unbroken, abs=2e-6)
        assert norm == pytest.approx(its_norm, rel=1e-5)


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(ConfigError, match="needs transformers, which is not installed") as refused:
        build(settings(DP2, CASES["zero3"]), torch.device("cpu"))
    assert refused.value.hint == "pip install 'hpc-gpt[hf]'"


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    from hpc_gpt.errors import LayoutError
    from hpc_gpt.settings.experiment import Engine
    from hpc_gpt.settings.layout import Layout

    with pytest.raises(LayoutError, match="tp 2 cannot run on engine hf-deepspeed"):
        settings(Layout(2, 1, 1), Engine(name="hf-deepspeed"))
    with pytest.raises(ConfigError, match="selective, which transformers' model does not have"):
        settings(DP2, Engine(name="hf-deepspeed", recompute="selective"))
