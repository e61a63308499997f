"""Imports point one way, and nothing heavy is loaded before it is needed."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import hpc_gpt

PACKAGE = Path(hpc_gpt.__file__).parent
# The folders of the package, and what each may import beside itself and the modules at the top, which all may. The
# terminal is no such module: it draws.
MAY_IMPORT = {
    "top": set(),
    "terminal": set(),
    "settings": {"engines", "weights"},
    "engines": {"settings"},
    "weights": {"settings"},
    "runs": {"settings", "engines", "weights"},
    "slurm": {"settings", "runs"},
    "ends": {"settings", "runs", "slurm"},
    "tokens": {"settings"},
    "readers": {"settings", "engines", "runs", "slurm", "ends"},
    "report": {"terminal", "settings", "engines", "runs", "slurm", "ends", "readers"},
    "preflight": {"settings", "runs", "ends"},
    "supervision": {"runs", "ends"},
    "program": {"settings", "runs", "slurm", "ends", "readers", "supervision"},
    "model": {"settings", "weights"},
    "train": {
        "settings",
        "engines",
        "weights",
        "runs",
        "slurm",
        "ends",
        "tokens",
        "readers",
        "preflight",
        "supervision",
        "program",
        "model",
    },
    "plan": {"settings", "engines", "report"},
    "attempts": {"settings", "runs", "slurm", "ends", "readers"},
    "watch": {"terminal", "settings", "engines", "runs", "slurm", "ends", "readers", "attempts"},
    "launch": {
        "terminal",
        "settings",
        "engines",
        "weights",
        "runs",
        "slurm",
        "ends",
        "supervision",
        "tokens",
        "plan",
        "readers",
        "preflight",
        "program",
        "attempts",
        "watch",
    },
    "doctor": {"settings", "engines", "runs", "slurm", "ends", "plan", "preflight", "launch"},
    "bench": {
        "terminal",
        "settings",
        "engines",
        "runs",
        "ends",
        "tokens",
        "plan",
        "readers",
        "preflight",
        "attempts",
        "watch",
        "launch",
        "report",
        "supervision",
    },
    "api": {"settings", "engines", "runs", "slurm", "plan", "readers", "watch", "launch", "report"},
    "cli": {
        "terminal",
        "settings",
        "engines",
        "runs",
        "slurm",
        "ends",
        "tokens",
        "plan",
        "readers",
        "program",
        "watch",
        "launch",
        "report",
        "doctor",
        "bench",
    },
}
TRAINER = {"model", "train"}
# On the nodes, too: modules of other packages.
ON_NODES = {"preflight.measurements", "weights.tensors"}
HEAVY = {"torch", "deepspeed"}
NEVER_AT_IMPORT = {"torch", "deepspeed", "submitit", "jinja2"}


# The rooms, and the rooms that each may import from. Here and in docs/architecture.md a module's name is without it.
ROOMS = {
    "core": set(),
    "reader": {"core"},
    "trainer": {"core", "reader"},
    "launcher": {"core", "reader", "trainer"},
    "cli": {"core", "reader", "trainer", "launcher"},
}


def without_room(name):
    """The name of a module, as `hpc_gpt.core.runs.record` or `core.runs.record`, without hpc_gpt and its room."""
    parts = [part for part in name.split(".") if part not in ("hpc_gpt", "__init__")]
    return ".".join(parts[1:] if parts and parts[0] in ROOMS and parts[0] != "cli" else parts)


def all_modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield without_room(".".join(path.relative_to(PACKAGE).with_suffix("").parts)), path


MODULES = {name: path for name, path in all_modules() if name or path.parent == PACKAGE}


def part_of(module):
    top = module.partition(".")[0]
    if top == "__main__":
        return "cli"
    if module == "preflight.rank":  # a rank on a node, which asks `train` for its device
        return "train"
    return top if top in MAY_IMPORT else "top"


@functools.cache
def all_imports_of(path):
    """(full name, whether it runs when the module is imported, whether it is for the type checker alone) of every
    import in a file."""
    found = []

    def visit(node, at_import, for_types):
        # Only what holds statements is looked into: an import is no expression.
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((name.name, at_import, for_types) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                found.extend((f"{child.module}.{name.name}", at_import, for_types) for name in child.names)
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                checked = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                inside = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                visit(child, inside, for_types or checked)

    visit(ast.parse(path.read_text(encoding="utf-8")), True, False)
    return found


def imports_of(path, with_types=False):
    """(full name, whether it runs when the module is imported) of every import in a file; those for the type checker
    alone, which never run, only `with_types`."""
    return [(name, at_import) for name, at_import, for_types in all_imports_of(path) if with_types or not for_types]


def own_module(name):
    """The module of the package that an imported name stands for, or lies in."""
    inner = without_room(name)
    return inner if inner in MODULES else inner.rpartition(".")[0]


def loaded_for(module, name):
    """The modules of ours that an import of `name` in `module` loads: the one that has the name, and the packages that
    this one is in. A package that `module` is in itself is loaded already; it counts if the import is from it."""
    if name.split(".")[0] != "hpc_gpt":
        return set()
    parts = own_module(name).split(".")
    loaded = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    of, imported_from = f"{module}.", without_room(name).rpartition(".")[0]
    return {each for each in loaded if each in (own_module(name), imported_from) or not of.startswith(f"{each}.")}


def cycles(graph):
    """The sets of more than one node in which each leads to every other."""

    def reached(start):
        found, left = set(), [start]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    reach = {node: reached(node) for node in graph}
    rings = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph if node in reach[node]}
    return [ring for ring in rings if len(ring) > 1]


def test_no_modules_import_each_other():
    # Those inside functions count, and those for the type checker alone.
    graph = {
        module: {other for name, _ in imports_of(path, True) for other in loaded_for(module, name)} - {module}
        for module, path in MODULES.items()
    }
    found = [sorted(ring) for ring in cycles(graph)]
    assert found == []


def test_a_cycle_is_found():
    assert [sorted(ring) for ring in cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}})] == [["b", "c"]]
    assert loaded_for("runs.find", "hpc_gpt.report.svg.Svg") == {"report.svg", "report"}
    assert loaded_for("report.why", "hpc_gpt.report.page.groups.Group") == {"report.page.groups", "report.page"}
    assert loaded_for("report.page.table", "hpc_gpt.report.page.groups.Group") == {"report.page.groups"}
    assert loaded_for("report.page.table", "hpc_gpt.report.page.groups") == {"report.page.groups", "report.page"}


def test_imports_point_one_way():
    wrong = []
    for module, path in MODULES.items():
        part = part_of(module)
        ours = [name for name, _ in imports_of(path) if name.split(".")[0] == "hpc_gpt"]
        wrong += [(module, name) for name in ours if part_of(own_module(name)) not in MAY_IMPORT[part] | {part, "top"}]
    assert wrong == []


def room_of(name):
    """The room of a module by its full name; "top" for what stands beside the rooms."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "top"


def test_rooms_import_from_those_before_them():
    wrong = []
    for path in MODULES.values():
        room = room_of(".".join(("hpc_gpt", *path.relative_to(PACKAGE).parts)))
        may = ROOMS.get(room, {*ROOMS}) | {room, "top"}
        ours = [name for name, _ in imports_of(path, True) if name.split(".")[0] == "hpc_gpt"]
        wrong += [(path.name, name) for name in ours if room_of(name) not in may]
    assert wrong == []


def test_few_names_stand_beside_the_rooms():
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert names - {*ROOMS} == {"__init__.py", "__main__.py", "api.py", "py.typed"}


# What a run is to be, without a rule: the settings that an engine may know. The rules of [command] are those of one
# engine alone.
VALUE_TYPES = {
    "settings.layout",
    "settings.model_shape",
    "settings.shape_split",
    "settings.experiment",
    "settings.services",
    "settings.key_rules",
    "settings.program_text",
    "settings.schedule",
    "settings.sized",
    "settings.cluster",
    "settings.resolved",
}


def test_an_engine_imports_only_value_types_of_the_settings():
    for module in [module for module in MODULES if part_of(module) == "engines"]:
        used = {own_module(name) for name, _ in imports_of(MODULES[module]) if name.startswith("hpc_gpt.core.settings")}
        assert used <= VALUE_TYPES, module


def test_value_types_ask_no_engine():
    askers = {module for module in VALUE_TYPES for name, _ in imports_of(MODULES[module]) if ".engines" in name}
    assert askers == set()


# What verbs share: the options and arguments that they parse, and how an answer is printed.
PARSERS = {
    f"cli.{name}"
    for name in ("completers", "experiment_options", "option_groups", "requests", "run_argument", "script_words")
}


def test_nothing_imports_a_verb():
    # `submitting`, `sweeping` and `racing` are the verb submit's other parts, and `submit_answer` is what they print.
    parts = ("submitting", "sweeping", "racing")
    apart = {("cli.submit", f"cli.{part}") for part in (*parts, "submit_answer")} | {("cli.submitting", "cli.sweeping")}
    apart |= {(f"cli.{part}", "cli.submit_answer") for part in parts}
    found = {
        (module, own_module(name))
        for module, path in MODULES.items()
        for name, _ in imports_of(path)
        if name.startswith("hpc_gpt.cli.") and own_module(name) not in PARSERS | {"cli"}
    }
    assert found == apart


def test_listing_the_verbs_loads_none_of_them():
    program = (
        "import sys\n"
        "from hpc_gpt.cli import group\n"
        "import click\n"
        "ctx = click.Context(group)\n"
        "group.get_help(ctx), group.shell_complete(ctx, '')\n"
        "print(*(name.removeprefix('hpc_gpt.cli.') for name in sys.modules if name.startswith('hpc_gpt.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def on_nodes(module):
    return part_of(module) in TRAINER or module in ON_NODES


def test_only_the_trainer_names_torch():
    wrong = []
    for module in [module for module in MODULES if not on_nodes(module)]:
        heavy = [(name, at_import) for name, at_import in imports_of(MODULES[module]) if name.split(".")[0] in HEAVY]
        wrong += [(module, name) for name, at_import in heavy if part_of(module) != "cli" or at_import]
    assert wrong == []


def test_the_trainer_names_no_click():
    for module in filter(on_nodes, MODULES):
        names = {name.split(".")[0] for name, _ in imports_of(MODULES[module])}
        assert not names & {"click", "submitit", "jinja2", "tqdm"}, module


def loaded_by(modules):
    """Top-level packages in sys.modules after a fresh Python has imported the modules."""
    paths = [MODULES[module].relative_to(PACKAGE.parent).with_suffix("") for module in modules]
    names = [".".join(part for part in path.parts if part != "__init__") for path in paths]
    program = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_settings_and_run_folders_load_the_standard_library():
    loaded = loaded_by(module for module in MODULES if part_of(module) in ("top", "settings", "runs"))
    assert not loaded & (NEVER_AT_IMPORT | {"click", "numpy"})


def test_importing_the_verbs_loads_nothing_heavy():
    # The submitit subclasses need their base at import; the verbs import those modules when they run.
    modules = [module for module in MODULES if part_of(module) in ("cli", "readers", "report", "terminal", "tokens")]
    loaded = loaded_by(module for module in modules if not module.endswith("__main__"))
    assert not loaded & NEVER_AT_IMPORT


def test_no_launcher_module_loads_torch():
    loaded = loaded_by(
        m
        for m in MODULES
        if part_of(m) in ("launch", "watch", "attempts", "ends", "slurm", "program", "supervision", "plan")
        and not m.endswith("__main__")
    )
    assert not loaded & HEAVY


def test_the_trainer_loads_no_click():
    # (Triton comes with torch's CUDA build alone.)
    left_out = ("__main__", "triton_kernels")
    loaded = loaded_by(m for m in MODULES if part_of(m) in TRAINER and not m.endswith(left_out))
    assert "torch" in loaded
    assert not loaded & {"click", "submitit"}
