"""Files of the run folder are spoilt, and the run dies, so that the next attempt must cope with them."""

import os
import shutil
import signal
from pathlib import Path

from bench.torture.faults.kind import AFTER_TWO_SAVES, kind
from bench.torture.scene import Scene


@kind(earliest=AFTER_TWO_SAVES)
def truncate_the_newest_checkpoint(scene: Scene) -> None:
    with _Dying(scene) as newest:
        victim = _any_file(scene, newest)
        os.truncate(victim, scene.chance.randrange(victim.stat().st_size))
        scene.detail = _words(scene, victim)


@kind(earliest=AFTER_TWO_SAVES)
def flip_a_bit_in_the_newest_checkpoint(scene: Scene) -> None:
    with _Dying(scene) as newest:
        victim = _any_file(scene, newest, but=("complete.json",))
        at = scene.chance.randrange(victim.stat().st_size)
        with open(victim, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << scene.chance.randrange(8)]))
        scene.detail = f"{_words(scene, victim)}, byte {at}"


@kind(earliest=AFTER_TWO_SAVES)
def delete_the_newest_checkpoint(scene: Scene) -> None:
    """The whole of it, or one of its files."""
    with _Dying(scene) as newest:
        if scene.chance.random() < 0.5:
            shutil.rmtree(newest)
            scene.detail = newest.name
        else:
            (victim := _any_file(scene, newest)).unlink()
            scene.detail = _words(scene, victim)


@kind(earliest=2)
def corrupt_the_last_line_of_metrics(scene: Scene) -> None:
    """Cut off, or followed by half a line or by noise; then the run dies, or continues."""
    scene.wait_moment()
    scene.freeze()
    metrics = scene.run.attempts()[-1].metrics
    text = metrics.read_bytes()
    last = text.rstrip(b"\n").rpartition(b"\n")[2]
    how = scene.chance.choice(("cut off", "followed by half a line", "followed by noise"))
    if how == "cut off":
        scene.blurred.add(scene.done_step())
        os.truncate(metrics, len(text) - scene.chance.randrange(2, len(last)))
    else:
        tail = b'{"step": 12, "loss' if how.endswith("line") else bytes(scene.chance.randbytes(40)).replace(b"\n", b"?")
        with open(metrics, "ab") as file:
            file.write(tail)
    scene.remember()
    dies = scene.chance.random() < 0.7
    scene.signal_ranks(signal.SIGKILL if dies else signal.SIGCONT)
    scene.detail = f"{how}, {'the run dies' if dies else 'the run continues'}"


class _Dying:
    """Within the block no rank moves and the newest checkpoint may be spoilt; then all of them are killed."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def __enter__(self) -> Path:
        self.scene.wait_moment()
        self.scene.freeze()
        self.scene.remember()
        step = self.scene.newest_checkpoint()
        self.scene.damaged.add(step)
        return self.scene.run.checkpoints / f"step-{step:08d}"

    def __exit__(self, *_: object) -> None:
        self.scene.signal_ranks(signal.SIGKILL)


def _any_file(scene: Scene, folder: Path, but: tuple[str, ...] = ()) -> Path:
    """One of the checkpoint's files that hold something."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in but)
    return scene.chance.choice([path for path in files if path.stat().st_size])


def _words(scene: Scene, victim: Path) -> str:
    return str(victim.relative_to(scene.run.checkpoints))
