"""fairseq and metaseq (OPT): lines of JSON, of `key=value`, or a bar. Losses in base 2 become natural logarithms.

`wps` is for the whole job. `ups` has two decimals (0.04 for a step of 27 s), so no step time is taken from it. `wall`
is the time since the start, `bsz` the sequences per batch.
"""

from collections.abc import Mapping

from hpc_gpt.reader.lines.pattern import LINE_START, NUMBER, Dialect, Pattern, entries, line

_FIELDS = {
    "loss": "loss_bits", "num_updates": "step", "wps": "tokens_per_s", "lr": "lr", "gnorm": "grad_norm",
    "loss_scale": "loss_scale", "cuda_gb_allocated": "memory_allocated_gib", "cuda_gb_reserved": "memory_reserved_gib",
    "wall": "elapsed_s",
}  # fmt: skip


def _entries(fields: Mapping[str, str]) -> str:
    return entries(', "NAME": "?', fields, '"?(?=[,}])', r"[^{}\n]{0,20000}?")


def _pair(key: str, group: str) -> str:
    """Matches a pair of a line or a bar; `wall` ends a line."""
    end = r"(?=,|\]|\s*$)" if key == "wall" else r"(?=,|\])"
    return rf"(?=(?:[^\n]{{0,2000}}?[, ]{key}=(?P<{group}>{NUMBER}){end})?)"


_FLAGS = ("fairseq prints losses in base 2: here they are natural logarithms",)
_FAIRSEQ = Dialect(
    name="fairseq",
    engine="fairseq",
    flags=_FLAGS,
    patterns=(
        Pattern(
            "step",
            r"\{\"epoch\": \d{1,9}(?=[^{}\n]{0,30000}\})(?=[^{}\n]{0,20000}?, \"loss\": )"
            + _entries(_FIELDS)
            + _entries({"bsz": "global_batch"}).replace(NUMBER, r"\d{1,9}"),
            literal='"num_updates": ',
        ),
        # Versions of 2018: the update of the epoch, and running means in brackets.
        Pattern(
            "step",
            rf"\| epoch (?P<epoch>\d{{1,6}}) {{1,8}}\d{{1,12}} / \d{{1,12}} loss=(?P<loss_bits>{NUMBER}) \({NUMBER}\), [^\n]{{0,200}}?"
            rf"\blr=(?P<lr>{NUMBER})(?=,)",
            literal=", wpb=",
        ),
        Pattern(
            "eval",
            rf"\bvalid on '(?!test)\w{{1,40}}' subset \| (?:valid[_ ])?loss (?P<loss_eval_bits>{NUMBER}) \| "
            r"(?=[^\n]{0,400}? \| num_updates (?P<step>\d{1,12})(?= \|))",
        ),
        line("fact", "num. model params: {params} (num. trained: "),
        line("fact", "| num. model params: {params}", LINE_START),
        line("fact", "| using {gpus} GPUs (with max"),
        Pattern(
            "fact",
            r"\bmax tokens per GPU = \w{1,12} and (?:batch size|max sentences) per GPU = (?P<micro_batch>\d{1,7})(?=\s*$)",
        ),
        Pattern(
            "eval",
            r"\{\"epoch\": \d{1,9}(?=[^{}\n]{0,30000}\})"
            + _entries({"valid_loss": "loss_eval_bits", "valid_num_updates": "step"}),
            literal='"valid_loss": ',
        ),
        Pattern(
            "step",
            rf"(?:\d{{1,12}} / \d{{1,12}} |\[[\d:]{{1,20}}<[\d:?]{{1,20}}, [^,\n]{{1,20}}, )loss=(?P<loss_bits>{NUMBER}),"
            + _pair("num_updates", "step").replace("(?=(?:", "(?=").replace("))?)", "))")
            + _pair("wps", "tokens_per_s")
            + _pair("bsz", "global_batch").replace(NUMBER, r"\d{1,9}")
            + _pair("lr", "lr")
            + _pair("gnorm", "grad_norm")
            + _pair("wall", "elapsed_s"),
            literal=" num_updates=",
        ),
    ),
)
# The line of an epoch in versions of 2018 and 2019: means over the epoch, used if no other lines have steps.
_EPOCHS = Dialect(
    name="fairseq_epochs",
    engine="fairseq",
    flags=_FLAGS,
    patterns=(
        Pattern(
            "step",
            LINE_START + rf"\| epoch (?P<epoch>\d{{1,6}}) \| loss (?P<loss_bits>{NUMBER}) \| "
            r"(?=[^\n]{0,400}?\| num_updates (?P<step>\d{1,12}) \|)"
            + entries(r"\| NAME ", {"wps": "tokens_per_s", "lr": "lr", "gnorm": "grad_norm"}, r"(?= \|)"),
            literal=" | num_updates ",
        ),
    ),
)
DIALECTS = (_FAIRSEQ, _EPOCHS)
