"""The tables of an experiment: what to train, and how. Each key has a default and rules.

A key that is None is open: the cluster profile, a rule of `resolve`, or the plan decides its value.
`experiment_file` reads these tables from TOML. The string under a key is its meaning (`hpc_gpt.core.keys`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.recomputation import Recompute, recomputation
from hpc_gpt.core.settings.data_source import MixedSource
from hpc_gpt.core.settings.key_rules import key
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.services import EngineName, Notify, OptimizerName, Plan, Track

Source = Literal["stdlib", "tokens", "random", "megatron", "stream", "mix"]
Dtype = Literal["fp32", "bf16", "fp16"]
Decay = Literal["cosine", "linear", "constant", "wsd"]
Compile = Literal["none", "block", "edges", "whole"]
CpExchange = Literal["heads", "keys", "ring"]
# Format of the operands of a layer's matrix products: 16 bits by `dtype` (none), or 8 or 4 bits by their scaling.
Matmul = Literal["none", "fp8-tensor", "fp8-row", "mxfp8", "nvfp4"]
Balance = Literal["none", "loss", "bias"]
Partition = Literal["layers", "parameters"] | tuple[int, ...]
# Learning rate for trained weights, as in the recipes of full fine-tuning (Alpaca's, torchtune's for Llama); the
# default of train.lr is for random weights.
LR_OF_TRAINED = 2e-5


@dataclass(frozen=True)
class Data:
    """`[data]`: the source of the tokens. The last `eval_fraction` of them is reserved for evaluation."""

    source: Source = key("stdlib", resume="never", affects=("speed",))
    "Python's own sources, a token file, random numbers, Megatron's .bin and .idx, a stream of text, or a mixture."
    path: str | None = key(None, resume="never", affects=("speed",))
    'File or folder; searched beside the experiment, in the current folder, then in the data folder; or "stdlib".'
    eval_fraction: float = key(0.05, resume="never", affects=("speed",), below=1, hint="use 0.05")
    "Share of the tokens, or of the files of a stream, reserved for evaluation, from 0 to 1."
    tokenizer: str = key("byte", resume="never", affects=("speed",))
    '"byte", "char", a table FILE.vocab.json, a tokenizer.json, or "tiktoken:NAME"; a token file has its own.'
    begin_token: bool = key(False, resume="never", affects=("speed",))
    "Each document of a stream begins with the tokenizer's begin-of-text token."
    mask_documents: bool = key(False, resume="never", affects=("speed",))
    "Attention stays within a document, up to its end token; positions restart after that token."
    end_token: int | None = key(None, resume="never", affects=("speed",))
    "Token that ends a document, for mask_documents; by default the end token of the tokenizer."
    workers: int = key(0, resume="free", affects=("speed",), least=0, hint="0 reads in the rank itself")
    "Processes per rank that tokenise a stream; with 0 the rank does it itself; for example 4."
    on_bad_shard: Literal["stop", "skip"] = key("stop", resume="free", affects=("speed",))
    "A damaged file of a stream stops the run (stop), or what remains of the file is skipped and counted (skip)."
    mix: dict[str, MixedSource] | None = key(None, resume="never", affects=("schedule",))
    "Sources of a mixture, one table per name; replaces path."
    phases: tuple[float, ...] = key((), resume="never", affects=("schedule",), thousand=1000)
    'Token counts after which the next phase of a mixture begins, with other weights; for example [30e9], or ["30B"].'
    max_epochs: float = key(4.0, resume="free", affects=(), least=0, hint="0 is no limit")
    "Most epochs of the data; beyond it a mixture's source is refused, other data get a note; 0: no limit."


@dataclass(frozen=True)
class Engine:
    """`[engine]`: the engine that trains, and its switches; `core.engines` has the switches of each engine."""

    name: EngineName = key("deepspeed-3d", resume="free", affects=("speed",))
    "The training code; hpc-gpt help engines lists what each engine can do."
    zero_stage: int | None = key(None, resume="free", affects=("speed",))
    "DeepSpeed shards over dp: 1 the optimizer states, 2 also the gradients, 3 also the weights; 0 runs as 1."
    recompute: Recompute = key("none", resume="free", affects=("speed",), check=recomputation)
    "Activations recomputed: none, attention's core (selective), all (full), 1/4 of the layers, or layernorm,moe_act."
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = key("auto", resume="free", affects=("speed",))
    "Attention kernel; auto takes the fastest one that the device supports."
    compile: Compile = key("none", resume="free", affects=("speed",))
    "Parts that torch.compile compiles: each block and the loss, also the embedding and head (edges), or all as one."
    compile_backend: Literal["inductor", "aot_eager"] = key("inductor", resume="free", affects=("speed",))
    "Compiler backend: inductor generates kernels, aot_eager only captures the graph."
    keep_residuals: bool = key(False, resume="free", affects=("speed",))
    "Whether a compiled block keeps the residual after attention instead of recomputing it in the backward pass."
    sequence_parallel: bool = key(False, resume="free", affects=("speed",))
    "Whether the tokens of norms and residuals are split over the tensor-parallel ranks; needs tp 2 or more."
    partition: Partition = key("layers", resume="free", affects=("speed",))
    "Split of the layers over pipeline stages: evenly (layers), by parameters, or a list such as [11, 13]."
    offload: Literal["none", "optimizer", "full"] = key("none", resume="free", affects=("speed",))
    "Kept in host memory: nothing (none), the optimizer states, or also the parameters (full)."
    tiles: int = key(1, resume="free", affects=("speed",))
    "Tiles per linear layer; ZeRO-3 gathers one at a time; 1 or more."
    activation_offload: bool = key(False, resume="free", affects=("speed",))
    "Whether the activations of the layers are kept in host memory."
    loss_chunks: int = key(1, resume="free", affects=("speed",))
    "Pieces in which the logits are computed, and recomputed in the backward pass; 1 or more."
    one_pass_loss: bool = key(False, resume="free", affects=("speed",))
    "Whether the loss and its gradients are computed together, each piece once."
    sharded_optimizer: bool = key(False, resume="free", affects=("speed",))
    "Whether the moments of the optimizer are sharded over dp; needs dp 2 or more."
    prefetch: bool = key(True, resume="free", affects=("speed",))
    "Whether the weights of the next two blocks are gathered in advance."
    reshard: bool = key(True, resume="free", affects=("speed",))
    "Whether the gathered weights of a block are freed after its forward pass."
    gather_blocks: int | None = key(None, resume="free", affects=("speed",))
    "Blocks whose weights are gathered together, 1 or more; by default more than one only if they are small."
    cp_exchange: CpExchange = key("heads", resume="free", affects=("speed",))
    "Exchanged between the ranks of cp: heads, all keys and values, or keys in a ring (engine megatron-lm only)."
    megatron_args: tuple[str, ...] = key((), resume="free", affects=("speed",))
    'Further arguments of pretrain_gpt.py; for example ["--num-layers-per-virtual-pipeline-stage", "2"].'


@dataclass(frozen=True)
class LayoutRequest:
    """`[layout]`: the GPUs, their split, and the batch. The rules of `resolve` decide the open values."""

    gpus: int | None = key(None, resume="free", affects=("speed",), least=1)
    "Total number of GPUs; for example 64."
    nodes: int | None = key(None, resume="free", affects=("speed",), least=1)
    "Number of nodes; by default as few as hold the GPUs."
    tp: int | None = key(None, resume="free", affects=("speed",), least=1)
    "Tensor parallel size: GPUs that share each matrix, within a node; for example 4."
    pp: int | None = key(None, resume="free", affects=("speed",), least=1)
    "Pipeline parallel size: stages of layers; for example 16."
    cp: int | None = key(None, resume="free", affects=("speed",), defaults=(None, 1), least=1)
    "Context parallel size: GPUs that share each sample's tokens; by default 1; for example 4."
    dp: int | None = key(None, resume="free", affects=("speed",), least=1)
    "Data parallel size: copies of the model; by default gpus / (tp x cp x pp)."
    ep: int | None = key(None, resume="free", affects=("speed",), defaults=(None, 1), least=1)
    "Expert parallel size: ranks of cp x dp that divide the experts of a layer; by default 1; for example 8."
    etp: int | None = key(None, resume="never", affects=("speed",), least=1)
    "GPUs that share each expert, on engine megatron-lm: ep x etp divides tp x cp x dp; by default tp; for example 1."
    shard: int | None = key(None, resume="free", affects=("speed",), least=1)
    "Neighbours on the data axis over which fsdp shards, a divisor of cp x dp; by default all; for example 8."
    micro_batch: int | None = key(None, resume="free", affects=("speed",), least=1)
    "Samples per forward pass of a rank; for example 4."
    micro_batches: int | None = key(None, resume="free", affects=("speed",), least=1)
    "Forward passes per optimizer step (gradient accumulation, pipeline chunks); for example 16."
    global_batch: int | None = key(None, resume="never", affects=("speed",), least=1)
    "Samples per optimizer step: micro_batch x micro_batches x dp; for example 1024."
    allow_tp_across_nodes: bool = key(False, resume="free", affects=())
    "Whether tp may span nodes, whose links are slow."


@dataclass(frozen=True)
class Train:
    """`[train]`: length, arithmetic, optimizer, and the intervals of logging, evaluation and saving (0: never).

    Keys that are free on resume change neither the weights nor the order of the data, except `steps` and `until_loss`:
    a run that is done must change one of them to train further, and its decaying learning rate then differs from that
    of an unbroken run.
    """

    steps: int = key(1000, resume="free", affects=("schedule",), least=1)
    "Optimizer steps of the whole run, at least 1; for example 10000."
    minutes: float | None = key(None, resume="free", affects=(), above=0)
    "Minutes after which the run ends as done, once the current step is complete; for example 90."
    dtype: Dtype = key("bf16", resume="never", affects=("speed",))
    "Data type of the matrix products; bf16 and fp16 keep fp32 master weights."
    matmul: Matmul = key("none", resume="never", affects=("speed",))
    "Format of the matrix products in blocks, with dtype bf16; ddp and fsdp train with fp8-tensor; others: plan only."
    seed: int = key(1, resume="never", affects=("schedule",))
    "Seed of the initial weights and of the order of the data; for example 1."
    init: str | None = key(None, resume="never", affects=("schedule",), of_our_loop=True)
    'Folder with config.json and safetensors (transformers) to begin from, not random weights; "Llama-3.2-1B".'
    deterministic: bool = key(False, resume="free", affects=("speed",))
    "Whether only deterministic kernels run: slower, but the same layout gives the same bits."
    tf32: bool = key(False, resume="free", affects=("speed",))
    "Whether fp32 matrix products run as TF32, with 10 bits of mantissa."
    optimizer: OptimizerName = key("adamw", resume="never", affects=("speed",), branch=True)
    "AdamW, SGD without momentum, or Muon for the layers' matrices with AdamW for all else (muon)."
    muon_lr: float | None = key(None, resume="never", affects=("schedule",), branch=True, above=0)
    "Muon's learning rate, on the schedule of train.lr, which is its default; for example 1e-3."
    muon_momentum: float = key(0.95, resume="never", affects=("schedule",), branch=True, below=1)
    "Decay of Muon's momentum, from 0 to 1."
    muon_steps: int = key(5, resume="never", affects=("speed",), branch=True, least=1, below=21)
    "Newton-Schulz steps of each of Muon's updates, 1 to 20."
    muon_dtype: Literal["bf16", "fp32"] = key("bf16", resume="never", affects=("speed",), branch=True)
    "Data type of Muon's Newton-Schulz products; with fp32, layouts differ less."
    optimizer_mode: Literal["fused", "foreach", "for-loop", "host"] | None = key(
        None, resume="free", affects=("speed",)
    )
    "How the update is computed; host: for offloaded states."
    lr: float = key(3e-4, resume="never", affects=("schedule",), branch=True, least=0)
    "Learning rate after the warm-up; for example 3e-4."
    min_lr: float = key(0.0, resume="never", affects=("schedule",), branch=True, least=0)
    "Learning rate at the end of the decay; for example 3e-5."
    warmup_steps: int = key(0, resume="never", affects=("schedule",), least=0)
    "Steps during which the learning rate rises from 0; for example 200."
    decay: Decay = key("cosine", resume="never", affects=("schedule",), branch=True)
    "Learning rate after the warm-up: falls to min_lr as a cosine or a line, stays, or falls in the last steps (wsd)."
    decay_steps: int | None = key(None, resume="never", affects=("schedule",), branch=True, least=1)
    "Number of last steps in which wsd falls to min_lr; by default a tenth of steps; for example 2000."
    decay_shape: Literal["linear", "1-sqrt"] = key("linear", resume="never", affects=("schedule",), branch=True)
    "Shape of the fall of wsd: a line, or 1 minus the square root of the share of decay_steps that is done."
    weight_decay: float = key(0.1, resume="never", affects=("schedule",), branch=True, least=0)
    "Weight decay, applied only to matrices and embeddings; for example 0.1."
    beta1: float = key(0.9, resume="never", affects=("schedule",), below=1)
    "Decay of the first moment of AdamW, from 0 to 1."
    beta2: float = key(0.95, resume="never", affects=("schedule",), below=1)
    "Decay of the second moment of AdamW, from 0 to 1."
    eps: float = key(1e-8, resume="never", affects=("schedule",), least=0)
    "Term that AdamW adds to the square root of the second moment."
    clip: float = key(1.0, resume="never", affects=("speed",), least=0)
    "Largest norm of the gradient, which is clipped to it; 0: no clipping."
    balance: Balance | None = key(None, resume="never", affects=("schedule",), branch=True, of_our_loop=True)
    "How a mixture's experts get equally many tokens; by default loss, or bias if router_bias; none with init."
    balance_coef: float = key(0.001, resume="never", affects=("schedule",), branch=True, least=0)
    "Coefficient of the balance loss, summed over the layers; for example 0.01."
    balance_rate: float = key(0.001, resume="never", affects=("schedule",), branch=True, least=0)
    "Step by which balance bias moves a router's choice bias after each optimizer step; for example 0.001."
    z_loss: float = key(0.0, resume="never", affects=("schedule",), branch=True, least=0)
    "Coefficient of the z-loss: the mean of logsumexp^2 of a router's logits, summed over layers; for example 0.001."
    log_every: int = key(10, resume="free", affects=(), least=1)
    "Steps between two logged lines, 1 or more; for example 10."
    eval_every: int = key(0, resume="free", affects=("schedule",), least=0)
    "Steps between two evaluations; 0: none; for example 500."
    eval_batches: int = key(4, resume="free", affects=("speed",), least=0)
    "Micro-batches per rank and evaluation; for example 4."
    save_every: int = key(0, resume="free", affects=(), least=0)
    "Steps between two checkpoints; 0: only the last one; for example 500."
    save_minutes: float | None = key(None, resume="free", affects=(), above=0, of_our_loop=True)
    "Minutes between two checkpoints, while the disk has space; 30 for a new run that sets no other save."
    save_at: tuple[int, ...] = key((), resume="free", affects=(), of_our_loop=True)
    "Steps after which a checkpoint is saved and always kept, whatever keep_last is; for example [1000, 5000]."
    save_last: bool = key(True, resume="free", affects=())
    "Whether a checkpoint is saved when an attempt ends."
    save_in_background: bool = key(True, resume="free", affects=())
    "Whether checkpoints are written while the training continues."
    keep_last: int = key(0, resume="free", affects=(), least=0)
    "Number of newest checkpoints to keep; 0: all; for example 3."
    keep_every: int = key(0, resume="free", affects=(), least=0)
    "Also keeps the checkpoints whose step is a multiple of this; 0: no others; for example 5000."
    max_bad_steps: int = key(20, resume="free", affects=(), least=0)
    "Steps in a row without a finite loss or gradient after which the attempt ends; 0: no limit."
    until_loss: float | None = key(None, resume="free", affects=())
    "Loss at which the run ends as done: of an evaluation, else the mean of 20 steps; for example 3.2."
    profile_steps: tuple[int, ...] = key((), resume="free", affects=(), of_our_loop=True)
    "First and last step that torch's profiler records, on the first and the last rank; for example [10, 12]."
    hang_multiple: float = key(20.0, resume="free", affects=(), least=0)
    "No step of any rank for this many times the median step is a hang; 0: never."
    hang_floor_s: float = key(300.0, resume="free", affects=(), least=0)
    "Seconds without a step that do not yet count as a hang; for example 300."


@dataclass(frozen=True)
class Job:
    """`[job]`: the request to the scheduler. None takes the value of the cluster profile."""

    name: str | None = key(None, resume="free", affects=())
    "Name of the job in the queue; by default the name of the experiment."
    time: str | None = key(None, resume="free", affects=())
    'Time limit of a job, in a format of sbatch; for example "20:00:00".'
    partition: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'Partition, or several; for example "gpu_p13".'
    account: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'Account that is charged; for example "abc@v100".'
    qos: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'Quality of service; for example "qos_gpu-t3".'
    constraint: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'Features that nodes must have; for example "v100-32g".'
    reservation: str | None = key(None, resume="free", affects=(), site_may_set=True)
    "Reservation to run in."
    nodelist: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'Nodes that must be used; for example "r10i[0-3]n0".'
    exclude: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'Nodes that must not be used; for example "r11i2n4".'
    comment: str | None = key(None, resume="free", affects=())
    "Comment for the accounting."
    mem: str | None = key(None, resume="free", affects=())
    'Memory per node, in the format of sbatch; for example "160G".'
    cpus_per_task: int | None = key(None, resume="free", affects=())
    "CPUs per rank; by default the CPUs of a node divided by its GPUs."
    dependency: str | None = key(None, resume="free", affects=())
    'Jobs that must end before this one starts; for example "afterok:4711".'
    exclusive: bool | None = key(None, resume="free", affects=())
    "Whether the job has its nodes to itself."
    signal_lead_s: int | None = key(None, resume="free", affects=())
    "Seconds before the time limit when Slurm sends its signal, so that a checkpoint is saved; for example 120."
    max_gpu_hours: float | None = key(None, resume="free", affects=(), above=0, hint="leave it out for no budget")
    "Budget of a run over all its attempts, in GPU-hours; for example 500."
    retry_pause_s: int | None = key(None, resume="free", affects=())
    "Seconds before the first retry; doubled with each failure in a row; for example 30."
    restart_in_job: bool | None = key(None, resume="free", affects=())
    "Whether a failed attempt is retried in its job; by default not a script's, on this machine if it has saved."
    preflight: bool | None = key(None, resume="free", affects=())
    "Whether every node is probed before the ranks start."
    spare_nodes: int | None = key(None, resume="free", affects=())
    "Additional nodes to request, which replace those that fail the preflight; for example 1."
    sbatch: tuple[str, ...] = key((), resume="free", affects=())
    'Further options for sbatch; for example ["--mail-type=END"].'
    srun: tuple[str, ...] = key((), resume="free", affects=())
    'Further options for srun; for example ["--cpu-bind=none"].'


@dataclass(frozen=True)
class Command:
    """`[command]`: the program that engine `command` starts, how it resumes and stops, and how its log is read.

    In its texts `{gpus}`, `{nodes}`, `{tp}`, `{run}`, `{attempt}` and `{checkpoint}` are filled in, quoted for bash.
    """

    run: str | tuple[str, ...] = key("", resume="free", affects=("speed",))
    'A line for bash, or a list executed without a shell; for example ["python", "train.py", "--gpus", "{gpus}"].'
    per: Literal["gpu", "node", "job"] = key("gpu", resume="free", affects=("speed",))
    "Started once per GPU, per node (torchrun, accelerate), or per job."
    workdir: str = key(".", resume="free", affects=())
    "Folder in which it runs; searched beside the experiment, then in the current folder."
    setup: tuple[str, ...] = key((), resume="free", affects=())
    'Lines of bash that run before it on every node; for example ["module load cuda", "source env/bin/activate"].'
    resume: str | None = key(None, resume="free", affects=())
    'Added to the command once there is a checkpoint; for example "--resume {checkpoint}".'
    checkpoints: str | None = key(None, resume="free", affects=())
    'Pattern of its checkpoint files, in {run} or in workdir; for example "out/ckpt-*".'
    complete: str | None = key(None, resume="free", affects=())
    'File in a checkpoint that only a complete one has, for example ".metadata"; with ! one that it must not have.'
    stop_signal: Literal["TERM", "USR1", "USR2", "none"] = key("TERM", resume="free", affects=())
    "Signal on which it saves and ends, also sent before the time limit; none if it handles no signal."
    pattern: str | None = key(None, resume="free", affects=())
    "Regular expression for its step lines, with groups such as step, loss, step_ms, tokens_per_s."
    hang_s: float | None = key(None, resume="free", affects=(), above=0, hint="leave it out for no limit")
    "Seconds without output after which a program without steps counts as a hang; for example 1800."
    snapshot: bool = key(True, resume="free", affects=())
    "Whether the run keeps a copy of workdir, without files that git ignores, from which every attempt runs."
    link: tuple[str, ...] = key((), resume="free", affects=())
    'Paths in workdir that are linked into the copy instead of copied; for example ["data"].'
    script: str | None = key(None, resume="never", affects=())
    'Job script that runs unchanged, in place of run; searched as workdir is; for example "train.slurm".'
    args: tuple[str, ...] = key((), resume="never", affects=("speed",))
    'Arguments of script; for example ["--lr", "3e-4"].'
    values: dict[str, str | int | float] | None = key(None, resume="free", affects=())
    "Your own names, filled in as {name} in every text of [command]; rows of a sweep can set them; {lr = 3e-4}."


@dataclass(frozen=True)
class ScriptFacts:
    """Facts about a job script that runs unchanged: the hash of its body, and the requests of its options.

    `signal`: the value of `--signal`, None without one. `output`, `error`: the patterns of those files; `open_mode`:
    the mode to open them in.
    """

    body: str
    tasks: int | None = None
    signal: str | None = None
    output: str | None = None
    error: str | None = None
    open_mode: str | None = None


@dataclass(frozen=True)
class Experiment:
    """The settings of one TOML file and the files that it extends, with overrides applied."""

    name: str = "experiment"
    "Name of the run folder and of the job; by default the name of the file."
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    engine: Engine = field(default_factory=Engine)
    layout: LayoutRequest = field(default_factory=LayoutRequest)
    train: Train = field(default_factory=Train)
    job: Job = field(default_factory=Job)
    command: Command = field(default_factory=Command)
    notify: Notify = field(default_factory=Notify)
    track: Track = field(default_factory=Track)
    plan: Plan = field(default_factory=Plan)


def with_keys(experiment: Experiment, keys: Mapping[str, Any]) -> Experiment:
    """The experiment with other values for these dotted keys, which are not checked before `resolve`."""
    for dotted, value in keys.items():
        table, _, name = dotted.partition(".")
        experiment = replace(experiment, **{table: replace(getattr(experiment, table), **{name: value})})
    return experiment


# --- job.time

_TIME_FORMS = (
    (re.compile(r"(?P<m>\d+)(:(?P<s>\d+))?", re.ASCII), "minutes[:seconds]"),
    (re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)", re.ASCII), "hours:minutes:seconds"),
    (re.compile(r"(?P<d>\d+)-((?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?)?", re.ASCII), "days-hours[:minutes[:seconds]]"),
)
_SECONDS_OF = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def limit_s(text: str | None) -> int | None:
    """The seconds of a time limit in a format of sbatch; None for no limit. ConfigError for any other text.

    >>> limit_s("1:30:00"), limit_s("90"), limit_s("2-12"), limit_s("2-"), limit_s("-1")
    (5400, 5400, 216000, 172800, None)
    """
    if text is None or text.lower() in ("unlimited", "infinite", "-1"):
        return None
    for form, _ in _TIME_FORMS:
        if match := form.fullmatch(text):
            seconds = sum(_SECONDS_OF[unit] * int(size) for unit, size in match.groupdict().items() if size)
            return seconds or None  # sbatch takes 0 as no limit
    forms = ", ".join(name for _, name in _TIME_FORMS)
    raise ConfigError(f"job.time {text!r} is not a time limit: {forms}", "for example 02:00:00")
