"""The page of a study opens without a network, runs nothing, and its figures are at the places that its tables say."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest

from fp8attn.analysis import Plot, StudyResult, compare, load_study, run_study
from fp8attn.analysis.inputs import load_sample
from fp8attn.analysis.report import Section, to_html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Added to a copy of the page: where every marker is, what went wrong, and what was loaded.
PROBE = """<script>
const found = {markers: {}, rows: {}, loaded: performance.getEntriesByType('resource').map(x => x.name)};
for (const row of document.querySelectorAll('tr[id]'))
  found.rows[row.id] = [row.dataset.x, row.dataset.y, ...[...row.cells].map(cell => cell.textContent)];
for (const marker of document.querySelectorAll('[id*="-point-"]')) {
  const box = marker.querySelector('use').getBoundingClientRect();
  found.markers[marker.id] = [box.x + box.width / 2, box.y + box.height / 2, marker.closest('[id*="axes_"]').id];
}
found.scripts = document.scripts.length;
const out = document.createElement('pre');
out.id = 'found';
out.textContent = JSON.stringify(found);
document.body.append(out);
</script>"""


class Strict(HTMLParser):
    """Every element that is opened is closed, every id is used once, and nothing is loaded."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.addresses += [value for name, value in attrs if name in ("href", "src", "xlink:href") and value]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResult, Path]:
    folder = tmp_path_factory.mktemp("study")
    study = load_study("outlier-magnitude").at_quick().with_grid({"length": [128], "seed": [0, 1, 2]})
    return run_study(study, folder), folder / "report.html"


def check_page(text: str) -> None:
    page = Strict()
    page.feed(text)
    page.close()
    assert not page.open and len(page.ids) == len(set(page.ids))
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import", text)


def test_a_studys_page_is_whole_and_loads_nothing(result: tuple[StudyResult, Path]) -> None:
    text = result[1].read_text(encoding="utf-8")
    check_page(text)
    study = result[0].study
    for words in (study.question, study.method, study.claims[0].says, "Where the prediction's assumptions do not hold"):
        assert words.replace("'", "&#39;") in text
    assert text.count("<svg") == len(study.plots)


def test_a_comparisons_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    (layer,) = load_sample(layers=[15]).layers
    report = compare(layer.q[:, :3, :96], layer.k[:, :1, :96], layer.v[:, :1, :96], is_causal=True)
    report.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    check_page(text)
    assert report.advice in text and text.count("<svg") == 5


def test_what_is_shown_is_text() -> None:
    text = to_html(
        "<b>", [Section("<i>", "<script>alert(1)</script>")], origin={"command": "a <b> & c"}, question="<q>"
    )
    check_page(text)
    assert "&lt;script&gt;" in text and "a &lt;b&gt; &amp; c" in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to look at the page with")
def test_figures_match_their_tables_in_a_browser(result: tuple[StudyResult, Path], tmp_path: Path) -> None:
    found, said = look(result[1].read_text(encoding="utf-8"), tmp_path)
    assert found["scripts"] == 1, "the test's own"
    assert found["loaded"] == [] and not re.search(r"CONSOLE|Uncaught|ERR_", said), said
    for number, plot in enumerate(result[0].study.plots):
        summary = result[0].summary(plot)
        rows = {i: found["rows"].pop(f"s{number}-row-{i}") for i in summary.index}
        for i, row in summary.iterrows():
            assert (float(rows[i][0]), float(rows[i][1])) == (row["x"], row["y"])
            assert f"{row['y']:.4g}" in rows[i][2:] or f"{row['y']:.0f}" in rows[i][2:]
        for axes in {found["markers"][f"s{number}-point-{i}"][2] for i in summary.index}:
            inside = [i for i in summary.index if found["markers"][f"s{number}-point-{i}"][2] == axes]
            for scale, place, column in ((plot.x_scale, 0, "x"), (plot.y_scale, 1, "y")):
                values = [summary[column][i] for i in inside]
                pixels = [found["markers"][f"s{number}-point-{i}"][place] for i in inside]
                check_linear([math.log(v) for v in values] if scale == "log" else values, pixels, plot)
    assert not found["rows"]


def check_linear(values: list[float], pixels: list[float], plot: Plot) -> None:
    """An axis puts values on pixels by one linear function, whatever it is."""
    if len(set(values)) < 2:
        assert max(pixels) - min(pixels) < 0.5
        return
    fit = numpy.polyfit(values, pixels, 1)
    assert abs(fit[0]) > 0 and numpy.abs(numpy.polyval(fit, values) - pixels).max() < 0.5, plot.name


def look(text: str, folder: Path) -> tuple[dict[str, Any], str]:
    """What Chromium, without a network, makes of a page, and what it said."""
    # Tables are shown: what is not has no place.
    text = text.replace("<details>", "<details open>").replace("</body>", PROBE + "</body>")
    (folder / "page.html").write_text(text, encoding="utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr "
        "--window-size=1200,900 --dump-dom"
    )
    assert CHROMIUM is not None
    command = [CHROMIUM, *flags.split(), "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'user'}"]
    done = subprocess.run(
        [*command, "--dump-dom", (folder / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-1000:] + done.stderr[-1000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(found.group(1).replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")), console
