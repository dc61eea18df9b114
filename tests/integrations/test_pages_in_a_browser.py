"""The pages that `sirtaki report` writes, and the site of the documents, in a real browser.

No script error; every plot of a report drawn, readable on a telephone, in light and dark.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest

from sirtaki.cli.__main__ import main

pytestmark = pytest.mark.integration

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WRITTEN = Path(__file__).parents[1] / "formats" / "written_by_0.1"

LOOK = """
<script>
window.addEventListener("load", () => {
  const luminance = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
    return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
  };
  const style = getComputedStyle(document.body);
  const look = (tries) => {
    const asked = [...document.querySelectorAll(".plotly-graph-div")];
    const plots = asked.map(plot => plot.querySelectorAll("svg path").length);
    // Plotly draws after the page has loaded, and a busy machine draws late
    if (tries > 0 && plots.includes(0)) return setTimeout(look, 50, tries - 1);
    const seen = {
      plots,
      words: asked.map(plot => plot.querySelector("svg text")).map(text => luminance(getComputedStyle(text).fill)),
      width: window.innerWidth,
      overflow: document.documentElement.scrollWidth - window.innerWidth,
      text: parseFloat(style.fontSize),
      contrast: Math.abs(luminance(style.color) - luminance(style.backgroundColor)),
      ground: luminance(style.backgroundColor),
    };
    const out = document.createElement("pre");
    out.id = "seen";
    out.textContent = JSON.stringify(seen);
    parent.document.body.append(out);
  };
  setTimeout(look, 300, 40);
});
</script>
"""


@pytest.fixture(scope="module", params=["trials.jsonl", "recorded"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(WRITTEN / request.param), "-o", str(page)]) == 0
    return page


def opened(address: str, folder: Path, *, width: int, dark: bool) -> str:
    """Return the page after its scripts have run. A script error fails the test."""
    assert CHROMIUM is not None
    options = [
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking",
        "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=3000 --dump-dom",
        f"--window-size={width},2000 --blink-settings=preferredColorScheme={0 if dark else 1}",
    ]
    command = [CHROMIUM, *" ".join(options).split(), f"--user-data-dir={folder}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.findall(r".*:CONSOLE.*", done.stderr) == []
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian's package chromium)")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_report_is_drawn_and_readable(page: Path, width: int, dark: bool, tmp_path: Path) -> None:
    whole = opened(page.as_uri(), tmp_path / "profile", width=width, dark=dark)  # with its content security policy
    assert whole.count('class="main-svg"') >= page.read_text().count("Plotly.newPlot(")
    looked_at = tmp_path / "looked_at.html"
    text = re.sub(r"<meta http-equiv=.?Content-Security-Policy[^>]*>", "", page.read_text(), flags=re.IGNORECASE)
    # In a frame, because a window is at least 500 pixels wide.
    looked_at.write_text(
        f'<iframe width="{width}" height="2000" style="border:0" srcdoc="{escape(text + LOOK)}"></iframe>'
    )
    found = re.search(
        r'<pre id="seen">(.*?)</pre>', opened(looked_at.as_uri(), tmp_path / "profile", width=width, dark=dark)
    )
    assert found is not None
    seen = json.loads(found[1])
    assert seen["plots"]
    assert 0 not in seen["plots"]
    assert (seen["width"], seen["overflow"] <= 0) == (width, True)
    assert seen["text"] >= 14
    assert seen["contrast"] > 0.6
    assert all(abs(words - seen["ground"]) > 0.6 for words in seen["words"])
    assert (seen["ground"] < 0.5) is dark


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian's package chromium)")
def test_the_site_is_searched_from_disk_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=Path(__file__).parents[2], env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    page = site / "how-to" / "watch.html"
    assert re.findall(r'<(?:script|link rel="stylesheet")[^>]*https?://[^>]*>', page.read_text()) == []
    shown = opened(f"{page.as_uri()}?q=preemptible", tmp_path / "profile", width=1440, dark=False)
    assert re.search(r"[1-9]\d* matching documents", shown)
