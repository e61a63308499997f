"""Failures by their cure: missing or wrong nodes, software, files and settings. One row per family.

A row has the class, what a user can do, and how its messages are recognised: by the type of an exception, a code or
fixed words, with `…` for what varies. Of several rows that match a line the first counts, and a row counts before the
patterns of other dialects. To add a family, add a row, and a line in its form to the specimen.
"""

import re

from hpc_gpt.reader.lines.pattern import EXCEPTION_START, Dialect, Pattern, raised

# `causes.py` replaces the first advice by the second if the job asked for GPUs.
GPU_MISSING = "ask for GPUs (--gpus-per-node, --gres) and do not hide them: CUDA_VISIBLE_DEVICES, and --nv or --gpus of a container"
GPU_MISSING_ON_NODE = "the job asked for GPUs and this node shows none: exclude the node and report it"

_NO_INTERNET = (
    "download models and data on a login node, to a disk that the nodes see, and set HF_HUB_OFFLINE=1"
    " (WANDB_MODE=offline for wandb): most compute nodes have no internet"
)
_HUB_ANSWERS_BADLY = (
    "the server answered late or with a fault: start it again, or download on a login node before the job"
)
_ACCESS = "log in (HF_TOKEN) and accept the model's licence on its page; check the name"
OTHER_BUILD = (
    "install a build that matches this node's driver, CUDA, Python and C library, or load the modules that it was built"
    " with; `python -m torch.utils.collect_env` on the node lists them"
)
_BUILD = (
    "build it before the job, on a node with compiler and CUDA of the version that torch was built with: load their"
    " modules, set CUDA_HOME, delete ~/.cache/torch_extensions"
)
_INSTALL = "install what the message names into the environment of the job, with the option that builds this part of it"
HARDWARE = "these GPUs cannot do it: use another dtype, attention or GPU"
_RANKS = (
    "give each rank of a node a GPU of its own: device 0 if each task sees one GPU (--gpus-per-task, --gpu-bind), else"
    " LOCAL_RANK, on as many GPUs (--gpus-per-node) as ranks"
)
_SOCKET = (
    "name an interface that every node has (`ip -br addr`) in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or unset them"
)
_MASTER = "give MASTER_ADDR a name that every node resolves: `scontrol show hostnames $SLURM_JOB_NODELIST | head -1`"
_FILES = (
    "raise the limit in the job script (ulimit -n 65536), use fewer data workers, or"
    " torch.multiprocessing.set_sharing_strategy('file_system')"
)
_PROCESSES = "start fewer threads and processes (OMP_NUM_THREADS, data workers), or raise the limit (ulimit -u)"
_SHM = "give /dev/shm more room (--shm-size or --ipc=host of a container), or use fewer or smaller data workers"
_DAMAGED = (
    "the file was cut off or is not of this kind: copy or download it again (a few hundred bytes are a git-lfs pointer),"
    " or resume an older checkpoint"
)
_NEWER_FILE = (
    "a newer version of the library wrote the file: install that version (pip install -U tokenizers transformers)"
)
_UNFINISHED = "the checkpoint was never finished: resume an earlier one, and remove or rename this one"
_PICKLED = "torch 2.6 and later load weights only: torch.load(…, weights_only=False) for a file that you trust"
_DISK = (
    "the file system did not answer or was taken away: see whether the node still has it (df), and report it; if it is"
    " mounted read-only, write elsewhere"
)
_FABRIC = "the node's NVSwitch fabric or its driver is not up: exclude the node and report it (nvidia-fabricmanager, nvidia-smi -q)"
_DRIVER = (
    "kernel driver and CUDA library of this node do not fit each other: exclude the node and report it; if it happens on"
    " every node, take cuda-compat out of LD_LIBRARY_PATH or use an older container"
)
BROKEN_GPU = "exclude the node and report it: its GPU or driver is broken until it is reset"
_BINDING = (
    "the binding names CPUs, GPUs or memory that the step does not have: correct --cpu-bind, --gpu-bind, --mem-bind,"
    " --hint and --cpus-per-task (`srun --cpu-bind=verbose` and nproc in the job show what it has); cores that the site"
    " reserves count as missing"
)
_BY_REQUEST = (
    r"(?:\bbind|\bbinding|affinity|[Rr]equested|[Ii]nvalid (?:argument|option|mask|value|generic)|[Nn]ot available)"
)
_LAUNCH = "exclude the node and report it: slurmd could not start the task there (clock, munge or network of the node)"
AMD_KERNEL = (
    "a kernel read or wrote outside its memory: find it with AMD_SERIALIZE_KERNEL=3 (HIP) or CUDA_LAUNCH_BLOCKING=1, and"
    " try a build for this GPU"
)
AMD_MEMORY = (
    "a GPU had no memory for a queue or a kernel's scratch: a smaller micro-batch, or fewer processes on each GPU"
)
COLLECTIVE = "read `Last error` below it and the lines of the other ranks; started with NCCL_DEBUG=INFO, NCCL says which call failed"
LOCKED_MEMORY = (
    "raise the limit of locked memory on every node (ulimit -l unlimited): InfiniBand and EFA pin what they send"
)
_CONDA = "let the job script load conda first: source CONDA/etc/profile.d/conda.sh, or call the environment's python by its path"
_OLD_CPU = "the nodes' processors are older than the container or the Python was built for: another image, or another partition"
_CERTIFICATES = (
    "name a file of certificates that the nodes have (REQUESTS_CA_BUNDLE, SSL_CERT_FILE, CURL_CA_BUNDLE), or unset the"
    " variable"
)
_CONFIGURATION = "correct the option or key that the message names: this version of the program does not know it, or does not accept that value"
_OTHER_CHECKPOINT = (
    "the checkpoint belongs to another model, optimizer or version: resume with those it was saved with, or load only its"
    " weights"
)
OTHER_SIZE = "resume on as many GPUs as saved it, convert the checkpoint, or load only its weights"
_ENGINE_MEMORY = (
    "the inference engine found too little free GPU memory: end what else holds it, or change its share"
    " (gpu_memory_utilization), or shorten its sequences (max_model_len)"
)
_REGISTER = (
    "InfiniBand could not use this memory: report the node (nvidia-peermem, its driver), or start without it"
    " (NCCL_NET_GDR_LEVEL=LOC)"
)
_NODE_OF_RAY = (
    "Ray lost a node: its raylet.out and Slurm's accounting say which and why; exclude the node if it is broken"
)
_CUDA_KERNEL = (
    "a kernel read or wrote outside its memory: find it with CUDA_LAUNCH_BLOCKING=1; Xid in dmesg is a GPU's fault"
)
_CUDA_INSTRUCTION = (
    "a GPU met an instruction that it cannot run: a fault of the GPU, or a kernel for another kind; start again, and if it"
    " comes back on the node, exclude it and run dcgmi diag -r 3 there"
)
_CONTROLLER = "Slurm's controller did not answer in time: submit again"
_MODEL_FOLDER = "name a folder that holds the model's config, weights and tokenizer, and that the nodes see"
_NEWER_LIBRARY = "install the version that the message asks for into the environment of the job"
# Ranks wait for others that never came; causes.py excludes no node for such a failure.
NEVER_MET = (
    "see in the other ranks' logs why they did not come (were all started, did one fail before?), and whether each node"
    " reaches MASTER_ADDR at MASTER_PORT; exclude the nodes of which no rank printed a line"
)
_JOINED = re.compile(
    r"(\d{1,7})/(\d{1,7}) (?:clients|workers|ranks|processes|members) (?:have )?joined|world_size=(\d{1,7}), (?:worker_count|num_workers_joined)=(\d{1,7})"
)


# More have come than there are.
OLD_MEETING = (
    "more workers came than there are: the rendezvous file or port is also an earlier start's; use another file, or"
    " another port, for each start (by SLURM_RESTART_COUNT), or remove the file before it"
)


def has_too_many(message: str) -> bool:
    """Whether more workers have come to a meeting than there are, by the counts in the message of one that waited."""
    match = _JOINED.search(message)
    return match is not None and match[3] is not None and int(match[4]) > int(match[3])


def never_came(message: str) -> str:
    """The ranks that never came to a meeting, in words, by the counts in the message of one that waited; empty without
    counts.

    >>> never_came("Timed out after 1801 seconds waiting for clients. 2016/2048 clients joined.")
    '32 of 2048 ranks never came'
    """
    if (match := _JOINED.search(message)) is None:
        return ""
    came, size = (int(match[1]), int(match[2])) if match[1] else (int(match[4]), int(match[3]))
    return f"{size - came} of {size} ranks never came" if 0 < came < size else ""


# `causes.py` replaces the second advice by the first if the container started on other nodes.
CONTAINER_ON_NODE = "the container started on the other nodes: exclude this one and report it"
CONTAINER = (
    "the container did not start: check the image's name and path, its registry's login, and the space for its layers"
)
_PROFILE = "correct setup, modules or venv in the cluster profile; the lines before it say what failed"
_MODULE = "load a module that this cluster has (module avail)"
_FORK = "start data workers by spawn (multiprocessing_context='spawn'), or touch no GPU before they start"


# Texts that show that a line reports a failure, before the text of the failure; and that it only mentions one.
_REPORTS = (
    r"(?:(?:(?<![^\s\]:])(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception)(?:\([\w.]{1,80}\))?"
    r"|\b(?:[Ee]rror|[Ff]atal|[Ff]ailure|[Ff]ailed|FAILED)|Warning: CUDA initialization)(?=:)"
    r"|\b(?:ERROR|FATAL|CRITICAL|NCCL WARN|Cuda failure)(?=[\]: ])|what\(\):)"
)
_ONLY_MENTIONS = (
    r"(?! {0,16}[-*+•#>] |.{0,300}Warning: (?!CUDA initialization)"
    r"|.{0,100}\b(?:INFO|DEBUG|WARNING|[Ww]arning|(?<!NCCL )WARN)\b(?!: CUDA init))"
)
VARIES = "…"


def failure_family(
    ended: str, to_do: str, *, raised_as: str = "", says: str = "", line: str = "", echo: bool = False
) -> tuple[Pattern, ...]:
    """The patterns of failures with one cure: `to_do`, printed in place of the advice of the class `ended`.

    `raised_as`: names of exceptions, separated by blanks, with any message. `says`: texts, separated by ` | `, which
    count only after a sign that the line reports a failure, such as the name of an exception; `line`: texts that count
    anywhere. `…` in a text or a name stands for a varying part; the case of a text's first letter does not matter.

    >>> import re
    >>> (pattern,) = failure_family("user_error", "load it", says="version `GLIBC…' not found")
    >>> re.search(pattern.regex, "ImportError: /lib64/libc.so.6: version `GLIBC_2.32' not found")["words"][:30]
    'ImportError: /lib64/libc.so.6:'
    """
    forms = []
    for name in raised_as.split():
        pieces = name.split(VARIES)
        forms.append((max(pieces, key=len), raised(r"\w{0,60}".join(map(re.escape, pieces)))))
    reported = says.split(" | ") if says else []
    for text in (*reported, *(line.split(" | ") if line else ())):
        first, *pieces = text.split(VARIES)
        begin = f"[{first[0].upper()}{first[0].lower()}]" if first[:1].isalpha() else re.escape(first[:1])
        body = r".{0,200}?".join([begin + re.escape(first[1:]), *map(re.escape, pieces)])
        before = rf".{{0,300}}?{_REPORTS}.{{0,1000}}?" if text in reported else r".{0,300}?"
        regex = rf"{EXCEPTION_START}{_ONLY_MENTIONS}(?P<words>{before}{body}.{{0,300}})"
        forms.append((max(first[1:], *pieces, key=len) if pieces else first[1:], regex))
    return tuple(
        Pattern("failure", regex, literal=literal, ended=ended, echo=echo, to_do=to_do) for literal, regex in forms
    )


def _cuda(code: int, name: str, says: str, ended: str, to_do: str) -> tuple[Pattern, ...]:
    """The patterns of an error of CUDA or HIP: by its number and name in any message, and by its text."""
    constant = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).upper()
    named = (f"cudaError{name}", f"CUDA_ERROR_{constant}", f"hipError{name}")
    forms = [(symbol, rf".{{0,600}}?\b{symbol}\b") for symbol in named]
    about = r"(?=.{0,1000}(?i:cuda|nvidia|nccl)).{0,600}?"
    number = rf"{about}\b(?i:error|failure|code|err)(?: code)?[ :=(]{{1,3}}{code}\b"
    forms += [(f"{begin}{code}", number) for begin in ("rror ", "rror: ", "rror (", "ailure ", "code ")]
    return (
        *failure_family(ended, to_do, says=says),
        *(
            Pattern(
                "failure", rf"{EXCEPTION_START}(?P<words>{form}.{{0,300}})", literal=literal, ended=ended, to_do=to_do
            )
            for literal, form in forms
        ),
    )


DIALECT = Dialect(
    name="failure_families",
    patterns=(
        # --- a node: its GPU, driver, fabric
        *_cuda(802, "SystemNotReady", "system not yet initialized", "node_failure", _FABRIC),
        *_cuda(803, "SystemDriverMismatch", "system has unsupported display driver", "node_failure", _DRIVER),
        *_cuda(804, "CompatNotSupportedOnDevice", "forward compatibility was attempted", "node_failure", _DRIVER),
        *_cuda(999, "Unknown", "CUDA unknown error", "node_failure", BROKEN_GPU),
        *_cuda(214, "ECCUncorrectable", "uncorrectable ECC", "node_failure", BROKEN_GPU),
        *_cuda(220, "NvlinkUncorrectable", "uncorrectable NVLink", "node_failure", BROKEN_GPU),
        *_cuda(721, "Contained", "Invalid access of peer GPU memory", "node_failure", BROKEN_GPU),
        *failure_family("node_failure", BROKEN_GPU,
            says="'unknown error' | error: unknown error | ECC error | double bit error | double-bit ECC",
            line=("row remapping failure | RmInitAdapter failed | fallen off the bus | "
            "Unable to determine the device handle for GPU | GPU requires reset")),
        *failure_family("node_failure", _FABRIC,
            says=("fabric manager | fabric Manager | fabricmanager | NVSwitch | fabric state | NVLink is down | "
            "nvlink inactive")),
        # What the request itself makes impossible is not the node's fault.
        Pattern("failure",
            rf"(?P<words>srun: error: Task launch for \S{{1,60}} failed on node [\w.-]{{1,80}}: .{{0,80}}?{_BY_REQUEST}.{{0,200}})",
            literal="ask launch for ", ended="user_error", to_do=_BINDING),
        Pattern("failure",
            rf"(?P<words>srun: error: Task launch for \S{{1,60}} failed on node (?P<node>[\w.-]{{1,80}}): (?!.{{0,80}}?{_BY_REQUEST}).{{0,200}})",
            literal="ask launch for ", ended="node_failure", to_do=_LAUNCH),
        *(
            Pattern("failure",
                rf"^(?:\d{{1,7}}: )?(?P<words>(?:srun|slurmstepd)\S{{0,80}}: (?:error|fatal): .{{0,200}}?\b(?i:cpu|gpu|mem|tres)[-_ ]{word}.{{0,200}})",
                literal=word, ended="user_error", to_do=_BINDING)
            for word in ("bind", "Bind")
        ),
        *failure_family("user_error", _BINDING,
            line=("libnuma: Error: | failed to set pid…affinity | sched_setaffinity…failed | sched_setaffinity: Invalid argument")),
        # --- lines that point to others
        *failure_family("error", "", raised_as="RayActorError ActorDiedError", echo=True,
            says="See root cause above | Failed core proc(s) | See stack trace for root cause",
            line="The actor died because | The actor is dead because | A worker died or was killed"),
        # --- software that was not built: what follows from the compiler's line
        *failure_family("user_error", _BUILD,
            says=("Error building extension | Error compiling objects for extension | torch_extensions/….so: cannot open"),
            line="ninja: build stopped | collect2: error: ld returned", echo=True),
        # --- a program for other drivers, GPUs, libraries
        *_cuda(35, "InsufficientDriver", "driver version is insufficient", "user_error", OTHER_BUILD),
        *_cuda(209, "NoKernelImageForDevice", "no kernel image is available", "user_error", OTHER_BUILD),
        *_cuda(222, "UnsupportedPtxVersion", "compiled with an unsupported toolchain", "user_error", OTHER_BUILD),
        *_cuda(200, "InvalidKernelImage", "device kernel image is invalid", "user_error", OTHER_BUILD),
        *_cuda(34, "StubLibrary", "CUDA driver is a stub library", "user_error", OTHER_BUILD),
        *_cuda(98, "InvalidDeviceFunction", "invalid device function", "user_error", OTHER_BUILD),
        *failure_family("user_error", OTHER_BUILD,
            says=("driver on your system is too old | Could not load lib | Torch not compiled with | undefined symbol: | "
            "version `GLIBC…' not found | version `CXXABI…' not found | cannot open shared object file | "
            "binary incompatibility | compiled against API version | compiled using NumPy 1 | "
            "does not match the version torch was compiled with | does not have the same CUDA version | "
            "mismatches the version that was used to compile | VERSION_MISMATCH | version incompatibility | "
            "compiled with different CUDA versions | different CUDA major versions | incompatible with jax | "
            "does not recognize this architecture | wrong ELF class | invalid ELF header | exec format error"),
            line=("error while loading shared libraries: | hipErrorNoBinaryForGpu | CUDA_ERROR_NO_BINARY_FOR_GPU | "
            "CUDA_ERROR_INVALID_IMAGE | TensileLibrary…No such file | ptxas fatal | "
            "not defined for option 'gpu-name'"), raised_as="CUDAMismatchException"),
        *failure_family("user_error", HARDWARE, raised_as="OutOfResources",
            says=("only supports Ampere | only supported on GPUs with compute capability | doesn't support bf16 | "
            "bf16…not supported | bfloat16…not supported | requires compute capability | "
            "requires device with capability")),
        # --- software that was not built: the compiler's line, and what asks for it
        *failure_family("user_error", _BUILD,
            line=("nvcc fatal | nvcc: not found | unsupported GNU version | gcc versions later than | ld: cannot find -l | "
            "ninja: error: | error: command '…gcc' failed | error: command '…nvcc' failed"),
            says=("CUDA_HOME | Unable to JIT load | Ninja is required | cannot find nvcc | "
            "No such file or directory: '…/nvcc' | No such file or directory: 'nvcc' | "
            "No such file or directory: 'ninja' | No such file or directory: 'which' | Failed to find C compiler")),
        Pattern("failure",
            r"^(?:\[[^\]]{1,40}\]:? ?)?(?P<words>[\w./+-]{1,300}(?::\d{1,7}){1,2}: fatal error: .{0,300}"
            r"|[\w./+-]{1,300}\.(?:cu|cuh|cpp|cc|c|h|hpp|hip)(?:(?::\d{1,7}){1,2}|\(\d{1,7}\)): error: .{0,300})",
            literal=" error: ", ended="user_error", to_do=_BUILD),
        *failure_family("user_error", _OLD_CPU, line="Fatal glibc error: CPU does not support"),
        *failure_family("user_error", _CONDA, line="Run 'conda init' before"),
        *failure_family("user_error", _NEWER_LIBRARY,
            says="requires at least | is required for a normal functioning | Using `…` requires | requires …, found"),
        # --- what was asked for
        *failure_family("user_error", _CONFIGURATION,
            raised_as="MissingConfigException ConfigCompositionException OverrideParseException MissingMandatoryValue",
            says=("are not used by the | __init__() got an unexpected keyword argument | is not in struct | "
            "__init__() missing…required positional argument | extra inputs are not permitted"),
            line="Could not override ' | Primary config module '"),
        *failure_family("user_error", _NEWER_FILE,
            says="does not exist or is not currently imported | but Transformers does not recognize this architecture"),
        *failure_family("user_error", _MODEL_FOLDER,
            says="Error no file named | is not a valid folder | is not a folder containing a"),
        *failure_family("user_error", _CERTIFICATES,
            says="Could not find a suitable TLS CA certificate bundle | No such file or directory: '…cacert.pem' | "
            "No such file or directory: '…ca-bundle.crt' | No such file or directory: '…ca-certificates.crt'"),
        *failure_family("user_error", _INSTALL,
            says=("package doesn't have | please install | please build | is not installed | are not installed | "
            "was not built with | was not compiled with | compiled without | built without | "
            "not available. Make sure to install | No module named")),
        # --- no GPU
        *failure_family("user_error", GPU_MISSING,
            says=("No CUDA GPUs are available | No HIP GPUs are available | no ROCm-capable device is detected | "
            "no NVIDIA driver on your system | might not have a CUDA gpu | no GPUs found | "
            "CUDA is not available | torch.cuda.is_available() is False | requires a GPU | "
            "No supported gpu backend found | no GPU found | no GPU available | no GPU detected | "
            "No supported GPUs | your machine only has: [] | device_count() = 0")),
        *_cuda(100, "NoDevice", "no CUDA-capable device", "user_error", GPU_MISSING),
        *_cuda(101, "InvalidDevice", "invalid device ordinal", "user_error", _RANKS),
        *failure_family("user_error", _RANKS, says="but your machine only has | device >= 0 && device < num_gpus",
            line="Duplicate GPU detected"),
        *failure_family("user_error", LOCKED_MEMORY,
            says="ibv_…failed with error Cannot allocate memory | locked memory limit"),
        *failure_family("error", _REGISTER, says="Call to ibv_reg_mr…failed with error", echo=True),
        *failure_family("error", _CONTROLLER,
            says=("Unable to confirm allocation…timed out | Unable to create step…timed out | "
            "Unable to allocate resources: …timed out | allocate failed: Socket timed out | "
            "Unable to contact slurm controller")),
        *failure_family("node_failure", _NODE_OF_RAY, raised_as="NodeDiedError", says="because its node has died",
            line="Owner's node has crashed"),
        *failure_family("user_error", CONTAINER,
            line="error: pyxis: | error: spank: | FATAL:   could not open image | FATAL:   container creation failed",
            says="could not open image | container creation failed | error during container init | enroot-"),
        *failure_family("user_error", _MODULE,
            line="Lmod has detected the following error | Unable to locate a modulefile for", echo=True),
        *failure_family("user_error", _PROFILE,
            line="Error: setup failed on | Error: module load failed on | Error: no virtual environment on"),
        *failure_family("user_error", _FORK, says="re-initialize CUDA in forked subprocess"),
        # --- limits of a process
        *failure_family("user_error", _FILES, says="too many open files | [Errno 24] | items of ancdata | EMFILE",
            line="too many open files (24)"),
        *failure_family("user_error", _PROCESSES,
            says="can't start new thread | [Errno 11] Resource temporarily unavailable",
            line="pthread_create failed for thread"),
        *failure_family("host_memory", _SHM,
            says=("No space left on device: '/dev/shm | "
            "posix_fallocate failed | unable to mmap | unable to open shared memory object | "
            "unable to write to file </torch_ | out of shared memory"),
            line="Error while creating shared memory segment | failed to extend /dev/shm | insufficient shared memory (shm) | "
            "Bus error: nonexistent physical address"),
        *failure_family("gpu_memory", _ENGINE_MEMORY,
            says=("No available memory for the cache blocks | Free memory on device…less than desired GPU memory | "
            "larger than the available KV cache memory | larger than the maximum number of tokens that can be stored in KV")),
        *failure_family("error", COLLECTIVE,
            says="unhandled cuda error | invalid argument, NCCL | internal error - please report | invalid usage"),
        # --- names and interfaces of the network between the nodes, then the world outside
        *failure_family("collective_timeout", NEVER_MET, raised_as="RendezvousTimeoutError",
            says="waiting for clients | client socket has timed out | Wait_for_all_tasks_to_register"),
        *failure_family("user_error", _SOCKET,
            says=("no socket interface found | no interface found | Unable to find address for | "
            "Unable to find interface for | Unable to resolve hostname | No network interface | "
            "is not available, please use one or more of"),
            line="Bootstrap : no socket interface | NET/Socket : no interface | No IP interface found"),
        *failure_family("user_error", _MASTER, says="gai error | getaddrinfo(…) failed"),
        *failure_family("user_error", _MASTER, line="cannot be retrieved (gai error", echo=True),
        *failure_family("error", _HUB_ANSWERS_BADLY, raised_as="HfHubHTTPError ReadTimeoutError ReadTimeout",
            says="Server Error | Read timed out | 429 Client Error | Too Many Requests"),
        *failure_family("user_error", _ACCESS,
            raised_as="GatedRepoError RepositoryNotFoundError RevisionNotFoundError EntryNotFoundError",
            says=("401 Client Error | 403 Client Error | gated repo | api_key not configured | "
            "is not a local folder and is not a valid model | does not appear to have a file named")),
        *failure_family("user_error", _NO_INTERNET,
            raised_as="LocalEntryNotFoundError OfflineModeIsEnabled ConnectTimeout ConnectTimeoutError NewConnectionError"
            " NameResolutionError MaxRetryError ProxyError gaierror URLError CommError"
            " EndpointConnectionError ClientConnectorError ClientConnectorDNSError",
            says=("[Errno 101] | Network is unreachable | Name or service not known | "
            "Temporary failure in name resolution | No address associated with hostname | "
            "nodename nor servname provided | Failed to resolve ' | Max retries exceeded with url | "
            "Failed to establish a new connection | couldn't connect to 'http | couldn't reach | "
            "could not resolve host | check your internet connection | internet connection is on | "
            "offline mode is enabled | outgoing traffic has been disabled | "
            "cannot find the requested files in the | all connection attempts failed | "
            "connection to …huggingface.co timed out"), line="could not resolve host:"),
        *failure_family("user_error", _NO_INTERNET, line="thrown while requesting", echo=True),
        *failure_family("user_error", _OTHER_CHECKPOINT,
            says=("Restoring state from a different dataset | Missing key in checkpoint | Unexpected key in checkpoint | _OptimStateKey | size mismatch for | "
            "loaded state dict contains a parameter group | Missing key(s) in state_dict")),
        *failure_family("user_error", OTHER_SIZE,
            says=("checkpoint being loaded used a…world size | different…world size…checkpoint | "
            "saved…ranks…loaded | created with a world size | mismatch after resume ((")),
        # --- files that are damaged, of another version, or not whole
        *failure_family("user_error", _NEWER_FILE, line="untagged enum ModelWrapper"),
        *failure_family("data", _UNFINISHED, says="No such file or directory: '…/.metadata'"),
        *failure_family("user_error", _PICKLED, says="Weights only load failed | WeightsUnpickler error"),
        *failure_family("data", _DAMAGED,
            raised_as="UnpicklingError BadZipFile BadGzipFile LZMAError ArrowInvalid UnidentifiedImageError",
            says=("PytorchStreamReader failed | failed finding central directory | deserializing header | "
            "InvalidHeader | HeaderToo | MetadataIncompleteBuffer | InvalidOffset | archive is corrupted | "
            "file might be corrupted | invalid load key | pickle data was truncated | ran out of input | "
            "end-of-stream marker | not a gzipped file | not a zip file | Parquet magic bytes | "
            "Invalid flatbuffers message | file signature not found | file in archive is not in | "
            "invalid magic number | Cannot load file containing pickled data | "
            "mmap length is greater than file size | buffer is smaller than requested size | truncated file | "
            "file is truncated | unexpected EOF | magic number mismatch | doesn't match expected format | "
            "tokens read does not match | as a pickle | storage has wrong byte size | checksum mismatch | "
            "hash mismatch"), line="magic number mismatch in the data"),
        *failure_family("data", _UNFINISHED, says="incomplete checkpoint | checkpoint is incomplete"),
        # --- disks
        *failure_family("error", _DISK,
            says=("[Errno 5] | [Errno 30] | [Errno 107] | [Errno 108] | [Errno 112] | [Errno 116] | [Errno 121] | "
            "stale file handle | stale NFS file handle | input/output error | read-only file system | "
            "transport endpoint")),
        # --- kernels
        *failure_family("user_error", OTHER_BUILD, raised_as="CompilationError"),
        *failure_family("error", _CUDA_KERNEL, says="an illegal memory access | misaligned address"),
        *failure_family("error", _CUDA_INSTRUCTION, says="an illegal instruction | CUDA_ERROR_ILLEGAL_INSTRUCTION"),
        # --- tasks of JAX
        Pattern("failure", r"(?P<words>\bTask (?P<rank>\d{1,7}) on (?P<node>[\w.-]{1,80}) became unhealthy.{0,200})",
                "became unhealthy", ended="node_failure"),
        # --- AMD's
        *failure_family("gpu_memory", AMD_MEMORY, line="HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
        *failure_family("error", AMD_KERNEL, line="Memory access fault by GPU | HW Exception by GPU | HSA_STATUS_ERROR_"),
    ),
)  # fmt: skip
