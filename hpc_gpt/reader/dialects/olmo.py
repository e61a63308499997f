"""OLMo and OLMo-core: a line that names the step, then one line per metric. Device throughput is per GPU.

OLMo-core rounds to four decimals below 1 and prints K, M, B above; `BPS` is too coarse for a step time. Each metric ends
its line.
"""

from hpc_gpt.reader.pattern import END, NUMBER, Dialect, Pattern, entries, later, line, settings

_METRICS = {
    "train/CrossEntropyLoss": "loss", "train/CE loss": "loss",
    "train/LoadBalancingLoss": "balance_loss", "train/load balancing loss": "balance_loss", "train/router Z loss": "z_loss",
    "train/MoEZLoss": "z_loss",
    "optim/total_grad_norm": "grad_norm", "optim/total grad norm": "grad_norm", "optim/LR (group 0)": "lr",
    "throughput/total_tokens": "consumed_tokens", "throughput/total tokens": "consumed_tokens",
    "throughput/device/tokens_per_second": "tokens_per_s_gpu", "throughput/device/TPS": "tokens_per_s_gpu",
    "throughput/device/MFU": "mfu_percent", "gpu_memory/GPU reserved mem (GiB)": "memory_reserved_gib",
    "System/Peak GPU Memory (MB)": "memory_allocated_mb",
}  # fmt: skip

_CONFIGURATION = {
    "d_model": "hidden", "n_layers": "layers", "n_heads": "heads", "n_kv_heads": "kv_heads", "max_sequence_length": "seq",
    "vocab_size": "vocab_unpadded", "embedding_size": "vocab", "global_train_batch_size": "global_batch",
    "device_train_microbatch_size": "micro_batch", "device_train_grad_accum": "micro_batches",
}  # fmt: skip

DIALECT = Dialect(
    name="olmo",
    engine="olmo",
    patterns=(
        Pattern(
            "step",
            r"\[step=(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12}|\?\?\?)(?:,epoch=\d{1,9}[\],]|, eta=|\](?=\s*$))",
        ),
        *settings("NAME=FIELD", _METRICS, r"(?<!\S)", "more"),
        # A line for each layer of a mixture.
        Pattern(
            "more", rf"(?<!\S)train/(?:block \d{{1,4}}/)?(?:batch )?load imbalance=(?P<expert_load>{NUMBER})" + END
        ),
        Pattern("more", r"(?<!\S)throughput/device/flopsPS=(?P<tflops>\d{1,5}(?:\.\d{1,4})?)T" + END),
        Pattern("fact", r"\bTotal number of parameters: (?P<params>\d{1,3}(?:,\d{3}){1,9})" + END, weak=True),
        # The whole configuration on one line. A `d_model` of another program has no such batch.
        Pattern(
            "fact",
            r"\bTrainConfig\((?=[^\n]{0,20000}\bdevice_train_microbatch_size=)"
            + entries("[(, ]NAME=", _CONFIGURATION, "(?=[,)])", r"[^\n]{0,20000}?")
            + later("[(, ]precision='(?:amp_)?", "dtype", "(?=')", r"\w{4,8}", r"[^\n]{0,20000}?"),
        ),
        line("fact", "Building transformer with {params} total params,", weak=True),
    ),
)
