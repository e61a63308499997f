"""InternEvo and InternLM: a line a step. Its TFLOPs and `tgs` are per GPU, of the last step."""

from hpc_gpt.reader.pattern import NUMBER, Dialect, Pattern, entries

_FIELDS = {"lr": "lr", "grad_norm": "grad_norm", "num_consumed_tokens": "consumed_tokens"}

DIALECT = Dialect(
    name="internevo",
    engine="internevo",
    patterns=(
        Pattern(
            "step",
            rf"\btflops=(?P<tflops>{NUMBER})[ ,]{{1,2}}step=(?P<step>\d{{1,12}})[ ,]{{1,2}}loss=(?P<loss>{NUMBER})[ ,]"
            rf"[^\n]{{0,100}}?\btgs \(tokens/gpu/second\)=(?P<tokens_per_s_gpu>{NUMBER})(?=[ ,])"
            + entries("[ ,]NAME=", _FIELDS, "(?=[ ,])"),
        ),
        Pattern(
            "start",
            r"\bDistributed environment is initialized, data parallel size: (?P<dp>\d{1,7}), "
            r"pipeline parallel size: (?P<pp>\d{1,5}), tensor parallel size: (?P<tp>\d{1,5})(?=,|\s*$)",
        ),
    ),
)
