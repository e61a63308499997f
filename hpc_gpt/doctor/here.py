"""The preflight of a run on this machine: its ranks are started for some seconds, measured, and gone."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from hpc_gpt.doctor.checks import Check, Level
from hpc_gpt.doctor.preflight import Preflight
from hpc_gpt.doctor.preflight_table import write_table
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.small_files import write_once


def probe_here(resolved: Resolved, logs: Path, out: TextIO) -> list[Check]:
    """Measures the ranks of a run here, in a folder under the one where runs land, which is taken away.

    The figures go to `out` as a table. OSError where the folder cannot be made.
    """
    place = next(each for each in (logs.absolute(), *logs.absolute().parents) if each.is_dir())
    folder = Path(tempfile.mkdtemp(prefix=".hpc-gpt-doctor-", dir=place))
    try:
        write_once(folder / "resolved.json", resolved.to_json())
        run = RunFolder(folder)
        attempt = run.new_attempt()
        node = platform.node()
        command = [
            "env", f"HPC_GPT_RUN={folder}", f"HPC_GPT_ATTEMPT={attempt.number}", "GLOO_SOCKET_IFNAME=lo",
            sys.executable, "-m", "hpc_gpt.doctor.start_here", node, str(resolved.ranks_per_node),
            sys.executable, "-m", "hpc_gpt.train.preflight",
        ]  # fmt: skip
        preflight = Preflight(run, attempt.number, [node], command, host="127.0.0.1")
        talk = preflight.hold()
        write_table(preflight, talk, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not preflight.findings:
        words = f"{resolved.ranks_per_node} ranks measured here in {preflight.took_s:.1f} s"
        return [Check("probe", "ok", words)]
    return [
        Check("probe", _level(finding.node is not None or finding.ended is not None), finding.words, "see the table")
        for finding in preflight.findings
    ]


def _level(broken: bool) -> Level:
    return "fail" if broken else "warn"
