"""The job script of a race: the ranks' one srun line in a loop, and nothing of it in another script."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.settings.resolved import Resolved, config_hash
from hpc_gpt.launcher.launch.render import render_script

EXPERIMENT = Experiment(
    model=Model("gpt2"), engine=Engine("ddp"), layout=LayoutRequest(gpus=4, micro_batch=1, micro_batches=1)
)


@pytest.mark.parametrize("chain", ["requeue", "singleton", "none"])
def test_it_starts_its_ranks_once_a_visit_by_one_line(tmp_path: Path, chain: str) -> None:
    run = resolve(EXPERIMENT, ClusterProfile("test", gpus_per_node=4, chain=chain))  # type: ignore[arg-type]
    race = replace(run, race=6)
    text = render_script(race)
    main = text[text.index("main() {") : text.index("# === nothing below")]
    assert main.count("srun ") == 1
    assert main.index("while next_visit") < main.index("run_ranks in_visit srun") < main.index("\n  done\n")
    (script := tmp_path / "job.sh").write_text(text)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    # It is in the text of a race alone, and in no hash.
    assert "visit" not in render_script(run)
    assert '"race"' not in run.to_json()
    assert config_hash(race) == config_hash(run)
    assert Resolved.from_json(race.to_json()).race == 6
