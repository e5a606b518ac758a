"""What ``ports.ObjectStore`` promises, on every backend."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcr_store.errors import InvalidInputError, NotFoundError
from dcr_store.objects.memory import MemoryObjects
from dcr_store.objects.probe import probe
from dcr_store.objects.transfer import map_bounded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from servers import SeaweedS3

    from dcr_store.ports import ObjectStore

HOSTILE = {
    "empty": "",
    "parent": "../x",
    "parent inside": "a/../b",
    "dot": "a/./b",
    "absolute": "/etc/passwd",
    "empty component": "a//b",
    "trailing slash": "a/",
    "backslash": "a\\b",
    "NUL": "a\0b",
    "newline": "a\nb",
    "surrogate": "a\ud800",
    "long component": "x" * 256,
    "long key": "/".join(["x" * 100] * 10),
    "scratch": ".dcr-tmp/x",
}


def test_put_then_get(objects: ObjectStore) -> None:
    for nbytes in (0, 1, 1000, (1 << 20) - 1, (1 << 20) + 1, 5 << 20):
        data = np.random.default_rng(nbytes).bytes(nbytes)
        objects.put("a/b", data)
        assert objects.get("a/b") == data
        assert objects.size("a/b") == nbytes
        assert objects.put_if_absent(f"a/{nbytes}", data)
        assert objects.get(f"a/{nbytes}") == data


def test_every_bytes_like_object_is_stored_as_its_bytes(objects: ObjectStore) -> None:
    words = np.arange(12, dtype=np.uint16).reshape(3, 4)
    for i, data in enumerate([bytearray(b"abc"), memoryview(b"abc"), words.data, words[:, ::2].data, words[:0].data]):
        expected = memoryview(data).tobytes()
        objects.put(f"put/{i}", data)
        assert objects.get(f"put/{i}") == expected
        assert objects.put_if_absent(f"absent/{i}", data)
        assert objects.put_if_absent(f"absent/{i}", data)
        assert objects.get(f"absent/{i}") == expected


def test_ranges_are_those_of_a_slice(objects: ObjectStore) -> None:
    data = b"0123456789"
    objects.put("k", data)
    for start in (0, 3, 9, 10, 99):
        for stop in (None, 0, 1, 3, 7, 10, 99, 120):
            if stop is None or start <= stop:
                assert objects.get("k", start, stop) == data[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (0, -1), (5, 4)])
def test_ranges_that_are_none_are_refused(objects: ObjectStore, start: int, stop: int | None) -> None:
    with pytest.raises(InvalidInputError, match="range"):
        objects.get("k", start, stop)


def test_ranges_of_an_empty_object(objects: ObjectStore) -> None:
    objects.put("k", b"")
    assert objects.get("k", 0, 5) == objects.get("k", 3) == b""


def test_an_absent_object_is_told_apart(objects: ObjectStore) -> None:
    for start, stop in [(0, None), (3, 5), (2, 2)]:
        with pytest.raises(NotFoundError, match="no such object") as caught:
            objects.get("a/b", start, stop)
        assert caught.value.key == "a/b"
    assert objects.size("a/b") is None
    objects.delete("a/b")
    objects.delete("a/b")


def test_a_directory_is_no_object(objects: ObjectStore) -> None:
    objects.put("a/b/c", b"1")
    assert objects.size("a/b") is None
    with pytest.raises(NotFoundError):
        objects.get("a/b")
    objects.delete("a/b")
    assert objects.list("") == {"a/b/c": 1}


def test_put_overwrites(objects: ObjectStore) -> None:
    for data in (b"long content", b"", b"x"):
        objects.put("k", data)
        assert objects.get("k") == data


def test_put_if_absent_creates_once(objects: ObjectStore, opener: Callable[[], ObjectStore]) -> None:
    assert objects.put_if_absent("log/0", b"mine")
    assert not objects.put_if_absent("log/0", b"other")
    assert not opener().put_if_absent("log/0", b"")
    assert objects.get("log/0") == b"mine"
    assert objects.put_if_absent("log/0", b"mine")  # docs/spec/v1.md, section 1: equal bytes are the same record


def test_put_if_absent_after_delete(objects: ObjectStore) -> None:
    assert objects.put_if_absent("k", b"1")
    objects.delete("k")
    assert objects.put_if_absent("k", b"2")
    assert objects.get("k") == b"2"


def test_delete(objects: ObjectStore, on_s3: bool) -> None:
    objects.put("a/b/c", b"1")
    objects.put("a/d", b"2")
    objects.delete("a/b/c")
    assert objects.list("") == {"a/d": 1}
    if not on_s3:  # SeaweedFS names emptied "directories" for a while; S3 itself does not
        assert objects.list_names("a/") == ["d"]


def test_lists(objects: ObjectStore) -> None:
    assert objects.list("") == {}
    assert objects.list("a/") == {}
    assert list(objects.list_names("")) == []
    assert list(objects.list_names("a/")) == []
    keys = ["a/b/1", "a/b/2", "a/c", "ab/x", "a-b/y", "top", "a/B", "a/ä", "a/e f", "a/+%"]
    for i, key in enumerate(keys):
        objects.put(key, b"x" * i)
    sizes = {key: i for i, key in enumerate(keys)}
    assert objects.list("") == sizes
    assert objects.list("a/") == {key: n for key, n in sizes.items() if key.startswith("a/")}
    assert objects.list("a/b/") == {"a/b/1": 0, "a/b/2": 1}
    assert objects.list("b/") == {}
    assert list(objects.list_names("a/")) == sorted(["b", "c", "B", "ä", "e f", "+%"])
    assert list(objects.list_names("")) == ["a", "a-b", "ab", "top"]
    assert list(objects.list("")) == sorted(sizes)


def test_lists_longer_than_a_page(objects: ObjectStore) -> None:
    keys = [f"many/{i % 3}/{i:05d}" for i in range(1200)]
    for _ in map_bounded(lambda key: objects.put(key, b"x"), keys):
        pass
    assert objects.list("many/") == dict.fromkeys(sorted(keys), 1)
    assert len(objects.list_names("many/1/")) == 400
    assert list(objects.list_names("many/")) == ["0", "1", "2"]
    some = keys[::50]
    assert list(map_bounded(objects.get, some)) == [b"x"] * len(some)


@pytest.mark.parametrize("key", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_keys_are_refused(objects: ObjectStore, key: str, tmp_path: Path) -> None:
    for call in (
        objects.get,
        objects.size,
        objects.delete,
        lambda key: objects.put(key, b"x"),
        lambda key: objects.put_if_absent(key, b"x"),
        lambda key: objects.list(key + "/"),
        lambda key: objects.list_names(key + "/"),
    ):
        with pytest.raises(InvalidInputError, match="key"):
            call(key)
    assert list(tmp_path.iterdir()) == []


def test_prefixes_end_in_a_slash(objects: ObjectStore) -> None:
    for call in (objects.list, objects.list_names):
        with pytest.raises(InvalidInputError, match="prefix"):
            call("a")


def test_of_many_threads_one_creates(objects: ObjectStore, opener: Callable[[], ObjectStore], on_s3: bool) -> None:
    # SeaweedFS makes contenders for one key wait a second for every few of them.
    n, n_rounds = (12, 1) if on_s3 else (32, 20)
    handles = [objects, opener()]
    for i in range(n_rounds):
        start = threading.Barrier(n)

        def create(
            data: bytes, objects: ObjectStore, start: threading.Barrier = start, key: str = f"race/{i}"
        ) -> bytes | None:
            start.wait()
            return data if objects.put_if_absent(key, data) else None

        with ThreadPoolExecutor(n) as pool:
            contents = [f"{j}".encode() * (j + 1) for j in range(n)]
            won = [data for data in pool.map(create, contents, handles * (n // 2)) if data is not None]
        assert [objects.get(f"race/{i}")] == won


def test_of_many_processes_one_creates(
    objects: ObjectStore, on_s3: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(objects, MemoryObjects):
        pytest.skip("memory is of one process")
    if on_s3:
        seaweed: SeaweedS3 = request.getfixturevalue("seaweed")
        for name, value in seaweed.environment.items():
            monkeypatch.setenv(name, value)
    program = """if True:
        import sys
        from dcr_store.objects.open import open_objects
        objects = open_objects(sys.argv[1])
        objects.size("x")
        print("ready", flush=True)
        for line in sys.stdin:
            print(objects.put_if_absent(line.strip(), sys.argv[2].encode()), flush=True)
    """
    n, keys = (4, ["race/0"]) if on_s3 else (8, ["race/0", "race/1", "race/2"])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, objects.url, f"process {i}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(n)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n".join(keys) + "\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for i, key in enumerate(keys):
        won = [j for j in range(n) if answers[j][i] == "True"]
        assert [objects.get(key)] == [f"process {j}".encode() for j in won]


def test_a_reader_sees_old_or_new(objects: ObjectStore, opener: Callable[[], ObjectStore]) -> None:
    versions = [bytes([i]) * (300_000 + i) for i in range(4)]
    objects.put("k", versions[0])
    done = threading.Event()

    def write() -> None:
        for i in range(24):
            objects.put("k", versions[i % 4])
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        other = opener()
        while not done.is_set() and not writing.done():
            assert other.get("k") in versions
        writing.result()


def test_the_probe_accepts_and_leaves_nothing(objects: ObjectStore) -> None:
    probe(objects)
    assert objects.list("") == {}
