"""The checkpoint of a model that every rank holds whole: what loading it takes of the host's memory."""

from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.replicated import ReplicatedCheckpoint
from hpc_gpt.trainer.model.tensor_parallel import name_parameter
from tests.distributed.host_memory import Most

ROWS, NUMBERS = 4, 1 << 22  # 67 MB of weights, and twice that of moments


def made(device: str, value: float) -> tuple[ReplicatedCheckpoint, list[nn.Parameter], torch.optim.Optimizer]:
    weights = [torch.full((1, NUMBERS), value + number, device=device) for number in range(ROWS)]
    parameters = [name_parameter(nn.Parameter(one), f"weight {number}") for number, one in enumerate(weights)]
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    return ReplicatedCheckpoint(parameters, optimizer), parameters, optimizer


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "meta"])  # what is on "meta" takes no memory of the host, as on a GPU
def test_a_load_holds_nothing_beside_what_it_fills(device: str, tmp_path: Path) -> None:
    checkpoint, parameters, optimizer = made("cpu", 1.0)
    for one in parameters:
        optimizer.state[one] = {"step": torch.tensor(3.0), "exp_avg": 2 * one.detach(), "exp_avg_sq": 3 * one.detach()}
    files = RankFiles()
    checkpoint.save(files, 0, 3, {})
    files.write(tmp_path)
    other, loaded, states = made(device, 0.0)
    most = Most()
    assert other.load(tmp_path, 0) == (3, {})
    beside = most.stop() - (2 * ROWS * NUMBERS * 4 if device == "cpu" else 0)
    assert beside < 16e6, f"{beside / 1e6:.0f} MB"
    if device == "cpu":
        for path in tmp_path.iterdir():
            path.unlink()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "a file that is deleted stays on the disk"
        for one, then in zip(loaded, parameters, strict=True):
            assert torch.equal(one, then)
            assert states.state[one].keys() == optimizer.state[then].keys()
            assert all(torch.equal(states.state[one][key], value) for key, value in optimizer.state[then].items())
