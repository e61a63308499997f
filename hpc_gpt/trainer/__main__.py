"""`python -m hpc_gpt.trainer`: one rank of the run in HPC_GPT_RUN. Takes no arguments.

Environment: HPC_GPT_RUN (the run folder), HPC_GPT_ATTEMPT (the attempt's number), and the rank's number (see
`meeting.identify`).
Exit codes: 0 for every orderly end, 2 for wrong settings or data, 130 after the second Ctrl-C, else 1.
"""

import gc
import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, RunFolderError
from hpc_gpt.core.process import no_collections, raise_file_limit
from hpc_gpt.core.runs.full_disk import install_patient_output
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.devices import is_amd
from hpc_gpt.trainer.node_cache import set_caches
from hpc_gpt.trainer.supervision.ending import report_failure
from hpc_gpt.trainer.supervision.meeting import identify
from hpc_gpt.trainer.supervision.signals import Signals


def main() -> None:
    # Before numpy and torch: their imports take seconds, and a signal would end the process meanwhile.
    signals = Signals()
    signals.install()
    install_patient_output()
    raise_file_limit()
    attempt: Attempt | None = None
    trainer = None
    named = os.environ.get("RANK", "")
    rank = int(named) if named.isdigit() else 0
    try:
        run, attempt = _find_attempt(os.environ.get("HPC_GPT_RUN"), os.environ.get("HPC_GPT_ATTEMPT"))
        resolved = run.resolved()
        engine = engine_named(resolved.engine.name)
        if engine.is_program:
            program = importlib.import_module(engine.trainer).RANK(run, attempt, signals)
            signals.on_quit = program.quit
            code = program.train()
            sys.stdout.flush()
            os._exit(code)
        if lacking := [package for package in engine.packages if find_spec(package) is None]:
            raise ConfigError(
                f"{sys.executable} has no {lacking[0]}",
                "pip install 'hpc-gpt[train]' there, or choose another Python: venv or python in the cluster profile, "
                "or HPC_GPT_PYTHON",
            )
        identity = identify(os.environ)
        rank = identity.rank
        os.environ["RANK"] = str(rank)
        amd = is_amd(resolved.cluster.device) or os.path.exists("/dev/kfd")
        if (why := set_caches(run.path, os.environ, amd)) and identity.local_rank == 0:
            print(f"note: {why}", file=sys.stderr, flush=True)
        with no_collections():
            from hpc_gpt.trainer.attempt import Trainer
        gc.freeze()  # the modules stay, so later garbage collections need not go through them

        trainer = Trainer(run, attempt, identity, signals)
        signals.on_quit = trainer.quit
        code = trainer.train(resolved)
        assert trainer.ranks is not None
        trainer.ranks.leave_together(code)
    except BaseException as error:
        code = report_failure(error, rank, attempt, trainer.step if trainer else 0)
        if trainer is not None and trainer.ranks is not None:
            trainer.ranks.announce_failure(code)
        # Not `ranks.leave`: that module needs torch, which may be missing.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _find_attempt(run: str | None, attempt: str | None) -> tuple[RunFolder, Attempt]:
    if not run or not Path(run, "resolved.json").is_file():
        raise ConfigError(
            f"HPC_GPT_RUN is {run!r}, which is not a run folder", "start runs with hpc-gpt submit, or sbatch job.sh"
        )
    folder = RunFolder(Path(run).resolve())
    if not attempt or not attempt.isdigit() or not folder.attempt(int(attempt)).folder.is_dir():
        raise ConfigError(
            f"HPC_GPT_ATTEMPT is {attempt!r}, but {folder.path}/attempts has no such folder",
            "start runs with hpc-gpt submit, or sbatch job.sh",
        )
    started = folder.attempt(int(attempt))
    if not os.access(started.folder, os.W_OK):
        # Every rank checks, so that none waits for a rendezvous that rank 0 cannot write.
        raise RunFolderError(
            f"cannot write {started.folder}", "is the disk read-only, or does the folder belong to somebody else?"
        )
    return folder, started


if __name__ == "__main__":
    main()
