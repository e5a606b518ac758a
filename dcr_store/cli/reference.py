"""docs/cli.md from the parser: ``python -m dcr_store.cli.reference > docs/cli.md``.

Reads argparse's actions, not its help texts, whose layout differs between Python versions.
"""

from __future__ import annotations

import argparse
import sys

from dcr_store.cli.parser import build

_INTRODUCTION = """\
# dcr: the command line

Generated from the parser by `python -m dcr_store.cli.reference`; a test keeps it in step.

{description}

- `STORE` is a path, a URL (`s3://bucket/prefix`, `http://host:port` of a relay), several URLs of one store separated by
  commas, or `-` for the environment variable `DCR_STORE`.
- `VERSION` is `LINE@NUMBER` (`main@3`), `LINE` (its newest version), or at least 8 digits of a state root.
- With `--json` a verb prints one JSON document on standard output, on one line, in ASCII; versions are texts like
  `main@3`, sizes are bytes.
- Progress appears on standard error, and only if that is a terminal. Warnings are lines there: `dcr: warning: …`.
- `DCR_DEBUG=1` adds the traceback to an error. `dcr --version` prints the version. `python -m dcr_store` is `dcr`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | refused or failed, with one line `dcr: …` on standard error; or `verify` found problems |
| 2 | the command line is wrong |
| 130 | interrupted |
| 141 | whoever read the output closed it |

## JSON

| verb | fields of the document |
|---|---|
"""

_VERSION = (
    "A *version* is `version`, `base` (null if it is stored whole), `root`, `created_at`, `changed`, `elements`, "
    "`nbytes`, `metadata` (an object), `message` (or null).\n"
)

_DOCUMENTS = {
    "`init`": "`url`, `store_id`, `codec`, `chunk_elements`",
    "`publish`": "those of a *version*, and `left_out`: a list of `path`, `reason`",
    "`log`": "`versions`: a list of *versions*, oldest first",
    "`show`": (
        "those of a *version*, and `line`, `txid`, `layout`, `codec`, `n_tensors`, `n_partitions`, `files` (a list of "
        "`path`, `nbytes`), `tensors` (a list of `name`, `dtype`, `shape`)"
    ),
    "`diff`": (
        "`a`, `b`, `changed`, `elements`, `tensors`: a list of `name`, `status` (changed, same, added, removed or "
        "altered), `dtype`, `shape`, `elements`, `changed`, `rate`, `largest_ulp` (or null), `nbytes`"
    ),
    "`checkout`, `pull`": (
        "`version`, `root`, `previous` (a version or null), `nbytes_fetched`, `chunks_written`, `chunks_healed`, "
        "`seconds`; with `--format dcp`: `version`, `root`, `n_tensors`, `nbytes`, `seconds`"
    ),
    "`follow`": (
        "one document for each version applied: `version`, `root`, `previous` (a version or null), `nbytes_spooled` "
        "(bytes that were there already), `nbytes_fetched`, `chunks_written`, `chunks_healed`, `seconds`"
    ),
    "`group`": (
        "those of a *group*: `group`, `line`, `head`, `active`, `root`, `proposed` (the last four null where there is "
        "none), `lag` (versions), `waits_for` (text), `admission`, `proposing`, `drop_after_s`, `members` (a list "
        "of `name`, `incarnation`, `version` (null unless it has applied the active one), `doing` (text))"
    ),
    "`status`": (
        "`lines` (a list of `line`, `head`, `root`, `created_at`, `open`, `owner`; null where there is none), `groups` "
        "(a list of *groups*)"
    ),
    "`verify`": (
        "`ok`, `problems` (a list of `key`, `what`, `expected`, `found`), `n_objects`, `nbytes`, `versions`, "
        "`unreferenced` (keys)"
    ),
}


def reference() -> str:
    """Return docs/cli.md."""
    parser = build()
    introduction = _INTRODUCTION.format(description=parser.description)
    documents = "".join(f"| {verbs} | {fields} |\n" for verbs, fields in _DOCUMENTS.items())
    sections = [section for name, verb in parsers(parser).items() for section in _verb(name, verb)]
    return "\n".join([introduction + documents, _VERSION, *sections])


def parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb, in the order of the help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _verb(name: str, parser: argparse.ArgumentParser, before: str = "") -> list[str]:
    """Return the section of a verb, and those of its acts; `before` is what stands between ``dcr`` and the name."""
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    actions.sort(key=lambda action: bool(action.option_strings))
    words = " ".join([*before.split(), name, *map(_usage, actions)])
    rows = "".join(f"| `{_shown(action)}` | {_cell(action.help or '')} |\n" for action in actions if action.help)
    description = " ".join((parser.description or "").split())
    acts = parsers(parser)
    title = f"## dcr {name}" if not before else f"### dcr {before} {name}"
    usage = f"dcr {words} …" if acts else f"dcr {words}"
    inner = " ".join(
        [name, *(_shown(action) for action in actions if not isinstance(action, argparse._SubParsersAction))]
    )
    section = f"{title}\n\n{description}\n\n```\n{usage}\n```\n\n| argument | meaning |\n|---|---|\n{rows}"
    return [section, *(found for act, verb in acts.items() for found in _verb(act, verb, inner))]


def _usage(action: argparse.Action) -> str:
    optional = not action.required if action.option_strings else action.nargs in ("?", "*")
    return f"[{_shown(action)}]" if optional else _shown(action)


def _shown(action: argparse.Action) -> str:
    """The option with its value's name, or the name of the positional."""
    value = str(action.metavar)
    if not action.option_strings:
        return f"{value} …" if action.nargs == "*" else value
    return action.option_strings[-1] if action.nargs == 0 else f"{action.option_strings[-1]} {value}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
