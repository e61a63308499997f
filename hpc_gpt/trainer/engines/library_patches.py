"""All parts of torch, DeepSpeed and transformers that the trainer replaces; one function replaces one part.

Its docstring says how the library does it, in which version, why that is replaced, and when the replacement may go.
Private names are listed in `private_parts`: if one is missing, the run ends at its start.

An overridden method is in its subclass: `trainer.model.pipeline.StagedGpt` splits its layers itself, runs them without
a counter that would compile each call again, and sends tied weights without autograd (DeepSpeed 0.19.8). The tokenizers
start without torch, so `trainer.tokens.tokenizer` has the part of tiktoken that is replaced while it opens a tokenizer.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.trainer.engines import private_parts

# --- While a process starts and an engine is built


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """A context for building an engine in a process that compiles nothing: torch.compile's modules are not imported.

    torch 2.13's optimizers import them although they do nothing outside a graph, and DeepSpeed 0.19.8 to decorate
    functions that nobody calls. They are more than half of the modules, and of the CPU time, of a DeepSpeed rank's
    start. For torch's optimizers the change lasts until the process ends. fsdp and transformers import the modules in
    any case. It may go when neither library imports them.
    """
    private_parts.require(private_parts.WITHOUT_COMPILER)
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        function = getattr(torch.optim.Optimizer, name).__wrapped__
        # The attribute in which torch caches the function that torch._dynamo makes at the first call.
        vars(function)["__dynamo_disable"] = function
    kinds: tuple[Any, ...] = (torch.optim.Adam, torch.optim.SGD)
    for kind in kinds:
        kind.step = torch.no_grad()(kind.step.__wrapped__)
    places: list[tuple[Any, str]] = [(torch, "compile"), (torch, "_disable_dynamo"), (torch.compiler, "disable")]
    decorators = [getattr(*place) for place in places]
    for place in places:
        setattr(*place, _undecorated)
    try:
        yield
    finally:
        for place, decorator in zip(places, decorators, strict=True):
            setattr(*place, decorator)


def _undecorated(function: Any = None, *how: Any, **options: Any) -> Any:
    return _undecorated if function is None else function


def set_group_timeout(seconds: float) -> None:
    """Sets the time limit of process groups that are made later without one.

    DeepSpeed 0.19.8 and torch 2.13's device meshes pass no limit, and a new group does not inherit the first group's
    limit but gets torch's default, 10 minutes with NCCL. It may go when torch has a public default, or both libraries
    pass a limit.
    """
    private_parts.require(private_parts.GROUP_TIMEOUT)
    module: Any = dist.distributed_c10d
    module.default_pg_timeout = module.default_pg_nccl_timeout = timedelta(seconds=seconds)


def use_gloo(deepspeed: Any) -> None:
    """Makes DeepSpeed use gloo on a CPU.

    DeepSpeed 0.19.8 compiles a shared-memory all-reduce, which leaks 69 MB of /dev/shm per rank. It may go when a key
    of DeepSpeed's configuration turns that off. Raises ConfigError if DeepSpeed's table of kernels has another name.
    """
    private_parts.require(private_parts.CPU_SETUP)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextlib.contextmanager
def split_as_built(deepspeed: Any, config: dict[str, Any], groups: Any) -> Iterator[None]:
    """A context in which ZeRO-3 splits a module over the ranks as soon as it becomes part of a larger module.

    DeepSpeed 0.19.8's context, `zero.Init()`, replaces torch's constructors and sends the values of each layer. Here a
    layer has no values yet, so `deepspeed.comm.broadcast` is replaced while a layer is split, and no rank ever holds
    more than one whole layer. It may go when DeepSpeed splits a module without sending it.
    """
    private_parts.require(private_parts.BUILT_IN_PARTS)
    from torch.nn.modules.module import register_module_module_registration_hook

    init = deepspeed.zero.Init(
        config_dict_or_path=config, data_parallel_group=groups.get_data_parallel_group(), mpu=groups
    )

    def convert(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        for parameter in module.parameters() if module is not None else ():
            if not hasattr(parameter, "ds_id") and not parameter.is_meta:
                send, deepspeed.comm.broadcast = deepspeed.comm.broadcast, lambda *_: None
                try:
                    init._convert_to_zero_parameters([parameter])
                finally:
                    deepspeed.comm.broadcast = send

    hook = register_module_module_registration_hook(convert)
    try:
        yield
    finally:
        hook.remove()


def keep_buffers_in_fp32(module: nn.Module) -> None:
    """Makes a module, such as transformers' rotation or router, move its buffers without casting them.

    DeepSpeed 0.19.8 casts a model's buffers with its weights. In bf16 a frequency of the rotation is off by up to
    0.4 %: 20 radians at position 5000. It may go when DeepSpeed casts parameters alone.
    """
    private_parts.require(private_parts.FP32_BUFFERS)

    def move(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        buffers = dict(module.named_buffers(recurse=False))
        type(module)._apply(module, function, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in buffers.items():
            setattr(module, name, buffer.to(getattr(module, name).device))
        return module

    module._apply = move  # type: ignore[method-assign]


# --- Replacements that act in every step: the docstrings of `train_step` list them


def forget_logits(engine: Any) -> None:
    """Makes the last stage of DeepSpeed's pipeline `engine` free a micro-batch's logits once it has their loss.

    DeepSpeed 0.19.8 keeps them until it has the next ones, two or four bytes per logit in every pass. It no longer
    needs them: its backward pass begins at the loss. It may go when DeepSpeed frees them.
    """
    private_parts.require(private_parts.LOGITS)
    from deepspeed.runtime.pipe.schedule import ForwardPass

    forward = engine._INSTRUCTION_MAP[ForwardPass]

    def forward_pass(self: Any, buffer_id: int) -> None:
        forward(self, buffer_id)
        if self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = None

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ForwardPass: forward_pass}


def forget_evaluation(engine: Any) -> None:
    """Frees the stage's outputs, which DeepSpeed's pipeline `engine` keeps after an evaluation."""
    outputs = engine.pipe_buffers["outputs"]
    outputs[:] = [None] * len(outputs)


def skip_gradient_average(engine: Any) -> None:
    """Turns off DeepSpeed's averaging over a single data-parallel rank.

    DeepSpeed 0.19.8 copies every gradient twice for that. Used without ZeRO and with BF16_Optimizer; ZeRO's other
    optimizers need the call. It may go when DeepSpeed skips averaging over one rank.
    """
    private_parts.require(private_parts.NO_REDUCTION)
    name = "pipeline_enable_backward_allreduce"
    setattr(engine, name if hasattr(engine, name) else "enable_backward_allreduce", False)


def drop_overflowed_gradients(engine: Any) -> None:
    """Drops the gradients of a skipped step of ZeRO-1 or -2.

    With offloading DeepSpeed 0.19.8 keeps a gradient that is not finite, so all later steps overflow. It may go when
    DeepSpeed drops such gradients.
    """
    engine.optimizer.averaged_gradients = {}
