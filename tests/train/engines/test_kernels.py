"""Which attention kernel is taken; compiled, the model computes the same; what cannot run here is one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.errors import ConfigError
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.techniques import ActivationOffload, Techniques
from hpc_gpt.settings.experiment import Engine
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.engines.kernels import (
    AttentionRead,
    attention_chosen,
    attention_kernels,
    compile_model,
    compile_seconds,
)
from tests.model.test_gpt import SMALL, tokens_of
from tests.model.test_techniques import BATCH, assert_same, train
from tests.train.launch import settings

CPU = torch.device("cpu")


def asking(attention: str) -> Resolved:
    resolved = settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 1})
    return replace(resolved, engine=replace(resolved.engine, attention=attention))


def kernel_that_ran(context: Any) -> str:
    """The kernel of a call's autograd node."""
    query, key, value = torch.randn(2, 32, 3, 4, 8, requires_grad=True).permute(2, 0, 3, 1, 4)
    with context():
        node = F.scaled_dot_product_attention(query, key, value, is_causal=True).grad_fn
    names = []
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return "flash" if any("FlashAttention" in name for name in names) else "math"


@pytest.mark.parametrize(("asked", "used"), [("auto", "flash"), ("flash", "flash"), ("math", "math")])
def test_the_kernel_asked_for_runs_and_is_the_one_named(asked: str, used: str) -> None:
    resolved = asking(asked)
    assert attention_chosen(resolved, CPU) == used
    assert kernel_that_ran(attention_kernels(resolved, CPU)) == used


@pytest.mark.parametrize("asked", ["cudnn", "efficient"])
def test_a_kernel_that_a_cpu_lacks_is_refused_with_those_it_has(asked: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.attention is {asked}, but that kernel cannot run here") as refused:
        attention_kernels(asking(asked), CPU)
    assert refused.value.hint == 'use engine.attention = "auto", or flash or math'
    assert "\n" not in str(refused.value)


def test_the_choice_ends_with_the_context() -> None:
    with attention_kernels(asking("math"), CPU)():
        pass
    assert attention_chosen(asking("auto"), CPU) == "flash"


def kernel_read(asked: str, mode: str = "none") -> list[str | None]:
    """What is read before a model's first and after its first, second and third training forward pass."""
    model, (tokens, targets) = Gpt(SMALL, 1), tokens_of(SMALL)
    compile_model(model, Engine(compile=mode, compile_backend="aot_eager"))  # type: ignore[arg-type]
    read = AttentionRead(model)
    with torch.no_grad():
        model(tokens, targets)
    found = [read.kernel]
    context = attention_kernels(asking(asked), CPU)
    for _ in range(3):
        with context():
            model(tokens, targets)
        found.append(read.kernel)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    return found


@pytest.mark.parametrize("mode", ["none", "block", "whole"])
@pytest.mark.parametrize("asked", ["flash", "math"])
def test_the_kernel_of_the_second_pass_is_read(asked: str, mode: str) -> None:
    assert kernel_read(asked, mode) == [None, None, asked, asked]


def test_reading_it_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    kernel_read("flash")
    assert capfd.readouterr() == ("", "")


def test_a_graph_compiled_for_another_kernel_is_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler for Inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tokens, targets = tokens_of(SMALL)
    hits = []
    for asked in ("math", "flash", "math"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Gpt(SMALL, 1)
        compile_model(model, Engine(compile="block", compile_backend="inductor"))
        read = AttentionRead(model)
        context = attention_kernels(asking(asked), CPU)
        for _ in range(2):
            # A graph is cached once its backward is compiled as well.
            with context():
                model(tokens, targets).sum().backward()
        assert read.kernel == asked
        hits.append(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] > 0)
    assert hits == [False, False, True]  # the third model found the first one's graphs


def test_the_users_own_cache_key_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine")
    tags = []
    for asked in ("math", "flash", "math"):
        attention_kernels(asking(asked), CPU)
        tags.append(torch.compiler.config.cache_key_tag)
    assert tags == [f"mine hpc-gpt attention={kernel}" for kernel in ("math", "flash", "math")]


def compiled(
    mode: str, techniques: Techniques | None = None, backend: str = "aot_eager"
) -> tuple[Tensor, dict[str, Tensor]]:
    model = Gpt(SMALL, 1, techniques=techniques)
    names = list(model.state_dict())
    compile_model(model, Engine(compile=mode, compile_backend=backend))  # type: ignore[arg-type]
    assert list(model.state_dict()) == names
    loss, gradients, _ = train(model)
    return loss, gradients


@pytest.mark.parametrize("mode", ["block", "whole"])
@pytest.mark.parametrize(
    "techniques",
    [
        Techniques(),
        Techniques(recompute="selective"),
        Techniques(recompute="full"),
        Techniques(activation_offload=True),
        Techniques(loss_chunks=3),
        Techniques(tiles=2, recompute="full", activation_offload=True, loss_chunks=3),
    ],
    ids=["plain", "selective", "full", "offload", "chunks", "together"],
)
def test_compiled_is_the_same(mode: str, techniques: Techniques) -> None:
    loss, gradients, _ = train(Gpt(SMALL, 1))
    again, found = compiled(mode, techniques)
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=0)
    assert_same(found, gradients, atol=1e-6)
    if mode == "block" or not techniques.activation_offload:  # whole, the code breaks where the offload begins
        # One piece of code for all blocks and one for the loss, or one for everything; nothing compiled twice.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if mode == "block" else 1)
        assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("mode", ["block", "whole"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_offload_still_takes_all_of_a_block(
    monkeypatch: pytest.MonkeyPatch, mode: str, recompute: str
) -> None:
    taken: list[int] = []
    pack = ActivationOffload._pack

    def spy(self: ActivationOffload, tensor: Tensor) -> Any:
        packed = pack(self, tensor)
        if not isinstance(packed[0], nn.Parameter):
            taken.append(tensor.numel())
        return packed

    monkeypatch.setattr(ActivationOffload, "_pack", spy)
    model = Gpt(SMALL, 1, techniques=Techniques(activation_offload=True, recompute=recompute))  # type: ignore[arg-type]
    compile_model(model, Engine(compile=mode, compile_backend="aot_eager"))  # type: ignore[arg-type]
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
    assert spent is not None
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
    program = "from hpc_gpt.train.engines.kernels import compile_seconds; print(compile_seconds())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "None\n"


@pytest.mark.parametrize("mode", ["block", "whole"])
def test_inductor_without_a_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        ConfigError, match=r"needs a C\+\+ compiler for a CPU, but there is no g\+\+ on PATH"
    ) as refused:
        compile_model(Gpt(SMALL, 1), Engine(compile=mode))  # type: ignore[arg-type]
    assert "aot_eager" in refused.value.hint
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("version", "sequence_parallel", "mode", "refused"),
    [
        ("2.11.0+cu128", True, "block", True),
        ("2.12.1", True, "whole", True),
        ("2.13.0+cpu", True, "block", False),
        ("2.14.0a0+git1234", True, "whole", False),
        ("3.0.0", True, "block", False),
        ("2.11.0", False, "block", False),
        ("2.11.0", True, "none", False),
    ],
)
def test_sequence_parallelism_is_not_compiled_by_a_torch_that_does_it_wrong(
    monkeypatch: pytest.MonkeyPatch, version: str, sequence_parallel: bool, mode: str, refused: bool
) -> None:
    engine = Engine(compile=mode, compile_backend="aot_eager", sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "__version__", version)
    if not refused:
        compile_model(Gpt(SMALL, 1), engine)
        return
    with pytest.raises(ConfigError, match=rf"compile = {mode} gives wrong gradients on torch {version[:6]}") as refusal:
        compile_model(Gpt(SMALL, 1), engine)
    assert "2.13" in refusal.value.hint


@pytest.mark.parametrize("offload", [pytest.param(False, marks=pytest.mark.long), True])
def test_inductor_is_near(offload: bool) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler here, which Inductor needs on a CPU")
    loss, gradients, _ = train(Gpt(SMALL, 1))
    # Its backward pass checks the strides of what it gets back.
    again, found = compiled("block", Techniques(activation_offload=offload), backend="inductor")
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=0)
    assert_same(found, gradients, atol=1e-6)
