"""Changes since the submission of a run that affect its next attempt; `submit --resume RUN --dry-run` prints them.

The run keeps its code and settings, so other changes do nothing to it.
"""

from collections.abc import Iterator

from hpc_gpt.core.checkpoints.find_checkpoints import list_complete
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import read_text
from hpc_gpt.core.runs.provenance import STAGE_KEY, stage_sum, versions_of
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.tokens.run_data import data_path, located
from hpc_gpt.trainer.tokens.samples import open_samples


def change_notes(run: RunFolder, resolved: Resolved) -> list[str]:
    """One line per change, with its effect. A part that cannot be compared on this machine has no line."""
    notes: list[str] = []
    for check in (_versions, _archive, _data, _settings):
        try:
            notes += check(run, resolved)
        except (UserError, OSError, LookupError):
            continue
    return notes


def _versions(run: RunFolder, resolved: Resolved) -> Iterator[str]:
    then, now = read_stored(run.path / "provenance.json")["versions"], versions_of()
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if names:
        changes = ", ".join(f"{name} {then.get(name) or 'none'} -> {now.get(name) or 'none'}" for name in names)
        yield f"versions here differ from those at the submission: {changes}; figures and losses may differ"


def _archive(run: RunFolder, resolved: Resolved) -> Iterator[str]:
    then, now = read_stored(run.path / "provenance.json")[STAGE_KEY], stage_sum(resolved)[STAGE_KEY]
    if now != then:
        sums = f"SHA-256 {now[:12]}…, was {str(then)[:12]}…"
        yield f"{resolved.cluster.archive} has changed ({sums}): the next attempt runs from the new one"


def _data(run: RunFolder, resolved: Resolved) -> Iterator[str]:
    newest = next(iter(list_complete(run.checkpoints)), None)
    then = read_stored(newest / "complete.json").get("data") if newest else None
    if then is None:
        return
    run_data = located(resolved, run.data_beside)
    if (now := open_samples(run_data).identity) != then:
        sums = f"SHA-256 {now[:12]}…, checkpoint {newest.name if newest else ''} read {str(then)[:12]}…"
        name = data_path(run_data) or run_data.data.source
        yield f"data {name} has changed ({sums}): the trainer will refuse to resume"


def _settings(run: RunFolder, resolved: Resolved) -> Iterator[str]:
    carried = run.carried_settings()
    if carried is not None and carried != read_text(run.path / "resolved.json"):
        yield "resolved.json differs from the settings in job.sh: one was edited, and the job will refuse to start"
