"""A small language that picks versions by what the log tells of them: ``step >= 100 and not (reward < 0.5)``. Pure.

Comparisons (``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``) of names and values, ``and``, ``or``, ``not``, parentheses.
A value is a number, a text in quotes, ``true``, ``false`` or ``null``. A name is one of ``version`` (the number),
``base``, ``root``, ``changed``, ``elements``, ``rate``, ``nbytes``, ``created_at``, ``message`` and ``kept``, else one
of the metadata; ``metadata.NAME`` is always one of these, and dots lead into nested objects. A comparison with a name
that is missing is false, and so is ``<`` of values that have no order, as a number and a text; ``!=`` of these is true.

Nothing is evaluated but this. Refuses what is not of the language, saying where. A filter knows the names that it asks
for, so that one that no version has is not taken for one that nothing meets.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dcr_store.errors import InvalidInputError
from dcr_store.format.names import version_number
from dcr_store.versions.info import VersionInfo

Test = Callable[[VersionInfo], bool]
Value = Callable[[VersionInfo], Any]
_MAX_CHARACTERS: Final = 10_000
_MAX_DEPTH: Final = 100
_MOST_NAMES: Final = 8
_MOST_CLOSE: Final = 3
_MISSING: Final = object()
_TOKEN: Final = re.compile(
    r"""\s*(?:
    (?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.]))
    | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<word>[^\W\d][\w/-]*(?:\.[\w/-]+)*)
    | (?P<sign>==|!=|<=|>=|<|>|\(|\))
    )""",
    re.VERBOSE | re.DOTALL,
)
_ORDERS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SIGNS: Final = ("==", "!=", *_ORDERS)
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_FACTS: Final[Mapping[str, Value]] = {
    "version": lambda info: version_number(info.version),
    "base": lambda info: info.base,
    "root": lambda info: info.root,
    "changed": lambda info: info.changed,
    "elements": lambda info: info.elements,
    "rate": lambda info: info.changed / info.elements if info.elements else 0.0,
    "nbytes": lambda info: info.nbytes,
    "created_at": lambda info: info.created_at,
    "message": lambda info: _MISSING if info.message is None else info.message,
    "kept": lambda info: info.is_kept,
}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Filter:
    """A test of versions.

    Attributes
    ----------
    test : callable
        Whether it holds of a version; so does calling the filter.
    names : tuple of str
        Of the metadata that it asks for, without ``metadata.``; in the order of the text, each once.
    """

    test: Test
    names: tuple[str, ...]

    def __call__(self, info: VersionInfo) -> bool:
        """Return whether it holds of a version."""
        return self.test(info)

    def doubts(self, line: str, versions: Iterable[VersionInfo]) -> list[str]:
        """Return a sentence for each name that no version has, if there are versions; it names those that are close.

        Parameters
        ----------
        line : str
            Whose versions they are, for the sentence.
        versions : iterable of VersionInfo
            All of them; no more are taken than it needs to find every name once.
        """
        missing = dict.fromkeys(self.names)
        seen: list[VersionInfo] = []
        for info in versions:
            for name in [name for name in missing if _inside(info.metadata, name) is not _MISSING]:
                del missing[name]
            if not missing:
                return []
            seen.append(info)
        if not seen:
            return []
        there = dict.fromkeys(path for info in seen for path in _paths(info.metadata))
        return [
            f"no version of {line} has {name[:80]!r}, which the filter asks for; {_hint(name, there)}"
            for name in missing
        ]


def parse(text: str) -> Filter:
    """Return the filter that a text says.

    Raises
    ------
    InvalidInputError
        If it is none; says where.
    """
    return _Parser(text).parsed()


class _Parser:
    """Recursive descent; each method takes what it names from the front of the tokens."""

    def __init__(self, text: object) -> None:
        if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
            raise InvalidInputError(
                "is no filter of versions", key="where", expected="text like step >= 100", found=repr(text)[:80]
            )
        self._text = text
        self._names: dict[str, None] = {}
        self._tokens = self._cut()
        self._next = 0
        self._depth = 0

    def _cut(self) -> list[_Token]:
        tokens, at, end = [], 0, len(self._text.rstrip())
        while at < end:
            match = _TOKEN.match(self._text, at)
            if match is None or match.lastgroup is None:
                at = len(self._text) - len(self._text[at:].lstrip())
                is_assignment = self._text[at] == "="
                raise self._wrong("== to compare" if is_assignment else "a name, a value or a comparison", at)
            kind = match.lastgroup
            tokens.append(_Token(kind, match[kind], match.start(kind)))
            at = match.end()
        return [*tokens, _Token("end", "", len(self._text))]

    def parsed(self) -> Filter:
        test = self._either()
        self._require(self._peek().kind == "end", "and, or, or the end")
        return Filter(test, tuple(self._names))

    def _either(self) -> Test:
        tests = [self._both()]
        while self._take("or"):
            tests.append(self._both())
        return tests[0] if len(tests) == 1 else lambda info: any(test(info) for test in tests)

    def _both(self) -> Test:
        tests = [self._one()]
        while self._take("and"):
            tests.append(self._one())
        return tests[0] if len(tests) == 1 else lambda info: all(test(info) for test in tests)

    def _one(self) -> Test:
        self._depth += 1
        self._require(self._depth <= _MAX_DEPTH, f"at most {_MAX_DEPTH} levels")
        if self._take("not"):
            negated = self._one()
            test: Test = lambda info: not negated(info)  # noqa: E731
        elif self._take("("):
            test = self._either()
            self._require(self._take(")"), "a closing parenthesis")
        else:
            test = self._comparison()
        self._depth -= 1
        return test

    def _comparison(self) -> Test:
        left = self._operand()
        sign = self._peek().text
        self._require(self._peek().kind == "sign" and sign in _SIGNS, "a comparison, as in step >= 100")
        self._next += 1
        right = self._operand()
        self._require(
            self._peek().text not in _SIGNS or self._peek().kind != "sign", "one comparison at a time; use and"
        )
        return lambda info: _compare(sign, left(info), right(info))

    def _operand(self) -> Value:
        token = self._peek()
        self._require(token.kind in ("number", "text", "word"), "a name or a value")
        self._require(token.text not in ("and", "or", "not") or token.kind != "word", "a name or a value")
        self._next += 1
        if token.kind == "word":
            if token.text in _CONSTANTS:
                constant = _CONSTANTS[token.text]
                return lambda info: constant
            if token.text in _FACTS:
                return _FACTS[token.text]
            path = token.text.removeprefix("metadata.")
            self._names[path] = None
            return lambda info: _inside(info.metadata, path)
        value = (
            self._number(token)
            if token.kind == "number"
            else re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL)
        )
        return lambda info: value

    def _number(self, token: _Token) -> int | float:
        try:
            value = int(token.text) if token.text.lstrip("+-").isdecimal() else float(token.text)
        except ValueError:  # of more digits than Python takes
            value = math.inf
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong("a number that is finite", token.at)
        return value

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, text: str) -> bool:
        token = self._peek()
        found = token.text == text and token.kind in ("word", "sign")
        self._next += found
        return found

    def _require(self, condition: bool, expected: str) -> None:
        if not condition:
            raise self._wrong(expected, self._peek().at)

    def _wrong(self, expected: str, at: int) -> InvalidInputError:
        found = self._text[at : at + 20].strip()
        return InvalidInputError(
            f"the filter is wrong at character {at + 1}",
            key="where",
            expected=expected,
            found=json.dumps(found, ensure_ascii=False) if found else "the end",
        )


def _inside(found: object, path: str) -> object:
    """Return what a dotted path leads to; a key may itself have dots, and the longest that is there is taken."""
    if not isinstance(found, Mapping):
        return _MISSING
    if path in found:
        return found[path]
    parts = path.split(".")
    for n in range(len(parts) - 1, 0, -1):
        head = ".".join(parts[:n])
        if head in found and (inner := _inside(found[head], ".".join(parts[n:]))) is not _MISSING:
            return inner
    return _MISSING


def _paths(found: Mapping[str, object], before: str = "") -> Iterator[str]:
    """Yield the dotted path of everything in metadata."""
    for key, value in found.items():
        yield before + key
        if isinstance(value, Mapping):
            yield from _paths(value, f"{before}{key}.")


def _hint(name: str, there: Iterable[str]) -> str:
    """Return what else to ask for."""
    import difflib

    names = list(dict.fromkeys([*there, *_FACTS]))
    within = [path for path in names if path.endswith(f".{name}")]
    if close := within[:_MOST_CLOSE] or difflib.get_close_matches(name, names, _MOST_CLOSE, 0.7):
        return f"did you mean {' or '.join(close)}?"
    shown = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
    return f"there are {shown} (a text to compare with goes in quotes)"


def _compare(sign: str, left: object, right: object) -> bool:
    if left is _MISSING or right is _MISSING:
        return False
    if sign in ("==", "!="):
        # 1 == True in Python.
        is_same = isinstance(left, bool) == isinstance(right, bool) and left == right
        return is_same == (sign == "==")
    for kind in (str, (int, float)):
        if all(isinstance(side, kind) and not isinstance(side, bool) for side in (left, right)):
            return _ORDERS[sign](left, right)
    return False


__all__ = ["Filter", "parse"]
