"""Between two logging steps the host waits for the device nowhere: a profile of the real loop shows no `.item()`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_gpt.trainer.data import open_stream
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import full_name
from hpc_gpt.trainer.tokens.samples import open_samples
from tests import marked
from tests.distributed.plain_gpt import train_plainly
from tests.distributed.ranks import run_together
from tests.trainer.profiled_loop import CASES, SHORT, STEPS, WAITING, case_settings, run_all

pytestmark = pytest.mark.xdist_group("train-waiting")

Found = dict[str, dict[str, Any]]

# The words of all ranks, which are of the host; figures that have arrived from the device, and are asked whether; a
# micro-batch as it is written, on its way to the device.
ON_THE_HOST = {"tensor ranks.all_reduce", "tolist ranks.finish", "tolist metrics.numbers", "numpy data._tensors"}


def long(names: Iterable[str]) -> list[Any]:
    return marked(names, [name for name in names if name not in SHORT])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Found:
    found: Found = run_together(run_all, 1, tmp_path_factory.mktemp("profiled"), tokens)
    return found


@pytest.fixture(scope="module")
def plain(tokens: Path) -> list[float]:
    """The losses of one plain PyTorch process on the same batches."""
    resolved = case_settings(tokens, "ddp")
    initial = {full_name(one): one.detach() for one in Gpt(resolved.model, resolved.train.seed).parameters()}
    stream = open_stream(open_samples(resolved), resolved, 0, torch.device("cpu"))
    steps = [list(stream.step(step)) for step in range(STEPS)]
    batches = [(torch.cat([one for one, _ in pairs]), torch.cat([one for _, one in pairs])) for pairs in steps]
    return train_plainly(resolved.model, resolved.train, initial, batches, batches[0]).losses


@pytest.mark.parametrize("case", long(CASES))
def test_no_step_brings_a_number_to_the_host(found: Found, case: str) -> None:
    assert found[case]["ended"] == "done"
    assert set(found[case]["counts"]) <= ON_THE_HOST
    # The profile was open: these are in every step.
    assert found[case]["counts"]["tolist ranks.finish"] == 4


@pytest.mark.parametrize("case", long(WAITING))
def test_a_profile_shows_where_the_host_must_know(found: Found, case: str) -> None:
    """What the test above would look like if something waited."""
    assert any(name.startswith("aten::is_nonzero") for name in found[case]["counts"])


@pytest.mark.parametrize("case", long(CASES | WAITING))
def test_it_trains_as_one_plain_process_does(found: Found, plain: list[float], case: str) -> None:
    assert found[case]["losses"] == pytest.approx(plain, abs=1e-2 if "bf16" in case else 2e-6)
