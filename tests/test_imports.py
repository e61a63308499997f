"""Imports point one way, and nothing heavy is loaded before it is needed."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import hpc_gpt

PACKAGE = Path(hpc_gpt.__file__).parent
# What a package may import beside its own modules, those of its room and those of `core` itself. A room that is named
# alone stands for all that is in it; what is inside a room may import what the room may.
MAY_IMPORT = {
    "core": set(),
    "core.settings": {"core.settings.rules", "core.engines", "core.optimizers", "core.weights"},
    "core.settings.rules": {"core.settings", "core.engines", "core.optimizers", "core.weights"},
    "core.engines": {"core.settings", "core.optimizers", "core.weights"},
    "core.optimizers": {"core.settings"},
    "core.weights": {"core.settings", "core.settings.rules"},
    "core.machine": {"core.settings"},
    "core.runs": {"core.settings", "core.engines", "core.machine", "core.optimizers", "core.weights"},
    "core.processes": {"core.settings", "core.machine", "core.runs"},
    "core.checkpoints": {"core.settings", "core.engines", "core.optimizers", "core.runs", "core.processes"},
    "core.sinks": set(),
    "core.slurm": {"core.settings", "core.runs", "core.processes"},
    "core.ends": {"core.settings", "core.runs", "core.processes", "core.checkpoints", "core.slurm"},
    "reader": {"core"},
    "reader.lines": set(),
    "reader.programs": {"reader.lines"},
    "reader.failures": {"reader.lines"},
    "reader.runs": {"reader.lines", "reader.programs", "reader.failures"},
    "report": {"core", "reader"},
    "planner": {"core", "report"},
    "trainer": {"core", "reader"},
    "trainer.tokens": set(),
    "trainer.model": set(),
    "trainer.supervision": set(),
    "trainer.program": {"trainer.supervision"},
    "trainer.preflight": {"trainer.supervision"},
    "trainer.engines": {
        "trainer.checkpoints",
        "trainer.model",
        "trainer.optimizers",
        "trainer.program",
        "trainer.supervision",
        "trainer.tokens",
    },
    "trainer.optimizers": {"trainer.checkpoints", "trainer.model"},
    "trainer.checkpoints": {"trainer.model", "trainer.engines"},
    "launcher": {"core", "reader", "report", "planner", "trainer"},
    "launcher.attempts": set(),
    "launcher.watch": {"launcher.attempts"},
    "launcher.local": {"launcher.attempts", "launcher.watch"},
    "launcher.doctor": set(),
    "api": {"core", "reader", "report", "planner", "launcher"},
    "cli": {"core", "reader", "report", "planner", "trainer", "launcher", "api"},
}
# Those that name torch, and the modules of other packages that do.
WITH_TORCH = {"trainer", "trainer.engines", "trainer.checkpoints", "trainer.model", "trainer.optimizers"}
MODULES_WITH_TORCH = {"trainer.preflight.measurements", "trainer.preflight.rank"}
HEAVY = {"torch", "deepspeed"}
NEVER_AT_IMPORT = {"torch", "deepspeed", "submitit", "jinja2"}
MOST_MODULES, MOST_LINES = 40, 7000  # in one package


def inner(name):
    """A module's name within hpc_gpt: `hpc_gpt.core.runs.record` is `core.runs.record`, hpc_gpt itself is empty."""
    return ".".join(part for part in name.split(".")[name.startswith("hpc_gpt") :] if part != "__init__")


def all_modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield inner(".".join(("hpc_gpt", *path.relative_to(PACKAGE).with_suffix("").parts))), path


MODULES = dict(all_modules())


def package_of(module):
    """The package of a module in the table; api.py and __main__.py are one each, hpc_gpt itself is empty."""
    if module == "__main__":
        return "cli"
    return module if module in MAY_IMPORT or not module else package_of(module.rpartition(".")[0])


def room_of(package):
    return package.partition(".")[0]


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
    within = inner(name)
    return within if within in MODULES else within.rpartition(".")[0]


def loaded_for(module, name):
    """The modules of ours that an import of `name` in `module` loads: the one that has the name, and the packages that
    this one is in. A package that `module` is in itself is loaded already; it counts if the import is from it."""
    if name.split(".")[0] != "hpc_gpt":
        return set()
    parts = own_module(name).split(".")
    loaded = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    of, imported_from = f"{module}.", inner(name).rpartition(".")[0]
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
    assert loaded_for("core.runs.find", "hpc_gpt.report.svg.Svg") == {"report.svg", "report"}
    assert loaded_for("report.why", "hpc_gpt.report.page.groups.Group") == {"report.page.groups", "report.page"}
    assert loaded_for("report.page.table", "hpc_gpt.report.page.groups.Group") == {"report.page.groups"}
    assert loaded_for("report.page.table", "hpc_gpt.report.page.groups") == {"report.page.groups", "report.page"}


def allowed_for(package):
    """The packages whose modules one of `package` may import."""
    room = room_of(package)
    inside = {other for other in MAY_IMPORT if room_of(other) == room}
    whole = MAY_IMPORT[room] | ({name for name in MAY_IMPORT[package] if "." not in name})
    allowed = {other for other in MAY_IMPORT if room_of(other) in whole}
    # A module in the room itself may ask its packages; those of core's top are for all and ask nobody.
    allowed |= (inside if package == room != "core" else {room, package}) | MAY_IMPORT[package]
    return allowed | {"core", ""}


def test_imports_point_one_way():
    wrong = []
    for module, path in MODULES.items():
        package = package_of(module)
        ours = [name for name, _ in imports_of(path, True) if name.split(".")[0] == "hpc_gpt"]
        allowed = allowed_for(package) if package else {*MAY_IMPORT}
        wrong += [(module, name) for name in ours if package_of(own_module(name)) not in allowed]
    assert wrong == []


# Every folder with modules, as `core.runs`; hpc_gpt itself is empty.
FOLDERS = {".".join(path.parent.relative_to(PACKAGE).parts) for path in MODULES.values()}


def test_every_package_is_in_the_table():
    # Two are a part of the one that they lie in.
    assert FOLDERS - {""} - {"core.engines.base", "report.page"} == {*MAY_IMPORT} - {"api"}


def test_few_names_stand_at_the_top():
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"} - {"__init__.py"}
    assert names == {"__main__.py", "api.py", "py.typed", *map(room_of, MAY_IMPORT)} - {"api"}
    assert len(names) <= 10


def test_no_two_packages_have_one_name():
    names = [package.rpartition(".")[2] for package in FOLDERS]
    assert {name for name in names if names.count(name) > 1} == {"checkpoints", "engines", "optimizers", "runs"}


def test_no_package_is_too_large_for_a_reader():
    for package in FOLDERS:
        files = [path for path in PACKAGE.joinpath(*package.split(".")).glob("*.py") if path.name != "__init__.py"]
        lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
        assert lines <= MOST_LINES, package
        assert len(files) <= MOST_MODULES, package


# What a run is to be, without a rule: the settings that an engine may know. The rules of [command] are those of one
# engine alone.
VALUE_TYPES = {
    "core.settings.layout",
    "core.settings.layer_kinds",
    "core.settings.model_keys",
    "core.settings.model_shape",
    "core.settings.shape_split",
    "core.settings.experiment",
    "core.settings.services",
    "core.settings.key_rules",
    "core.settings.program_text",
    "core.settings.schedule",
    "core.settings.sized",
    "core.settings.cluster",
    "core.settings.resolved",
}


def test_an_engine_imports_only_value_types_of_the_settings():
    for module in [
        module for module in MODULES if room_of(package_of(module)) == "core" and ".engines" in package_of(module)
    ]:
        used = {own_module(name) for name, _ in imports_of(MODULES[module]) if name.startswith("hpc_gpt.core.settings")}
        assert used <= VALUE_TYPES, module


def test_value_types_ask_no_engine():
    askers = {module for module in VALUE_TYPES for name, _ in imports_of(MODULES[module]) if ".engines" in name}
    assert askers == set()


# What verbs share: the options and arguments that they parse, and how an answer is printed.
PARSERS = {
    f"cli.{name}"
    for name in ("completers", "options", "request", "run_argument", "script_words", "ssh", "variables", "verb")
}


def test_nothing_imports_a_verb():
    # `submitting`, `sweeping` and `racing` are the verb submit's other parts, and `submit_answer` is what they print.
    parts = ("submitting", "sweeping", "racing")
    apart = {("cli.submit", f"cli.{part}") for part in (*parts, "submit_answer")}
    apart |= {("cli.submitting", "cli.sweeping"), ("cli.racing", "cli.sweeping")}
    apart |= {(f"cli.{part}", "cli.submit_answer") for part in parts}
    apart.add(("cli", "cli.on_host"))  # sends a verb elsewhere
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
    return package_of(module) in WITH_TORCH or module in MODULES_WITH_TORCH


def test_only_the_trainer_names_torch():
    wrong = []
    for module in [module for module in MODULES if not on_nodes(module)]:
        heavy = [(name, at_import) for name, at_import in imports_of(MODULES[module]) if name.split(".")[0] in HEAVY]
        wrong += [(module, name) for name, at_import in heavy if package_of(module) != "cli" or at_import]
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
    packages = ("", "core", "core.settings", "core.runs")
    loaded = loaded_by(module for module in MODULES if package_of(module) in packages)
    assert not loaded & (NEVER_AT_IMPORT | {"click", "numpy"})


def test_importing_the_verbs_loads_nothing_heavy():
    # The submitit subclasses need their base at import; the verbs import those modules when they run.
    rooms = ("cli", "reader", "report")
    modules = [m for m in MODULES if room_of(package_of(m)) in rooms or package_of(m) == "trainer.tokens"]
    loaded = loaded_by(module for module in modules if not module.endswith("__main__"))
    assert not loaded & NEVER_AT_IMPORT


def test_no_launcher_module_loads_torch():
    packages = {"core.ends", "core.slurm", "trainer.program", "trainer.supervision", "trainer.tokens"}
    packages |= {package for package in MAY_IMPORT if room_of(package) in ("launcher", "planner")}
    loaded = loaded_by(m for m in MODULES if package_of(m) in packages and not m.endswith("__main__"))
    assert not loaded & HEAVY


def test_the_trainer_loads_no_click():
    # (Triton comes with torch's CUDA build alone.)
    left_out = ("__main__", "triton_kernels")
    loaded = loaded_by(m for m in MODULES if package_of(m) in WITH_TORCH and not m.endswith(left_out))
    assert "torch" in loaded
    assert not loaded & {"click", "submitit"}
