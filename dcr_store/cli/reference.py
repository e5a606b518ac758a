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
- `VERSION` is `LINE@NUMBER` (`main@3`), `LINE@TAG` (`main@best`), `LINE` (its newest version), `LINE@NUMBER#ROOT` (the
  stamp of a rollout), or a state root; of a root, the first 8 digits at least.
- With `--json` a verb prints one JSON document on standard output, on one line, in ASCII; versions are texts like
  `main@3`, sizes are bytes.
- Progress appears on standard error, and only if that is a terminal. Warnings are lines there: `dcr: warning: …`.
- `DCR_SIGN_KEY` names the file of the key that signs the log records which a verb writes, `DCR_TRUST` the file of the
  public keys of which one has to have signed each record that it reads ([signing](verify.md#signing)).
- `DCR_DEBUG=1` adds the traceback to an error. `dcr --version` prints the version. `python -m dcr_store` is `dcr`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | refused or failed, with one line `dcr: …` on standard error; or `verify` found problems, `identify` none |
| 2 | the command line is wrong |
| 130 | interrupted |
| 141 | whoever read the output closed it |

## JSON

| verb | fields of the document |
|---|---|
"""

_VERSION = (
    "A *version* is `version`, `base` (null if it is stored whole), `root`, `created_at`, `changed`, `elements`, "
    "`nbytes`, `metadata` (an object), `message` (or null), `kept` (false once it has expired).\n"
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
        "altered), `dtype`, `shape`, `elements`, `changed`, `rate`, `nbytes`, `up` and `down` (values), `largest_ulp`, "
        "`steps` (how many changes were from 2^k up to below 2^(k+1) units in the last place), these four null where "
        "they were not measured, `rows_changed` (or null), `top_rows` (a list of `row`, `changed`); with `--by module` "
        "`modules` instead: a list of `name`, `n_tensors`, `n_changed` (tensors), `elements`, `changed`, `rate`, "
        "`nbytes`, `up`, `down`, `largest_ulp`, `steps`"
    ),
    "`blame`": (
        "`version`, `tensor`, `n_rows`, `runs`: a list of `start`, `stop`, `step` (rows), `version`, `exact` (false: "
        "at or before it), `kept` (false once it has expired)"
    ),
    "`report`": (
        "`store`, `line`, `from`, `to` (versions), `made_at`, `begun_at`, `ended_at` (times), `state_nbytes` (of the "
        "last version), `columns`: a list of `first`, `last` (numbers of versions, which share a column), `n_whole` "
        "(stored whole; what follows is of the others), `n_expired`, `changed`, `elements`, `rate`, `lowest_rate`, "
        "`highest_rate`, `nbytes`, `state_nbytes`, `ratio`, `whole_nbytes` (of those stored whole), `dense_nbytes` (of "
        "all states), `metrics`: a list of `name`, `columns` (each null or `n`, `mean`, `lowest`, `highest`), "
        "`n_metrics`, `looked_into` (numbers of versions), `layers`: a list of `name`, `n_layers`, `n_tensors`, "
        "`changed`, `elements`, `rate`, `rates` (by column, or null), `moved`: a list of `version`, `up`, `down`, "
        "`largest_ulp`, `steps` (as of `diff`), `largest` and `slowest`: lists of `version`, `writer`, `array`, "
        "`index`, `nbytes`, `seconds` (or null), `n_tensors`, `first`, `last` (tensors), `groups`: as of `status`"
    ),
    "`identify`": (
        "`path`, `version` (that it holds, or the nearest, or null), `exact`, `proven` (each bit was compared), `root` "
        "(or null), `versions` (that have these weights), `expired` (those of them that are not kept), `chunks_equal`, "
        "`n_chunks`, `tensors`: a list of `name`, `status` (differs, missing, altered or extra), `differing`, "
        "`elements`"
    ),
    "`checkout`, `pull`": (
        "`version`, `root`, `previous` (a version or null), `nbytes_fetched`, `chunks_written`, `chunks_healed`, "
        "`seconds`; with `--format dcp` or `--tensor`: `version`, `root`, `n_tensors`, `nbytes`, `seconds`"
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
    "`anchor`, `fold`": "`version`, `base` (null for an anchor), `nbytes`; `version` alone, null, if none is due",
    "`expire`": (
        "`line`, `versions` (that expire), `anchors` (versions), `folds` (pairs of versions), `freed_nbytes`, "
        "`kept_for` (why, by version)"
    ),
    "`gc`": "`keys` (deleted), `nbytes`, `n_waiting`, `waiting_nbytes`, `unknown` (keys)",
    "`tag`, `pin`": (
        "`format`, `name`, `version`, `root`, `message` (or null), `created_at`, and of a pin `until` (or null); "
        "without VERSION `tags` or `pins`, a list of these; with `--delete` `deleted`"
    ),
    "`fork`": "`version`: the first one, by its name on the new line",
    "`verify`": (
        "`ok`, `problems` (a list of `key`, `what`, `expected`, `found`), `n_objects`, `nbytes`, `versions`, "
        "`unreferenced` (keys)"
    ),
    "`copy`": (
        "`lines`: a list of `line`, `head`, `first` (versions of the copy, or null), `n_records`, `n_versions` (that "
        "were copied); `n_objects`, `nbytes` (transferred), `n_tags`, `repaired`: null, with `--repair` `n_compared`, "
        "`nbytes_compared`, `keys` (of what was put again)"
    ),
    "`detach`": "`lines` (that go on here)",
    "`export`": (
        "`directory`, `written`, `found` (there already), `left_out` (expired), three lists of versions, `nbytes`"
    ),
    "`import`": "`line`, `versions`: a list of `version`, `from` (its directory)",
    "`demo`": (
        "`store`, `seconds`, `equal`, `versions` (a list of what the table says, in full), `drills` (what was killed "
        "and cut off), `next` (commands)"
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
    shown = _shown(action, "|")
    return f"[{shown}]" if optional else shown


def _shown(action: argparse.Action, between: str = ", ") -> str:
    """The option, by all its names, with its value's name, or the name of the positional."""
    value = str(action.metavar)
    if not action.option_strings:
        return f"{value} …" if action.nargs == "*" else value
    names = between.join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
