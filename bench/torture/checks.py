"""What must be true of a run that was broken once, by the time it is done."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from bench.torture.order import SAVE_EVERY, STEPS
from bench.torture.scene import Scene
from hpc_gpt.core.files import read_json
from hpc_gpt.core.runs.run_folder import job_ids
from hpc_gpt.reader.runs.own_run import read_own
from tests.processes import command_of
from tests.slurm.launcher import settled_class
from tests.waiting import LIMIT_S


def reference_of(scene: Scene) -> dict[int, float]:
    """Step -> loss of an undisturbed run. AssertionError if a step is missing."""
    losses = scene.job.metrics(1)
    assert sorted(losses) == list(range(1, STEPS + 1)), f"the unbroken run's steps: {sorted(losses)}"
    return losses


def problems(scene: Scene, reference: dict[int, float]) -> list[str]:
    """Everything that is wrong with the run, in words."""
    return [
        words
        for check in (_losses, _resumed, _record, _left_over, _explained, _clean)
        for words in check(scene, reference)
    ]


def _losses(scene: Scene, reference: dict[int, float]) -> Iterator[str]:
    """To the last digit, in every attempt."""
    seen: set[int] = set()
    for attempt in scene.run.attempts():
        for step, loss in scene.job.metrics(attempt.number).items():
            seen.add(step)
            if loss != reference.get(step):
                yield f"attempt {attempt.number}: loss {loss!r} at step {step}, not {reference.get(step)!r}"
                break
    if missing := set(reference) - seen - scene.blurred:
        yield f"no line of steps {sorted(missing)}"
    final = read_own(scene.run).record.loss_last
    if final != (last := reference[max(reference)]):
        yield f"final loss {final!r}, not {last!r}"


def resumed_steps(scene: Scene) -> list[int | None]:
    """The step after which each attempt but the first resumed; None if none of its ranks got so far."""
    found = []
    for attempt in scene.run.attempts()[1:]:
        step = read_json(attempt.folder / "trainer.json").get("resumed_step")
        found.append(int(step) if isinstance(step, int) else None)
    return found


def lost_steps(scene: Scene) -> int:
    """Steps done before the fault that had to be done again."""
    first = next((step for step in resumed_steps(scene) if step is not None), None)
    return 0 if first is None or scene.last_step is None else max(0, scene.last_step - first)


def _resumed(scene: Scene, reference: dict[int, float]) -> Iterator[str]:
    """From the newest checkpoint that was whole, and that is not older than the interval."""
    first = next((step for step in resumed_steps(scene) if step is not None), None)
    if first is None or scene.newest_saved is None or scene.last_step is None:
        return
    sound = scene.newest_saved - (SAVE_EVERY if scene.newest_saved in scene.damaged else 0)
    if first < sound:
        yield f"resumed after step {first}, though step {sound} was saved and sound"
    # One that was still being written at that moment may be lost with what follows it.
    allowed = SAVE_EVERY * (1 + scene.saving + len(scene.damaged))
    if scene.last_step - first > allowed:
        yield f"{scene.last_step - first} steps lost, of an interval of {SAVE_EVERY}"


def _record(scene: Scene, reference: dict[int, float]) -> Iterator[str]:
    """No step twice, in the curve and in what `hpc-gpt report --json` says."""
    curve = read_own(scene.run).steps
    counted = Counter(curve["step"][curve.counts].astype(int).tolist())
    if twice := sorted(step for step, times in counted.items() if times > 1):
        yield f"steps counted twice: {twice}"
    if missing := set(reference) - set(counted) - scene.blurred:
        yield f"steps not counted: {sorted(missing)}"
    wrong = [
        int(step)
        for step, loss in zip(curve["step"][curve.counts], curve["loss"][curve.counts], strict=True)
        if np.isfinite(loss) and reference.get(int(step)) != loss
    ]
    if wrong:
        yield f"the curve has another loss at steps {wrong}"
    done = scene.hpc_gpt("report", "--json", str(scene.run.path))
    if fault := _fault_of(done):
        yield f"report: {fault}"
        return
    (record,) = json.loads(done.stdout)["records"]
    resolved = scene.run.resolved()
    tokens = STEPS * resolved.batch.global_batch * resolved.model.seq or None
    if record["tokens_total"] != tokens and not scene.blurred:
        yield f"tokens_total {record['tokens_total']}, not {tokens}"
    if record["ended"] != "done":
        yield f"the record says ended {record['ended']}"
    for said in record["attempts"] or ():
        judged = settled_class(scene.run.attempt(said["attempt"]))
        if said["ended"] != judged:
            yield f"the record says attempt {said['attempt']} ended {said['ended']}, the judge {judged}"
    if record["attempts"] is None or len(record["attempts"]) != len(scene.run.attempts()):
        yield f"the record has {record['attempts']} for {len(scene.run.attempts())} attempts"


def _left_over(scene: Scene, reference: dict[int, float]) -> Iterator[str]:
    """No process and no job of the run is left, and its program had no other copy of itself beside it."""
    if (beside := scene.run.path / "work" / "beside").exists():
        yield beside.read_text()
    end = time.monotonic() + LIMIT_S
    while (left := _jobs_left(scene)) or scene.job_processes():
        if time.monotonic() > end:
            processes = scene.job_processes()
            if left:
                yield f"jobs left in the queue: {left}"
            if processes:
                yield f"processes left: {[(pid, command_of(pid)) for pid in processes]}"
            return
        time.sleep(0.2)


def _jobs_left(scene: Scene) -> list[str]:
    ids = ",".join(job_ids(scene.run))
    return scene.slurm("squeue", "-h", "-o", "%i:%T", "-j", ids, check=False).split()


def _explained(scene: Scene, reference: dict[int, float]) -> Iterator[str]:
    """Every attempt has a class and, unless it is done, a cause, and `why` says them."""
    done = scene.hpc_gpt("why", str(scene.run.path), "--json")
    if fault := _fault_of(done):
        yield f"why: {fault}"
        return
    said = json.loads(done.stdout)
    if said["ended"] != "done":
        yield f"why says ended {said['ended']}"
    if len(said["attempts"]) != len(scene.run.attempts()):
        yield f"why has {len(said['attempts'])} attempts, there are {len(scene.run.attempts())}"
    for attempt in said["attempts"]:
        if attempt["ended"] in (None, "unknown", "running", "pending"):
            yield f"attempt {attempt['attempt']} ended {attempt['ended']}"
        elif attempt["ended"] != "done" and not attempt["cause"]:
            yield f"attempt {attempt['attempt']} ended {attempt['ended']} without a cause"
        judged = settled_class(scene.run.attempt(attempt["attempt"]))
        if attempt["ended"] != judged:
            yield f"why says attempt {attempt['attempt']} ended {attempt['ended']}, the judge {judged}"
    for attempt in scene.run.attempts():
        if not attempt.ended():
            yield f"attempts/{attempt.number} has no ended.json"


def _clean(scene: Scene, reference: dict[int, float]) -> Iterator[str]:
    """Half-written checkpoints do not pile up, nor do files that were on their way to a name."""
    half = [path.name for path in scene.run.checkpoints.glob(".writing-*")]
    if len(half) > 1:
        yield f"half-written checkpoints: {half}"
    damaged = [path.name for path in scene.run.checkpoints.glob(".damaged-*")]
    if len(damaged) > len(scene.damaged):
        yield f"set aside as damaged: {damaged}"


def _fault_of(done: subprocess.CompletedProcess[str]) -> str:
    """What is wrong with the answer of a command that should have printed JSON."""
    if done.returncode:
        return f"exit {done.returncode}: {done.stderr.strip()}"
    try:
        json.loads(done.stdout)
    except ValueError as fault:
        return f"no JSON: {fault}"
    return ""
