"""modded-nanogpt. Its times are sums: `train_time` since training began, without warm-up and validation.

`step_avg` is the mean since the start, so the step time is taken from differences of `train_time`, exact to 1 ms. Older
logs print whole milliseconds, and `nan` for the mean of the first ten steps.
"""

from hpc_gpt.reader.pattern import NUMBER, START, Dialect, Pattern, has, later, line

_TIME = " train_time:"
# A step and its times, which other fields may surround.
STEP = (
    r"\bstep:(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12})(?= )"
    + has(rf"{_TIME}{NUMBER}m?s\b", rf" step_avg:{NUMBER}ms\b")
    + later(_TIME, "elapsed_ms", "(?=ms)")
    + later(_TIME, "elapsed_s", "(?=s)")
)

DIALECT = Dialect(
    name="modded_nanogpt",
    dtype="bf16",
    engine="modded-nanogpt",
    patterns=(
        Pattern(
            "step",
            f"{STEP}(?![^\\n]{{0,400}} val_loss:)" + later(" train_loss:", "loss", r"(?=\s|$)"),
            literal=" step_avg:",
        ),
        Pattern(
            "fact",
            START + r"Running PyTorch \S{1,60} compiled for CUDA \S{1,20} on (?P<device>[^\n]{3,60}?) with world_size "
            r"(?P<gpus>\d{1,5})(?=\s*$)",
            facts={"nodes": 1},
        ),
        # It runs on one node: accumulation steps times GPUs are 8.
        Pattern(
            "fact", START + r"Running [Pp]y[Tt]orch \d\S{1,60} compiled for CUDA \S{1,20}(?=\s*$)", facts={"nodes": 1}
        ),
        Pattern(
            "fact", START + r"Running on device_name=(?P<device>[^\n]{3,60}?) with world_size=(?P<gpus>\d{1,5})(?=\s*$)"
        ),
        # Parameter Golf's header.
        line("fact", "model_params:{params}", START, weak=True),
        line("fact", "world_size:{gpus} grad_accum_steps:{micro_batches}", START),
        Pattern(
            "fact",
            START + r"attention_mode:\w{1,12} num_heads:(?P<heads>\d{1,5}) num_kv_heads:(?P<kv_heads>\d{1,5})(?=\s*$)",
        ),
        line("fact", "train_batch_tokens:{global_batch_tokens} train_seq_len:{seq} iterations:", START),
        Pattern(
            "memory",
            START + r"peak memory (?:consumption|allocated): (?P<memory_allocated_mib>\d{1,9}) MiB"
            r"(?: reserved: (?P<memory_reserved_mib>\d{1,9}) MiB)?",
            weak=True,
        ),
    ),
)
