"""A profile's `stage`: the functions of the script that unpack an environment on a node, or read its libraries; what a
job script does around them, with stand-ins of srun, date and the node's part."""

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.runs.provenance import stage_sum
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolved import Resolved, config_hash
from hpc_gpt.launcher.render import render_script
from tests.cli.command import in_process
from tests.programs import put, ran
from tests.staged import make_archive
from tests.trainer.filling import fill

ODD = 'it\'s a $HOME: "x" `touch pwned`'


def staged(stage: str | None, profile: str = "generic-slurm", **changes) -> Resolved:
    return resolve(load_experiment("demo"), replace(load_profile(profile), stage=stage, **changes))


class Node:
    """A node's view: the script's functions, and a $TMPDIR."""

    def __init__(self, folder: Path, stage: str) -> None:
        script = render_script(staged(stage))
        start = script.index("seconds_of()")
        self.functions = script[start : script.index("note_staging()", start)]
        self.stage = stage
        self.tmp = folder / f"tmp of {ODD}".replace(":", "")
        self.tmp.mkdir(exist_ok=True)
        self.environment = os.environ | {
            "TMPDIR": str(self.tmp), "HPC_GPT_STAGED": "hpc-gpt-1-2/1", "SLURMD_NODENAME": "n1",
            "HPC_GPT_PYTHON": sys.executable,
        }  # fmt: skip

    def start(self, **more: str) -> subprocess.Popen[str]:
        line = ["bash", "-c", f'set -o pipefail\n{self.functions}\nstage_node "$1"', "node", self.stage]
        return subprocess.Popen(line, env=self.environment | more, stdout=subprocess.PIPE, text=True)

    def say(self, **more: str) -> str:
        process = self.start(**more)
        said, _ = process.communicate()
        assert (process.returncode == 0) == ("stage-fault" not in said), said
        return said

    def fault(self, **more: str) -> str:
        """The cause, from a node that has a hint for it and keeps nothing of the archive."""
        word, cause, hint = self.say(**more).rstrip("\n").split("\t")
        assert word == "stage-fault"
        assert hint
        assert not (self.folder / "done").exists()
        return cause

    @property
    def folder(self) -> Path:
        return self.tmp / "hpc-gpt-1-2" / "1"

    def prefix(self) -> str:
        python = self.folder / "environment" / "bin" / "python"
        return ran(python, "-c", "import sys, click; print(sys.prefix)", code=0).stdout.strip()


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """Of an environment's content, with an odd path."""
    (folder := tmp_path_factory.mktemp("archive") / ODD).mkdir()
    return make_archive(folder / "a b.tar.gz")


def test_it_runs_from_below_tmpdir_and_only_its_owner_sees_it(tmp_path, archive):
    node = Node(tmp_path, str(archive))
    said = node.say()
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert said.startswith(f"stage: {archive}, SHA-256 {sha256}, is unpacked on n1 in ")
    assert node.prefix() == str(node.folder / "environment")
    assert (node.folder / "done").read_text().strip() == sha256
    assert node.folder.parent.stat().st_mode & 0o077 == 0
    assert node.say() == "", "it is there"
    assert not list(Path.cwd().glob("pwned"))


def test_of_many_on_a_node_one_unpacks_and_the_others_wait(tmp_path, archive):
    node = Node(tmp_path, str(archive))
    (left := node.folder.parent / "0" / "environment").mkdir(parents=True)  # of an attempt that was killed
    ranks = [node.start() for _ in range(8)]
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 8
    assert sorted(map(bool, said)) == [False] * 7 + [True]
    assert not left.exists()
    assert node.prefix()


def test_one_folder_at_the_top_is_left_out(tmp_path):
    tar = make_archive(tmp_path / "one.tar", "original")
    node = Node(tmp_path, str(tar))
    node.say()
    assert node.prefix() == str(node.folder / "environment")
    assert sorted(each.name for each in node.folder.iterdir()) == ["done", "environment", "lock"]


def test_what_cannot_be_unpacked_is_named_with_node_and_path(tmp_path, archive):
    whole = archive.read_bytes()
    (damaged := tmp_path / "damaged.tar.gz").write_bytes(whole[: len(whole) // 2])
    node = Node(tmp_path, str(damaged))
    assert node.fault().startswith(f"n1: cannot unpack {damaged}: ")
    assert node.fault().startswith(f"n1: cannot unpack {damaged}: "), "the others of the node hear of it"
    assert sorted(each.name for each in node.folder.iterdir()) == ["fault", "lock"], "its space is free again"


def test_other_faults(tmp_path, archive):
    gone = tmp_path / "gone.tar"
    node = Node(tmp_path, str(gone))
    assert node.fault() == f"n1: cannot read {gone}"
    (tmp_path / "lib").mkdir()
    subprocess.run(["tar", "-C", tmp_path, "-cf", gone, "lib"], check=True)
    assert node.fault(HPC_GPT_STAGED="hpc-gpt-1-2/2") == (
        f"n1: {gone} has no bin/python, neither at its top nor in its one folder"
    )
    other = Node(tmp_path, str(archive)).fault(HPC_GPT_STAGED="hpc-gpt-1-2/3", HPC_GPT_STAGE_SUM="0" * 64)
    assert other == (
        f"n1: {archive} has SHA-256 {hashlib.sha256(archive.read_bytes()).hexdigest()[:12]}, "
        "but 000000000000 on the batch host"
    )
    assert node.fault(TMPDIR=f"{tmp_path}/a:b") == f"n1: cannot use {tmp_path}/a:b/hpc-gpt-1-2/1"
    (tmp_path / "file").touch()
    assert node.fault(TMPDIR=str(tmp_path / "file")) == f"n1: cannot use {tmp_path}/file/hpc-gpt-1-2/1"


def test_scripts_of_a_virtual_environment_run_from_where_it_is(tmp_path):
    """pip writes the original's path into them."""
    (folder := tmp_path / "original" / "bin").mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    bodies = {
        "torchrun": "#!/gone/env/bin/python3.11", "pack": "#!/usr/bin/env python",
        "of-the-system": "#!/usr/bin/python3", "below-usr": "#!/usr/local/envs/gpt/bin/python3",
    }  # fmt: skip
    for name, shebang in bodies.items():
        put(folder / name, f"{shebang}\nprint(1)\n")
    subprocess.run(["tar", "-C", tmp_path, "-cf", tmp_path / "x.tar", "original"], check=True)
    node = Node(tmp_path, str(tmp_path / "x.tar"))
    node.say()
    bin_folder = node.folder / "environment" / "bin"
    found = {name: (bin_folder / name).read_text().splitlines() for name in bodies}
    changed = dict.fromkeys(("torchrun", "below-usr"), bodies["pack"])
    assert found == {name: [shebang, "print(1)"] for name, shebang in (bodies | changed).items()}
    assert os.access(bin_folder / "torchrun", os.X_OK)


def test_a_python_that_does_not_start(tmp_path):
    python = put(tmp_path / "bin" / "python", "#!/bin/sh\necho no base Python >&2\nexit 1\n")
    subprocess.run(["tar", "-C", tmp_path, "-cf", tmp_path / "x.tar", "bin"], check=True)
    assert Node(tmp_path, str(tmp_path / "x.tar")).fault() == (
        f"n1: bin/python of {tmp_path}/x.tar does not start: no base Python"
    )
    for number, body in enumerate(["exit 0", "echo a tool of the site; exit 0"]):
        python.unlink()
        put(python, f"#!/bin/sh\n{body}\n")
        subprocess.run(["tar", "-C", tmp_path, "-cf", tmp_path / "z.tar", "bin"], check=True)
        printed = "a tool of the site" if number else ""
        assert Node(tmp_path, str(tmp_path / "z.tar")).fault(HPC_GPT_STAGED=f"hpc-gpt-1-3/{number}") == (
            f"n1: bin/python of {tmp_path}/z.tar is not Python 3: it prints '{printed}'"
        )


def test_a_folder_of_somebody_elses_is_not_used(tmp_path, archive):
    """In /tmp anybody may have made a link of that name; what it leads to is not touched."""
    node = Node(tmp_path, str(archive))
    (mine := tmp_path / "mine").mkdir()
    (mine / "kept").touch()
    node.folder.parent.symlink_to(mine)
    assert node.fault() == f"n1: cannot use {node.folder}"
    assert (mine / "kept").exists()


def test_a_full_disk(small_disk, archive):
    node = Node(small_disk, str(archive))
    fill(small_disk)
    assert node.fault() == f"n1: no space for {archive} below {node.tmp}"


def test_conda_unpack_runs_where_the_environment_stays(tmp_path):
    """conda-pack's script writes the path of the folder that it is in into files, so nothing moves after it."""
    original = tmp_path / "original"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", original], check=True)
    (script := original / "bin" / "conda-unpack").write_text(
        '#!/usr/bin/env python\nimport sys\nopen(sys.prefix + "/unpacked-at", "w").write(sys.prefix)\n'
    )
    script.chmod(0o755)
    subprocess.run(["tar", "-C", original, "-cf", tmp_path / "packed.tar", "."], check=True)
    node = Node(tmp_path, str(tmp_path / "packed.tar"))
    node.say()
    at = node.folder / "environment"
    assert (at / "unpacked-at").read_text() == str(at)


def test_warm_reads_the_environments_libraries_alone_in_order(tmp_path):
    import numpy

    node = Node(tmp_path, "warm")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "other.so").touch()
    trace = tmp_path / "read"
    tools = tmp_path / "tools"
    put(tools / "cat", f'#!/bin/bash\nprintf "%s\\n" "$@" >>{trace}\n')
    said = node.say(PATH=f"{tools}:{os.environ['PATH']}", PYTHONPATH=str(tmp_path / "mine"))
    read = trace.read_text().splitlines()
    assert said.startswith(f"stage: {len(read)} shared libraries are read on n1 in ")
    assert read == sorted(read, key=os.fsencode)
    assert all(Path(numpy.__file__).parent in Path(each).parents for each in read if "_multiarray_umath" in each)
    assert any("_multiarray_umath" in each for each in read)
    assert any("libtorch_cpu.so" in each for each in read)
    assert not any("other.so" in each for each in read)


def test_it_decides_nothing_and_is_unwritten_by_default(tmp_path):
    without, warm, tar = staged(None), staged("warm"), staged("/an/environment.tar", venv="/an/environment")
    assert '"stage"' not in without.to_json()
    assert [config_hash(each) for each in (warm, tar)] == [config_hash(without)] * 2
    assert Resolved.from_json(tar.to_json()) == tar
    assert "stage" not in render_script(without).split("<<'HPC_GPT_RESOLVED'")[0]
    assert "/an/environment/bin/activate" not in render_script(tar), "the archive takes the place of the venv"


def test_an_absent_archive_is_said_and_smoke_stages_none(tmp_path):
    (profile := tmp_path / "site.toml").write_text('stage = "/an/environment.tar"\n')
    for more, count in ((("--smoke",), 0), ((), 1)):
        done = in_process("render", "demo", "--cluster", profile, *more)
        assert (done.code, done.stdout.count('"stage": ')) == (0, count), done.stderr
        assert ("note: stage /an/environment.tar is not a file here; " in done.stderr) == bool(count)


@pytest.mark.parametrize(
    ("gpus", "site", "minutes"),
    [
        (16384, "", "18"),
        (1024, "", None),
        (16384, 'container = {kind = "apptainer", image = "/an/image.sif"}', None),
        (16384, 'stage = "/an/environment.tar"', None),
    ],
)
def test_imports_of_many_nodes_from_a_shared_disk_are_said(tmp_path, gpus, site, minutes):
    (profile := tmp_path / "site.toml").write_text(f'gpus_per_node = 8\ndevice = "H100-SXM-80"\n{site}\n')
    sizes = ("--gpus", gpus, "--tp", 1, "--pp", 1, "--mbs", 1, "--gas", 1)
    said = in_process("render", "demo", "--cluster", profile, *map(str, sizes), code=0).stderr
    text = f"note: {gpus // 8:,} nodes import torch: from a shared disk about {minutes} min on paper, and ranks wait "
    assert (text in said, "import torch" in said) == (minutes is not None,) * 2, said


def test_provenance_has_the_sum_if_the_archive_is_seen_here(archive):
    assert stage_sum(staged(str(archive))) == {"stage_sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    for none in (None, "warm", "/not/here.tar"):
        assert stage_sum(staged(none)) == {}


TOOLS = {
    "date": 'case $1 in +%s%3N) read -r t <"$0.ms"; echo $((t + 1500)) >"$0.ms"; echo "$t" ;; *) echo 99.5 ;; esac',
    "srun": 'while [ "$1" != bash ]; do printf "%s " "$1"; shift; done >>"$0.said"; exec "$@"',
    "shown": 'echo "$VIRTUAL_ENV ${PATH%%:*} $HPC_GPT_STAGE_SUM ${PYTHONHOME-none} $*"',
}
STAND_INS = r"""
stage_node() {
  local at=$TMPDIR/$HPC_GPT_STAGED
  echo "node ${1-}"; mkdir -p "$at/environment/bin"; echo 5a >"$at/done"
  cp "$HPC_GPT_RUN/shown" "$at/environment/bin/python"; [ -z "$FAULT" ] || printf 'stage-fault\tn1: %s\tdo\n' "$FAULT"
}
fail() { echo "fail $*"; exit 7; }; n=3 attempt=$TMPDIR staging_ms=250 PYTHONHOME=/x; export PYTHONHOME
within() { shift; "$@"; }
took() { echo "$HPC_GPT_STAGING $(env | grep -c '^HPC_GPT_STAGING=')"; }
"""
BATCH = 'unpack_here; "${python[@]}" a; stage_nodes; took; leave_nodes; ls "$TMPDIR/$HPC_GPT_STAGED"'
BATCH += '; echo "${HPC_GPT_PYTHON##*/}"'
STEP = "--export=ALL {}--nodes=1 --ntasks=1 --ntasks-per-node=1 --x=y "
STAGED, LEFT = STEP.format("--kill-on-bad-exit=0 "), STEP.format("--overlap ")
NOTE, NOT = "note: /e.tar has changed since the submission, when its SHA-256 was 0b\n", "node /e.tar\nfail n1: no do\n"
RUNS = "{0} {0}/bin 5a none a\n".format("HERE/hpc-gpt-0-4711/3/environment")
ROWS = {
    "warm": ("warm", "stage_nodes; took", "node \n1.750 99.5 1\n", STAGED),
    "unpacked": ("/e.tar", BATCH, f"node /e.tar\n{NOTE}{RUNS}node /e.tar\n3.250 99.5 1\nbatch\ndone\n"
                 "environment\npython\n", STAGED + LEFT),
    "not unpacked": ("/e.tar", "FAULT=no; unpack_here", NOT, ""),
    "not on a node": ("/e.tar", "export FAULT=no HPC_GPT_STAGED=a/b; stage_nodes", NOT, STAGED),
    "warm here": ("warm", "stage_environment fail; stage_environment fail; took", "node \n1.500 99.5 1\n", ""),
    "unpacked here": ("/e.tar", 'stage_environment fail; python a; echo "${HPC_GPT_PYTHON##*/}"; took',
                      f"node /e.tar\n{RUNS}python\n1.500 99.5 1\n", ""),
    "first here": ("/e.tar", "SUBMITIT_LOCAL_GLOBALID=0; stage_environment fail", f"{NOTE}node /e.tar\n", ""),
    "not here": ("/e.tar", "FAULT=no; stage_environment fail", "fail n1: no do\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_script_stages_in_these_steps(name: str, tmp_path: Path) -> None:
    stage, body, said, asked = ROWS[name]
    here = name.endswith("here")
    resolved = staged(stage, "local" if here else "generic-slurm", chain="none", srun=() if here else ("--x=y",))
    script = render_script(resolved)
    functions = re.split(r"^# --- ", script[script.index("# --- the environment on each node") + 6 :], flags=re.M)[0]
    for tool, text in TOOLS.items():
        (tmp_path / tool).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / tool).chmod(0o755)
    (tmp_path / "date.ms").write_text("1000\n")
    (tmp_path / "provenance.json").write_text('{\n "stage_sha256": "0b"\n}\n')
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "HPC_GPT_RUN": str(tmp_path),
           "FAULT": "", "HPC_GPT_JOB": "4711", **({"HPC_GPT_STAGED": "hpc-gpt-0-4711/3"} if here else {})}  # fmt: skip
    words = ["bash", "-c", f"set -u\n: {functions}{STAND_INS}{body}"]
    done = subprocess.run(words, env=os.environ | own, text=True, capture_output=True, check=False)
    found = done.stdout.replace(str(tmp_path), "HERE").replace(f"hpc-gpt-{os.getuid()}-", "hpc-gpt-0-")
    assert (found, done.stderr) == (said, "")
    assert (tmp_path / "srun.said").exists() == bool(asked)
    assert not asked or (tmp_path / "srun.said").read_text() == asked
    assert (tmp_path / "hpc-gpt-0-4711").exists() == here, "what is unpacked is taken away at the end"
