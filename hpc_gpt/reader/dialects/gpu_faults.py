"""Faults of a GPU, its driver or its links, and kernels that got invalid inputs."""

from hpc_gpt.reader.pattern import EXCEPTION_START, Dialect, echo, failure

# The driver's numbers of faults that a program can cause; 45 follows from another one. The others are faults of hardware,
# firmware or driver.
_BY_PROGRAM = r"(?:8|13|31|32|43|68|69)"

DIALECT = Dialect(
    name="gpu_faults",
    patterns=(
        failure("node_failure", "NVRM: Xid (",
            rf"(?:(?P<node>[a-z][\w.-]{{0,60}}) kernel: .{{0,40}})?(?P<words>NVRM: Xid "
            rf"\([^)]{{1,80}}\): (?!{_BY_PROGRAM}\b|45\b)\d{{1,3}}\b.{{0,300}})"),
        failure("error", "NVRM: Xid (", rf"(?P<words>NVRM: Xid \([^)]{{1,80}}\): {_BY_PROGRAM}\b.{{0,300}})"),
        echo("error", "NVRM: Xid (", r"(?P<words>NVRM: Xid \([^)]{1,80}\): 45\b.{0,300})"),
        failure("node_failure", "NVRM", r"(?P<words>GPU \S{0,80} ?has fallen off the bus.{0,100})"),
        failure("node_failure", "GPU is lost", r"(?P<words>.{0,120}GPU is lost.{0,120})"),
        failure("node_failure", "Failed to initialize NVML: ",
            r"(?P<words>Failed to initialize NVML: (?:Driver/library version mismatch" r"|Unknown Error|GPU).{0,100})"),
        failure("node_failure", " error: ", r"(?P<words>(?:CUDA|HIP|Cuda) error: (?:unspecified launch failure"
            r"|hardware stack error|device not ready|driver shutting down"
            r"|all CUDA-capable devices are busy|CUDA-capable device\(s\) is/are busy"
            r"|invalid device context|.{0,60}contained memory|initialization error).{0,300})"),
        failure("error", " error: ",
            r"(?P<words>(?:CUDA|HIP) error: (?:an )?(?:illegal memory access|illegal instruction"
            r"|misaligned address|invalid program counter|the launch timed out|invalid configuration"
            r"|CUBLAS_STATUS_(?!ALLOC)|CUDNN_STATUS_(?!ALLOC)|invalid argument).{0,300})"),
        failure("data", "device-side", r"(?P<words>(?:CUDA|HIP) error: device-side assert triggered.{0,200})"),
        # The message is on the next line, and says more.
        failure("error", " ERROR] at ", EXCEPTION_START + r"(?P<words>\[\w{1,20} ERROR\] at .{1,300})"),
        failure("data", "Assertion `", r"(?P<words>Assertion `[^`']{0,200}['`] failed.{0,100})"),
    ),
)  # fmt: skip
