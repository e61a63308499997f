"""The notebook of experiments/colab-ladder: GPT-124M on one A100, several records on a physical line.

`time` is the seconds since the record before: training batches, then validation batches. The counts of batches and
tokens and `tok/sec` include both. A validation batch costs less than a step, so no step time is read. The two losses are
of training and of validation.
"""

from hpc_gpt.readers.pattern import INT, NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="colab",
    flags=("the notebook counts validation batches with the steps, and their tokens with tokens/s",),
    patterns=(
        Pattern(
            "step",
            "| tok-seen: ",
            rf"\bbatches: ?(?P<step>\d{{1,12}}) \| loss: ?(?P<loss>{NUMBER})/(?P<loss_eval>{NUMBER}) ?\| "
            rf"tok-seen: ?{INT} ?\| time: ?{NUMBER} ?\| "
            rf"tok/sec: ?(?P<tokens_per_s>{NUMBER}) \|",
        ),
    ),
)
