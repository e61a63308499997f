"""Megatron-LM's lines during training, from 2020 to now, and those of forks that print the same."""

from hpc_gpt.readers.pattern import Dialect, Pattern

# The iteration line, in every form since 2020.
_HEAD = r"\biteration {1,20}(?P<step>\d{1,12}) ?/ {0,20}(?P<steps_planned>\d{1,12}) {0,4}\|"
# {field (readers/pattern.py): the keys between the bars after the head that give it}. `lm loss` is missing if every
# iteration since the last line was skipped. `(s)` is BigScience's; the other throughputs, which are all of one GPU, are
# of forks too.
_KEYS_OF = {
    "consumed_samples": ("consumed samples",),
    "consumed_tokens": ("consumed tokens",),
    "step_ms": ("elapsed time per iteration (ms)",),
    "step_s": ("elapsed time per iteration (s)", "elapsed time per iteration (sec)"),
    "lr": ("learning rate",),
    "global_batch": ("global batch size",),
    "loss": ("lm loss", "lm-loss", "lm_loss", "loss"),
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
ITERATION = Pattern("step", "elapsed time per iteration", _HEAD, keys=_KEYS, closed=True)

DIALECT = Dialect(
    name="megatron",
    engine="megatron-lm",
    patterns=(
        ITERATION,
        Pattern("more", "Effective Tera Flops", r"\bEffective Tera Flops per GPU: (?P<tflops>\d{1,9}\.?\d{0,6})\b"),
        Pattern(
            "fact",
            "total parameters",
            r"\bEffective Tera Flops per GPU: [\d.]{1,16} and total parameters (?P<params_billions>[\d.]{1,16}) B",
        ),
        Pattern(
            "timers",
            "time (ms)",
            r"(?<![\]\d] )(?<!iteration )\btime \(ms\)(?P<value>(?: \| [^|:]{1,60}: \d{1,12}\.\d{1,6}){0,200})",
        ),
        Pattern(
            "timers",
            ".: ",
            r"^[^|.]{0,40}?(?P<key>[a-z][a-z0-9_/-]{1,60}(?: [a-z0-9_/-]{1,30}){0,4}) \.{1,48}: "
            r"(?:\(\d{1,12}\.\d{1,6}, )?(?P<value>\d{1,12}\.\d{1,6})\)?\s*$",
        ),
        Pattern(
            "memory",
            "memory (MB)",
            r"(?:\[Rank (?P<rank>\d{1,7})\] )?\(?after (?P<after_steps>\d{1,12}) iterations\)? memory \(MB\)"
            rf" \| allocated: {_NUMBER} \| max allocated: (?P<memory_allocated_mib>{_NUMBER})"
            rf" \| (?:reserved|cached): {_NUMBER} \| max (?:reserved|cached): (?P<memory_reserved_mib>{_NUMBER})",
        ),
        Pattern(
            "eval",
            "loss value: ",
            r"\bloss at (?:iteration {1,20}(?P<step>\d{1,12})\b|the end of training\b)(?![^|]{0,80}\btest\b)[^|]{0,80}"
            r"\| {0,4}lm[ _-]loss value: (?P<loss_eval>[^| ]{1,24}) {0,4}\|",
        ),
        Pattern(
            "save",
            "successfully saved",
            r"\bsuccessfully saved (?:local )?checkpoint (?:at|from) iteration {1,20}(?P<step>\d{1,12})\b",
        ),
        Pattern(
            "save",
            "Checkpoint Save GB: ",
            r"\bCheckpoint Save GB: [\d.]{1,16}, GB/Sec: [\d.]{1,16}, Latency\(second\): (?P<save_s>\d{1,9}\.\d{1,6})\b",
        ),
        Pattern(
            "fact",
            "successfully loaded",
            r"\bsuccessfully loaded checkpoint from [^|]{1,4000} at iteration {1,20}(?P<resumed_step>\d{1,12})\b",
        ),
        Pattern("fact", "] datetime: ", r"\[(?:before|after) [^\]]{1,80}\] datetime: "),
        Pattern("end", "after training is done", r"\[after training is done\] datetime: ", ended="done"),
        Pattern("end", "exiting program a", r"\[exiting program at iteration \d", ended="done"),
        Pattern("end", "exiting program a", r"\[exiting program after [\d.]{1,16} minutes\b", ended="walltime"),
        Pattern("end", "exiting program a", r"\[exiting program after receiving SIGTERM", ended="stopped"),
        Pattern("end", "Detected kill switch", r"\[Detected kill switch at ", ended="stopped"),
    ),
    specimen="""\
 iteration       30/    1000 | consumed samples:          120 | elapsed time per iteration (ms): 2900.1 | learning rate: 1.653E-04 | global batch size:     4 | lm loss: 3.765656E+01 | loss scale: 14848.6 | grad norm: 9.376 | number of skipped iterations:   1 | number of nan iterations:   0 |
time (ms) | forward-compute: 119.61 | forward-recv: 574.45 | backward-compute: 462.03 | optimizer: 87.24
[Rank 51] (after 20 iterations) memory (MB) | allocated: 13867.778663 | max allocated: 25889.734483933 | reserved: 28321.8 | max reserved: 28321.8[Rank 49] (after 20 iterations) memory (MB) | allocated: 15550.670537 | max allocated: 25889.734483933 | reserved: 28553.6 | max reserved: 28553.6
 iteration        1/    1000 | elapsed time per iteration (ms): 126553.0 | learning rate: 1.986E-05 | lm loss: 1.601685E+01 | loss scale: 1206.4 | number of skipped iterations:   0 | number of nan iterations:   0 |
after 1 iterations memory (MB) | allocated: 14385.0052 | max allocated: 21372.7530703900 | reserved: 20128.5 | max reserved: 20128.5
Effective Tera Flops per GPU: 41.64 and total parameters 52.266 B
 [default7]: iteration    12821/  111746 | consumed samples:      9806759 | consumed tokens:  20329278416 | elapsed time per iteration (s): 156.50 | learning rate: 5.200E-05 | global batch size:  2048 | lm loss: 2.837022E+00 | grad norm: 0.405 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 19.800 | TFLOPs: 120.83 |
 validation loss at iteration 12968 | lm loss value: 2.588384E+00 | lm loss PPL: 1.916443E+01 |
[2024-01-19 07:06:15] iteration        5/     100 | consumed samples:          640 | elapsed time per iteration (ms): 17386.7 | throughput per GPU (TFLOP/s/GPU): 464.1 | learning rate: 1.6E-05 | global batch size:   128 | lm loss: 1.6E+01 | loss scale: 1.0 | grad norm: 1.3 | number of skipped iterations:   0 | number of nan iterations:   0 |
    forward-backward ...............................: (18863.55, 19544.18)
  successfully saved checkpoint at iteration     100 to /checkpoints
[after training is done] datetime: 2024-01-19 08:35:03
""",
    seen="bigscience-workshop/bigscience experiments/gpt2-meg and train/tr11-176B-ml; NVIDIA/Megatron-LM training.py, "
    "timers.py and checkpointing.py of 2020 to 2026, from which the last five lines are made",
)
