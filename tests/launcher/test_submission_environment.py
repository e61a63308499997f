"""What a submission passes on of the shell it was typed in."""

from hpc_gpt.core.slurm.environment import leaked_variables, submission_environment

SHELL = {
    "PATH": "/bin", "HF_TOKEN": "secret", "SLURM_CONF": "/etc/slurm.conf", "HPC_GPT_LOGS": "/logs",
    "OMP_NUM_THREADS": "4",
}  # fmt: skip
ENCLOSING_JOB = {
    "SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SRUN_CPUS_PER_TASK": "1", "SBATCH_PARTITION": "x",
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "1",
    "SUBMITIT_EXECUTOR": "slurm", "TORCHELASTIC_RUN_ID": "a", "PMI_RANK": "3", "HPC_GPT_RUN": "/logs/other",
    "HPC_GPT_ATTEMPT": "2", "HPC_GPT_ARRAY": "/logs/table", "HPC_GPT_ELEMENT": "6_1", "HPC_GPT_JOB": "7",
    "HPC_GPT_STOP_AT": "1700000000",
}  # fmt: skip


def test_an_enclosing_job_leaves_no_trace():
    assert submission_environment(SHELL | ENCLOSING_JOB, {"HPC_GPT_RUN": "/logs/mine"}) == {
        **SHELL,
        "HPC_GPT_RUN": "/logs/mine",
    }


def test_what_is_dropped_can_be_said():
    assert leaked_variables(SHELL | ENCLOSING_JOB) == sorted(ENCLOSING_JOB)
