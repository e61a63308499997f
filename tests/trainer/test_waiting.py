"""Between two logging steps the host waits for the device nowhere: a profile of the real loop shows no `.item()`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_gpt.trainer.data import open_stream
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import full_name
from hpc_gpt.trainer.tokens.samples import open_samples
from tests.chosen import asked
from tests.distributed.plain_gpt import train_plainly
from tests.distributed.ranks import run_together
from tests.trainer.profiled_loop import CASES, SHORT, STEPS, WAITING, case_settings, run_all

pytestmark = pytest.mark.xdist_group("train-waiting")

Found = dict[str, dict[str, Any]]

# The words of all ranks, which are of the host; figures that have arrived from the device, and are asked whether; a
# micro-batch as it is written, on its way to the device.
ON_THE_HOST = {"tensor ranks.all_reduce", "tolist ranks.finish", "tolist metrics.numbers", "numpy data._tensors"}


LONG = pytest.mark.long(launch="waiting")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Found:
    found: Found = run_together(run_all, 1, tmp_path_factory.mktemp("profiled"), tokens, asked(request, "case"))
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


@pytest.mark.parametrize(
    "case", [*SHORT, *(pytest.param(case, marks=LONG) for case in CASES | WAITING if case not in SHORT)]
)
def test_no_step_brings_a_number_to_the_host(found: Found, plain: list[float], case: str) -> None:
    """And it trains as one plain process does. Where the host must know, a profile shows it, as it would elsewhere."""
    assert found[case]["ended"] == "done"
    if case in CASES:
        assert set(found[case]["counts"]) <= ON_THE_HOST
        # The profile was open: these are in every step.
        assert found[case]["counts"]["tolist ranks.finish"] == 4
    else:
        assert any(name.startswith("aten::is_nonzero") for name in found[case]["counts"])
    assert found[case]["losses"] == pytest.approx(plain, abs=1e-2 if "bf16" in case else 2e-6)
