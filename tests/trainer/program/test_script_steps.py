"""The srun lines of job scripts: their GPUs, and ranks that share a core."""

import os
from pathlib import Path

import pytest

from hpc_gpt.core.slurm.sbatch_words import read_options
from hpc_gpt.trainer.program.job_script import last_values
from hpc_gpt.trainer.program.script_steps import gpus_of_steps, steps_of
from tests.cli.command import error_of, in_process
from tests.programs import put


@pytest.mark.parametrize(
    ("job", "text", "gpus"),
    [
        # as on Frontier: GPUs for the steps alone
        ("-N 128 --exclusive", "srun -N 128 -n1024 -c7 --gpus-per-task=1 --gpu-bind=closest python gpt.py", (8, 1)),
        ("-N 2", "n=$((SLURM_NNODES * 8))\nsrun -n $n --gpus-per-task=1 python gpt.py", (8, 2)),
        ("-N 2", "srun -N $SLURM_JOB_NUM_NODES --ntasks-per-node=8 --gpus-per-task 1 python gpt.py", (8, 1)),
        ("--nodes=4", "time srun -N4 -n4 --gpus-per-node=mi250:8 \\\n  ./launch.sh", (8, 1)),
        ("--nodes=4", "/usr/bin/srun --gpus=32 python gpt.py &\nwait", (8, 1)),
        ("--nodes=2", 'ARGS="--gres=gpu:4 --cpu-bind=cores"\nif true; then srun $ARGS python gpt.py; fi', (4, 2)),
        # of several steps the one with the most
        ("-N 1", "srun --gpus=1 python probe.py\nsrun -N1 -n8 --gpus-per-task=1 python gpt.py | tee log", (8, 2)),
        # none, or not known
        ("-N 2 --exclusive", "srun -n 16 python gpt.py --gpus-per-node 4", (0, 0)),
        ("-N 2", "n=`wc -l <hosts`\nsrun -n $n python gpt.py", (0, 0)),
        ("-N 2", "echo srun --gpus=8\n# srun --gpus=8 python gpt.py", (0, 0)),
    ],
)
def test_the_gpus_of_steps(job: str, text: str, gpus: tuple[int, int]) -> None:
    assert gpus_of_steps(text, last_values(list(read_options(job.split())))) == gpus


@pytest.mark.parametrize(
    ("job", "text", "shares"),
    [
        ("-N 2 --ntasks-per-node=1 --cpus-per-task=56", "srun torchrun --nproc_per_node=8 t.py", True),
        ("-N 2 --ntasks-per-node=1", "srun bash -c 'torchrun --nproc_per_node=8 t.py'", True),
        ("-N 2", "srun -N 2 -n 2 singularity exec i.sif deepspeed --num_gpus=8 t.py", True),
        ("-N 2", 'L="python -m torch.distributed.run --nproc-per-node 8"\nsrun -c1 $L t.py', True),
        ("-N 2 --ntasks-per-node=1", "srun --cpus-per-task=$SLURM_CPUS_PER_TASK torchrun t.py", False),
        ("-N 2 --ntasks-per-node=1", "srun -c 56 accelerate launch t.py", False),
        ("-N 2 --ntasks-per-node=1", "export SRUN_CPUS_PER_TASK=56\nsrun torchrun t.py", False),
        ("-N 2 --ntasks-per-node=8", "srun -N 2 -n 2 --gpu-bind=closest deepspeed --hostfile=h t.py", True),
        ("-N 2 --ntasks-per-node=1", "export SLURM_CPU_BIND=cores\nsrun --cpu-bind=v,cores torchrun t.py", True),
        ("-N 2 --ntasks-per-node=1", "srun --cpu-bind=none torchrun t.py", False),
        ("-N 2 --ntasks-per-node=1", "srun --cpu_bind=none torchrun t.py", False),
        ("-N 2 --ntasks-per-node=1", "srun --cpu-bind=mask_cpu:fe00,fe torchrun t.py", False),
        ("-N 2 --ntasks-per-node=8", "srun python t.py --launcher torchrun-like", False),
        ("-N 2 --ntasks-per-node=8", "srun torchrun t.py", False),
    ],
)
def test_ranks_that_share_a_core(job: str, text: str, shares: bool) -> None:
    (step,) = steps_of(text, last_values(list(read_options(job.split()))))
    assert step.shares_a_core == shares


SITE = 'scheduler = "slurm"\ndevice = "mi250x"\ngpus_per_node = 8\n'
PARTITION = "PartitionName=batch Default=YES MaxTime=2:00:00 QoS=N/A State=UP OverSubscribe={}\n"


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`submit --dry-run` of a script's lines, at a site whose scontrol shows such a partition: its whole output."""

    def run(lines: str, shared: str = "NO", code: int = 0, more: tuple[str, ...] = ()) -> str:
        put(tmp_path / "bin/scontrol", f"#!/bin/sh\necho '{PARTITION.format(shared).strip()}'\n")
        put(tmp_path / "bin/sbatch", "#!/bin/sh\necho 'sbatch: Job 7 to start at 2026-01-01T10:00:00' >&2\n")
        (tmp_path / "site.toml").write_text(SITE)
        (tmp_path / "job.slurm").write_text(f"#!/bin/bash\n{lines}\n")
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        words = ("submit", "--cluster", str(tmp_path / "site.toml"), "--dry-run", *more, "job.slurm")
        done = in_process(*words, cwd=tmp_path, code=code)
        return " ".join((done.stdout + done.stderr).split()) if not code else "|".join(error_of(done))

    return run


@pytest.mark.parametrize(
    ("lines", "shared", "says"),
    [
        ("#SBATCH -N 128 -t 9\nsrun -n1024 --gpus-per-task=1 ./gpt", "NO", "1,024 GPUs on 128 nodes"),
        ("#SBATCH -N 4 -t 9 --exclusive\nsrun -n32 ./gpt", "NO", "32 GPUs on 4 nodes"),
        ("#SBATCH -N 4 -t 9\nsrun -n32 ./gpt", "EXCLUSIVE", "32 GPUs on 4 nodes"),
        ("#SBATCH -N 4 -t 9 --exclusive=user\nsrun -n32 ./gpt", "NO", "no GPU requested, on 4 nodes"),
        ("#SBATCH -N 4 -t 9\nsrun -n32 ./gpt", "NO", "no GPU requested, on 4 nodes"),
        ("#SBATCH -N 4 -t 9 --exclusive --gpus-per-node=2\nsrun -n32 ./gpt", "NO", "8 GPUs on 4 nodes"),
    ],
    ids=["steps", "exclusive", "partition", "of a user", "shared", "asked"],
)
def test_gpus_of_a_script_that_asks_for_none(dry_run, lines: str, shared: str, says: str) -> None:
    assert says in dry_run(lines, shared)


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        ("#SBATCH -N 2 -t 9 --environment=/capstor/e.toml\nsrun ./gpt", "--environment=/capstor/e.toml starts"),
        ("#SBATCH -N 2 -t 9\nsrun torchrun --nproc_per_node=8 t.py", "line 3: srun torchrun --nproc_per_node=8 t.py"),
        ("#SBATCH -N 2 -t 9 --exclusive\nsrun ./gpt", "counts 8 GPUs on each node, by profile site, as --exc"),
        ("#SBATCH -N 2 -t 9\nsrun --gpus=16 ./gpt", "counts 8 GPUs on each node, by srun in line 3"),
    ],
)  # fmt: skip
def test_a_note_on_what_a_script_of_a_site_does(dry_run, lines: str, note: str) -> None:
    assert note in dry_run(lines)


def test_a_script_for_flux_gets_a_word_of_it(dry_run) -> None:
    refused = dry_run("#flux: -N 4\nflux run -n 16 ./gpt", code=2)
    assert "its #flux lines are for flux batch" in refused
