"""The options of sbatch and srun (Slurm 22.05): their names, their letters, and which take a value.

A profile, an experiment or a script of the user's own may have any of them. Who refuses, ignores or translates which of
them says so itself.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

# Names with their letters: options with a value, with an optional value, without a value.
_BOTH = (
    """account/A acctg-freq bb bbf begin/b chdir/D clusters/M cluster-constraint comment constraint/C container
    core-spec/S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task/c deadline delay-boot dependency/d distribution/m
    error/e exclude/x export extra-node-info/B gid gpu-bind gpu-freq gpus/G gpus-per-node gpus-per-socket gpus-per-task
    gres gres-flags hint input/i job-name/J licenses/L mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nodefile/F nodelist/w nodes/N ntasks/n ntasks-per-core ntasks-per-gpu ntasks-per-node
    ntasks-per-socket open-mode output/o partition/p power prefer priority profile qos/q reservation signal
    sockets-per-node switches thread-spec threads-per-core time/t time-min tmp uid wckey""",
    "exclusive nice no-kill/k propagate x11",
    "contiguous hold/H overcommit/O oversubscribe/s quiet/Q reboot spread-job use-min-nodes verbose/v",
)
_OPTIONS = {
    "sbatch": (
        _BOTH[0] + " array/a batch export-file wrap",
        _BOTH[1] + " get-user-env",
        _BOTH[2] + " ignore-pbs no-requeue parsable requeue test-only wait/W",
    ),
    "srun": (
        _BOTH[0] + " bcast bcast-exclude cpu-bind epilog het-group jobid mpi prolog relative/r slurmd-debug task-epilog"
        " task-prolog threads/T wait/W",
        _BOTH[1] + " compress immediate/I kill-on-bad-exit/K resv-ports send-libs",
        _BOTH[2] + " disable-status/X exact interactive label/l multi-prog no-allocate/Z overlap preserve-env/E pty"
        " quit-on-interrupt unbuffered/u",
    ),
}
# {key of [job]: the option of sbatch with the same text}, in the order of a script's directives.
OF_JOB = {
    "name": "job-name",
    **{key: key for key in ("account", "partition", "qos", "constraint", "reservation", "nodelist", "exclude",
                            "comment", "dependency", "mem", "time")},
}  # fmt: skip
# Those of them that a site has its own way with: keys of a profile, too.
OF_SITE = ("partition", "account", "qos", "constraint", "reservation", "mem", "time")
OptionKind = Literal["valued", "optional", "plain"]


class Options(NamedTuple):
    """{long name: whether it takes a value}, and {letter: long name}."""

    kinds: dict[str, OptionKind]
    letters: dict[str, str]


def options_table(valued: str, optional: str, plain: str) -> Options:
    """The options of three lists of `name` or `name/letter`."""
    found = Options({}, {})
    kinds: tuple[tuple[OptionKind, str], ...] = (("valued", valued), ("optional", optional), ("plain", plain))
    for kind, entries in kinds:
        for entry in entries.split():
            name, _, letter = entry.partition("/")
            found.kinds[name] = kind
            if letter:
                found.letters[letter] = name
    return found


@functools.cache
def options_of(command: Literal["sbatch", "srun"]) -> Options:
    """The options of sbatch or of srun."""
    return options_table(*_OPTIONS[command])
