"""NVIDIA NeMo Automodel: tokens/s of the job, and of one GPU in brackets."""

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="automodel",
    dtype="bf16",
    engine="automodel",
    patterns=(
        Pattern(
            "step",
            " | num_label_tokens ",
            rf"\bstep (?P<step>\d{{1,12}}) \| epoch (?P<epoch>\d{{1,9}}) \| loss (?P<loss>{NUMBER}) \| grad_norm (?P<grad_norm>{NUMBER}) \| "
            rf"lr (?P<lr>{NUMBER}) \| mem (?P<memory_allocated_gib>{NUMBER}) GiB \| tps (?P<tokens_per_s>{NUMBER})"
            rf"\((?P<tokens_per_s_gpu>{NUMBER})/gpu\) \| num_label_tokens ",
        ),
    ),
    specimen="""\
2026-08-10 15:55:20 | INFO | root | step 9 | epoch 0 | loss 0.6974 | grad_norm 1.5436 | lr 1.00e-05 | mem 24.90 GiB | tps 11278.56(1409.82/gpu) | num_label_tokens 21541
""",
    seen="NVIDIA-NeMo/Automodel/pull/3473",
)
