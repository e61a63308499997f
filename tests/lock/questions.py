"""What the lock asks the program: command lines by name. What is not there, as ../shared, is left out of the lock."""

from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

Line = tuple[str, ...]
SHARED = REPOSITORY.parent / "shared"
PROFILES = ("jean-zay-v100-16g", "jean-zay-v100-32g", "a100-80g-8", "h100-80g-8", "generic-slurm")
ENGINES = ("ddp", "fsdp", "deepspeed-zero", "deepspeed-3d", "hf-deepspeed", "megatron-lm")
MODELS = (("gpt2", 1), ("gpt2", 8), ("gpt2-xl", 8), ("gpt2-xl", 32), ("18b", 64), ("48b", 64), ("48b", 256))
VERBS = (
    "plan", "doctor", "render", "submit", "status", "logs", "stop", "save", "requeue", "cancel", "report",
    "compare", "bench", "why", "export", "data", "profile", "completion", "help",
)  # fmt: skip
TOPICS = ("keys", "record", "engines")


def plans() -> Iterator[tuple[str, Line]]:
    """Questions to the planner: every profile with every model, each engine, switches, the largest model, faults."""
    for profile in PROFILES:
        for model, gpus in MODELS:
            yield f"plan {model} {gpus} {profile}", (
                "plan", "--model", model, "--gpus", str(gpus), "--cluster", profile, "--json",
            )  # fmt: skip
    for engine in ENGINES:
        for profile in ("jean-zay-v100-32g", "h100-80g-8"):
            line = ("plan", "--model", "gpt2-xl", "--gpus", "16", "--cluster", profile, "--engine", engine, "--json")
            yield f"plan engine {engine} {profile}", line
        yield f"plan largest {engine}", (
            "plan", "--max-model", "--gpus", "8", "--cluster", "a100-80g-8", "--engine", engine, "--json",
        )  # fmt: skip
    asked = {
        "why": ("--model", "48b", "--gpus", "64", "--why", "tp4-pp16-dp1"),
        "why not": ("--model", "48b", "--gpus", "64", "--why", "tp8-pp8-dp1"),
        "tp across nodes": ("--model", "48b", "--gpus", "64", "--allow-tp-across-nodes", "--json"),
        "offload": ("--model", "18b", "--gpus", "8", "--offload", "optimizer", "--json"),
        "recompute": ("--model", "18b", "--gpus", "64", "--recompute", "full", "--json"),
        "fixed layout": ("--model", "18b", "--gpus", "64", "--tp", "4", "--pp", "4", "--mbs", "2", "--json"),
        "long sequence": ("--model", "gpt2-xl", "--gpus", "16", "--seq", "8192", "--json"),
        "no room": ("--model", "48b", "--gpus", "4", "--json"),
        "tokens": ("--model", "gpt2", "--gpus", "8", "--tokens", "1e9"),
    }
    for name, words in asked.items():
        yield f"plan {name}", ("plan", *words, "--cluster", "jean-zay-v100-32g")


def scripts() -> Iterator[tuple[str, Line]]:
    """Rendered scripts."""
    for profile in (*PROFILES, "local"):
        yield f"render demo {profile}", ("render", "demo", "--cluster", profile)
        yield f"render 64 {profile}", ("render", "--gpus", "64", "--pp", "16", "--cluster", profile, "--force")
    for path in sorted((REPOSITORY / "experiments").glob("*/sweep.toml")):
        yield f"render sweep {path.parent.name}", (
            "render", path.parent.name, "--cluster", "jean-zay-v100-32g", "--force",
        )  # fmt: skip
    for engine in ENGINES:
        yield f"render engine {engine}", (
            "render", "demo", "--cluster", "h100-80g-8", "--set", f"engine.name={engine}", "--tp", "1", "--pp", "1",
            "--gpus", "4",
        )  # fmt: skip
    singleton = ("--set", 'job.sbatch=["--nice"]', "-J", "a 'name'", "--comment", "x y", "-t", "2:00:00")
    yield "render words", ("render", "demo", "--cluster", "generic-slurm", *singleton)


def logs(folder: Path) -> Iterator[tuple[str, Line]]:
    """Anyone's logs: the shared ones, and those of a folder."""
    for log in sorted((SHARED / "logs").glob("*")):
        for verb in (("report", "--json"), ("why", "--json"), ("report",)):
            yield f"{' '.join(verb)} {log.name}", (verb[0], str(log), *verb[1:])
    for log in sorted(folder.iterdir()):
        for verb in ("report", "why"):
            yield f"{verb} {log.name}", (verb, str(log), "--json")


def runs(folder: Path) -> Iterator[tuple[str, Line]]:
    """Run folders of each engine: read in every way, none of which writes but their records."""
    found = sorted(path.parent for path in folder.rglob("resolved.json"))
    for run in found:
        name = run.parent.name
        for verb in ("status", "why", "report"):
            yield f"{verb} {name}", (verb, str(run), "--json")
        yield f"why in words {name}", ("why", str(run))
        yield f"logs {name}", ("logs", str(run))
    if found:
        yield "report all runs", ("report", str(folder))
    if found[1:]:
        yield "compare two runs", ("compare", str(found[0]), str(found[1]))


def helps() -> Iterator[tuple[str, Line]]:
    """Every help text."""
    yield "help", ("--help",)
    yield from ((f"help {verb}", (verb, "--help")) for verb in VERBS)
    yield from ((f"help topic {topic}", ("help", topic)) for topic in TOPICS)
    yield "profiles", ("profile", "list")
    yield from ((f"profile {name}", ("profile", "show", name)) for name in PROFILES)


def everything(specimens: Path, run_folders: Path) -> dict[str, Line]:
    """All of them, of the logs of one folder and the runs of another."""
    return {
        name: line for kind in (plans(), scripts(), logs(specimens), runs(run_folders), helps()) for name, line in kind
    }
