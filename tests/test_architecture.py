"""ARCHITECTURE.md and `make tree` against the disk, and rules of the source that no linter knows."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import networkx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "drivetrain"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TREE: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "tree.py"))


def test_the_layers_that_are_drawn_and_printed_are_those_that_are_checked() -> None:
    """The picture in ARCHITECTURE.md, `make tree`, and what import-linter checks, name the same folders and files."""
    on_disk = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    on_disk |= {path.name for path in PACKAGE.glob("*.py")}
    printed = [name for _, names in TREE["LAYERS"] for name in names.split()]
    assert sorted(printed) == sorted(on_disk)
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    picture = page.split("```")[1]
    assert {name for name in re.findall(r"[a-z_]+(?:\.py)?", picture)} >= on_disk - {"__init__.py"}
    checked = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("layers = [")[1].split("]")[0]
    folders = {name.removesuffix(".py") for name in on_disk} - {"__init__"}
    assert set(re.findall(r"[a-z_]+", checked)) == folders


def test_architecture_md_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= 12_000


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/failing_parts.md"])
def test_every_file_that_a_page_on_the_code_names_exists(page: str) -> None:
    named = set(re.findall(r"`(\w+/[\w/]+\.py)`", (ROOT / page).read_text(encoding="utf-8")))
    assert len(named) > 20
    assert [each for each in sorted(named) if not (PACKAGE / each).exists() and not (ROOT / each).exists()] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_first_sentence_of_every_file_says_what_it_is_for(path: Path) -> None:
    sentence = TREE["first_paragraph"](path)
    assert sentence.endswith((".", ":"))
    assert len(sentence) <= 240


def test_no_device_literal_outside_of_accelerators() -> None:
    """A device type other than the host's is named only where devices are (design: no device literal)."""
    types = {"cuda", "mps", "xpu", "hpu", "npu", "mlu", "musa", "mtia", "xla", "tpu"}
    found = []
    for path in SOURCES:
        if path.relative_to(PACKAGE).parts[0] in ("accelerators", "compat", "legacy") or "xla" in path.stem:
            continue  # a file of its own for one kind of device may name it
        files = {each.stem for each in path.parent.glob("*.py")} if path.name == "__init__.py" else set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in types - files:
                found.append(f"{path.name}:{node.lineno} {node.value!r}")
            if isinstance(node, ast.Attribute) and node.attr in ("cuda", "mps", "xpu"):
                found.append(f"{path.name}:{node.lineno} .{node.attr}")
    assert found == []


ID = re.compile(r"\btraps? T\d+|\bspec (?:[SC]?\d)|\bT\d{1,2}\b|\b[SE]\d-\d{1,2}\b")


def cites_an_id(text: str) -> bool:
    """Whether a text refers to an id of docs/traps.md or to a section of the specification, in place of its reason."""
    return ID.search(text) is not None


def test_comments_give_reasons_and_no_ids() -> None:
    citing = {str(path.relative_to(PACKAGE).as_posix()) for path in SOURCES if cites_an_id(path.read_text("utf-8"))}
    assert citing == set()


def test_an_id_in_a_comment_is_found() -> None:
    assert cites_an_id("# before the step (trap T21)")
    assert cites_an_id('"""The registry (spec S0-9)."""')
    assert cites_an_id("in the order of spec 3.3")
    assert not cites_an_id("spec = find_spec(name)  # T is a type variable, and 1.0 a version")


INTERNAL = re.compile(rf"{ID.pattern}|(?<![\w*/-])_[a-z]\w*|\._[a-z]\w*|#\d+\b")
"""An id, or a name with an underscore in front."""


def messages_of(source: str) -> list[str]:
    """The texts of four words or more in a file that are no docstrings, with "X" for what is filled in."""
    tree = ast.parse(source)
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    apart = {id(part) for node in joined for part in node.values}
    apart |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values) for node in joined
    ] + [
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart
    ]  # fmt: skip
    return [text for text in texts if len(text.split()) >= 4]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_messages_name_no_internals(path: Path) -> None:
    if path.name in ("served.py", "completion.py"):
        return  # tables of names of another library; scripts, which call functions of zsh
    assert [text for text in messages_of(path.read_text("utf-8")) if INTERNAL.search(text)] == []


def test_an_internal_name_in_a_message_is_found() -> None:
    source = (
        "def f(n):\n    '''Set self._x, a docstring.'''\n    raise E(f'{n} has no attribute self._book' ' here.')\n"
    )
    assert messages_of(source) == ["X has no attribute self._book here."]
    for text in ("see T12 for the reason", "the field _devices is empty", "set trainer._x to that", "as in issue #42"):
        assert INTERNAL.search(text)
    for text in ("add_X_args and --X_y are options", "a_name of 16 bits", "dataloader_idx_0", "file X_1.ckpt"):
        assert not INTERNAL.search(text)


POSIX_ONLY = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "posix", "syslog", "readline"}


def test_no_posix_only_import_at_module_level() -> None:
    found = []
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name}: {name}" for name in names if name.split(".")[0] in POSIX_ONLY]
    assert found == []


PRIVATE_YET = {
    "base.rank_zero._RANK_VARIABLES", "loggers._folder",
    "strategies._deepspeed_config", "strategies._deepspeed_optimizers", "strategies._deepspeed_state",
    "strategies._xla",
}  # fmt: skip
"""Private files and names that other folders use. None may be added."""


def private_names_of_others(path: Path) -> set[str]:
    """The private files and names that a file takes from another folder, by an import or by a string."""
    room, tree = path.relative_to(PACKAGE).parts[0], ast.parse(path.read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    named = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    named |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = set()
    for name in named:
        inner = re.fullmatch(r"drivetrain\.((\w+)[\w.]*?\.(?:_[a-z]\w*|_[A-Z]\w*))(\..*|:\w+)?", name)
        if inner is not None and inner[2] != room:
            found.add(inner[1] + (inner[3] if (inner[3] or "").startswith(":") else ""))
    return found


def test_folders_use_no_private_names_of_each_other() -> None:
    assert {name for path in SOURCES for name in private_names_of_others(path)} <= PRIVATE_YET


ROOMS = {"accelerators", "checkpoints", "clusters", "launchers", "loggers", "precision", "strategies"}
CONTRACTS = {
    "Accelerator",
    "CheckpointIO",
    "ClusterEnvironment",
    "Group",
    "Launcher",
    "LayerSync",
    "Logger",
    "Precision",
    "Strategy",
}
PARTS = {
    "accelerator", "checkpoint_io", "environment", "group", "launcher", "logger", "precision", "precision_plugin",
    "store", "strategy", "world",
}  # fmt: skip
"""How the objects of these folders are called elsewhere."""


def side_doors(room: str, source: str) -> set[str]:
    """Where a file of the folder ``room`` asks a part for its class, or for what its contract does not have."""
    tree = ast.parse(source)
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    origin = {alias.name: (node.module or "").split(".")[:2] for node in froms for alias in node.names}
    made = {name_of(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = set()
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
        if private and name_of(node.value).strip("_") in PARTS and room not in ROOMS:
            found.add(ast.unparse(node))
        if not isinstance(node, ast.Call) or not node.args:
            continue
        asked, of_part = name_of(node.func), name_of(node.args[0]).strip("_") in PARTS and room not in ROOMS
        if asked in ("getattr", "hasattr") and of_part and isinstance(node.args[1], ast.Constant):
            found.add(ast.unparse(node))
        if asked == "isinstance":
            classes = {name_of(each) for each in ast.walk(node.args[1])} - CONTRACTS - made  # its own default it knows
            parts = {each for each in classes if each.endswith((*CONTRACTS, "IO", "Environment"))}
            found |= {ast.unparse(node) for each in parts if origin.get(each, [""])[-1] in ROOMS - {room}}
    return found


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_no_part_is_asked_for_its_class_or_for_what_its_contract_does_not_have() -> None:
    """Only what builds on a part may: programs of other libraries and earlier generations, and the suites of tests."""
    rooms = {path: path.relative_to(PACKAGE).parts[0] for path in SOURCES}
    core = {path: room for path, room in rooms.items() if room not in ("compat", "legacy", "testing")}
    found = {path.name: side_doors(room, path.read_text(encoding="utf-8")) for path, room in core.items()}
    assert {name: doors for name, doors in found.items() if doors} == {}


@pytest.mark.parametrize(
    "door",
    ["isinstance(strategy, DDPStrategy)", "getattr(trainer.strategy, 'options', None)", "hasattr(store, 'folder')",
     "run.engine.strategy._groups", "hasattr(trainer.logger, 'begin_run')"],
)  # fmt: skip
def test_a_side_door_is_found(door: str) -> None:
    source = f"from drivetrain.strategies.ddp import DDPStrategy\nanswer = {door}\n"
    assert side_doors("trainer", source) == {door}
    assert side_doors("strategies", source) == set()


def test_sharded_tensors_are_known_to_the_strategies_and_to_one_other_file() -> None:
    naming = {path.relative_to(PACKAGE) for path in SOURCES if "DTensor" in path.read_text(encoding="utf-8")}
    assert {path.as_posix() for path in naming if path.parts[0] not in ("compat", "strategies", "testing")} == {
        "base/tree.py"
    }


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
}


def largest_knot(imports: dict[str, set[str]]) -> list[str]:
    """The largest set of modules of which each knows all others, through whatever others."""
    graph = networkx.DiGraph({name: known - {name} for name, known in imports.items()})
    return max((sorted(knot) for knot in networkx.strongly_connected_components(graph)), key=len)


LISTS = {
    name: ast.parse(stub.read_text() if (stub := path.with_suffix(".pyi")).exists() else "")
    for name, path in MODULES.items()
    if path.name == "__init__.py"
}
"""The stubs of packages: lists of names, each of which is imported when it is asked for."""

LISTED = {
    f"{package}.{alias.name}": node.module or ""
    for package, tree in LISTS.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""By name in a package, the module that defines it."""

FOLDERS = LISTS.keys() - {"drivetrain"}
"""The folders. Their ``__init__.py`` hold names alone; drivetrain's own connects what layers supply, and is counted."""


def known_to(name: str) -> set[str]:
    """The modules that a module imports when it runs, names in a string, or imports for its types.

    A name of a folder counts as the module that defines it. A folder that is imported, or of which an f-string selects
    a name, counts as all modules in its list.
    """
    trees = [ast.parse(MODULES[name].read_text(encoding="utf-8")), LISTS.get(name, ast.parse(""))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {(alias.name, "") for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported |= {(node.module or "", alias.name) for node in froms for alias in node.names}
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    matches = [match for each in strings if (match := re.fullmatch(r"(drivetrain(?:\.\w+)+)(?::(\w*))?", each))]
    found = modules_of(imported)
    lists = found & FOLDERS | {match[1] for match in matches if match[2] == ""}
    found |= modules_of((match[1], match[2] or "") for match in matches)
    found |= modules_of(each.rpartition(".")[::2] for each in LISTED if each.rpartition(".")[0] in lists)
    return found & MODULES.keys() - {name}


def modules_of(names: Iterable[Sequence[str]]) -> set[str]:
    """The modules of pairs of a module and a name in it, which may be a module itself."""
    full = {f"{module}.{inner}": module for module, inner in names}
    return {each if each in MODULES else LISTED.get(each, module) for each, module in full.items()}


def test_few_modules_know_each_other() -> None:
    knot = largest_knot({name: known_to(name) - FOLDERS for name in MODULES if name not in FOLDERS})
    assert len(knot) <= 10, knot


UPWARD = {
    "callback": {"trainer"}, "module": {"trainer", "loggers"}, "settings": {"loggers", "profilers"},
    "engine": {"loggers"}, "trainer": {"loggers", "profilers"},
    "callbacks": {"forecast"}, "clusters": {"integrations"}, "strategies": {"compat"},
}  # fmt: skip
"""The higher layers that a folder names: for types; default loggers and profilers; the callback that checks a plan and
the one that reports to Ray; the class that an Engine uses in place of DeepSpeed's strategy."""


def test_no_other_layer_names_a_higher_one() -> None:
    checked = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("layers = [")[1].split("]")[0]
    lines = re.findall('"(.+)"', checked)
    height = {room: -number for number, line in enumerate(lines) for room in re.findall(r"\w+", line)}
    found: dict[str, set[str]] = {}
    for name in MODULES.keys() - LISTS.keys():
        room = name.split(".")[1]
        rooms = {other.split(".")[1] for other in known_to(name) - LISTS.keys()}
        if higher := {other for other in rooms if height[other] > height[room]}:
            found.setdefault(room, set()).update(higher)
    assert found == UPWARD


def test_folders_hold_names_alone() -> None:
    """They are left out where modules know each other, so nothing in them may know a module but by its name."""
    for name in FOLDERS:
        for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drivetrain"):
                assert node.module in ("drivetrain.base.lazy", "drivetrain.base.supplied"), name


def test_a_name_of_a_package_counts_as_its_module() -> None:
    assert "drivetrain.strategies.fsdp" in known_to("drivetrain.testing.conformance")
    assert LISTED["drivetrain.callbacks.Timer"] == "drivetrain.callbacks.timer"


def test_an_imported_folder_and_a_selected_name_count_as_all_modules_of_the_folder() -> None:
    assert "drivetrain.strategies.ddp" in known_to("drivetrain.compat.fabric_strategies")
    assert "drivetrain.loggers.csv" in known_to("drivetrain.trainer.attach")


def imports_in_functions(source: str) -> list[str]:
    """The import statements that run when a function is called."""
    functions = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]
    found = {node for each in functions for node in ast.walk(each) if isinstance(node, (ast.Import, ast.ImportFrom))}
    return [ast.unparse(node) for node in sorted(found, key=lambda node: node.lineno)]


def test_few_imports_are_in_functions_and_hardly_any_of_the_package_itself() -> None:
    """What they are for: a package may be missing where that is no error, or the file runs before all others."""
    inside = {path.relative_to(PACKAGE).as_posix(): imports_in_functions(path.read_text("utf-8")) for path in SOURCES}
    assert sum(map(len, inside.values())) <= 26
    own = {place for place, statements in inside.items() if any("drivetrain" in each for each in statements)}
    assert own == {"base/lazy.py", "compat/finder.py", "compat/startup/sitecustomize.py"}


def test_an_import_in_a_function_is_found() -> None:
    source = "import a\nwith b:\n    from c import d\ndef f():\n    import e\n    def g():\n        from h import i\n"
    assert imports_in_functions(source) == ["import e", "from h import i"]


def test_blocks_of_modules_that_are_imported_on_first_use_name_only_modules() -> None:
    """A name in a module would import the module at once."""
    blocks = [
        (path, node)
        for path in SOURCES
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.With) and ast.unparse(node.items[0]) == "on_first_use"
    ]
    assert len(blocks) > 10
    statements = [(path, each) for path, block in blocks for each in block.body]
    wrong = [
        f"{path.name}: {ast.unparse(each)}"
        for path, each in statements
        if not isinstance(each, ast.ImportFrom)
        or any(f"{each.module}.{alias.name}" not in MODULES for alias in each.names)
    ]
    assert wrong == []


def test_each_package_in_packages_txt_is_used_and_each_used_one_is_in_it() -> None:
    lines = (PACKAGE / "base" / "packages.txt").read_text("utf-8").splitlines()[1:]
    listed = {line.split()[0] for line in lines}
    froms = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    used = {
        alias.name
        for node in froms
        if isinstance(node, ast.ImportFrom) and node.module == "drivetrain.base.packages"
        for alias in node.names
    }
    used |= {
        node.attr
        for node in froms
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "packages"
    }
    assert used == listed


# Which file besides the class itself may write an attribute: what each batch changes is written where it changes.
WRITERS = {
    "progress": {
        "loops/epoch.py": {"batch_idx", "is_last_batch", "stepped", "batches_done", "stepped_batches", "flush_due"},
        "loops/step.py": {"global_step"},
        "loops/evaluate.py": {"eval_batch_idx"},
    },
    "book": {"loops/epoch.py": {"batch", "size", "scope", "copies"}},
    "logbook": {},
}


def written(path: Path) -> set[tuple[str, str]]:
    """``(owner, attribute)`` of each assignment to an attribute of a progress or a logbook in this file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            continue
        flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in flat:
            if isinstance(target, ast.Attribute):
                owner = target.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                found.add((name.lstrip("_"), target.attr))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_progress_and_logbook_are_written_by_their_owners(path: Path) -> None:
    place = path.relative_to(PACKAGE).as_posix()
    strangers = {
        (owner, attribute)
        for owner, attribute in written(path)
        if owner in WRITERS and attribute not in WRITERS[owner].get(place, set())
    }
    assert not strangers


def test_each_counter_of_progress_has_one_writer_beside_its_class() -> None:
    for place, attributes in WRITERS["progress"].items():
        names = {attribute for owner, attribute in written(PACKAGE / place) if owner == "progress"}
        assert names == attributes
    # The replay of a window goes back to the counters of its batches, and then restores them.
    places = WRITERS["progress"].keys() - {"loops/replay.py"}
    every = [attribute for place in places for attribute in WRITERS["progress"][place]]
    assert len(every) == len(set(every))
