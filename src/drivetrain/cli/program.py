"""Functions for commands that run a user's program, as ``python program.py`` or ``python -m program`` does."""

from __future__ import annotations

import argparse
import builtins
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import ModuleType, TracebackType
from typing import Any


def program_parser(
    prog: str, description: str, options: str = "[OPTION ...]", epilog: str | None = None
) -> argparse.ArgumentParser:  # fmt: skip
    """Return a parser without options. The caller adds its options, and then calls :func:`add_program_arguments`."""
    usage = f"%(prog)s {options} PROGRAM [ARGUMENT ...]\n       %(prog)s {options} -m MODULE [ARGUMENT ...]"
    return argparse.ArgumentParser(prog, usage, description, epilog, allow_abbrev=False)


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` accept a program and its arguments. Call this after the command's options were added."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module's name")
    parser.add_argument("program", metavar="PROGRAM", help="a file, or a folder or an archive with a __main__.py")
    words = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="passed to the program")
    words.required = False  # without this, some Pythons would say that ARGUMENT is missing, too


def parse_program(prog: str) -> argparse.Namespace:
    """Parse the command line of a child process: a program and its arguments."""
    parser = argparse.ArgumentParser(prog)
    add_program_arguments(parser)
    return parser.parse_args()


def positive(text: str) -> int:
    """Return the whole number in ``text``, which must be at least 1. This is a ``type`` for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def command_of(given: argparse.Namespace, parser: argparse.ArgumentParser, in_copy: bool = False) -> list[str]:
    """Return the words after ``python`` that run the program in ``given``.

    Exit if the program's file does not exist. ``in_copy`` skips this check, for a program that runs in a copy of the
    working directory. Warn if an option of the command stands after the program, because the program gets it.
    """
    own = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    for word in (each.partition("=")[0] for each in given.arguments):
        if word in own:
            say(f"{parser.prog}: {word} stands after {given.program}, so the program gets it, and {parser.prog} does "
                f"not. To change that, write it before {given.program}.")  # fmt: skip
    if given.is_module:
        return ["-m", given.program, *given.arguments]
    if not (in_copy or os.path.exists(given.program)):
        parser.error(
            f"there is no file {given.program!r}. Write the program's file without `python` before it; for a module, "
            "write -m before its name"
        )
    return [given.program, *given.arguments]


def say(line: str) -> None:
    """Print a line of progress on stderr, because the result is printed on stdout."""
    print(line, file=sys.stderr, flush=True)


def words_to_call(module: str, first: str = "") -> list[str]:
    """Return the words after ``python`` that call ``main`` of a module.

    Unlike with ``python -m``, a file such as csv.py in the working directory does not replace Python's module.

    Args:
        module: the module.
        first: a statement that runs before ``module`` is imported.
    """
    # sys.path[0] may be "", which means the working directory. Do not remove this entry: the program's folder will
    # later take its place.
    begin = "import gc, sys; sys.path[0] = sys.path[0] or sys.executable"
    return ["-c", "; ".join(filter(None, (begin, first, f"from {module} import main", "sys.exit(main())")))]


def run_program(given: argparse.Namespace, prog: str) -> int:
    """Run the program that :func:`add_program_arguments` has parsed from the command line of ``prog``.

    Returns:
        0, or 2 if the program's file does not exist. Exceptions of the program and ``SystemExit`` are not caught.
    """
    if given.is_module:
        run_module(given.program, given.arguments)
    elif os.path.exists(given.program):
        run_file(given.program, given.arguments)
    else:
        print(f"{prog}: there is no file {given.program!r}. For a module, write -m before its name.", file=sys.stderr)
        return 2
    return 0


def run_file(path: str, arguments: Sequence[str]) -> None:
    """Run the file, folder or archive at ``path`` as ``__main__``."""
    sys.argv = [path, *arguments]
    full = os.path.join(os.getcwd(), path)  # Python does not normalise this path either
    if os.path.isdir(path) or pkgutil.get_importer(path) is not None:
        _put_first_on_path(full, always=True)
        _run(lambda main: runpy._run_module_as_main("__main__", False))  # type: ignore[attr-defined]
    else:
        _put_first_on_path(os.path.dirname(os.path.realpath(path)))
        _run(lambda main: _run_code(main, full))


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run the module ``name`` as ``__main__``. For a package, run its submodule ``__main__``."""
    sys.argv = ["-m", *arguments]  # as with ``python -m``; runpy replaces "-m" by the module's file
    _put_first_on_path(os.getcwd())
    _run(lambda main: runpy._run_module_as_main(name))  # type: ignore[attr-defined]


def _put_first_on_path(folder: str, always: bool = False) -> None:
    """Put ``folder`` in place of ``sys.path[0]``. With -P or -I, Python adds no entry for the program. In this case,
    insert ``folder`` only if ``always``.
    """
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def _run_code(main: ModuleType, path: str) -> None:
    if path.endswith(".pyc"):
        loader: Any = SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:  # loader.get_code would write a __pycache__ beside the program
        loader = SourceFileLoader("__main__", path)
        code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    vars(main).update(__file__=path, __loader__=loader, __cached__=None)
    exec(code, vars(main))


def _run(start: Callable[[ModuleType], object]) -> None:
    """Call ``start`` with a new module ``__main__``.

    Tracebacks of exceptions do not show drivetrain's frames.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    try:
        start(main)
    except BaseException:
        hook = sys.excepthook

        def without_us(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            traceback = _of_program(traceback)
            hook(kind, error.with_traceback(traceback), traceback)

        sys.excepthook = without_us
        raise


def _of_program(traceback: TracebackType | None) -> TracebackType | None:
    """Return ``traceback`` from the program's first frame on. Return ``None`` if the program could not be compiled."""
    while traceback is not None and not _is_ours(traceback):
        traceback = traceback.tb_next
    while traceback is not None and _is_ours(traceback):
        traceback = traceback.tb_next
    return traceback


def _is_ours(traceback: TracebackType) -> bool:
    return traceback.tb_frame.f_globals is globals()
