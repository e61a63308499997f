"""OLMo and OLMo-core: a line that names the step, then one line per metric. Device throughput is per GPU.

OLMo-core rounds to four decimals below 1 and prints K, M, B above; `BPS` is too coarse for a step time. Each metric ends
its line.
"""

from hpc_gpt.readers.pattern import END, INT, NUMBER, Dialect, Pattern


def _metric(name: str, group: str) -> Pattern:
    text = name.replace("(", r"\(").replace(")", r"\)")
    return Pattern("more", f"{name}=", rf"(?<!\S){text}=(?P<{group}>{NUMBER})" + END)


DIALECT = Dialect(
    name="olmo",
    engine="olmo",
    patterns=(
        Pattern(
            "step",
            "[step=",
            r"\[step=(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12}|\?\?\?)(?:,epoch=\d{1,9}[\],]|, eta=|\](?=\s*$))",
        ),
        _metric("train/CrossEntropyLoss", "loss"),
        _metric("train/CE loss", "loss"),
        _metric("optim/total_grad_norm", "grad_norm"),
        _metric("optim/total grad norm", "grad_norm"),
        _metric("optim/LR (group 0)", "lr"),
        _metric("throughput/total_tokens", "consumed_tokens"),
        _metric("throughput/device/tokens_per_second", "tokens_per_s_gpu"),
        _metric("throughput/device/TPS", "tokens_per_s_gpu"),
        _metric("throughput/device/MFU", "mfu_percent"),
        _metric("throughput/total tokens", "consumed_tokens"),
        Pattern("more", "/flopsPS=", r"(?<!\S)throughput/device/flopsPS=(?P<tflops>\d{1,5}(?:\.\d{1,4})?)T" + END),
        _metric("gpu_memory/GPU reserved mem (GiB)", "memory_reserved_gib"),
        _metric("System/Peak GPU Memory (MB)", "memory_allocated_mb"),
        Pattern(
            "fact",
            "Total number of parameters: ",
            r"\bTotal number of parameters: (?P<params>\d{1,3}(?:,\d{3}){1,9})" + END,
            weak=True,
        ),
        Pattern("fact", "total params", rf"\bBuilding transformer with (?P<params>{INT}) total params,", weak=True),
    ),
    specimen="""\
[step=40/2500,epoch=0]
    train/CrossEntropyLoss=10.69
    throughput/device/tokens_per_second=11,628
    optim/total_grad_norm=2.305
[step=40/2500,epoch=1,eta=1h12m]
    train/CE loss=10.69
    throughput/device/TPS=11,628
    throughput/device/MFU=41.27
    throughput/device/flopsPS=408.1T
    throughput/total tokens=51,380,224
    gpu_memory/GPU reserved mem (GiB)=61.35
Total number of parameters: 1,158,336,550
[2024-04-20 09:16:29] INFO     [olmo.train:816, rank=0] [step=2/739328]
    System/Peak GPU Memory (MB)=43,916
""",
    seen="allenai/OLMo olmo/train.py; allenai/OLMo-core train/callbacks/console_logger.py",
)
