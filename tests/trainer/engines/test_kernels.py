"""Compiled, the model computes the same; what cannot be compiled here is one line."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.trainer.engines.attention import prepare_attention
from hpc_gpt.trainer.engines.kernels import check_compilers, compile_model, compile_seconds
from hpc_gpt.trainer.model import attention
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import ActivationOffload, Techniques
from tests import marked
from tests.allocated import peak, profiled
from tests.trainer.model.test_gpt import SMALL, tokens_of
from tests.trainer.model.test_techniques import BATCH, assert_same, train

CPU = torch.device("cpu")


def compiled(mode: Any, techniques: Techniques, backend: str = "aot_eager") -> tuple[Tensor, dict[str, Tensor]]:
    model = Gpt(SMALL, 1, techniques=techniques)
    names = list(model.state_dict())
    compile_model(model, Engine(compile=mode, compile_backend=backend, one_pass_loss=techniques.one_pass_loss))
    assert list(model.state_dict()) == names
    loss, gradients, _ = train(model)
    return loss, gradients


# Each technique, and each mode with nothing else.
WITH = {
    "plain": Techniques(),
    "one pass": Techniques(one_pass_loss=True),
    "one pass in chunks": Techniques(one_pass_loss=True, loss_chunks=3),
    "selective": Techniques(recompute="selective"),
    "full": Techniques(recompute="full"),
    "offload": Techniques(activation_offload=True),
    "chunks": Techniques(loss_chunks=3),
    "together": Techniques(tiles=2, recompute="full", activation_offload=True, loss_chunks=3),
}
MODES = {name: ("block", "whole", "edges")[number % 3] for number, name in enumerate(WITH)}
COMPILED = [*MODES.items(), ("plain", "whole"), ("plain", "edges"), ("offload", "whole"), ("chunks", "block")]
FEW = [("plain", "block"), ("selective", "whole"), ("one pass in chunks", "edges")]


@pytest.mark.parametrize(("name", "mode"), marked(COMPILED, [case for case in COMPILED if case not in FEW]))
def test_compiled_is_the_same(name: str, mode: str) -> None:
    techniques = WITH[name]
    loss, gradients, _ = train(Gpt(SMALL, 1))
    again, found = compiled(mode, techniques)
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=0)
    assert_same(found, gradients, atol=1e-6)
    counted = mode != "edges" and not techniques.one_pass_loss
    if counted and (mode == "block" or not techniques.activation_offload):  # whole, it breaks where the offload begins
        # One piece of code for all blocks and one for the loss, or one for everything; nothing compiled twice. The
        # pieces of a chunked loss are compiled, so it ends the code: blocks, last norm, piece.
        in_chunks = mode == "whole" and techniques.loss_chunks > 1
        graphs = 3 if in_chunks else 2 if mode == "block" else 1
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        assert bool(torch._dynamo.utils.counters["graph_break"]) == in_chunks


TORCHTITAN = load_experiment("torchtitan-llama", row="fsdp-8-compile").engine
ROTATED = replace(preset("llama3.1-8b"), hidden=32, heads=4, kv_heads=2, ffn=64, layers=3, seq=16, vocab=61)


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    "engine",
    [
        Engine("ddp", compile="block"),
        Engine("ddp", compile="edges", recompute="selective"),
        TORCHTITAN,
    ],
    ids=lambda engine: f"{engine.name}-{engine.compile}-{engine.recompute}",
)
def test_rotated_on_another_device_all_blocks_are_one_graph(engine: Engine) -> None:
    attention._rotation.cache_clear()
    model = Gpt(ROTATED, 1, techniques=Techniques.of(engine, Train())).to("meta")
    prepare_attention(model, SimpleNamespace(expands=False, last=None), torch.device("meta"))
    compile_model(model, replace(engine, compile_backend="aot_eager"))
    tokens = torch.zeros(2, ROTATED.seq, dtype=torch.int64, device="meta")
    for _ in range(2):
        model(tokens, tokens).backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == (3 if engine.compile == "edges" else 2)
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("mode", "recompute"), [("block", "none"), pytest.param("whole", "full", marks=pytest.mark.long)]
)
def test_compiled_offload_still_takes_all_of_a_block(monkeypatch, mode, recompute):
    taken: list[int] = []
    pack = ActivationOffload._pack

    def spy(self: ActivationOffload, tensor: Tensor) -> Any:
        packed = pack(self, tensor)
        if not isinstance(packed[0], nn.Parameter):
            taken.append(tensor.numel())
        return packed

    monkeypatch.setattr(ActivationOffload, "_pack", spy)
    model = Gpt(SMALL, 1, techniques=Techniques(activation_offload=True, recompute=recompute))
    compile_model(model, Engine(compile=mode, compile_backend="aot_eager"))
    *_, on_device = train(model)
    *_, without_blocks = train(Gpt(replace(SMALL, layers=0), 1))
    # The compiled loss keeps other tensors than the plain one; none of them are a block's.
    assert on_device < 1.5 * without_blocks
    block_input = BATCH * SMALL.seq * SMALL.hidden
    if recompute == "full":
        assert sum(taken) == SMALL.layers * block_input
    else:
        assert sum(taken) > 8 * SMALL.layers * block_input


def test_a_second_step_compiles_nothing_anew() -> None:
    model = Gpt(SMALL, 1)
    compile_model(model, Engine(compile="block", compile_backend="aot_eager"))
    model(*tokens_of(SMALL)).backward()
    spent = compile_seconds()
    assert spent > 0
    model(*tokens_of(SMALL, seed=2)).backward()
    assert compile_seconds() == spent


def test_modules_keep_their_hooks() -> None:
    model = Gpt(SMALL, 1)
    seen: list[nn.Module] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: seen.append(module))
    compile_model(model, Engine(compile="block", compile_backend="aot_eager"))
    for _ in range(2):
        model(*tokens_of(SMALL))
    assert seen == [*model.blocks, *model.blocks]


class Theirs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.relu(self.linear(inputs))


def test_blocks_of_a_model_that_is_not_ours() -> None:
    theirs = nn.Sequential(Theirs(), nn.GELU(), Theirs())
    inputs = torch.randn(2, 4, requires_grad=True)
    expected = theirs(inputs)
    compile_model(theirs, Engine(compile="block", compile_backend="aot_eager"), blocks=[theirs[0], theirs[2]])
    torch.testing.assert_close(theirs(inputs), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_nothing_is_compiled_unless_asked() -> None:
    compile_model(model := Gpt(SMALL, 1), Engine())
    model(*tokens_of(SMALL))
    assert not torch._dynamo.utils.counters["stats"]


def test_no_time_where_nothing_was_compiled() -> None:
    program = "from hpc_gpt.trainer.engines.kernels import compile_seconds; print(compile_seconds())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


@pytest.mark.parametrize(
    ("version", "sequence_parallel", "mode", "cp"),
    [("2.13.0+cpu", True, "block", 2), ("2.14.0a0+git1234", True, "whole", 1), ("3.0.0", True, "block", 1),
     ("2.11.0", False, "block", 1), ("2.11.0", True, "none", 2)],
)  # fmt: skip
def test_what_an_old_torch_computes_wrongly_others_compile(monkeypatch, version, sequence_parallel, mode, cp):
    monkeypatch.setattr(torch, "__version__", version)
    check_compilers(Engine(compile=mode, compile_backend="aot_eager", sequence_parallel=sequence_parallel), CPU, cp)


def compiler() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler here, which Inductor needs on a CPU")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_compiled_loss_in_chunks_holds_the_logits_of_one() -> None:
    """Counted in both passes, in which a gradient may overwrite its logits. Compiled as a whole the loss took 9 bytes
    each of all logits here, and 8 in one chunk: Inductor chose what to compute again, and when."""
    compiler()
    shape, chunks = ModelShape(hidden=8, layers=1, heads=2, vocab=4096, seq=128), 4
    model = Gpt(shape, 1, techniques=Techniques(loss_chunks=chunks))
    compile_model(model, Engine(compile="block", loss_chunks=chunks))
    given = tokens_of(shape)
    logits = 4 * given[1].numel() * shape.padded_vocab // chunks
    model(*given).backward()
    model.zero_grad()
    most = peak(profiled(lambda: model(*given).backward()))
    assert logits < most < 1.5 * logits


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("offload", [False, True])
def test_inductor_is_near(offload: bool) -> None:
    compiler()
    loss, gradients, _ = train(Gpt(SMALL, 1))
    # Its backward pass checks the strides of what it gets back.
    again, found = compiled("block", Techniques(activation_offload=offload), backend="inductor")
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=0)
    assert_same(found, gradients, atol=1e-6)
