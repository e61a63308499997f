"""Initial weights drawn ahead on threads: every bit as one thread draws it, each weight once, and side by side."""

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model import initial_weights
from hpc_gpt.trainer.model.gpt import Block, Gpt
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, full_name
from tests.waiting import LIMIT_S

SHAPE = ModelShape(hidden=48, layers=5, heads=4, vocab=61, seq=16)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three threads, of which weights as small as these are worth one."""
    monkeypatch.setattr(initial_weights, "_WORTH_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def drawn(name: str, shape: tuple[int, ...], layers: int) -> Tensor:
    """What one thread has always drawn for seed 1."""
    seed = int.from_bytes(hashlib.sha256(f"1:{name}".encode()).digest()[:8], "little") >> 1
    narrower = math.sqrt(2 * layers) if "projection" in name or "down" in name else 1.0
    return torch.empty(shape).normal_(0.0, 0.02 / narrower, generator=torch.Generator().manual_seed(seed))


def test_every_bit_is_as_one_thread_draws_it() -> None:
    for parameter in Gpt(SHAPE, 1).parameters():
        if parameter.ndim == 2:
            assert torch.equal(parameter, drawn(full_name(parameter), tuple(parameter.shape), SHAPE.layers))


class Draws:
    """Notes what is drawn, and makes the caller's first draw wait until another thread has begun one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: Counter[str] = Counter()
        self.threads: set[str] = set()
        self.others = threading.Event()
        draw = InitialWeights._draw

        def noted(initial: InitialWeights, name: str, wanted: initial_weights._Draw) -> Tensor:
            self.names[name] += 1
            self.threads.add(threading.current_thread().name)
            if threading.current_thread() is not threading.main_thread():
                self.others.set()
            elif name.startswith("blocks."):
                assert self.others.wait(LIMIT_S), "no other thread draws meanwhile"
            return draw(initial, name, wanted)

        monkeypatch.setattr(InitialWeights, "_draw", noted)


def test_threads_draw_what_comes_next_and_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = Draws(monkeypatch)
    model = Gpt(SHAPE, 1)
    assert draws.names == Counter(full_name(one) for one in model.parameters() if one.ndim == 2)
    assert 2 <= len(draws.threads) <= 3


def test_a_thread_that_would_wait_draws_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the caller waits for each weight that another thread has just begun, and only one works at a time."""
    torch.set_num_threads(2)
    begun, helped, asked = threading.Event(), threading.Event(), "blocks.0.x.weight"
    draw = InitialWeights._draw

    def noted(initial: InitialWeights, name: str, wanted: initial_weights._Draw) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert helped.wait(LIMIT_S), "the caller waits and draws nothing"
        elif name != asked:
            helped.set()
        return draw(initial, name, wanted)

    monkeypatch.setattr(InitialWeights, "_draw", noted)
    initial = InitialWeights(1, layers=100)
    initial.normal(asked, (8, 8))
    assert begun.wait(LIMIT_S)
    asked = "blocks.1.x.weight"
    found = initial.normal(asked, (8, 8))
    assert helped.is_set()
    assert torch.equal(found, drawn(asked, (8, 8), 100))
    assert torch.equal(initial.normal("blocks.2.x.weight", (8, 8)), drawn("blocks.2.x.weight", (8, 8), 100))


def test_a_stage_draws_its_own_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = Draws(monkeypatch)
    initial = InitialWeights(1, SHAPE.layers)
    initial.end = 4
    for number in (2, 3):
        Block(number, SHAPE, TensorParallel(), initial, Techniques())
    assert {name.split(".")[1] for name in draws.names} == {"2", "3"}
    assert set(draws.names.values()) == {1}


def test_what_is_drawn_ahead_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four weights a thread, and no more numbers than there is room for."""
    initial = InitialWeights(1, layers=100)
    initial.normal("blocks.0.x.weight", (8, 8))
    assert len(initial._ahead) == 8
    monkeypatch.setattr(initial_weights, "_NUMBERS_AHEAD", 2 * 64)
    initial = InitialWeights(1, layers=100)
    initial.normal("blocks.0.x.weight", (8, 8))
    assert list(initial._ahead) == ["blocks.1.x.weight", "blocks.2.x.weight"]


def test_one_thread_draws_nothing_ahead() -> None:
    torch.set_num_threads(1)
    initial = InitialWeights(1, layers=100)
    initial.normal("blocks.0.x.weight", (8, 8))
    assert not initial._ahead


def test_layers_of_another_kind_leave_nothing_drawn_ahead() -> None:
    shape = replace(SHAPE, layers=6, dense_layers=2, experts=4, experts_per_token=2, expert_ffn=64, bias="none")
    initial = InitialWeights(1, shape.layers)
    for number in range(shape.layers):
        for parameter in Block(number, shape, TensorParallel(), initial, Techniques()).parameters():
            name, size = full_name(parameter), tuple(parameter.shape)
            if parameter.ndim == 2:
                assert torch.equal(parameter, drawn(name, size, shape.layers)), name
            elif parameter.ndim == 3:
                experts = [drawn(f"{name}.{expert}", size[1:], shape.layers) for expert in range(4)]
                assert torch.equal(parameter, torch.stack(experts)), name
    assert not initial._ahead
