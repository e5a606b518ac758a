"""A simulated object store: a dict, of which requests fail, lose their answers, and take effect late.

The requests are modelled; when to try again and what a lost answer means is the product's own code (objects/retry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dcr_store.errors import NotFoundError
from dcr_store.objects.flat import flat
from dcr_store.objects.keys import check_key, check_prefix, check_range
from dcr_store.objects.retry import RetryPolicy, TransientError, resolving, retrying

if TYPE_CHECKING:
    from sim.scheduler import Actor
    from sim.world import World

    from dcr_store.ports import Bytes

EPOCH_S = 1_700_000_000
POLICY = RetryPolicy(deadline_s=1.0, unreachable_s=0.5, first_delay_s=0.1, longest_delay_s=0.4)


class Bucket:
    """What is stored, and what is still under way to it."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.stored_at: dict[str, float] = {}  # by the store's own clock; what is older has no time here
        self.put_at: dict[str, int] = {}  # step of the first put, for listings that lag
        self.late: list[tuple[int, Callable[[], object]]] = []


class PlainObjects:
    """A bucket without faults and without steps; satisfies ``ports.ObjectStore``."""

    url, is_local = "sim://plain", True

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def get(self, key: str, start: int = 0, stop: int | None = None, **hints: object) -> bytes:
        if key not in self.objects:
            raise NotFoundError("no such object", key=key)
        return self.objects[key][start:stop]

    def put(self, key: str, data: Bytes) -> None:
        self.objects[key] = bytes(flat(data))

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        return self.objects.setdefault(key, bytes(flat(data))) == bytes(flat(data))

    def list(self, prefix: str) -> dict[str, int]:
        return {key: len(data) for key, data in sorted(self.objects.items()) if key.startswith(prefix)}

    def list_names(self, prefix: str) -> Sequence[str]:
        return sorted({key[len(prefix) :].partition("/")[0] for key in self.list(prefix)})

    def size(self, key: str) -> int | None:
        return len(self.objects[key]) if key in self.objects else None

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)


class SimObjects:
    """One process's view of a bucket; satisfies ``ports.ObjectStore``."""

    url = "sim://bucket"

    def __init__(self, world: World, actor: Actor) -> None:
        self.world, self.actor = world, actor
        self.is_local = world.is_local

    # ------------------------------------------------------------------ one request each

    def _request(self, name: str, key: str, effect: Callable[[], Any]) -> Any:
        """Make one request; ``TransientError`` where it fails or its answer is lost."""
        world = self.world
        world.scheduler.step(f"{name} {key}")
        fate = world.fates.of_request(self.actor, name)
        if fate is None:
            return effect()
        if fate == "unreachable":
            raise TransientError("no connection (simulated)", sent=False)
        if fate in ("late", "in flight"):
            world.put_off(effect)
        elif fate == "lost":
            effect()
        if fate == "in flight":
            world.die()
        raise TransientError(f"no answer (simulated, {fate})")

    def _put(self, key: str, data: bytes) -> None:
        self.world.store_object(key, data)

    def _create(self, key: str, data: bytes) -> bool:
        if key in self.world.bucket.objects:
            return False
        self.world.store_object(key, data)
        return True

    def _get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self.world.bucket.objects.get(key)
        if data is None:
            raise NotFoundError("no such object", key=key)
        return data[start:stop]

    def _list(self, prefix: str) -> dict[str, int]:
        found = {key: len(data) for key, data in self.world.bucket.objects.items() if key.startswith(prefix)}
        fates = self.world.fates
        seen = dict(sorted((key, nbytes) for key, nbytes in found.items() if _is_name(key) or not fates.lags(key)))
        if self.world.judge.slices is not None:
            self.world.judge.slices.on_list(self.actor, prefix, seen)
        return seen

    # ------------------------------------------------------------------ the port

    def get(self, key: str, start: int = 0, stop: int | None = None, **hints: object) -> bytes:
        if key not in self.world.bucket.objects:  # those have been checked
            check_key(key)
        check_range(key, start, stop)
        data: bytes = retrying(
            POLICY, "get", key, lambda: self._request("get", key, lambda: self._get(key, start, stop))
        )
        return data

    def put(self, key: str, data: Bytes) -> None:
        check_key(key)
        content = bytes(flat(data))
        retrying(POLICY, "put", key, lambda: self._request("put", key, lambda: self._put(key, content)))

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        check_key(key)
        content = bytes(flat(data))
        return resolving(
            POLICY,
            key,
            content,
            lambda: bool(self._request("create", key, lambda: self._create(key, content))),
            lambda: bytes(self._request("read back", key, lambda: self._get(key))),
        )

    def list(self, prefix: str) -> dict[str, int]:
        check_prefix(prefix)
        found: dict[str, int] = retrying(
            POLICY, "list", prefix, lambda: self._request("list", prefix, lambda: self._list(prefix))
        )
        return found

    def list_names(self, prefix: str) -> Sequence[str]:
        return sorted({key[len(prefix) :].partition("/")[0] for key in self.list(prefix)})

    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        stored_at = self.world.bucket.stored_at
        return {key: (nbytes, stored_at.get(key, EPOCH_S)) for key, nbytes in self.list(prefix).items()}

    def size(self, key: str) -> int | None:
        check_key(key)
        objects = self.world.bucket.objects
        found: int | None = retrying(
            POLICY,
            "look at",
            key,
            lambda: self._request("size", key, lambda: len(objects[key]) if key in objects else None),
        )
        return found

    def delete(self, key: str) -> None:
        check_key(key)
        # A name may be given again after it was taken away; all other keys are deleted for good, however late.
        what = "take away" if _is_name(key) else "delete"
        retrying(POLICY, what, key, lambda: self._request(what, key, lambda: self.world.remove_object(key)))


def _is_name(key: str) -> bool:
    """Whether a key is that of a tag or a pin."""
    return key.startswith(("tags/", "pins/"))
