"""The FSDP example of AWS's distributed training samples: a line a batch, counted from 0; its samples/s are of the job.

The batch is not printed, so the step time is by the lines' times of day, which are whole seconds.
"""

from __future__ import annotations

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern

_TAG = r" I \[train\.py:\d{1,5}\] "


def _option(name: str, fact: str) -> Pattern:
    """An option of the echoed command, quoted as bash prints an array."""
    return Pattern("fact", f"'--{name}=", rf"(?<=[ (])'--{name}=(?P<{fact}>\d{{1,12}})'(?=[ )])", weak=True)


DIALECT = Dialect(
    name="aws_fsdp",
    engine="fsdp",
    patterns=(
        Pattern(
            "step",
            " samples/sec, lr: ",
            _TAG
            + rf"Batch (?P<step>\d{{1,12}}) Loss: (?P<loss>{NUMBER}), Speed: (?P<samples_per_s>{NUMBER}) samples/sec, "
            rf"lr: (?P<lr>{NUMBER})",
        ),
        Pattern(
            "fact",
            "Created model with total parameters: ",
            _TAG + r"Created model with total parameters: (?P<params>\d{1,15}) \(",
        ),
        _option("nproc_per_node", "gpus_per_node"),
        _option("nnodes", "nodes"),
        _option("max_context_width", "seq"),
        _option("hidden_width", "hidden"),
        _option("num_layers", "layers"),
        _option("num_heads", "heads"),
    ),
    specimen="""\
0: 2024-06-20 16:58:46 I [train.py:103] Batch 1 Loss: 11.27865, Speed: 10.01 samples/sec, lr: 0.000100
0: 2024-06-20 16:58:12 I [train.py:172] Created model with total parameters: 7300550117 (7.44 B)
+ TORCHRUN_ARGS=('--nproc_per_node=8' '--nnodes=4' '--rdzv_id=288' '--rdzv_backend=c10d' '--rdzv_endpoint=node-1')
+ TRAINING_ARGS=('--max_context_width=8192' '--hidden_width=4096' '--num_layers=32' '--num_heads=32' '--model_type=llama')
""",
    seen="aws-samples/awsome-distributed-training 3.test_cases/pytorch/FSDP",
)
