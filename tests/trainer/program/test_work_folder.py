"""A program's checkpoints, and the files of its folder that a run keeps."""

import glob
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies

from hpc_gpt.core.checkpoints.find_checkpoints import checkpoint_note, checkpoints_of, newest_checkpoint, numbers_in
from hpc_gpt.core.checkpoints.lineage import resume_point
from hpc_gpt.core.errors import ConfigError, RunFolderError
from hpc_gpt.core.runs import work_archive as work
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.launcher.watch.status import read_status
from hpc_gpt.reader.runs.own_run import OF_CHECKPOINTS, read_own
from hpc_gpt.report.why import explain
from tests.made_runs import add_attempt, metrics_line, read_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (folder := tmp_path / "logs" / "mine" / "run [1]").mkdir(parents=True)
    (folder / "resolved.json").write_text(resolve_command().to_json())
    return RunFolder(folder)


def resolve_command() -> Resolved:
    asked = Experiment(engine=Engine("command"), layout=LayoutRequest(gpus=1), command=Command(run="x"))
    return resolve(asked, ClusterProfile("one", gpus_per_node=1))


def command(checkpoints: str | None = "out/ckpt-*", complete: str | None = None) -> Command:
    return Command(run="x", workdir="/nowhere", checkpoints=checkpoints, complete=complete)


def make(run: RunFolder, *names: str) -> None:
    for at, name in enumerate(names):
        (run.path / name).mkdir(parents=True, exist_ok=True)
        (run.path / name / "weights").write_bytes(b"w")  # an empty one is not whole
        os.utime(run.path / name, (10**9 + at, 10**9 + at))


def test_the_highest_number_is_the_newest_whatever_its_time(run: RunFolder) -> None:
    assert newest_checkpoint(run, command())[0] is None
    make(run, "work/out/ckpt-1000", "work/out/ckpt-900", "work/out/other-2000", "work/out/ckpt-tmp")
    assert newest_checkpoint(run, command())[0] == run.path / "work/out/ckpt-1000"
    assert newest_checkpoint(run, command())[1] == 1000


SURE, GROWS = "the name says so", "several names"
STEPS = {  # what a program calls a checkpoint: how its step is known, None if the name does not have it
    "epoch=1-step={}-val_loss=2.07.ckpt": SURE,
    "epoch=1-step={}-train_loss_step=2.07-v1.ckpt": SURE,
    "epoch=1-step={}-val_step=7.ckpt": SURE,
    "gpt--val_loss=5.27-step={}-consumed_samples=9600.0-last.ckpt": SURE,
    "step=12-global_step={}.pt": SURE,
    "step-{}": SURE,
    "iter_{:07d}": SURE,
    "global_step{}": SURE,
    "rl_model_{}_steps.zip": SURE,
    "step{}k-tokens4B": SURE,
    "checkpoint-{}": SURE,
    "ckpt_{}.pt": SURE,
    "gpt2-{}": GROWS,
    "model-{}b.pt": GROWS,
    "{}": GROWS,
    "checkpoint_1_{}.pt": None,
    "ep0-ba{}-rank0.pt": None,
    "best-{}.07.pt": None,
    "best-{}.pt": None,
    "last-v{}.ckpt": None,
    "model.v{}.ckpt": None,
    "last.ckpt": None,
}


@given(number=strategies.integers(0, 10**11), form=strategies.sampled_from(sorted(STEPS)))
@settings(max_examples=60, deadline=None)
def test_the_step_in_a_name(number: int, form: str) -> None:
    names = [Path("/a 7/out") / form.format(each) for each in (number, number + 1)]
    times = 1000 if "}k" in form else 1
    for pattern in ("/a 7/out/*", "/a 7/**/*", "/a 7/**"):
        one, two = numbers_in(names[:1], pattern), numbers_in(names, pattern)
        assert one == [number * times if STEPS[form] is SURE else -1], pattern
        assert two == ([number * times, (number + 1) * times] if STEPS[form] else [-1, -1]), pattern


@given(text=strategies.text(max_size=40), number=strategies.integers(0, 10**11))
@settings(max_examples=100, deadline=None)
def test_any_name_has_a_step_or_none(text: str, number: int) -> None:
    name = text.replace("/", "").replace("\0", "")
    assert numbers_in([Path(f"/out/{name}-x")], "/out/*")[0] >= -1
    # What the pattern itself says is not looked at, but for the word before the number.
    fixed = glob.escape(name)
    assert numbers_in([Path(f"/out/{name}-step={number}")], f"/out/{fixed}-step=*") == [number]


def with_checkpoints(run: RunFolder, pattern: str, **more: object) -> Command:
    tables = json.loads((run.path / "resolved.json").read_text())
    tables["command"] |= {"checkpoints": pattern, **more}
    (run.path / "resolved.json").write_text(json.dumps(tables))
    found = run.resolved().command
    assert found is not None
    return found


def test_the_step_decides_and_a_note_says_if_time_differs(run: RunFolder) -> None:
    asked = with_checkpoints(run, "{run}/out/*.ckpt")
    make(run, "out/step=100-val_loss=2.91.ckpt", "out/epoch=1-step=300-val_loss=2.07.ckpt")
    assert newest_checkpoint(run, asked)[0] == run.path / "out/epoch=1-step=300-val_loss=2.07.ckpt"
    assert newest_checkpoint(run, asked)[1] == 300
    assert checkpoint_note(run) == ""
    make(run, "out/last.ckpt")
    assert (newest_checkpoint(run, asked)[1], checkpoint_note(run)) == (300, "")
    later = run.path / "out/step=100-val_loss=2.91.ckpt"
    os.utime(later)
    assert newest_checkpoint(run, asked)[1] == 300
    assert "step=300-val_loss=2.07.ckpt has the highest number" in (note := checkpoint_note(run))
    assert f"but {later} was written later" in note
    assert (note, OF_CHECKPOINTS) in read_run(run).all_flags
    assert explain(str(run.path), run.path.parent).notes == [note]


def test_after_and_resume_get_the_same_step(run: RunFolder) -> None:
    with_checkpoints(run, "{run}/checkpoints/*")
    make(run, "checkpoints/epoch=0-step=300-loss=2.07", "checkpoints/epoch=1-step=600-loss=1.93")
    assert [step for step, _ in checkpoints_of(run)] == [300, 600]
    os.utime(run.path / "checkpoints/epoch=0-step=300-loss=2.07")
    point = resume_point(run)
    assert point is not None
    assert point.step == 600
    assert point.notes == (checkpoint_note(run),)


def test_a_script_may_write_them_anywhere(run: RunFolder, tmp_path: Path) -> None:
    asked = replace(command(f"{glob.escape(str(tmp_path))}/[o]ut/step-*"), script="train.slurm", snapshot=False)
    os.utime(run.path / "resolved.json", (10**9, 10**9))
    make(run, "../../../out/step-30", "../../../out/step-7")
    assert newest_checkpoint(run, asked)[0] == tmp_path / "out" / "step-30"
    os.utime(run.path / "resolved.json")
    assert newest_checkpoint(run, asked)[0] is None, "of an earlier run"
    # The login node's clock may be ahead of the nodes', on which the run began before it saved.
    (began := run.new_attempt().folder / "attempt.json").write_text("{}")
    os.utime(began, (10**9, 10**9))
    assert newest_checkpoint(run, asked)[0] == tmp_path / "out" / "step-30"


def test_a_training_from_the_start_in_an_old_folder_is_said(run: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = with_checkpoints(run, f"{glob.escape(str(out))}/*", script="train.slurm", snapshot=False)
    os.utime(run.path / "resolved.json", (10**9 + 2, 10**9 + 2))
    make(run, *(f"../../../out/{name}" for name in ("step=600.ckpt", "last.ckpt", "last-v1.ckpt", "step=30.ckpt")))
    assert newest_checkpoint(run, asked)[0] == out / "step=30.ckpt", "the others are of an earlier run"
    note = f"{out}/step=600.ckpt has the highest number, but {out}/step=30.ckpt was written later: move away"
    assert checkpoint_note(run) == f"{note} the one that belongs to another training"


def test_only_complete_ones_count(run: RunFolder) -> None:
    make(run, "checkpoints/a-10", "checkpoints/a-20", "checkpoints/a-30", "checkpoints/a-30/.done")
    done = command("{run}/checkpoints/a-*", "{checkpoint}/.done")
    assert newest_checkpoint(run, done)[0] == run.path / "checkpoints/a-30"
    shutil.rmtree(run.path / "checkpoints/a-30/.done")
    assert newest_checkpoint(run, done)[0] is None
    assert newest_checkpoint(run, command("{run}/checkpoints/a-*"))[0] == run.path / "checkpoints/a-30"


def test_a_whole_one_may_be_one_without_a_file(run: RunFolder) -> None:
    make(run, "checkpoints/step-10", "checkpoints/step-20/.writing")
    asked = with_checkpoints(run, "{run}/checkpoints/step-*", complete="!.writing")
    assert newest_checkpoint(run, asked)[1] == 10
    shutil.rmtree(run.path / "checkpoints/step-10")
    assert checkpoint_note(run).endswith("checkpoints/step-20 has .writing (command.complete)")


def test_where_an_attempt_began_is_by_its_own_lines(run: RunFolder) -> None:
    with_checkpoints(run, "{run}/checkpoints/a-*")
    add_attempt(run, 40, "error", resumed_step=0)
    add_attempt(run, [metrics_line(step) for step in range(31, 51)], "done", resumed_step=40)
    note = "it began at step 31, and its newest checkpoint was of 40: is 40 whole?"
    assert note in str(read_status([run])[0].cause)
    assert explain(str(run.path), run.path.parent).notes == [note]
    record = read_run(run)
    assert record.attempts[1]["first_step"] == 31
    assert note in record.flags
    assert int(read_own(run).steps.counts.sum()) == 50, "ten of 60 steps are repeated"


def test_a_name_is_within_the_checkpoint_and_none_whole_is_said(run: RunFolder) -> None:
    asked = with_checkpoints(run, "{run}/checkpoints/step-*", complete=".metadata")
    assert checkpoint_note(run) == ""
    make(run, "checkpoints/step-10", "checkpoints/step-20")
    assert newest_checkpoint(run, asked)[0] is None
    note = checkpoint_note(run)
    first = f"none of 2 checkpoints is whole, so none is resumed: {run.path}/checkpoints/step-20 has no .metadata"
    assert note == f"{first} (command.complete)"
    assert read_status([run])[0].cause == f"never submitted; {note}"
    assert explain(str(run.path), run.path.parent).notes == [note]
    make(run, "checkpoints/step-10/.metadata")
    assert newest_checkpoint(run, asked)[0] == run.path / "checkpoints/step-10"
    assert checkpoint_note(run) == ""


def test_without_a_number_the_step_is_that_logged_before_it(run: RunFolder) -> None:
    attempt = run.new_attempt()
    lines = [f'{{"step": {step}, "loss": 1.0, "time": {10**9 + 10 * step}}}\n' for step in (1, 2, 3)]
    attempt.metrics.write_text("".join(lines))
    path = run.path / "work/out/ckpt.pt"
    path.parent.mkdir(parents=True)
    path.write_text("weights")
    os.utime(path, (10**9 + 25, 10**9 + 25))
    assert newest_checkpoint(run, command("out/ckpt.pt"))[1] == 2
    assert newest_checkpoint(run, command(None))[1] is None, "only the program knows its checkpoints"


def files_of(folder: Path, to: Path) -> dict[str, str]:
    """{name: text, or what a link leads to} of what a run keeps of a folder."""
    to.mkdir()
    work.take_work(str(folder)).place(to)
    with tarfile.open(to / work.WORK_ARCHIVE) as tar:
        return {
            entry.name: entry.linkname if entry.issym() else tar.extractfile(entry).read().decode()  # type: ignore[union-attr]
            for entry in tar
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with rules for git, a folder in it with more, links, and files that no run needs."""
    folder = tmp_path / "mine"
    (folder / "sub").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    for name, text in {
        "train.py": "print()",
        ".gitignore": "*.bin\n/data\n",
        "a.bin": "weights",
        "sub/.gitignore": "!keep.bin\n",
        "sub/keep.bin": "kept",
        "sub/b.bin": "weights",
        "__pycache__/x.pyc": "cached",
        "with space 'x'": "here",
    }.items():
        (folder / name).write_text(text)
    (folder / "data").mkdir()
    (folder / "data" / "x").write_text("data")
    (folder / "to-file").symlink_to("train.py")
    (folder / "outside").symlink_to("../elsewhere")
    return folder


KEPT = {
    "train.py": "print()",
    ".gitignore": "*.bin\n/data\n",
    "sub/.gitignore": "!keep.bin\n",
    "sub/keep.bin": "kept",
    "with space 'x'": "here",
    "to-file": "train.py",
}


@pytest.mark.parametrize("in_repository", [False, True])
def test_what_git_ignores_is_left_out_in_a_repository_or_not(folder: Path, tmp_path: Path, in_repository: bool) -> None:
    kept = KEPT | {"outside": str(tmp_path / "elsewhere")}
    if in_repository:
        for line in (["init", "-q"], ["add", "-f", "a.bin"]):
            subprocess.run(["git", *line], cwd=folder, check=True, capture_output=True)
        kept |= {"a.bin": "weights"}  # tracked all the same
    assert files_of(folder, tmp_path / "run") == kept


def test_a_submodules_git_file_is_nothing_to_link(folder: Path) -> None:
    (folder / "sub" / ".git").write_text("gitdir: ../.git/modules/sub\n")
    (folder / "fine").mkdir()
    (folder / "fine" / ".git").write_text("gitdir: elsewhere\n")
    assert work.take_work(str(folder)).left_out.keys() == {"a.bin", "data", "sub"}
    (folder / "sub" / "b.bin").unlink()
    assert work.take_work(str(folder)).left_out.keys() == {"a.bin", "data"}


def test_without_git_all_files_are_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = files_of(folder, tmp_path / "run")
    assert found.keys() == {*KEPT, "outside", "a.bin", "sub/b.bin", "data/x"}


def test_it_is_unpacked_once_with_modes_and_changes_are_seen(folder: Path, tmp_path: Path) -> None:
    (folder / "train.py").chmod(0o755)
    files_of(folder, tmp_path / "run")
    unpacked = work.unpack_work(tmp_path / "run")
    assert os.access(unpacked / "train.py", os.X_OK)
    assert work.changed_since(tmp_path / "run") == []
    (unpacked / "train.py").write_text("changed")
    (unpacked / "out").write_text("its own")
    assert work.unpack_work(tmp_path / "run") == unpacked
    assert work.changed_since(tmp_path / "run") == ["train.py"]
    assert (unpacked / "out").read_text() == "its own"


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(getattr(request, "param", 0o022))
    yield
    os.umask(before)


MODES = {
    "train.py": 0o755,
    "open.txt": 0o644,
    "team.txt": 0o640,
    "own.txt": 0o600,
    "tool": 0o700,
    "closed/in.txt": 0o644,
}


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], indirect=True, ids=oct)
def test_a_copy_is_as_closed_as_its_file_and_has_its_time(tmp_path: Path, umask: None, request) -> None:
    masks = request.node.callspec.params["umask"]
    (folder := tmp_path / "mine").mkdir()
    (folder / "closed").mkdir()
    for at, (name, mode) in enumerate(MODES.items()):
        (folder / name).write_text(name)
        (folder / name).chmod(mode)
        os.utime(folder / name, (1.2e9 + at, 1.2e9 + at + 0.25))
    (folder / "closed").chmod(0o700)
    folder.chmod(0o755)
    (to := tmp_path / "run").mkdir()
    work.take_work(str(folder)).place(to)
    assert (to / work.WORK_ARCHIVE).stat().st_mode & 0o777 == 0o600
    copy = work.unpack_work(to)
    wanted = MODES | {"closed/in.txt": 0o600}
    found = {name: (copy / name).stat() for name in MODES}
    assert {name: oct(about.st_mode & 0o777) for name, about in found.items()} == {
        name: oct(mode & ~masks) for name, mode in wanted.items()
    }
    assert [about.st_mtime for about in found.values()] == [1.2e9 + at + 0.25 for at in range(len(MODES))]
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.write(copy / "train.py")


@pytest.mark.parametrize(("modes", "wanted"), [((0o644, 0o640), 0o640), ((0o644, 0o755), 0o644), ((0o604,), 0o604)])
def test_the_archive_is_as_closed_as_its_most_closed_file(tmp_path: Path, umask: None, modes, wanted) -> None:
    (folder := tmp_path / "mine").mkdir()
    for mode in modes:
        (folder / oct(mode)).touch()
        (folder / oct(mode)).chmod(mode)
    (to := tmp_path / "run").mkdir()
    work.take_work(str(folder)).place(to)
    assert oct((to / work.WORK_ARCHIVE).stat().st_mode & 0o777) == oct(wanted)


def test_the_sum_is_of_the_files_as_in_earlier_versions(folder: Path, tmp_path: Path) -> None:
    first = work.take_work(str(folder)).sha256
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:  # as it was written before
        for name in sorted({**KEPT, "outside": ""}):
            entry, path = tarfile.TarInfo(name), folder / name
            if path.is_symlink():
                entry.type, entry.linkname = (
                    tarfile.SYMTYPE,
                    "train.py" if name == "to-file" else f"{tmp_path}/elsewhere",
                )
                tar.addfile(entry)
            else:
                entry.size = path.stat().st_size
                tar.addfile(entry, io.BytesIO(path.read_bytes()))
    assert hashlib.sha256(plain.getvalue()).hexdigest() == first
    (run := tmp_path / "old").mkdir()
    (run / work.WORK_ARCHIVE).write_bytes(gzip.compress(plain.getvalue()))
    (run / "provenance.json").write_text(f'{{"{work.WORK_KEY}": "{first}"}}')
    assert (work.unpack_work(run) / "train.py").read_text() == "print()"
    os.utime(folder / "train.py", (1, 1))
    (folder / "train.py").chmod(0o600)
    assert work.take_work(str(folder)).sha256 == first
    (folder / "train.py").chmod(0o755)
    assert work.take_work(str(folder)).sha256 != first


CREDENTIALS = {
    ".env": "A=1", "prod.env": "A=1", ".env.local": "A=1", ".netrc": "machine x", "sub/.pgpass": "x",
    "kaggle.json": "{}", "keys/id_ed25519": "x", "server.pem": "x", "tls.key": "x", "sub/.aws/config": "x",
    "hf_token": "x", "api_key.txt": "x", "secrets.yaml": "x", "credentials.json": "{}",
    "deploy": "-----BEGIN OPENSSH PRIVATE KEY-----\nx", "closed.cfg": "use hf_abcdefghijklmnop1234",
}  # fmt: skip
OTHERS = {
    ".env.example": "A=", "tokenizer.json": "{}", "special_tokens_map.json": "{}", "tokens.txt": "a b",
    "id_ed25519.pub": "x", "secrets.py": "x = 1", "token.py": "x = 1", "open.cfg": "use hf_abcdefghijklmnop1234",
    "closed.py": "use hf_abcdefghijklmnop1234", "key.txt": "x", "train.py": "print()",
}  # fmt: skip


@pytest.mark.parametrize("has_git", [True, False])
def test_a_credential_is_linked_unless_git_tracks_it(tmp_path: Path, has_git: bool, monkeypatch) -> None:
    folder = tmp_path / "mine"
    for name, text in (CREDENTIALS | OTHERS | {"tests/tracked.pem": "x"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o600 if name.startswith(("closed", ".env", ".netrc", "train")) else 0o644)
    if has_git:
        for line in (["init", "-q"], ["add", "tests"]):
            subprocess.run(["git", *line], cwd=folder, check=True, capture_output=True)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    archive = work.take_work(str(folder))
    linked = {*CREDENTIALS} | (set() if has_git else {"tests/tracked.pem"})
    assert {*archive.credentials} == linked
    assert archive.sizes.keys() == (CREDENTIALS | OTHERS | {"tests/tracked.pem": ""}).keys() - linked
    (to := tmp_path / "run").mkdir()
    archive.place(to)
    assert work._content(to).count(b"hf_abc") == 2, "of open.cfg and closed.py alone"
    copy = work.unpack_work(to)
    for name, text in (CREDENTIALS | OTHERS).items():
        assert (copy / name).read_text() == text
        assert (copy / name).is_symlink() == (name in linked)
    assert (copy / ".env").readlink() == folder / ".env"
    resolved = replace(resolve_command(), command=Command(run="x", workdir=str(folder)))
    (line,) = [line for line in work.describe_copy(resolved, archive) if "looks like a credential" in line]
    assert line.startswith(f"linked to {folder}, not copied, as it looks like a credential and git does not track it: ")


def test_another_archive_than_the_submitted_one_is_refused(folder: Path, tmp_path: Path) -> None:
    files_of(folder, tmp_path / "run")
    (tmp_path / "run" / "provenance.json").write_text(f'{{"{work.WORK_KEY}": "{"0" * 64}"}}')
    with pytest.raises(RunFolderError, match="not what was submitted"):
        work.unpack_work(tmp_path / "run")


def test_the_runs_below_a_folder_are_not_its_files(folder, tmp_path, monkeypatch):
    (folder / "logs" / "a" / "b").mkdir(parents=True)
    (folder / "logs" / "a" / "b" / "resolved.json").write_text("{}")
    monkeypatch.setenv("HPC_GPT_LOGS", str(folder / "logs"))
    assert not [name for name in files_of(folder, tmp_path / "run") if name.startswith("logs")]


def test_what_is_not_kept_is_named_and_only_that_is_linked(folder: Path, tmp_path: Path) -> None:
    archive = work.take_work(str(folder))
    assert (archive.left_out, archive.whole) == ({"a.bin": 7, "sub": 7, "data": 4}, True)
    (tmp_path / "run").mkdir()
    archive.place(tmp_path / "run")
    copy = work.unpack_work(tmp_path / "run")
    (copy / "sub" / "own").write_text("of the program")
    for _ in range(2):  # of each attempt
        work.link_work(tmp_path / "run", folder, ["data", "sub"])
    assert (copy / "data").readlink() == folder / "data"
    assert (copy / "sub" / "b.bin").readlink() == folder / "sub" / "b.bin"
    assert not (copy / "sub").is_symlink()
    assert not (copy / "sub" / "keep.bin").is_symlink()
    assert not (copy / "a.bin").exists()
    with pytest.raises(ConfigError, match="nowhere, which is not in"):
        work.link_work(tmp_path / "run", folder, ["nowhere"])
    mine = Command(run="x", workdir=str(folder), snapshot=True)
    assert work.missing_in_copy(tmp_path / "run", mine, "No such file or directory: './a.bin'") == "a.bin"
    assert work.missing_in_copy(tmp_path / "run", mine, f"cannot open {copy}/a.bin: No such file") == "a.bin"
    assert work.missing_in_copy(tmp_path / "run", mine, "No such file or directory: 'data/y'") == ""
