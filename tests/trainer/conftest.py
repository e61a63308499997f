"""The text all of the trainer's tests train on, and the GPU of those that need one."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpc_gpt.trainer.tokens.build import build_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token file of this repository's own sources."""
    source = Path(__file__).resolve().parents[2] / "hpc_gpt" / "trainer" / "tokens"
    return build_tokens(source, tmp_path_factory.mktemp("tokens") / "own.tokens").path


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """The first GPU, and a process group of this process alone."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "100"
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


@pytest.fixture
def fresh() -> None:
    """No test meets what another left in its process: code compiled for other sizes, which would now be for any, and
    tensors in cycles."""
    torch._dynamo.reset()
    gc.collect()
