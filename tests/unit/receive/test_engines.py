"""Engines are told by the requests that they document; failures leave them old, new, or paused, and hold nobody up."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from engines import Engine, SglangStandIn, VllmStandIn, cut, dribble, hang, nonsense
from states import series, write_hf

from dcr_store.errors import DcrError, InvalidInputError, StorageError
from dcr_store.receive.engines import Arrival, EngineError, Taker, engine


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "version", series(1)[0])


def arrival(directory: Path, version: str = "main@3") -> Arrival:
    return Arrival(version, "ab" * 32, str(directory), "main@2")


def take(taker: Taker, arrived: Arrival) -> None:
    """Let an engine take a version and serve it."""
    taker.take(arrived)
    taker.serve()


def weights(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


KINDS: dict[str, tuple[Callable[[], Engine], list[str], str]] = {
    "sglang": (
        SglangStandIn,
        ["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
        "/update_weights_from_disk",
    ),
    "vllm": (
        lambda: VllmStandIn(True),
        [
            "/pause",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/resume",
        ],
        "/update_weights",
    ),
    "vllm-reload": (
        lambda: VllmStandIn(False),
        ["/pause", "/collective_rpc", "/update_weight_version", "/resume"],
        "/collective_rpc",
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_the_documented_requests(kind: str, directory: Path) -> None:
    make, paths, _ = KINDS[kind]
    with make() as server:
        taker = engine(f"{kind}={server.url}")
        assert server.url in taker.name
        take(taker, arrival(directory))
        assert server.paths == paths
        assert (server.paused, server.version, server.weights) == (False, "main@3", weights(directory))
        take(taker, arrival(directory, "main@4"))
        assert server.paths == paths + [path for path in paths if path != "/init_weight_transfer_engine"]
        assert (server.paused, server.version) == (False, "main@4")


@each_kind
def test_it_serves_when_it_is_told_to(kind: str, directory: Path) -> None:
    with KINDS[kind][0]() as server:
        taker = engine(f"{kind}={server.url}")
        for _ in range(2):
            taker.take(arrival(directory))
            assert (server.paused, server.version) == (True, "main@3")
        for _ in range(2):
            taker.serve()
            assert not server.paused


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_how_sglang_pauses(mode: str, directory: Path) -> None:
    with SglangStandIn() as server:
        take(engine(f"sglang={server.url}/?pause={mode}"), arrival(directory))
        assert server.requests[0][2] == {"mode": mode}
        assert server.requests[1][2] == {
            "model_path": str(directory),
            "weight_version": "main@3",
            "flush_cache": mode != "in_place",
        }


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_how_vllm_pauses(mode: str, directory: Path) -> None:
    with VllmStandIn(False) as server:
        take(engine(f"vllm-reload={server.url}?pause={mode}"), arrival(directory))
        assert server.requests[0][1] == {"mode": mode, "clear_cache": "true"}


def test_a_token_is_sent(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SglangStandIn() as server:
        take(engine(f"sglang={server.url}"), arrival(directory))
        assert all("Authorization" not in headers for headers in server.headers)
        monkeypatch.setenv("DCR_ENGINE_TOKEN", "s3cret")
        take(engine(f"sglang={server.url}"), arrival(directory))
        assert server.headers[-1]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("token", [" s3cret\n", "s3cret\r\n", "\ts3cret"])
def test_a_token_as_files_give_it(token: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCR_ENGINE_TOKEN", token)
    with SglangStandIn() as server:
        take(engine(f"sglang={server.url}"), arrival(directory))
        assert server.headers[-1]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("token", ["s3c\nret", "s3c\rret", "s3c ret", "s3c\x7fret", "s3cr\u00e9t", "s3cr\u2028t"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCR_ENGINE_TOKEN", token)
    with pytest.raises(InvalidInputError, match="no token") as caught:
        engine("sglang=http://host:1")
    assert caught.value.key == "DCR_ENGINE_TOKEN"
    assert "s3c" not in "".join(traceback.format_exception(caught.value))


@each_kind
@pytest.mark.parametrize("host", ["host\u2026name", "x" * 64])
def test_a_host_that_no_request_can_name_is_refused(kind: str, host: str) -> None:
    with pytest.raises(InvalidInputError, match="no address"):
        engine(f"{kind}=http://{host}:1")


def test_a_path_before_the_requests(directory: Path) -> None:
    with SglangStandIn() as server, pytest.raises(EngineError) as caught:
        take(engine(f"sglang={server.url}/behind/"), arrival(directory))
    assert server.paths == ["/behind/pause_generation"]
    assert (caught.value.status, caught.value.key) == (404, f"{server.url}/behind/pause_generation")


FAILURES: dict[str, tuple[object, int | None]] = {
    "500": ((500, {"error": "out of memory"}), 500),
    "503": ((503, "busy"), 503),
    "redirect": ((307, ""), 307),
    "cut": (cut, None),
    "hang": (hang, None),
    "dribble": (dribble, None),
    "nonsense": (nonsense, None),
}


@each_kind
@pytest.mark.parametrize("failure", FAILURES)
def test_a_load_that_fails_leaves_the_engine_paused_and_the_next_try_ends_that(
    kind: str, failure: str, directory: Path
) -> None:
    """Nobody knows what it has loaded: it must not serve that."""
    make, _, loading = KINDS[kind]
    planned, status = FAILURES[failure]
    with make() as server:
        taker = engine(f"{kind}={server.url}?timeout_s=0.5")
        server.fail[loading] = [planned]  # type: ignore[list-item]
        began = time.monotonic()
        with pytest.raises(EngineError, match="stays paused") as caught:
            take(taker, arrival(directory))
        assert time.monotonic() - began < 5
        assert (caught.value.status, caught.value.key) == (status, server.url + loading)
        assert isinstance(caught.value, StorageError)
        assert server.paused
        assert not {"/resume", "/continue_generation"} & set(server.paths)
        take(taker, arrival(directory))
        assert (server.paused, server.version, server.weights) == (False, "main@3", weights(directory))


@each_kind
@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_load_that_was_not_taken_up_leaves_the_engine_serving(kind: str, status: int, directory: Path) -> None:
    make, _, loading = KINDS[kind]
    with make() as server:
        server.fail[loading] = [(status, {"detail": "no"})]
        with pytest.raises(EngineError, match="refused") as caught:
            take(engine(f"{kind}={server.url}"), arrival(directory))
        assert caught.value.status == status
        assert "stays paused" not in str(caught.value)
        assert (server.paused, server.version, server.weights) == (False, None, None)


def test_a_load_that_sglang_says_has_failed(directory: Path, tmp_path: Path) -> None:
    """It says that it rolls back, but to the path that it has just been given."""
    with SglangStandIn() as server:
        taker = engine(f"sglang={server.url}")
        with pytest.raises(EngineError, match=r"stays paused.*Failed to get weights iterator"):
            take(taker, arrival(tmp_path / "nothing"))
        assert server.paused
        server.fail["/update_weights_from_disk"] = [(200, {"success": False, "message": "no"}), (200, None)]
        for _ in range(2):
            with pytest.raises(EngineError, match="stays paused"):
                take(taker, arrival(directory))
        take(taker, arrival(directory))
        assert (server.paused, server.version) == (False, "main@3")


@each_kind
def test_a_pause_that_fails_loads_nothing(kind: str, directory: Path) -> None:
    make, paths, _ = KINDS[kind]
    with make() as server:
        server.fail[paths[0]] = [(500, "no")]
        with pytest.raises(EngineError):
            take(engine(f"{kind}={server.url}"), arrival(directory))
        assert server.paths == paths[:1]
        assert server.weights is None


@each_kind
def test_an_engine_that_is_not_there(kind: str, directory: Path) -> None:
    with KINDS[kind][0]() as server:
        url = server.url
    with pytest.raises(EngineError, match="did not answer") as caught:
        take(engine(f"{kind}={url}"), arrival(directory))
    assert caught.value.status is None


class TestVllmTransfer:
    def test_without_a_backend_it_goes_on_with_its_old_weights(self, directory: Path) -> None:
        with VllmStandIn(False) as server:
            with pytest.raises(EngineError) as caught:
                take(engine(f"vllm={server.url}"), arrival(directory))
            assert str(caught.value.key).endswith("/init_weight_transfer_engine")
            assert not server.paused

    def test_an_update_that_a_killed_receiver_left_open(self, directory: Path) -> None:
        with VllmStandIn(True) as server:
            server.initialised = server.active = True
            take(engine(f"vllm={server.url}"), arrival(directory))
            assert (server.paused, server.active, server.version) == (False, False, "main@3")
            assert server.weights == weights(directory)

    def test_an_engine_that_was_started_anew(self, directory: Path) -> None:
        with VllmStandIn(True) as server:
            taker = engine(f"vllm={server.url}")
            take(taker, arrival(directory))
            server.initialised, server.weights = False, None
            with pytest.raises(EngineError):
                take(taker, arrival(directory))
            assert not server.paused, "it has what it was started with"
            take(taker, arrival(directory))
            assert server.weights == weights(directory)

    @pytest.mark.parametrize("planned", [(500, "no"), cut])
    def test_an_end_that_fails(self, directory: Path, planned: Callable[[BaseHTTPRequestHandler], None]) -> None:
        with VllmStandIn(True) as server:
            server.fail["/finish_weight_update"] = [planned]
            taker = engine(f"vllm={server.url}")
            with pytest.raises(EngineError, match="stays paused"):
                take(taker, arrival(directory))
            assert server.paused
            take(taker, arrival(directory))
            assert (server.paused, server.version) == (False, "main@3")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sglang",
        "tgi=http://host:1",
        "sglang=",
        "sglang=host:30000",
        "sglang=ftp://host:1",
        "sglang=http://",
        "sglang=http://host:port",
        "sglang=http://host:99999",
        "sglang=http://user:password@host:1",
        "sglang=http://[::1",
        "sglang=http://a b:80",
        "sglang=http://a\tb:80",
        "sglang=http://.foo:80",
        "sglang=http://foo..bar:80",
        "sglang=http://foo:80/a b",
        "sglang=http://foo:80/ü",
        "sglang=http://host:1?pause=keep",
        "vllm=http://host:1?pause=retract",
        "vllm=http://host:1?weights=all",
        "vllm=http://host:1?timeout_s=0",
        "vllm=http://host:1?timeout_s=soon",
        "vllm=http://host:1?timeout_s=nan",
    ],
)
def test_what_names_no_engine(text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        engine(text)
    assert isinstance(caught.value, DcrError)
    assert caught.value.expected
