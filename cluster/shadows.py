"""Finds shadowed modules. A module of this Python environment is shadowed if Python imports a
module with an equal name from a folder of the user instead.

PYTHONPATH, which module systems set, comes before the standard library and before the installed
packages. The user site (~/.local) comes before the packages of a conda environment. An old
`typing_extensions` in such a folder ends every program that needs the installed version. This file
imports only modules that are part of the interpreter itself, since any other may be shadowed.
"""

import os
import sys

NO_PYTHONPATH = "`unset PYTHONPATH`, or `module unload` what sets it"
NO_USER_SITE = "`export PYTHONNOUSERSITE=1`"
SUFFIXES = (".py", ".so", ".pyd")
"""Suffixes of files that Python imports as modules."""
SOURCE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
"""Folder that contains the packages `kit` and `cluster`."""
NOT_LOOKED_FOR = {"kit", "cluster", "tests", "setup", "sitecustomize", "usercustomize", "__main__"}
"""Modules that are not reported, since no program imports them by mistake. Several packages install
a module `tests`."""
MOST_NAMED = 5
"""Maximum number of shadowed modules per folder that `summary` names."""


class ShadowingModule:
    """A module in a folder of the user that Python imports in place of the environment's module."""

    def __init__(self, name: str, folder: str, cause: str, advice: str) -> None:
        self.name = name
        self.folder = folder
        self.cause = cause
        """Reason why Python searches this folder first, such as "set by PYTHONPATH"."""
        self.advice = advice


def find_shadowing_modules() -> list[ShadowingModule]:
    """Returns the modules of the environment that are shadowed in this process, and in the
    processes that it starts.
    """
    found = []
    for folder in python_path():
        hidden = {*sys.stdlib_module_names} | modules_in_environment()
        found += _shadows_in(folder, hidden, "set by PYTHONPATH", NO_PYTHONPATH)
    if folder := user_site():
        # Only packages that come after the user site in sys.path are hidden. Those of a virtual
        # environment come before it.
        place = [os.path.realpath(entry) for entry in sys.path].index(folder)
        hidden = modules_in_environment(sys.path[place:]) - modules_in_environment(sys.path[:place])
        hidden -= sys.stdlib_module_names
        found += _shadows_in(folder, hidden, "the user site", NO_USER_SITE)
    return found


def find_shadowing_files() -> list[ShadowingModule]:
    """Returns the files of the working directory that have the name of a module. A notebook or
    program that is started in this directory imports such a file. Processes that the kit starts do
    not import it.
    """
    folder = os.getcwd()
    hidden = {*sys.stdlib_module_names} | modules_in_environment()
    return _shadows_in(folder, hidden, "the working directory", "Rename the file")


def summary(shadows: list[ShadowingModule]) -> str:
    """Returns one line per folder, with the names of the modules in the folder that shadow modules
    of the environment.
    """
    lines = []
    for folder, cause in dict.fromkeys((shadow.folder, shadow.cause) for shadow in shadows):
        names = [shadow.name for shadow in shadows if shadow.folder == folder]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        verb = "comes" if len(names) == 1 else "come"
        shown = ", ".join(names[:MOST_NAMED])
        lines.append(f"{shown}{more} {verb} from {folder}, {cause}, not from this environment")
    return "\n".join(lines)


def explain(error: BaseException) -> None:
    """Adds a note about shadowed modules to an error, if there are any. Python prints the note
    after the traceback.
    """
    shadows = find_shadowing_modules()
    folder = os.getcwd()
    if folder != SOURCE and ("" in sys.path or folder in sys.path):
        shadows += find_shadowing_files()
    if shadows:
        error.add_note(f"{summary(shadows)}. {shadows[0].advice}.")


def python_path() -> list[str]:
    """Returns the folders of PYTHONPATH, without the source of the kit."""
    if sys.flags.ignore_environment:
        return []
    folders = []
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        path = os.path.realpath(folder)
        if folder and path != SOURCE and path not in folders:
            folders.append(path)
    return folders


def user_site() -> str | None:
    """Returns the folder of the user site (~/.local) if Python imports from it, otherwise None."""
    site = sys.modules.get("site")
    folder = getattr(site, "USER_SITE", None)
    if folder and getattr(site, "ENABLE_USER_SITE", False) and folder in sys.path:
        return os.path.realpath(folder)
    return None


def modules_in_environment(folders: list[str] | None = None) -> set[str]:
    """Returns the names of the modules of this environment in `folders`, by default in `sys.path`.
    Folders of the user (PYTHONPATH, the user site and the working directory) are ignored.
    """
    of_user = {*python_path(), os.getcwd(), user_site()}
    names = set()
    for folder in sys.path if folders is None else folders:
        if folder and os.path.realpath(folder) not in of_user:
            names |= _modules_in(folder)
    return names


def _shadows_in(folder: str, hidden: set[str], cause: str, advice: str) -> list[ShadowingModule]:
    names = (_modules_in(folder) & hidden) - NOT_LOOKED_FOR
    return [ShadowingModule(name, folder, cause, advice) for name in sorted(names)]


def _modules_in(folder: str) -> set[str]:
    """Returns the names of the modules and packages that Python can import from a folder."""
    names = set()
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return names
    for entry in entries:
        name = entry.name.split(".")[0]
        if not name.isidentifier():
            continue
        is_module = entry.name.endswith(SUFFIXES)
        # A folder without __init__.py shadows no package: Python imports a package of this name
        # from a later folder instead.
        if is_module or os.path.exists(os.path.join(entry.path, "__init__.py")):
            names.add(name)
    return names
