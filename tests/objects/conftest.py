from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest
from relays import RelayThread
from servers import FaultProxy, RcloneS3

from dcr_store.objects.open import open_objects
from dcr_store.objects.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from servers import SeaweedS3

    from dcr_store.ports import ObjectStore


@pytest.fixture(scope="session")
def rclone() -> Iterator[RcloneS3]:
    with RcloneS3() as server:
        yield server


@pytest.fixture(scope="session")
def session() -> Any:
    """One botocore session for all clients: each new one reads megabytes of JSON."""
    from aiobotocore.session import AioSession

    return AioSession()


@pytest.fixture
def proxy(seaweed: SeaweedS3) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed.endpoint_url, seed=1) as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(seaweed: SeaweedS3, proxy: FaultProxy, session: Any) -> Callable[..., ObjectStore]:
    """Open the same empty prefix behind `proxy`, as often as wanted, with the policy and botocore settings given."""
    url = seaweed.new_url()

    def open_(policy: RetryPolicy | None = None, **config: object) -> ObjectStore:
        options = {**seaweed.options_at(proxy.endpoint_url), "config_kwargs": config, "session": session}
        return open_objects(url, options, retry=policy or RetryPolicy(first_delay_s=0.02))

    return open_


@pytest.fixture(params=["memory", "file", "s3", "relay-file", "relay-s3"])
def opener(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ObjectStore]]:
    """Open the same empty store, each time anew."""
    kind = request.param
    url, options = f"memory://{secrets.token_hex(8)}/store", None
    if kind.endswith("file"):
        url = str(tmp_path / "store")
    if kind.endswith("s3"):
        seaweed: SeaweedS3 = request.getfixturevalue("seaweed")
        url, options = seaweed.new_url(), {**seaweed.storage_options, "session": request.getfixturevalue("session")}
    if kind.startswith("relay"):
        with RelayThread(open_objects(url, options), tmp_path_factory.mktemp("cache")) as relay:
            yield lambda: open_objects(relay.url)
    else:
        yield lambda: open_objects(url, options)


@pytest.fixture
def on_s3(request: pytest.FixtureRequest) -> bool:
    """Whether the store is on SeaweedFS in the end."""
    return str(request.node.callspec.params["opener"]).endswith("s3")


@pytest.fixture
def objects(opener: Callable[[], ObjectStore]) -> ObjectStore:
    return opener()
