"""``dcr relay`` as people run it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warmed
from relays import RelayProcess
from servers import free_ports
from states import series, tree, write_hf

import dcr_store
from dcr_store.cli.main import main
from dcr_store.objects.open import open_objects

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store with one version, and its checkpoint."""
    directory = tmp_path_factory.mktemp("published")
    checkpoint = write_hf(directory / "step", series(1)[0])
    with dcr_store.create(directory / "store") as store, store.begin() as transaction:
        transaction.write_checkpoint(checkpoint)
    return directory / "store", checkpoint


def test_pull_through_a_relay_with_a_token(published: tuple[Path, Path], tmp_path: Path) -> None:
    store, checkpoint = published
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    with RelayProcess(str(store), directory=tmp_path / "cache", arguments=["--token-file", str(token)]) as relay:
        assert relay.line == f"{relay.url} serves {store}\n"
        refused = warmed.run("log", relay.url)
        assert refused.returncode == 1
        assert "relay_token_file" in refused.stderr
        done = warmed.run("pull", relay.url, tmp_path / "node", DCR_RELAY_TOKEN_FILE=str(token))
        assert (done.returncode, done.stderr) == (0, "")
        assert tree(tmp_path / "node") == tree(checkpoint)
        dead = f"http://127.0.0.1:{free_ports(1)[0]}"
        other = warmed.run("log", f"{dead},{relay.url}", "--storage-option", f"relay_token_file={token}")
        assert other.returncode == 0
        assert "main@0" in other.stdout
        assert other.stderr.startswith(f"dcr: warning: upstream {dead} is passed by")
        assert relay.stop() == (0, "")
    assert TOKEN not in refused.stderr + done.stdout + other.stderr


def test_interrupted_it_ends_well(published: tuple[Path, Path], tmp_path: Path) -> None:
    with RelayProcess(str(published[0]), directory=tmp_path / "cache") as relay:
        relay.send(signal.SIGINT)
        assert relay.wait() == (0, "")


def test_what_goes_wrong_upstream_is_told(published: tuple[Path, Path], tmp_path: Path) -> None:
    """One line each time, not one a request."""
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    with RelayProcess(dead, str(published[0]), directory=tmp_path / "cache") as relay:
        for _ in range(2):
            assert warmed.run("log", relay.url).returncode == 0
        status, told = relay.stop()
    assert status == 0
    assert told.startswith(f"dcr: upstream {dead} is passed by for 10 s: ")
    assert told.count("\n") == 1


def test_mistakes_are_one_line(
    published: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(published[0])
    (tmp_path / "short").write_text("short")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (taken,) = free_ports(1)
    base = {"--upstream": store, "--listen": "127.0.0.1:0", "--cache": str(tmp_path / "cache"), "--max-bytes": "1GiB"}
    with RelayProcess(store, directory=tmp_path / "other", port=taken):
        for change, code, text in [
            ({"--listen": "127.0.0.1"}, 2, "HOST:PORT"),
            ({"--listen": "127.0.0.1:99999"}, 2, "HOST:PORT"),
            ({"--max-bytes": "1GB"}, 2, "number of bytes"),
            ({"--max-bytes": "-1"}, 2, "number of bytes"),
            ({"--cache": ""}, 2, "path"),
            ({"--access": "read"}, 2, "invalid choice"),
            ({"--tls-cert": "x"}, 2, "go together"),
            ({"--tls-cert": "x", "--tls-key": "y"}, 1, "cannot be used together"),
            ({"--token-file": str(tmp_path / "none")}, 1, "token file"),
            ({"--token-file": str(tmp_path / "short")}, 1, "no token"),
            ({"--listen": f"127.0.0.1:{taken}"}, 1, "cannot listen"),
            ({"--cache": str(tmp_path / "other")}, 1, "another relay"),
            ({"--cache": str(tmp_path / "full")}, 1, "something else"),
            ({"--upstream": "ftp://x/y"}, 2, "ftp"),
            ({"--upstream": str(tmp_path / "nowhere")}, 1, "no store here to relay"),
            ({"--storage-option": "key=x"}, 2, "no --upstream is one"),
        ]:
            arguments = [word for pair in {**base, **change}.items() for word in pair]
            assert main(["relay", *arguments]) == code, change
            told = capsys.readouterr()
            assert told.out == ""
            assert text in told.err
            assert told.err.startswith("dcr: ")
            assert told.err.count("\n") == 1


def test_without_aiohttp_it_says_what_is_missing(published: tuple[Path, Path], tmp_path: Path) -> None:
    """And the command line works, as do readers."""
    program = "import sys; sys.modules['aiohttp'] = None; from dcr_store.cli.main import main; sys.exit(main())"
    relaying = ["relay", "--upstream", str(published[0]), "--listen", "127.0.0.1:0", "--cache", str(tmp_path / "cache")]

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    code, told = run(*relaying, "--max-bytes", "1")
    assert code == 1
    assert "pip install" in told
    with RelayProcess(str(published[0]), directory=tmp_path / "cache") as relay:
        assert run("log", relay.url) == (0, "")


def test_a_hung_relay_is_given_up(
    published: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off without a word: the next one is asked after the longest silence."""
    from dcr_store.objects import http

    monkeypatch.setattr(http, "EACH_TIMEOUTS_S", (0.5, 0.5))
    with (
        RelayProcess(str(published[0]), directory=tmp_path / "1") as hung,
        RelayProcess(str(published[0]), directory=tmp_path / "2") as well,
    ):
        hung.send(signal.SIGSTOP)
        started = time.monotonic()
        objects = open_objects(f"{hung.url},{well.url}")
        with pytest.warns(UserWarning, match=f"{hung.url} is passed by for 10 s.*no answer in time"):
            assert objects.get("dcr.json") == (published[0] / "dcr.json").read_bytes()
        assert time.monotonic() - started < 20
        hung.send(signal.SIGCONT)
