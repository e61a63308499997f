"""Python's exceptions by the last line of their tracebacks: user errors, data, disks, and the rest."""

from hpc_gpt.reader.lines.pattern import ANY_NAME, EXCEPTION_START, Dialect, Pattern, echo, failure, raised

_DATA_FILE = (
    r"\.(?:bin|idx|jsonl|ndjson|parquet|arrow|npy|npz|gz|zst|xz|tar|h5|hdf5|csv|tsv|tfrecord|mds|txt)\b(?<!merges\.txt)"
)
_ODD_NUMBERS = r"divisible|must be a multiple|world[ _]size|micro[ _]batch|batch[ _]size|parallel[ _]size|must be (?:set|specified)"

DIALECT = Dialect(
    name="python_exceptions",
    patterns=(
        Pattern("traceback", r"Traceback \(most recent call last\)", weak=True),
        Pattern("traceback", r"(?:During handling of|The) (?:the )?above exception", weak=True),
        # Lines after which the next exception ended nothing, or only its thread; causes.py leaves it out.
        *(
            echo("error", literal, rf"{EXCEPTION_START}(?P<words>{literal}.{{0,200}})")
            for literal in ("Exception ignored ", "Exception in thread ", "Error in atexit")
        ),
        # exceptions that an interpreter raises as it ends: they are not the reason why it ends
        *(
            echo("error", literal, raised(names, about))
            for literal, names, about in (
                ("PythonFinalizationError", "PythonFinalizationError", ""),
                ("hutdown", ANY_NAME, r"(?:at|after) (?:interpreter )?shutdown|shutdown has been called"),
                ("shutting down", ANY_NAME, "Python is likely shutting down"),
                ("KeyError: '/", "KeyError", r"'/(?:mp|psm|loky|joblib)[-_]"),  # of the tracker of shared memory
            )
        ),
        echo("user_error", "rectory: '/", raised("FileNotFoundError", r"'/(?:mp|psm|loky|joblib)[-_]")),
        failure("error", "rror", raised(ANY_NAME)),
        failure("error", "Exception", raised(r"(?:\w{1,60})?Exception")),
        # user errors: a retry does not help
        failure("user_error", "rror",
            raised("ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError|NameError|PermissionError"
            "|NotADirectoryError|IsADirectoryError|FileExistsError|UnboundLocalError|Config\\w{0,40}Error"
            "|ValidationError|HFValidationError|MissingMandatoryValue")),
        failure("user_error", "rror", raised("AssertionError|ValueError|Exception", _ODD_NUMBERS)),
        failure("user_error", "rror", raised(ANY_NAME, r"in loading state_dict for|environment variable "
            r"\w{1,40} expected|unrecognized configuration")),
        # if two patterns match, the first counts
        failure("data", "FileNotFoundError", raised("FileNotFoundError", _DATA_FILE)),
        failure("user_error", "FileNotFoundError", raised("FileNotFoundError")),
        failure("user_error", ": error: ", r"^(?P<words>[\w./-]{1,200}: error: (?:argument|unrecognized arguments"
            r"|the following arguments|invalid choice|ambiguous option).{0,300})"),
        # messages of `python FILE` and `python -m MODULE` that cannot start
        *(
            failure(
                "user_error",
                literal,
                EXCEPTION_START + rf"(?P<words>\S{{0,200}}python[\w.]{{0,20}}: {literal}.{{0,300}})",
            )
            for literal in (
                *("can't open file", "can't find '__main__' module", "Error while finding ", "No module named "),
                "No code object available for ",
            )
        ),
        # the start is retried without a pause
        failure("port_taken", "rror", raised(ANY_NAME, r"\bEADDRINUSE\b|[Aa]ddress already in use")),
        # data
        failure("data", "rror", raised(ANY_NAME,
            r"index out of range in self|in DataLoader worker process|DataLoader worker \(pid\(s\) [\d, ]{1,200}\) "
            r"exited unexpectedly|[Dd]ataset .{0,200}(?:not found|does not exist)|[Cc]orrupt")),
        failure("data", "rror", raised("UnicodeDecodeError|JSONDecodeError|DatasetNotFoundError"
            "|DataFilesNotFoundError|DatasetGenerationError|ReadError")),
        failure("data", "Dataset does not exist", r"(?P<words>Dataset does not exist: .{0,300})"),
        failure("data", "zlib.error", EXCEPTION_START + r"(?P<words>zlib\.error: .{0,200})"),
        # disks
        failure("disk_full", "No space left on device", r"(?:(?<!\S)(?>\S{1,80} ){1,12})?No space left on device"),
        failure("disk_full", "rror", r"(?P<words>(?:(?<!\S)(?>\S{1,80} ){1,12})?Disk quota exceeded.{0,200})"),
        failure("disk_full", "nsufficient free space",
            r"\b(?:ERROR|CRITICAL|FATAL)\b[^\w\n].{0,80}?(?P<words>Insufficient free space on .{0,200})"),
        failure("disk_full", "rror", raised(ANY_NAME,
            r"\[Errno (?:28|122)\]|StorageFull|QuotaExceeded|[Ii]nsufficient (?:free|disk|storage) space"
            r"|[Nn]ot enough (?:free )?(?:disk|storage) space|[Rr]an out of disk space"
            r"|PytorchStreamWriter failed writing|inline_container\.cc:\d{1,6}\] \. unexpected pos"
            r"|basic_ios::clear: iostream error")),
        # consequences of another failure or a signal
        echo("error", "rror",
            raised("BrokenPipeError|ConnectionResetError|ConnectionAbortedError|CalledProcessError|ChildProcessError"
            "|CancelledError|ProcessExitedException|ProcessRaisedException")),
        echo("error", "Exception", raised("ProcessExitedException|ProcessRaisedException")),
        echo("error", "Failed to look up actor", raised("ValueError", "Failed to look up actor")),  # Ray's, that died
        # torch's, above the exceptions of the ranks
        echo("error", "CheckpointException ranks:", raised("CheckpointException", "CheckpointException ranks:")),
        echo("cancelled", "KeyboardInterrupt", EXCEPTION_START + r"(?P<words>KeyboardInterrupt(?::.{0,200})?)\s{0,4}$"),
        echo("cancelled", "rror", raised(ANY_NAME, r"is killed by signal: (?:Terminated|Interrupt)")),
    ),
)  # fmt: skip
