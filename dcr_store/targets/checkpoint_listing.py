"""What belongs to a checkpoint in a directory, found by names, sizes and the index; tensors are not looked at.

Refuses directories without safetensors, sets with a file missing, indexes that disagree with the files, stores, and
paths that cannot be stored; says what was found and what to do. Stores and baselines inside the directory are left out.
"""

from __future__ import annotations

import errno
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcr_store.errors import FormatError, InvalidInputError, StorageError
from dcr_store.format import canonical
from dcr_store.format.names import STORE_KEY
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.layout.dtypes import shown
from dcr_store.targets.own_directories import LOCK, holds_baseline, holds_store
from dcr_store.targets.paths import check_path
from dcr_store.wording import first_of

MAX_SIDE_NBYTES: Final = 64 << 20
SUFFIX: Final = ".safetensors"
METADATA: Final = ".metadata"
"""The file that says what a torch distributed checkpoint (DCP) holds."""
_DISTRIBUTED_SUFFIX: Final = ".distcp"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_DANGLING: Final = "a link to no file"
_LOOP: Final = "a link to itself"
_TO_DIRECTORY: Final = "a link to a directory"
_SPECIAL: Final = "no regular file"
_UNREADABLE: Final = {
    _DANGLING: ("is a link to a file that is not there", "finish the download or copy"),
    _LOOP: ("is a link to itself", "put the file in its place"),
    _TO_DIRECTORY: ("is a link to a directory", "put the file in its place"),
    _SPECIAL: ("is not a regular file", "put the file in its place"),
}
_SKIPPED: Final = (".git", ".cache")


@dataclass(frozen=True, slots=True)
class SideFile:
    """Any other file of the checkpoint: its path relative to the checkpoint, and its nbytes."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something in the directory that is no part of the checkpoint, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What belongs to a checkpoint: paths of files of weights, side files, and what is left out; each by path."""

    weights: tuple[str, ...]
    side_files: tuple[SideFile, ...]
    left_out: tuple[LeftOut, ...]


def list_checkpoint(root: Path) -> Listing:
    """List a directory.

    Raises
    ------
    InvalidInputError
        If it is no checkpoint, or not a complete one.
    StorageError
        If it cannot be listed.
    """
    if holds_store(root):
        raise InvalidInputError(
            "is a store, and its objects are no files of a checkpoint; give the two a directory each",
            key=str(root),
            expected="a checkpoint",
            found=STORE_KEY,
        )
    if holds_baseline(root):
        raise InvalidInputError(
            "is a baseline too, and its files are no files of a checkpoint; move baseline.json, lock and u*.bin to a "
            "directory of their own",
            key=str(root),
            expected="a checkpoint",
            found=LOCK,
        )
    weights: list[str] = []
    side: list[SideFile] = []
    left_out: list[LeftOut] = []
    for path, nbytes in _walk(root, "", left_out):
        if "/" not in path and path.endswith(SUFFIX):
            weights.append(path)
        elif nbytes > MAX_SIDE_NBYTES:
            left_out.append(LeftOut(path, f"{nbytes} bytes, and side files may have {MAX_SIDE_NBYTES}"))
        else:
            side.append(SideFile(path, nbytes))
    if not weights:
        _refuse_unreadable(root, left_out)
        raise _no_weights(root, [file.path for file in side] + [item.path for item in left_out])
    _check_parts(root, weights)
    side.sort(key=lambda item: item.path)
    left_out.sort(key=lambda item: item.path)
    return Listing(tuple(sorted(weights)), tuple(side), tuple(left_out))


def is_index(path: str) -> bool:
    """Return whether a side file is an index of files of weights."""
    return "/" not in path and path.endswith(_INDEX_SUFFIX)


def is_distributed(name: str) -> bool:
    """Return whether a file at the top of a directory is of a torch distributed checkpoint, by its name."""
    return name == METADATA or name.endswith(_DISTRIBUTED_SUFFIX)


def is_weights(name: str) -> bool:
    """Return whether a file at the top of a directory is of a checkpoint of either kind, by its name."""
    return name.endswith(SUFFIX) or is_distributed(name)


def _walk(root: Path, below: str, left_out: list[LeftOut]) -> Iterator[tuple[str, int]]:
    """Yield path and nbytes of the regular files, through links to files: a Hugging Face cache has nothing else."""
    try:
        with os.scandir(root / below) as listing:
            entries = list(listing)
        for entry in entries:
            if entry.name in _SKIPPED or entry.name.startswith(OWN_DIRECTORY):
                continue
            path = check_path(below + entry.name)
            if entry.is_dir(follow_symlinks=False) and holds_store(root / path):
                left_out.append(LeftOut(path, "a store"))
            elif entry.is_dir(follow_symlinks=False) and holds_baseline(root / path):
                left_out.append(LeftOut(path, "a baseline"))
            elif entry.is_dir(follow_symlinks=False):
                yield from _walk(root, path + "/", left_out)
            elif _leads_nowhere(entry):
                left_out.append(LeftOut(path, _LOOP))
            elif entry.is_file():
                yield path, entry.stat().st_size
            elif entry.is_symlink():
                left_out.append(LeftOut(path, _TO_DIRECTORY if entry.is_dir() else _DANGLING))
            else:
                left_out.append(LeftOut(path, _SPECIAL))
    except OSError as error:
        raise StorageError(f"cannot be listed: {error.strerror}", key=str(root / below)) from error


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a link that leads back to itself."""
    try:
        entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return True
    return False


def _refuse_unreadable(root: Path, left_out: list[LeftOut]) -> None:
    """Name a file of weights that is there by its name only."""
    for item in left_out:
        if "/" not in item.path and item.path.endswith(SUFFIX) and item.reason in _UNREADABLE:
            what, advice = _UNREADABLE[item.reason]
            raise InvalidInputError(f"{what}; {advice}", key=str(root / item.path))


def _no_weights(root: Path, names: list[str]) -> InvalidInputError:
    advice = f"give the directory that holds the *{SUFFIX} files, or the {METADATA} of a torch distributed checkpoint"
    top = [name for name in names if "/" not in name]
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in top):
        advice = "it holds pickled weights: load them and save them again with save_pretrained(safe_serialization=True)"
    elif METADATA in top:
        advice = "it holds a torch distributed checkpoint, which cannot stand for safetensors here"
    elif any(is_distributed(name) for name in top):
        advice = f"it holds a torch distributed checkpoint without its {METADATA}: finish the copy"
    elif nested := _below(names, lambda name: name.endswith(SUFFIX)):
        advice = f"did you mean {' or '.join(str(root / item) for item in nested[:3])}?"
    elif nested := _below(names, lambda name: name == METADATA):
        advice = f"it holds torch distributed checkpoints: give {' or '.join(str(root / item) for item in nested[:3])}"
    found = first_of(sorted(top), 5)
    return InvalidInputError(
        f"has no safetensors files at its top; {advice}",
        key=str(root),
        expected=f"model{SUFFIX} or model-00001-of-0000N{SUFFIX}",
        found=found or "nothing",
    )


def _below(names: list[str], is_meant: Callable[[str], bool]) -> list[str]:
    """Return the directories below the top that hold files of certain names."""
    places = (name.rpartition("/") for name in names)
    return sorted({place for place, _, name in places if place and is_meant(name)})


def _check_parts(root: Path, weights: list[str]) -> None:
    """Refuse a directory in which a file of a numbered set is missing, whether or not an index says so."""
    parts: dict[tuple[str, str], set[int]] = defaultdict(set)
    for path in weights:
        if match := _PART.fullmatch(path):
            parts[match[1], match[3]].add(int(match[2]))
    for (prefix, n_parts), present in parts.items():
        missing = next((i for i in range(1, int(n_parts) + 1) if i not in present), None)
        if missing is not None:
            raise InvalidInputError(
                "a file of the checkpoint is missing; finish the download or copy",
                key=str(root),
                expected=f"{prefix}-{missing:05d}-of-{n_parts}{SUFFIX}",
                found=f"{len(present)} of {int(n_parts)} files",
            )


def check_index(index: Path, tensors: Mapping[str, frozenset[str]]) -> None:
    """Compare an index with the tensors that are in each file.

    Raises
    ------
    InvalidInputError
        If it names a file or tensor that is not there, or not a tensor that is.
    FormatError
        If it is no index.
    """
    key = str(index)
    try:
        document = canonical.decode(index.read_bytes(), key)
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", key=key) from error
    except FormatError as error:
        raise FormatError(f"is not valid JSON: {error.__cause__}", key=key) from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(item, str) for item in weight_map.values()):
        raise FormatError("has no weight_map from tensors to files", key=key, expected="an object of texts")
    for path in sorted(set(weight_map.values())):
        if path not in tensors:
            raise InvalidInputError(
                f"the index names a file that is not there: {shown(path)}; finish the download or copy",
                key=key,
                expected=shown(path),
                found=shown(", ".join(tensors)),
            )
        here = tensors[path]
        listed = {name for name, where in weight_map.items() if where == path}
        for name in sorted(listed ^ here)[:1]:
            raise InvalidInputError(
                f"the index and {path} disagree about tensor {shown(name)}; save the checkpoint again",
                key=key,
                expected=f"it in {weight_map[name]}" if name in weight_map else f"it not in {path}",
                found=f"it in {path}" if name in here else f"it not in {path}",
            )
