"""The services around a run, `[notify]` and `[track]`; and `[plan]`, the planner's facts about the user's
own program. A missing table requests nothing.

Their keys affect neither weights nor speed, so none is in `config_hash`, and each may change when a run resumes.
"""

import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_gpt.core.settings.key_rules import key, without_defaults


def _modules_of(package: str) -> tuple[str, ...]:
    """The names of the modules in hpc_gpt/core/PACKAGE."""
    modules = pkgutil.iter_modules([str(Path(__file__).parents[1] / package)])
    return tuple(sorted(module.name.replace("_", "-") for module in modules if not module.ispkg))


# An engine is a module of hpc_gpt/core/engines, an optimizer one of hpc_gpt/core/optimizers, named like the file.
ENGINE_NAMES, OPTIMIZER_NAMES = _modules_of("engines"), _modules_of("optimizers")
if TYPE_CHECKING:
    EngineName = str
    OptimizerName = str
else:
    EngineName, OptimizerName = Literal[ENGINE_NAMES], Literal[OPTIMIZER_NAMES]
Event = Literal["first_step", "saved", "ended", "failed", "retried", "stopped", "slow"]
AttentionKernel = Literal["unfused", "triton", "fa2", "fa3", "cudnn", "cudnn-fp8", "te", "sdpa", "flex"]
GradSum = Literal["fp32", "bf16", "fp16"]
Loss = Literal["none", "half", "jit", "kernel"]
HeldAs = Literal["mixed", "fp32", "bf16", "bf16 moments"]
Dispatcher = Literal["alltoall", "allgather", "deepep", "hybridep"]
Routing = Literal["real", "forced balance"]
ProgramKind = Literal["gathers ahead", "two gradients", "fp32 sums"]
CudaGraph = Literal["attn", "moe_router", "moe_preprocess", "full"]


@dataclass(frozen=True)
class Notify:
    """`[notify]`: a command that is started for events of the run, with a line of JSON on its standard input."""

    command: str | tuple[str, ...] | None = key(None, resume="free", affects=())
    'A line for bash, or a list executed without a shell; for example "mail -s GPT me@example.org".'
    on: tuple[Event, ...] = key(("ended", "failed", "retried"), resume="free", affects=())
    "Events that it is started for: first_step, saved, ended, failed, retried, stopped, slow."
    timeout_s: float = key(20.0, resume="free", affects=(), above=0)
    "Seconds after which it is killed; for example 60."

    @property
    def is_asked(self) -> bool:
        return self.command is not None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command as a list of words; a line for bash becomes `bash -c LINE`."""
        if isinstance(self.command, str):
            return "bash", "-c", self.command
        return self.command or ()


@dataclass(frozen=True)
class Track:
    """`[track]`: curves of the run in other programs, which rank 0 of our trainer writes while it trains."""

    tensorboard: bool = key(False, resume="free", affects=())
    "Whether TensorBoard event files are written to tensorboard/ in the run folder."
    wandb: str | None = key(None, resume="free", affects=())
    'Weights & Biases project to send to; its own environment variables configure the rest; for example "gpt".'
    mlflow: str | None = key(None, resume="free", affects=())
    'MLflow experiment to send to, at MLFLOW_TRACKING_URI, else in mlruns/ in the run folder; for example "gpt".'

    @property
    def is_asked(self) -> bool:
        return self.tensorboard or self.wandb is not None or self.mlflow is not None


@dataclass(frozen=True)
class Plan:
    """`[plan]`: facts about a program of engine `command` that its layout does not show, for `plan`."""

    like: EngineName | None = key(None, resume="free", affects=())
    "Engine with the same memory and communication as the program; without it nothing is planned."
    kind: ProgramKind | None = key(None, resume="free", affects=())
    "Kind, if not the usual: gathers ahead is Megatron-Core's FSDP, two gradients nanotron, fp32 sums BF16_Optimizer."
    attention: AttentionKernel | None = key(None, resume="free", affects=())
    "Attention kernel: unfused stores the scores, te is the device's best, sdpa is PyTorch's before 2.11 (fa2)."
    grad_sum: GradSum | None = key(None, resume="free", affects=())
    "Format of gradients: of their sum over micro-batches, their storage and their reduction."
    dp_overlap: bool | None = key(None, resume="free", affects=())
    "Whether gradients are reduced, and sharded parameters gathered, while the passes run."
    tp_overlap: bool | None = key(None, resume="free", affects=())
    "Whether tensor-parallel communication overlaps, in pieces, with the matrix products that need it."
    fused_loss: Loss | None = key(None, resume="free", affects=())
    "The loss: operators on fp32 logits (none) or 16-bit ones (half), compiled (jit), or one kernel on 16-bit logits."
    states: HeldAs | None = key(None, resume="free", affects=())
    "Bytes per parameter: mixed = 16 bits and fp32 (2 + 12), fp32 (4 + 8), bf16 (2 + 4), bf16 moments (2 + 8)."
    dispatcher: Dispatcher | None = key(None, resume="free", affects=())
    "Exchange of tokens among the ranks of layout.ep; deepep and hybridep send a token once to each node."
    routing: Routing | None = key(None, resume="free", affects=())
    "Load of the experts: that of a trained router (real), or forced to be equal, as in benchmarks."
    ep_overlap: bool | None = key(None, resume="free", affects=())
    "Whether the exchange of tokens overlaps with the passes of another micro-batch."
    cuda_graphs: tuple[CudaGraph, ...] = key((), resume="free", affects=())
    'Parts of a layer that are launched as one CUDA graph; for example ["attn", "moe_router"].'
    chunks: int | None = key(None, resume="free", affects=(), least=1)
    "Interleaved chunks of each pipeline stage; without it some are tried."
    edges_as_layers: bool | None = key(None, resume="free", affects=())
    "Whether embedding and head each take a layer's place in the split over pipeline stages."
    offloaded_layers: int | None = key(None, resume="free", affects=(), least=1)
    "Layers whose activations are copied to the host and back, such as cpu_offloading_num_layers."
    whole_gradients: bool | None = key(None, resume="free", affects=())
    "Whether sharded gradients are reduced after the last micro-batch alone: until then each rank holds them whole."
    whole_logits: bool | None = key(None, resume="free", affects=())
    "Whether every tensor-parallel rank gathers all logits before the loss."
    dropless: bool | None = key(None, resume="free", affects=())
    "Whether no token of an expert is dropped; false drops those above the mean load."
    padded_experts: bool | None = key(None, resume="free", affects=())
    "Whether experts are multiplied in one batch, each padded to the rows of the largest."
    fp8_head: bool | None = key(None, resume="free", affects=())
    "Whether the head's products are in the format of train.matmul, too, such as fp8_output_proj."
    ep_outside_dp: bool | None = key(None, resume="free", affects=())
    "Whether layout.ep is an axis of its own, whose ranks read the same samples."

    @property
    def traits(self) -> dict[str, Any]:
        """{field of a Training: value} of the keys that are set."""
        others = ("like", "kind", "chunks")
        values = {name: value for name, value in without_defaults(self, vars(self)).items() if name not in others}
        if self.attention is not None:
            values["flash"] = self.attention != "unfused"
        return values


# {name of the table in an experiment: its default, which requests nothing}
SERVICES: dict[str, Any] = {"notify": Notify(), "track": Track(), "plan": Plan()}
