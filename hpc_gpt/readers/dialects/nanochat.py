"""nanochat. Its loss is smoothed and bias-corrected; tokens/s are of the whole job; steps count from 0.

`total time` begins after the tenth step, so it is not read. `mfu` is a percentage, printed without its sign.
"""

from hpc_gpt.readers.pattern import END, INT, LINE_START, NUMBER, START, Dialect, Pattern

DIALECT = Dialect(
    name="nanochat",
    dtype="bf16",
    engine="nanochat",
    flags=("nanochat's printed loss is smoothed over steps",),
    patterns=(
        Pattern(
            "step",
            "| lrm: ",
            rf"\bstep (?P<step>\d{{1,12}})(?:/(?P<steps_planned>\d{{1,12}}))? \({NUMBER}%\) \| loss: (?P<loss>{NUMBER}) \|"
            rf"(?: grad norm: (?P<grad_norm>{NUMBER}) \|)? lrm: {NUMBER} \| dt: (?P<step_ms>{NUMBER})ms \| "
            rf"tok/sec: (?P<tokens_per_s>{INT})(?: \| (?:bf16_)?mfu: (?P<mfu_percent>{NUMBER})(?= \|))?(?= \|)",
        ),
        Pattern(
            "fact", "Number of parameters: ", START + rf"Number of parameters: (?P<params>{INT})(?: \(|\s*$)", weak=True
        ),
        *(
            Pattern("fact", f"{name}: ", LINE_START + rf"{name}: (?P<{fact}>{INT})" + END, weak=True)
            for name, fact in (
                ("Vocab size", "vocab"),
                ("num_layers", "layers"),
                ("model_dim", "hidden"),
                ("num_heads", "heads"),
                ("num_kv_heads", "kv_heads"),
            )
        ),
        Pattern(
            "fact",
            "=> gradient accumulation steps: ",
            START
            + rf"Total batch size (?P<global_batch_tokens>{INT}) => gradient accumulation steps: (?P<micro_batches>{INT})"
            + END,
        ),
        Pattern(
            "fact",
            "Tokens / micro-batch / rank: ",
            START + rf"Tokens / micro-batch / rank: (?P<micro_batch>{INT}) x (?P<seq>{INT}) = ",
        ),
        Pattern("fact", "| Peak FLOPS (BF16): ", START + r"GPU: (?P<device>[^|\n]{1,80}?) \| Peak FLOPS \(BF16\): "),
        Pattern(
            "memory",
            "Peak memory usage: ",
            START + rf"Peak memory usage: (?P<memory_allocated_mib>{NUMBER})MiB",
            weak=True,
        ),
    ),
    specimen="""\
step 00175/21400 (0.05%) | loss: 9.223193 | grad norm: 1.5082 | lrm: 1.16 | dt: 319.18ms | tok/sec: 1,551,117 | mfu: 48.15 | total time: 0.00m
step 00175/21400 (0.05%) | loss: 9.223193 | lrm: 1.16 | dt: 319.18ms | tok/sec: 1,551,117 | bf16_mfu: 48.15 | epoch: 1 | total time: 0.00m | eta: 12.3m
Vocab size: 65,662
num_layers: 20
model_dim: 1280
num_heads: 10
num_kv_heads: 10
Number of parameters: 563,143,597
Total batch size 526,699 => gradient accumulation steps: 1
Tokens / micro-batch / rank: 32 x 2048 = 65,662
Peak memory usage: 71198.54MiB
""",
    seen="karpathy/nanochat scripts/base_train.py",
)
