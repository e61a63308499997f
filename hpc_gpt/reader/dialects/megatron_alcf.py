"""Iteration lines of the Argonne fork of Megatron-DeepSpeed: an equals sign after each name."""

from hpc_gpt.reader.pattern import Dialect, Pattern, entries, line

_FIELDS = {
    "consumed_samples": "consumed_samples", "consumed_tokens": "consumed_tokens", "learning_rate": "lr",
    "elapsed_time_per_iteration_ms": "step_ms", "global_batch_size": "global_batch", "lm loss": "loss",
    "loss_scale": "loss_scale", "grad_norm": "grad_norm", "number_of_skipped_iterations": "skipped",
    "number_of_nan_iterations": "nan", "samples_per_second": "samples_per_s", "actual_seqlen": "seq",
    "tokens_per_gpu_per_second_tgs": "tokens_per_s_gpu", r"(?:\[LM\])?TFLOPs": "tflops",
}  # fmt: skip

DIALECT = Dialect(
    name="megatron_alcf",
    engine="megatron-lm",
    patterns=(
        Pattern(
            "step",
            r"\biteration= {0,12}(?P<step>\d{1,12})/ {0,12}(?P<steps_planned>\d{1,12}) (?=\|)"
            + entries(r"\| NAME= {0,12}", _FIELDS, r"(?= \|)"),
            literal="elapsed_time_per_iteration_ms=",
        ),
        line("fact", ":model_provider] Number of parameters in model: {params}"),
        Pattern(
            "fact",
            r"> number of parameters on \(tensor, pipeline\) model parallel rank \((?P<rank_name>\d{1,6}, \d{1,6})\)="
            r"(?P<rank_params>\d{1,15})(?=\s*$)",
        ),
    ),
)
