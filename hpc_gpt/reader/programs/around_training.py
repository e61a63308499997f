"""Lines around a training: launchers, GPUs, ends and failures of programs, and columns of figures."""

from hpc_gpt.reader.lines.part import SAID_DONE
from hpc_gpt.reader.lines.pattern import (
    AFTER,
    ANY_NAME,
    ANY_NUMBER,
    END,
    EXCEPTION_START,
    IS,
    LINE_START,
    NUMBER,
    START,
    Dialect,
    Pattern,
    echo,
    failure,
    line,
    raised,
)

_TAB = r"\t {0,8}"

# The driver's numbers of faults that a program can cause; 45 follows from another one. The others are faults of hardware,
# firmware or driver.
_BY_PROGRAM = r"(?:8|13|31|32|43|68|69)"

# The reader stores eight distinct values of a fact: a table with more GPUs is not counted.
_INDEX = r"(?:(?P<gpu_index>[0-7])|(?P<gpu_index_above_7>\d{1,3}))"

_DEVICE = (
    r"(?P<device>(?:NVIDIA |Tesla |AMD Instinct |TPU v\d)[\w -]{1,40}|(?:NVIDIA )?GeForce RTX \d{4}(?: Ti)?"
    r"|(?:A100|H100|V100)-(?:PCIE|SXM\d)-\d{2}GB|TPU v\d\w{0,2})"
)

_TIME = (
    r"(?:\d{1,9}:\d\d:\d\d|\d{1,4}h ?\d{1,2}m"
    r"|\d[\d.,]{0,12} ?(?:ms|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?)\b(?!/))"
)
_STEP_SAID = r"(?:\b(?:step|iter(?:ation)?|update)s?[ =:]{1,3}\d|\b\d[\d,]{0,14} (?:\w{1,20} )?(?:steps|iter(?:ation)?s|updates)\b)"
# (text at the begin of a line or of a word, regex after it, how the program ended), and the program.
_ENDS = (
    ("done training in ", r"[\d.,]{1,12} seconds", "done"),  # fairseq
    ("Total training time", rf": {_TIME}\s*$", "done"),  # nanochat
    ("Training time ", r"(?:\d{1,4} days?, )?\d{1,3}:\d\d:\d\d\s*$", "done"),  # DeiT and its kin
    ("total average iteration time: ", r"[\d.]{1,12} ms", "done"),  # llm.c
    ("final ", r"\d{1,9} iters avg: [\d.]{1,12}ms", "done"),  # llm.c's train_gpt2.py
    ("peak memory allocated: ", r"\d{1,9} MiB reserved: \d{1,9} MiB\s*$", "done"),  # modded-nanogpt
    ("stopping_early: wallclock_cap", r"\b", "walltime"),  # parameter-golf
    ("End time of running main: ", r"\d", "done"),  # ms-swift
    ("Final validation metrics: ", r"\{", "done"),  # verl
    (
        "Training ",
        r"(?:is )?(?:completed?|finished|done)(?:[.!]{0,3}\s*$|! Saving )",
        "done",
    ),  # torchtitan, OLMo, axolotl
)
_DONE = r"\b(?:done|completed?|finished|ended)\b"
_TRAINING = r"\b(?:(?:pre-?|fine-?)?train(?:ing)?|run|job|fit(?:ting)?|optimi[sz]ation)\b"
# Other subjects of such a line: a part of a training, a forecast, a share.
_OTHER_SUBJECTS = (
    r"(?![^\n]{0,300}(?:\b(?:epoch|eval|valid|test|sav|checkpoint|load|compil|token|download|estimat|expected|remain|will"
    r"|in about|eta|left|sampl|batch)|\d ?%|\d ?/ ?\d|training (?:step|stage|phase|loop|data|set)\b))"
)
_SAID = rf"(?:{_TRAINING}.{{0,40}}?{_DONE}|{_DONE} (?:the )?{_TRAINING}).{{0,80}}?(?:{_TIME}|{_STEP_SAID})"
_EARLY = (
    rf"(?!.{{0,200}}patience)\bearly[ -]stop(?:p(?:ing|ed))?\b.{{0,60}}?\b(?:at|after) "
    rf"(?:{_STEP_SAID}|epoch {{0,2}}\d|\d{{1,6}} epochs\b)"
)
# A sentence that begins with the training and says that it is complete; what may follow are saves and figures.
_WHOLE = (
    r"(?:^|[^\w\s,.'\"(] {0,3}|:\d\d(?:[.,]\d{1,6})? {1,3}|\b(?:INFO|info) {1,4})(?:(?:the |model |all )?(?:(?:pre|fine)[ -]?)?(?:train|tun)ing|experiment|process|run|job)(?: run| process| loop)?"
    r"(?: (?:is|was|has|been|now|all|successfully)){0,3} (?:done|completed?|finished)\b"
    r"(?! (?:for|of|on|in about|step|part|phase|stage)\b)"
    r"(?!.{0,200}(?:\d ?%|\d ?/ ?\d|\bepoch:? ?\d|\bstep time|estimat|expect|remain|so far|exit code:? [1-9]|error|fail))"
)
# A word alone; the reader decides whether it is the end (`LineReader.finish`).
_ALONE = rf"(?:^|[\]>|\[] {{0,3}}|- |:(?! )|:\d\d(?:[.,]\d{{1,6}})? {{1,3}})(?:all )?(?:done|finished|completed?)(?: in {_TIME})?(?: exited with code=0)?\W{{0,4}}$"
# A save in own words, with its step, which is looked for first: most lines with these words have none. And losses in the
# line with which a program closes.
_SAVED = (
    r"^(?=[^\n]{0,400}(?:[Ss]tep|[Ii]ter(?:ation)?|[Cc]heckpoint|ckpt)[ _=:/-]{1,10}\d)[^\n]{0,300}?"
    r"(?i:(?:\bsav(?:ed|ing)\b[^\n]{0,80}?\b(?:checkpoint|ckpt|model|weights|state)"
    r"|\b(?:checkpoint|ckpt|model|weights)\b[^\n]{0,60}?\bsaved\b)"
    r"[^\n]{0,120}?(?:step|iter(?:ation)?|checkpoint|ckpt)[ _=:/-]{1,2} {0,8}(?P<step_saved>\d{1,12})(?![\d.]\d|[kKM%/]))"
)
_CLOSING = (
    rf"(?i:\bfinal\b(?:[^\n]{{0,60}}?\b(?:val|valid|validation|eval|evaluation)[ _/-]loss{IS}"
    rf"(?P<loss_eval_closing>{ANY_NUMBER})| (?:train(?:ing)?[ _/-])?loss{IS}(?P<loss_closing>{ANY_NUMBER})){AFTER})"
)


def _option(literal: str, names: str, field: str) -> Pattern:
    """A whole `--name N` or `--name=N`: not `--nnodes 1:4`, not a shell variable, no cut number at the end of a line."""
    return Pattern("fact", rf"(?<!\S)--(?:{names})[ =](?P<{field}>\d{{1,7}})(?=[\s'\"\\])", literal=literal)


DIALECTS = (
    # Columns of figures, with a tab between, below a header that begins with step and loss. Only these two are read.
    Dialect("columns", last_resort=True,
        flags=("the program is not known: its columns were recognised by their header",), patterns=(
        Pattern("start", LINE_START
            + rf"(?i:(?:global[_ ])?step|iter(?:ation)?){_TAB}(?i:train(?:ing)?[_ ])?(?i:loss)(?=\t|\s*$)",
            literal="oss"),
        Pattern("step", LINE_START + rf"(?P<step>\d{{1,12}}){_TAB}(?P<loss>{NUMBER})(?=\t|\s*$)", literal="\t",
            own=True),
    )),
    # Faults of a GPU, its driver or its links, and kernels that got invalid inputs.
    Dialect("gpu_faults", patterns=(
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
        failure("nan", "Assertion `",
            r"(?P<words>(?:\w{1,80}: block: .{0,80}? )?Assertion `[^\n]{0,200}?\b(?:is)?(?:nan|inf|finite)\b[^\n]{0,100}['`] failed.{0,100})"),
        failure("data", "Assertion `", r"(?P<words>(?<=\] )Assertion `[^`']{0,200}['`] failed.{0,100})"),
        failure("error", "Assertion `", r"(?P<words>Assertion `[^`']{0,200}['`] failed.{0,100})"),
    )),
    # The GPU names that NVIDIA's and AMD's tools print if a job script asks them, and that programs print in passing. A
    # name that ends in dots is cut and not read.
    Dialect("nvidia_smi", patterns=(
        Pattern("fact", LINE_START + rf"GPU {_INDEX}: (?P<device>[^()\n]{{3,60}}?) \(UUID: "),
        Pattern("fact", LINE_START
            + rf"\| {{1,4}}{_INDEX}  (?P<device>[A-Za-z][ \w-]{{2,40}}?) {{1,30}}(?:On|Off|N/A) {{0,4}}\| {{1,4}}00000000:"),
        # gpustat
        Pattern("fact", LINE_START
            + rf"\[{_INDEX}\] (?P<device>[A-Za-z][ \w-]{{2,40}}?) {{1,30}}\| {{0,2}}\d{{1,3}}°C, "),
        Pattern("fact", LINE_START + r"GPU\[\d{1,3}\]\s{0,4}: (?:Card [Ss]eries|Product Name|Card [Mm]odel):\s{0,4}"
            + r"(?P<device>AMD Instinct MI\d{2,3}[AX]?(?: \w{2,6}){0,2})" + END, literal=" Instinct MI"),
        Pattern("fact", START
            + rf"(?:[Uu]sing |[Tt]raining on )?(?:CUDA |GPU )?[Dd]evice(?: name)?(?:: | ?= ?){_DEVICE}" + END,
            weak=True),
        Pattern("fact", START + rf"(?:Using |Training on )?GPU(?: name)?(?:: | ?= ?){_DEVICE}" + END, weak=True),
    )),
    # Texts by which programs say that they have ended: a table by program, then a general rule. They count only after
    # the last line of steps: many programs print such lines, some about an epoch or an evaluation.
    Dialect("program_ends", patterns=(
        *(Pattern("fact", _SAVED, literal=literal, weak=True) for literal in ("aved", "aving")),
        *(Pattern("fact", _CLOSING, literal=literal, weak=True) for literal in ("final", "Final", "FINAL")),
        # torchrun and Ray print these about any program that they started
        Pattern("end", r"\] worker group successfully finished", ended="done"),
        Pattern("end", r"\bJob '\w{1,80}' succeeded\s*$", ended="done"),
        *(Pattern("end", rf"(?<!\w){text}{after}", literal=text, ended=ended, weak=True) for text, after, ended in _ENDS),
        *(Pattern("end", rf"(?i)^{_OTHER_SUBJECTS}.{{0,200}}?{sentence}", literal=literal, ended="done", weak=True)
            for literal, sentence in (
                ("reached", r"\b(?:target (?:[\w.-]{1,20} ){0,3}reached|reached (?:the |its )?target)\b"),
                *((literal, _SAID) for literal in ("raining", "RAINING", "inished", "omplete")))),
        Pattern("end", rf"(?i:{_EARLY})", literal="arly", ended="done", weak=True),
        *(Pattern("end", rf"(?i:{shape})", literal=literal, ended=ended, weak=True)
            for ended, shape in (("done", _WHOLE), (SAID_DONE, _ALONE))
            for literal in ("omplete", "OMPLETE", "inished", "INISHED", "done", "Done", "DONE")),
    )),
    # torchrun, torch.distributed.launch, deepspeed and accelerate: an echoed command line, and the launcher's start.
    Dialect("torch_launcher", patterns=(
        # Printed once per node with several processes, before any of them prints anything.
        line("start", "Setting OMP_NUM_THREADS environment variable for each process"),
        # submitit's, once per task.
        Pattern("start", r"\bsubmitit INFO \([^)\n]{1,60}\) - Starting with JobEnvironment\([^\n]{0,200}\bglobal_rank="
            r"\d{1,7}\((?P<gpus_said>\d{1,7})\)", literal="Starting with JobEnvironment("),
        # deepspeed's launcher and accelerate's scripts.
        line("fact", "dist_world_size={gpus}"),
        line("fact", "nnodes={nodes}, num_local_procs={gpus_per_node}, "),
        # DeepSpeed's configuration; NCCL's own line is about a communicator, which may have fewer ranks than the job.
        line("fact", "Config mesh_device None world_size = {gpus}"),
        Pattern("fact", LINE_START + r"(?:export )?WORLD_SIZE=(?P<gpus>\d{1,7})" + END),
        line("fact", "Num processes: {gpus}", LINE_START),
        Pattern("fact", LINE_START + r"Mixed precision type: (?P<dtype>bf16|fp16|fp8)" + END),
        Pattern("fact", r"\{(?=[^{}\n]{0,400}'gpus_per_node': (?P<gpus_per_node>\d{1,6})[,}])"
            r"[^{}\n]{0,400}'num_nodes': (?P<nodes>\d{1,6})[,}]", literal="'gpus_per_node': ", weak=True),
        # Lines of programs that no dialect knows: used only if all of them agree.
        # `world_size=1)` is a default in a source that a log repeats. An actor of Ray, and an engine that generates, has
        # a world of its own.
        Pattern("fact", r"^(?! {0,8}\((?!\w{0,60}Train)\w{1,60} pid=)(?![^\n]{0,400} distributed_init_method=)"
            r"[^\n]{0,200}?" + START + r"(?<!using )(?:[Dd]istributed |[Tt]otal )?[Ww]orld[ _][Ss]ize(?: is)?(?:(?P<of>=)|: ?| )"
            r"(?P<gpus_said>\d{1,7})(?=\s*$|[,;.\s](?!\d)|(?(of)(?!)|\)))", literal="orld", weak=True),
        Pattern("fact", START + r"(?i:training|train) (?:[\w-]{1,20} ){0,3}(?:on|with) (?P<gpus_said>\d{1,7}) "
            r"(?i:gpus?|devices?|accelerators?|ranks?|tpus?)\b", literal="rain", weak=True),
        Pattern("fact", START + r"nranks ?[=:] ?(?P<gpus_said>\d{1,7})(?=[\s,;])", literal="nranks", weak=True),
        # Each rank of Hugging Face's examples prints it.
        Pattern("fact", r"\bProcess rank: (?P<rank_said>\d{1,7}), [^\n]{0,200}?\bdistributed training: True\b", weak=True),
        # Lightning's and NeMo's: one process per GPU, unless they run on CPUs.
        line("fact", "GLOBAL_RANK: {}, MEMBER: {}/{gpus_said}", weak=True),
        line("fact", "| distributed init (rank {}, world {gpus_said}):", weak=True),
        Pattern("fact", r"\bAll distributed processes registered\. Starting with (?P<gpus_said>\d{1,7}) processes\b",
            weak=True),
        Pattern("fact", r"\bdistributed_backend=gloo\b", facts={"gpus_unused": 1}, weak=True),
        Pattern("fact", LINE_START + r"GPU available: \w{4,5}(?: \([^)\n]{1,20}\))?, used: False(?=\s*$)",
            facts={"gpus_unused": 1}, weak=True),
        Pattern("fact", r"\btorchrun[^\n]{0,200} --standalone(?=\s)", facts={"nodes": 1}),
        _option("--nproc", "nproc[-_]per[-_]node", "gpus_per_node"),
        _option("--nnodes", "nnodes", "nodes"),
        _option("--num_gpus", "num_gpus", "gpus_per_node"),
        _option("--num_nodes", "num_nodes", "nodes"),
        _option("--num_processes", "num_processes", "gpus"),
        _option("--num_machines", "num_machines", "nodes"),
        # Lines of any program about a checkpoint that it resumes, and about weights that this lacked.
        *(Pattern("fact", rf"\b[RrLl]{verb} [^\n]{{0,60}}?\b(?:{what})\b", verb, facts={"resumes": 1}, weak=True)
            for verb, what in (
                *((verb, "checkpoint|ckpt|states?|training|run|step")
                    for verb in ("esuming", "esumed", "estoring", "estored")),
                ("oaded", "checkpoint|ckpt|optimizer states?"), ("oading", "checkpoint(?! shards)|ckpt|optimizer states?"))),
        *(Pattern("fact", words, facts={"weights_lacking": 1}, weak=True)
            for words in (r"\bmissing keys\b", r"\bnewly initialized\b")),
    )),
    # Trainers that stop themselves: NaN losses and gradients, ranks that make no step; and submitit's messages.
    Dialect("training_stopped", patterns=(
        failure("nan", "rror", raised(ANY_NAME,
            r"found (?:NaN|Inf|nan|inf)\b|Unexpected result (?:nan|inf)|[Ll]oss (?:has become|became|is|was) (?:nan|inf|NaN)"
            r"|loss returned in `training_step` is|Minimum loss scale reached|Current loss scale already at minimum"
            r"|Nan values in|[Nn]on-finite|is (?:nan|NaN)\b")),
        failure("nan", "Exception", raised("Exception",
            "Current loss scale already at minimum|found NaN|[Ll]oss (?:has become|is) (?:nan|NaN)")),
        failure("nan", "found NaN in ", r"(?:[Rr]ank (?P<rank>\d{1,7})\b.{0,200}?)?(?P<words>found NaN in .{0,300})"),
        failure("nan", "nexpected result", r"(?:[Rr]ank (?P<rank>\d{1,7}), node (?P<node>[\w.-]{1,80}), .{0,120})?"
            r"(?P<words>[Uu]nexpected result (?:nan|-?inf).{0,200})"),
        failure("nan", "stopping training", r"(?P<words>[Ll]oss is -?(?:nan|inf)\S{0,20} stopping training.{0,60})"),
        failure("nan", "Loss has become NaN", r"(?P<words>Loss has become NaN.{0,200})"),
        # no step is made
        failure("hang", "Timeout (",
            r"^(?:\d{1,7}: |\[[^\]]{1,40}\]:? ?)?(?P<words>Timeout \(\d{1,4}:\d\d:\d\d(?:\.\d{1,6})?" r"\)!)"),
        # Our own watchdog's message, which names the rank and the node.
        failure("hang", "hang: no rank made a step",
            r"(?P<words>hang: no rank made a step for \d{1,9} s(?:; ranks? (?P<rank>\d{1,7})[-\d, .()]{0,120}"
            r" on (?P<node>[A-Za-z][\w.-]{0,80}))?.{0,300})"),
        failure("hang", "ang detected", r"(?P<words>\b[Hh]ang detected\b.{0,200})"),
        # submitit prints these at its signal and after it; a time limit before a requeue ends only an attempt
        failure("preempted", "this job is preempted",
            r"(?P<words>Caught signal \S{1,20} on \S{1,80}: this job is preempted.{0,60})"),
        echo("walltime", "this job is timed-out",
            r"(?P<words>Caught signal \S{1,20} on \S{1,80}: this job is timed-out.{0,60})"),
        failure("walltime", "Job not requeued because: ", r"(?P<words>Job not requeued because: timed-out.{0,100})"),
        failure("requeued", "Requeued job ", r"\bsubmitit\b.{0,80}(?P<words>Requeued job \d{1,12}\S{0,20} \(.{0,60})"),
        # A script's own words, after a traceback or before it.
        echo("error", "raining",
            LINE_START + r"(?:(?:ERROR|CRITICAL|FATAL)\b[\w :.-]{0,40}?[: ] ?|- (?:ERROR|CRITICAL) - )?"
            r"(?P<words>(?i:(?:(?:an?|unexpected) ){0,2}(?:error|exception) (?:has )?"
            r"(?:happened|occurred|raised|caught|encountered) (?:while|during|in) (?:the )?(?:model )?(?:pre-?)?training\b"
            r"|(?:pre-?)?training (?:has |was )?(?:failed|crashed|aborted)(?= with| due| after| because|[:.!]|\s*$)).{0,200})"),
        # Lightning's
        echo("error", "Requeuing SLURM job ", r"(?P<words>Requeuing SLURM job \S{1,40} failed .{0,100})"),
        echo("error", "requeue failed ", r"(?P<words>requeue failed .{0,100})"),
    )),
)  # fmt: skip
