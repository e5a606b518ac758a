"""``dcr report``: the command, and its page as a browser draws it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, browser
from states import series

import dcr_store
from dcr_store.cli.main import main

NAME = "<img src=x onerror=alert(1)>" + "w" * 3000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of four versions, with a name that is HTML, and a group."""
    found = tmp_path_factory.mktemp("report") / "store"
    with dcr_store.create(found, chunk_elements=4096) as store:
        for number, state in enumerate(series(4)):
            with store.begin(metadata={"step": number, "reward": number / 3, NAME: 1 / (number + 1)}) as transaction:
                for name, array in {**state, NAME: state["head"].copy()}.items():
                    transaction.write(name, array)
        store.create_group("eu", ["r1"])
    return found


@pytest.fixture(scope="module")
def page(place: Path) -> Path:
    found = place.parent / "report.html"
    assert main(["report", str(place), "-o", str(found)]) == 0
    return found


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["report", *map(str, arguments)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_as_a_process(place: Path, tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    command = [sys.executable, "-m", "dcr_store", "report", place, "--to", "main@2", "-o", target, "--measure", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{target} tells of 3 versions (")
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    assert target.stat().st_mode & 0o044


class TestCommand:
    def test_json_is_what_the_page_says(self, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = run(capsys, place, "--from", "main@1", "--json", "--sample", "2", "-o", tmp_path / "r.html")
        found = json.loads(out)
        assert (code, out.count("\n")) == (0, 1)
        assert (found["from"], found["to"], found["looked_into"]) == ("main@1", "main@3", [1, 3])
        states = series(4)
        rates = [item["rate"] for item in found["columns"]]
        for n, rate in enumerate(rates, 1):
            pairs = [(states[n - 1][name], states[n][name]) for name in states[n]]
            pairs.append((states[n - 1]["head"], states[n]["head"]))
            differ = sum(sum(a != b for a, b in zip(*map(_elements, pair), strict=True)) for pair in pairs)
            assert rate == differ / sum(array.size for _, array in pairs)
        assert (tmp_path / "r.html").read_text("utf-8").count("<section") == 7

    def test_an_older_page_is_replaced_and_nothing_else(
        self, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = tmp_path / "r.html"
        assert run(capsys, place, "--measure", "0", "-o", target)[0] == 0
        assert run(capsys, place, "--from", "main@2", "--measure", "0", "-o", target)[0] == 0
        assert "main@2 to main@3" in target.read_text("utf-8")
        target.write_text("mine")
        code, _, err = run(capsys, place, "-o", target)
        assert (code, err) == (
            1,
            f"dcr: {target}: there is something else than a page of dcr report; choose another name\n",
        )
        assert target.read_text() == "mine"

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            ([], 2, "-o FILE or --json is needed"),
            (["-o", ""], 2, "expected a path, found nothing"),
            (["--json", "--sample", "0"], 2, "expected a number of 1 or more"),
            (["--json", "--from", "main@3", "--to", "main@1"], 1, "from an older version of a line to a newer one"),
            (["--json", "--from", "main@7"], 1, "main@7"),
            (["-o", "{store}/r.html"], 1, "is a store, or inside of one"),
            (["-o", "{store}/../none/r.html"], 1, "there is no such directory"),
            (["-o", "/"], 1, "cannot be replaced by a page"),
        ],
    )
    def test_mistakes(
        self, place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
    ) -> None:
        found, out, err = run(capsys, place, *(item.format(store=place) for item in arguments))
        assert (found, out, err.count("\n")) == (code, "", 1)
        assert message in err


def _elements(array: Any) -> list[bytes]:
    data, n = array.tobytes(), array.itemsize
    return [data[at : at + n] for at in range(0, len(data), n)]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
class TestBrowser:
    def test_nothing_is_loaded_and_nothing_complains(self, drawn: Browser, page: Path) -> None:
        drawn.open(page, 1280, 900)
        assert drawn.requests == [page.as_uri()]
        assert drawn.complaints == []
        assert drawn.value("document.scripts.length + document.images.length") == 0
        assert drawn.value("document.title").startswith("main@0 to main@3")
        assert drawn.value(f"document.body.textContent.includes({NAME[:30]!r})")

    def test_the_browser_would_notice(self, drawn: Browser, tmp_path: Path) -> None:
        bad = tmp_path / "bad.html"
        bad.write_text("<script>console.log(1); throw 2</script><img src=x.png><p style='width:900px'>x")
        drawn.open(bad, 390, 844)
        assert len(drawn.complaints) == 3
        assert len(drawn.requests) == 2
        assert drawn.value("document.documentElement.scrollWidth") > 390

    @pytest.mark.parametrize(("width", "height"), [(390, 844), (320, 568), (768, 1024), (1280, 900)])
    def test_fits_every_screen(self, drawn: Browser, page: Path, width: int, height: int) -> None:
        drawn.open(page, width, height)
        drawn.value("document.querySelectorAll('details').forEach(item => item.open = true)")
        assert drawn.value("document.documentElement.scrollWidth") <= width
        boxes = drawn.value(
            "[...document.querySelectorAll('svg')].map(item => item.getBoundingClientRect())"
            ".map(box => [box.left, box.right, box.height])"
        )
        assert len(boxes) == 7
        assert all(left >= 0 and right <= width and right - left >= min(200, width / 2) for left, right, _ in boxes)
        assert all(height >= 80 for _, _, height in boxes)
        wide = "[...document.querySelectorAll('main p, h1, dd, summary')].filter(item => item.scrollWidth > innerWidth)"
        assert drawn.value(f"{wide}.length") == 0

    def test_dark_and_light(self, drawn: Browser, page: Path) -> None:
        names = ["body", "section", ".says", "svg .line", ".legend .s5", ".legend .s9"]
        style = "getComputedStyle(document.querySelector(name))"
        told = "[item.backgroundColor, item.color, item.stroke, item.fill]"
        colours: dict[str, Any] = {}
        for scheme in ("light", "dark"):
            drawn.open(page, 800, 600, scheme=scheme)
            colours[scheme] = drawn.value(f"{names}.map(name => {style}).map(item => {{ return {told} }})")
        assert all(one != other for one, other in zip(colours["light"], colours["dark"], strict=True))
        for (_, text, *_), (card, *_), (_, soft, *_), *_ in colours.values():
            assert contrast(card, text) >= 4.5
            assert contrast(card, soft) >= 4.5

    def test_paper_is_light(self, drawn: Browser, page: Path) -> None:
        ink = "getComputedStyle(document.body).color"
        drawn.open(page, 800, 600)
        light = drawn.value(ink)
        drawn.open(page, 800, 600, scheme="dark", media="print")
        assert drawn.value(ink) == light
        assert drawn.value("getComputedStyle(document.querySelector('details')).display") == "none"


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of two colours, ``rgb(r, g, b)``, as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
