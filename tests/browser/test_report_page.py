"""A report as a file in a browser: the numbers of the metrics, text as text, no request and nothing beyond the edge."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_pages import _FAINT
from written_runs import HOSTILE, WrittenRun

from kitae.observe.machine import note_machine
from kitae.ui.report_file import make_report

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


def visit(page: "Page", address: str) -> None:
    page.goto(address)
    page.locator("footer").wait_for()
    for summary in page.locator(".part > details > summary").all():
        summary.click()


def test_curves_equal_the_metrics(page: "Page", address: str, run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows if row["kind"] == "step"}
    held = {row["step"]: row["avg"] for row in rows if row["kind"] == "eval"}
    visit(page, address)
    for name in ("reward", "entropy", "error_share"):
        chart = page.locator(f'[data-chart="{name}"]')
        chart.get_by_role("button", name="table").click()
        shown = chart.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => cell.dataset.value ?? cell.textContent))"
        )
        values = {int(step): float(value) for step, value, *_ in shown if value}
        assert values == pytest.approx({step: row[name] for step, row in steps.items()}, rel=1e-5)
        if name == "reward":
            assert {int(step): float(value) for step, _, value in shown if value} == held


def test_other_metrics_can_be_drawn(page: "Page", address: str) -> None:
    visit(page, address)
    page.locator(".picker summary").click()
    page.get_by_label("reward/exact").check()
    page.locator('[data-chart="reward/exact"] canvas').wait_for()


def test_every_part_is_on_the_page(page: "Page", address: str) -> None:
    visit(page, address)
    assert page.locator(".part > h2").all_inner_texts() == [
        *("Diagnosis", "Curves", "Evaluations", "Before and after, on the same prompts", "Best answers"),
        *("Worst answers", "Groups", "Where the time went", "Settings", "What happened"),
    ]
    assert "0.250 → 0.750" in page.locator(".stats").inner_text()
    assert page.locator(".evaluated tbody tr").all_inner_texts() == [
        "0\t0.250 [0.150, 0.350]",
        "4\t0.750 [0.650, 0.850]",
    ]


@pytest.mark.sentinel
def test_it_asks_for_nothing(page: "Page", address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    visit(page, address)
    assert asked == [address]
    assert page.locator("img, link, iframe, object").count() == 0 and page.locator("#app script").count() == 0
    assert page.title() == "toy-with-a-rather-long-name-001 · Kitae"
    assert page.get_by_text("<script>document.title=").count() > 4


def test_the_policy_stops_other_scripts_and_requests(page: "Page", address: str, tmp_path: Path, run: Path) -> None:
    """The policy holds by itself, were something not escaped."""
    text = (run.parent / "report.html").read_text("utf-8").replace("</body>", f"{HOSTILE}</body>")
    (tmp_path / "spoilt.html").write_text(text, "utf-8")
    messages: list[str] = []
    other = page.context.new_page()
    other.on("console", lambda message: messages.append(message.text))
    other.goto((tmp_path / "spoilt.html").as_uri())
    other.locator("footer").wait_for()
    assert "broken in" not in other.title()
    assert any("Content Security Policy" in message for message in messages)
    sent = "fetch('https://example.com/').then(() => 'sent', () => 'refused')"
    assert other.evaluate(sent) == "refused"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(page: "Page", address: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    visit(page, address)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate(_FAINT) == []
    page.emulate_media(color_scheme=scheme, media="print")  # type: ignore[arg-type]
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_a_phone_needs_no_sideways_scrolling(page: "Page", address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, address)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
