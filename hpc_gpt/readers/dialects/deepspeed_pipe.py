"""DeepSpeed's pipeline engine: its step line, and the parameters of each stage."""

from hpc_gpt.readers.pattern import Dialect, Pattern

DIALECT = Dialect(
    name="deepspeed_pipe",
    engine="deepspeed-3d",
    patterns=(
        # Each line is the mean of the steps since the line before. Further losses can follow the sum.
        Pattern(
            "step",
            "iter time (s): ",
            r"\bsteps: (?P<step>\d{1,12}) loss: (?P<loss>[^ |]{1,24}) (?:[\w /.-]{1,40}: [^ |:]{1,24} ){0,8}?"
            r"iter time \(s\): (?P<step_s>\d{1,9}\.\d{1,6}) samples/sec: (?P<samples_per_s>\d{1,12}\.\d{1,6})",
        ),
        Pattern(
            "fact",
            "STAGE_PARAMS=",
            r"\bRANK=(?P<rank_name>\d{1,7} STAGE=\d{1,5}) LAYERS=\d{1,6} \[\d{1,6}, \d{1,6}\) "
            r"STAGE_PARAMS=(?P<rank_params>\d{1,15}) ",
        ),
        Pattern("fact", "TOTAL_PARAMS=", r"\bTOTAL_PARAMS=(?P<params_of_ranks>\d{1,15}) "),
        # Tied parameters count once, parameters that tensor-parallel ranks replicate count once per copy.
        Pattern("fact", "UNIQUE_PARAMS=", r"\bUNIQUE_PARAMS=(?P<params>\d{1,15}) "),
        Pattern(
            "fact",
            "CONFIG: micro_batches=",
            r"\bCONFIG: micro_batches=(?P<micro_batches>\d{1,9}) micro_batch_size=(?P<micro_batch>\d{1,9})\b",
        ),
    ),
    specimen="""\
[2021-05-27 04:01:02,142] [INFO] [engine.py:72:__init__] CONFIG: micro_batches=256 micro_batch_size=4
[2021-05-27 04:01:12,142] [INFO] [engine.py:134:__init__] RANK=0 STAGE=0 LAYERS=7 [0, 7) STAGE_PARAMS=917757952 (917.758M) TOTAL_PARAMS=52418551808 (52418.552M) UNIQUE_PARAMS=52003311616 (52003.312M)
[2021-05-27 04:02:02,142] steps: 2 loss: 12.8004 iter time (s): 145.206 samples/sec: 7.052
""",
    seen="deepspeed/runtime/pipe/engine.py (the line of steps as in bigscience-workshop/bigscience experiments/"
    "gpt2-meg-ds-3d; the other two made)",
)
