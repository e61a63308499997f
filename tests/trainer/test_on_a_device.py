"""What is computed for a device is made on that device, as the device without memory shows on any machine."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_gpt.trainer.engines.attention import prepare_attention
from hpc_gpt.trainer.engines.protocol import TrainingEngine
from hpc_gpt.trainer.engines.torch_engine import whole_norm
from hpc_gpt.trainer.model.attention import last_mask
from hpc_gpt.trainer.model.documents import Boundaries, Documents
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.sight import Sight, masks_of
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.preflight import measurements
from tests.trainer.model.test_gpt import SMALL
from tests.trainer.model.test_techniques import EachTensor

META = torch.device("meta")
TOKENS = torch.zeros(2, SMALL.seq, dtype=torch.int64)


def step(**techniques: Any) -> Callable[[], Any]:
    """A step of a model that is there."""
    model = Gpt(SMALL, 1, techniques=Techniques(**techniques)).to(META)
    prepare_attention(model, SimpleNamespace(expands=False, last=None), META)
    tokens = TOKENS.to(META)
    return lambda: model(tokens, tokens).backward()


def evaluate() -> Any:
    """What an engine adds up."""
    engine: Any = SimpleNamespace(device=META, _loss=lambda *_: torch.ones((), device=META), _mean=lambda total: total,
                                  _inputs=lambda batch: batch, attention=lambda: torch.no_grad())  # fmt: skip
    return TrainingEngine.evaluate(engine, iter([(None, None)] * 2), 2)


BOUNDARIES = Boundaries.of(TOKENS, 1).to(META)
ROWS: dict[str, Callable[[], Any]] = {
    "a step": step(),
    "a step with a loss in pieces": step(loss_chunks=3),
    "a step with a loss in one pass": step(one_pass_loss=True, loss_chunks=3),
    "a step of tiles, recomputed": step(tiles=2, recompute="full"),
    "an evaluation": evaluate,
    "documents": lambda: Documents.of(BOUNDARIES, None, Sight()),
    "a mask of documents": lambda: masks_of(SMALL.seq, None, torch.float32, META, BOUNDARIES.starts),
    "masks of a window": lambda: masks_of(SMALL.seq, 3, torch.float32, META),
    "a mask of the last queries": lambda: last_mask(torch.empty(4, 8, device=META), torch.empty(8, 8, device=META)),
    "a norm": lambda: whole_norm(torch.ones(3, device=META), None, META),
}


@pytest.mark.parametrize("name", ROWS)
def test_it_is_made_there(name: str) -> None:
    made: set[str] = set()
    with EachTensor(lambda tensor: made.add(tensor.device.type)):
        ROWS[name]()
    assert made == {"meta"}


def test_a_copy_to_the_device_begins_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "seconds_each", lambda device, work: work() is None or 0.5)
    made: set[str] = set()
    with EachTensor(lambda tensor: made.add(tensor.device.type)):
        assert measurements.host_to_device_gb_s(META) == 0.01678  # 8 MiB in half a second
    assert made == {"cpu", "meta"}


@pytest.mark.parametrize(("cuda", "hip"), [("13.0", None), (None, "7.1.25424")])
def test_nodes_must_have_one_cuda_or_one_hip(monkeypatch, cuda, hip) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = measurements.versions()
    assert (found.get("cuda"), found.get("hip")) == (cuda, hip)
