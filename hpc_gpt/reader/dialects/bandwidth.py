"""Network benchmarks: BigScience's all_reduce bench and NVIDIA's nccl-tests. They are facts of a job, not of training."""

from hpc_gpt.reader.pattern import END, NUMBER, Dialect, Pattern, line

DIALECT = Dialect(
    name="bandwidth",
    patterns=(
        line("fact", "algo throughput: {} bps, {allreduce_gbit_per_s} Gbps"),
        Pattern("fact", rf"\bbusbw: (?P<allreduce_bus_gbit_per_s>{NUMBER}) {{1,4}}Gbps"),
        Pattern("fact", rf"# Avg bus bandwidth {{1,8}}: (?P<nccl_bus_gbyte_per_s>{NUMBER})" + END),
    ),
)
