"""The JSON schemas in docs/schemas, made of what the verbs print: `python -m tests.cli.schemas` writes them anew and
keeps every key that a schema has; `… long` asks also the verbs that take a minute.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hpc_gpt.core.keys import keys_of
from hpc_gpt.core.runs.record import Record
from hpc_gpt.launcher.watch.status import RunStatus
from tests.cli.command import hpc_gpt, in_process
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, make_run, with_checkpoints

FOLDER = REPOSITORY / "docs" / "schemas"
# Tables whose keys are names of the user's, or whatever a program has; by the last key.
_OPEN = {
    *("settings", "left_out", "not_checked", "predicted", "words", "published", "seed", "varied", "versions"),
    *("loss_eval_by", "bpb_by", "sources", "default", "value", "calibration", "machine"),
}
_NAMES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", tuple: "array", dict: "object"}
TINY = """
model = { hidden = 16, layers = 1, heads = 2, vocab = 256, seq = 16 }
data = { source = "random" }
engine = { name = "ddp" }
layout = { gpus = 1 }
train = { steps = 3, dtype = "fp32", log_every = 1 }
"""


def of_values(values: list[Any], key: str = "") -> dict[str, Any]:
    """The schema of what a key had. Every value may be null in another run; one that always was may be anything."""
    found = [value for value in values if value is not None]
    kinds = {_NAMES[type(value)] for value in found}
    if kinds == {"object"} and key not in _OPEN:
        names = dict.fromkeys(name for value in found for name in value)
        properties = {name: of_values([value[name] for value in found if name in value], name) for name in names}
        required = [name for name in names if all(name in value for value in found)]
        return {"type": ["object", "null"], "properties": properties, "required": required}
    if kinds == {"array"} and key not in _OPEN:
        items = of_values([item for value in found for item in value])
        return {"type": ["array", "null"], "items": items}
    return {"type": [*sorted(kinds), "null"]} if kinds else {}


def of_class(kind: Any) -> dict[str, Any]:
    """The schema of an object with the fields of a dataclass."""
    means = {key.name: key.means for key in keys_of(kind)}
    properties = {}
    for name, hint in get_type_hints(kind).items():
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = sorted({_NAMES.get(get_origin(each) or each, "") for each in options if each is not NoneType})
        properties[name] = {"type": [*kinds, "null"]} if all(kinds) else {}
        properties[name] |= {"description": means[name]} if means.get(name) else {}
    return {"type": "object", "properties": properties, "required": list(properties)}


def schema_of(verb: str, samples: list[Any]) -> dict[str, Any]:
    found = of_values(samples)
    for name, kind in (("records", Record), ("runs", RunStatus)):
        if name in found["properties"] and verb in ("report", "status"):
            items, own = found["properties"][name]["items"], of_class(kind)
            properties = {**items.get("properties", {}), **own["properties"]}
            found["properties"][name]["items"] = {**own, "properties": properties}
    found["properties"]["schema"] = {"const": 1}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"hpc-gpt {verb} --json", **found,
            "type": "object"}  # fmt: skip


def with_kept(new: Any, kept: Any) -> Any:
    """A schema with what the kept one has beyond it: types, and keys, as far as it has some."""
    if not (isinstance(new, Mapping) and isinstance(kept, Mapping)):
        return sorted({*new, *kept}) if isinstance(new, list) and isinstance(kept, list) else new
    merged = {**kept, **{key: with_kept(value, kept[key]) if key in kept else value for key, value in new.items()}}
    if "required" in new and "required" in kept:
        merged["required"] = [name for name in kept["required"] if name in new["required"]]
        merged["required"] += [name for name in new["required"] if name not in kept["properties"]]
    return merged


def faults(value: Any, schema: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """What of a value is not as its schema has it, a key that the schema lacks among it."""
    if "const" in schema and value != schema["const"]:
        yield f"{at} is {value!r}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and ("null" if value is None else _NAMES[type(value)]) not in kinds:
        yield f"{at} is {value!r}, not of {kinds}"
    if isinstance(value, dict) and "properties" in schema:
        yield from (f"{at}.{name} is missing" for name in schema["required"] if name not in value)
        for name, own in value.items():
            if name not in schema["properties"]:
                yield f"{at}.{name} is not in the schema"
            else:
                yield from faults(own, schema["properties"][name], f"{at}.{name}")
    for number, item in enumerate(value if isinstance(value, list) else ()):
        yield from faults(item, schema.get("items", {}), f"{at}[{number}]")


def printed(logs: Path, long: bool = False) -> Iterator[tuple[str, Any]]:
    """(verb, the object) of runs that are made in a folder; `long`: also of verbs that take a minute."""
    runs = [make_run(logs, row=row, experiment="memory-ladder") for row in ("batch64", None)]
    for number, run in enumerate(runs):
        add_attempt(run, 19, "done" if number else "nan", cause="boom")
        with_checkpoints(run, 10, 20)
    one, other = (run.path for run in runs)
    (tiny := logs.parent / "tiny.toml").write_text(TINY)
    grid = ("submit", tiny, "--grid", "train.lr=1e-4,1.0", "--grid", "train.min_lr=0.0,0.5", "--skip-unfit")
    here = ("--cluster", "local", "--json")
    plan = ("plan", "--model", "gpt2", "--gpus", "8", "--cluster", "a100-80g-8", "--engine", "ddp", "--json")
    hybrid = (*plan, "--engine", "fsdp", "--set", "layout.shard=4")
    lines: list[tuple[Any, ...]] = [
        ("status", logs, "--json"), ("status", logs, "--sizes", "--json"), ("report", logs, "--json"),
        ("report", one, "--json"), ("why", one, "--json"), ("why", other, "--json"),
        ("compare", one, other, "--json"), plan, (*plan, "--max-seq"), hybrid,
        ("doctor", tiny, "--cluster", "local", "--json"),
        *((verb, logs, "--json") for verb in ("clean",)),
        *((verb, one, "--json") for verb in ("stop", "save", "requeue", "cancel")),
        ("clean", one, "--yes", "--json"), (*grid, "--dry-run", "--cluster", "a100-80g-8", "--json"),
        *(("help", topic, "--json") for topic in ("keys", "profile")),
    ]  # fmt: skip
    for words in lines:
        yield _name(words), _object(in_process(*words), words)
    if long:
        yield "submit", _object(hpc_gpt(*grid, *here, environment={"OMP_NUM_THREADS": "1"}), grid)


def _name(words: tuple[Any, ...]) -> str:
    return "help-keys" if words[0] == "help" else str(words[0])


def _object(done: Any, words: object) -> Any:
    assert done.stdout, (words, done)
    return json.loads(done.stdout)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HPC_GPT_LOGS": f"{folder}/logs", "HPC_GPT_CONFIG": f"{folder}/config"}
        found: dict[str, list[Any]] = {}
        for verb, sample in printed(Path(folder, "logs"), long=len(sys.argv) > 1):
            found.setdefault(verb, []).append(sample)
    FOLDER.mkdir(exist_ok=True)
    for verb, samples in found.items():
        place = FOLDER / f"{verb}.json"
        kept = json.loads(place.read_text()) if place.exists() else {}
        place.write_text(json.dumps(with_kept(schema_of(verb, samples), kept), indent=1) + "\n")
