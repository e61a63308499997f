"""The tables of an experiment: what to train, and how. Each key has a default and its rules.

A key that is None is open: the cluster profile, a rule of `resolve`, or the plan gives it a value.
`experiment_file` reads these tables from TOML. The string under a key is its meaning (`hpc_gpt.core.keys`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.formulas import Recompute
from hpc_gpt.core.settings.key_rules import key
from hpc_gpt.core.settings.mixture import MixedSource
from hpc_gpt.core.settings.services import After, EngineName, Notify, Plan, Track

Dtype = Literal["fp32", "bf16", "fp16"]
Compile = Literal["none", "block", "edges", "whole"]
CpExchange = Literal["heads", "keys", "ring"]
# Format of the operands of a layer's matrix products: 16 bits as `dtype` says, or 8 and 4 bits by how they are scaled.
Matmul = Literal["none", "fp8-tensor", "fp8-row", "mxfp8", "nvfp4"]
Partition = Literal["layers", "parameters"] | tuple[int, ...]
MlpKind = Literal["gelu", "swiglu"]
NormKind = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rope"]
Bias = Literal["all", "qkv", "none"]
# For weights that are trained already, as the recipes of full fine-tuning have it (Alpaca's, torchtune's for Llama);
# train.lr's default is for random ones.
LR_OF_TRAINED = 2e-5


@dataclass(frozen=True)
class RopeScaling:
    """`[model.rope_scaling]`: how the rotation's frequencies are lowered for long sequences, as Llama 3.1 does it."""

    kind: Literal["llama3"]
    "The rule by which frequencies are scaled: llama3."
    factor: float
    "Frequencies of wavelengths above original_max_position_embeddings / low_freq_factor are divided by it; 8 or 32."
    low_freq_factor: float
    "Wavelengths above original_max_position_embeddings / this are scaled in full; for example 1."
    high_freq_factor: float
    "Wavelengths below original_max_position_embeddings / this are not scaled; above low_freq_factor; for example 4."
    original_max_position_embeddings: int
    "Positions that the model was trained with before; for example 8192."


@dataclass(frozen=True)
class Model:
    """`[model]`: a preset by name, an explicit shape, or a preset with some sizes changed.

    The keys after `vocab_multiple` give another shape than GPT-2's: Llama's, Qwen's, Mistral's, SmolLM's.
    """

    preset: str | None = key(None, resume="never", affects=())
    'A model by its name, whose sizes the other keys may change; for example "gpt2-xl".'
    hidden: int | None = key(None, resume="never", affects=("speed",))
    "Width of the model, a multiple of heads unless head_dim is given; for example 1600."
    layers: int | None = key(None, resume="never", affects=("speed",))
    "Transformer layers, 1 or more; for example 48."
    heads: int | None = key(None, resume="never", affects=("speed",))
    "Attention heads, a multiple of tp; for example 25."
    vocab: int | None = key(None, resume="never", affects=("speed",))
    "Tokens of the vocabulary, without padding; for example 50257."
    seq: int | None = key(None, resume="never", affects=("speed",), thousand=1024)
    'Tokens of a sample; for example 1024, or "8k", which is 8192.'
    tied: bool | None = key(None, resume="never", affects=("speed",))
    "Whether the head's weight is the embedding's."
    vocab_multiple: int | None = key(None, resume="never", affects=("speed",))
    "The embedding's rows are padded to a multiple of this, which tp must divide; for example 64."
    hf: str | None = key(None, resume="never", affects=(), since="0.1")
    'A config.json of transformers, or its folder, looked for beside the experiment; for example "Llama-3.1-8B".'
    kv_heads: int | None = key(None, resume="never", affects=("speed",), since="0.1")
    "Heads of keys and of values, which divides heads; by default as many as heads; for example 8."
    head_dim: int | None = key(None, resume="never", affects=("speed",), since="0.1")
    "Width of a head, even with rotation; by default hidden / heads; for example 128."
    ffn: int | None = key(None, resume="never", affects=("speed",), since="0.1")
    "Width inside the MLP, a multiple of tp; by default 4 x hidden; for example 14336."
    mlp: MlpKind | None = key(None, resume="never", affects=("speed",), since="0.1")
    "The MLP: gelu, two matrices, or swiglu, three, of which one is a gate; by default gelu."
    norm: NormKind | None = key(None, resume="never", affects=("speed",), since="0.1")
    "The norm before attention, MLP and head; by default layernorm."
    norm_eps: float | None = key(None, resume="never", affects=("speed",), since="0.1")
    "Added to the variance in a norm, above 0; by default 1e-5; for example 1e-6."
    positions: Positions | None = key(None, resume="never", affects=("speed",), since="0.1")
    "Learned vectors, or the rotation of queries and keys; by default learned."
    rope_theta: float | None = key(None, resume="never", affects=("speed",), since="0.1")
    "Base of the rotation's wavelengths, above 1; by default 10000; for example 500000."
    rope_scaling: RopeScaling | None = key(None, resume="never", affects=("speed",), since="0.1")
    "The frequencies are lowered for longer sequences than those of the first training."
    bias: Bias | None = key(None, resume="never", affects=("speed",), since="0.1")
    "Linear layers with a bias: all, those of query, key and value, or none; by default all."
    qk_norm: bool | None = key(None, resume="never", affects=("speed",), since="0.1")
    "RMSNorm of each head's query and key, before the rotation; by default false."
    nope_every: int | None = key(None, resume="never", affects=("speed",), since="0.1")
    "Every n-th layer has no rotation, n of 2 or more; by default none; for example 4."
    pad_token: int | None = key(None, resume="never", affects=("schedule",), since="0.2")
    "The token whose row gets no gradient from the embedding; by default config.json's pad_token_id, if it has one."


@dataclass(frozen=True)
class Data:
    """`[data]`: where the tokens come from. The last `eval_fraction` of them is kept for evaluation."""

    source: Literal["stdlib", "tokens", "random", "megatron", "stream", "mix"] = key(
        "stdlib", resume="never", affects=("speed",)
    )
    "Python's own sources, a token file, random numbers, Megatron's .bin and .idx, a stream of text, or a mixture."
    path: str | None = key(None, resume="never", affects=("speed",))
    'The file or folder, looked for beside the experiment, here, then in the data folder; or "stdlib".'
    eval_fraction: float = key(0.05, resume="never", affects=("speed",), below=1, hint="use 0.05")
    "Share of the tokens, or of a stream's files, that is kept for evaluation, from 0 to 1."
    tokenizer: str = key("byte", resume="never", affects=("speed",))
    '"byte", "char", a table FILE.vocab.json, a tokenizer.json, or "tiktoken:NAME"; a token file has its own.'
    begin_token: bool = key(False, resume="never", affects=("speed",), since="0.1")
    "Each document of a stream begins with the tokenizer's begin-of-text token."
    mask_documents: bool = key(False, resume="never", affects=("speed",), since="0.2")
    "Attention stays within a document, which its end token closes, and positions restart after it."
    end_token: int | None = key(None, resume="never", affects=("speed",), since="0.2")
    "The number of the token that ends a document, for mask_documents; by default the tokenizer's."
    workers: int = key(0, resume="free", affects=("speed",), least=0, hint="0 reads in the rank itself")
    "Processes a rank that tokenise a stream, 0 for the rank itself; for example 4."
    on_bad_shard: Literal["stop", "skip"] = key("stop", resume="free", affects=("speed",))
    "A damaged file of a stream stops the run, or its rest is skipped and counted."
    mix: dict[str, MixedSource] | None = key(None, resume="never", affects=("schedule",), since="0.2")
    "A mixture's sources, a table for each name, in place of path."
    phases: tuple[float, ...] = key((), resume="never", affects=("schedule",), since="0.2", thousand=1000)
    'Tokens of a mixture after which its next phase begins, with other weights; for example [30e9], or ["30B"].'
    max_epochs: float = key(4.0, resume="free", affects=(), since="0.2", least=0, hint="0 is no limit")
    "A run that reads a mixture's source more often is refused, other data are a note; 0 for no limit; for example 8."


@dataclass(frozen=True)
class Engine:
    """`[engine]`: the trainer of the steps and its switches; `core.engines` says which engine takes which switch."""

    name: EngineName = key("deepspeed-3d", resume="converted", affects=("speed",))
    "What trains; hpc-gpt help engines says what each can do."
    zero_stage: int | None = key(None, resume="converted", affects=("speed",))
    "What DeepSpeed shards over dp: 0 nothing, 1 the optimizer, 2 gradients, too, 3 weights, too."
    recompute: Recompute = key("none", resume="free", affects=("speed",))
    "Activations that the backward pass computes again: none, the core of attention, or every layer."
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = key("auto", resume="free", affects=("speed",))
    "The attention kernel; auto takes the fastest that runs here."
    compile: Compile = key("none", resume="free", affects=("speed",))
    "What torch.compile takes: each block and the loss, the embedding and head, too (edges), or the model as one."
    compile_backend: Literal["inductor", "aot_eager"] = key("inductor", resume="free", affects=("speed",))
    "Who compiles: Inductor makes kernels, aot_eager only the graph."
    keep_residuals: bool = key(False, resume="free", affects=("speed",), since="0.1")
    "A compiled block keeps the residual after attention; otherwise the backward pass computes it again."
    sequence_parallel: bool = key(False, resume="free", affects=("speed",))
    "The tokens of norms and residuals are split over the tensor-parallel ranks; needs tp 2 or more."
    partition: Partition = key("layers", resume="converted", affects=("speed",))
    "How layers are divided among pipeline stages: evenly, by parameters, or a list such as [11, 13]."
    offload: Literal["none", "optimizer", "full"] = key("none", resume="free", affects=("speed",))
    "What is kept in the host's memory: nothing, the optimizer, or parameters, too."
    offload_path: str | None = key(None, resume="free", affects=("speed",))
    "A folder on every node's NVMe to offload to, instead of the host's memory; for example \"/local/nvme\"."
    offload_ratio: float = key(1.0, resume="free", affects=("speed",))
    "Share of the optimizer that is offloaded, above 0 and at most 1; ZeRO-3."
    tiles: int = key(1, resume="converted", affects=("speed",))
    "Tiles of every linear layer, which ZeRO-3 gathers one at a time; 1 or more."
    activation_offload: bool = key(False, resume="free", affects=("speed",))
    "The layers' activations are kept in the host's memory."
    loss_chunks: int = key(1, resume="free", affects=("speed",))
    "Pieces in which logits are computed, and again in the backward pass; 1 or more."
    one_pass_loss: bool = key(False, resume="free", affects=("speed",), since="0.1")
    "The loss and its gradients are computed together, each piece once."
    fused_bias_gradients: bool = key(False, resume="free", affects=("speed",), since="0.1")
    "The gradients of QKV and GELU are computed together with those of their biases."
    sharded_optimizer: bool = key(False, resume="free", affects=("speed",))
    "The optimizer's moments are sharded over dp; needs dp 2 or more."
    prefetch: bool = key(True, resume="free", affects=("speed",))
    "The next block's weights are gathered during the backward pass."
    reshard: bool = key(True, resume="free", affects=("speed",))
    "A block's gathered weights are freed after its forward pass."
    cp_exchange: CpExchange = key("heads", resume="free", affects=("speed",), since="0.2")
    "What the ranks of cp exchange: heads, all keys and values, or keys in a ring (engine megatron-lm alone)."
    megatron_args: tuple[str, ...] = key((), resume="free", affects=("speed",))
    'Further arguments of pretrain_gpt.py; for example ["--num-layers-per-virtual-pipeline-stage", "2"].'


@dataclass(frozen=True)
class LayoutRequest:
    """`[layout]`: the GPUs, how they are split, and the batch. The rules of `resolve` give the other values."""

    gpus: int | None = key(None, resume="free", affects=("speed",))
    "GPUs in all; for example 64."
    nodes: int | None = key(None, resume="free", affects=("speed",))
    "Nodes; by default as few as hold the GPUs."
    tp: int | None = key(None, resume="converted", affects=("speed",))
    "Tensor parallel size: GPUs that share each matrix, within a node; for example 4."
    pp: int | None = key(None, resume="converted", affects=("speed",))
    "Pipeline parallel size: stages of layers; for example 16."
    cp: int | None = key(None, resume="converted", affects=("speed",), not_in_hash=(None, 1))
    "Context parallel size: GPUs that share each sample's tokens; by default 1; for example 4."
    dp: int | None = key(None, resume="converted", affects=("speed",))
    "Data parallel size: copies of the model; by default what tp, cp and pp leave."
    micro_batch: int | None = key(None, resume="free", affects=("speed",))
    "Samples of one forward pass of one rank; for example 4."
    micro_batches: int | None = key(None, resume="free", affects=("speed",))
    "Forward passes for one optimizer step (gradient accumulation, pipeline chunks); for example 16."
    global_batch: int | None = key(None, resume="never", affects=("speed",))
    "Samples of one optimizer step: micro_batch x micro_batches x dp; for example 1024."
    allow_tp_across_nodes: bool = key(False, resume="free", affects=())
    "A tp that spans nodes, over their slow links, is accepted."


@dataclass(frozen=True)
class Train:
    """`[train]`: length, arithmetic, optimizer, and how often to log, evaluate and save (0: never).

    Keys that are free on resume change neither the weights nor the order of the data, except `steps` and `until_loss`:
    a run that is done must change one of them to train further, and its decaying learning rate then differs from that
    of an unbroken run.
    """

    steps: int = key(1000, resume="free", affects=("schedule",), least=1)
    "Optimizer steps of the whole run, 1 or more; for example 10000."
    minutes: float | None = key(None, resume="free", affects=(), above=0)
    "Minutes after which the run ends as done, at the end of a step; for example 90."
    dtype: Dtype = key("bf16", resume="never", affects=("speed",))
    "Arithmetic of the matrix products; bf16 and fp16 have fp32 master weights."
    matmul: Matmul = key("none", resume="never", affects=("speed",), since="0.2")
    "Format of the blocks' products, beside dtype bf16; ddp and fsdp train with fp8-tensor, only plan knows the others."
    seed: int = key(1, resume="never", affects=("schedule",))
    "Seed of the initial weights and of the order of the data; for example 1."
    init: str | None = key(None, resume="never", affects=("schedule",), since="0.1", of_our_loop=True)
    'A folder of transformers\' config.json and safetensors to begin from, instead of random weights; "Llama-3.2-1B".'
    deterministic: bool = key(False, resume="free", affects=("speed",))
    "Only deterministic kernels run: the same layout gives the same bits, more slowly."
    tf32: bool = key(False, resume="free", affects=("speed",))
    "Products in fp32 run as TF32, with 10 bits of mantissa."
    optimizer: Literal["adamw", "sgd"] = key("adamw", resume="never", affects=("speed",))
    "AdamW, or SGD without momentum."
    optimizer_mode: Literal["fused", "foreach", "for-loop", "host", "compiled"] | None = key(
        None, resume="free", affects=("speed",)
    )
    "How the update is computed; host is for offloaded states, compiled one pass (ddp, bf16 or fp16)."
    lr: float = key(3e-4, resume="never", affects=("schedule",), branch=True, least=0)
    "Learning rate after the warm-up; for example 3e-4."
    min_lr: float = key(0.0, resume="never", affects=("schedule",), branch=True, least=0)
    "Learning rate at the end of the decay; for example 3e-5."
    warmup_steps: int = key(0, resume="never", affects=("schedule",), least=0)
    "Steps in which the learning rate rises from 0; for example 200."
    decay: Literal["cosine", "linear", "constant", "wsd"] = key(
        "cosine", resume="never", affects=("schedule",), branch=True
    )
    "After the warm-up the learning rate falls to min_lr as a cosine or a line, stays, or falls in the last steps: wsd."
    decay_steps: int | None = key(None, resume="never", affects=("schedule",), branch=True, since="0.2", least=1)
    "The last steps, in which wsd falls to min_lr; by default a tenth of steps; for example 2000."
    decay_shape: Literal["linear", "1-sqrt"] = key(
        "linear", resume="never", affects=("schedule",), branch=True, since="0.2"
    )
    "How wsd falls: as a line, or as 1 less the square root of its share of decay_steps."
    weight_decay: float = key(0.1, resume="never", affects=("schedule",), branch=True, least=0)
    "AdamW's weight decay, of matrices and embeddings alone; for example 0.1."
    beta1: float = key(0.9, resume="never", affects=("schedule",), below=1)
    "AdamW's decay of the first moment, from 0 to 1."
    beta2: float = key(0.95, resume="never", affects=("schedule",), below=1)
    "AdamW's decay of the second moment, from 0 to 1."
    eps: float = key(1e-8, resume="never", affects=("schedule",), least=0)
    "AdamW's term beside the root of the second moment."
    clip: float = key(1.0, resume="never", affects=("speed",), least=0)
    "The gradient's norm is clipped to this; 0 for never."
    log_every: int = key(10, resume="free", affects=(), least=1)
    "Steps from one logged line to the next, 1 or more; for example 10."
    eval_every: int = key(0, resume="free", affects=("schedule",), least=0)
    "Steps from one evaluation to the next; 0 for none; for example 500."
    eval_batches: int = key(4, resume="free", affects=("speed",), least=0)
    "Micro-batches a rank of one evaluation; for example 4."
    save_every: int = key(0, resume="free", affects=(), least=0)
    "Steps from one checkpoint to the next; 0 for none but the last; for example 500."
    save_minutes: float | None = key(None, resume="free", affects=(), since="0.1", above=0, of_our_loop=True)
    "Minutes from one checkpoint to the next, while the disk has space; a new run that sets no other save has 30."
    save_at: tuple[int, ...] = key((), resume="free", affects=(), since="0.1", of_our_loop=True)
    "Steps after which a checkpoint is saved, and kept whatever keep_last is; for example [1000, 5000]."
    save_last: bool = key(True, resume="free", affects=())
    "A checkpoint is saved when an attempt ends."
    save_in_background: bool = key(True, resume="free", affects=())
    "Checkpoints are written while the training continues."
    keep_last: int = key(0, resume="free", affects=(), least=0)
    "Checkpoints that are kept, the newest; 0 for all; for example 3."
    keep_every: int = key(0, resume="free", affects=(), least=0)
    "Checkpoints whose step this divides are kept, too; 0 for none; for example 5000."
    max_failed_saves: int = key(3, resume="free", affects=(), least=1)
    "Saves in a row that a disk may refuse before the attempt ends, 1 or more."
    max_bad_steps: int = key(20, resume="free", affects=(), least=0)
    "Steps in a row whose loss or gradient is not finite before the attempt ends; 0 for any number."
    until_loss: float | None = key(None, resume="free", affects=())
    "The run ends as done at this loss of an evaluation, else of the mean of 20 steps; for example 3.2."
    profile_steps: tuple[int, ...] = key((), resume="free", affects=(), since="0.1", of_our_loop=True)
    "First and last step that torch's profiler records, on the first and the last rank; for example [10, 12]."
    matmul_rate: bool = key(False, resume="free", affects=())
    "The device's own matrix product rate is measured before and after the steps."
    hang_multiple: float = key(20.0, resume="free", affects=(), least=0)
    "So many times the median step without a step of any rank is a hang; 0 for never."
    hang_floor_s: float = key(300.0, resume="free", affects=(), least=0)
    "Seconds without a step that are never a hang; for example 300."


@dataclass(frozen=True)
class Job:
    """`[job]`: what is requested of the scheduler. None takes the value of the cluster profile."""

    name: str | None = key(None, resume="free", affects=())
    "The job's name in the queue; by default the experiment's."
    time: str | None = key(None, resume="free", affects=())
    'Time limit of a job, in one of sbatch\'s forms; for example "20:00:00".'
    partition: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'The partition, or several; for example "gpu_p13".'
    account: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'The account that pays; for example "abc@v100".'
    qos: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'The quality of service; for example "qos_gpu-t3".'
    constraint: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'Features that nodes must have; for example "v100-32g".'
    reservation: str | None = key(None, resume="free", affects=(), site_may_set=True)
    "A reservation to run in."
    nodelist: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'Nodes that must be used; for example "r10i[0-3]n0".'
    exclude: str | None = key(None, resume="free", affects=(), site_may_set=True)
    'Nodes that must not be used; for example "r11i2n4".'
    comment: str | None = key(None, resume="free", affects=())
    "A comment for the accounting."
    mem: str | None = key(None, resume="free", affects=())
    'Memory of a node, as sbatch has it; for example "160G".'
    cpus_per_task: int | None = key(None, resume="free", affects=())
    "CPUs of a rank; by default a node's CPUs over its GPUs."
    dependency: str | None = key(None, resume="free", affects=())
    'Jobs that must end before; for example "afterok:4711".'
    exclusive: bool | None = key(None, resume="free", affects=())
    "Whether the job has its nodes to itself."
    signal_lead_s: int | None = key(None, resume="free", affects=())
    "Seconds before the time limit at which Slurm signals, so that a checkpoint is saved; for example 120."
    max_gpu_hours: float | None = key(None, resume="free", affects=(), above=0, hint="leave it out for no budget")
    "Budget over all attempts of a run, in GPU-hours; for example 500."
    retry_pause_s: int | None = key(None, resume="free", affects=())
    "Seconds before the first retry; doubled with each failure in a row; for example 30."
    retry_after_exit_0: bool = key(False, resume="free", affects=())
    "Whether a program that exits with 0 before its last step is started again, while each start gets further."
    preflight: bool | None = key(None, resume="free", affects=())
    "Every node is probed before the ranks start."
    spare_nodes: int | None = key(None, resume="free", affects=())
    "Nodes that are requested in addition, to replace one that fails the preflight; for example 1."
    sbatch: tuple[str, ...] = key((), resume="free", affects=())
    'Further options of sbatch; for example ["--mail-type=END"].'
    srun: tuple[str, ...] = key((), resume="free", affects=())
    'Further options of srun; for example ["--cpu-bind=none"].'


@dataclass(frozen=True)
class Command:
    """`[command]`: the program that engine `command` starts, how it resumes and stops, and how its log is read.

    In its texts `{gpus}`, `{nodes}`, `{tp}`, `{run}`, `{attempt}` and `{checkpoint}` are filled in, quoted for bash.
    """

    run: str | tuple[str, ...] = key("", resume="free", affects=("speed",))
    'A line for bash, or a list that is executed as it is; for example ["python", "train.py", "--gpus", "{gpus}"].'
    per: Literal["gpu", "node", "job"] = key("gpu", resume="free", affects=("speed",))
    "How often it is started: once a GPU, a node (torchrun, accelerate), or a job."
    workdir: str = key(".", resume="free", affects=())
    "The folder that it runs in, looked for beside the experiment, then here."
    setup: tuple[str, ...] = key((), resume="free", affects=())
    'Lines of bash before it, on every node; for example ["module load cuda", "source env/bin/activate"].'
    resume: str | None = key(None, resume="free", affects=())
    'Added to the command once there is a checkpoint; for example "--resume {checkpoint}".'
    checkpoints: str | None = key(None, resume="free", affects=())
    'Its checkpoints, as a pattern of files in {run} or in workdir; for example "out/ckpt-*".'
    complete: str | None = key(None, resume="free", affects=())
    'A file that a checkpoint has only once it is complete; for example "{checkpoint}/.done".'
    stop_signal: Literal["TERM", "USR1", "USR2", "none"] = key("TERM", resume="free", affects=())
    "The signal to save and end, sent before the time limit, too; none if it has none."
    pattern: str | None = key(None, resume="free", affects=())
    "A regular expression of its lines of steps, with groups such as step, loss, step_ms, tokens_per_s."
    hang_s: float | None = key(None, resume="free", affects=(), above=0, hint="leave it out for no limit")
    "Seconds without output after which a program is a hang that has no step to make; for example 1800."
    snapshot: bool = key(True, resume="free", affects=())
    "The run keeps workdir's files, but those that git ignores, and every attempt runs from them."
    link: tuple[str, ...] = key((), resume="free", affects=(), since="0.2")
    'What of workdir the program reads where it is, through a link in its copy; for example ["data"].'
    script: str | None = key(None, resume="never", affects=(), since="0.2")
    'A job script that runs as it is, in place of run, looked for beside the experiment, then here; "train.slurm".'
    args: tuple[str, ...] = key((), resume="never", affects=("speed",), since="0.2")
    'The arguments of script; for example ["--lr", "3e-4"].'
    values: dict[str, str | int | float] | None = key(None, resume="free", affects=(), since="0.2")
    "Names of your own, filled in as {name} in every text of [command], as rows of a sweep set them; {lr = 3e-4}."


@dataclass(frozen=True)
class ScriptFacts:
    """What is known of a job script that runs as it is: the hash of its body, and what its options ask for.

    `signal`: the value of `--signal`, None without one. `output`, `error`: the patterns of those files, `open_mode`:
    how they are to be opened.
    """

    body: str
    tasks: int | None = None
    signal: str | None = None
    output: str | None = None
    error: str | None = None
    open_mode: str | None = None


@dataclass(frozen=True)
class Experiment:
    """One TOML file with the files that it extends, and with overrides applied."""

    name: str = "experiment"
    "Names the run's folder and its job; by default the file's name."
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    engine: Engine = field(default_factory=Engine)
    layout: LayoutRequest = field(default_factory=LayoutRequest)
    train: Train = field(default_factory=Train)
    job: Job = field(default_factory=Job)
    command: Command = field(default_factory=Command)
    notify: Notify = field(default_factory=Notify)
    after: After = field(default_factory=After)
    track: Track = field(default_factory=Track)
    plan: Plan = field(default_factory=Plan)


def with_keys(experiment: Experiment, keys: Mapping[str, Any]) -> Experiment:
    """The experiment with other values of these dotted keys, which nothing checks before `resolve`."""
    for dotted, value in keys.items():
        table, _, name = dotted.partition(".")
        experiment = replace(experiment, **{table: replace(getattr(experiment, table), **{name: value})})
    return experiment


# --- job.time

_TIME_FORMS = (
    (re.compile(r"(?P<m>\d+)(:(?P<s>\d+))?"), "minutes[:seconds]"),
    (re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)"), "hours:minutes:seconds"),
    (re.compile(r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?"), "days-hours[:minutes[:seconds]]"),
)
_SECONDS_OF = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def limit_s(text: str | None) -> int | None:
    """Seconds of a time limit in one of sbatch's forms; None for no limit. ConfigError for any other text.

    >>> limit_s("1:30:00"), limit_s("90"), limit_s("2-12")
    (5400, 5400, 216000)
    """
    if text is None or text.lower() in ("unlimited", "infinite"):
        return None
    for form, _ in _TIME_FORMS:
        if found := form.fullmatch(text):
            seconds = sum(_SECONDS_OF[unit] * int(size) for unit, size in found.groupdict().items() if size)
            return seconds or None  # sbatch takes 0 as no limit
    forms = ", ".join(name for _, name in _TIME_FORMS)
    raise ConfigError(f"job.time {text!r} is no time limit: {forms}", "for example 02:00:00")
