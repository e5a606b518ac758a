"""Several ways to one store: the first that works is used, and the next where it fails (docs/spec/relay.md, section 5).

An upstream that cannot be reached, fails or holds wrong bytes is named, and asked last for a while. Refuses upstreams
of different stores. A conditional put goes on elsewhere with the identical bytes, and stays unknown until one upstream
knows: a lost answer is never taken for a conflict.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeVar

from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError, OutcomeUnknownError, StorageError
from dcr_store.objects.flat import flat
from dcr_store.objects.keys import check_key, check_prefix, check_range
from dcr_store.objects.retry import Backoff, RetryPolicy, TransientError, is_transient, resolving, retrying
from dcr_store.objects.streaming import Streamed, blocks
from dcr_store.ports import Doubtable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dcr_store.ports import Bytes, ObjectStore

T = TypeVar("T")

EACH_POLICY: Final = RetryPolicy(deadline_s=3.0, unreachable_s=0.5, first_delay_s=0.05, longest_delay_s=0.5)
"""How long one upstream is tried before the next one."""
AWAY_S: Final = 10.0  # for which an upstream that failed is asked last
WRONG_S: Final = 10.0  # for which an upstream is not asked again for an object of which it holds other bytes
DOUBT_S: Final = 2.0  # for which a relay's short-lived answers are not believed after another upstream's
_MOST_REMEMBERED: Final = 4096
_STORE_KEY: Final = "dcr.json"


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


class FallbackObjects:
    """One store by several upstreams. See ``dcr_store.ports.ObjectStore``.

    Parameters
    ----------
    upstreams : sequence of ObjectStore
        In order of preference; at least one. They should give up soon (``EACH_POLICY``).
    policy : RetryPolicy, optional
        How long all of them are tried.
    tell : callable, optional
        Called with one sentence for each thing that whoever runs this should know; by default a warning.
    """

    is_local = False

    def __init__(
        self, upstreams: Sequence[ObjectStore], policy: RetryPolicy | None = None, tell: Callable[[str], None] = _warn
    ) -> None:
        if not upstreams:
            raise InvalidInputError("no upstream is given; give at least one URL")
        self.upstreams = tuple(upstreams)
        self._policy = policy or RetryPolicy()
        self._tell = tell
        self._lock = threading.Lock()
        self._away: dict[int, float] = {}  # upstream → until when it is asked last
        self._known: dict[int, str] = {}  # upstream → SHA-256 of its dcr.json
        self._wrong: OrderedDict[tuple[str, str], dict[int, tuple[str, float]]] = OrderedDict()
        self._last: int | None = None
        self.url = ",".join(upstream.url for upstream in upstreams)

    # ------------------------------------------------------------------ which upstream

    def _order(self) -> list[int]:
        now = time.monotonic()
        with self._lock:
            away = {number: until for number, until in self._away.items() if until > now}
        return sorted(range(len(self.upstreams)), key=lambda number: (away.get(number, 0.0), number))

    def _failed(self, number: int, error: Exception) -> None:
        now = time.monotonic()
        with self._lock:
            is_new = self._away.get(number, 0.0) <= now
            self._away[number] = now + AWAY_S
        if is_new and len(self.upstreams) > 1:
            self._tell(f"upstream {self.upstreams[number].url} is passed by for {AWAY_S:.0f} s: {error}")

    def _turn_to(self, number: int) -> None:
        """Prepare to ask an upstream; raise if it cannot be one of those used before."""
        with self._lock:
            last = self._last
        self._doubt_after(last, number)
        self._check_same(number)

    def _works(self, number: int) -> None:
        with self._lock:
            last, self._last = self._last, number
            self._away.pop(number, None)
        self._doubt_after(last, number)  # what is asked next; another thread may have been told something meanwhile

    def _doubt_after(self, last: int | None, number: int) -> None:
        """Doubt an upstream after another one: it may still give answers that are older than what that one told."""
        if last is not None and last != number and isinstance(upstream := self.upstreams[number], Doubtable):
            upstream.doubt(DOUBT_S)

    def doubt(self, for_s: float) -> None:
        """Pass a reader's doubt on; see ``HttpObjects.doubt``."""
        for upstream in self.upstreams:
            if isinstance(upstream, Doubtable):
                upstream.doubt(for_s)

    def _check_same(self, number: int) -> None:
        """Raise ``InvalidInputError`` if an upstream is of another store than those used before.

        ``StorageError`` if it holds none, while another one does: nothing may be put there, and nothing be missing.
        """
        if len(self.upstreams) == 1 or number in self._known:
            return
        try:
            found = hashlib.sha256(self.upstreams[number].get(_STORE_KEY)).hexdigest()
        except NotFoundError:
            found = None
        with self._lock:
            for other, known in self._known.items():
                if found is None:
                    raise StorageError(
                        f"{self.upstreams[number].url} holds no store, and {self.upstreams[other].url} does; give only "
                        "ways to one store",
                        key=_STORE_KEY,
                        expected=known,
                        found="no such object",
                    )
                if known != found:
                    raise InvalidInputError(
                        f"upstreams {self.upstreams[other].url} and {self.upstreams[number].url} are of different "
                        "stores; give only ways to one store",
                        key=_STORE_KEY,
                        expected=known,
                        found=found,
                    )
            if found is not None:  # else there is no store yet; asked again next time
                self._known[number] = found

    # ------------------------------------------------------------------ operations

    def _try_all(
        self,
        call: Callable[[ObjectStore], T],
        *,
        is_immutable: bool = False,
        is_write: bool = False,
        is_proof: bool = False,
    ) -> T:
        """Return the first answer; raise ``TransientError`` where another try of one of them may help.

        With `is_proof` an answer proves that those before it that held other bytes held wrong ones.
        """
        failures: list[Exception] = []
        wrong: dict[int, IntegrityError] = {}
        missing: NotFoundError | None = None
        for number in self._order():
            try:
                self._turn_to(number)
                answer = call(self.upstreams[number])
            except NotFoundError as error:
                if not is_immutable:
                    self._works(number)
                    raise
                missing = error
            except IntegrityError as error:
                wrong[number] = error  # or the caller's SHA-256 is
                failures.append(error)
            except (StorageError, OutcomeUnknownError) as error:
                if not (is_write and isinstance(error, StorageError) and not is_transient(error)):
                    self._failed(number, error)  # who only refuses to write is good for reading
                failures.append(error)
            else:
                self._works(number)
                for other in wrong if is_proof else ():
                    self._failed(other, wrong[other])
                return answer
        return self._give_up(failures, missing)

    def _give_up(self, failures: Sequence[Exception], missing: NotFoundError | None) -> T:  # type: ignore[type-var]
        unknown = [error for error in failures if isinstance(error, OutcomeUnknownError)]
        transient = [error for error in failures if isinstance(error, StorageError) and is_transient(error)]
        if unknown or transient:
            error = (unknown or transient)[0]
            raise TransientError(str(error), sent=bool(unknown)) from error
        wrong = [error for error in failures if isinstance(error, IntegrityError)]
        if wrong or failures:
            raise (wrong or failures)[0]
        assert missing is not None
        raise missing

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of an object; ``NotFoundError`` if there is none.

        A whole object that has not `sha256` is asked for elsewhere; ``IntegrityError`` if nobody has the right one.
        """
        check_key(key)
        check_range(key, start, stop)

        def fetch(upstream: ObjectStore) -> bytes:
            data = upstream.get(key, start, stop, sha256=sha256)
            if sha256 is not None and start == 0 and stop is None and not isinstance(upstream, Streamed):
                found = hashlib.sha256(data).hexdigest()
                if found != sha256:
                    raise IntegrityError(f"{upstream.url} holds other bytes", key=key, expected=sha256, found=found)
            return data

        is_known = sha256 is not None
        is_proof = is_known and start == 0 and stop is None
        return retrying(
            self._policy, "get", key, lambda: self._try_all(fetch, is_immutable=is_known, is_proof=is_proof)
        )

    def put(self, key: str, data: Bytes) -> None:
        """Store an object, atomically and durably, over whatever is there."""
        check_key(key)

        def attempt() -> None:
            self._try_all(lambda upstream: upstream.put(key, data), is_write=True)

        retrying(self._policy, "put", key, attempt)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        """Create an object unless the key is taken; see ``dcr_store.ports.ObjectStore``."""
        check_key(key)
        body = flat(data)
        return resolving(
            self._policy,
            key,
            body,
            lambda: self._try_all(lambda upstream: upstream.put_if_absent(key, body), is_write=True),
            lambda: self._try_all(lambda upstream: upstream.get(key)),
        )

    def list(self, prefix: str) -> dict[str, int]:
        """Return key → nbytes of every object whose key starts with `prefix`."""
        check_prefix(prefix)
        return retrying(self._policy, "list", prefix, lambda: self._try_all(lambda upstream: upstream.list(prefix)))

    def list_names(self, prefix: str) -> Sequence[str]:
        """Return the sorted next path components below `prefix`."""
        check_prefix(prefix)
        return retrying(
            self._policy, "list", prefix, lambda: self._try_all(lambda upstream: upstream.list_names(prefix))
        )

    def size(self, key: str) -> int | None:
        """Return an object's nbytes, or None if there is none."""
        check_key(key)
        return retrying(self._policy, "look up", key, lambda: self._try_all(lambda upstream: upstream.size(key)))

    def delete(self, key: str) -> None:
        """Delete an object; one that does not exist is no error."""
        check_key(key)

        def attempt() -> None:
            self._try_all(lambda upstream: upstream.delete(key), is_write=True)

        retrying(self._policy, "delete", key, attempt)

    # ------------------------------------------------------------------ streams

    def stream(self, key: str, sha256: str, *, past: bool = False) -> Iterator[bytes]:
        """Yield an object in pieces as they come; what breaks off goes on at the next upstream from where it ended.

        Parameters
        ----------
        key, sha256 : str
            The object, and the SHA-256 that it should have.
        past : bool
            Whether caches on the way are to be passed by.

        Raises
        ------
        IntegrityError
            After the last piece: the whole has another SHA-256, so that nothing of it counts. The upstream that sent
            it is not asked for this object for a while. Before the first: every upstream has only other bytes.
        NotFoundError, StorageError
            As ``get``, also after some pieces.
        """
        check_key(key)
        digest, nbytes = hashlib.sha256(), 0
        sources: set[int] = set()
        backoff = Backoff(self._policy)
        while True:
            failures: list[Exception] = []
            missing: NotFoundError | None = None
            for number in self._without_wrong(key, sha256):
                try:
                    self._turn_to(number)
                    for piece in blocks(self.upstreams[number], key, sha256, nbytes, past=past):
                        digest.update(piece)
                        nbytes += len(piece)
                        sources.add(number)
                        yield piece
                except NotFoundError as error:
                    missing = error
                except TransientError as error:
                    self._failed(number, error)
                    failures.append(_lasting(error, key))
                except StorageError as error:
                    self._failed(number, error)
                    failures.append(error)
                except IntegrityError as error:
                    self._note_wrong(number, key, sha256, str(error.found))
                    failures.append(error)
                else:
                    self._judge(digest.hexdigest(), sources or {number}, key, sha256)
                    self._works(number)
                    for other, (found, _) in self._wrong_ones(key, sha256).items():
                        self._failed(other, self._wrong_error(other, key, sha256, found))
                    return
            try:
                self._give_up(failures, missing)
            except TransientError as error:
                if not backoff.wait():
                    raise StorageError(f"cannot get: {error} (tries: {backoff.n_tries})", key=key) from error

    def _judge(self, found: str, sources: set[int], key: str, sha256: str) -> None:
        if found == sha256:
            return
        if len(sources) > 1:  # whose part is wrong cannot be told; the next try begins with one of them alone
            raise IntegrityError("the parts of several upstreams do not fit", key=key, expected=sha256, found=found)
        (number,) = sources
        raise self._note_wrong(number, key, sha256, found)

    def _note_wrong(self, number: int, key: str, sha256: str, found: str) -> IntegrityError:
        """Note that an upstream holds other bytes; that they are wrong is known once another one has the right ones."""
        with self._lock:
            self._wrong.setdefault((key, sha256), {})[number] = (found, time.monotonic() + WRONG_S)
            while len(self._wrong) > _MOST_REMEMBERED:
                self._wrong.popitem(last=False)
        return self._wrong_error(number, key, sha256, found)

    def _wrong_error(self, number: int, key: str, sha256: str, found: str) -> IntegrityError:
        return IntegrityError(f"{self.upstreams[number].url} holds other bytes", key=key, expected=sha256, found=found)

    def _wrong_ones(self, key: str, sha256: str) -> dict[int, tuple[str, float]]:
        now = time.monotonic()
        with self._lock:
            return {n: noted for n, noted in self._wrong.get((key, sha256), {}).items() if noted[1] > now}

    def _without_wrong(self, key: str, sha256: str) -> Sequence[int]:
        """Return the upstreams that may have the object; ``IntegrityError`` if there are none left."""
        wrong = self._wrong_ones(key, sha256)
        left = [number for number in self._order() if number not in wrong]
        if not left:
            names = " and ".join(self.upstreams[number].url for number in wrong)
            found, _ = next(iter(wrong.values()))
            raise IntegrityError(f"{names} holds other bytes", key=key, expected=sha256, found=found)
        return left

    def close(self) -> None:
        """Close connections."""
        for upstream in self.upstreams:
            close = getattr(upstream, "close", None)
            if close is not None:
                close()


def _lasting(error: TransientError, key: str) -> StorageError:
    lasting = StorageError(str(error), key=key)
    lasting.__cause__ = error
    return lasting
