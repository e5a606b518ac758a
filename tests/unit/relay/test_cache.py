"""What a relay keeps on disk: across restarts, torn files, limits, a disk that refuses."""

from __future__ import annotations

import hashlib
import os
import resource
import secrets
from pathlib import Path

import pytest

from dcr_store.errors import ConflictError, InvalidInputError, StorageError
from dcr_store.relay.cache import Cache


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def keep(cache: Cache, key: str, data: bytes) -> None:
    arriving = cache.arriving()
    for start in range(0, len(data), 1000):
        arriving.append(data[start : start + 1000])
    cache.keep(arriving, key, sha256(data))
    arriving.close()


def kept(cache: Cache, key: str, data: bytes) -> bytes | None:
    file = cache.open(key, sha256(data))
    if file is None:
        return None
    with file:
        return file.read()


def test_what_another_run_kept_is_compared_before_it_is_used(tmp_path: Path) -> None:
    whole, torn = secrets.token_bytes(5000), secrets.token_bytes(5000)
    cache = Cache(tmp_path, 1 << 20)
    keep(cache, "whole", whole)
    keep(cache, "torn", torn)
    cache.close()
    (path,) = tmp_path.glob(f"objects/*/{sha256(torn)}-*")
    path.write_bytes(torn[:4096] + bytes(904))
    cache = Cache(tmp_path, 1 << 20)
    assert (len(cache), cache.nbytes) == (2, 10_000)
    assert kept(cache, "whole", whole) == whole
    assert kept(cache, "torn", torn) is None
    assert (len(cache), cache.nbytes) == (1, 5000)
    assert not path.exists()
    cache.close()


def test_another_run_goes_on_with_the_order_of_use(tmp_path: Path) -> None:
    contents = {key: secrets.token_bytes(1000) for key in "abc"}
    cache = Cache(tmp_path, 1 << 20)
    for i, (key, data) in enumerate(contents.items()):
        keep(cache, key, data)
        (path,) = tmp_path.glob(f"objects/*/{sha256(data)}-*")
        os.utime(path, (i, i))
    assert kept(cache, "a", contents["a"])
    cache.close()
    cache = Cache(tmp_path, 2000)
    assert [kept(cache, key, data) is not None for key, data in contents.items()] == [True, False, True]
    cache.close()


def test_the_same_bytes_at_two_keys_are_two_objects(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 20)
    keep(cache, "a", b"same")
    assert kept(cache, "b", b"same") is None
    keep(cache, "b", b"same")
    keep(cache, "b", b"same")
    assert (len(cache), cache.nbytes) == (2, 8)
    cache.drop_key("a")
    assert (kept(cache, "a", b"same"), kept(cache, "b", b"same")) == (None, b"same")
    cache.close()


def test_a_file_that_was_removed_is_not_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 20)
    keep(cache, "a", b"gone")
    (path,) = tmp_path.glob("objects/*/*")
    path.unlink()
    assert kept(cache, "a", b"gone") is None
    assert (len(cache), cache.nbytes) == (0, 0)
    cache.close()


def test_a_disk_that_refuses_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    """The bytes go on in memory, for those who are being sent them; nothing is kept."""
    data = secrets.token_bytes(10_000)
    cache = Cache(tmp_path, 1 << 20)
    arriving = cache.arriving()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for start in range(0, len(data), 1000):
            arriving.append(data[start : start + 1000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.glob("arriving/*")) == []
    assert arriving.read(0, 20_000) == data
    assert arriving.read(3500, 1000) == data[3500:4500]
    cache.keep(arriving, "a", sha256(data))
    assert kept(cache, "a", data) is None
    arriving.close()
    cache.close()


@pytest.mark.parametrize("max_nbytes", [0, 99])
def test_an_object_that_does_not_fit_is_not_kept(tmp_path: Path, max_nbytes: int) -> None:
    cache = Cache(tmp_path, max_nbytes)
    keep(cache, "a", bytes(100))
    assert (len(cache), list(tmp_path.glob("*/*/*")), list(tmp_path.glob("arriving/*"))) == (0, [], [])
    cache.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Neither to be cleared nor to be read: what they lead to is somebody else's."""
    foreign, directory = tmp_path / "foreign", tmp_path / "cache"
    foreign.mkdir()
    names = [secrets.token_hex(16), "notes"]
    for name in names:
        (foreign / name).write_bytes(b"mine")
    Cache(directory, 1 << 20).close()
    for name in ("arriving", "objects", "lock"):
        path = directory / name
        path.rename(tmp_path / "aside")
        path.symlink_to(foreign / names[0] if name == "lock" else foreign)
        for _ in range(2):  # the lock is let go of
            with pytest.raises((InvalidInputError, StorageError)) as caught:
                Cache(directory, 1 << 20)
            assert not isinstance(caught.value, ConflictError)
        path.unlink()
        (tmp_path / "aside").rename(path)
        assert sorted(path.name for path in foreign.iterdir()) == sorted(names)
        assert (foreign / names[0]).read_bytes() == b"mine"
    Cache(directory, 1 << 20).close()


def test_only_what_a_relay_wrote_is_cleared_or_kept(tmp_path: Path) -> None:
    data = secrets.token_bytes(1000)
    cache = Cache(tmp_path, 1 << 20)
    keep(cache, "a", data)
    (path,) = tmp_path.glob("objects/*/*")
    cache.close()
    half = tmp_path / "arriving" / secrets.token_hex(16)
    half.write_bytes(b"half")
    (tmp_path / "arriving" / "notes").write_bytes(b"mine")
    (tmp_path / "objects" / "stray").write_bytes(b"mine")
    (path.parent / ("0" * 64 + "-" + "0" * 32)).symlink_to(tmp_path / "nowhere")
    (path.parent / (path.name[:-32] + "1" * 32)).mkdir()
    cache = Cache(tmp_path, 1 << 20)
    assert (len(cache), half.exists(), kept(cache, "a", data)) == (1, False, data)
    assert (tmp_path / "arriving" / "notes").read_bytes() == b"mine"
    for replace in (lambda: path.symlink_to(tmp_path / "arriving" / "notes"), lambda: os.mkfifo(path)):
        keep(cache, "a", data)
        path.unlink()
        replace()
        assert kept(cache, "a", data) is None
        assert not path.exists()
    cache.close()


def test_what_is_longer_than_one_read_goes_on_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcr_store.relay import cache as module

    monkeypatch.setattr(module, "READ_NBYTES", 1000)
    data = secrets.token_bytes(4096)
    cache = Cache(tmp_path, 1 << 20)
    arriving = cache.arriving()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        arriving.append(data)
        arriving.append(b"more")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert arriving.read(0, 5000) == data + b"more"
    arriving.close()
    cache.close()
