"""MosaicML's Composer, as LLM Foundry runs it: a line that names the batch, then one line per metric.

`throughput/…_per_sec` is for the whole job, `throughput/device/…` per GPU. Memory is in 10^9 bytes; only the peak of
the allocated memory is read. Metrics without a line of their batch are counted as left out. Each metric ends its line
and has four decimals: fewer mean that the line was cut.
"""

from hpc_gpt.reader.pattern import END, LINE_START, NUMBER, Dialect, Kind, Pattern, settings

_CONFIGURATION = {
    "max_seq_len": "seq", "global_train_batch_size": "global_batch", "n_gpus": "gpus", "n_params": "params",
    "num_gpus_per_node": "gpus_per_node", "num_nodes": "nodes", "d_model": "hidden", "n_layers": "layers",
    "n_heads": "heads",
}  # fmt: skip
_FLOAT = r"(?:-?\d{1,20}\.\d{4}|nan|inf|-inf)"


def _metric(name: str, group: str, number: str = _FLOAT, kind: Kind = "more") -> Pattern:
    return Pattern(kind, rf"\bTrain {name}: (?P<{group}>{number})" + END, literal=f"Train {name}: ")


DIALECT = Dialect(
    name="composer",
    engine="composer",
    patterns=(
        Pattern("step", r"(?:(?<!\])|(?<=\[epoch=1\]))\[batch=(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12})\]:"),
        # The count of batches restarts with each epoch.
        Pattern("step", r"\[epoch=(?P<epoch>[2-9]|[1-9]\d{1,6})\]\[batch=\d{1,12}/\d{1,12}\]:"),
        _metric("loss/train/total", "loss"),
        _metric("time/token", "consumed_tokens", r"\d{1,24}"),
        _metric("time/sample", "consumed_samples", r"\d{1,24}"),
        _metric("throughput/tokens_per_sec", "tokens_per_s"),
        _metric("throughput/samples_per_sec", "samples_per_s"),
        _metric("throughput/device/tokens_per_sec", "tokens_per_s_gpu"),
        _metric("throughput/device/samples_per_sec", "samples_per_s_gpu"),
        _metric("throughput/device/mfu", "mfu"),
        _metric("l2_norm/grad/global", "grad_norm"),
        _metric("lr-DecoupledAdamW/group0", "lr", NUMBER),
        _metric("memory/peak_allocated_mem", "memory_allocated_gb", kind="memory"),
        _metric("memory/peak_reserved_mem", "memory_reserved_gb", kind="memory"),
        # Before September 2023: reserved now, which is the peak as long as the allocator gives nothing back.
        _metric("memory/reserved_mem", "memory_reserved_gb", kind="memory"),
        _metric("trainer/device_train_microbatch_size", "micro_batch", r"\d{1,9}", kind="fact"),
        Pattern("eval", rf"\bEval metrics/\S{{1,80}}/LanguageCrossEntropy: (?P<loss_eval>{_FLOAT})" + END),
        Pattern("fact", LINE_START + r"precision: (?:amp_)?(?P<dtype>bf16|fp16|fp32)" + END, weak=True),
        Pattern("fact", r"\bUsing precision Precision\.(?:AMP_)?(?P<dtype>BF16|FP16|FP32)" + END),
        Pattern("fact", LINE_START + r"cfg\.n_params=(?P<params>\d\.\d\de\+\d\d)" + END),
        *settings("NAME: FIELD", _CONFIGURATION, LINE_START, weak=True),
    ),
)
