"""Megatron-LM's lines during training, from 2020 to now, and what it and its forks print beside them."""

from hpc_gpt.reader.lines.pattern import STEP, Dialect, Pattern, figures, later, line

# The iteration line, in every form since 2020.
_HEAD = r"\biteration {1,20}(?P<step>\d{1,12}) ?/ {0,20}(?P<steps_planned>\d{1,12}) {0,4}\|"
# `lm loss` is missing if every iteration since the last line was skipped. `(s)` is BigScience's; forks print the other
# throughputs, too, which are all per GPU. Of a mixture: Megatron-LM's losses are before their coefficients, the sum over
# the layers in DeepSpeed's fork after.
NAMES = """
    consumed_samples consumed_tokens
    step_ms=elapsed_time_per_iteration_(ms)
    step_s=elapsed_time_per_iteration_(s)|elapsed_time_per_iteration_(sec)
    lr=learning_rate global_batch=global_batch_size loss=lm_loss|loss
    balance_loss=load_balancing_loss|moe_loss
    balance_loss_of_sequences=seq_load_balancing_loss
    balance_loss_of_ranks=global_load_balancing_loss
    z_loss expert_load=load_imbalance loss_scale grad_norm
    skipped=number_of_skipped_iterations nan=number_of_nan_iterations
    samples_per_s=samples_per_second|samples/sec
    tokens_per_s=tokens_per_second
    tokens_per_s_gpu=tokens_per_gpu_per_second_(tgs)|tokens_per_GPU_per_second|tokens_per_GPU_(tokens/s/GPU)|tokens/s/GPU
    tokens_per_s_gpu=tokens/sec/gpu|tokens_per_second_per_gpu|tokens/s/GPU_inst/harmonic_mean
    tflops=TFLOPs|TFLOPS|throughput_per_GPU_(TFLOP/s/GPU)|compute_per_GPU_(TFLOP/s/GPU)|throughput_(TFLOP/s/GPU)
    tflops=model_TFLOP/s/GPU
    mfu_percent=MFU|mfu
"""
_NUMBER = r"\d{1,9}\.\d{1,16}"
ITERATION = figures(_HEAD, "elapsed time per iteration", NAMES)

MEGATRON = Dialect(
    name="megatron",
    engine="megatron-lm",
    patterns=(
        ITERATION,
        # progress.txt of --log-progress: a line per start and per checkpoint. The throughput is the mean since the start.
        Pattern(
            "start",
            r"\bJob ID: (?P<job_id>[\w.-]{0,40})\t# GPUs: (?P<gpus>\d{1,7})\tStarting job(?=\s*$)",
            literal="\tStarting job",
        ),
        Pattern(
            "step",
            r"\t# GPUs: \d{1,7}\tSav(?:ed|ing) (?:async )?checkpoint\tIteration: (?P<step>\d{1,12})\t"
            r"(?=(?:Job throughput: (?P<tflops>\d{1,9}\.\d{1,6}) TFLOP/s/GPU\t)?)"
            + later(r"\tTokens \(in billions\): ", "consumed_tokens_billions", r"(?=\s|$)"),
            literal="\tJob throughput: ",
        ),
        Pattern("more", r"\bEffective Tera Flops per GPU: (?P<tflops>\d{1,9}\.?\d{0,6})\b"),
        line("fact", "Effective Tera Flops per GPU: {} and total parameters {params_billions} B"),
        Pattern(
            "timers",
            r"(?<![\]\d] )(?<!iteration )\btime \(ms\)(?P<value>(?: \| [^|:]{1,60}: \d{1,12}\.\d{1,6}){0,200})",
        ),
        Pattern(
            "timers",
            r"^[^|.]{0,40}?(?P<key>[a-z][a-z0-9_/-]{1,60}(?: [a-z0-9_/-]{1,30}){0,4}) \.{1,48}: "
            r"(?:\(\d{1,12}\.\d{1,6}, )?(?P<value>\d{1,12}\.\d{1,6})\)?\s*$",
            literal=".: ",
        ),
        Pattern(
            "memory",
            r"(?:\[Rank (?P<rank>\d{1,7})\] )?\(?after (?P<after_steps>\d{1,12}) iterations\)? memory \(MB\)"
            rf" \| allocated: {_NUMBER} \| max allocated: (?P<memory_allocated_mib>{_NUMBER})"
            rf" \| (?:reserved|cached): {_NUMBER} \| max (?:reserved|cached): (?P<memory_reserved_mib>{_NUMBER})",
        ),
        Pattern(
            "eval",
            r"\bloss at (?:iteration {1,20}(?P<step>\d{1,12})\b|the end of training\b)(?![^|]{0,80}\btest\b)[^|]{0,80}"
            r"\| {0,4}lm[ _-]loss value: (?P<loss_eval>[^| ]{1,24}) {0,4}\|",
        ),
        Pattern(
            "save",
            r"\bsuccessfully saved (?P<of>local )?checkpoint (?:at|from) iteration {1,20}(?P<step>\d{1,12})(?(of)\b| )",
        ),
        Pattern(
            "save",
            r"\bCheckpoint Save GB: [\d.]{1,16}, GB/Sec: [\d.]{1,16}, Latency\(second\): (?P<save_s>\d{1,9}\.\d{1,6})\b",
        ),
        Pattern(
            "fact",
            r"\bsuccessfully loaded checkpoint from [^|]{1,4000} at iteration {1,20}(?P<resumed_step>\d{1,12})\b",
        ),
        Pattern("fact", r"\[(?:before|after) [^\]]{1,80}\] datetime: "),
        line("end", "[after training is done] datetime: ", ended="done"),
        Pattern("end", r"\[exiting program at iteration \d", ended="done"),
        Pattern("end", r"\[exiting program after [\d.]{1,16} minutes\b", ended="walltime"),
        line("end", "[exiting program after receiving SIGTERM", ended="stopped"),
        line("end", "[Detected kill switch at ", ended="stopped"),
    ),
)

_ALCF = """
    consumed_samples consumed_tokens lr=learning_rate step_ms=elapsed_time_per_iteration_ms global_batch=global_batch_size
    loss=lm_loss loss_scale grad_norm skipped=number_of_skipped_iterations nan=number_of_nan_iterations seq=actual_seqlen
    samples_per_s=samples_per_second tokens_per_s_gpu=tokens_per_gpu_per_second_tgs tflops=TFLOPs
"""


def _size(name: str, field: str) -> Pattern:
    """A size in the line of the world size. Versions differ in hyphens, commas, and the text between them."""
    return Pattern(
        "fact",
        rf"using world size: \d{{1,9}},[^|]{{0,300}}?(?<![a-z]-){name}[ -]size: (?P<{field}>\d{{1,9}})",
    )


DIALECTS = (
    MEGATRON,
    # Iteration lines of the Argonne fork of Megatron-DeepSpeed: an equals sign after each name.
    Dialect("megatron_alcf", engine="megatron-lm", patterns=(
        figures(rf"\biteration= {{0,12}}{STEP}/ {{0,12}}(?P<steps_planned>\d{{1,12}}) (?=\|)",
            "elapsed_time_per_iteration_ms=", _ALCF),
        line("fact", ":model_provider] Number of parameters in model: {params}"),
        Pattern("fact",
            r"> number of parameters on \(tensor, pipeline\) model parallel rank \((?P<rank_name>\d{1,6}, \d{1,6})\)="
            r"(?P<rank_params>\d{1,15})(?=\s*$)"),
    )),
    # Megatron-Bridge's lines in addition to Megatron's: its own throughput, memory in 10^9 bytes.
    Dialect("megatron_bridge", engine="megatron-lm", patterns=(
        # Precedes the iteration line of the same step and has no step number.
        Pattern("step",
            r"\bStep Time : \d{1,9}\.\d{1,4}s GPU utilization: (?P<tflops>\d{1,6}\.\d{1,4})MODEL_TFLOP/s/GPU"),
        figures(r"(?:\[Rank (?P<rank>\d{1,7})\] )?\(after \d{1,12} iterations\) memory \(GB\) \|", "memory (GB) |",
            "memory_allocated_gb$=mem-max-allocated-gigabytes memory_reserved_gb$=mem-max-reserved-gigabytes", kind="memory"),
    )),
    # Lines of Megatron-LM and its forks before training: world size, parallel sizes, batch, parameter counts.
    Dialect("megatron_run", engine="megatron-lm", patterns=(
        Pattern("start", r"(?<!\(\) )\busing world size: (?P<gpus>\d{1,9}),"),
        Pattern("start", r"(?<!\(\) )\busing world size: (?P<gpus>\d{1,9}) and model-parallel size: (?P<tp>\d{1,9})\b"),
        _size("data-parallel", "dp"),
        _size("context-parallel", "cp"),
        _size("sequence-parallel", "cp"),
        _size("tensor-model-parallel", "tp"),
        _size("pipeline-model-parallel", "pp"),
        Pattern("fact", r"> initializ(?:ing|ed) (?:tensor )?model parallel with size (?P<tp>\d{1,9})"),
        Pattern("fact", r"> initializ(?:ing|ed) pipeline model parallel with size (?P<pp>\d{1,9})"),
        Pattern("fact", r"\busing torch\.(?:float16|half) for parameters", facts={"dtype": "fp16"}),
        line("fact", "using torch.bfloat16 for parameters", facts={"dtype": "bf16"}),
        Pattern("fact", r"\busing torch\.float(?:32)? for parameters", facts={"dtype": "fp32"}),
        Pattern("fact", r"\bsetting number of micro-?batches to constant (?P<micro_batches>\d{1,9})\b"),
        Pattern("fact", r"\bsetting global batch size to (?P<global_batch>\d{1,9})\b"),
        Pattern("fact", r"\bsetting training iterations to (?P<steps_planned>\d{1,12})\b"),
        line("fact", "> padded vocab (size: {vocab_unpadded}) with {} dummy tokens (new size: {vocab})"),
        Pattern("fact", r"> number of parameters on \([a-z_, ]{1,60}\) model parallel rank "
            r"\((?P<rank_name>\d{1,6}(?:, \d{1,6}){1,3})\): (?P<rank_params>\d{1,15})\b"),
        Pattern("fact",
            r"> number of parameters on model parallel rank (?P<rank_name>\d{1,6}): (?P<rank_params>\d{1,15})\b"),
        # Under ZeRO every rank prints the rounded count of the whole model.
        line("fact", "> number of parameters on model parallel rank {} {params_billions} Billion"),
        Pattern("fact", r"\bestimated model parameters: (?P<params_estimated_billions>\d{1,6}\.\d{1,16})"),
        Pattern("fact", r"\bTotal number of parameters in billions: {1,4}(?P<params_billions>\d{1,6}\.\d{1,9})"),
    )),
    # The model size that BigScience's scripts of May 2021 worked out and echoed.
    Dialect("model_size_echo",
        flags=("`Model size: 61B` was read as 61 x 2^30 parameters, as the scripts worked it out before 2021-05-28; "
        "a later size is in 10^9",), patterns=(
        Pattern("fact", r"^(?:[^|]{0,40}[\]:] ?)?Model size: (?P<params_gi>\d{1,6})B\s*$"),
    )),
)  # fmt: skip
