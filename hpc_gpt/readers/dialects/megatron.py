"""Megatron-LM's lines during training, from 2020 to now, and those of forks that print the same."""

from __future__ import annotations

from hpc_gpt.engines.megatron_lm import HEAD, KEYS
from hpc_gpt.readers.pattern import Dialect, Pattern

_NUMBER = r"\d{1,9}\.\d{1,16}"

DIALECT = Dialect(
    name="megatron",
    engine="megatron-lm",
    patterns=(
        Pattern(
            "step",
            "elapsed time per iteration",
            HEAD,
            keys=KEYS,
            closed=True,
        ),
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
 iteration       30/    1000 | consumed samples:          120 | elapsed time per iteration (ms): 2767.3 | learning rate: 1.500E-04 | global batch size:     4 | lm loss: 3.282511E+01 | loss scale: 16384.0 | grad norm: 9.804 | number of skipped iterations:   1 | number of nan iterations:   0 |
time (ms) | forward-compute: 148.03 | forward-recv: 508.17 | backward-compute: 415.50 | optimizer: 87.67
[Rank 51] (after 20 iterations) memory (MB) | allocated: 19494.453125 | max allocated: 22106.013671875 | reserved: 26716.0 | max reserved: 26716.0[Rank 49] (after 20 iterations) memory (MB) | allocated: 19494.953125 | max allocated: 22106.013671875 | reserved: 26720.0 | max reserved: 26720.0
 iteration        1/    1000 | elapsed time per iteration (ms): 150471.3 | learning rate: 1.875E-05 | lm loss: 1.279022E+01 | loss scale: 1024.0 | number of skipped iterations:   0 | number of nan iterations:   0 |
after 1 iterations memory (MB) | allocated: 10857.5625 | max allocated: 26118.2294921875 | reserved: 28560.0 | max reserved: 28560.0
Effective Tera Flops per GPU: 41.31 and total parameters 52.005 B
 [default7]: iteration    12695/  115311 | consumed samples:      9841584 | consumed tokens:  20155564032 | elapsed time per iteration (s): 105.22 | learning rate: 5.969E-05 | global batch size:  2048 | lm loss: 2.463556E+00 | grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 19.463 | TFLOPs: 149.02 |
 validation loss at iteration 12700 | lm loss value: 2.461021E+00 | lm loss PPL: 1.171676E+01 |
[2026-01-16 07:32:24] iteration        5/     100 | consumed samples:          640 | elapsed time per iteration (ms): 15800.0 | throughput per GPU (TFLOP/s/GPU): 490.0 | learning rate: 1.0E-05 | global batch size:   128 | lm loss: 1.1E+01 | loss scale: 1.0 | grad norm: 1.3 | number of skipped iterations:   0 | number of nan iterations:   0 |
    forward-backward ...............................: (15012.31, 15013.02)
  successfully saved checkpoint at iteration     100 to /checkpoints
[after training is done] datetime: 2026-01-16 08:01:12
""",
    seen="bigscience-workshop/bigscience experiments/gpt2-meg and train/tr11-176B-ml; NVIDIA/Megatron-LM training.py, "
    "timers.py and checkpointing.py of 2020 to 2026, from which the last five lines are made",
)
