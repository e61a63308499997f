"""Compare a run with what is here now: code, versions, profile, experiment, data, script, newest checkpoint.

Nothing is changed. A difference is no fault in itself, because the run uses what was submitted; MEANS says what it
means.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import RunFolderError, UserError
from hpc_gpt.core.files import read_bytes, read_text
from hpc_gpt.core.runs.checkpoints import WORK, faults_of, list_complete, newest_sound
from hpc_gpt.core.runs.provenance import INIT, STAGE_KEY, collect, stage_sum
from hpc_gpt.core.runs.run_folder import EXPERIMENT_FILE, RunFolder
from hpc_gpt.core.runs.snapshot import code_files, read_archive, submitted_sha256
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.runs.unpack import CODE_ARCHIVE, FOLDER, SUMS, unpacked_files
from hpc_gpt.core.runs.work_archive import WORK_ARCHIVE
from hpc_gpt.core.runs.work_archive import changed_since as changed_in
from hpc_gpt.core.settings.cluster import OF_THE_PLANNER, load_profile
from hpc_gpt.core.settings.experiment_file import find_experiment
from hpc_gpt.core.settings.resolve import NO_EXPERIMENT
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.weights.folder import changes_since, read_folder
from hpc_gpt.launcher.launch.render import render_script
from hpc_gpt.trainer.tokens.run_data import data_path, located
from hpc_gpt.trainer.tokens.samples import open_samples

# {check: what a difference means for the run}.
MEANS = {
    "archive": "the run cannot start again: its code is not what was submitted",
    "code": "the run keeps the code that was submitted; a new submission would run what is here",
    "unpacked": "the next attempt sets code/ aside and unpacks the archive again",
    "work": "the next attempt runs with work/ as it is; the program itself may have written these files",
    "versions": "the next attempt runs with what is installed then: figures and losses may differ",
    "profile": "the run keeps the profile it was submitted under; a new submission would follow the present one",
    "stage": "the next attempt runs from the archive as it is then: figures and losses may differ",
    "experiment": "the run keeps the settings it was submitted with; a new submission would follow the file",
    "data": "the trainer refuses to resume from the checkpoint with other data",
    "init": "the trainer refuses to begin from other weights; a run that has a checkpoint needs them no more",
    "script": "the run keeps its own job.sh; a new submission would get another",
    "settings": "ranks read resolved.json, and each start compares it with job.sh: one of them was edited",
    "checkpoint": "the trainer sets it aside and resumes from the one before",
    "checkpoints": "none is sound: submit --resume refuses the run, unless --from-start is given",
}


@dataclass(frozen=True)
class Difference:
    """`check` is a key of MEANS, `name` the file, package or key, `words` how it differs."""

    check: str
    name: str
    words: str


@dataclass(frozen=True)
class Verification:
    """The differences, {check that could not be made: why}, and notes on what differs without a meaning for the run."""

    run: str
    differences: tuple[Difference, ...]
    not_checked: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": 1,
            "run": self.run,
            "equal": not self.differences,
            "differences": [{**asdict(one), "means": MEANS[one.check]} for one in self.differences],
            "not_checked": dict(self.not_checked),
            "notes": list(self.notes),
        }


def verify_run(run: RunFolder) -> Verification:
    """Compares a run with what is here now. Raises RunFolderError or ConfigError if its settings cannot be read."""
    resolved = run.resolved()
    notes: list[str] = []
    checks: dict[str, Callable[[], Iterable[Difference]]] = {
        "code": lambda: _code(run.path),
        "work": lambda: _work(run.path),
        "versions": lambda: _versions(run.path),
        "profile": lambda: _profile(resolved),
        "stage": lambda: _stage(run.path, resolved),
        "experiment": lambda: _experiment(run.path, resolved),
        "data": lambda: _data(run, resolved),
        "init": lambda: _init(run, resolved, notes),
        "script": lambda: _script(run, resolved),
        "settings": lambda: _settings(run),
        "checkpoint": lambda: _checkpoint(run),
    }
    differences: list[Difference] = []
    not_checked: dict[str, str] = {}
    for name, check in checks.items():
        try:
            differences += check()
        except (UserError, OSError, LookupError) as fault:
            not_checked[name] = str(fault)
    return Verification(run.run_id, tuple(differences), not_checked, tuple(notes))


def _code(run: Path) -> Iterator[Difference]:
    """Compares the archive with its SHA-256, and the code here and the unpacked code with the archive."""
    submitted = submitted_sha256(run)
    if submitted is None and not (run / CODE_ARCHIVE).exists():
        raise LookupError("the run has no snapshot of its code: it is older, or has not started yet")
    try:
        sha256, archived = read_archive(run)
    except RunFolderError as fault:
        yield Difference("archive", CODE_ARCHIVE, str(fault))
        return
    if submitted not in (None, sha256):
        yield Difference("archive", CODE_ARCHIVE, f"SHA-256 {sha256[:12]}…, but {str(submitted)[:12]}… was submitted")
    archived.pop(SUMS, None)
    here = {name: path.read_bytes() for name, path in code_files().items()}
    yield from _files("code", archived, here)
    if (run / FOLDER).is_dir():
        yield from _files("unpacked", archived, unpacked_files(run))


def _work(run: Path) -> Iterator[Difference]:
    """The files of a program's folder that are not as they were submitted."""
    if (run / WORK).is_dir() and (run / WORK_ARCHIVE).exists():
        yield from (Difference("work", f"{WORK}/{name}", "changed or removed") for name in changed_in(run))


def _files(check: str, submitted: Mapping[str, bytes], now: Mapping[str, bytes]) -> Iterator[Difference]:
    for name in sorted(submitted.keys() | now.keys()):
        if submitted.get(name) != now.get(name):
            how = "changed" if name in submitted and name in now else "removed" if name in submitted else "added"
            yield Difference(check, name, how)


def _versions(run: Path) -> Iterator[Difference]:
    then = read_stored(run / "provenance.json").get("versions")
    if then is None:
        raise LookupError("provenance.json has no versions")
    yield from _keys("versions", then, collect()["versions"])


def _profile(resolved: Resolved) -> Iterator[Difference]:
    if resolved.script is not None:
        raise LookupError("a job script has its own options, to which a profile only adds what they lack")
    then, now = asdict(resolved.cluster), asdict(load_profile(resolved.cluster.name, of_a_run=True))
    yield from _keys(
        "profile", *({k: v for k, v in tables.items() if k not in OF_THE_PLANNER} for tables in (then, now))
    )


def _stage(run: Path, resolved: Resolved) -> Iterator[Difference]:
    then, archive = read_stored(run / "provenance.json").get(STAGE_KEY), resolved.cluster.archive
    if archive is None or then is None:
        return
    now = stage_sum(resolved).get(STAGE_KEY)
    if now is None:
        raise LookupError(f"{archive} cannot be read here")
    if now != then:
        yield Difference("stage", archive, f"SHA-256 {now[:12]}…, but {str(then)[:12]}… was submitted")


def _keys(check: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """The keys that differ. Values of environment variables are not shown: one may be a secret."""
    for key in sorted(then.keys() | now.keys()):
        before, after = then.get(key), now.get(key)
        if before != after:
            hidden = isinstance(before, Mapping) or isinstance(after, Mapping)
            yield Difference(check, key, "changed" if hidden else f"was {before!r}, is {after!r}")


def _experiment(run: Path, resolved: Resolved) -> Iterator[Difference]:
    if (run / "resumed_from.json").exists() or not (run / "submissions.jsonl").exists():
        raise LookupError("the run's experiment.toml was written from its settings")
    if read_text(run / "experiment.toml").startswith(f"# {NO_EXPERIMENT}\n"):
        raise LookupError("no EXPERIMENT was named: there is no file")
    stored = read_stored(run / "provenance.json").get(EXPERIMENT_FILE)
    if stored is None and resolved.script is not None:
        raise LookupError("a job script was submitted: there is no file")
    then = Path(str(stored))
    file = then if then.is_file() else find_experiment(resolved.sweep or resolved.name)
    if read_bytes(file) != read_bytes(run / "experiment.toml"):
        yield Difference("experiment", str(file), "differs from the run's experiment.toml")


def _data(run: RunFolder, resolved: Resolved) -> Iterator[Difference]:
    newest = _newest_checkpoint(run)
    then = read_stored(newest / "complete.json").get("data") if newest else None
    if then is None:
        raise LookupError("no checkpoint says yet which data were read")
    resolved = located(resolved, run.data_beside)
    path = data_path(resolved)
    now = open_samples(resolved).identity
    if now != then:
        how = f"SHA-256 {now[:12]}…, but {str(then)[:12]}… was read"
        yield Difference("data", str(path or resolved.data.source), how)


def _init(run: RunFolder, resolved: Resolved, notes: list[str]) -> Iterator[Difference]:
    if resolved.train.init is None:
        return
    then = read_stored(run.path / "provenance.json").get(INIT)
    if then is None:
        raise LookupError("provenance.json has no hashes of the weights that the run begins from")
    changes = changes_since(read_folder(Path(resolved.train.init)), then)
    for name, how in changes.files.items():
        yield Difference("init", f"{resolved.train.init}/{name}", how)
    if changes.note:
        notes.append(f"{resolved.train.init}: {changes.note}")


def _script(run: RunFolder, resolved: Resolved) -> Iterator[Difference]:
    if resolved.script is not None:
        submitted = Path(str((read_stored(run.path / "provenance.json").get("script") or {}).get("path")))
        if read_bytes(submitted) != read_bytes(run.path / "slurm_script"):
            yield Difference("script", str(submitted), "differs from what was submitted, slurm_script of the run")
        return
    if read_text(run.job_script) != render_script(resolved):
        yield Difference("script", "job.sh", "differs from what is rendered now; one of --template's own does, too")


def _settings(run: RunFolder) -> Iterator[Difference]:
    carried = run.carried_settings()
    if carried is None:
        raise LookupError("job.sh carries no settings")
    if carried != read_text(run.path / "resolved.json"):
        yield Difference("settings", "resolved.json", "differs from the settings that job.sh carries")


def _checkpoint(run: RunFolder) -> Iterator[Difference]:
    """Compares all files of the newest checkpoint with their sizes and CRC-32."""
    newest = _newest_checkpoint(run)
    if newest is None:
        raise LookupError("the run has no checkpoint yet")
    faults = list(faults_of(newest))
    check = "checkpoints" if faults and newest_sound(run.checkpoints)[0] is None else "checkpoint"
    for name, fault in faults:
        yield Difference(check, f"{newest.name}/{name}", fault.text)


def _newest_checkpoint(run: RunFolder) -> Path | None:
    return next(iter(list_complete(run.checkpoints)), None)
