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
    specimen="""\
batches:220 | loss: 7.041/6.790 | tok-seen: 7,208,960 | time: 107.98 | tok/sec: 66,759.81 | epoch time: 15.14 hrs
batches:11 | loss: 8.836/7.979| tok-seen: 157,696| time: 24.71| tok/sec: 6,381.04 | epoch time: 158.39 hrs batches:22 | loss: 7.431/7.307| tok-seen: 315,392| time: 9.31| tok/sec: 16,947.16 | epoch time: 59.64 hrs
batches: 220 | loss: 36.890/14.536 | tok-seen: 7,208,960 | time: 108.44 | tok/sec: 66,477.84 | epoch: 15.20
""",
    seen='the notebook "Training optimization", experiments/colab-ladder',
)
