"""The entry point of ``dcr``: parse, run a verb, turn every failure into one line and an exit code.

Never shows a traceback unless ``DCR_DEBUG`` is set, nor a warning of a library; our own are one line each.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Final

from dcr_store.cli.arguments import UsageError
from dcr_store.cli.output import OutputClosedError, one_line, to_stderr
from dcr_store.cli.parser import build
from dcr_store.errors import DcrError

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the command's name; those of the process by default.

    Returns
    -------
    int
        0 done; 1 refused, failed, or problems found; 2 the command line is wrong; 130 interrupted; 141 whoever read
        the output closed it.
    """
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
                warnings.filterwarnings("always", category=UserWarning, module=r"dcr_store\.")
                warnings.showwarning = _warn
            return _run(argv)
    except OutputClosedError:
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        to_stderr("dcr: interrupted")
        return INTERRUPTED
    except DcrError as error:
        _debug()
        to_stderr(f"dcr: {one_line(str(error))}")
        return FAILED
    except MemoryError as error:
        _debug()
        found = one_line(f"out of memory: {error}").removesuffix(": ")
        to_stderr(f"dcr: {found}; raise the limit (ulimit -v, the container's), or repeat where there is more")
        return FAILED
    except Exception as error:
        _debug()
        found = one_line(f"{type(error).__name__}: {error}").removesuffix(":")
        to_stderr(f"dcr: unexpected {found}; please report it with the traceback that DCR_DEBUG=1 shows")
        return FAILED


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = build().parse_args(argv)
        try:
            code: int = arguments.run(arguments)
        except UsageError as error:
            to_stderr(f"dcr: {one_line(str(error))}; see: dcr {arguments.verb} --help")
            return USAGE
    except SystemExit as stop:
        # argparse has printed its line, or the help; a caller of main() gets the code like any other.
        return stop.code if isinstance(stop.code, int) else USAGE
    return code


def _warn(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    # Exactly this class: what libraries say of our calls has classes of their own.
    if category is UserWarning:
        to_stderr(f"dcr: warning: {one_line(str(message))}")


def _debug() -> None:
    if os.environ.get("DCR_DEBUG"):
        import traceback

        traceback.print_exc()
