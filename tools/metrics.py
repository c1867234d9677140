"""Measurements of the source and their targets: size, importers, cycles, and the files behind a command.

Exits with 1 if a target is missed. `--files COMMAND` lists the files that a command passes through.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/holdfast"

MOST_LINES = 72_700  # 40,000 for the first version; 49,750 with git homes, 57,000 with landing, 67,500 with the pages
MODULES, MOST_MODULES = "150 to 180; 210 with git, 240 with landing, 290 with pages, 300 with content stores", 300
SMALL, LONG = 150, 500  # lines of a module
REPORTED = "reported"  # a measure without a target


class Command(NamedTuple):
    """A command line to trace, and how many files it may pass through.

    The setup runs at the top of a new repository that has one file in `main`; the command runs in `main`.
    """

    arguments: tuple[str, ...]
    most_files: int
    setup: tuple[tuple[str, ...], ...] = ()


INIT = ("init", ".")
SNAPSHOT = ("run", "--worktree", "main", "--snapshot", "--", "true")
COMMANDS = {
    "run --snapshot": Command(SNAPSHOT, 45, setup=(SNAPSHOT,)),
    "issue claim-next": Command(("issue", "claim-next"), 30, setup=(("issue", "init"), ("issue", "create", "Measure"))),
    "ledger append": Command(("ledger", "append", '{"type":"note"}'), 25, setup=(("ledger", "init"),)),
}

REASONS: dict[str, str] = {
    "holdfast.repository.content_sweep": "only a collection in a plain home with a content store loads it",
    "holdfast.store.content_postgres": "a content store is one file, as a store is",
    "holdfast.store.content_s3": "loads obstore, which only object storage needs",
    "holdfast.git.repair": "only `verify --repair` loads it",
    "holdfast.repository.landing_tests": "runs tests side by side in threads, which the lander itself has not",
    "holdfast.demo.check": "the check of the demo reads only what is on disk, so it stays apart from the scenario",
    "holdfast.ledger.asynchronous": "public, and loads asyncio; `holdfast` loads it on demand",
    "holdfast.locks.async_file_lock": "loads asyncio, which only coroutines need",
    "holdfast.store.postgres_requests": "a request and its time limits, apart from keeping connections",
    "holdfast.repository.checks_git": "checks of a git home alone, which only the doctor loads",
    "holdfast.testing.contract_changes": "a part of the contract, beside the other parts",
    "holdfast.web.export": "only `web --export` loads it",
    "holdfast.web.pages.graph": "a page, as each module beside it",
}
"""Why a module under 150 lines with one importer is a file of its own: module -> reason in one line."""


class Measure(NamedTuple):
    """One row of the table; `details` are listed above it."""

    name: str
    value: str
    target: str
    met: bool
    details: tuple[str, ...] = ()


class Module(NamedTuple):
    """A parsed module."""

    name: str
    is_package: bool
    lines: int
    tree: ast.Module


class Import(NamedTuple):
    """`import module`, or `from module import name`."""

    module: str
    name: str | None
    bound: str
    typing_only: bool


# --- Modules and imports ----------------------------------------------------------------------------


def read_modules(source: Path) -> dict[str, Module]:
    """All modules of the package in this directory, by their dotted names."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, is_package, len(text.splitlines()), ast.parse(text))
    return modules


class Imports:
    """The imports between modules, at the top of a module or inside a function.

    A name that a package re-exports also counts as imported from the module that defines it: packages
    that load names on demand would otherwise hide cycles. Loading a parent package implicitly, or a
    module by a name in a string, does not count as an import.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.importers: defaultdict[str, set[str]] = defaultdict(set)
        self.graph: dict[str, set[str]] = {name: set() for name in modules}  # without imports for type checking only
        self._modules = modules
        written = {name: list(_imports(module)) for name, module in modules.items()}
        self._exports = {
            (name, each.bound): each
            for name, imports in written.items()
            if modules[name].is_package
            for each in imports
        }
        for name, imports in written.items():
            for each in imports:
                for target in set(self._targets(each)) - {name}:
                    self.importers[target].add(name)
                    if not each.typing_only:
                        self.graph[name].add(target)

    def _targets(self, each: Import) -> Iterator[str]:
        seen = set()
        following: Import | None = each
        while following is not None and following not in seen:
            seen.add(following)
            module, name = following.module, following.name
            if name is not None and f"{module}.{name}" in self._modules:
                yield f"{module}.{name}"
                return
            if module in self._modules:
                yield module
            following = None if name is None else self._exports.get((module, name))


def _imports(module: Module) -> Iterator[Import]:
    pending: list[tuple[ast.AST, bool]] = [(module.tree, False)]
    while pending:
        node, typing_only = pending.pop()
        if isinstance(node, ast.Import):
            for each in node.names:
                yield Import(each.name, None, each.asname or each.name, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for each in node.names:
                yield Import(base, each.name, each.asname or each.name, typing_only)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending += [(child, True) for child in node.body]
            pending += [(child, typing_only) for child in node.orelse]
        else:
            pending += [(child, typing_only) for child in ast.iter_child_nodes(node)]


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def single_importers(modules: Mapping[str, Module], imports: Imports) -> dict[str, str]:
    """Small modules with exactly one importer: module -> importer.

    Packages are left out, and so are modules that another module loads by name: a string that is the
    module's name, alone or as `module:attribute`.
    """
    by_name = {
        named
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (named := node.value.partition(":")[0]) in modules and module.name not in imports.importers[named]
    }
    return {
        name: next(iter(imports.importers[name]))
        for name, module in modules.items()
        if len(imports.importers[name]) == 1 and module.lines < SMALL
        if not module.is_package and name not in by_name
    }


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """One line for each set of modules that import each other: a shortest cycle, and the size of the set."""
    reached = {name: _reached_from(graph, name) for name in graph}
    lines, seen = [], set()
    for name in sorted(graph):
        if name in seen or name not in reached[name]:
            continue
        members = {other for other in reached[name] if name in reached[other]}
        seen |= members
        path = [name]
        while len(path) == 1 or path[-1] != name:
            path.append(reached[name][path[-1]])
        lines.append(f"{' -> '.join(reversed(path))} ({len(members)} modules)")
    return lines


def _reached_from(graph: Mapping[str, set[str]], start: str) -> dict[str, str]:
    """Every module that `start` imports, directly or indirectly, with its predecessor on a shortest path."""
    before: dict[str, str] = {}
    pending = [start]
    for name in pending:  # grows during the loop
        for target in sorted(graph[name]):
            if target not in before:
                before[target] = name
                pending.append(target)
    return before


def repeated_classes(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Names of public classes that several modules define: name -> modules."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        classes = {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)}
        for name in classes:  # one per platform in a module counts once
            places[name].append(module.name)
    return {name: places[name] for name in sorted(places) if len(places[name]) > 1 and name[0] != "_"}


# --- Files and hops of a command --------------------------------------------------------------------


def trace_command(command: Command, source: Path = SOURCE) -> tuple[list[str], int]:
    """Run the command in a new repository and a fresh process.

    Returns the files with at least one called function, and the number of calls from one file to another.
    """
    with tempfile.TemporaryDirectory() as name:
        repository, result = Path(name, "repository"), Path(name, "trace.json")
        repository.mkdir()
        _run(source, repository, "-m", source.name, *INIT)
        (repository / "main/notes.txt").write_text("some\n", encoding="utf-8")
        for each in command.setup:
            _run(source, repository, "-m", source.name, *each)
        program = "from tools.metrics import trace_this; trace_this()"
        _run(source, repository / "main", "-c", program, str(source), str(result), *command.arguments)
        files, hops = json.loads(result.read_text(encoding="utf-8"))
    return files, hops


def _run(source: Path, directory: Path, *arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(source.parent), str(ROOT)])
    line = [sys.executable, "-P", *arguments]
    ended = subprocess.run(line, check=False, cwd=directory, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"'{' '.join(arguments)}' failed with status {ended.returncode}:\n{ended.stderr}")


def trace_this() -> None:
    """Run the command line of the package, and write its trace. This is the body of the traced process.

    Arguments: the package's directory, the file for the trace, the command. Calls that are made while a
    module is imported do not count. A call through other code, such as `contextlib`, is one hop.
    """
    _, source, result, *arguments = sys.argv
    prefix = source + os.sep
    sys.argv = [Path(source).name, *arguments]
    files: set[str] = set()
    hops: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        called = frame.f_code.co_filename
        if event != "call" or not called.startswith(prefix):
            return
        callers = []
        within: FrameType | None = frame
        while within is not None:
            if within.f_code.co_filename.startswith(prefix):
                if not within.f_code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or class
                    return
                callers.append(within.f_code.co_filename)
            within = within.f_back
        files.add(called)
        if len(callers) > 1 and callers[1] != called:
            hops.append(called)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        status = import_module(f"{Path(source).name}.__main__").main()
    except SystemExit as ended:
        status = ended.code
    sys.setprofile(None)
    names = sorted(Path(each).relative_to(source).as_posix() for each in files)
    Path(result).write_text(json.dumps([names, len(hops)]), encoding="utf-8")
    sys.exit(status)


# --- The table --------------------------------------------------------------------------------------


def measure_source(source: Path = SOURCE, reasons: Mapping[str, str] = REASONS) -> list[Measure]:
    """Measure the files of the package, without running them."""
    modules = read_modules(source)
    imports = Imports(modules)
    lines = sum(module.lines for module in modules.values())
    single = single_importers(modules, imports)
    unexplained = [f"{name} <- {importer}" for name, importer in single.items() if name not in reasons]
    needless = sorted(reasons.keys() - single.keys())
    long = [f"{module.lines:5} {name}" for name, module in modules.items() if module.lines > LONG]
    repeated = [f"{name}: {', '.join(places)}" for name, places in repeated_classes(modules).items()]
    return [
        Measure("lines", f"{lines:,}", f"at most {MOST_LINES:,}", lines <= MOST_LINES),
        Measure("modules", str(len(modules)), f"about {MODULES}", len(modules) <= MOST_MODULES),
        Measure(f"one importer, under {SMALL} lines", str(len(single)), REPORTED, True),
        _none("  of these without a reason", unexplained),
        _none("  reasons for other modules", needless),
        Measure(f"modules over {LONG} lines", str(len(long)), REPORTED, True, tuple(long)),
        _none("public class names used twice", repeated),
        _none("import cycles", cycles(imports.graph)),
    ]


def _none(name: str, found: list[str]) -> Measure:
    return Measure(name, str(len(found)), "0", not found, tuple(found))


def measure_commands() -> Iterator[Measure]:
    """Trace each command of the table."""
    for name, command in COMMANDS.items():
        files, hops = trace_command(command)
        met = len(files) <= command.most_files
        yield Measure(f"files of {name}", str(len(files)), f"at most {command.most_files}", met)
        yield Measure(f"hops of {name}", f"{hops:,}", REPORTED, True)


def table(measures: list[Measure]) -> Iterator[str]:
    """The details of each measure, then one row for each."""
    for each in measures:
        if each.details:
            yield "\n  ".join([f"{each.name.strip()}:", *each.details]) + "\n"
    yield f"{'measure':32} {'value':>8}  {'target':18} met"
    for each in measures:
        met = "" if each.target == REPORTED else "yes" if each.met else "NO"
        yield f"{each.name:32} {each.value:>8}  {each.target:18} {met}".rstrip()


def main() -> int:
    """Print the table, or the files of one command."""
    parser = argparse.ArgumentParser(prog="metrics", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", choices=COMMANDS, metavar="COMMAND", help=", ".join(map(repr, COMMANDS)))
    wanted = parser.parse_args().files
    if wanted:
        print(*trace_command(COMMANDS[wanted])[0], sep="\n")
        return 0
    measures = [*measure_source(), *measure_commands()]
    print(*table(measures), sep="\n")
    return 0 if all(each.met for each in measures) else 1


if __name__ == "__main__":
    sys.exit(main())
