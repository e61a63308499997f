"""Faults of AMD's GPUs, their drivers and libraries, and of the caches in which these store kernels.

Also the advice in the words of AMD's tools: `for_vendor`.
"""

import re
from collections.abc import Iterable

from hpc_gpt.reader.failures.failure_families import (
    AMD_KERNEL,
    AMD_MEMORY,
    BROKEN_GPU,
    GPU_MISSING,
    GPU_MISSING_ON_NODE,
    HARDWARE,
    OTHER_BUILD,
    failure_family,
)
from hpc_gpt.reader.lines.pattern import EXCEPTION_START, Dialect, Pattern, failure

_CACHE = (
    "several processes shared a cache of kernels on a file system without working locks: give each node its own,"
    " in /tmp (MIOPEN_USER_DB_PATH, MIOPEN_CUSTOM_CACHE_DIR, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR, AITER_JIT_DIR)"
)
_SAME_GPUS = (
    "ranks of a node must see the same GPUs to share memory: the same ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES for"
    " each, no --gpus-per-task or --gpu-bind; or NCCL_P2P_DISABLE=1"
)
_FP8 = (
    "this GPU has no such FP8: MI300X and MI325X have float8_e4m3fnuz, MI350X and later float8_e4m3fn, MI250X has none;"
    " train in bf16, or with the other form"
)
_DEVICE_FILES = (
    "give the job and its container the GPU's device files: /dev/kfd and /dev/dri (--rocm of apptainer), and your user"
    " the groups render and video"
)
_FILE_LOCK = (
    "this file system gives no file locks: HDF5_USE_FILE_LOCKING=FALSE for HDF5, and caches and lock files in /tmp"
)
_GPU_RESET = (
    "the driver reset the GPU, most often after a kernel that never ended: read what the ranks printed before it"
)

# In kernel messages: what no program causes.
_HARDWARE_FAULT = (
    r"(?:uncorrectable hardware error\(|(?<![\d.])[1-9]\d{0,8} (?:new )?uncorrectable|\bpoison\b.{0,60}?(?:consum|creat|detect|fatal)"
    r"|\bRAS\b.{0,80}?(?:fatal|unrecoverable|uncorrect)|reset(?:\(\d{1,6}\))? failed|[Rr]ecovery [Ff]ailed|device lost"
    r"|VRAM is lost|unrecoverable state|[Ff]atal error during GPU init|(?:PSP|SMU|MES)\b.{0,60}(?:failed to respond|hang|dead))"
)
_KERNEL_LINE = r"(?:(?P<node>[a-z][\w.-]{0,60}) kernel: .{0,40})?"

# Signs that a log is of a vendor's GPUs, and the words of NVIDIA's advice in AMD's.
_OF_AMD = re.compile(
    r"\bHIP\b|ROCm|rocBLAS|hipBLAS|\bRCCL\b|MIOpen|HSA_STATUS|amdgpu|\bhip[A-Z]\w+|\bgfx\d{3}|AMD Instinct"
)
_OF_NVIDIA = re.compile(r"\bC(?:UDA|uda)\b|NVIDIA|NVRM|\bcu(?:BLAS|DNN)\b|CUBLAS|CUDNN")
_WORDS = {
    "CUDA_VISIBLE_DEVICES": "ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES",
    "--nv ": "--rocm ",
    "nvidia-smi": "amd-smi process",
    "CUDA_LAUNCH_BLOCKING=1": "AMD_SERIALIZE_KERNEL=3",
    "Xid in dmesg is": "amdgpu's lines in dmesg are",
    "CUDA_HOME": "ROCM_HOME",
    "CUDA": "ROCm",
}


_ANY_WORD = re.compile("|".join(map(re.escape, _WORDS)))


def for_vendor(to_do: str, message: str, others: Iterable[str] = ()) -> str:
    """The advice on a failure's message, with AMD's tools and variables if the message, or else `others` of its log,
    names AMD's GPUs.

    >>> for_vendor("find it with CUDA_LAUNCH_BLOCKING=1", "RuntimeError: HIP error: misaligned address")
    'find it with AMD_SERIALIZE_KERNEL=3'
    """
    for text in (message, " ".join(others)):
        if _OF_AMD.search(text):
            return _ANY_WORD.sub(lambda match: _WORDS[match[0]], to_do)
        if _OF_NVIDIA.search(text):
            break
    return to_do


DIALECT = Dialect(
    name="amd_faults",
    patterns=(
        # --- the kernel's messages, and counters of errors
        Pattern("failure", rf"{_KERNEL_LINE}(?P<words>\bamdgpu.{{0,200}}?{_HARDWARE_FAULT}.{{0,200}})",
                literal="amdgpu", ended="node_failure", to_do=BROKEN_GPU),
        Pattern("failure", rf"{_KERNEL_LINE}(?P<words>amdgpu\b.{{0,120}}?(?:\[\w{{1,20}}\] (?:no-retry |retry )?page fault|GPU fault"
                r" detected).{0,200})", literal="amdgpu", ended="error", to_do=AMD_KERNEL),
        Pattern("failure", rf"{_KERNEL_LINE}(?P<words>amdgpu\b.{{0,120}}?(?:GPU reset begin|ring \S{{1,40}} timeout).{{0,200}})",
                literal="amdgpu", ended="error", echo=True, to_do=_GPU_RESET),
        Pattern("failure", r"(?P<words>\b\w{0,20}UNCORRECTABLE_COUNT ?[:=] {0,20}[1-9]\d{0,8}\b.{0,100})",
                literal="UNCORRECTABLE_COUNT", ended="node_failure", to_do=BROKEN_GPU),
        # Of the processor and its memory.
        failure("node_failure", "[Hardware Error]", r"(?P<words>\[Hardware Error\].{0,100}?\b(?:[Uu]ncorrected|UE\b|[Ff]atal|PCC\b).{0,100})"),
        *failure_family("node_failure", BROKEN_GPU,
            line="hipErrorECCNotCorrectable | HSA_STATUS_ERROR_MEMORY_FAULT_ECC"),
        *failure_family("node_failure", GPU_MISSING_ON_NODE,
            line="ROCk module is NOT loaded | amdgpu not found in modules | AMDSMI_STATUS_DRIVER_NOT_LOADED"),
        # --- memory
        failure("gpu_memory", "hipErrorOutOfMemory", EXCEPTION_START + r"(?P<words>.{0,300}?hipErrorOutOfMemory\b.{0,200})"),
        *failure_family("gpu_memory", AMD_MEMORY, line="callbackQueue aborting with status…0x1008"),
        # --- builds, kernels, device files
        *failure_family("user_error", OTHER_BUILD,
            line=("HSA_STATUS_ERROR_INVALID_ISA | HSA_STATUS_ERROR_INVALID_CODE_OBJECT | HSA_STATUS_ERROR_INCOMPATIBLE | "
            "HSA_STATUS_ERROR_INVALID_AGENT | hipErrorSharedObjectInitFailed")),
        *failure_family("error", AMD_KERNEL,
            line="callbackQueue aborting with | hipErrorIllegalAddress | hipErrorLaunchFailure | hipErrorLaunchTimeOut | hipErrorAssert"),
        *failure_family("user_error", _DEVICE_FILES,
            line="Unable to open /dev/kfd | Failed to open /dev/kfd | open /dev/dri"),
        *failure_family("user_error", GPU_MISSING, says="No AMD GPUs found"),
        *failure_family("user_error", _FP8,
            says=("Cannot convert ScalarType Float8 | Float8_e4m3fn…is not supported | Float8_e4m3fn…only supported | "
            "_scaled_mm is only supported | fp8e4nv not supported | float8…not supported on gfx | "
            "type fp8e4…not supported")),
        *failure_family("user_error", HARDWARE, says="not supported on gfx | is not supported on this architecture"),
        # --- caches of kernels
        *failure_family("user_error", _FILE_LOCK, says="unable to lock file | [Errno 524] | Unknown error 524 | [Errno 35]",
            line="flock failed"),
        *failure_family("error", _CACHE,
            says=("Stale file handle: '….triton/ | Stale file handle: '…torchinductor | Stale file handle: '…torch_extensions | "
            "Stale file handle: '…/.cache/ | Stale file handle: '…/cache/ | Stale file handle: '…miopen")),
        *failure_family("user_error", _CACHE,
            says=("accessing SQLite database | database is locked | locking protocol | unable to open database file | "
            "No such file or directory: '….triton/ | No such file or directory: '…/triton/cache | "
            "No such file or directory: '…torchinductor | [Errno 37] | No locks available | "
            "Directory not empty: '….triton/ | "
            "Permission denied: '….triton/ | Permission denied: '…miopen | Permission denied: '…aiter"),
            line="The file lock '…could not be acquired | Internal error while accessing SQLite | MIOpen…database is locked | MIOpen…Could not lock file | MIOpen…lock_file"),
        # --- ranks that do not see the same GPUs
        *failure_family("user_error", _SAME_GPUS, line="hipIpcGetMemHandle…failed | hipIpcOpenMemHandle…failed", echo=True),
        *failure_family("user_error", _SAME_GPUS, says="hipIpcGetMemHandle | hipIpcOpenMemHandle | hsa_amd_ipc_memory_"),
    ),
)  # fmt: skip
