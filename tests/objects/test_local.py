"""Directories: what a kill, a full disk, a symbolic link or another program does to a store there."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcr_store.errors import InvalidInputError, NotFoundError, StorageError
from dcr_store.objects import local
from dcr_store.objects.keys import SCRATCH
from dcr_store.objects.open import open_objects
from dcr_store.objects.probe import probe
from dcr_store.objects.retry import RetryPolicy

WRITER = """if True:
    import sys
    from dcr_store.objects.open import open_objects
    objects = open_objects(sys.argv[1])
    print("ready", flush=True)
    for i in range(1, 1_000_000):
        data = b"%d," % (i % 10) * 2_000_000
        objects.put("a/put", data)
        objects.put_if_absent(f"a/{i}", data)
"""


def test_a_kill_leaves_old_or_new_or_nothing(tmp_path: Path) -> None:
    store = open_objects(tmp_path)
    whole = {b"%d," % i * 2_000_000 for i in range(10)}
    left_behind = 0
    for seed in range(30):
        if seed >= 4 and left_behind:
            break
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(random.Random(seed).uniform(0.02, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for key, nbytes in store.list("").items():
            assert nbytes == 4_000_000
            assert store.get(key) in whole
        left_behind += len(list((tmp_path / SCRATCH).iterdir()))
        assert all(key.startswith("a/") for key in store.list(""))
        assert set(store.list_names("")) <= {"a"}
    assert left_behind > 0, "no kill came while a file was being written"


def test_old_temporary_files_are_swept(tmp_path: Path) -> None:
    scratch = tmp_path / SCRATCH
    scratch.mkdir()
    for name, age_s in [("old", 3 * 86_400), ("young", 3600)]:
        (scratch / name).write_bytes(b"x")
        then = time.time() - age_s
        os.utime(scratch / name, (then, then))
    open_objects(tmp_path).put("k", b"1")
    assert [path.name for path in scratch.iterdir()] == ["young"]


def test_a_small_put_costs_two_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def counting(descriptor: int) -> None:
        synced.append(descriptor)
        fsync(descriptor)

    objects = open_objects(tmp_path / "store")
    objects.put_if_absent("log/main/0", b"1")
    monkeypatch.setattr(os, "fsync", counting)
    for call in (
        lambda: objects.put_if_absent("log/main/1", b"1"),
        lambda: objects.put("log/main/latest", b"1"),
    ):
        synced.clear()
        call()
        assert len(synced) == 2  # the file, and the directory that names it
    synced.clear()
    objects.put_if_absent("log/exp/0", b"1")
    assert len(synced) == 3  # and the directory that names the new directory


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    objects.put("k", b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for put in (objects.put, objects.put_if_absent):
            for key in ("k", "a/new"):
                if (put, key) != (objects.put_if_absent, "k"):
                    with pytest.raises(StorageError, match="File too large") as caught:
                        put(key, b"x" * 5000)
                    assert caught.value.key == key
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert objects.list("") == {"k": 3}
    assert list((tmp_path / SCRATCH).iterdir()) == []


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EPERM, "hard links"),
        (errno.ENOTSUP, "hard links"),
        (errno.EXDEV, "two file"),
    ],
)
def test_what_the_system_refuses_is_named_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    objects = open_objects(tmp_path)
    with pytest.raises(StorageError, match=hint) as caught:
        objects.put_if_absent("a/k", b"1")
    assert caught.value.key == "a/k"
    with pytest.raises(StorageError, match=hint):
        probe(objects)
    assert objects.list("") == {}
    assert list((tmp_path / SCRATCH).iterdir()) == []


def test_a_root_that_cannot_be_made_is_an_error() -> None:
    objects = open_objects("/proc/no/such/place")
    assert objects.list("") == {}
    with pytest.raises(StorageError, match="cannot put"):
        objects.put("k", b"1")


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    objects.put("a", b"1")
    for put in (objects.put, objects.put_if_absent):
        with pytest.raises(StorageError, match="not a directory") as caught:
            put("a/b", b"2")
        assert caught.value.key == "a/b"
    with pytest.raises(NotFoundError):
        objects.get("a/b")
    assert objects.size("a/b") is None
    objects.delete("a/b")
    assert objects.list("a/") == {}
    assert list(objects.list_names("a/")) == []
    assert objects.get("a") == b"1"


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    objects = open_objects(tmp_path / "file")
    with pytest.raises(StorageError, match="not a directory"):
        objects.put("k", b"1")


def test_a_directory_in_the_way_is_an_error(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    objects.put("a/b", b"1")
    for put in (objects.put, objects.put_if_absent):
        with pytest.raises(StorageError, match="a directory has this name"):
            put("a", b"2")
    assert objects.list("") == {"a/b": 1}


def test_symbolic_links_do_not_lead_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "store"
    objects = open_objects(root)
    objects.put("k", b"1")
    (root / "dir").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "new")
    for call in (objects.get, objects.size, objects.delete):
        with pytest.raises(StorageError, match="symbolic link"):
            call("dir/secret")
    for call in (objects.put, objects.put_if_absent):
        with pytest.raises(StorageError, match="symbolic link"):
            call("dir/new", b"2")
    for name in ("file", "dangling"):
        with pytest.raises(StorageError, match="symbolic link"):
            objects.get(name)
        with pytest.raises(StorageError, match="symbolic link"):
            objects.put_if_absent(name, b"2")
        assert objects.size(name) is None
    objects.put("file", b"2")  # takes the place of the link itself
    objects.delete("dangling")
    assert objects.list("") == {"k": 1, "file": 1}
    assert list(objects.list_names("")) == ["file", "k"]
    assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("secret", b"secret")]


def test_a_root_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    objects = open_objects(tmp_path / "link")
    assert objects.put_if_absent("a/k", b"1")
    assert objects.list("") == {"a/k": 1}


def test_puts_and_deletes_in_one_directory_get_along(tmp_path: Path) -> None:
    objects, other = open_objects(tmp_path), open_objects(tmp_path)

    def churn(i: int) -> None:
        store = (objects, other)[i % 2]
        for j in range(40):
            key = f"a/b/c/{i}-{j}"
            assert store.put_if_absent(key, b"1")
            assert store.get(key) == b"1"
            store.delete(key)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert objects.list("") == {}
    assert [path.name for path in tmp_path.iterdir()] == [SCRATCH]


def test_paths_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (tmp_path / "s", str(tmp_path / "s"), f"file://{tmp_path}/s", f"{tmp_path}/s/", "s", "./s", "~/s"):
        objects = open_objects(url)
        assert objects.url == str(tmp_path / "s")
        assert objects.is_local


@pytest.mark.parametrize(
    "url", ["", "ftp://example.com/x", "gs://bucket/x", "simplecache::s3://bucket/x", "zip://x", "x\0y"]
)
def test_other_protocols_are_refused(url: str) -> None:
    with pytest.raises(InvalidInputError):
        open_objects(url)


@pytest.mark.parametrize("url", ["/tmp/x", "memory://x"])
def test_options_that_are_not_taken_are_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="no storage options"):
        open_objects(url, {"key": "a"})


def test_a_link_whose_directory_cannot_be_synced_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = open_objects(tmp_path, retry=RetryPolicy(first_delay_s=0.001))
    objects.put("log/0.json", b"zero")
    sync, failures = local._sync_directory, []

    def fail_once(directory: Path) -> None:
        if not failures:
            failures.append(directory)
            raise OSError(errno.EIO, "Input/output error")
        sync(directory)

    monkeypatch.setattr(local, "_sync_directory", fail_once)
    assert objects.put_if_absent("log/1.json", b"one") is True
    assert failures
    assert objects.get("log/1.json") == b"one"
    assert objects.put_if_absent("log/1.json", b"other") is False


def test_looking_is_retried_on_a_stale_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = open_objects(tmp_path, retry=RetryPolicy(first_delay_s=0.001))
    objects.put("a/b", b"12")
    scandir, lstat, stale = os.scandir, os.lstat, {"scandir", "lstat"}

    def once(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any, **options: Any) -> Any:
            if name in stale:
                stale.discard(name)
                raise OSError(errno.ESTALE, "Stale file handle")
            return call(*args, **options)

        return look

    monkeypatch.setattr(os, "scandir", once("scandir", scandir))
    monkeypatch.setattr(os, "lstat", once("lstat", lstat))
    assert objects.list("a/") == {"a/b": 2}
    assert objects.size("a/b") == 2
    assert not stale
