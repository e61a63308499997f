"""What a start takes of the host's memory beside the device's: `python -m bench.host_memory`.

A GPT of 151M parameters, 604 MB in fp32, is drawn, read from a folder and resumed by ddp. The weights are on the device
"meta", which takes no memory of the host, as a GPU's do not. Beside the way that the program takes is the older one:
the whole model on the host and then on the device, the checkpoint's files read instead of mapped. Printed is the most
anonymous memory (RssAnon) of one rank beyond what it had before.
"""

import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.folder import read_folder
from hpc_gpt.trainer.checkpoints import states
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.states import SavedIndex, SavedStates, put_states
from hpc_gpt.trainer.checkpoints.torch_states import TorchStates, whole_share
from hpc_gpt.trainer.model.folder_tensors import write_hf
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.initial_weights import FolderWeights
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from tests.distributed.host_memory import Most

SHAPE = ModelShape(1024, 10, 16, vocab=24576, seq=256)
DEVICE = torch.device("meta")
CASES = ("drawn", "given", "resumed")


def torch_states(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> TorchStates:
    shares = [whole_share(one, SHAPE) for one in parameters]
    return TorchStates(parameters, shares, optimizer, lambda share: True)


def make(folder: Path) -> None:
    """Writes the folder of weights and the checkpoint."""
    model = Gpt(SHAPE, 1)
    write_hf(SHAPE, model.named_parameters(), folder / "given")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    for one in parameters:
        optimizer.state[one] = {"step": torch.tensor(1.0), "exp_avg": one.detach(), "exp_avg_sq": one.detach() * 2}
    files = RankFiles()
    ours = torch_states(parameters, optimizer)
    about = {"settings": {"layout.tp": 1}, "optimizer": ours.numbers()}
    put_states(files, ours.held(), about, SavedIndex())
    (folder / "resumed").mkdir()
    files.write(folder / "resumed")


def measure(case: str, older: bool, folder: Path) -> int:
    """Bytes beside the device's."""
    given = FolderWeights(read_folder(folder / "given"), SHAPE) if case == "given" else None
    tp = TensorParallel(given=given, device=None if older else DEVICE)
    if case != "resumed":
        most = Most()
        Gpt(SHAPE, 1, tp).to(DEVICE)
        return most.stop()
    parameters = list(Gpt(SHAPE, 1, TensorParallel(device=DEVICE)).parameters())
    ours = torch_states(parameters, torch.optim.AdamW(parameters, foreach=False))
    read = lambda path: torch.from_numpy(np.fromfile(path, np.uint8))  # noqa: E731
    with patch.object(states, "map_file", read) if older else nullcontext():
        most = Most()
        ours.load(SavedStates(folder / "resumed"))
        return most.stop()


def main() -> None:
    if len(sys.argv) > 1:
        print(measure(sys.argv[1], sys.argv[2] == "older", Path(sys.argv[3])))
        return
    with tempfile.TemporaryDirectory() as name:
        make(Path(name))
        for case in CASES:
            found = []
            for way in ("older", "now"):
                command = [sys.executable, "-m", "bench.host_memory", case, way, name]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append(f"{int(done.stdout) / 1e6:,.0f} MB")
            print(f"{case}: {found[0]} before, {found[1]} now", flush=True)


if __name__ == "__main__":
    main()
