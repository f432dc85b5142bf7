"""Which code a file may name: importing a module runs it, so a name read from a file needs the caller's permission."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from equipoise.registry import Registry, UnknownName, WrongKind, is_module_name, user_folders


@dataclass(frozen=True)
class Trust:
    """Which modules outside the package may be imported by name, and the folders to find them in.

    Args:
        modules: exact module names: "pkg" does not include "pkg.nets". None allows every module.
        folders: folders to search, after everything that is installed.
    """

    modules: frozenset[str] | None = frozenset()
    folders: tuple[str, ...] = ()

    @classmethod
    def of(cls, modules: str | Iterable[str] | Trust) -> Trust:
        """Return the trust that a caller expresses by naming one module or several."""
        if isinstance(modules, Trust):
            return modules
        names = [modules] if isinstance(modules, str) else list(modules)
        for name in names:
            if not isinstance(name, str) or not is_module_name(name):
                raise ValueError(f"trust is {name!r}; it must be a module name, such as 'my_module' or 'pkg.nets'.")
        return cls(frozenset(names))

    def including(self, *modules: str) -> Trust:
        return self if self.modules is None else replace(self, modules=self.modules | set(modules))

    def find(self, registry: Registry, name: str) -> Any:
        """Look up a name from outside the package: the argument of :func:`~equipoise.registry.looking_up`."""
        module = name.partition(":")[0]
        if not self.allows(module):
            raise UntrustedName([(registry.kind, name)], self)
        self.look(module)
        thing = registry.outside(name)
        made = isinstance(thing, type) and registry.base is not None and issubclass(thing, registry.base)
        if self.modules is not None and not made:
            self.check_function(thing, registry, name)
        return thing

    def allows(self, module: str) -> bool:
        return self.modules is None or module in self.modules

    def look(self, module: str) -> None:
        """Make the folders importable for ``module``, which is allowed.

        One of the folders may have been chosen by the file that was loaded. So only folders that hold a trusted module
        become importable, and a module found in two of them is rejected: the file must not decide which one runs.
        """
        if self.modules is None:
            if self.folders:
                look_in(*self.folders)
            return
        importlib.invalidate_caches()  # a module may have been written a moment ago
        trusted = {name.partition(".")[0] for name in self.modules}
        look_in(*(folder for folder in self.folders if any(spec_in(folder, name) for name in trusted)))
        top = module.partition(".")[0]
        places = {place for folder in self.folders if (place := spec_in(folder, top))}
        if len(places) > 1 and top not in sys.modules and spec_in(None, top) in places:
            either = " and ".join(sorted(places))
            raise UnknownName(f"there are two modules {top!r}, {either}: remove or rename one of them.")

    def check_function(self, thing: Any, registry: Registry, name: str) -> None:
        """Reject a function unless it is defined in a trusted module and declares that it returns the right class.

        A trusted module may itself have imported anything, including ``os.system``.
        """
        if not inspect.isfunction(thing) or not self.allows(thing.__module__):
            raise WrongKind(f"{registry.kind} {name!r} is {thing!r}; it must be a function from a trusted module.")
        base, returns = registry.base, inspect.get_annotations(thing).get("return")
        if base and returns is not base and str(returns).rpartition(".")[2].strip("'\"") != base.__name__:
            raise WrongKind(
                f"{registry.kind} {name!r} does not declare that it returns a {base.__name__}, as a function named in "
                f"a file must: def {thing.__name__}(...) -> {base.__name__}."
            )

    def place(self, module: str) -> str:
        """Return the file that a module would be imported from, without importing it; empty if it is not found."""
        top = module.partition(".")[0]
        return next((spec for folder in (None, *self.folders) if (spec := spec_in(folder, top))), "")


ANYTHING = Trust(None)  # for names that the user typed: in Python, on the command line or in a recipe
NOTHING = Trust()


def look_in(*folders: str | Path) -> None:
    """Make modules in these folders importable by name, in this order, after everything that is installed.

    Folders of an earlier call are removed together with their modules: two runs may each have a ``net.py``.
    """
    wanted = list(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
    gone = {folder for folder in user_folders if folder not in wanted}
    for name, module in list(sys.modules.items()):
        top = getattr(sys.modules.get(name.partition(".")[0], module), "__file__", None)
        if top and str(Path(top).parent.parent if Path(top).name == "__init__.py" else Path(top).parent) in gone:
            del sys.modules[name]
    user_folders[:] = [folder for folder in wanted if folder in user_folders or folder not in sys.path]
    sys.path[:] = [place for place in sys.path if place not in wanted and place not in gone] + wanted
    importlib.invalidate_caches()  # a module may have been written a moment ago


def spec_in(folder: str | None, module: str) -> str:
    """Return where a top-level module is in a folder (None: on Python's path); empty if it is not there."""
    if not module.isidentifier():
        return ""
    spec = PathFinder.find_spec(module, None if folder is None else [str(Path(folder).resolve())])
    return "" if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), "")


class UntrustedName(ValueError):
    """Raised when a loaded file names code from outside the package that the caller has not trusted.

    ``modules`` are the modules to trust; ``reason`` is the message without the remedy (Python and the CLI differ).
    """

    def __init__(self, names: Iterable[tuple[str, str]], trust: Trust, file: str = ""):
        self.names, self.trust = list(dict.fromkeys(names)), trust
        self.modules = list(dict.fromkeys(name.partition(":")[0] for _, name in self.names))
        named = ", ".join(f"{kind} {name!r}" for kind, name in self.names)
        places = ", ".join(f"{module} ({trust.place(module) or 'not found here'})" for module in self.modules)
        self.reason = (
            f"{file or 'a loaded file'} names code from outside the package: {named}. Nothing was imported. "
            f"If you trust {places}, which may do anything when imported,"
        )
        trusted = self.modules[0] if len(self.modules) == 1 else tuple(self.modules)
        super().__init__(f"{self.reason} pass trust={trusted!r}.")
