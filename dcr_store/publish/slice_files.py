"""Memory for one writer's slices that is files, mapped: it survives the process, and is not counted against it.

::

    <directory>/<line>/<writer>/     lock  note-0  note-1  bits-<n>.bin

Nothing is trusted and nothing synced: a piece of a slice is what one of the notes says only if its digest says so, and
all else is read from the store (``publish.slice_baseline``). A note is written before the bits that it tells of, over
the older of the two: a crash at any time leaves the notes of the versions that the bits are of. Refuses a directory
that another process is using, and one with files of somebody else.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from dcr_store import events
from dcr_store.errors import DcrError, FormatError, InvalidInputError
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.publish.baseline_place import checked_place, release_lock, take_lock, translated, write_all
from dcr_store.publish.slice_memory import PINNED, Claim, Earlier, Memory, OwnMemory, PinnedMemory, require_pinned
from dcr_store.publish.slice_note import Note, NotedSlice
from dcr_store.publish.slice_rooms import Room, Rooms
from dcr_store.targets.own_directories import BASELINE_TAG, LOCK
from dcr_store.targets.paths import fsync_directory
from dcr_store.versions.catalog import Located

_TAG: Final = BASELINE_TAG + b"slices\n"
_N_NOTES: Final = 2


class SliceFiles:
    """The files of one writer of one line, locked for this process until ``close``. Satisfies ``Memory``.

    Parameters
    ----------
    directory : path
        Where those of all writers are; made if missing.
    line, writer : str
        Whose they are.

    Raises
    ------
    InvalidInputError
        If `directory` is a checkpoint or in a store, or the writer's place in it has files of somebody else.
    ConflictError
        If another process, or another transaction of this one, uses it.
    StorageError
        If it cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], line: str, writer: str) -> None:
        place = checked_place(directory)
        self.place: Path | str | None = place
        self.directory = place / line / writer
        self.layout: str | None = None
        self._found: dict[str, Earlier] = {}
        self._generation = 0
        self._spaces: dict[Room, tuple[str, int]] = {}
        self._rooms = Rooms(self.directory)
        self._pid = os.getpid()
        with translated(self.directory):
            self._lock = _locked(self.directory)
            self._close = weakref.finalize(self, release_lock, self._lock, self._pid)
            try:
                self._open()
            except BaseException:
                self.close()  # nobody else can, and nobody else could lock it
                raise

    @property
    def is_open(self) -> bool:
        """Whether it is not closed, and was opened by this process, not by one that forked it."""
        return self._close.alive and self._pid == os.getpid()

    # ------------------------------------------------------------------ what is there

    def _open(self) -> None:
        notes = sorted(filter(None, map(self._read_note, range(_N_NOTES))), key=lambda note: -note.generation)
        newest = notes[0] if notes else None
        there = self._rooms.open([] if newest is None else [item.room for item in newest.slices.values()])
        if newest is None:
            return
        found = {}
        for key, item in newest.slices.items():
            if item.room in there:
                claims = tuple(
                    Claim(note.version, note.txid, note.root, note.slices[key].digests)
                    for note in notes
                    if key in note.slices and _is_same(note.slices[key], item)
                )
                found[key] = Earlier(self._view(item.room, item.space, item.n_elements), item.room, claims)
        self._generation = newest.generation + 1
        self.layout, self._found = newest.layout, found

    def found(self) -> dict[str, Earlier]:
        """Return what was there, by the slices' keys; once, so that what is not used any more can go."""
        found, self._found = self._found, {}
        return found

    def _read_note(self, slot: int) -> Note | None:
        path = self.directory / f"note-{slot}"
        try:
            if path.is_symlink() or not path.is_file():
                return None
            note = Note.from_bytes(path.read_bytes(), str(path))
        except (OSError, FormatError):
            return None
        return note if note.generation % _N_NOTES == slot else None

    def _view(self, room: Room, space: str, n_elements: int) -> Bits:
        self._spaces[room] = space, n_elements
        return self._rooms.view(room, n_elements, uint_dtype(space))

    # ------------------------------------------------------------------ bits

    def expect(self, nbytes: int) -> None:
        """Say how many bytes are going to be taken one after the other."""
        self._rooms.expect(nbytes)

    def take(self, n_elements: int, dtype: np.dtype[Any]) -> tuple[Bits, object]:
        """Return new bits of any content, mapped, shape (n_elements,), and their room."""
        with translated(self.directory):
            room = self._rooms.take(n_elements * dtype.itemsize)
            return self._view(room, f"u{8 * dtype.itemsize}", n_elements), room

    def keep(self, rooms: Iterable[object]) -> None:
        """Take back all rooms but these; a file that has none of them is removed."""
        kept = cast("list[Room]", list(rooms))
        self._spaces = {room: self._spaces[room] for room in kept}
        with translated(self.directory):
            self._rooms.keep(kept)

    def note(self, at: Located, layout: str, slices: Mapping[str, tuple[object, NDArray[np.uint64]]]) -> None:
        """Note what the bits are, or are going to be: before they are changed. On a full disk only time is lost."""
        noted = {}
        for key, (room, digests) in slices.items():
            assert isinstance(room, Room)
            noted[key] = NotedSlice(room, *self._spaces[room], digests)
        row = at.row
        note = Note(self._generation, row.version, row.txid, row.root, layout, noted)
        # In place, over the older one. A kill within leaves it torn, and then the bits are still those of the newer
        # one; after a power loss both may be, and the bits anything: then pieces are read from the store.
        path = self.directory / f"note-{self._generation % _N_NOTES}"
        self._generation += 1
        try:
            data = note.to_bytes()
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o666)
            try:
                os.ftruncate(descriptor, len(data))
                write_all(descriptor, memoryview(data), 0)
            finally:
                os.close(descriptor)
        except (OSError, DcrError) as error:
            events.reached("slices.unnoted", f"{path}: {error}")
        else:
            events.reached("slices.noted", at.name)

    def close(self) -> None:
        """Release the lock; the files stay. What a forked process has of them stays its parent's."""
        self._rooms.close()
        self._close()


def open_memory(
    baseline: str | os.PathLike[str] | None,
    kept: Memory | None,
    line: str,
    writer: str,
) -> Memory:
    """Return the memory that is asked for: that which was kept, if it is open and of the place; else another.

    The one that was kept is closed then.

    Parameters
    ----------
    baseline : path, "pinned" or None
        As of ``Store.begin`` with writers.
    kept : Memory or None
        What the last transaction of this writer used.

    Raises
    ------
    InvalidInputError, ConflictError, StorageError
        As of ``SliceFiles`` and ``PinnedMemory``.
    """
    place = place_of(baseline)
    if kept is not None:
        if kept.place == place and kept.is_open:
            return kept
        kept.close()  # it may be the one that is locked
    if place is None:
        return OwnMemory()
    return PinnedMemory() if place == PINNED else SliceFiles(place, line, writer)


def place_of(baseline: str | os.PathLike[str] | None) -> Path | str | None:
    """Return where a baseline is asked to be: a place, ``PINNED``, or None for memory of the process.

    Raises
    ------
    InvalidInputError
        If it can be nowhere there: see ``checked_place`` and ``PinnedMemory``.
    """
    if baseline is None:
        return None
    if baseline == PINNED:
        require_pinned()
        return PINNED
    if isinstance(baseline, str) and baseline.lower() == PINNED:
        raise InvalidInputError("is no path, and not the word either", key="baseline", expected=PINNED, found=baseline)
    return checked_place(baseline)


def _is_same(one: NotedSlice, two: NotedSlice) -> bool:
    shapes = [(item.room, item.space, item.n_elements, len(item.digests)) for item in (one, two)]
    return shapes[0] == shapes[1]


def _locked(directory: Path) -> int:
    """Make a writer's directory ours; return the descriptor that holds its lock."""
    directory.mkdir(parents=True, exist_ok=True)
    others = {path.name for path in directory.iterdir()}
    with contextlib.suppress(OSError):
        if (directory / LOCK).lstat().st_size == 0:
            others.discard(LOCK)  # of one that was killed before it could say more
    if others and not _is_ours(directory / LOCK):
        raise InvalidInputError(
            "has files of somebody else, where this writer's baseline would be; name another directory (baseline)",
            key=str(directory),
            expected="an empty place, or a baseline of slices",
            found=min(others),
        )
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        take_lock(descriptor, directory)
        if not _is_ours(directory / LOCK):
            # It tells us, and whoever publishes what is around it, what this is; whatever is here later came after it.
            write_all(descriptor, memoryview(_TAG), 0)
            os.fsync(descriptor)
            fsync_directory(directory)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_ours(lock: Path) -> bool:
    if lock.is_symlink() or not lock.is_file():
        return False
    with lock.open("rb") as file:
        return file.read(len(_TAG)) == _TAG
