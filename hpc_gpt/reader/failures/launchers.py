"""Messages of launchers and shells about processes that ended: torchelastic, deepspeed, bash, and our own ranks."""

from hpc_gpt.reader.lines.pattern import Dialect, Pattern, echo, failure, raised

_UCX_HANDLER = (
    "this rank died first: UCX_HANDLE_ERRORS=none and PYTHONFAULTHANDLER=1 in [environment] show where, as UCX's handler hides"
    " the program's own; read its lines before"
)

DIALECT = Dialect(
    name="launchers",
    patterns=(
        # torchelastic's report: a line for the host, the rank and the exit code, which causes.py joins
        echo("error", "Root Cause", r"(?P<words>Root Cause \(first observed failure\))"),
        echo("error", "ChildFailedError", raised("ChildFailedError")),
        echo("error", "host  ", r"^.{0,60}?(?P<words>host {2,10}: (?P<node>[A-Za-z][\w.-]{0,80}))\s{0,4}$"),
        echo("error", "(local_rank", r"^.{0,60}?(?P<words>rank {2,10}: (?P<rank>\d{1,7}) \(local_rank: \d{1,7}\))"),
        echo("error", "exitcode ", r"^.{0,60}?(?P<words>exitcode {2,10}: (?!-15\b)-?\d{1,4} \(pid: \d{1,10}\))"),
        echo("cancelled", ": -15 (pid: ", r"^.{0,60}?(?P<words>exitcode {2,10}: -15 \(pid: \d{1,10}\))"),
        echo("error", "failed (exitcode: ", r"failed \(exitcode: -?\d{1,4}\) local_rank: \d{1,7} \(pid: \d{1,10}\)"),
        echo("error", " FAILED (exitcode ",
            r"(?P<words>Child process \d{1,10} \(local_rank \d{1,7}\) FAILED \(exitcode (?!-15\b)-?\d{1,4}\))"),
        echo("cancelled", "Sending process ", r"(?P<words>Sending process \d{1,10} closing signal \w{1,20})"),
        echo("cancelled", "SignalException: Process ",
            r"(?P<words>(?:\b(?<!\.)(?:\w{1,60}\.){1,8})?SignalException: Process \d{1,10} got signal: " r"\d{1,3})"),
        # deepspeed's
        echo("error", "exits with return code = ", r"(?P<words>exits with return code = (?!0\b)-?\d{1,4})"),
        echo("cancelled", "Killing subprocess ", r"(?P<words>Killing subprocess \d{1,10})"),
        echo("error", ": ssh exited with exit code ",
            r"pdsh@\S{1,80}: (?P<node>[\w.-]{1,80}): (?P<words>ssh exited with " r"exit code (?!0\b)\d{1,3})"),
        # Composer's
        echo("error", "composer.cli.launcher:",
            r"\bcomposer\.cli\.launcher:(?P<words>(?:Global rank|Rank) (?P<rank>\d{1,7}) (?:\(PID \d{1,10}\) )?"
            r"(?:crashed with exit|exited with) code (?!0\b|-15\b)-?\d{1,4})"),
        # signals
        failure("error", "Segmentation fault",
            r"^(?:(?:ba|z)?sh: {1,8}\d{1,10} )?(?P<words>Segmentation fault\b.{0,200})"),
        failure("error", ": line ", r": line \d{1,6}: {1,8}(?P<words>\d{1,10} (?:Segmentation fault|Bus error"
            r"|Illegal instruction|Floating point exception).{0,200})"),
        echo("error", ": line ", r": line \d{1,6}: {1,8}(?P<words>\d{1,10} (?:Killed|Aborted).{0,200})"),
        echo("error", "illed", r"(?:^|\]|^zsh: )(?P<words>[Kk]illed(?: {1,8}python.{0,100})?)\s*$"),
        echo("cancelled", ": line ", r": line \d{1,6}: {1,8}(?P<words>\d{1,10} Terminated.{0,200})"),
        failure("user_error", ": line ",
            r": line \d{1,6}: (?P<words>[^:]{1,200}: (?:command not found|No such file or "
            r"directory|Permission denied|unbound variable).{0,100})"),
        # bash's own, and dash's
        failure("user_error", ": not found", r"^(?:\d{1,7}: )?\S{1,200}: \d{1,6}: (?P<words>[^:]{1,200}: not found)\s*$"),
        failure("user_error", ": Syntax error: ", r": \d{1,6}: (?P<words>Syntax error: .{1,200})"),
        failure("user_error", ": line ",
            r": (?P<words>line \d{1,6}: (?:syntax error|unexpected EOF while|[^:]{1,200}: bad (?:substitution|interpreter)"
            r"|conditional binary operator).{0,200})"),
        failure("user_error", ": bad interpreter: ", r"(?P<words>(?<!\S)\S{1,200}: bad interpreter: .{0,200})"),
        failure("user_error", "/env: ", r"^(?P<words>/usr/bin/env: \S{1,200}: No such file or directory)"),
        failure("error", "Fatal Python error: ", r"(?P<words>Fatal Python error: (?:Segmentation fault|Bus error"
            r"|Illegal instruction|Floating|init|_?Py|none_dealloc|deallocating|take_gil|drop_gil|_enter_buffered).{0,200})"),
        echo("error", "Current thread 0x", r"(?P<words>Current thread 0x.{1,60}\(most recent call first\):.{0,300})"),
        echo("error", "Fatal Python error: Aborted", r"(?P<words>Fatal Python error: Aborted.{0,100})"),
        # UCX's handler, which also hides the program's own
        Pattern("failure", r"(?P<words>Caught signal (?:4|7|8|11) \(.{1,200})", "Caught signal ", ended="error",
                to_do=_UCX_HANDLER),
        failure("error", "Signal: ",
            r"(?P<words>Signal: (?:Segmentation fault|Bus error|Illegal instruction) \(\d{1,2}\))"),
        echo("error", "Signal: Aborted (6)", r"(?P<words>Signal: Aborted \(6\))"),
        *(
            echo(
                "cancelled",
                literal,
                rf"(?P<words>\b(?i:received|caught|got|interrupted by) (?:\w{{1,20}} ){{0,2}}?{signal_text}(?! on \S{{1,80}}: this job is ).{{0,100}})",
            )
            for literal, signal_text in (
                ("SIG", r"(?:signal:? )?SIG(?:TERM|INT|HUP|USR[12]|XCPU)\b"),
                ("ignal", r"(?i:signal):? (?:1|2|10|12|15)\b"),
                (" death signal", r"(?:SIG[A-Z0-9]{1,6}|\d{1,2}) death signal"),
            )
        ),
        # mpirun's
        echo("error", " exited on signal ",
            r"(?P<words>process rank (?P<rank>\d{1,7}) with PID \d{1,10} on node (?P<node>[\w.-]{1,80}) exited on signal "
            r"(?!15\b)\d{1,3}.{0,60})"),
        # Lightning's
        echo("cancelled", "KeyboardInterrupt", r"(?P<words>Detected KeyboardInterrupt\b.{0,100})"),
        # this project's ranks
        echo("error", "lost another rank", r"^(?:\d{1,7}: )?(?P<words>rank (?P<rank>\d{1,7}) lost another rank: "
            r".{0,300})"),
        echo("error", " ended ",
            r"(?P<words>\brank (?P<rank>\d{1,7}) on (?P<node>[\w.-]{1,80}) (?:was ended by SIG[A-Z0-9]{1,10}"
            r"|ended with exit code \d{1,3})\b.{0,80})"),
        failure("user_error", ": Error: ", r"^(?:\d{1,7}: )?(?P<words>rank (?P<rank>\d{1,7}): Error: .{0,300})"),
    ),
)  # fmt: skip
