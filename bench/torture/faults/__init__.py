"""All the ways a run is broken, by name."""

from bench.torture.faults import checkpoint_files, daemons, disk, processes, programs, restarts, scheduler
from bench.torture.faults.kind import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind
    for module in (processes, daemons, scheduler, disk, checkpoint_files, programs, restarts)
    for kind in vars(module).values()
    if isinstance(kind, Kind)
}
EARLIEST = {name: kind.earliest for name, kind in KINDS.items()}
