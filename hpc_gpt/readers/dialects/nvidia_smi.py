"""The GPU names that NVIDIA's driver prints if a job script asks it. A name that ends in dots is cut and not read."""

from __future__ import annotations

from hpc_gpt.readers.pattern import LINE_START, Dialect, Pattern

# Eight distinct values of a fact are kept: a table with more GPUs is not counted.
_INDEX = r"(?:(?P<gpu_index>[0-7])|(?P<gpu_index_above_7>\d{1,3}))"

DIALECT = Dialect(
    name="nvidia_smi",
    patterns=(
        Pattern("fact", " (UUID: ", LINE_START + rf"GPU {_INDEX}: (?P<device>[^()\n]{{3,60}}?) \(UUID: "),
        Pattern(
            "fact",
            " 00000000:",
            LINE_START
            + rf"\| {{1,4}}{_INDEX}  (?P<device>[A-Za-z][ \w-]{{2,40}}?) {{1,30}}(?:On|Off|N/A) {{0,4}}\| {{1,4}}00000000:",
        ),
    ),
    specimen="""\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-00000000-0000-0000-0000-000000000000)
|   0  NVIDIA H100 80GB HBM3          On  | 00000000:19:00.0 Off |                    0 |
|   0  NVIDIA H200                    On  |   00000000:19:00.0 Off |                    0 |
""",
    seen="nvidia-smi 525 and 570; made",
)
