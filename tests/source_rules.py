"""Source rules: functions that take a source text and return its violations.

Names are resolved through the imports of the file, including renamed and nested ones. Names built from strings
are not resolved: the rules guard against accidents, not against intent.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

Node = TypeVar("Node", bound=ast.AST)


class Use(NamedTuple):
    """A name that a source text uses, and its line."""

    line: int
    what: str


# --- The file system -------------------------------------------------------------------------------

_OS = """
    open fdopen close closerange read write lseek pread pwrite preadv pwritev readv writev sendfile
    copy_file_range posix_fallocate fsync fdatasync sync truncate ftruncate lockf
    stat lstat fstat statvfs fstatvfs access utime chmod fchmod lchmod chown fchown lchown
    getxattr setxattr listxattr removexattr
    link symlink readlink rename renames replace unlink remove removedirs mkdir makedirs rmdir mkfifo mknod
    listdir scandir walk fwalk chdir fchdir
""".split()
_OS_PATH = """
    exists lexists isfile isdir islink ismount isjunction getsize getmtime getatime getctime samefile
    sameopenfile realpath
""".split()
_PATH_METHODS = """
    exists is_file is_dir is_symlink is_mount is_junction is_socket is_fifo is_block_device is_char_device
    stat lstat chmod lchmod samefile resolve readlink open read_text read_bytes write_text write_bytes touch
    mkdir rmdir unlink rename symlink_to hardlink_to iterdir glob rglob walk
""".split()  # not `replace`: strings have it too
_MODULES = ("dbm", "fcntl", "fileinput", "glob", "mmap", "msvcrt", "shutil", "sqlite3", "tempfile")
_FUNCTIONS = frozenset(
    [f"os.{name}" for name in _OS]
    + [f"os.path.{name}" for name in _OS_PATH]
    + [f"pathlib.Path.{name}" for name in [*_PATH_METHODS, "replace", "cwd"]]
    + ["builtins.open", "codecs.open", "io.FileIO", "io.open", "io.open_code"]
)


def file_system_uses(source: str) -> list[Use]:
    """Every access to the file system that bypasses `holdfast.fs`."""
    names = names_of(source)
    methods = (
        Use(call.lineno, f".{call.func.attr}()")
        for call in names.walk(ast.Call)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in _PATH_METHODS
        and not names.is_known(call.func.value)
    )
    return sorted([*names.uses_of(_FUNCTIONS), *names.imports_of(_MODULES), *methods])


_LOOKING_UP = """
    open stat access unlink mkdir rmdir scandir listdir chdir readlink symlink chmod chown utime mknod
    listxattr getxattr setxattr free_space read_small
""".split()
_DESCRIPTORS = ("fd", "descriptor", "here")  # by convention; some calls take an open file instead of a path
_OF_THE_SYSTEM = ("/proc/", "/dev/")
_LOOKING_UP_TWO = "link rename replace rename_noreplace rename_exchange".split()
_NEEDED = {f"holdfast.fs.calls.{name}": {"dir_fd"} for name in _LOOKING_UP} | {
    f"holdfast.fs.calls.{name}": {"src_dir_fd", "dst_dir_fd"} for name in _LOOKING_UP_TWO
}
_NEEDED |= {"holdfast.fs.directory.opened": {"dir_fd"}}
_NEEDED |= {f"holdfast.fs.directory.{name}": {"never"} for name in ("Directory.follow", "chosen")}


def paths_looked_up(source: str) -> list[Use]:
    """Every call on a path, in which a link would be followed, instead of a name in an open directory."""
    names = names_of(source)
    return sorted(
        Use(call.lineno, function.removeprefix("holdfast.fs.").removeprefix("directory."))
        for call in names.walk(ast.Call)
        if (function := names.dotted(call.func)) in _NEEDED
        and not _NEEDED[function] <= {each.arg for each in call.keywords}
        and not _leads_nowhere(call.args[0])
    )


def _leads_nowhere(argument: ast.expr) -> bool:
    """Whether this is an open file, or a path of the system's own."""
    match argument:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _DESCRIPTORS
        case ast.Constant(value=str(text)) | ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return f"{text}/".startswith(_OF_THE_SYSTEM)
    return False


# --- Terminal, environment, exit --------------------------------------------------------------------

_FRONT_ENDS_ONLY = frozenset(
    [f"builtins.{name}" for name in ("print", "input", "exit", "quit", "SystemExit")]
    + [f"sys.{name}" for name in ("argv", "exit", "stdin", "stdout", "stderr")]
    + [f"os.{name}" for name in ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")]
    + ["os.path.expanduser", "os.path.expandvars", "pathlib.Path.home", "pathlib.Path.expanduser"]
)


def front_end_uses(source: str) -> list[Use]:
    """Actions reserved for front ends: printing, exiting, reading the environment."""
    return sorted(names_of(source).uses_of(_FRONT_ENDS_ONLY))


def front_end_imports(source: str) -> list[Use]:
    """Imports of libraries reserved for front ends."""
    return sorted(names_of(source).imports_of(("click", "rich")))


# --- Layers -----------------------------------------------------------------------------------------


def stores_told_apart(source: str) -> list[Use]:
    """Code that asks which kind of store it has, instead of what the `Store` protocol says."""
    names = names_of(source)
    found = []
    for call in names.walk(ast.Call):
        match names.dotted(call.func), call.args:
            case "builtins.isinstance", [_, kind]:
                known = (names.dotted(each) or "" for each in ast.walk(kind) if isinstance(each, ast.Name))
                found += [Use(call.lineno, f"isinstance {name}") for name in known if name.endswith("Store")]
            case "builtins.getattr", [ast.Name(id=owner) | ast.Attribute(attr=owner), *_] if owner.endswith("store"):
                found.append(Use(call.lineno, f"getattr of {owner}"))
    return found


def contexts_reached(source: str) -> list[Use]:
    """Code that reaches through a repository to its context, instead of calling a method of `Repository`."""
    return [
        Use(node.lineno, "repository.context")
        for node in names_of(source).walk(ast.Attribute)
        if node.attr == "context" and getattr(node.value, "id", getattr(node.value, "attr", "")) == "repository"
    ]


# --- Failure classes --------------------------------------------------------------------------------


def failures_declared(source: str) -> list[Use]:
    """Failure classes declared outside of `holdfast.errors`, the one place for them."""
    names = names_of(source)
    return [
        Use(each.lineno, each.name)
        for each in names.walk(ast.ClassDef)
        if any((names.dotted(base) or "").startswith("holdfast.errors.") for base in each.bases)
    ]


# --- Name resolution --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def names_of(source: str) -> Names:
    """Parse a source text once for all rules."""
    return Names(source)


class Names:
    """The resolved names of one source text: `os.path.exists`, `builtins.open`, ..."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self._nodes = list(ast.walk(tree))
        self._imported: dict[str, str] = {}
        self._own = set(_bound(tree))
        self._classes = {node.name for node in self.walk(ast.ClassDef)}
        for node in self.walk(ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                self._imported[alias.asname or first] = alias.name if alias.asname else first
        for origin in self.walk(ast.ImportFrom):
            for alias in origin.names:
                self._imported[alias.asname or alias.name] = f"{origin.module}.{alias.name}"

    def walk(self, kind: type[Node]) -> Iterator[Node]:
        """All nodes of one kind."""
        return (node for node in self._nodes if isinstance(node, kind))

    def dotted(self, node: ast.expr) -> str | None:
        """The full name of an expression; None if it is neither imported nor built in."""
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return before and f"{before}.{node.attr}"
        if not isinstance(node, ast.Name):
            return None
        if node.id in self._imported:
            return self._imported[node.id]
        return None if node.id in self._own else f"builtins.{node.id}"

    def is_known(self, receiver: ast.expr) -> bool:
        """Whether this is certainly not a path: something imported, a class of this file, or `self`."""
        if isinstance(receiver, ast.Name) and receiver.id in {"self", "cls", *self._classes}:
            return True
        return (self.dotted(receiver) or "pathlib").partition(".")[0] not in ("pathlib", "builtins")

    def uses_of(self, functions: frozenset[str]) -> Iterator[Use]:
        """Every call, reference, import by name and `getattr` of one of these functions."""
        for node in self.walk(ast.expr):
            name = self._got_by_getattr(node) if isinstance(node, ast.Call) else self.dotted(node)
            if name in functions:
                yield Use(node.lineno, name.removeprefix("builtins."))
        for origin in self.walk(ast.ImportFrom):
            for alias in origin.names:
                if f"{origin.module}.{alias.name}" in functions:
                    yield Use(origin.lineno, f"{origin.module}.{alias.name}")

    def imports_of(self, modules: Iterable[str]) -> Iterator[Use]:
        """Every import of one of these modules or their submodules, including lazy and dynamic ones."""
        for line, name in self._imports():
            if name.partition(".")[0] in modules:
                yield Use(line, f"import {name}")

    def _imports(self) -> Iterator[tuple[int, str]]:
        for node in self.walk(ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        for origin in self.walk(ast.ImportFrom):
            if origin.module and not origin.level:
                yield origin.lineno, origin.module
        for call in self.walk(ast.Call):
            if self.dotted(call.func) in ("importlib.import_module", "builtins.__import__") and call.args:
                name = call.args[0]
                if isinstance(name, ast.Constant):
                    yield call.lineno, str(name.value)

    def _got_by_getattr(self, call: ast.Call) -> str | None:
        match call.args:
            case [owner, ast.Constant(value=str(name)), *_] if self.dotted(call.func) == "builtins.getattr":
                return f"{self.dotted(owner)}.{name}"
        return None


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _bound(node: ast.AST, *, in_class: bool = False) -> Iterator[str]:
    """The names that a source text binds, except class attributes."""
    if isinstance(node, (*_FUNCTION, ast.ClassDef)) and not in_class:
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not in_class:
        yield node.id
    inside = isinstance(node, ast.ClassDef) or (in_class and not isinstance(node, _FUNCTION))
    for child in ast.iter_child_nodes(node):
        yield from _bound(child, in_class=inside)
