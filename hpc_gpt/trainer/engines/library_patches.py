"""All parts of torch, DeepSpeed and transformers that the trainer replaces; one function replaces one part.

Its docstring says how the library does it, in which version, why that is replaced, and when the replacement may go.
Private names are listed in `private_parts`: if one is missing, or the package is newer than the newest tested one, the
library's own way runs, unless the use has no plain path.

An overridden method is in its subclass: `trainer.model.pipeline.StagedGpt` splits its layers itself, runs them without
a counter that would compile each call again, and sends tied weights without autograd (DeepSpeed 0.19.8). The tokenizers
start without torch, so `trainer.tokens.tokenizer` has the part of tiktoken that is replaced while it opens a tokenizer.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines import private_parts
from hpc_gpt.trainer.engines.optimizer import (
    clip_divisor,
    counts,
    instruct,
    is_fused,
    norms_of,
    whole_norm,
)

# --- While a process starts and an engine is built


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """A context for building an engine in a process that compiles nothing: torch.compile's modules are not imported.

    torch 2.13's optimizers import them although they do nothing outside a graph, and DeepSpeed 0.19.8 to decorate
    functions that nobody calls. They are more than half of the modules, and of the CPU time, of a DeepSpeed rank's
    start. For torch's optimizers the change lasts until the process ends. fsdp and transformers import the modules in
    any case. It may go when neither library imports them.
    """
    if not private_parts.can_use(private_parts.WITHOUT_COMPILER):
        yield
        return
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
    if private_parts.can_use(private_parts.GROUP_TIMEOUT):
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
    if not private_parts.can_use(private_parts.BUILT_IN_PARTS):
        yield
        return
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


@contextlib.contextmanager
def pinning_nothing(deepspeed: Any) -> Iterator[None]:
    """Keeps DeepSpeed from pinning host memory while it builds; `deepspeed_zero.pin_what_stays` pins afterwards.

    torch pins a copy, in sizes of powers of two, and keeps freed memory for the next request (pytorch/pytorch issue
    95823). ZeRO-3 of DeepSpeed 0.19.8 pins a buffer for all gradients, which `sum_where_read` drops: at 13.0e9
    parameters 48 GiB, for which torch 2.11 takes 64 GiB and returns none. It may go when that buffer goes.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.pin_memory = lambda tensor, align_bytes=1: tensor
    try:
        yield
    finally:
        del accelerator.pin_memory  # restores the class's method


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


def use_checkpoint_engine(engine: Any, kind: type) -> None:
    """Gives DeepSpeed's `engine` a checkpoint engine of class `kind`, and omits DeepSpeed's recovery script.

    DeepSpeed 0.19.8 writes between two barriers, so a rank that finds the disk full leaves the others waiting; and the
    script unpickles the files that it reads. It may go when a checkpoint engine can be passed to
    `deepspeed.initialize`.
    """
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    engine.checkpoint_engine = type(kind.__name__, (kind, CheckpointEngine), {})()
    engine._copy_recovery_script = lambda save_path: None


# --- Replacements that act in every step: the docstrings of `train_step` list them


def forget_logits(engine: Any) -> None:
    """Makes the last stage of DeepSpeed's pipeline `engine` free a micro-batch's logits once it has their loss.

    DeepSpeed 0.19.8 keeps them until it has the next ones, two or four bytes per logit in every pass. It no longer
    needs them: its backward pass begins at the loss. It may go when DeepSpeed frees them.
    """
    if not private_parts.can_use(private_parts.LOGITS):
        return
    from deepspeed.runtime.pipe.schedule import ForwardPass

    forward = engine._INSTRUCTION_MAP[ForwardPass]

    def forward_pass(self: Any, buffer_id: int) -> None:
        forward(self, buffer_id)
        if self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = None

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ForwardPass: forward_pass}


def forget_evaluation(engine: Any) -> None:
    """Frees the stage's outputs, which DeepSpeed's pipeline `engine` keeps after an evaluation."""
    if private_parts.can_use(private_parts.LOGITS):
        outputs = engine.pipe_buffers["outputs"]
        outputs[:] = [None] * len(outputs)


def average_nothing(engine: Any) -> None:
    """Turns off DeepSpeed's averaging over a single data-parallel rank.

    DeepSpeed 0.19.8 copies every gradient twice for that. Used without ZeRO and with BF16_Optimizer; ZeRO's other
    optimizers need the call. It may go when DeepSpeed skips averaging over one rank.
    """
    if private_parts.can_use(private_parts.NO_REDUCTION):
        name = "pipeline_enable_backward_allreduce"
        setattr(engine, name if hasattr(engine, name) else "enable_backward_allreduce", False)


def drop_overflowed_gradients(engine: Any) -> None:
    """Drops the gradients of a skipped step of ZeRO-1 or -2.

    With offloading DeepSpeed 0.19.8 keeps a gradient that is not finite, so all later steps overflow. It may go when
    DeepSpeed drops such gradients.
    """
    engine.optimizer.averaged_gradients = {}


# DeepSpeed's functions that read the norm from the device, and their replacements, which do not.
_WITHOUT_HOST: dict[str, Callable[..., Any]] = {
    "is_invalid_grad_norm": lambda norm: False,
    "mask_nan_or_inf_with_val_inplace": lambda norm, device=None, val=-1.0: None,
}
_USES = {
    "BF16_Optimizer": private_parts.STEP_WITHOUT_HOST_BF16,
    "DeepSpeedZeroOptimizer": private_parts.STEP_WITHOUT_HOST_12,
    "DeepSpeedZeroOptimizer_Stage3": private_parts.STEP_WITHOUT_HOST_3,
}


def can_step_without_host(resolved: Resolved, wrapped: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether `StepWithoutHost` works for DeepSpeed's optimizer `wrapped`, which steps `optimizer`.

    The host must know the norm of each step if it holds the gradients (offloading), if it changes the loss scale
    (fp16), or if the optimizer cannot skip a step on the device (not fused). In these cases DeepSpeed's step runs.
    """
    if resolved.train.dtype == "fp16" or resolved.engine.offload != "none" or not is_fused(optimizer):
        return False
    use = _USES.get(type(wrapped).__name__)
    return use is not None and private_parts.can_use(use)


class StepWithoutHost:
    """Replaces the step of `wrapped`, DeepSpeed's ZeRO optimizer, so that the host does not wait for the norm.

    DeepSpeed 0.19.8 copies the norm to the host in every step, up to five times: to check whether it is finite, to mark
    it if it is not, and again to clip. No key of its configuration prevents that and keeps the norm, so two of its
    functions are replaced during a step. The norm stays on the device. The inner, fused optimizer divides by it while
    it reads the gradient, and skips the step if the norm is not finite. So the host runs ahead of the device from one
    logging step to the next. It may go when DeepSpeed leaves the norm on the device.

    Bytes read and written per element of the gradient, besides the optimizer's: 4, for the norm. DeepSpeed's step takes
    28: it computes the norm from copies in fp64 (4 + 8 + 8), and clips in a separate pass (4 + 4).

    `norm`, before clipping, and `skipped` are on the device.
    """

    def __init__(self, wrapped: Any, optimizer: torch.optim.Optimizer, clip: float, tp_rank: int) -> None:
        self.norm: Tensor | None = None
        self.skipped: Tensor | None = None
        self._wrapped = wrapped
        self._clip = clip
        self._tp_rank = tp_rank
        self._instructed = False
        self._step = wrapped.step
        self._modules = [sys.modules[type(wrapped).__module__], sys.modules["deepspeed.runtime.utils"]]
        wrapped.step = self._step_without_host
        use = _USES[type(wrapped).__name__]
        if use is private_parts.STEP_WITHOUT_HOST_BF16:
            self._gradients = wrapped.get_grads_for_norm
            wrapped.get_grads_for_norm = self._norms_of_gradients
        else:
            # In ZeRO-3 this is a pass over the gradients even if there is nothing to do.
            wrapped.unscale_and_clip_grads = lambda *_: None
            if use is private_parts.STEP_WITHOUT_HOST_12:
                wrapped.check_grad_overflow = False
                wrapped.scaled_global_norm = self._norm_of_partitions
            else:
                wrapped._get_norm_groups = lambda: [self._norm_of_partitions()]
        optimizer.register_step_pre_hook(self._before_step)

    def _norms_of_gradients(self, for_clipping: bool = False) -> Any:
        """The norms of the gradients that this rank counts, as one tensor: its norm equals the norm of all of them."""
        assert not for_clipping
        dense, of_experts = self._gradients()
        return [norms_of(dense)], of_experts

    def _norm_of_partitions(self, norm_type: int = 2) -> Tensor:
        """The norm of the whole model's gradient, computed from every rank's partition."""
        wrapped, counted = self._wrapped, []
        groups = wrapped.params_in_partition if hasattr(wrapped, "params_in_partition") else wrapped.fp16_groups
        for index, parameters in enumerate(groups):
            averaged = wrapped.averaged_gradients[index]
            gradients = [gradient for gradient in averaged if not getattr(gradient, "_zero_padding", False)]
            pairs = zip(gradients, parameters, strict=False)
            counted += [gradient for gradient, parameter in pairs if counts(parameter, self._tp_rank)]
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        return whole_norm(norms_of(counted), group, wrapped.device)

    def _step_without_host(self, closure: Any = None) -> None:
        # A checkpoint contains `clip_grad`, so it is restored after the step.
        clip, self._wrapped.clip_grad = self._wrapped.clip_grad, 0.0
        self._instructed = False
        try:
            with _replaced(self._modules):
                self._step(closure)
        finally:
            self._wrapped.clip_grad = clip

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Instructs the optimizer, once per step; a step calls this hook for each group of parameters."""
        if self._instructed:
            return
        self._instructed = True
        norm = self._wrapped._global_grad_norm.float()
        self.skipped = ~norm.isfinite()
        # NaN becomes infinity, as in ZeRO.
        self.norm = torch.where(self.skipped, math.inf, norm)
        instruct(optimizer, self.skipped, clip_divisor(self.norm, self._clip), norm.device)


@contextlib.contextmanager
def _replaced(modules: list[ModuleType]) -> Iterator[None]:
    """A context in which the functions of `_WITHOUT_HOST` replace the functions of these names in the modules."""
    originals = [
        (module, name, getattr(module, name)) for module in modules for name in _WITHOUT_HOST if hasattr(module, name)
    ]
    for module, name, _ in originals:
        setattr(module, name, _WITHOUT_HOST[name])
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def sum_where_read(wrapped: Any) -> None:
    """Makes ZeRO-3's optimizer `wrapped` use one fp32 gradient buffer instead of two.

    DeepSpeed 0.19.8 sums a rank's share of the gradients in one fp32 buffer. After the last micro-batch it makes
    another one of the same size for the update: a new one in every step, or with offloading one that stays next to the
    first on the host. Here the two are one. That saves 4 bytes for each of a rank's parameters, and the pass that
    copies them. With offloading the sum is on the host or the GPU, wherever its group of parameters is updated, and the
    first gradient of a step is sent there once. DeepSpeed sends it, fetches it for the norm and sends it a second time.

    Not for fp16, where gradients are summed in fp16. It may go when DeepSpeed has one buffer.
    """
    if not private_parts.can_use(private_parts.ZERO_3_SUMS):
        return
    if wrapped.gradient_accumulation_dtype != wrapped.master_weights_and_grads_dtype:
        return
    if wrapped.offload_optimizer:
        _sum_beside_states(wrapped)
    else:
        _read_sums(wrapped)


def _read_sums(wrapped: Any) -> None:
    """Makes the update of a parameter group read its part of the buffer of sums."""
    lengths = [flat.numel() for flat in wrapped.fp32_partitioned_groups_flat]
    sums = wrapped.grad_partitions_flat_buffer.split(lengths)

    def hand_over(group: int) -> None:
        wrapped.fp32_partitioned_groups_flat[group].grad = sums[group]
        wrapped.averaged_gradients[group] = None

    wrapped._prepare_fp32_grad_for_sub_group = hand_over


def _sum_beside_states(wrapped: Any) -> None:
    """Sums gradients in the buffer that the update of their parameter group reads, on the host or the device."""
    sums: dict[int, Tensor] = {}
    for parameters, flat in zip(wrapped.fp16_groups, wrapped.fp32_partitioned_groups_flat, strict=True):
        lengths = [parameter.partition_numel() for parameter in parameters]
        sums |= {one.ds_id: piece for one, piece in zip(parameters, flat.grad.split(lengths), strict=True)}
    # Python's mangled name of a private attribute.
    wrapped._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = sums
    wrapped.grad_partitions_flat_buffer = None

    def add(parameters: list[Any], gradients: list[Tensor]) -> None:
        """Adds this rank's share of each gradient, on the device, to its sum; after the last micro-batch stores its
        norm."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # A small parameter may end before this rank's share of it begins.
            if parameter.partition_numel() * wrapped._get_param_partition_rank(parameter) < parameter.ds_numel:
                add_one(parameter, gradient)
            if parameter.grad is not None and parameter.grad.is_cuda:
                # It was made on another stream than the one that has read it.
                parameter.grad.record_stream(torch.cuda.current_stream())
            parameter.grad = None

    def add_one(parameter: Any, gradient: Tensor) -> None:
        sum_ = sums[parameter.ds_id].narrow(0, 0, gradient.numel())
        if wrapped.micro_step_id == 0:
            sum_.copy_(gradient, non_blocking=True)
        elif sum_.device == gradient.device:
            gradient = sum_.add_(gradient)
        else:
            gradient = sum_.to(gradient.device, non_blocking=True).add_(gradient)
            sum_.copy_(gradient, non_blocking=True)
        if wrapped.is_gradient_accumulation_boundary():
            norm = wrapped._constant_buffered_norm2(gradient)
            wrapped.norm_for_param_grads[wrapped.get_param_id(parameter)] = norm

    wrapped.partition_grads = add
