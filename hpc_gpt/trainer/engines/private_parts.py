"""The private names of torch and DeepSpeed that the trainer uses, each checked before it is used.

Neither project promises to keep them. So every use is listed here with its names. A run whose package lacks a name
ends at its start with the version to install, and a package newer than the newest tested one is a line on stderr.

Functions that use torch's names are in `torch_private`, those that use DeepSpeed's in `deepspeed_states`, and
replacements of library parts in `library_patches`.
"""

import inspect
import pkgutil
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from hpc_gpt.core.errors import ConfigError

# The versions of constraints.txt, which have the names below.
TESTED = {"torch": "2.13.0", "deepspeed": "0.19.8"}
# The newest versions with which the tests of model, engines and private parts have passed, too (torch 2.15.0 on a CPU).
# A patch release of that torch counts as tested.
NEWEST = {"torch": "2.15", "deepspeed": "0.19.8"}

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_PIPELINE_ENGINE = "deepspeed.runtime.pipe.engine.PipelineEngine"
_SCALER = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
_BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer.BF16_Optimizer"
_ZERO_12_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_ZERO_3_OPTIMIZER = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_INIT = "deepspeed.runtime.zero.partition_parameters.Init"


@dataclass(frozen=True, eq=False)
class Use:
    """A purpose, and the names of one package that it needs.

    `parts` has the names by their owner, a module or a class, separated by spaces. A name in a class is one of its
    methods, or an attribute that its functions set.
    """

    package: Literal["torch", "deepspeed"]
    purpose: str
    parts: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """Every name as a dotted path from a module."""
        return [f"{owner}.{name}" for owner, names in self.parts.items() for name in names.split()]


LAST_QUERIES = Use(
    "torch",
    "causal attention of a sequence's last queries by the flash kernel",
    {"torch": "_scaled_dot_product_flash_attention"},
)
APART = Use(
    "torch",
    "experts that DistributedDataParallel leaves to their own ranks",
    {"torch.nn.parallel.DistributedDataParallel": "_set_params_and_buffers_to_ignore_for_model"},
)
FOREACH = Use(
    "torch",
    "one kernel for many tensors",
    {"torch": "_foreach_norm _foreach_div_ _foreach_add_ _foreach_copy_ _foreach_zero_"},
)
FUSED = Use(
    "torch",
    "fused optimizers that clip or skip a step on the device",
    {"torch.optim.Optimizer": "found_inf grad_scale"},
)
COALESCED = Use(
    "torch", "one all-reduce for the gradients of a bucket", {"torch.distributed.ProcessGroup": "allreduce_coalesced"}
)
SCALED = Use("torch", "train.matmul in FP8", {"torch": "_scaled_mm"})
COMPILE_TIME = Use("torch", "measuring the time of compiling", {"torch._dynamo.utils": "calculate_time_spent"})
KEPT_RESIDUALS = Use(
    "torch",
    "keeping residuals in a compiled model",
    {
        "torch._inductor.config": "joint_custom_post_pass",
        "torch._inductor.custom_graph_pass": "CustomGraphPass",
        "torch._functorch.partitioners": "CheckpointPolicy",
    },
)
WITHOUT_COMPILER = Use(
    "torch",
    "a start without the modules of torch.compile",
    {"torch": "_disable_dynamo", "torch.optim.optimizer": "_use_grad_for_differentiable"},
)
GROUP_TIMEOUT = Use(
    "torch",
    "one time limit for all process groups",
    {"torch.distributed.distributed_c10d": "default_pg_timeout default_pg_nccl_timeout _get_default_timeout"},
)
FP32_BUFFERS = Use("torch", "keeping buffers in fp32 while DeepSpeed casts a model", {"torch.nn.Module": "_apply"})
BUILT_IN_PARTS = Use(
    "deepspeed",
    "splitting a model over the ranks while it is built",
    {_INIT: "_convert_to_zero_parameters", "deepspeed.comm": "broadcast"},
)
LOGITS = Use(
    "deepspeed",
    "freeing a micro-batch's logits",
    {_PIPELINE_ENGINE: "_INSTRUCTION_MAP pipe_buffers", "deepspeed.runtime.pipe.schedule": "ForwardPass"},
)
NO_REDUCTION = Use(
    "deepspeed",
    "no averaging over a single rank",
    {_ENGINE: "enable_backward_allreduce", _PIPELINE_ENGINE: "pipeline_enable_backward_allreduce"},
)
CPU_SETUP = Use("deepspeed", "DeepSpeed on a CPU", {"deepspeed.ops": "__compatible_ops__"})
PIPELINE = Use(
    "deepspeed",
    "engine deepspeed-3d",
    {
        "deepspeed.pipe.PipelineModule": "_partition_layers _set_bounds _synchronize_tied_weights _topo forward_funcs "
        "tied_modules parts num_stages stage_id global_rank"
    },
)
CHECKPOINTS = Use(
    "deepspeed",
    "saving and loading checkpoints",
    {
        _ENGINE: "basic_optimizer global_steps global_samples skipped_steps",
        _SCALER: "cur_scale cur_iter last_overflow_iter scale_window delayed_shift cur_hysteresis",
    },
)
# The names that checkpoints need, by class of DeepSpeed's ZeRO optimizer.
STATES = {
    "BF16_Optimizer": Use(
        "deepspeed",
        "checkpoints of ZeRO-1 in bf16",
        {_BF16_OPTIMIZER: "bf16_groups fp32_groups_flat_partition _hp_mapping update_lp_params"},
    ),
    "DeepSpeedZeroOptimizer": Use(
        "deepspeed",
        "checkpoints of ZeRO-1 and ZeRO-2, and steps that overflow while offloading",
        {
            _ZERO_12_OPTIMIZER: "bit16_groups single_partition_of_fp32_groups _hp_mapping averaged_gradients "
            "update_lp_params"
        },
    ),
    "DeepSpeedZeroOptimizer_Stage3": Use(
        "deepspeed",
        "checkpoints of ZeRO-3",
        {
            _ZERO_3_OPTIMIZER: "fp16_groups fp32_partitioned_groups_flat _reassign_or_swap_out_partitioned_parameters "
            "persistent_parameters",
            _INIT: "partition_numel ds_id ds_numel ds_shape ds_process_group",
        },
    ),
}


@cache
def check_version(package: Literal["torch", "deepspeed"]) -> None:
    """Prints a line on stderr, on rank 0 and once, if the package is newer than the newest tested version."""
    version, newest = _version(package), NEWEST[package]
    parts = newest.count(".") + 1
    if _numbers(version)[:parts] > _numbers(newest)[:parts] and (not dist.is_initialized() or dist.get_rank() == 0):
        # On stderr, because deepspeed_setup.quiet discards stdout while DeepSpeed sets up.
        print(f"note: {package} {version} is newer than {newest}, the newest tested", file=sys.stderr, flush=True)


def require(use: Use) -> None:
    """Raises ConfigError if a name of the use is missing."""
    if lacking := missing(use):
        raise ConfigError(
            f"{use.package} {_version(use.package)} lacks {', '.join(lacking)}, which {use.purpose} needs",
            f"install the tested version: pip install '{use.package}=={TESTED[use.package]}'",
        )


def check_torch() -> None:
    """Checks torch's version, and the names that every engine uses."""
    check_version("torch")
    for use in (FOREACH, FUSED, COALESCED):
        require(use)


def check_optimizer(optimizer: Any) -> None:
    """Raises ConfigError if DeepSpeed's ZeRO optimizer lacks a name that checkpoints need."""
    if use := STATES.get(type(optimizer).__name__):
        require(use)


def missing(use: Use) -> list[str]:
    """The names of the use that do not exist."""
    return [name for name in use.names if not _is_there(name)]


def _is_there(name: str) -> bool:
    if name in FUSED.names:
        return _fused_kernels_obey()
    path, _, last = name.rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    if isinstance(owner, type):
        return last in _names_in(owner)
    return hasattr(owner, last)


@cache
def _names_in(kind: type) -> frozenset[str]:
    """The names that a class and its bases define, and all names that their functions read or set."""
    names: set[str] = set()
    for base in kind.__mro__:
        names |= vars(base).keys()
        for value in vars(base).values():
            # A decorated function is in the closure of its wrapper.
            within = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
            for function in (inspect.unwrap(value), *within):
                if isinstance(function, FunctionType):
                    names |= {*function.__code__.co_names}
    return frozenset(names)


def _fused_kernels_obey() -> bool:
    """Whether torch's fused kernels obey the attributes that `optimizer.clip_and_skip_on_device` sets, tried on one
    element."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.full((1,), 8.0)
        optimizer: Any = kind([weight], lr=0.5, weight_decay=0.0, fused=True)
        optimizer.grad_scale, optimizer.found_inf = torch.full((), 8.0), torch.ones(())
        optimizer.step()
        if weight.item() != 1.0:
            return False
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        # A gradient of 8 divided by 8: SGD moves by lr, Adam's first moment is 1 - beta1.
        moved = optimizer.state[weight]["exp_avg"] if kind is torch.optim.AdamW else weight.detach() / 5
        if abs(moved.item() - 0.1) > 1e-6:
            return False
    return True


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", "?"))


def _numbers(version: str) -> tuple[int, ...]:
    """The three numbers of a release, without a suffix such as a0+git in 2.14.0a0+git."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else (0, 0, 0)
