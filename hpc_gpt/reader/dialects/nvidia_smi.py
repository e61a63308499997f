"""The GPU names that NVIDIA's and AMD's tools print if a job script asks them, and that programs print in passing.

A name that ends in dots is cut and not read.
"""

from hpc_gpt.reader.pattern import END, LINE_START, START, Dialect, Pattern

# The reader stores eight distinct values of a fact: a table with more GPUs is not counted.
_INDEX = r"(?:(?P<gpu_index>[0-7])|(?P<gpu_index_above_7>\d{1,3}))"

_NAME = (
    r"(?P<device>(?:NVIDIA |Tesla |AMD Instinct |TPU v\d)[\w -]{1,40}|(?:NVIDIA )?GeForce RTX \d{4}(?: Ti)?"
    r"|(?:A100|H100|V100)-(?:PCIE|SXM\d)-\d{2}GB|TPU v\d\w{0,2})"
)

DIALECT = Dialect(
    name="nvidia_smi",
    patterns=(
        Pattern("fact", LINE_START + rf"GPU {_INDEX}: (?P<device>[^()\n]{{3,60}}?) \(UUID: "),
        Pattern(
            "fact",
            LINE_START
            + rf"\| {{1,4}}{_INDEX}  (?P<device>[A-Za-z][ \w-]{{2,40}}?) {{1,30}}(?:On|Off|N/A) {{0,4}}\| {{1,4}}00000000:",
        ),
        # gpustat
        Pattern(
            "fact", LINE_START + rf"\[{_INDEX}\] (?P<device>[A-Za-z][ \w-]{{2,40}}?) {{1,30}}\| {{0,2}}\d{{1,3}}°C, "
        ),
        Pattern(
            "fact",
            LINE_START
            + r"GPU\[\d{1,3}\]\s{0,4}: (?:Card [Ss]eries|Product Name|Card [Mm]odel):\s{0,4}"
            + r"(?P<device>AMD Instinct MI\d{2,3}[AX]?(?: \w{2,6}){0,2})"
            + END,
            literal=" Instinct MI",
        ),
        Pattern(
            "fact",
            START + rf"(?:[Uu]sing |[Tt]raining on )?(?:CUDA |GPU )?[Dd]evice(?: name)?(?:: | ?= ?){_NAME}" + END,
            weak=True,
        ),
        Pattern("fact", START + rf"(?:Using |Training on )?GPU(?: name)?(?:: | ?= ?){_NAME}" + END, weak=True),
    ),
)
