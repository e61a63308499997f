"""What of a job script is worth a look, and what `init` makes of one: each line to the letter."""

from pathlib import Path

from hpc_gpt.trainer.program.job_script import read_job_script, scan, submits_again, submits_itself

SCRIPT = """\
#!/bin/bash -l
#SBATCH -t 7
module load x
#SBATCH -N 2
sbatch next.sh
  pkill -9 python
# killall x
trap 'scontrol requeue $SLURM_JOB_ID' USR1
python t.py --exit-duration-in-mins 90 # killall
export WANDB_API_KEY=0123456789abcdef0123456789abcdef
[ $# = 0 ] && echo "Usage: sbatch $0 [-m MODEL]"; exit 1
echo -e 'then sbatch it'
echo "[$(date)] $(sbatch --dependency=singleton $0)"
SCRIPT=$(scontrol show job "$SLURM_JOB_ID" | awk -F= '/Command=/{print $2}')
here=$(dirname "$(squeue -h -j $SLURM_JOB_ID -o %.200o)")
echo "$Command=x"; squeue -h -j "$SLURM_JOB_ID" -o "%i of %u"
srun --output=logs/%j.txt python train.py
torchrun --redirects 3 --log-dir logs train.py
cat <<EOF
#SBATCH -N 3
EOF
exec sbatch fit.slurm
[[ ! $SLURM_JOBID ]] && sbatch "$0"
true
true
true
[ "x$SLURM_JOB_ID" = x ] && exec sbatch fit.slurm
if [ -z "$SLURM_JOB_ID" ]; then
  true
  true
  true
  sbatch fit.slurm; fi
sbatch fit.slurm
scontrol requeuehold "$SLURM_JOB_ID"
"""
COMMAND = "the job's command is the run's job.sh, not this script; the folder of the submission is SLURM_SUBMIT_DIR"
AGAIN = "submits this script once more, although the job chain continues it: remove the line"
OTHER = (
    "submits another job, which is not part of this run; if it is meant to continue this run, remove the line: "
    "the job chain does that"
)
EARLY = "ends the program before its last step: should the job chain continue it?"
BY_HAND = "submits the script itself if SLURM_JOB_ID is not set, as on a machine without Slurm"
PAST = "not to the run's log; why and status read it there if they find it"
RELEASED = "the run's next attempt starts after scontrol release"
NOTES = f"""\
line 4: #SBATCH -N 2: sbatch does not read it: it is after the first command, which is in line 3
line 5: sbatch next.sh: {OTHER}
line 6: pkill -9 python: ends processes by name, in all of your jobs on the node
line 8: trap 'scontrol requeue $SLURM_JOB_ID' USR1: requeues its own job: this makes the run's next attempt, once
line 9: python t.py --exit-duration-in-mins 90 # killall: {EARLY}
line 10: export WANDB_API_KEY=[removed]: a secret: it is in the run's job.sh, for you alone to read
line 13: echo "[$(date)] $(sbatch --dependency=singleton $0)": {AGAIN}
line 14: SCRIPT=$(scontrol show job "$SLURM_JOB_ID" | awk -F= '/Comma: {COMMAND}
line 15: here=$(dirname "$(squeue -h -j $SLURM_JOB_ID -o %.200o)"): {COMMAND}
line 17: srun --output=logs/%j.txt python train.py: its output goes to logs/%j.txt, {PAST}
line 18: torchrun --redirects 3 --log-dir logs train.py: its output goes to logs/**/std*.log, {PAST}
line 22: exec sbatch fit.slurm: {AGAIN}
line 23: [[ ! $SLURM_JOBID ]] && sbatch "$0": {BY_HAND}
line 27: [ "x$SLURM_JOB_ID" = x ] && exec sbatch fit.slurm: {BY_HAND}
line 32: sbatch fit.slurm; fi: {BY_HAND}
line 33: sbatch fit.slurm: {AGAIN}
line 34: scontrol requeuehold "$SLURM_JOB_ID": requeues its own job and holds it: {RELEASED}
"""


def test_each_line_that_is_worth_a_look_says_what_it_means(tmp_path: Path) -> None:
    (path := tmp_path / "fit.slurm").write_text(SCRIPT)
    script = read_job_script(path)
    assert "".join(f"{note}\n" for note in scan(script)) == NOTES
    assert str(submits_itself(script)) == NOTES.splitlines()[1]
    only = [line for line in SCRIPT.splitlines() if "SLURM_JOBID" in line]
    found = [
        submits_again(path, text.encode())
        for text in (SCRIPT, *only, "#!/bin/sh\nsbatch other\nsbatch eval_fit.slurm\n")
    ]
    assert found == [(13, False), (1, True), None]
