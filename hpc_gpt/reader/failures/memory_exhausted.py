"""Out of memory: on the GPU by allocators and libraries, on the host by Python, PyTorch and the kernel.

Also the new batch of a program that looks for the largest one that fits: the following steps have it.
"""

import re

from hpc_gpt.reader.lines.pattern import ANY_NAME, EXCEPTION_START, INT, Dialect, Pattern, failure, raised

_GIB = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}
_SIZE = r"(?<![\d.])([\d.]{1,12}+) (bytes|[KMGT]iB)"
# PyTorch's message in 1.x and 2.x: the GPU's memory, its free memory, and the memory of this process.
_TOTAL = re.compile(rf"{_SIZE} total capacity|total capaci?ty of {_SIZE}")
_FREE = re.compile(rf"{_SIZE} (?:is )?free\b")
_OWN = re.compile(rf"this process has {_SIZE}")
_ALLOCATOR = re.compile(rf"{_SIZE} is allocated by PyTorch|{_SIZE} is reserved by PyTorch|{_SIZE} reserved in total")
_SHARE = 0.2  # share of a GPU's memory; less may be that of NCCL and the context


def held_by_others(message: str) -> str:
    """The advice if other processes hold much of the GPU's memory, by PyTorch's message; empty if they do not.

    >>> held_by_others("CUDA out of memory. GPU 0 has a total capacity of 79.15 GiB of which 1.15 GiB is free. Process 17 "
    ... "has 60.00 GiB memory in use. Including non-PyTorch memory, this process has 18.00 GiB memory in use.")[:52]
    'other processes hold 60 of the 79.2 GiB of this GPU:'
    """
    total, free = _gib(_TOTAL, message), _gib(_FREE, message)
    of_process = _gib(_OWN, message) or _gib(_ALLOCATOR, message)
    if not total or not of_process or (others := total - free - of_process) < _SHARE * total:
        return ""
    return (
        f"other processes hold {others:.3g} of the {total:.3g} GiB of this GPU: end them (nvidia-smi lists them) or ask for whole"
        " nodes (--exclusive); if they are ranks of this job, give each a GPU of its own (torch.cuda.set_device(LOCAL_RANK))"
    )


def _gib(regex: re.Pattern[str], message: str) -> float:
    """The sum of the sizes that a regex finds, in GiB."""
    sizes = [[text for text in match if text] for match in regex.findall(message)]
    return sum(float(size) * _GIB[unit] for size, unit in sizes if size.replace(".", "", 1).isdigit())


_CHANGING = "(?:decreas|increas|reduc|lower|halv|chang|adjust)ing "
_TO = rf"(?: from {INT})?(?: to:?| ?[-=]>) "

DIALECT = Dialect(
    name="memory_exhausted",
    patterns=(
        # Ray: the host ran out of memory. The next line names the node.
        failure("host_memory", "running low on memory", raised("OutOfMemoryError", "node running low on memory")),
        failure("host_memory", "NODE_OUT_OF_MEMORY", r"(?P<words>(?:\b\w{1,20}:? ){0,6}NODE_OUT_OF_MEMORY\b.{0,200})"),
        failure("host_memory", "Memory on the node (IP: ",
            r"(?P<words>Memory on the node \(IP: (?P<node>\d{1,3}(?:\.\d{1,3}){3}).{0,300})"),
        failure("gpu_memory", "OutOfMemoryError", raised(r"OutOfMemoryError")),
        failure("gpu_memory", "out of memory",
            r"(?P<words>(?:(?<![\w.])(?:\w{1,60}\.){0,6}(?:\w{1,60}: )?)?(?:(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory"
            r"(?! (?:errors? )?(?:is|are|can|could|will|would|may|might|should|if)\b)"
            r"|(?:CUDA|HIP) error: out of memory|(?:Cuda|HIP) failure (?:\d{1,4} )?'out of memory').{0,700})"),
        failure("gpu_memory", "rror", raised(ANY_NAME,
            r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|cudaErrorMemoryAllocation"
            r"|RESOURCE_EXHAUSTED: ")),
        failure("host_memory", "MemoryError", raised(r"\w{0,20}MemoryError")),
        failure("host_memory", "rror", raised(ANY_NAME,
            r"DefaultCPUAllocator: |Cannot allocate memory|\[Errno 12\]|is killed by signal: (?:Killed|Bus error)")),
        failure("host_memory", "bad_alloc",
            r"(?P<words>terminate called after throwing an instance of .std::bad_alloc.)"),
        failure("host_memory", ": Killed process ",
            r"(?P<words>[Oo]ut of memory(?: \(oom_kill_allocating_task\))?: Killed " r"process \d{1,10}.{0,200})"),
        failure("host_memory", "OOMKilled", EXCEPTION_START + r"(?P<words>.{0,120}\bOOMKilled\b.{0,120})"),
        # The batch from this line on, in programs that look for the largest one that fits.
        *(
            Pattern("fact", rf"(?i)\b{regex}(?=\.?\s*$|[\s,;)])", literal=literal, weak=True)
            for literal, regex in (
                ("ing batch size", rf"{_CHANGING}batch size{_TO}(?P<device_batch_now>{INT})"),
                ("ing micro", rf"(?:{_CHANGING}|setting )micro[ -]?batch size{_TO}(?P<micro_batch_now>{INT})"),
                (
                    "batch size will be",
                    rf"micro[ -]?batch size will be (?:de|in)creased{_TO}(?P<micro_batch_now>{INT})",
                ),
                ("sing micro", rf"using micro[ -]?batch(?: size)? of (?P<micro_batch_now>{INT})"),
                ("ing global batch", rf"{_CHANGING}global batch size{_TO}(?P<global_batch_now>{INT})"),
                ("full run using", rf"will continue with full run using batch size (?P<device_batch_now>{INT})"),
                ("batch size of", rf"currently training with a batch size of: (?P<device_batch_now>{INT})"),
            )
        ),
    ),
)  # fmt: skip
