"""Arrays: scripts that ask Slurm for the same thing become the elements of one job."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_gpt.launch.directives import quote_directive
from hpc_gpt.launch.render import render_array
from hpc_gpt.settings.resolve import folder_name

_MARK = "#SBATCH "
_NAME = "--job-name="


def script_directives(script: str) -> list[str]:
    """What stands behind `#SBATCH` in a script, up to its first command, where sbatch stops reading.

    >>> script_directives("#!/bin/bash\\n#SBATCH --nodes=2\\n\\n# more\\ntrue\\n#SBATCH --nodes=3\\n")
    ['--nodes=2']
    """
    found = []
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith(_MARK):
            found.append(line.removeprefix(_MARK))
    return found


def group_alike(scripts: Sequence[str], largest: int) -> list[list[int]]:
    """The numbers of the scripts, those with equal directives together, `largest` at most; the job's name aside.

    Groups come in the order of their first script.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, script in enumerate(scripts):
        directives = tuple(line for line in script_directives(script) if not line.startswith(_NAME))
        groups.setdefault(directives, []).append(number)
    return [group[at : at + largest] for group in groups.values() for at in range(0, len(group), largest)]


def array_script(name: str, scripts: Sequence[str]) -> str:
    """The script of an array of runs whose own scripts are alike; it has their name if they share one, else `name`."""
    own = {line for script in scripts for line in script_directives(script) if line.startswith(_NAME)}
    directives = [line for line in script_directives(scripts[0]) if not line.startswith(_NAME)]
    shared = own.pop() if len(own) == 1 else _NAME + quote_directive(name)
    return render_array(f"{folder_name(name)}: {len(scripts)} runs", [shared, *directives])
