"""The options of sbatch and srun, as Slurm 22.05 lists them: an option that the real ones refuse is refused here."""

from __future__ import annotations

from collections.abc import Sequence

# Long names, each with its letter behind a slash where it has one: those that take a value, may take one, take none.
_VALUED = """
account/A acctg-freq bb bbf begin/b chdir/D clusters/M cluster-constraint comment constraint/C container core-spec/S
cores-per-socket cpu-freq cpus-per-gpu cpus-per-task/c deadline delay-boot dependency/d distribution/m error/e exclude/x
export extra-node-info/B gid gpu-bind gpu-freq gpus/G gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint
input/i job-name/J licenses/L mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network
nodefile/F nodelist/w nodes/N ntasks/n ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode
output/o partition/p power prefer priority profile qos/q reservation signal sockets-per-node switches thread-spec
threads-per-core time/t time-min tmp uid wckey
"""
_OPTIONAL = "exclusive nice no-kill/k propagate x11"
_PLAIN = "contiguous hold/H overcommit/O oversubscribe/s quiet/Q reboot spread-job use-min-nodes verbose/v"
_OWN = {
    "sbatch": (
        "array/a batch export-file wrap",
        "get-user-env",
        "ignore-pbs no-requeue parsable requeue test-only wait/W",
    ),
    "srun": (
        "bcast bcast-exclude cpu-bind epilog het-group jobid mpi prolog relative/r slurmd-debug task-epilog "
        "task-prolog threads/T wait/W",
        "compress immediate/I kill-on-bad-exit/K resv-ports send-libs",
        "disable-status/X exact interactive label/l multi-prog no-allocate/Z overlap preserve-env/E pty "
        "quit-on-interrupt unbuffered/u",
    ),
}


class OptionFault(ValueError):
    """An option that the command does not have, or that lacks its value, in getopt's words."""


def parse_options(command: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(long name -> value, the words behind the options) of a line of `sbatch` or `srun`; "" for an option alone.

    Raises OptionFault with what the real command would say.
    """
    kinds, letters = _table(command)
    found: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _whole(name, kinds)
            kind = kinds.get(name)
            if kind is None:
                raise OptionFault(f"unrecognized option '--{name}'")
            if equals and kind == "plain":
                raise OptionFault(f"option '--{name}' doesn't allow an argument")
            if not equals and kind == "valued":
                if not left:
                    raise OptionFault(f"option '--{name}' requires an argument")
                value = left.pop(0)
            found[name] = value
            continue
        cluster = word[1:]
        while cluster:
            letter, cluster = cluster[0], cluster[1:]
            if letter not in letters:
                raise OptionFault(f"invalid option -- '{letter}'")
            name = letters[letter]
            if kinds[name] == "plain":
                found[name] = ""
                continue
            if kinds[name] == "valued" and not cluster:
                if not left:
                    raise OptionFault(f"option requires an argument -- '{letter}'")
                cluster = left.pop(0)
            found[name], cluster = cluster, ""
    return found, left


def _table(command: str) -> tuple[dict[str, str], dict[str, str]]:
    """(long name -> valued, optional or plain; letter -> long name)."""
    kinds, letters = {}, {}
    shared = (_VALUED, _OPTIONAL, _PLAIN)
    for kind, both, own in zip(("valued", "optional", "plain"), shared, _OWN[command], strict=True):
        for entry in f"{both} {own}".split():
            name, _, letter = entry.partition("/")
            kinds[name] = kind
            if letter:
                letters[letter] = name
    return kinds, letters


def _whole(name: str, kinds: dict[str, str]) -> str:
    """The option that an abbreviation stands for, where it fits one alone."""
    fits = [known for known in kinds if known.startswith(name)]
    return fits[0] if name not in kinds and len(fits) == 1 else name
