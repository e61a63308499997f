"""hpc-gpt logs"""

import click

from hpc_gpt.cli.run_argument import chosen_run, run_argument
from hpc_gpt.cli.verb import verb
from hpc_gpt.launcher.watch.logs import copy_rank, copy_tail, follow_logs, log_output, log_path, with_errors


@verb(70)
@run_argument
def logs(run: str | None, follow: bool, attempt: int | None, tail: int | None, rank: int | None, path: bool) -> None:
    """Print RUN's log.

    The log has the output of all ranks of the last attempt; the standard error of a job script with --error follows.
    --rank prints the lines that carry the label of the rank, as srun --label, torchrun and our trainer write them, then
    the rank's own files, such as those of srun --output=rank-%t.txt or torchrun --log-dir, and its stacks after a hang.
    RUN is a run id, its begin or its end, a job id, a folder, or the name of an experiment or a sweep. If it
    means several runs, or is left out, the newest is taken, and a line names it.
    """
    chosen = chosen_run(run)
    if rank is not None:
        copy_rank(chosen, attempt, rank, tail, log_output(), path)
    elif path:
        click.echo(str(log_path(chosen, attempt)))
    elif follow:
        follow_logs(chosen, attempt, tail, log_output())
    else:
        out = log_output()
        for file in with_errors(log := log_path(chosen, attempt)):
            if file != log:
                out.write(f"--- {file.relative_to(chosen.path)} ---\n".encode())
            copy_tail(file, tail, out)
        out.flush()
