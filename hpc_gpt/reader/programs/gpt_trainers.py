"""Programs that train GPTs: karpathy's and their descendants, torchtune, Composer, OLMo, verl, and a Trainer's state."""

from collections.abc import Mapping

from hpc_gpt.reader.lines.arguments import Arguments, without_unknown
from hpc_gpt.reader.lines.fields import Fields
from hpc_gpt.reader.lines.pattern import (
    CLOCK,
    END,
    LINE_START,
    NUMBER,
    OF_STEPS,
    START,
    STEP,
    Dialect,
    Kind,
    Pattern,
    figures,
    has,
    later,
    line,
    settings,
)

_COMPOSER = {
    "max_seq_len": "seq", "global_train_batch_size": "global_batch", "n_gpus": "gpus", "n_params": "params",
    "num_gpus_per_node": "gpus_per_node", "num_nodes": "nodes", "d_model": "hidden", "n_layers": "layers",
    "n_heads": "heads",
}  # fmt: skip
_FLOAT = r"(?:-?\d{1,20}\.\d{4}|nan|inf|-inf)"


def _composer(name: str, group: str, number: str = _FLOAT, kind: Kind = "more") -> Pattern:
    return Pattern(kind, rf"\bTrain {name}: (?P<{group}>{number})" + END, literal=f"Train {name}: ")


_LLM_C = rf"\bstep {{1,8}}{STEP}{OF_STEPS}"
_LLM_C_HEADER = {"vocab_size": "vocab", "num_heads": "heads", "channels": "hidden", "num_parameters": "params"}


def _row(name: str, group: str, number: str = r"\d{1,20}") -> Pattern:
    """A row of the parameter table that llm.c prints first."""
    return Pattern("fact", START + rf"\| {name} {{1,24}}\| (?P<{group}>{number}) {{0,60}}\|", literal=f"| {name}")


# A step and its times, which other fields may surround.
_MODDED = rf"\bstep:{STEP}{OF_STEPS}(?= )" + has(rf" train_time:{NUMBER}m?s\b", rf" step_avg:{NUMBER}ms\b")
_TIMES = " elapsed_ms[ms]=train_time elapsed_s[s]=train_time"

_OLMO = {
    "train/CrossEntropyLoss": "loss", "train/CE loss": "loss",
    "train/LoadBalancingLoss": "balance_loss", "train/load balancing loss": "balance_loss", "train/router Z loss": "z_loss",
    "train/MoEZLoss": "z_loss",
    "optim/total_grad_norm": "grad_norm", "optim/total grad norm": "grad_norm", "optim/LR (group 0)": "lr",
    "throughput/total_tokens": "consumed_tokens", "throughput/total tokens": "consumed_tokens",
    "throughput/device/tokens_per_second": "tokens_per_s_gpu", "throughput/device/TPS": "tokens_per_s_gpu",
    "throughput/device/MFU": "mfu_percent", "gpu_memory/GPU reserved mem (GiB)": "memory_reserved_gib",
    "System/Peak GPU Memory (MB)": "memory_allocated_mb",
}  # fmt: skip

_OLMO_CONFIGURATION = (
    "hidden=d_model layers=n_layers heads=n_heads kv_heads=n_kv_heads seq=max_sequence_length vocab_unpadded=vocab_size"
    " vocab=embedding_size global_batch=global_train_batch_size micro_batch=device_train_microbatch_size"
    " micro_batches=device_train_grad_accum"
)

_VERL = (
    "loss=actor/pg_loss grad_norm=actor/grad_norm lr=actor/lr step_s=timing_s/step tokens_per_s_gpu$=perf/throughput"
    " memory_allocated_gib=perf/max_memory_allocated_gb|actor/perf/max_memory_allocated_gb"
    " memory_reserved_gib=perf/max_memory_reserved_gb|actor/perf/max_memory_reserved_gb"
)
_VERL_SETTINGS = "train_batch_size|n_gpus_per_node|nnodes|ppo_micro_batch_size_per_gpu|enable_gradient_checkpointing"


def _verl(texts: Mapping[str, str]) -> Fields:
    arguments = Arguments(texts)
    return without_unknown(
        {
            "global_batch": arguments.whole("train_batch_size"),
            "micro_batch": arguments.whole("ppo_micro_batch_size_per_gpu"),
            "gpus_per_node": arguments.whole("n_gpus_per_node"),
            "nodes": arguments.whole("nnodes"),
            "recompute": {True: "full", False: "none", None: None}[arguments.true("enable_gradient_checkpointing")],
        }
    )


DIALECTS = (
    # karpathy's build-nanogpt and its many copies: tokens/s of the whole job, steps counted from 0. Its log.txt has
    # three columns.
    Dialect("build_nanogpt", engine="build-nanogpt", patterns=(
        # A line with `lrm`, or the share of steps that are done, is nanochat's.
        figures(rf"\bstep:? {{1,8}}{STEP}(?=,| \|)(?! \|[^\n]{{0,400}} lrm: )(?=[^\n]{{0,400}} dt: )", "tok/sec: ",
            "loss lr grad_norm=norm step_ms[ms]=dt step_s[s]=dt tokens_per_s$=tok/sec"),
        Pattern("step", LINE_START + r"(?P<step>\d{1,12}) train (?P<loss>\d{1,4}\.\d{1,8})" + END),
        Pattern("eval", LINE_START + r"(?P<step>\d{1,12}) val (?P<loss_eval>\d{1,4}\.\d{1,8})" + END),
        line("eval", "validation loss: {loss_eval}", LINE_START, weak=True),
        line("fact", "total desired batch size: {global_batch_tokens}", START),
        line("fact", "=> calculated gradient accumulation steps: {micro_batches}", START),
    )),
    # MosaicML's Composer, as LLM Foundry runs it: a line that names the batch, then one line per metric.
    # `throughput/…_per_sec` is for the whole job, `throughput/device/…` per GPU. Memory is in 10^9 bytes; only the peak
    # of the allocated memory is read. Metrics without a line of their batch are counted as left out. Each metric ends
    # its line and has four decimals: fewer mean that the line was cut.
    Dialect("composer", engine="composer", patterns=(
        Pattern("step", r"(?:(?<!\])|(?<=\[epoch=1\]))\[batch=(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12})\]:"),
        # The count of batches restarts with each epoch.
        Pattern("step", r"\[epoch=(?P<epoch>[2-9]|[1-9]\d{1,6})\]\[batch=\d{1,12}/\d{1,12}\]:"),
        _composer("loss/train/total", "loss"),
        _composer("time/token", "consumed_tokens", r"\d{1,24}"),
        _composer("time/sample", "consumed_samples", r"\d{1,24}"),
        _composer("throughput/tokens_per_sec", "tokens_per_s"),
        _composer("throughput/samples_per_sec", "samples_per_s"),
        _composer("throughput/device/tokens_per_sec", "tokens_per_s_gpu"),
        _composer("throughput/device/samples_per_sec", "samples_per_s_gpu"),
        _composer("throughput/device/mfu", "mfu"),
        _composer("l2_norm/grad/global", "grad_norm"),
        _composer("lr-DecoupledAdamW/group0", "lr", NUMBER),
        _composer("memory/peak_allocated_mem", "memory_allocated_gb", kind="memory"),
        _composer("memory/peak_reserved_mem", "memory_reserved_gb", kind="memory"),
        # Before September 2023 Composer printed current, not peak, memory. They are equal unless the allocator frees
        # memory.
        _composer("memory/reserved_mem", "memory_reserved_gb", kind="memory"),
        _composer("trainer/device_train_microbatch_size", "micro_batch", r"\d{1,9}", kind="fact"),
        Pattern("eval", rf"\bEval metrics/\S{{1,80}}/LanguageCrossEntropy: (?P<loss_eval>{_FLOAT})" + END),
        Pattern("fact", LINE_START + r"precision: (?:amp_)?(?P<dtype>bf16|fp16|fp32)" + END, weak=True),
        Pattern("fact", r"\bUsing precision Precision\.(?:AMP_)?(?P<dtype>BF16|FP16|FP32)" + END),
        Pattern("fact", LINE_START + r"cfg\.n_params=(?P<params>\d\.\d\de\+\d\d)" + END),
        *settings("NAME: FIELD", _COMPOSER, LINE_START, weak=True),
    )),
    # llm.c and its PyTorch reference. The first step includes set-up. The MFU is -100 % on a GPU that its table lacks.
    Dialect("llm_c", engine="llm.c", patterns=(
        figures(rf"{_LLM_C} \|(?=[^\n]{{0,400}}\d tok/s)", " tok/s",
            "loss=loss|train_loss grad_norm=norm lr step_ms[ms]= mfu_percent+[%]= tokens_per_s[tok/s]="),
        figures(rf"{_LLM_C}(?=: train loss [^\n]{{1,100}} ms, {NUMBER} tok/s\))", ": train loss ",
            "loss=train_loss grad_norm=norm lr step_ms[ms]= tokens_per_s[tok/s]="),
        line("step", "step {step}: train loss {loss} (took {step_ms} ms)", START),
        Pattern("step", START + rf"s:(?P<step>\d{{1,12}}) trl:(?P<loss>{NUMBER})(?= lr:|\s*$)"),
        line("eval", "val loss {loss_eval}", LINE_START, weak=True),
        line("eval", "s:{step} tel:{loss_eval}", START),
        _row("micro batch size B", "micro_batch"),
        _row("sequence length T", "seq"),
        _row("total batch size", "global_batch_tokens"),
        _row("vocab_size V", "vocab_unpadded"),
        _row("padded_vocab_size Vp", "vocab"),
        _row("num_layers L", "layers"),
        _row("num_heads NH", "heads"),
        _row("channels C", "hidden"),
        _row("num_parameters", "params"),
        _row("num_processes", "gpus"),
        _row("zero_stage", "zero_stage"),
        # The header of the CPU's and the first CUDA version.
        *settings("NAME: FIELD", _LLM_C_HEADER, LINE_START, weak=True),
        _row("device", "device", r"[^|\n]{1,50}?"),
        Pattern("fact", START + r"\| precision {1,24}\| BF16 {0,60}\|", facts={"dtype": "bf16"}),
        line("fact", "=> setting grad_accum_steps={micro_batches}", START),
        line("memory", "peak memory consumption: {memory_allocated_mib} MiB", START, weak=True),
    )),
    # modded-nanogpt. Its times are sums: `train_time` since training began, without warm-up and validation. `step_avg`
    # is the mean since the start, so the step time is taken from differences of `train_time`, exact to 1 ms. Older logs
    # print whole milliseconds, and `nan` for the mean of the first ten steps.
    Dialect("modded_nanogpt", engine="modded-nanogpt", dtype="bf16", patterns=(
        figures(f"{_MODDED}(?![^\\n]{{0,400}} val_loss:)", " step_avg:", "loss$=train_loss" + _TIMES),
        Pattern("fact", START
            + r"Running PyTorch \S{1,60} compiled for CUDA \S{1,20} on (?P<device>[^\n]{3,60}?) with world_size "
            r"(?P<gpus>\d{1,5})(?=\s*$)", facts={"nodes": 1}),
        # It runs on one node: accumulation steps times GPUs are 8.
        Pattern("fact", START + r"Running [Pp]y[Tt]orch \d\S{1,60} compiled for CUDA \S{1,20}(?=\s*$)",
            facts={"nodes": 1}),
        Pattern("fact", START
            + r"Running on device_name=(?P<device>[^\n]{3,60}?) with world_size=(?P<gpus>\d{1,5})(?=\s*$)"),
        # Parameter Golf's header.
        line("fact", "model_params:{params}", START, weak=True),
        line("fact", "world_size:{gpus} grad_accum_steps:{micro_batches}", START),
        Pattern("fact", START
            + r"attention_mode:\w{1,12} num_heads:(?P<heads>\d{1,5}) num_kv_heads:(?P<kv_heads>\d{1,5})(?=\s*$)"),
        line("fact", "train_batch_tokens:{global_batch_tokens} train_seq_len:{seq} iterations:", START),
        Pattern("memory", START + r"peak memory (?:consumption|allocated): (?P<memory_allocated_mib>\d{1,9}) MiB"
            r"(?: reserved: (?P<memory_reserved_mib>\d{1,9}) MiB)?", weak=True),
    )),
    # modded-nanogpt's evaluations: the loss, and the time of training, which does not include them. Some of its logs
    # have no other lines of steps.
    Dialect("modded_nanogpt_evals", engine="modded-nanogpt", patterns=(
        figures(_MODDED + has(rf" val_loss:{NUMBER}(?=\s|$)"), "val_loss:", _TIMES),
        figures(rf"\bstep:{STEP}/\d{{1,12}}(?= )" + has(" train_time:"), "val_loss:", "loss_eval$=val_loss", kind="eval"),
    )),
    # OLMo and OLMo-core: a line that names the step, then one line per metric. Device throughput is per GPU. OLMo-core
    # rounds to four decimals below 1 and prints K, M, B above; `BPS` is too coarse for a step time. Each metric ends
    # its line.
    Dialect("olmo", engine="olmo", patterns=(
        Pattern("step",
            r"\[step=(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12}|\?\?\?)(?:,epoch=\d{1,9}[\],]|, eta=|\](?=\s*$))"),
        *settings("NAME=FIELD", _OLMO, r"(?<!\S)", "more"),
        # A line for each layer of a mixture.
        Pattern("more", rf"(?<!\S)train/(?:block \d{{1,4}}/)?(?:batch )?load imbalance=(?P<expert_load>{NUMBER})" + END),
        Pattern("more", r"(?<!\S)throughput/device/flopsPS=(?P<tflops>\d{1,5}(?:\.\d{1,4})?)T" + END),
        Pattern("fact", r"\bTotal number of parameters: (?P<params>\d{1,3}(?:,\d{3}){1,9})" + END, weak=True),
        # The whole configuration on one line. A `d_model` of another program has no such batch.
        figures(r"\bTrainConfig\((?=[^\n]{0,20000}\bdevice_train_microbatch_size=)"
            + later("[(, ]precision='(?:amp_)?", "dtype", "(?=')", r"\w{4,8}", r"[^\n]{0,20000}?"),
            "TrainConfig(", _OLMO_CONFIGURATION, kind="fact"),
        line("fact", "Building transformer with {params} total params,", weak=True),
    )),
    # torchtune's logs on disk: one line per step. Tokens/s are per GPU, memory in GiB; the last figure ends the line.
    Dialect("torchtune", engine="torchtune", patterns=(
        figures(rf"\bStep {STEP} \|(?= loss:{NUMBER} )", " | loss:", "loss lr tokens_per_s_gpu$=tokens_per_second_per_gpu"
            " grad_norm$ memory_allocated_gib=peak_memory_alloc memory_reserved_gib$=peak_memory_reserved"),
        # The label of its bar: the epoch and the step, in some versions the step of the epoch. The bar's goal is for one
        # epoch.
        Pattern("step", rf"(?<![\d|])(?P<epoch>\d{{1,6}})\|(?P<step>\d{{1,12}})\|Loss: (?P<loss>{NUMBER})(?=:? |\s*$)"
            rf"(?::? {{1,8}}\d{{1,3}}%\|[^|\n]{{0,400}}\| *\d{{1,12}}/(?=(?P<epoch_steps>\d{{1,12}}))(?P<steps_planned>\d{{1,12}}) "
            rf"\[(?P<elapsed_s>{CLOCK})<)?"),
        line("fact", "epochs: {epochs}", LINE_START, own=True),
        Pattern("fact", r"\bINFO:torchtune\.utils\._?logging:", facts={"engine": "torchtune"}),
        line("fact", "batch_size: {micro_batch}", LINE_START, own=True),
        line("fact", "gradient_accumulation_steps: {micro_batches}", LINE_START, own=True),
        Pattern("fact", LINE_START + r"dtype: (?P<dtype>bf16|fp16|fp32)" + END, own=True),
    )),
    # verl: a line per step with all metrics. Its loss is the policy's, its throughput tokens/s per GPU, its memory in
    # GiB. A step also generates and scores its samples. The tokens per step vary. Its batch counts prompts, and the
    # lengths in its configuration are the longest ones: no sequence length is read. The configuration is printed as by
    # Python's pprint, or in the command of a shell; a pool of 0 nodes is not used.
    Dialect("verl", engine="verl", interpret=_verl,
        flags=("a step of verl also generates its samples; its loss is the policy's",), patterns=(
        figures(rf"\bstep:{STEP}(?= - [^\n]{{0,20000}}? - timing_s/step:)", "timing_s/step:", _VERL),
        *(
            Pattern(
                "argument",
                before + rf"(?P<key>{_VERL_SETTINGS}){between}(?P<value>(?!0\b)\w{{1,12}}){after}",
                literal=literal,
            )
            for literal, before, between, after in (  # the lines of Ray's actors are labelled
                (" pid=", r"(?<=[{ ]')", "': ", r"(?=[,}])"),
                ("actor_rollout_ref.", r"(?<=[\w]\.)", "=", r"(?=\s)"),
            )
        ),
        line("fact", "Total training steps: {steps_planned}", weak=True),
    )),
)  # fmt: skip
