"""The publisher's copy of the last committed bits: flat files, one per canonical space, mapped.

Never trusted: every chunk is digested when it is used, and one that is not the base's is healed from the store. So
nothing here is synced to disk, and a stale, torn, foreign or missing baseline only costs time. It advances after the
outcome of a commit is known, in the background: whoever uses it next waits for that. Refuses a directory that another
process is using.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from dcr_store import events
from dcr_store.codec import kernels
from dcr_store.codec.digest import crc64
from dcr_store.codec.portable import Codec
from dcr_store.errors import DcrError, IntegrityError, StorageError
from dcr_store.format import canonical
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, width
from dcr_store.layout.layout import Layout
from dcr_store.payload.version import Table
from dcr_store.publish.background import Background
from dcr_store.publish.baseline_place import checked_place, release_lock, take_lock, translated, write_all
from dcr_store.publish.spool import ChunkSpool
from dcr_store.targets.own_directories import BASELINE_TAG, LOCK
from dcr_store.targets.space_file import SpaceFiles
from dcr_store.targets.temporary import make_locked, remove
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept
from dcr_store.versions.path import ZERO
from dcr_store.versions.replay import classify, digests, everywhere, replay
from dcr_store.versions.route import route

_STATE: Final = "baseline.json"
_N_TOGETHER: Final = 16
_ENDING: Final[set[Baseline]] = set()  # closed by this process, and still locked


class Baseline:
    """A baseline directory, locked for this process until ``close``, and until an advance that goes on has ended.

    Parameters
    ----------
    directory : path or None
        Made if missing. None: a temporary directory, removed at the end.
    store_id, line : str
        What it is a baseline of; a directory of another store or line is emptied.

    Raises
    ------
    InvalidInputError
        If `directory` is a checkpoint, or in a store.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, store_id: str, line: str, chunk_elements: int) -> None:
        place = None if directory is None else checked_place(directory)
        self.line, self.store_id, self.chunk_elements = line, store_id, chunk_elements
        self._temporary = directory is None
        self._pid = os.getpid()
        self._healing = threading.Lock()
        self._staged: dict[str, int] = {}
        self._files: SpaceFiles | None = None
        self._located: Located | None = None
        self._tables: Mapping[str, Table] = {}
        self._catalog: Catalog | None = None
        self._advancing: Background[list[tuple[str, int]]] | None = None
        if place is not None:
            _wait_for_others(place)
        try:
            if place is None:
                self.directory, self._lock = make_locked("dcr-baseline-")
            else:
                self.directory = place
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(
                f"the baseline directory cannot be used: {error.strerror}; name a writable one (baseline)",
                key=str(error.filename or directory),
            ) from error
        if self._temporary:
            weakref.finalize(self, _remove, str(self.directory), self._pid)
        try:
            with translated(self.directory):
                take_lock(self._lock, self.directory)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            with translated(self.directory):
                # It tells whoever publishes what is around it to leave it out.
                write_all(self._lock, memoryview(BASELINE_TAG), 0)
        except BaseException:
            self.close()  # nobody else can: who kept the lock would keep everybody from this baseline until he ends
            raise

    # ------------------------------------------------------------------ the base

    def use(self, catalog: Catalog, located: Located) -> None:
        """Make this the baseline of a committed version, bringing the files there if they are elsewhere.

        An advance that went on has been waited for (``wait``).
        """
        contents = while_kept(catalog, [located], lambda: catalog.contents(located))
        self._catalog, before = catalog, self._located
        self._located, self._tables = located, contents.tables
        if before is not None and before.row.root == located.row.root and self._files is not None:
            return
        state = self._read_state()
        usable = (state.get("store_id"), state.get("line"), state.get("layout")) == (
            self.store_id,
            self.line,
            located.row.layout,
        )
        fresh = not usable
        with translated(self.directory):
            if fresh:
                self._empty()
            try:
                self._files = SpaceFiles(self.directory, contents.layout, self.chunk_elements, create=fresh)
            except DcrError:
                fresh = True
                self._empty()
                self._files = SpaceFiles(self.directory, contents.layout, self.chunk_elements, create=True)
            if fresh or state.get("root") != located.row.root:
                self._rebuild(located, fresh, state.get("version"))
                self._write_state(located)

    def _empty(self) -> None:
        """Remove the files, so that new ones hold zeros."""
        for space in SPACES:
            (self.directory / f"{space}.bin").unlink(missing_ok=True)

    def _rebuild(self, located: Located, fresh: bool, believed: object = None) -> None:
        """Replay the store onto the files, from zero if they are new, else from whatever they hold."""
        assert self._catalog is not None
        assert self._files is not None
        events.reached("baseline.rebuild", located.name)
        while_kept(self._catalog, [located], lambda: self._replay(located, fresh, believed))
        events.reached("baseline.rebuilt", located.name)

    def _replay(self, located: Located, fresh: bool, believed: object) -> None:
        assert self._catalog is not None
        assert self._files is not None
        routed = route(self._catalog, located)
        if fresh:
            places = everywhere(routed.path, ZERO)
        else:
            candidates = routed.between([believed] if isinstance(believed, str) else [])
            places = classify(
                routed.path, digests(self._files, routed.path.all_chunks(), self.chunk_elements), candidates
            )
        replay(self._catalog.objects, routed.path, self._files, places)

    def unproven_chunk(self, space: str, chunk: int) -> tuple[Bits, int]:
        """Return the bits that the files hold for a chunk, and the digest that the base's have.

        Returns
        -------
        bits : ndarray of uintN, shape (chunk_elements,)
            Read-only; mapped memory that somebody else may write.
        digest : int
        """
        assert self._files is not None
        return self._files.view(space, chunk), int(self._tables[space][chunk])

    def base_chunk(self, space: str, chunk: int) -> tuple[Bits, int]:
        """Return a chunk of the base, uintN of shape (chunk_elements,), read-only, and its proven digest.

        Raises
        ------
        IntegrityError
            If the chunk is wrong and healing did not help.
        """
        assert self._files is not None
        assert self._located is not None
        bits, expected = self.unproven_chunk(space, chunk)
        if crc64(bits) == expected:
            return bits, expected
        with self._healing:
            if crc64(self._files.view(space, chunk)) != expected:
                self._rebuild(self._located, fresh=False)
        bits = self._files.view(space, chunk)
        found = crc64(bits)
        if found != expected:
            raise IntegrityError(
                f"the baseline's chunk {chunk} of {space} stays wrong after healing; delete it and check its disk",
                key=str(self.directory),
                expected=f"{expected:016x}",
                found=f"{found:016x}",
            )
        return bits, expected

    # ------------------------------------------------------------------ advancing

    def advance(self, located: Located, masks: ChunkSpool, codec: Codec) -> None:
        """Apply the masks of a transaction that has committed to the mapped files, in the background; returns at once.

        Parameters
        ----------
        located : Located
            The version that it made.
        masks : ChunkSpool
            All of them, encoded; closed at the end.
        codec : Codec
            By which they are.
        """
        assert self._files is not None
        files = self._files

        def apply_all(batch: list[tuple[str, int]]) -> None:
            for space, chunk in batch:
                view, data = files.writable_view(space, chunk), masks.get(space, chunk) or b""
                if view.size == self.chunk_elements:
                    codec.apply(data, view)
                else:
                    kernels.engine().xor_at(view, *codec.decode_sparse(data, view.dtype, self.chunk_elements))
                events.reached("baseline.chunk.advanced", f"{space} {chunk}")

        def end(error: BaseException | None) -> None:
            masks.close()
            with self._keeping(located):
                if error is not None:
                    raise error
            self._located = located

        self._advancing = Background(list(_batches(masks.places(), _N_TOGETHER)), apply_all, end)
        self._advancing.start()  # known by now, so that the lock is kept, whatever interrupts this

    def wait(self) -> None:
        """Wait until an advance that goes on has ended; raises, once, what that did not expect."""
        going = self._advancing
        if going is None or not self.is_of_this_process:
            return
        try:
            going.wait()
        except BaseException:
            if going.has_failed:  # and not who waits was interrupted
                self._advancing = self._files = None
            raise

    def stage(self, space: str, chunk: int, bits: Bits) -> None:
        """Keep a chunk of an anchor that is being written, beside the present baseline."""
        with translated(self.directory):
            with self._healing:
                if space not in self._staged:
                    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                    self._staged[space] = os.open(self.directory / f"next-{space}.bin", flags, 0o666)
            write_all(self._staged[space], bits.view(np.uint8).data, chunk * bits.nbytes)
        events.reached("baseline.chunk.staged", f"{space} {chunk}")

    def staged(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a staged chunk to `out`."""
        data, offset = out.view(np.uint8).data, chunk * out.nbytes
        while data:
            with translated(self.directory):
                n_read = os.preadv(self._staged[space], [data], offset)
            if n_read == 0:
                raise StorageError("a staged chunk is gone", key=str(self.directory))
            data, offset = data[n_read:], offset + n_read

    def adopt(self, located: Located, layout: Layout) -> None:
        """Make what was staged the baseline of a transaction that has committed as `located`."""
        with self._keeping(located):
            for space in SPACES:
                final = self.directory / f"{space}.bin"
                if layout.spaces[space] and space in self._staged:
                    os.ftruncate(self._staged[space], layout.spaces[space] * width(space))
                    (self.directory / f"next-{space}.bin").replace(final)
                else:
                    final.unlink(missing_ok=True)
                events.reached("baseline.space.adopted", space)
            self._files = SpaceFiles(self.directory, layout, self.chunk_elements, create=False)
            self.drop_staging()
        self._located = located

    def drop_staging(self) -> None:
        """Forget what was staged."""
        while self._staged:
            space, descriptor = self._staged.popitem()
            with contextlib.suppress(OSError):  # the next one to stage truncates it
                os.close(descriptor)
                (self.directory / f"next-{space}.bin").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _keeping(self, located: Located) -> Iterator[None]:
        """Note `located` when the block has succeeded; a block that fails leaves a baseline to be rebuilt, no error.

        The version is committed by then, so a full disk here must not look like a failed publish.
        """
        try:
            yield
            self._write_state(located)
        except (OSError, DcrError) as error:
            events.reached("baseline.lost", f"{self.directory}: {error}")
            self._files = None
            with contextlib.suppress(OSError):
                (self.directory / _STATE).unlink(missing_ok=True)

    # ------------------------------------------------------------------ its own note

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads((self.directory / _STATE).read_bytes())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def _write_state(self, located: Located) -> None:
        state = {
            "store_id": self.store_id,
            "line": self.line,
            "version": located.name,
            "root": located.row.root,
            "layout": located.row.layout,
        }
        data = canonical.encode(state)
        # In place: a new file, or a new name, waits for the disk, which is busy with the pages of the last advance.
        # Blanks go over what is left of a longer note. A crash before the write leaves the note before, which is behind
        # the files; one within it, no JSON, or a mix of both notes. What a mix says is believed no more than what a
        # whole note says: all bits of the files that are used are compared with the store's digests.
        descriptor = os.open(self.directory / _STATE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, memoryview(data.ljust(os.fstat(descriptor).st_size)), 0)
        finally:
            os.close(descriptor)
        events.reached("baseline.noted", located.name)

    def close(self) -> None:
        """Return at once; release the lock, and remove a temporary directory, when an advance that goes on has ended.

        What a forked process has of them stays its parent's.
        """
        going = self._advancing
        if going is None or not self.is_of_this_process:
            self._release()
        else:
            _ENDING.add(self)
            going.then(self._release)

    def _release(self) -> None:
        self.drop_staging()
        self._files = None
        release_lock(self._lock, self._pid)
        if self._temporary:
            _remove(str(self.directory), self._pid)
        _ENDING.discard(self)

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made it, and not one that forked it."""
        return self._pid == os.getpid()


def _wait_for_others(place: Path) -> None:
    """Wait until no baseline of this process that was closed there is locked."""
    for other in list(_ENDING):
        if other.directory.resolve() == place.resolve():
            other.wait()


def _remove(directory: str, pid: int) -> None:
    if pid == os.getpid():
        remove(Path(directory))


def _batches(items: list[tuple[str, int]], n_items: int) -> Iterator[list[tuple[str, int]]]:
    for start in range(0, len(items), n_items):
        yield items[start : start + n_items]
