"""torchrun, torch.distributed.launch, deepspeed and accelerate: an echoed command line, and the launcher's start."""

from hpc_gpt.reader.pattern import END, LINE_START, START, Dialect, Pattern, line


def _option(literal: str, names: str, field: str) -> Pattern:
    """A whole `--name N` or `--name=N`: not `--nnodes 1:4`, not a shell variable. A cut shows: something always follows."""
    return Pattern("fact", rf"(?<!\S)--(?:{names})[ =](?P<{field}>\d{{1,7}})(?=[\s'\"\\])", literal=literal)


DIALECT = Dialect(
    name="torch_launcher",
    patterns=(
        # Printed once per node with several processes, before any of them prints anything.
        line("start", "Setting OMP_NUM_THREADS environment variable for each process"),
        # deepspeed's launcher and accelerate's scripts.
        line("fact", "dist_world_size={gpus}"),
        line("fact", "nnodes={nodes}, num_local_procs={gpus_per_node}, "),
        # DeepSpeed's configuration; NCCL's own line is about a communicator, which may have fewer ranks than the job.
        line("fact", "Config mesh_device None world_size = {gpus}"),
        Pattern("fact", LINE_START + r"(?:export )?WORLD_SIZE=(?P<gpus>\d{1,7})" + END),
        line("fact", "Num processes: {gpus}", LINE_START),
        # Lines of programs that no dialect knows: used only if all of them agree.
        Pattern(
            "fact",
            # `world_size=1)` is a default in a source that a log repeats.
            START + r"(?<!using )(?:[Dd]istributed |[Tt]otal )?[Ww]orld[ _][Ss]ize(?: is)?(?:(?P<of>=)|: ?| )"
            r"(?P<gpus_said>\d{1,7})(?=\s*$|[,;.\s](?!\d)|(?(of)(?!)|\)))",
            weak=True,
        ),
        Pattern(
            "fact",
            START + r"(?i:training|train) (?:[\w-]{1,20} ){0,3}(?:on|with) (?P<gpus_said>\d{1,7}) "
            r"(?i:gpus?|devices?|accelerators?|ranks?|tpus?)\b",
            literal="rain",
            weak=True,
        ),
        # Lightning's and NeMo's: one process per GPU, unless they run on CPUs.
        line("fact", "GLOBAL_RANK: {}, MEMBER: {}/{gpus_said}", weak=True),
        line("fact", "| distributed init (rank {}, world {gpus_said}):", weak=True),
        Pattern(
            "fact",
            r"\bAll distributed processes registered\. Starting with (?P<gpus_said>\d{1,7}) processes\b",
            weak=True,
        ),
        Pattern("fact", r"\bdistributed_backend=gloo\b", facts={"gpus_unused": 1}, weak=True),
        Pattern(
            "fact",
            LINE_START + r"GPU available: \w{4,5}(?: \([^)\n]{1,20}\))?, used: False(?=\s*$)",
            facts={"gpus_unused": 1},
            weak=True,
        ),
        Pattern("fact", r"\btorchrun[^\n]{0,200} --standalone(?=\s)", facts={"nodes": 1}),
        _option("--nproc", "nproc[-_]per[-_]node", "gpus_per_node"),
        _option("--nnodes", "nnodes", "nodes"),
        _option("--num_gpus", "num_gpus", "gpus_per_node"),
        _option("--num_nodes", "num_nodes", "nodes"),
        _option("--num_processes", "num_processes", "gpus"),
        _option("--num_machines", "num_machines", "nodes"),
    ),
)
