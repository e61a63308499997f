"""Iteration lines of the Argonne fork of Megatron-DeepSpeed: an equals sign after each name."""

from hpc_gpt.readers.pattern import Dialect, Pattern, line


def _later(name: str, group: str) -> str:
    """A lookahead for a figure later in the line."""
    return rf"(?=(?:[^\n]{{0,800}}?\| {name}= {{0,12}}(?P<{group}>[^| ]{{1,24}}) \|)?)"


DIALECT = Dialect(
    name="megatron_alcf",
    engine="megatron-lm",
    patterns=(
        Pattern(
            "step",
            r"\biteration= {0,12}(?P<step>\d{1,12})/ {0,12}(?P<steps_planned>\d{1,12}) (?=\|)"
            + _later("consumed_samples", "consumed_samples")
            + _later("consumed_tokens", "consumed_tokens")
            + _later("elapsed_time_per_iteration_ms", "step_ms")
            + _later("learning_rate", "lr")
            + _later("global_batch_size", "global_batch")
            + _later("lm loss", "loss")
            + _later("loss_scale", "loss_scale")
            + _later("grad_norm", "grad_norm")
            + _later("number_of_skipped_iterations", "skipped")
            + _later("number_of_nan_iterations", "nan")
            + _later("samples_per_second", "samples_per_s")
            + _later("tokens_per_gpu_per_second_tgs", "tokens_per_s_gpu")
            + _later(r"(?:\[LM\])?TFLOPs", "tflops")
            + _later("actual_seqlen", "seq"),
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
