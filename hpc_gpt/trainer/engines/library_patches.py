"""All parts of torch, DeepSpeed and transformers that the trainer replaces; one function replaces one part.

Its docstring says how the library does it, in which version, why that is replaced, and when the replacement may go.
Neither project promises to keep its private names, so a replacement is made by `set_existing`, and a run begins with a
note if the installed version is not among the tested ones.

An overridden method is in its subclass: `trainer.model.pipeline.StagedGpt` splits its layers itself, runs them without
a counter that would compile each call again, and sends tied weights without autograd (DeepSpeed 0.19.8). The tokenizers
start without torch, so `trainer.tokens.tokenizer` has the part of tiktoken that is replaced while it opens a tokenizer.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.errors import ConfigError

# The versions with which engines and model were tested: torch 2.9 and 2.15 on CPUs, 2.11 on GPUs, 2.13 on both. A patch
# release of such a torch counts as tested.
TESTED = {"torch": ("2.9", "2.11", "2.13", "2.15"), "deepspeed": ("0.19.8",)}
# The versions of constraints.txt.
PINNED = {"torch": "2.13.0", "deepspeed": "0.19.8"}


def note_untested(package: Literal["torch", "deepspeed"]) -> None:
    """Prints a line on stderr, on the first rank, if the package's version is not among the tested ones."""
    version, tested = _version(package), TESTED[package]
    if not f"{version.partition('+')[0]}.".startswith(tuple(f"{one}." for one in tested)) and dist.get_rank() == 0:
        # On stderr, because deepspeed_setup.quiet discards stdout while DeepSpeed sets up.
        print(
            f"note: {package} {version} is not among the tested versions, {', '.join(tested)}. If the run fails in it: "
            f"{_pip(package)}",
            file=sys.stderr,
            flush=True,
        )


def set_existing(package: Literal["torch", "deepspeed"], owner: Any, name: str, value: Any) -> Any:
    """Sets an attribute that exists, and returns its former value.

    Raises ConfigError if `owner`, a part of the package, lacks it: in this version it has another name, and a new
    attribute would have no effect.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise ConfigError(
            f"{package} {_version(package)} has no {where}.{name}, which the trainer sets",
            f"install the tested version: {_pip(package)}",
        )
    former = getattr(owner, name)
    setattr(owner, name, value)
    return former


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", "?"))


def _pip(package: str) -> str:
    return f"pip install '{package}=={PINNED[package]}'"


# --- While a process starts and an engine is built


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """A context for building an engine in a process that compiles nothing: torch.compile's modules are not imported.

    torch 2.13's optimizers import them although they do nothing outside a graph, and DeepSpeed 0.19.8 to decorate
    functions that nobody calls. They are more than half of the modules, and of the CPU time, of a DeepSpeed rank's
    start. For torch's optimizers the change lasts until the process ends. fsdp and transformers import the modules in
    any case. It may go when neither library imports them.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        function = getattr(torch.optim.Optimizer, name).__wrapped__
        # The attribute in which torch caches the function that torch._dynamo makes at the first call.
        vars(function)["__dynamo_disable"] = function
    kinds: tuple[Any, ...] = (torch.optim.Adam, torch.optim.SGD)
    for kind in kinds:
        set_existing("torch", kind, "step", torch.no_grad()(kind.step.__wrapped__))
    places: list[tuple[Any, str]] = [(torch, "compile"), (torch, "_disable_dynamo"), (torch.compiler, "disable")]
    decorators = [set_existing("torch", *place, _undecorated) for place in places]
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
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        set_existing("torch", dist.distributed_c10d, name, timedelta(seconds=seconds))


def use_gloo(deepspeed: Any) -> None:
    """Makes DeepSpeed use gloo on a CPU.

    DeepSpeed 0.19.8 compiles a shared-memory all-reduce, which leaks 69 MB of /dev/shm per rank. It may go when a key
    of DeepSpeed's configuration turns that off. Raises ConfigError if DeepSpeed's table of kernels has another name.
    """
    compatible = getattr(deepspeed.ops, "__compatible_ops__", {})
    set_existing("deepspeed", deepspeed.ops, "__compatible_ops__", compatible | {"deepspeed_shm_comm": False})


@contextlib.contextmanager
def split_as_built(deepspeed: Any, config: dict[str, Any], groups: Any) -> Iterator[None]:
    """A context in which ZeRO-3 splits a module over the ranks as soon as it becomes part of a larger module.

    DeepSpeed 0.19.8's context, `zero.Init()`, replaces torch's constructors and sends the values of each layer. Here a
    layer has no values yet, so `deepspeed.comm.broadcast` is replaced while a layer is split, and no rank ever holds
    more than one whole layer. It may go when DeepSpeed splits a module without sending it.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    init = deepspeed.zero.Init(
        config_dict_or_path=config, data_parallel_group=groups.get_data_parallel_group(), mpu=groups
    )

    def convert(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        for parameter in module.parameters() if module is not None else ():
            if not hasattr(parameter, "ds_id") and not parameter.is_meta:
                send = set_existing("deepspeed", deepspeed.comm, "broadcast", lambda *_: None)
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

    def move(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        buffers = dict(module.named_buffers(recurse=False))
        type(module)._apply(module, function, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in buffers.items():
            setattr(module, name, buffer.to(getattr(module, name).device))
        return module

    set_existing("torch", module, "_apply", move)


# --- Replacements that act in every step: the docstrings of `train_step` list them


def forget_logits(engine: Any) -> None:
    """Makes the last stage of DeepSpeed's pipeline `engine` free a micro-batch's logits once it has their loss.

    DeepSpeed 0.19.8 keeps them until it has the next ones, two or four bytes per logit in every pass. It no longer
    needs them: its backward pass begins at the loss. It may go when DeepSpeed frees them.
    """
    from deepspeed.runtime.pipe.schedule import ForwardPass

    forward = engine._INSTRUCTION_MAP[ForwardPass]

    def forward_pass(self: Any, buffer_id: int) -> None:
        forward(self, buffer_id)
        if self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = None

    set_existing("deepspeed", engine, "_INSTRUCTION_MAP", {**engine._INSTRUCTION_MAP, ForwardPass: forward_pass})


def forget_evaluation(engine: Any) -> None:
    """Frees the stage's outputs, which DeepSpeed's pipeline `engine` keeps after an evaluation."""
    outputs = engine.pipe_buffers["outputs"]
    outputs[:] = [None] * len(outputs)


def skip_gradient_average(engine: Any) -> None:
    """Turns off DeepSpeed's averaging over a single data-parallel rank.

    DeepSpeed 0.19.8 copies every gradient twice for that. Used with BF16_Optimizer; ZeRO's other optimizers need the
    call. It may go when DeepSpeed skips averaging over one rank.
    """
    name = "pipeline_enable_backward_allreduce"
    set_existing("deepspeed", engine, name if hasattr(engine, name) else "enable_backward_allreduce", False)


def drop_overflowed_gradients(engine: Any) -> None:
    """Drops the gradients of a skipped step of ZeRO-1 or -2.

    With offloading DeepSpeed 0.19.8 keeps a gradient that is not finite, so all later steps overflow. It may go when
    DeepSpeed drops such gradients.
    """
    set_existing("deepspeed", engine.optimizer, "averaged_gradients", {})
