"""Engine deepspeed-zero, and checkpoints of DeepSpeed's engines that go on in another layout, stage or engine."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.trainer.train.engines.protocol import module_of
from tests import ALL_TESTS, marked
from tests.distributed.reference import reference
from tests.distributed.trainings import SAVED
from tests.distributed.zero_runs import (
    LAUNCHES,
    OVERFLOWED,
    RESUMES,
    SHORT_LAUNCHES,
    SHORT_RESUMES,
    hf,
    name_of,
    run_launches,
    zero,
)

pytestmark = pytest.mark.xdist_group("zero")

Launches = dict[str, dict[str, Any]]
SOURCES = [case for _, _, leaves in LAUNCHES.values() for case in leaves]
SHORT_SOURCES = [case for _, leaves in SHORT_LAUNCHES.values() for case in leaves]
TARGETS = [(launch, case) for launch, (_, takes, _) in LAUNCHES.items() for case in takes]
SHORT_TARGETS = [(launch, case) for launch, (takes, _) in SHORT_LAUNCHES.items() for case in takes]


def long(cases: list[Any], short: list[Any]) -> list[Any]:
    """The cases; those that are not among the short ones are marked `long`."""
    return marked(cases, [case for case in cases if case not in short])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def launches(folder: Path) -> Launches:
    return run_launches(folder)


@pytest.mark.parametrize("case", long(RESUMES, SHORT_RESUMES), ids=name_of)
def test_a_resumed_run_equals_an_unbroken_one_to_the_last_digit(launches: Launches, case: Any) -> None:
    found = launches["two"]["resumes"][name_of(case)]
    assert (found["step"], found["resumed"]) == (SAVED, found["unbroken"])
    assert found["same_random"]


@pytest.mark.parametrize("case", long(RESUMES, SHORT_RESUMES), ids=name_of)
def test_zero_3_and_it_alone_splits_every_matrix_over_the_ranks(launches: Launches, case: Any) -> None:
    found = launches["two"]["resumes"][name_of(case)]
    assert len(found["split"]) >= 14
    assert set(found["split"]) == {case.engine.zero_stage == 3}
    assert set(found["shares"]) <= {1 / case.layout.dp}


@pytest.mark.parametrize("case", long(RESUMES, SHORT_RESUMES), ids=name_of)
def test_a_step_that_is_not_finite_is_skipped_without_a_trace(launches: Launches, case: Any) -> None:
    found = launches["two"]["resumes"][name_of(case)]
    [(loss, norm, skipped)] = found["bad"]
    assert skipped
    assert not math.isfinite(loss)
    assert not math.isfinite(norm)
    # The rate is a function of the step, which a skipped one counts in: past the last step it stays what it is.
    assert found["after_bad"] == found["without_bad"]


@pytest.mark.parametrize(
    ("launch", "target"),
    long(TARGETS, SHORT_TARGETS),
    ids=[f"{launch}, {name_of(case)}" for launch, case in TARGETS],
)
def test_a_checkpoint_goes_on_in_another_layout_stage_or_engine(launches, folder, launch, target):
    taken = launches[launch]["taken"][name_of(target)]
    assert len(taken) >= (3 if ALL_TESTS else 2)
    for name, found in taken.items():
        unbroken = json.loads((folder / "checkpoints" / name / "then.json").read_text())
        losses, norms, skipped = zip(*found["then"], strict=True)
        assert (found["step"], found["skipped"]) == (SAVED, 0), name
        assert losses == pytest.approx([step[0] for step in unbroken], abs=2e-6), name
        assert norms == pytest.approx([step[1] for step in unbroken], rel=1e-5), name
        assert not any(skipped), name


def test_every_checkpoint_is_taken_up(launches: Launches) -> None:
    taken = {name for launch in launches.values() for found in launch["taken"].values() for name in found}
    assert taken == {name_of(case) for case in (SOURCES if ALL_TESTS else SHORT_SOURCES)}


@pytest.mark.parametrize("case", long(SOURCES, SHORT_SOURCES), ids=name_of)
def test_whole_weights_are_read_without_any_ranks(launches: Launches, folder: Path, case: Any) -> None:
    module = module_of(case.engine.name)
    found = dict(module.read_weights(folder / "checkpoints" / name_of(case), case))
    plain = reference(case, SAVED).weights
    assert found.keys() == plain.keys()
    for name, weight in found.items():
        assert weight.dtype == plain[name].dtype
        # The K part of a QKV bias has no gradient but rounding, which Adam makes large.
        limit = 1e-4 if name.endswith("qkv.bias") else 1e-5
        assert (weight - plain[name]).abs().max() <= limit, name


def test_fp16_keeps_scale_and_skipped_steps_at_another_stage(launches: Launches) -> None:
    found = launches["two"]["fp16"]
    assert [skipped for _, _, skipped in found["steps"]] == [False, True, True]
    # Hysteresis 2 forgives the first overflow; the second halves.
    assert found["counts"] == [OVERFLOWED, 2, 32768.0]
    for before, after in zip(found["then"], found["elsewhere"], strict=True):
        assert after[0] == pytest.approx(before[0], abs=1e-4)
        assert (before[2], after[2]) == (False, False)


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(ConfigError, match="needs transformers, which is not installed") as refused:
        module_of("hf-deepspeed").build(hf(), torch.device("cpu"))
    assert refused.value.hint == "pip install 'hpc-gpt[hf]'"


def test_states_on_the_gpu_train_and_resume_as_on_the_host(launches: Launches) -> None:
    """Over warm-up and decay, and resumes with other shares in the same groups and in other groups; in `make test-all`
    with the same share and with none as well."""
    found = launches["two"]["partly offloaded"]
    assert set(found["devices"]) == {"cpu:0", "cpu"}
    assert found["rates"] == [reference(zero(3, dp=2)).lrs[-1]] * 2
    losses, norms, skipped = zip(*found["whole"], strict=True)
    assert [step[0] for step in found["part"]] == pytest.approx(losses, abs=1e-6)
    assert [step[1] for step in found["part"]] == pytest.approx(norms, rel=1e-6)
    assert not any(skipped)
    assert len(found["resumed"]) == (4 if ALL_TESTS else 2)
    for ratios, steps in found["resumed"].items():
        assert [step[0] for step in steps] == pytest.approx(losses[SAVED:], abs=1e-6), ratios


@pytest.mark.long
def test_a_checkpoint_without_gpu_states_gives_its_weights_alone(launches: Launches) -> None:
    said = launches["two"]["partly offloaded"]["older"]
    for ratio in ("0.5", "1.0"):
        assert "lacks the optimizer's moments of what engine.offload_ratio left on the GPU" in said[ratio]
    assert int(said["weights"]) == RESUMES[0].model.params


def test_what_cannot_go_on_says_why(launches: Launches) -> None:
    said = launches["two"]["refused"]
    assert "train.dtype is fp32 there and bf16 here" in said["dtype"]
    assert "another model: model.layers is 3 there and 2 here" in said["model"]
    assert "engine.name is deepspeed-3d there and hf-deepspeed here" in said["engine"]
    assert "cannot be resumed with engine.offload_path" in said["nvme"]
    assert "g++ and ninja cannot be found" in said["ratio"]
    assert "no such folder" in said["path"]


def test_deepspeed_prints_nothing(launches: Launches) -> None:
    assert "".join(launch["output"] for launch in launches.values()) == ""
