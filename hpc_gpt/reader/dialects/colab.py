"""The notebook of experiments/colab-ladder: GPT-124M on one A100, several records on a physical line.

`time` is the seconds since the record before: training batches, then validation batches. The counts of batches and
tokens and `tok/sec` include both. A validation batch costs less than a step, so no step time is read. The first loss is
that of training, the second that of validation.
"""

from hpc_gpt.reader.pattern import NUMBER, Dialect, Pattern, later


def _of_record(name: str, group: str, end: str = r"(?= ?\|)") -> str:
    """A lookahead for a figure of this record; the next record begins with its batches."""
    return later(rf"\| {name}", group, end, within=r"(?:(?!batches:)[^\n]){0,400}?")


DIALECT = Dialect(
    name="colab",
    flags=("the notebook counts validation batches with the steps, and their tokens with tokens/s",),
    patterns=(
        Pattern(
            "step",
            r"\bbatches: ?(?P<step>\d{1,12})(?= \|)"
            + _of_record("loss: ?", "loss", "(?=/)")
            + _of_record(rf"loss: ?{NUMBER}/", "loss_eval")
            + _of_record("tok/sec: ?", "tokens_per_s")
            # A cut record has no `tok/sec`: it is not read.
            + r"(?=(?:(?!batches:)[^\n]){0,400}?\| tok/sec: ?[\d,.]{1,24} ?\|)",
            literal="| tok-seen: ",
        ),
    ),
)
