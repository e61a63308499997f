"""The variables that a script reads: which, and what a resumption says if they differ."""

import json

from hpc_gpt.launcher.script_variables import describe_changes, hash_variables

SCRIPT = """#!/bin/bash
#SBATCH --output=$NOT_READ
OUT=out/$SLURM_JOB_ID
export MODE="${MODE:-fast}"
for each in 1 2; do echo $each $HOME; done
srun python train.py --steps ${MAX_STEPS:-100} --key "$API_KEY" --out $OUT $HPC_GPT_RESUME_FROM
"""


def test_names_and_hashes_are_stored_and_no_value() -> None:
    table = hash_variables(SCRIPT, {"MAX_STEPS": "500", "HOME": "/home/me"})
    assert list(table["values"]) == ["MAX_STEPS", "API_KEY"]
    assert table["values"]["API_KEY"] is None
    assert "500" not in json.dumps(table["values"])
    assert table["values"] != hash_variables(SCRIPT, {"MAX_STEPS": "500"})["values"]  # another salt


def test_what_differs_is_said() -> None:
    table = hash_variables(SCRIPT, {"MAX_STEPS": "500"})
    assert describe_changes(table, {"MAX_STEPS": "500"}) is None
    assert describe_changes({}, {}) is None
    sentence = str(describe_changes(table, {"API_KEY": "secret"}))
    assert sentence.startswith("the script reads MAX_STEPS, which is unset now; API_KEY, which is set only now:")
    assert "secret" not in sentence
    assert "MAX_STEPS, which differs now" in str(describe_changes(table, {"MAX_STEPS": "5"}))
