"""DeepSpeed's pipeline engine: its step line, and the parameters of each stage."""

from hpc_gpt.reader.pattern import Dialect, Pattern, line, named

DIALECT = Dialect(
    name="deepspeed_pipe",
    engine="deepspeed-3d",
    patterns=(
        # Each line is the mean of the steps since the line before. Further losses can follow the sum.
        Pattern(
            "step",
            r"\bsteps: (?P<step>\d{1,12}) loss: (?P<loss>[^ |]{1,24}) "
            + named("(?= )", balance_loss=" ?moe loss: ")
            + r"(?:[\w /.-]{1,40}: [^ |:]{1,24} ){0,8}?"
            r"iter time \(s\): (?P<step_s>\d{1,9}\.\d{1,6}) samples/sec: (?P<samples_per_s>\d{1,12}\.\d{1,6})",
        ),
        Pattern(
            "fact",
            r"\bRANK=(?P<rank_name>\d{1,7} STAGE=\d{1,5}) LAYERS=\d{1,6} \[\d{1,6}, \d{1,6}\) "
            r"STAGE_PARAMS=(?P<rank_params>\d{1,15}) ",
        ),
        # Tied parameters count once, parameters that tensor-parallel ranks replicate count once per copy.
        line("fact", "UNIQUE_PARAMS={params} "),
        Pattern(
            "fact", r"\bCONFIG: micro_batches=(?P<micro_batches>\d{1,9}) micro_batch_size=(?P<micro_batch>\d{1,9})\b"
        ),
    ),
)
