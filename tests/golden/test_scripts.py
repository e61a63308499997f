"""Scripts as golden files, to be read in review: what a change of a template changes is seen there line by line.

A few are whole. Of others a file has the lines in which it differs from another one, by their functions, and the keys
of its settings that differ. What is but put together otherwise has none: tests/templates/main.txt states what such a
script does.

pytest tests/golden --force-regen                 after a change that is meant
python -m tests.golden.test_scripts FOLDER        writes those that are not kept whole, for shellcheck
"""

import difflib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.settings.cluster import Chain, Container, list_profiles, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest, ScriptFacts
from hpc_gpt.core.settings.experiment_file import DEFAULT_EXPERIMENT, load_experiment
from hpc_gpt.core.settings.services import Notify
from hpc_gpt.launcher.render import array_script, render_job_script, render_script

PYXIS = Container("pyxis", "nvcr.io#nvidia/pytorch:26.01-py3", ("/scratch:/scratch", "/data my/x:/data:ro"))
APPTAINER = Container("apptainer", "/images/it's a.sif", ("/scratch", "/data my/x:/data:ro"))
MEGATRON_LM = {"engine.name": "megatron-lm", "engine.zero_stage": None}
HOSTILE = """x; rm -rf ~ #"'$(touch pwned)`touch pwned`"""


def _render(profile: str = "generic-slurm", experiment: str = "demo", overrides=None, **changes) -> str:
    settings = load_experiment(experiment, overrides or {})
    return render_script(resolve(settings, replace(load_profile(profile), **changes)))


def _hostile() -> str:
    overrides = {"name": HOSTILE, "job.comment": "a # b 'c' \\ d", "job.account": "$HOME", "job.constraint": "a|b&c"}
    return _render(
        overrides=overrides,
        venv="/home/o'neil/my env",
        modules=("cuda/12 beta", "$(reboot)"),
        environment={"MOTTO": 'two\nlines "and" $quotes \\', "EMPTY": ""},
        node_suffix="-ib0; reboot",
        sbatch=("--mail-user=a b@c.d", "--hint=nomultithread"),
        srun=("--cpu-bind=verbose,cores", "--mpi=$(reboot)"),
    )


def _command(profile: str, nodes: int = 1, preflight: bool = False, **command) -> str:
    found = replace(load_profile(profile), preflight=preflight)
    layout = LayoutRequest(gpus=nodes * found.gpus_per_node, nodes=nodes)
    own = Command(**{"run": "bash loop.sh", "workdir": "/home/me/mine", **command})
    return render_script(resolve(Experiment("mine", engine=Engine("command"), layout=layout, command=own), found))


def _as_it_is(profile: str, chain: Chain | None = None, cluster: str = "", **around) -> str:
    """Around a job script of the user's own."""
    own = {"script": "/home/me/train.slurm", "workdir": "/home/me", "checkpoints": "out/step-*"}
    command = Command(**own, snapshot=False, args=("it's",))
    settings = Experiment("mine", engine=Engine("command"), layout=LayoutRequest(gpus=1), command=command, **around)
    found = load_profile(profile)
    found = replace(found, chain=chain or found.chain)
    resolved = resolve(settings, found, script=ScriptFacts("0" * 64, 1, error="err.txt"))
    body = b'#!/bin/bash\n#SBATCH -N 1\nsrun python3 train.py "$@"\n'
    directives = ["-N 1", "--job-name=mine", "--output=%x-%j.out", *([f"--clusters={cluster}"] if cluster else [])]
    return render_job_script(resolved, body, command.args, directives)


SCRIPTS = {
    "demo-local": lambda: _render("local"),
    "demo-slurm": lambda: _render(),
    "container-pyxis": lambda: _render("h100-80g-8", container=PYXIS),
    "container-apptainer": lambda: _render("h100-80g-8", container=APPTAINER, python="/opt/python3"),
    "container-environment": lambda: _render("h100-80g-8", container=Container("environment", "/home/me/it's.toml")),
    "amd-slingshot": lambda: _render(
        device="mi250x",
        fabric="slingshot 4x200G",
        cpus_per_node=56,
        gpus_per_node=8,
        setup=("module use '/sw/my modules'", "ulimit -s unlimited"),
        modules=("rocm",),
        environment={"CACHE": "/tmp/${USER}-$HOME/$(reboot)`reboot`", "PATH": "/opt/bin:${PATH}", "ALL": "${A}${B}"},
        container=APPTAINER,
        sbatch=("--hint=nomultithread",),
        srun=("--gpus-per-task=1", "--gpu-bind=closest"),
    ),
    "site-of-its-own": lambda: _render(
        "jean-zay-v100-16g",
        overrides={"job.account": "abc@v100", "job.dependency": "afterok:12", "job.cpus_per_task": 5, "job.mem": "0"},
        partition="gpu_p13",
        reservation="school",
        modules=("pytorch-gpu/py3/2.11.0",),
        environment={"NCCL_SOCKET_IFNAME": "ib0", "HF_HOME": "/scratch/hf"},
        node_suffix="-ib0",
        gpu_type="v100",
        chain="none",
    ),
    "megatron-lm-slurm": lambda: _render(
        "jean-zay-v100-32g", overrides=MEGATRON_LM, megatron_lm="/opt/it's/Megatron-LM", venv="/opt/venv"
    ),
    "megatron-lm-local": lambda: _render("local", overrides=MEGATRON_LM),
    "command-gpu-local": lambda: _command(
        "local", run=("python", "train.py", "{gpus}", "it's"), setup=("ulimit -c 0",)
    ),
    "command-node-slurm": lambda: _command(
        "h100-80g-8", per="node", nodes=2, run="torchrun --nnodes {nodes} \\\n  train.py"
    ),
    "command-job-preflight": lambda: _command("h100-80g-8", per="job", nodes=2, preflight=True, stop_signal="USR1"),
    "command-job-alone": lambda: _command("generic-slurm", per="job", nodes=2, stop_signal="none"),
    "notify": lambda: _render("h100-80g-8", overrides={"notify.command": 'mail -s "$USER\'s GPT" me'}, preflight=True),
    "job-script-slurm": lambda: _as_it_is("h100-80g-8", notify=Notify(("mail", "-s", "GPT", "me"))),
    "job-script-local": lambda: _as_it_is("local", notify=Notify("mail -s GPT me")),
    "stage-warm": lambda: _render("local", stage="warm"),
    "stage-tar": lambda: _render(
        "h100-80g-8", overrides={"layout.gpus": 16}, stage="/sw/it's an $ENV/x.tar", venv="/opt/venv", preflight=True
    ),
    "stage-tar-local": lambda: _render("local", stage="/sw/environment.tar.zst"),
    "stage-warm-slurm": lambda: _render(stage="warm", srun=("--mpi=$(reboot)",)),
    "singleton": lambda: _render(chain="singleton"),
    "preflight-slurm": lambda: _render(
        "h100-80g-8",
        overrides={"layout.gpus": 16},
        preflight=True,
        spare_nodes=1,
        node_suffix="-ib0",
        srun=("--mpi=$(reboot)",),
    ),
    "preflight-apptainer": lambda: _render("h100-80g-8", container=APPTAINER, preflight=True),
    "preflight-pyxis": lambda: _render("h100-80g-8", container=PYXIS, preflight=True),
    "hostile": _hostile,
    "array": lambda: array_script("the 'table'", [_render(overrides={"name": name}) for name in ("a", "b")]),
    **{
        f"48b-{name}": lambda name=name: _render(name, DEFAULT_EXPERIMENT)
        for name in list_profiles()
        if name != "local"
    },
}


WHOLE = {"demo-slurm", "demo-local", "array"}
# The script from which each other one differs in few lines.
_LIKE = {
    "demo-slurm": ("container-environment", "singleton", "48b-generic-slurm", "hostile", "preflight-slurm",
                   "amd-slingshot", "job-script-slurm"),
    "container-environment": ("container-apptainer", "container-pyxis"),
    "preflight-slurm": ("stage-tar",),
    "48b-generic-slurm": ("48b-a100-80g-8", "48b-jean-zay-v100-16g", "48b-lumi-g", "48b-frontier", "48b-alps-gh200",
                          "48b-jupiter", "48b-leonardo", "48b-marenostrum5", "48b-perlmutter", "48b-isambard-ai",
                          "48b-jean-zay-h100", "48b-snellius-h100"),
    "48b-a100-80g-8": ("48b-h100-80g-8",),
    "48b-jean-zay-v100-16g": ("48b-jean-zay-v100-32g",),
    "demo-local": ("stage-warm", "command-gpu-local"),
    "command-gpu-local": ("job-script-local",),
}  # fmt: skip
LIKE = {name: base for base, names in _LIKE.items() for name in names}
_SECTION = re.compile(r"(\w+)\(\) [{(]|# --- (\w+)|# === (.*)")
_SETTINGS = re.compile(r"(?<=<<'HPC_GPT_RESOLVED'\n){.*?\n}\n(?=HPC_GPT_RESOLVED\n)", re.DOTALL)


def rendered(name: str) -> str:
    # The version is the one thing that changes without a change of meaning.
    return re.sub(r'(hpc-gpt |"version": ")\d+\.\d+\.\d+', r"\g<1>0.0.0", SCRIPTS[name]())


def differences(base: str, own: str) -> Iterator[str]:
    """The lines of `base` that are not in `own`, with -, and those that are only there, with +; before them, with @,
    the function that they are in. Of more than three such lines in a row the first one stands for all. Then the
    settings that differ, each on a line; what a profile has and the job has from it is the job's."""
    old, lines = (_SETTINGS.sub("", text).splitlines() for text in (base, own))
    sections, section = [""], ""
    for line in lines:
        if found := _SECTION.match(line):
            section = next(filter(None, found.groups()))
        sections.append(section)
    said = None
    for what, first, after, new, newer in difflib.SequenceMatcher(None, old, lines, autojunk=False).get_opcodes():
        if what != "equal":
            if said != (said := sections[new]):
                yield f"@ {said}"
            gone = old[first:after]
            if len(gone) > 3:
                gone = [next((line for line in gone if len(line) > 1), ""), f"... of {len(gone)} lines"]
            yield from (f"-{line}" for line in gone)
            yield from (f"+{line}" for line in lines[new:newer])
    before, now = settings_of(base), settings_of(own)
    if before != now:
        yield "@ the settings"
        yield from (f"-{key}" for key in before if key not in now)
        other = {key: value for key, value in now.items() if key not in before or before[key] != value}
        of_jobs = {key.replace("job.", "cluster.", 1): value for key, value in other.items() if key.startswith("job.")}
        for key, value in other.items():
            if key not in of_jobs or of_jobs[key] != value:
                yield f"+{key} = {json.dumps(value)}"


def settings_of(script: str) -> dict[str, Any]:
    """{a key with its tables: its value} of the settings that a script ends with."""
    found = _SETTINGS.search(script)

    def flat(tables: dict[str, Any], above: str) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for key, value in tables.items():
            keys |= flat(value, f"{above}{key}.") if isinstance(value, dict) and value else {above + key: value}
        return keys

    return flat(json.loads(found[0]), "") if found else {}


@pytest.mark.parametrize("name", sorted(WHOLE | LIKE.keys()))
def test_script_is_the_golden_one(name, file_regression):
    script = rendered(name)
    if name not in WHOLE:
        script = "\n".join(differences(rendered(LIKE[name]), script)) + "\n"
    file_regression.check(script, extension=".sh" if name in WHOLE else ".diff", basename=name)


def test_rendering_twice_gives_the_same_bytes():
    assert _render() == _render()


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_can_read_it(name, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(SCRIPTS[name]())
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ("array", "job-script-local")])
def test_it_can_be_reviewed(name):
    """What a colleague reads is above the rule; below it each function is used, and the settings come last."""
    script = SCRIPTS[name]().partition("\n# === the script")[0]
    above, below = script.split("\n# === ")
    assert len(above.splitlines()) < 100
    assert "hpc_gpt.trainer" in above
    functions, settings = below.split("\n# --- settings")
    for function in re.findall(r"^(\w+)\(\) [{(]", functions, re.MULTILINE):
        named = len(re.findall(rf"\b{function}\b", above + functions))
        assert named > 1 + functions.count(f"{{ # {function} "), function
    document, after = settings.split("<<'HPC_GPT_RESOLVED'\n")[1].split("\nHPC_GPT_RESOLVED\n")
    assert json.loads(document)["schema"] == 2
    assert after.split() == (["main", "exit"] if name.startswith("job-script") else ["main"])
    # A key on each line.
    assert all(line.count('": ') <= 1 for line in document.splitlines())
    if name.endswith("generic-slurm"):
        assert len(script.splitlines()) - len(document.splitlines()) <= 302


def test_shellcheck_finds_nothing_around_a_script_of_ones_own(tmp_path):
    """`make lint` checks the others."""
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck here")
    paths = [tmp_path / f"{name}.sh" for name in SCRIPTS if name.startswith("job-script-")]
    for path in paths:
        path.write_text(SCRIPTS[path.stem]())
    # What is after `exit` is never reached, says shellcheck.
    done = subprocess.run([shellcheck, "-S", "warning", *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_each_script_of_ranks_has_one_step_of_theirs():
    ranks = re.compile(r"^  run_ranks srun .*?-m hpc_gpt\.trainer$", re.MULTILINE | re.DOTALL)
    without = {name for name in SCRIPTS if name.startswith(("array", "job-script")) or name.endswith("local")}
    without |= {"stage-warm"}  # of this machine
    assert {name for name in SCRIPTS if len(ranks.findall(SCRIPTS[name]())) != 1} == without


def test_every_shipped_profile_has_a_golden_script():
    folder = Path(__file__).with_suffix("")
    assert {path.stem for path in folder.glob("48b-*.diff")} == {f"48b-{name}" for name in list_profiles()} - {
        "48b-local"
    }


def test_nothing_of_this_machine_is_in_a_script(monkeypatch):
    host = "a-host-4711"  # the real one's name may be a word that a script has of its own, such as localhost
    monkeypatch.setattr(platform, "node", lambda: host)
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", host, "6", "1", "x86_64")))
    script = _render("local") + _render()
    for secret in (str(Path.cwd()), str(Path.home()), host):
        assert not re.search(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", script), secret


if __name__ == "__main__":
    for script_name in SCRIPTS.keys() - WHOLE:
        if not script_name.startswith("job-script-"):
            Path(sys.argv[1], f"{script_name}.sh").write_text(SCRIPTS[script_name]())
