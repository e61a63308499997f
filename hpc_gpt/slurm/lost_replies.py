"""Jobs whose sbatch got no answer: the controller may have queued them.

Such a submission is a line of submissions.jsonl without an id, whose `lost` is sbatch's message. The job is found by
the `script` that Slurm shows as its command; another line then has its id. Until then the run is `unknown`.
"""

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from hpc_gpt.errors import SlurmUnreachable
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.slurm.clients import Answer, Client

# The request was sent. An error of the connection is none: then sbatch could not send it.
_SENT = re.compile(
    r"socket timed out|zero bytes were transmitted|message receive failure|connection reset|transport endpoint|"
    r"header lengths are longer|insane message length|unexpected message received",
    re.IGNORECASE,
)


def is_lost(answer: Answer) -> bool:
    """Whether sbatch, which failed, had sent its request, or was killed."""
    return answer.code < 0 or (answer.code != 0 and bool(_SENT.search(answer.stderr)))


def ask_for_lost(line: Mapping[str, Any]) -> Client:
    """The question for the job of a lost submission, which `add_found` reads. Raises as Client."""
    command = ["squeue", "--noheader", "--states=all", "--array", f"--user={os.getuid()}", "--format=%i|%o"]
    return Client(command, cluster=line.get("clusters"))


def add_found(run: RunFolder, line: Mapping[str, Any], answer: Answer) -> str:
    """The id of the job of a lost submission, as squeue's answer shows it, noted in the run; empty if it is not there.
    Raises SlurmUnreachable, RunFolderError."""
    if answer.code != 0:
        raise SlurmUnreachable(f"squeue: {answer.sentence}", "is slurmctld up?")
    known = {each["job_id"] for each in run.submissions() if each.get("job_id")}
    job_id, cluster = _newest(line, known, answer.stdout)
    if job_id:
        asked = str(line.get("clusters") or "")
        cluster = cluster or (asked if "," not in asked else "")  # of one cluster squeue prints no name
        chosen = {"slurm_cluster": cluster} if cluster else {}
        run.add_submission({**line, "lost": None, "job_id": job_id, **chosen})
    return job_id


def _newest(line: Mapping[str, Any], known: Collection[str], listed: str) -> tuple[str, str]:
    """(id, cluster) of the newest job with the command of a lost submission that is not `known`."""
    element, script = str(line.get("element") or ""), str(line.get("script"))
    found, cluster = ("", ""), ""
    for row in listed.splitlines():
        if row.startswith("CLUSTER: "):  # before the jobs of each cluster that was asked
            cluster = row.removeprefix("CLUSTER: ").strip()
        job_id, _, command = row.partition("|")
        mine = command == script and job_id not in known and job_id.partition("_")[1:] == element.partition("_")[1:]
        if mine and int(job_id.partition("_")[0]) > int(found[0].partition("_")[0] or 0):
            found = job_id, cluster
    return found
