"""Each recipe of docs/recipes.md runs as it is written, and continues after a kill in the middle of its third save.

transformers' Trainer and accelerate are themselves; of the other programs a stand-in has the lines, the files and the
way to load, and `srun` and the launchers only start it. Also: the page for a site.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import in_process
from tests.conftest import REPOSITORY
from tests.docs.pages import blocks, text_of
from tests.launcher.local.conftest import newest
from tests.made_runs import make_run

PAGE = "docs/recipes.md"
RECIPES = {
    name.strip(): section
    for name, _, section in (part.partition("\n") for part in text_of(PAGE).split("\n## ")[1:])
    if "```bash" in section
}
# Trains six steps and saves each second one. The first start dies in the save of step 4.
STAND_IN = """
import io, os, re, signal, sys, zipfile
from pathlib import Path

kind = KIND
line, name, files, mark = {
    "accelerate": ("step {s}/6 loss {l:.3f}", "out/step-{s}/", ["model.safetensors", "optimizer.bin"], ""),
    "Lightning": ("Epoch 0:  {p}%|##| {s}/6 [00:0{s}<00:01,  1.00it/s, v_num=0, train_loss={l:.3f}]",
                  "out/step={s}.ckpt", [], ""),
    "torchtitan": ("[titan] 2026-11-30 10:00:0{s},000 - root - INFO - step:  {s}  loss:  {l:.4f}  memory:  1.00GiB"
                   "(1.00%)  tps: 1,000  tflops: 1.00  mfu: 1.00%", "outputs/checkpoint/step-{s}/",
                   ["__0_0.distcp", ".metadata"], ".metadata"),
    "Megatron-LM": (" iteration        {s}/       6 | consumed samples:           16 | elapsed time per iteration (ms):"
                    " 99.0 | learning rate: 1.0E-04 | global batch size:     8 | lm loss: {l:.6E} |",
                    "out/iter_000000{s}/",
                    ["mp_rank_00.pt"], "out/latest_checkpointed_iteration.txt"),
    "DeepSpeed": ("steps: {s} loss: {l:.4f} iter time (s): 0.100 samples/sec: 80.000", "out/global_step{s}/",
                  ["mp_rank_00_model_states.pt"], "out/latest"),
    "nanoGPT": ("iter {s}: loss {l:.4f}, time 100.00ms, mfu 1.00%", "out/ckpt.pt", [], ""),
    "Axolotl": ("{{'loss': {l:.4f}, 'grad_norm': 1.0, 'learning_rate': 0.0001, 'epoch': 0.{s}}}\\n"
                " {p}%|##| {s}/6 [00:0{s}<00:01,  1.00s/it]", "out/checkpoint-{s}/",
                ["model.safetensors", "trainer_state.json"], "trainer_state.json"),
}[kind]
given = next((word for word in reversed(sys.argv) if word.startswith(("out", "--init_from=resume"))), "")
given = given if any(map(str.isdigit, given)) or given.startswith("--") else ""
last = 0
if kind in ("torchtitan",):
    whole = [path.parent for path in Path("outputs/checkpoint").glob("step-*/.metadata")]
    last = max((int(path.name.rpartition("-")[2]) for path in whole), default=0)
elif kind in ("Megatron-LM", "DeepSpeed"):
    last = int(re.sub(r"\\D", "", Path(mark).read_text())) if Path(mark).exists() else 0
elif kind == "nanoGPT" and given:
    last = int(zipfile.ZipFile("out/ckpt.pt").read("step"))
elif given:
    last = int(re.findall(r"\\d+", given)[-1])
    assert zipfile.ZipFile(given).testzip() is None if given.endswith(".ckpt") else (Path(given) / files[-1]).is_file()
begins = last == 0
if not begins:
    print("loaded the checkpoint of step", last, flush=True)
for step in range(last + 1, 7):
    print(line.format(s=step, l=4 - step / 10, p=100 * step // 6), flush=True)
    if step % 2:
        continue
    dies, place = begins and step == 4, Path(name.format(s=step))
    if not files:  # one file, a zip archive
        place.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(data := io.BytesIO(), "w") as archive:
            archive.writestr("step", str(step))
        if not (dies and kind == "nanoGPT"):  # it would leave none
            place.write_bytes(data.getvalue()[: 20 if dies else None])
    for count, each in enumerate(files):
        if not (dies and count == len(files) - 1 and (count or mark)):
            place.mkdir(parents=True, exist_ok=True)
            (place / each).write_bytes((2).to_bytes(8, "little") + b"{}" if each.endswith("safetensors") else b"x")
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if "/" in mark:
        Path(mark).write_text(f"global_step{step}" if kind == "DeepSpeed" else str(step))
"""
# Starts its program without the options of Slurm or of a launcher.
SRUN = 'while [[ "$1" == -* ]]; do shift; done; exec "$@"'


def in_folder(folder: Path, section: str, program: str, launcher: str) -> Path:
    """Writes the recipe's script, its program and stand-ins of its launchers. Returns the folder of these."""
    (script,) = re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    (folder / "train.slurm").write_text(script)
    for name in ("train.py", "pretrain_gpt.py"):
        (folder / name).write_text(program)
    (tools := folder / "tools").mkdir()
    hostnames = 'echo "$HOSTNAME"'
    launchers = dict.fromkeys(("torchrun", "accelerate", "axolotl"), launcher)
    for name, line in {"srun": SRUN, "scontrol": hostnames, **launchers}.items():
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)
    return tools


def submitted(folder: Path, section: str, tools: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Submits the recipe's line on this machine; returns the attempts of its record."""
    (line,) = re.findall(r"^hpc-gpt (submit .*)$", section, re.MULTILINE)
    monkeypatch.setenv("PATH", f"{tools}:{Path(sys.executable).parent}", prepend=":")
    again = ("--set", "job.restart_in_job=true", "--set", "job.retry_pause_s=0")
    verb, *words = shlex.split(line)
    in_process(verb, "--cluster", "local", "--nodes=1", "--wait", *again, *words, cwd=folder, code=0)
    (record,) = json.loads(in_process("report", str(newest().path), "--json", code=0).stdout)["records"]
    assert record["ended"] == "done", record["cause"]
    return record["attempts"]


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "transformers' Trainer"])
def test_a_recipe_continues_after_a_kill_in_a_save(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = STAND_IN.replace("KIND", repr(name), 1)
    tools = in_folder(tmp_path, RECIPES[name], program, f'exec {sys.executable} train.py "$@"')
    attempts = submitted(tmp_path, RECIPES[name], tools, monkeypatch)
    logs = [attempt.log.read_text() for attempt in newest().attempts()]
    assert ["loaded the checkpoint of step 2" in log for log in logs] == [False, True], logs
    assert [each["first_step"] for each in attempts] == [1, 3]


# accelerate itself, on CPUs. The first start dies in the save of step 4.
ACCELERATE = """
import argparse, os, signal
from pathlib import Path
import torch
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--resume")
args = parser.parse_args()
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
rows = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=2)
model, optimizer, rows = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), rows)
last = 0
if args.resume:
    accelerator.load_state(args.resume)
    last = int(args.resume.rpartition("-")[2])
    accelerator.print("loaded the checkpoint of step", last, flush=True)
for step, row in enumerate(accelerator.skip_first_batches(rows, last), last + 1):
    loss = model(row).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}/6 loss {loss.item():.3f}", flush=True)
    if step % 2 == 0:
        accelerator.save_state(f"{args.output_dir}/step-{step}")
    if step == 4 and not args.resume:
        if accelerator.is_main_process:
            Path(args.output_dir, "step-4", "optimizer.bin").unlink()
        accelerator.wait_for_everyone()
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 6:
        break
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_accelerate_itself_continues_after_a_kill_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = f'exec {sys.executable} -m accelerate.commands.accelerate_cli "$@"'
    tools = in_folder(tmp_path, RECIPES["accelerate"], ACCELERATE, start)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    attempts = submitted(tmp_path, RECIPES["accelerate"], tools, monkeypatch)
    assert [(each["first_step"], each["last_step"]) for each in attempts] == [(1, 4), (3, 6)]


# The launcher of the first start kills the Trainer after its second checkpoint, and takes that one's last file away.
KILLED_ONCE = """\
while [[ "$1" == -* ]]; do shift; done
[ ! -e started ] || exec PYTHON "$@"
touch started
PYTHON "$@" &
until [ -e out-hf/checkpoint-20/trainer_state.json ] || ! kill -0 $! 2>/dev/null; do sleep 0.05; done
kill -9 $! && wait $!
rm out-hf/checkpoint-20/trainer_state.json
exit 137"""


def test_transformers_recipe_continues_after_a_kill_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (REPOSITORY / "tests/command/programs/hf_train.py").read_text()
    program = program.replace('"--step_s", type=float, default=0.0', '"--step_s", type=float, default=0.2')
    section = RECIPES["transformers' Trainer"]
    tools = in_folder(tmp_path, section, program, KILLED_ONCE.replace("PYTHON", sys.executable))
    attempts = submitted(tmp_path, section, tools, monkeypatch)
    assert [each["first_step"] for each in attempts] == [1, 11]
    assert (tmp_path / "out-hf" / "checkpoint-30" / "trainer_state.json").is_file()


def test_a_site_gives_its_users_profiles_and_a_default(tmp_path: Path) -> None:
    (profile,) = blocks("docs/for-a-site.md", "toml")
    (site := tmp_path / "site" / "clusters").mkdir(parents=True)
    (site / "gpu.toml").write_text(profile)
    (site.parent / "config.toml").write_text('cluster = "gpu"\n')
    own = {"HPC_GPT_SITE": str(site.parent), "HPC_GPT_CONFIG": str(tmp_path / "config")}
    assert re.search(r"^. gpu +A100 nodes", in_process("profile", "list", environment=own, code=0).stdout, re.M)
    shown = in_process("submit", "demo", "--dry-run", environment=own).stdout
    assert "4 GPUs on 1 node of gpu" in shown
    (tmp_path / "config" / "clusters").mkdir(parents=True)
    (tmp_path / "config" / "clusters" / "gpu.toml").write_text(profile.replace('"A100 nodes', '"my A100 nodes'))
    assert "my A100 nodes" in in_process("profile", "list", environment=own, code=0).stdout


def test_the_hours_of_a_site_are_summed_by_user_and_month(tmp_path: Path) -> None:
    make_run(tmp_path / "logs")
    (code,) = blocks("docs/for-a-site.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "logs")], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert re.fullmatch(r"\S+ +\S.* +0\.0\n", done.stdout), done.stdout
