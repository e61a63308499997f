"""Lines that Megatron-LM and its forks print beside those of megatron.py."""

from hpc_gpt.reader.pattern import Dialect, Pattern, entries, line

_ALCF = {
    "consumed_samples": "consumed_samples", "consumed_tokens": "consumed_tokens", "learning_rate": "lr",
    "elapsed_time_per_iteration_ms": "step_ms", "global_batch_size": "global_batch", "lm loss": "loss",
    "loss_scale": "loss_scale", "grad_norm": "grad_norm", "number_of_skipped_iterations": "skipped",
    "number_of_nan_iterations": "nan", "samples_per_second": "samples_per_s", "actual_seqlen": "seq",
    "tokens_per_gpu_per_second_tgs": "tokens_per_s_gpu", r"(?:\[LM\])?TFLOPs": "tflops",
}  # fmt: skip


def _size(name: str, field: str) -> Pattern:
    """A size in the line of the world size. Versions differ in hyphens, commas, and the text between them."""
    return Pattern(
        "fact",
        rf"using world size: \d{{1,9}},[^|]{{0,300}}?(?<![a-z]-){name}[ -]size: (?P<{field}>\d{{1,9}})",
    )


DIALECTS = (
    # Iteration lines of the Argonne fork of Megatron-DeepSpeed: an equals sign after each name.
    Dialect("megatron_alcf", engine="megatron-lm", patterns=(
        Pattern("step", r"\biteration= {0,12}(?P<step>\d{1,12})/ {0,12}(?P<steps_planned>\d{1,12}) (?=\|)"
            + entries(r"\| NAME= {0,12}", _ALCF, r"(?= \|)"), literal="elapsed_time_per_iteration_ms="),
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
        Pattern("memory", r"(?:\[Rank (?P<rank>\d{1,7})\] )?\(after \d{1,12} iterations\) memory \(GB\) \|",
            keys={"mem-max-allocated-gigabytes": "memory_allocated_gb", "mem-max-reserved-gigabytes": "memory_reserved_gb"}),
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
