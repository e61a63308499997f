"""Lines of Megatron-LM and its forks before training: world size, parallel sizes, batch, parameter counts."""

from hpc_gpt.reader.pattern import Dialect, Pattern, line


def _size(name: str, field: str) -> Pattern:
    """A size in the line of the world size. Versions differ in hyphens, commas, and the text between them."""
    return Pattern(
        "fact",
        rf"using world size: \d{{1,9}},[^|]{{0,300}}?(?<![a-z]-){name}[ -]size: (?P<{field}>\d{{1,9}})",
    )


DIALECT = Dialect(
    name="megatron_run",
    engine="megatron-lm",
    patterns=(
        Pattern("start", r"(?<!\(\) )\busing world size: (?P<gpus>\d{1,9}),"),
        Pattern("start", r"(?<!\(\) )\busing world size: (?P<gpus>\d{1,9}) and model-parallel size: (?P<tp>\d{1,9})\b"),
        _size("data-parallel", "dp"),
        _size("context-parallel", "cp"),
        _size("sequence-parallel", "cp"),
        _size("tensor-model-parallel", "tp"),
        _size("pipeline-model-parallel", "pp"),
        Pattern("fact", r"> initializ(?:ing|ed) (?:tensor )?model parallel with size (?P<tp>\d{1,9})"),
        Pattern("fact", r"> initializ(?:ing|ed) pipeline model parallel with size (?P<pp>\d{1,9})"),
        Pattern("fact", r"\busing torch\.(?:float16|half) for parameters", facts={"dtype": "fp16"}),
        line("fact", "using torch.bfloat16 for parameters", facts={"dtype": "bf16"}),
        Pattern("fact", r"\busing torch\.float(?:32)? for parameters", facts={"dtype": "fp32"}),
        Pattern("fact", r"\bsetting number of micro-?batches to constant (?P<micro_batches>\d{1,9})\b"),
        Pattern("fact", r"\bsetting global batch size to (?P<global_batch>\d{1,9})\b"),
        Pattern("fact", r"\bsetting training iterations to (?P<steps_planned>\d{1,12})\b"),
        line("fact", "> padded vocab (size: {vocab_unpadded}) with {} dummy tokens (new size: {vocab})"),
        Pattern(
            "fact",
            r"> number of parameters on \([a-z_, ]{1,60}\) model parallel rank "
            r"\((?P<rank_name>\d{1,6}(?:, \d{1,6}){1,3})\): (?P<rank_params>\d{1,15})\b",
        ),
        Pattern(
            "fact", r"> number of parameters on model parallel rank (?P<rank_name>\d{1,6}): (?P<rank_params>\d{1,15})\b"
        ),
        # Under ZeRO every rank prints the rounded count of the whole model.
        line("fact", "> number of parameters on model parallel rank {} {params_billions} Billion"),
        Pattern("fact", r"\bestimated model parameters: (?P<params_estimated_billions>\d{1,6}\.\d{1,16})"),
        Pattern("fact", r"\bTotal number of parameters in billions: {1,4}(?P<params_billions>\d{1,6}\.\d{1,9})"),
    ),
)
