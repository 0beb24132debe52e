"""A report as a file in a browser: the numbers of the metrics, text as text, nothing asked for or beyond the edge."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_pages import _FAINT
from written_runs import HOSTILE, WrittenRun

from kitae.observe.machine import note_machine
from kitae.ui.report.page import make_report

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = WrittenRun(tmp_path_factory.mktemp("runs"), "toy-with-a-rather-long-name").evaluate(0.25)
    for number in range(1, 5):
        text = f"{HOSTILE} {'unbreakable' * 30} {number}"
        more = {"entropy": 0.5 / number, "reward/exact": 0.5, f"reward/{HOSTILE}": 0.25, "error_share": 0.25}
        made.step([[0.0, 1.0, 0.5, None], [1.0, number / 4, 0.0, 0.25]], text, first_error=HOSTILE, **more)
    folder = made.evaluate(0.75).finish()
    note_machine(folder)
    return folder


@pytest.fixture(scope="module")
def address(run: Path) -> str:
    return make_report(run, run.parent / "report.html").as_uri()


def test_curves_equal_the_metrics(page: "Page", address: str, run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    held = {row["step"]: row["avg"] for row in rows if row["kind"] == "eval"}
    page.goto(address)
    page.get_by_text("The numbers of these curves").click()
    table = page.locator("details table").first
    titles = table.locator("th").all_inner_texts()
    cells = table.locator("tbody tr").evaluate_all("rows => rows.map(row => [...row.children].map(c => c.textContent))")
    for name, key in (("training reward", "reward"), ("entropy", "entropy"), ("error_share", "error_share")):
        shown = [float(row[titles.index(name)]) for row in cells]
        assert shown == pytest.approx([row[key] for row in steps], rel=1e-5)
    first = page.locator("figure.chart").first
    for step in (0, 2, 4):
        first.locator(f'.at[data-step="{step}"] .hit').hover()
        said = first.locator(f'.at[data-step="{step}"] .read')
        assert said.is_visible() and f"step {step} " in (said.text_content() or "")
        if step in held:
            assert f"held out {held[step]:g} [" in (said.text_content() or "")
        others = first.locator(".read").evaluate_all(
            "all => all.filter(e => getComputedStyle(e).visibility == 'visible')"
        )
        assert len(others) == 1


@pytest.mark.sentinel
def test_it_asks_for_nothing_and_runs_nothing(page: "Page", address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    assert asked == [address]
    assert page.locator("script, img, link, iframe, object").count() == 0
    assert page.title() == "toy-with-a-rather-long-name-001 · Kitae"
    assert page.get_by_text("<script>document.title=").count() > 4


def test_a_script_that_got_in_would_not_run(page: "Page", address: str, tmp_path: Path, run: Path) -> None:
    """The policy holds by itself, were something not escaped."""
    text = (run.parent / "report.html").read_text("utf-8").replace("</main>", f"{HOSTILE}</main>")
    (tmp_path / "spoilt.html").write_text(text, "utf-8")
    messages: list[str] = []
    other = page.context.new_page()
    other.on("console", lambda message: messages.append(message.text))
    other.goto((tmp_path / "spoilt.html").as_uri())
    assert other.locator("script").count() == 1 and "broken in" not in other.title()
    assert any("Content Security Policy" in message for message in messages)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(page: "Page", address: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(address)
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate(_FAINT) == []
    page.emulate_media(color_scheme=scheme, media="print")  # type: ignore[arg-type]
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"


def test_a_phone_needs_no_sideways_scrolling(page: "Page", address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(address)
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
