"""LeRobot: a line every `log_freq` steps, whose number is rounded (`step:30K`): the lines are counted.

`updt_s` is a step without the wait for data: no step time is taken from it.
"""

from hpc_gpt.reader.pattern import START, Dialect, Pattern, line, named

DIALECT = Dialect(
    name="lerobot",
    engine="lerobot",
    flags=("lerobot rounds the numbers of steps: the lines are counted",),
    patterns=(
        Pattern(
            "step",
            r"\bstep:\d{1,6}[KMB]? smpl:\d{1,6}[KMB]? ep:\d{1,6}[KMB]? (?=epch:[^\n]{0,200}? loss:[^\n]{0,200}? updt_s:)"
            + named("(?= )", epoch="epch:", loss=" loss:", grad_norm=" grdn:", lr=" lr:", samples_per_s=" smp/s:"),
            literal=" updt_s:",
        ),
        Pattern("fact", r"'log_freq': (?P<log_interval>\d{1,9})(?=[,}])"),
        Pattern("fact", START + r"cfg\.steps=(?P<steps_planned>\d{1,12}) \("),
        Pattern("fact", START + r"num_total_params=(?P<params>\d{1,15}) \("),
        Pattern("fact", START + r"num_learnable_params=(?P<params_trainable>\d{1,15}) \("),
        Pattern(
            "fact",
            START
            + r"Effective batch size: (?P<micro_batch>\d{1,7}) x (?P<gpus>\d{1,7}) = (?P<global_batch>\d{1,9})(?=\s*$)",
        ),
        Pattern("save", r"\bCheckpoint policy after step (?P<step>\d{1,12})(?=\s*$)"),
        line("end", "End of training", START, ended="done", own=True),
    ),
)
