"""Trainers that stop of themselves: losses and gradients that are no numbers, ranks that make no step, other schedulers."""

from __future__ import annotations

from hpc_gpt.readers.pattern import ANY_NAME, Dialect, Pattern, raised

DIALECT = Dialect(
    name="training_stopped",
    patterns=(
        Pattern(
            "failure",
            "rror",
            raised(
                ANY_NAME,
                r"found (?:NaN|Inf|nan|inf)\b|Unexpected result (?:nan|inf)|[Ll]oss (?:has become|became|is|was) (?:nan|inf|NaN)"
                r"|loss returned in `training_step` is|Minimum loss scale reached|Current loss scale already at minimum"
                r"|Nan values in|[Nn]on-finite|is (?:nan|NaN)\b",
            ),
            ended="nan",
        ),
        Pattern(
            "failure",
            "Exception",
            raised(
                "Exception", "Current loss scale already at minimum|found NaN|[Ll]oss (?:has become|is) (?:nan|NaN)"
            ),
            ended="nan",
        ),
        Pattern(
            "failure",
            "NaN",
            r"(?:[Rr]ank (?P<rank>\d{1,7})\b.{0,200}?)?(?P<words>found NaN in .{0,300})",
            ended="nan",
        ),
        Pattern(
            "failure",
            "nexpected result",
            r"(?:[Rr]ank (?P<rank>\d{1,7}), node (?P<node>[\w.-]{1,80}), .{0,120})?"
            r"(?P<words>[Uu]nexpected result (?:nan|-?inf).{0,200})",
            ended="nan",
        ),
        Pattern(
            "failure",
            "stopping training",
            r"(?P<words>[Ll]oss is -?(?:nan|inf)\S{0,20} stopping training.{0,60})",
            ended="nan",
        ),
        Pattern("failure", "NaN", r"(?P<words>Loss has become NaN.{0,200})", ended="nan"),
        # no step is made
        Pattern(
            "failure",
            "Timeout (",
            r"^(?:\d{1,7}: |\[[^\]]{1,40}\]:? ?)?(?P<words>Timeout \(\d{1,4}:\d\d:\d\d(?:\.\d{1,6})?"
            r"\)!)",
            ended="hang",
        ),
        Pattern(  # our own watchdog's, which the rank and the node are laid to
            "failure",
            "hang: no rank made a step",
            r"(?P<words>hang: no rank made a step for \d{1,9} s(?:; ranks? (?P<rank>\d{1,7})[-\d, .()]{0,120}"
            r" on (?P<node>[A-Za-z][\w.-]{0,80}))?.{0,300})",
            ended="hang",
        ),
        Pattern("failure", "ang detected", r"(?P<words>\b[Hh]ang detected\b.{0,200})", ended="hang"),
        # PBS and LSF
        Pattern("failure", "PBS", r"(?P<words>=>> PBS: job killed: walltime .{0,100})", ended="walltime"),
        Pattern("failure", "PBS", r"(?P<words>=>> PBS: job killed: v?mem .{0,100})", ended="host_memory"),
        Pattern(
            "failure",
            "PBS",
            r"(?P<words>=>> PBS: job killed: (?!walltime|v?mem).{0,100})",
            ended="cancelled",
        ),
        Pattern("failure", "TERM_", r"^(?P<words>TERM_RUNLIMIT: .{0,100})", ended="walltime"),
        Pattern("failure", "TERM_", r"^(?P<words>TERM_(?:MEMLIMIT|SWAP): .{0,100})", ended="host_memory"),
        Pattern("failure", "TERM_", r"^(?P<words>TERM_PREEMPT: .{0,100})", ended="preempted"),
        Pattern("failure", "TERM_", r"^(?P<words>TERM_(?:OWNER|ADMIN|FORCE_OWNER): .{0,100})", ended="cancelled"),
    ),
    specimen="""\
AssertionError: Rank 12: found NaN in local grad norm in backward pass before data-parallel communication collective. Device: 0, node: r6i4n5
Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.
RuntimeError: Rank 3, node r6i4n5, device 3, iteration 17: Unexpected result nan (message='found NaN in local forward loss calculation')
Rank 3, node r6i4n5, device 3, iteration 17: Unexpected result inf
Loss is nan, stopping training
Loss has become NaN. Exiting.
ValueError: The loss returned in `training_step` is nan.
Timeout (0:30:00)!
[watchdog] Hang detected: no step for 1800 s
hang: no rank made a step for 312 s; ranks 4-7 on n2 are silent, last seen after step 17; ranks 0-3 wait in all_reduce after step 17 (loop.py:96 in run)
=>> PBS: job killed: walltime 3661 exceeded limit 3600
=>> PBS: job killed: mem 68157440kb exceeded limit 67108864kb
=>> PBS: job killed: node 3 (r6i4n5) requested job terminate, 'EOF' (code 1099)
TERM_RUNLIMIT: job killed after reaching LSF run time limit.
TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.
TERM_PREEMPT: job killed after preemption.
TERM_OWNER: job killed by owner.
""",
    seen="Megatron-LM, DeepSpeed's loss scaler, Lightning, faulthandler, PBS Pro, LSF",
)
