"""The model size that BigScience's scripts of May 2021 worked out and echoed."""

from hpc_gpt.reader.pattern import Dialect, Pattern

DIALECT = Dialect(
    name="model_size_echo",
    patterns=(Pattern("fact", r"^(?:[^|]{0,40}[\]:] ?)?Model size: (?P<params_gi>\d{1,6})B\s*$"),),
    flags=(
        "`Model size: 61B` was read as 61 x 2^30 parameters, as the scripts worked it out before 2021-05-28; "
        "a later size is in 10^9",
    ),
)
