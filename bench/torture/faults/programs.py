"""Faults of a run whose program is not ours."""

import json
import signal
import time

from bench.torture.faults.disk import fill
from bench.torture.faults.kind import HANG, kind
from bench.torture.order import SAVE_EVERY
from bench.torture.scene import Scene
from tests.command.mine import kill, processes
from tests.processes import children_of, send
from tests.slurm.launcher import any_has_pending
from tests.waiting import patient


@kind(program="loop", earliest=3)
def break_a_program(scene: Scene) -> None:
    """It is killed, or what watches it, or its job goes back to the queue by hand, or a node of it dies."""
    scene.wait_moment()
    how = scene.chance.choice(("the program", "its supervisor", "a requeue", "a node"))
    scene.detail = how
    node = scene.job.nodes()[0]
    scene.remember()
    if how == "the program":
        kill(scene.run, "loop.sh")
    elif how == "its supervisor":
        scene.signal_ranks(signal.SIGKILL)
    elif how == "a requeue":
        scene.slurm("scontrol", "requeue", scene.job.id)
    else:
        scene.cut_power(node)


@kind(program="titled", earliest=3)
def break_a_titled_program(scene: Scene) -> None:
    """No process of it has our variables: it is killed, its worker is not; or what watches both."""
    scene.wait_moment()
    scene.detail = scene.chance.choice(("the program", "its supervisor"))
    scene.remember()
    if scene.detail == "its supervisor":
        scene.signal_ranks(signal.SIGKILL)
    for pid in scene.titled() if scene.detail == "the program" else ():
        if children_of(pid):
            send(pid, signal.SIGKILL)


@kind(program="titled", steps=range(10, 100, 10), settings=(HANG,))
def silent_evaluation(scene: Scene) -> None:
    """No line of a step is due any more, for longer than the limit of a hang: nothing is broken."""
    scene.detail = "after the line of step 90/99"
    scene.wait_step(90)
    time.sleep(patient(30))
    (scene.run.path / "work" / "evaluated").touch()
    scene.wait_at_most(lambda: scene.run.attempt(1).ended())
    assert (ended := scene.job.ended()) == ["done"], f"not done once: {ended}"


@kind(program="job script", earliest=SAVE_EVERY + 1)
def break_a_script(scene: Scene) -> None:
    """Its program is killed, or the watch over it, or its node dies, or its job is requeued, by hand or by itself."""
    scene.wait_moment()
    how = scene.chance.choice(("its program", "its watch", "its node", "a requeue", "a requeue of its own"))
    scene.detail = how
    node = scene.job.nodes()[0]
    scene.remember()
    if how == "its program":
        kill(scene.run, "loop.sh")
    elif how == "its watch":
        pid = json.loads((scene.run.attempt(1).heartbeats / "0.json").read_text())["pid"]
        send(pid, signal.SIGKILL)
    elif how == "its node":
        scene.cut_power(node)
    elif how == "a requeue":
        scene.slurm("scontrol", "requeue", scene.job.id)
    else:
        (scene.run.path / "work" / "requeue").touch()


@kind(program="job script", earliest=SAVE_EVERY + 1, settings=(HANG,))
def stop_a_script(scene: Scene) -> None:
    """SIGSTOP to its program, which then says nothing more."""
    scene.wait_moment()
    scene.remember()
    for pid in processes(scene.run, "loop.sh"):
        send(pid, signal.SIGSTOP)


@kind(program="job script", earliest=SAVE_EVERY + 1)
def end_a_script_at_its_limit(scene: Scene) -> None:
    """The time limit comes, and its program saves in time, or ignores signals."""
    deaf = scene.chance.random() < 0.5
    if deaf:
        (scene.launcher.folder / "work" / "deaf").touch()
    scene.detail = "it ignores signals" if deaf else "it saves"
    scene.wait_moment()
    scene.remember()
    _pass_limit(scene, deaf)


def _pass_limit(scene: Scene, deaf: bool = False) -> None:
    """Lets the time limit of a script's job come; the next start of the job has its time again."""
    pids = list(processes(scene.run, "loop.sh"))
    for pid in pids:  # a run of seconds must not be done by then
        send(pid, signal.SIGSTOP)
    scene.slurm("scontrol", "update", f"jobid={scene.job.id}", f"EndTime=now+{1 if deaf else 45}")
    scene.wait_at_most(lambda: deaf or any_has_pending(pids, signal.SIGTERM))
    for pid in pids if not deaf else ():
        send(pid, signal.SIGCONT)
    scene.wait_at_most(lambda: scene.run.attempt(1).ended() or len(scene.run.attempts()) > 1)
    scene.slurm("scontrol", "update", f"jobid={scene.job.id}", "TimeLimit=60", check=False)


@kind(program="job script", earliest=SAVE_EVERY + 1)
def queue_an_evaluation_at_the_limit(scene: Scene) -> None:
    """The time limit comes, and the script saves in time, queues a job that evaluates, and exits with 0."""
    scene.wait_moment()
    scene.remember()
    (scene.run.path / "work" / "evaluate").touch()
    _pass_limit(scene)
    scene.wait_at_most(lambda: len(scene.run.attempts()) > 1)


@kind(program="job script", earliest=SAVE_EVERY + 1, small_disk=True, by_hand=("disk_full",))
def fill_the_disk_of_a_script(scene: Scene) -> None:
    """Somebody fills it, and frees it once the run is over: its program fails to save."""
    scene.wait_moment()
    scene.remember()
    fill(scene.launcher.logs / "ballast")
    scene.mending.callback((scene.launcher.logs / "ballast").unlink)
