"""Megatron-LM's lines during training, from 2020 to now, and those of forks that print the same."""

from hpc_gpt.reader.pattern import Dialect, Pattern, later, line

# The iteration line, in every form since 2020.
_HEAD = r"\biteration {1,20}(?P<step>\d{1,12}) ?/ {0,20}(?P<steps_planned>\d{1,12}) {0,4}\|"
# {field (reader/pattern.py): the keys between the bars after the head that give it}. `lm loss` is missing if every
# iteration since the last line was skipped. `(s)` is BigScience's; forks print the other throughputs, too, which are all
# per GPU.
_KEYS_OF = {
    "consumed_samples": ("consumed samples",),
    "consumed_tokens": ("consumed tokens",),
    "step_ms": ("elapsed time per iteration (ms)",),
    "step_s": ("elapsed time per iteration (s)", "elapsed time per iteration (sec)"),
    "lr": ("learning rate",),
    "global_batch": ("global batch size",),
    "loss": ("lm loss", "lm-loss", "lm_loss", "loss"),
    # Of a mixture: Megatron-LM's losses are before their coefficients, the sum over the layers in DeepSpeed's fork after.
    "balance_loss": ("load_balancing_loss", "moe loss", "moe_loss"),
    "balance_loss_of_sequences": ("seq_load_balancing_loss",),
    "balance_loss_of_ranks": ("global_load_balancing_loss",),
    "z_loss": ("z_loss",),
    "expert_load": ("load_imbalance",),
    "loss_scale": ("loss scale",),
    "grad_norm": ("grad norm",),
    "skipped": ("number of skipped iterations",),
    "nan": ("number of nan iterations",),
    "samples_per_s": ("samples per second", "samples/sec"),
    "tokens_per_s": ("tokens per second",),
    "tokens_per_s_gpu": (
        "tokens per gpu per second (tgs)", "tokens per GPU per second", "tokens per GPU (tokens/s/GPU)", "tokens/s/GPU",
        "tokens/sec/gpu", "tokens-per-second-per-gpu", "tokens/s/GPU inst/harmonic mean",
    ),
    "tflops": (
        "TFLOPs", "TFLOPS", "throughput per GPU (TFLOP/s/GPU)", "compute per GPU (TFLOP/s/GPU)",
        "throughput (TFLOP/s/GPU)", "model TFLOP/s/GPU",
    ),
    "mfu_percent": ("MFU", "mfu"),
}  # fmt: skip
_KEYS = {key: name for name, keys in _KEYS_OF.items() for key in keys}
_NUMBER = r"\d{1,9}\.\d{1,16}"
ITERATION = Pattern("step", _HEAD, literal="elapsed time per iteration", keys=_KEYS, closed=True)

DIALECT = Dialect(
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
