"""Engine command: its table's rules, and its texts with values filled in."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.engines.command import BRACES
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest, Model
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.program_text import fill, fill_line
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import known_batch, known_shape, shown_layout
from hpc_gpt.core.settings.stored import experiment_of

PROFILE = ClusterProfile("test", gpus_per_node=4)
SOUND = Command(
    run="python train.py --out {run}/out --gpus {gpus}",
    resume="--resume {checkpoint}",
    checkpoints="out/ckpt-*",
    complete="{checkpoint}/.done",
    pattern=r"step (?P<step>\d+) loss (?P<loss>[\d.]+)",
    hang_s=60.0,
)


def experiment(command: Command = SOUND, **tables: object) -> Experiment:
    asked = {"layout": LayoutRequest(gpus=8, nodes=2), **tables}
    return Experiment(engine=Engine("command"), command=command, **asked)


def test_layout_and_model_may_be_missing_and_are_kept_if_given() -> None:
    bare = resolve(experiment(), PROFILE)
    assert (known_shape(bare), known_batch(bare), shown_layout(bare)) == (None, None, "")
    assert (bare.gpus, bare.nodes, bare.tasks_per_node, bare.tasks) == (8, 2, 4, 8)
    full = resolve(
        experiment(model=Model(preset="gpt2"), layout=LayoutRequest(gpus=8, tp=2, micro_batch=4, global_batch=64)),
        PROFILE,
    )
    assert (known_shape(full), known_batch(full), shown_layout(full)) == (full.model, full.batch, str(full.layout))
    assert full.batch.micro_batches == 4
    for run in (bare, full):
        assert Resolved.from_json(run.to_json()) == run
        assert resolve(experiment_of(run), PROFILE) == run
    with pytest.raises(ConfigError, match="model lacks"):
        resolve(experiment(model=Model(hidden=64)), PROFILE)


@pytest.mark.parametrize(("per", "tasks"), [("gpu", 8), ("node", 2), ("job", 1)])
def test_it_is_started_once_a_gpu_a_node_or_a_job(per: str, tasks: int) -> None:
    assert resolve(experiment(replace(SOUND, per=per)), PROFILE).tasks == tasks


def test_the_work_folder_is_beside_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (file := tmp_path / "mine" / "e.toml").write_text('engine.name = "command"\ncommand.run = "x"\n')
    found = load_experiment(str(file))
    assert (found.command.workdir, found.train.steps) == (str(tmp_path / "mine"), 0)
    file.write_text('engine.name = "command"\ncommand = {run = "x", workdir = "src"}\ntrain.steps = 7\n')
    (tmp_path / "mine" / "src").mkdir()
    found = load_experiment(str(file))
    assert (found.command.workdir, found.train.steps) == (str(tmp_path / "mine" / "src"), 7)


# Before a value, what has an apostrophe that is no quote of bash.
BEFORE = (
    "",
    "# isn't {run}\ntrue; # it's\necho a#'b' >/dev/null\n",
    "cat >/dev/null <<EOF | cat\nisn't {run}\nEOF\n",
    "cat >/dev/null <<-'EOF'\nisn't\n\tEOF\n: $((1 <<2)) $'it\\'s'\n",
)


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.sampled_from(["{}", "'{}'", '"{}"', "$'{}'"]),
    st.sampled_from(BEFORE),
)
def test_a_value_reaches_the_program_or_is_refused(value: str, how: str, before: str) -> None:
    values = dict.fromkeys(BRACES, value)
    text = f"{before}printf %s {how.replace('{}', '{run}')}"
    if (how != "{}" or "isn't {run}\nEOF" in before) and set(value) & set("'\"\\$`"):
        with pytest.raises(ConfigError, match=r"\{run\} stands inside quotes or a here-document"):
            fill_line(text, values)
        return
    done = subprocess.run(["bash", "-c", fill_line(text, values)], capture_output=True, check=True)
    assert done.stdout == value.encode()
    assert fill("{run}", values) == value


def test_a_here_document_has_the_value_as_it_is() -> None:
    values = {"run": "/a place"}
    for word in ("EOF", "'EOF'", '"EOF"'):
        line = fill_line(f"cat <<{word} # isn't\n{{run}}: don't, {{{{run}}}}\nEOF\n", values)
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        assert done.stdout == f"{values['run']}: don't, {{run}}\n"
