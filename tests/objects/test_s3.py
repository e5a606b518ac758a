"""S3 when things go wrong, against a real server behind a proxy that loses, delays, refuses and cuts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from servers import free_ports

from dcr_store.errors import InvalidInputError, NotFoundError, OutcomeUnknownError, StorageError
from dcr_store.objects.open import open_objects
from dcr_store.objects.probe import probe
from dcr_store.objects.retry import RetryPolicy
from dcr_store.objects.s3 import CONNECT_TIMEOUT_S
from dcr_store.objects.transfer import map_bounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers import FaultProxy, RcloneS3, SeaweedS3

    from dcr_store.ports import ObjectStore

    Opener = Callable[..., ObjectStore]

IMPATIENT = RetryPolicy(deadline_s=1.0, unreachable_s=1.0, first_delay_s=0.02, longest_delay_s=0.2)


@pytest.mark.parametrize("nbytes", [10, 3 << 20])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_lost_answer_is_success(behind_proxy: Opener, proxy: FaultProxy, times: int, nbytes: int) -> None:
    objects = behind_proxy()
    lost = proxy.add("drop_answer", "PUT", "log/7", times=times)
    data = bytes([times]) * nbytes
    assert objects.put_if_absent("log/7", data)
    assert lost.hits == times
    assert objects.get("log/7") == data


def test_a_lost_refusal_is_a_lost_race(behind_proxy: Opener, proxy: FaultProxy) -> None:
    objects = behind_proxy()
    behind_proxy().put("log/7", b"foreign")
    lost = proxy.add("drop_answer", "PUT", "log/7", times=2)
    assert not objects.put_if_absent("log/7", b"mine")
    assert lost.hits == 2
    assert objects.get("log/7") == b"foreign"


def test_a_race_with_lost_answers_has_one_winner(behind_proxy: Opener, proxy: FaultProxy) -> None:
    proxy.add("drop_answer", "PUT", "race/", times=None, probability=0.4)
    proxy.add("reset", "PUT", "race/", times=None, probability=0.2)
    handles = [behind_proxy(), behind_proxy()]
    for i in range(3):
        contents = [f"writer {j}".encode() for j in range(4)]
        won: list[bytes] = []
        start = threading.Barrier(len(contents))

        def write(
            j: int,
            key: str = f"race/{i}",
            start: threading.Barrier = start,
            won: list[bytes] = won,
            contents: list[bytes] = contents,
        ) -> None:
            start.wait()
            if handles[j % 2].put_if_absent(key, contents[j]):
                won.append(contents[j])

        list(map_bounded(write, range(len(contents))))
        assert won == [handles[0].get(f"race/{i}")]


def test_a_put_that_lands_late_is_waited_for(behind_proxy: Opener, proxy: FaultProxy) -> None:
    objects = behind_proxy(RetryPolicy(first_delay_s=0.05, longest_delay_s=0.1))
    proxy.add("land_late", "PUT", "log/7", delay_s=0.5)
    refused = proxy.add("answer", "PUT", "log/7", times=None, status=500, code="InternalError", skip=0)
    threading.Timer(1.0, setattr, (refused, "times", 0)).start()
    assert objects.put_if_absent("log/7", b"mine")
    assert refused.hits > 3
    assert objects.get("log/7") == b"mine"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (409, "ConditionalRequestConflict"),
        (409, "OperationAborted"),
        (412, "PreconditionFailed"),
        (500, "InternalError"),
        (503, "SlowDown"),
        (429, "TooManyRequests"),
        (400, "RequestTimeout"),
    ],
)
def test_a_refusal_with_nothing_there_proves_nothing(
    behind_proxy: Opener, proxy: FaultProxy, status: int, code: str
) -> None:
    objects = behind_proxy()
    refused = proxy.add("answer", "PUT", "log/7", times=3, status=status, code=code)
    assert objects.put_if_absent("log/7", b"mine")
    assert refused.hits == 3
    assert objects.get("log/7") == b"mine"


@pytest.mark.parametrize("kind", ["drop_answer", "reset", "land_late", "answer"])
def test_no_answer_until_the_deadline_is_an_unknown_outcome(behind_proxy: Opener, proxy: FaultProxy, kind: Any) -> None:
    objects = behind_proxy(IMPATIENT)
    proxy.add(kind, "PUT", "log/7", times=None, delay_s=0.1)
    proxy.add("answer", "GET", "log/7", times=None, status=500, code="InternalError")
    started = time.monotonic()
    with pytest.raises(OutcomeUnknownError, match="not known after") as caught:
        objects.put_if_absent("log/7", b"mine")
    assert caught.value.key == "log/7"
    assert time.monotonic() - started < 5


def test_a_put_that_was_never_sent_is_no_unknown_outcome() -> None:
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{free_ports(1)[0]}"}
    objects = open_objects("s3://bucket/store", options, retry=IMPATIENT)
    with pytest.raises(StorageError, match="no connection"):
        objects.put_if_absent("log/7", b"mine")


def test_a_storm_of_faults_is_survived(behind_proxy: Opener, proxy: FaultProxy) -> None:
    objects = behind_proxy()
    storm = [
        proxy.add("answer", times=None, probability=0.15, status=500, code="InternalError"),
        proxy.add("answer", times=None, probability=0.15),
        proxy.add("reset", times=None, probability=0.1),
        proxy.add("drop_answer", times=None, probability=0.1),
        proxy.add("truncate", "GET", times=None, probability=0.2),
    ]
    contents = {f"a/{i}": bytes([i]) * (i * 100 + 1) for i in range(24)}
    assert all(map_bounded(lambda key: objects.put_if_absent(key, contents[key]), contents))
    assert dict(zip(contents, map_bounded(objects.get, contents), strict=True)) == contents
    assert objects.list("a/") == {key: len(data) for key, data in contents.items()}
    assert list(map_bounded(objects.size, contents)) == [len(data) for data in contents.values()]
    assert list(map_bounded(objects.delete, contents)) == [None] * len(contents)
    assert objects.list("a/") == {}
    assert all(fault.hits > 0 for fault in storm)


@pytest.mark.parametrize("nbytes", [10, 500_000])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (2, 9)])
def test_a_short_answer_is_never_returned(
    behind_proxy: Opener, proxy: FaultProxy, nbytes: int, start: int, stop: int | None
) -> None:
    objects = behind_proxy()
    data = bytes(range(10)) * (nbytes // 10)
    objects.put("k", data)
    cut = proxy.add("truncate", "GET", "/k", times=3)
    assert objects.get("k", start, stop) == data[start:stop]
    assert cut.hits == 3


def test_a_server_that_does_not_answer_is_asked_again(behind_proxy: Opener, proxy: FaultProxy) -> None:
    objects = behind_proxy(read_timeout=0.3)
    slow = [proxy.add("delay", method, "/k", times=2, delay_s=1.0) for method in ("PUT", "GET")]
    assert objects.put_if_absent("k", b"mine")
    assert objects.get("k") == b"mine"
    assert [fault.hits for fault in slow] == [2, 2]


@pytest.mark.parametrize("operation", ["get", "put", "size", "delete", "list"])
def test_what_keeps_failing_is_an_error_that_names_it(behind_proxy: Opener, proxy: FaultProxy, operation: str) -> None:
    objects = behind_proxy(IMPATIENT)
    proxy.add("answer", times=None)
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: objects.get("a/k"),
        "put": lambda: objects.put("a/k", b""),
        "size": lambda: objects.size("a/k"),
        "delete": lambda: objects.delete("a/k"),
        "list": lambda: objects.list("a/"),
    }
    with pytest.raises(StorageError, match="503") as caught:
        calls[operation]()
    assert caught.value.key in ("a/k", "a/")
    assert objects.url in str(caught.value)


def test_operations_cost_one_request(behind_proxy: Opener, proxy: FaultProxy) -> None:
    objects = behind_proxy()
    objects.put("a/k", b"0123456789")
    for call, method in [
        (lambda: objects.get("a/k"), "GET"),
        (lambda: objects.get("a/k", 2, 5), "GET"),
        (lambda: objects.put("a/k", b"0123456789"), "PUT"),
        (lambda: objects.put_if_absent("a/new", b"1"), "PUT"),
        (lambda: objects.size("a/k"), "HEAD"),
        (lambda: objects.list(""), "GET"),
        (lambda: objects.list_names("a/"), "GET"),
        (lambda: objects.delete("a/new"), "DELETE"),
        (lambda: objects.size("a/absent"), "HEAD"),
    ]:
        proxy.clear()
        call()
        assert [request.method for request in proxy.requests] == [method]
    proxy.clear()
    objects.put_if_absent("a/new", b"1" * 100)
    (request,) = proxy.requests
    assert request.headers["if-none-match"] == "*"
    assert request.nbytes == 100
    assert "transfer-encoding" not in request.headers


def test_additional_arguments_go_with_the_requests_that_take_them(seaweed: SeaweedS3, proxy: FaultProxy) -> None:
    options = {**seaweed.options_at(proxy.endpoint_url), "s3_additional_kwargs": {"StorageClass": "STANDARD"}}
    objects = open_objects(seaweed.new_url(), options)
    objects.put_if_absent("k", b"1")
    assert objects.get("k") == b"1"
    assert ["x-amz-storage-class" in request.headers for request in proxy.requests] == [True, False]


def test_large_objects_go_in_one_part(behind_proxy: Opener, proxy: FaultProxy) -> None:
    objects = behind_proxy()
    data = b"0123456789abcdef" * (1 << 20)
    assert objects.put_if_absent("big", data)
    assert objects.get("big") == data
    assert [request.method for request in proxy.requests] == ["PUT", "GET"]


def test_folder_markers_and_foreign_keys_are_not_listed(seaweed: SeaweedS3) -> None:
    objects = open_objects(seaweed.new_url(), seaweed.storage_options)
    _, _, bucket, prefix = objects.url.split("/", 3)
    objects.put("a/k", b"1")
    seaweed.client.put_object(Bucket=bucket, Key=f"{prefix}/a/", Body=b"")
    assert objects.list("") == {"a/k": 1}
    assert list(objects.list_names("a/")) == ["k"]


def test_a_bucket_is_a_store_without_prefix(seaweed: SeaweedS3) -> None:
    bucket = seaweed.new_bucket()
    for url in (f"s3://{bucket}", f"s3://{bucket}/"):
        objects = open_objects(url, seaweed.storage_options)
        objects.put("a/k", b"1")
        assert objects.url == f"s3://{bucket}"
        assert objects.list("") == {"a/k": 1}


def test_environment_variables_say_where_and_who(seaweed: SeaweedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    objects = open_objects(seaweed.new_url())
    assert objects.put_if_absent("k", b"1")
    assert objects.list("") == {"k": 1}


def test_a_missing_bucket_is_an_error_not_an_absence(seaweed: SeaweedS3) -> None:
    objects = open_objects("s3://no-such-bucket/store", seaweed.storage_options)
    for call in ("get", "size", "list", "list_names", "put", "put_if_absent"):
        key = "a/" if call.startswith("list") else "a"
        arguments = (key, b"x") if call.startswith("put") else (key,)
        with pytest.raises(StorageError) as caught:
            getattr(objects, call)(*arguments)
        assert str(caught.value) == (
            "s3://no-such-bucket/store: there is no such bucket here: create no-such-bucket, or check its name, the "
            "endpoint and the region"
        )


@pytest.mark.parametrize(
    ("options", "match"),
    [({"key": "nobody"}, "access key"), ({"secret": "wrong"}, "secret key")],
)
def test_wrong_credentials_are_an_error_at_once(seaweed: SeaweedS3, options: dict[str, str], match: str) -> None:
    objects = open_objects(seaweed.new_url(), {**seaweed.storage_options, **options})
    started = time.monotonic()
    for call in (lambda: objects.get("k"), lambda: objects.put_if_absent("k", b""), lambda: objects.list("")):
        with pytest.raises(StorageError, match=match):
            call()
    assert time.monotonic() - started < 5


def test_no_credentials_are_an_error_that_says_what_to_set(
    seaweed: SeaweedS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    objects = open_objects("s3://bucket/store", {"endpoint_url": seaweed.endpoint_url})
    with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID"):
        objects.get("k")


def test_an_endpoint_that_is_not_there_is_an_error_soon() -> None:
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{free_ports(1)[0]}"}
    started = time.monotonic()
    with pytest.raises(StorageError, match="AWS_ENDPOINT_URL") as caught:
        open_objects("s3://bucket/store", options, retry=RetryPolicy(unreachable_s=1.0)).get("some/key")
    assert caught.value.key == "some/key"
    assert time.monotonic() - started < 10
    # The last try begins before the limit, and may take the whole connection timeout.
    assert RetryPolicy().unreachable_s + 2 * CONNECT_TIMEOUT_S <= 20


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        ("s3://", {}, "bucket"),
        ("s3:///prefix", {}, "bucket"),
        ("s3://bucket/a//b", {}, "key"),
        ("s3://bucket/../b", {}, "key"),
        ("s3://Not_A.Bucket!/x", {"key": "a", "secret": "b"}, "bucket"),
        ("s3://bucket/x", {"key": "a", "username": "b"}, "username"),
        ("s3://bucket/x", {"no_such_option": 1}, "no_such_option"),
        ("s3://bucket/x", {"key": "a", "secret": "b", "endpoint_url": "not a url"}, "endpoint"),
    ],
)
def test_unusable_urls_and_options_are_refused(url: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        open_objects(url, options).get("k")


def test_a_key_too_long_with_its_prefix_is_refused() -> None:
    objects = open_objects("s3://bucket/" + "p" * 200, {"key": "a", "secret": "b"})
    with pytest.raises(InvalidInputError, match="shorten the prefix"):
        objects.put("/".join(["k" * 88] * 10), b"")


def test_without_s3fs_the_error_says_what_to_install() -> None:
    program = """if True:
        import sys
        sys.modules["s3fs"] = None
        from dcr_store.errors import StorageError
        from dcr_store.objects.open import open_objects
        open_objects("memory://x").put("k", b"")
        try:
            open_objects("s3://bucket/x")
        except StorageError as error:
            print(error)
    """
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    advice = 'needs the extra s3, which is not here: pip install s3fs "aiobotocore>=2.18"'
    assert run.stdout == f"'s3://bucket/x' {advice}\n"


def test_the_probe_refuses_a_server_that_ignores_conditions(rclone: RcloneS3) -> None:
    objects = open_objects(rclone.new_url(), rclone.storage_options)
    with pytest.raises(StorageError, match=r"conditional puts.* found [2-4] of 4 that did"):
        probe(objects)


def _rule(prefix: str, **action: Any) -> dict[str, Any]:
    return {"ID": "my-rule", "Status": "Enabled", "Filter": {"Prefix": prefix}, **action}


def test_the_probe_refuses_a_bucket_that_expires_objects(seaweed: SeaweedS3) -> None:
    bucket = seaweed.new_bucket()
    objects = open_objects(f"s3://{bucket}/store", seaweed.storage_options)
    for prefix, refused in [("", True), ("store/log/", True), ("st", True), ("store2/", False)]:
        seaweed.client.put_bucket_lifecycle_configuration(
            Bucket=bucket, LifecycleConfiguration={"Rules": [_rule(prefix, Expiration={"Days": 30})]}
        )
        if refused:
            with pytest.raises(StorageError, match="my-rule"):
                probe(objects)
        else:
            probe(objects)
    assert objects.list("") == {}


def test_the_probe_warns_of_versions(seaweed: SeaweedS3) -> None:
    bucket = seaweed.new_bucket()
    seaweed.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    objects = open_objects(f"s3://{bucket}/store", seaweed.storage_options)
    with pytest.warns(UserWarning, match="keeps versions"):
        probe(objects)
    assert objects.put_if_absent("log/0", b"1")
    assert not objects.put_if_absent("log/0", b"2")
    with pytest.raises(NotFoundError):
        objects.get("log/1")


def test_the_probe_goes_without_what_a_server_lacks(behind_proxy: Opener, proxy: FaultProxy) -> None:
    # The configuration of a bucket is asked for at its own path.
    proxy.add("answer", "GET", r"^/[^/]+/?$", times=2, status=501, code="NotImplemented")
    probe(behind_proxy())


def test_the_probe_warns_where_it_may_not_look(behind_proxy: Opener, proxy: FaultProxy) -> None:
    proxy.add("answer", "GET", r"^/[^/]+/?$", status=403, code="AccessDenied")
    with pytest.warns(UserWarning, match="GetLifecycleConfiguration"):
        probe(behind_proxy())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that is what is tested
def test_a_forked_process_opens_its_own(seaweed: SeaweedS3) -> None:
    """The thread behind s3fs stays with the parent: without it, requests of the child would fail or wait for ever."""
    url = seaweed.new_url()
    objects = open_objects(url, seaweed.storage_options)
    objects.put("a/k", b"1")
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: objects.get("a/k"),
        "empty range": lambda: objects.get("a/k", 1, 1),
        "put": lambda: objects.put("a/k", b"2"),
        "put_if_absent": lambda: objects.put_if_absent("b/k", b"2"),
        "list": lambda: objects.list(""),
        "list_names": lambda: objects.list_names(""),
        "size": lambda: objects.size("a/k"),
        "delete": lambda: objects.delete("a/k"),
        "side by side": lambda: list(map_bounded(objects.get, ["a/k"] * 3)),
    }
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)
            for name, call in calls.items():
                with pytest.raises(InvalidInputError, match="process that forked this one; open it again") as caught:
                    pytest.fail(f"{name} went through: {call()}")
                assert caught.value.key == url
            assert open_objects(url, seaweed.storage_options).get("a/k") == b"1"
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert objects.list("") == {"a/k": 1}
    assert objects.get("a/k") == b"1"
