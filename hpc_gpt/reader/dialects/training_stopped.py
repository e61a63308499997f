"""Trainers that stop themselves: NaN losses and gradients, ranks that make no step; and submitit's messages."""

from hpc_gpt.reader.pattern import ANY_NAME, Dialect, echo, failure, raised

DIALECT = Dialect(
    name="training_stopped",
    patterns=(
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
        # submitit's, at its signal and after it; a time limit before a requeue ends only an attempt
        failure("preempted", "this job is preempted", r"(?P<words>Caught signal \S{1,20} on \S{1,80}: this job is preempted.{0,60})"),
        echo("walltime", "this job is timed-out", r"(?P<words>Caught signal \S{1,20} on \S{1,80}: this job is timed-out.{0,60})"),
        failure("walltime", "Job not requeued because: ", r"(?P<words>Job not requeued because: timed-out.{0,100})"),
        failure("requeued", "Requeued job ", r"\bsubmitit\b.{0,80}(?P<words>Requeued job \d{1,12}\S{0,20} \(.{0,60})"),
        # Lightning's
        echo("error", "Requeuing SLURM job ", r"(?P<words>Requeuing SLURM job \S{1,40} failed .{0,100})"),
        echo("error", "requeue failed ", r"(?P<words>requeue failed .{0,100})"),
    ),
)  # fmt: skip
