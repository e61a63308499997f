"""fairseq and metaseq (OPT): lines of JSON, of `key=value`, or a bar. Losses in base 2 become natural logarithms.

`wps` is for the whole job. `ups` has two decimals (0.04 for a step of 27 s), so no step time is taken from it. `wall`
is the time since the start, `bsz` the sequences per batch.
"""

from hpc_gpt.reader.lines.pattern import LINE_START, NUMBER, Dialect, Pattern, figures, has, line

_FIGURES = """
    loss_bits=loss step=num_updates global_batch=bsz tokens_per_s=wps lr grad_norm=gnorm elapsed_s$=wall
"""
_OF_JSON = _FIGURES + "loss_scale memory_allocated_gib=cuda_gb_allocated memory_reserved_gib=cuda_gb_reserved"

_JSON = r"\{\"epoch\": \d{1,9}(?=[^{}\n]{0,30000}\})"
_FLAGS = ("fairseq prints losses in base 2: here they are natural logarithms",)
_FAIRSEQ = Dialect(
    name="fairseq",
    engine="fairseq",
    flags=_FLAGS,
    patterns=(
        figures(_JSON + r"(?=[^{}\n]{0,20000}?, \"loss\": )", '"num_updates": ', _OF_JSON, until="}"),
        # Versions of 2018: the update of the epoch, and running means in brackets.
        figures(
            rf"\| epoch (?P<epoch>\d{{1,6}}) {{1,8}}\d{{1,12}} / \d{{1,12}} (?=loss={NUMBER} \({NUMBER}\), [^\n]{{0,200}}?\blr=)",
            ", wpb=",
            "loss_bits=loss lr",
        ),
        figures(
            r"\bvalid on '(?!test)\w{1,40}' subset \| " + has(r"loss ", r" \| num_updates \d{1,12} \|"),
            " | num_updates ",
            "loss_eval_bits=loss|valid_loss step=num_updates",
            kind="eval",
        ),
        line("fact", "num. model params: {params} (num. trained: "),
        line("fact", "| num. model params: {params}", LINE_START),
        line("fact", "| using {gpus} GPUs (with max"),
        Pattern(
            "fact",
            r"\bmax tokens per GPU = \w{1,12} and (?:batch size|max sentences) per GPU = (?P<micro_batch>\d{1,7})(?=\s*$)",
        ),
        figures(_JSON, '"valid_loss": ', "loss_eval_bits=valid_loss step=valid_num_updates", kind="eval", until="}"),
        figures(
            r"(?:\d{1,12} / \d{1,12} |\[[\d:]{1,20}<[\d:?]{1,20}, [^,\n]{1,20}, )"
            rf"(?=loss={NUMBER},[^\n]{{0,2000}}?[, ]num_updates=\d{{1,12}}[,\]])",
            " num_updates=",
            _FIGURES,
        ),
    ),
)
# The line of an epoch in versions of 2018 and 2019: means over the epoch, used if no other lines have steps.
_EPOCHS = Dialect(
    name="fairseq_epochs",
    engine="fairseq",
    flags=_FLAGS,
    patterns=(
        figures(
            LINE_START
            + rf"\| epoch (?P<epoch>\d{{1,6}}) \| (?=loss {NUMBER} \| [^\n]{{0,400}}?\| num_updates \d{{1,12}} \|)",
            " | num_updates ",
            "loss_bits=loss step=num_updates tokens_per_s=wps lr grad_norm=gnorm",
        ),
    ),
)
DIALECTS = (_FAIRSEQ, _EPOCHS)
