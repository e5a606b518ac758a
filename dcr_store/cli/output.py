"""Writing to standard output and standard error: whole texts or one JSON document, safe for every terminal and pipe.

Control characters are escaped, characters that the encoding lacks as well. A reader that closed the pipe ends the
command quietly.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TextIO

from dcr_store.errors import StorageError
from dcr_store.wording import escape as escape
from dcr_store.wording import escape_unprintable


class OutputClosedError(Exception):
    """Whoever read our standard output is gone; there is nobody left to tell."""


def one_line(text: str) -> str:
    """Return `text` with line breaks, and the white space around them, flattened to single spaces."""
    return re.sub(r"\s*[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+\s*", " ", text.strip())


def to_stdout(text: str) -> None:
    """Write `text` and a newline; newlines inside are kept, everything else unprintable is escaped."""
    _write(sys.stdout, escape_unprintable(text) + "\n")


def json_to_stdout(document: object) -> None:
    """Write `document` as JSON on one line, in ASCII."""
    _write(sys.stdout, json.dumps(document, allow_nan=False) + "\n")


def to_stderr(line: str) -> None:
    """Write one line; if standard error is gone, there is nobody to tell."""
    try:
        sys.stderr.write(_encodable(escape(line), sys.stderr) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def _encodable(text: str, stream: TextIO) -> str:
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(_encodable(text, stream))
        stream.flush()
    except BrokenPipeError as error:
        _discard(stream)
        raise OutputClosedError from error
    except OSError as error:
        _discard(stream)
        raise StorageError(f"standard output cannot be written: {error.strerror or error}") from error


def _discard(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: the interpreter flushes once more at exit and would complain."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
