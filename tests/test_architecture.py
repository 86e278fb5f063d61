"""The house rules, held: who may import whom, what stays free of jax, and how large things may grow.

A justified exception is listed here by name, with its reason.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# ------------------------------------------------------------------------------------------------- the rooms
# Room -> rooms it may import, itself aside. A file belongs to the longest name that is a prefix of its own.
BASE = {"types", "wire", "config"}
HOST = BASE | {"inputs", "data.images", "metrics"}  # level 1 without jax
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "wire": {"types"},
    "config": set(),
    "program": {"config"},
    "inputs": BASE,
    "data.images": BASE,
    "metrics": BASE,
    "models": BASE,
    "algorithms": BASE,
    "agent": HOST,
    "tasks": HOST,
    "judge": HOST,
    "data.pack": HOST,
    "rollout.groups": HOST,
    "train": BASE | {"metrics", "models", "algorithms"},
    "checkpoint": BASE | {"metrics"},
    "sandbox": HOST | {"tasks", "judge"},
    "data.store": HOST,
    "serving.client": HOST,
    "data.pipeline": HOST | {"data.pack", "data.store", "algorithms"},
    "serving": HOST | {"serving.client", "models", "checkpoint"},
    "rollout": HOST | {"rollout.groups", "agent", "sandbox", "tasks", "judge", "data.store", "serving.client"},
    "viewer": {"types", "wire", "data.store", "data.images"},
}
NEEDS_JAX = {"models", "algorithms", "train", "checkpoint", "data.pipeline", "serving"}
HEAVY = ("jax", "jaxlib", "flax", "optax", "tensorflow", "torch")  # never loaded by an actor host
# Files of a package that has no entry of its own, by the room they are part of.
PART_OF: dict[str, str] = {
    **{f"data.{part}": "data.pack" for part in ("layout", "prefixes", "prompts")},
    **{
        f"data.{part}": "data.store"
        for part in (
            "blobs",
            "cache",
            "compaction",
            "database",
            "journal",
            "keys",
            "lease",
            "records",
        )
    },
    "serving.messages": "serving.client",
}

# ------------------------------------------------------------------------------------------------ the budgets
FILE_LINES, FUNCTION_LINES, PAGE_LINES, README_LINES = 400, 60, 200, 150
ARGUMENTS, POSITIONAL, CLASS_DEPTH, CHAIN = 8, 4, 2, 6
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|helpers?|misc|common|old|v2|experimental|deprecated|manager)($|_)")
# "kind path[:function]" -> why it may be so.
EXCEPTIONS: dict[str, str] = {}


def files(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """`cuajax.data.images` -> `data.images`; a file nobody listed is an error that says so."""
    name = module.removeprefix("cuajax").removeprefix(".")
    parts = PART_OF.get(name, name).split(".")
    for size in range(len(parts), 0, -1):
        if ".".join(parts[:size]) in MAY_IMPORT:
            return ".".join(parts[:size])
    if name in ("", "data"):  # packages with an empty __init__
        return ""
    raise AssertionError(f"{module} belongs to no room: add it to MAY_IMPORT, or to PART_OF {sorted(PART_OF)}")


MODULES = {module_of(path): path for path in files("cuajax")}


def imports(path: Path, *, at_load: bool = False) -> Iterator[str]:
    """Modules a file imports; `at_load`: only those that loading it imports."""
    todo: list[ast.AST] = [tree_of(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports here are absolute"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield full if full in MODULES else module
        todo.extend(ast.iter_child_nodes(node))


@functools.cache
def graph(*, at_load: bool) -> dict[str, set[str]]:
    found = {name: set(imports(path, at_load=at_load)) for name, path in MODULES.items()}
    return {name: {target for target in targets if target in MODULES} - {name} for name, targets in found.items()}


# ----------------------------------------------------------------------------------------------- who imports whom
def test_imports_follow_the_table() -> None:
    wrong = [
        f"{source} imports {target}"
        for source, targets in graph(at_load=False).items()
        for target in targets
        if room_of(target) not in MAY_IMPORT.get(room_of(source), set()) | {room_of(source), ""}
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_nothing_imports_launch_configs_or_envs() -> None:
    for path in files("cuajax"):
        tops = {module.split(".")[0] for module in imports(path)}
        assert not tops & {"launch", "configs", "envs", "tests"}, name_of(path)


def test_configs_import_the_shared_sections_alone() -> None:
    for path in files("configs"):
        ours = {module for module in imports(path) if module.split(".")[0] in ("cuajax", "launch", "jax")}
        assert ours <= {"cuajax.config"}, f"{name_of(path)} imports {sorted(ours)}"


def test_no_cycles_and_short_chains() -> None:
    edges = graph(at_load=True)
    depth: dict[str, int] = {}

    def measure(module: str, above: tuple[str, ...]) -> int:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in depth:
            depth[module] = max((1 + measure(t, (*above, module)) for t in edges[module]), default=0)
        return depth[module]

    longest = max(MODULES, key=lambda module: measure(module, ()))
    assert depth[longest] <= CHAIN, f"{longest} starts a chain of {depth[longest]} imports; the limit is {CHAIN}"


def _loads_nothing_heavy(modules: list[str]) -> None:
    """Imported for real, one after the other: what a dependency drags in is not in our source."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_rooms_without_jax_load_without_it() -> None:
    _loads_nothing_heavy([name for name in MODULES if room_of(name) not in NEEDS_JAX])


def test_credit_loads_without_jax() -> None:
    """An algorithm's host half runs where there is no accelerator stack; only the losses are device code."""
    _loads_nothing_heavy([n for n in MODULES if n.startswith("cuajax.algorithms.") and not n.endswith(".surrogate")])


def test_the_base_needs_little() -> None:
    small = set(sys.stdlib_module_names) | {"numpy", "msgspec", "ml_collections", "ml_dtypes", "cuajax"}
    for name in ("types", "wire", "config", "program"):
        tops = {module.split(".")[0] for module in imports(MODULES[f"cuajax.{name}"])}
        assert tops <= small, f"cuajax/{name}.py imports {sorted(tops - small)}"


# -------------------------------------------------------------------------------------------------- how large
def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (n for n in ast.walk(tree_of(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _over_budget() -> dict[str, str]:
    """Every breach of a budget, keyed as in EXCEPTIONS."""
    found: dict[str, str] = {}
    for path in files("cuajax", "launch", "configs", "envs"):
        page = path.is_relative_to(ROOT / "launch") and "__main__" in path.read_text(encoding="utf-8")
        name = name_of(path)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > (PAGE_LINES if page else FILE_LINES):
            found[f"file {name}"] = f"{lines} lines"
        for function in _functions(path):
            arguments = function.args
            positional = [a.arg for a in [*arguments.posonlyargs, *arguments.args] if a.arg not in ("self", "cls")]
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            key = f"{name}:{function.name}"
            if length > (PAGE_LINES if page else FUNCTION_LINES):
                found[f"function {key}"] = f"{length} lines"
            if len(positional) > POSITIONAL:
                found[f"positional {key}"] = f"{len(positional)} positional arguments"
            if len(positional) + len(arguments.kwonlyargs) > ARGUMENTS:
                found[f"arguments {key}"] = f"{len(positional) + len(arguments.kwonlyargs)} arguments"
    return found


def test_budgets() -> None:
    over = _over_budget()
    new = [f"{key}: {value}" for key, value in over.items() if key not in EXCEPTIONS]
    assert not new, "\n".join(new)
    assert all(EXCEPTIONS.values()), "an exception has a reason"
    idle = [key for key in EXCEPTIONS if key not in over]
    assert not idle, f"exceptions nobody needs any more: {idle}"


def test_class_depth() -> None:
    bases = {
        node.name: [ast.unparse(base).split(".")[-1] for base in node.bases]
        for path in files("cuajax", "launch")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in bases[name] if base in bases and base != name), default=0)

    deep = {name: depth(name) for name in bases if depth(name) > CLASS_DEPTH}
    assert not deep, f"class depth over {CLASS_DEPTH}: {deep}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


# ----------------------------------------------------------------------------------------------- how it is named
def test_package_inits_are_empty() -> None:
    full = [
        name_of(path) for path in files("cuajax") if path.name == "__init__.py" and path.read_text(encoding="utf-8")
    ]
    assert not full, full
    bare = {path.parent for path in files("cuajax")} - {
        path.parent for path in files("cuajax") if path.stem == "__init__"
    }
    assert not bare, f"packages without __init__.py: {sorted(map(name_of, bare))}"


def test_no_forbidden_names() -> None:
    everything = [p for p in files("cuajax", "launch", "configs", "tests", "envs") if "__pycache__" not in p.parts]
    bad = {
        name_of(p)
        for p in everything
        for part in p.relative_to(ROOT).with_suffix("").parts
        if FORBIDDEN_NAMES.search(part)
    }
    assert not bad, sorted(bad)


def _unsafe(node: ast.AST) -> str:
    """What a node does that code here must not do, or ""."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        bad = [n for n in names if n.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "marshal")]
        return f"imports {bad[0]}" if bad else ""
    if isinstance(node, ast.ExceptHandler):
        broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
        return "broad except" if broad else ""
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in ("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "torch.load"):
            return called
        if any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords):
            return "shell="
        if any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords):
            return "allow_pickle"
    return ""


# "path: what" -> why it may be so.
UNSAFE_EXCEPTIONS: dict[str, str] = {}


def test_no_unsafe_calls_and_no_broad_except() -> None:
    found = {
        f"{name_of(path)}: {what}": f"line {getattr(node, 'lineno', 0)}"
        for path in files("cuajax", "launch", "configs")
        for node in ast.walk(tree_of(path))
        if (what := _unsafe(node))
    }
    new = [f"{key} ({value})" for key, value in found.items() if key not in UNSAFE_EXCEPTIONS]
    assert not new, "\n".join(new)


@pytest.mark.parametrize(
    "source",
    ["import pickle", "eval(x)", "f(shell=True)", "try: pass\nexcept Exception: pass", "np.load(f, allow_pickle=1)"],
)
def test_the_unsafe_check_sees_what_it_should(source: str) -> None:
    assert any(_unsafe(node) for node in ast.walk(ast.parse(source)))
