"""What a reader sees: the numbers of the files, text as text, runs that change, and nothing beyond the edge."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from written_runs import HOSTILE, WrittenRun, rollout

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Serve = Callable[[Path], str]

PAGES = {
    "runs": "#/",
    "curves": "#/run/toy-001",
    "rollouts": "#/run/toy-001/rollouts",
    "group": "#/run/toy-001/group/1?sample=2&against=0",
    "prompts": "#/run/toy-001/prompts",
    "errors": "#/run/toy-001/errors",
    "timeline": "#/run/toy-001/timeline",
    "diagnosis": "#/run/toy-001/diagnosis",
    "settings": "#/run/toy-001/config",
    "log": "#/run/toy-001/log",
    "compare": "#/compare?runs=toy-001,other-with-a-rather-long-name-001",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; texts that are long and hostile, and answers that could not be judged."""
    place = tmp_path_factory.mktemp("runs")
    for name in ("toy", "other-with-a-rather-long-name"):
        made = WrittenRun(place, name).evaluate(0.25)
        for number in range(1, 4):
            text = f"{HOSTILE} {'unbreakable' * 30} {number}"
            numbers = {"entropy": 0.5 / number, "staleness": 0.5, "staleness/1": 0.5, "a/long/name/of/a/metric": 1.0}
            made.step([[0.0, 1.0, 0.5, None], [1.0, 1.0, 0.0, 0.25]], text, **numbers)
        made.evaluate(0.75).finish()
    return place


@pytest.fixture(scope="module")
def address(serve: Serve, folder: Path) -> str:
    return serve(folder)


@pytest.mark.sentinel
def test_curves_equal_the_metrics(page: "Page", address: str, folder: Path) -> None:
    page.goto(f"{address}#/run/toy-001?metrics=reward,entropy")
    rows = [json.loads(line) for line in (folder / "toy-001" / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward", "entropy"):
        chart = page.locator(f'[data-chart="{name}"]')
        chart.get_by_role("button", name="table").click()
        shown = chart.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => cell.dataset.value ?? cell.textContent))"
        )
        written = {row["step"]: row for row in rows if row["kind"] == "step"}
        held = {row["step"]: row["avg"] for row in rows if row["kind"] == "eval"}
        for step, value, *other in shown:
            assert (
                value == (repr(written[int(step)][name]) if int(step) in written else "")
                or float(value) == (written[int(step)][name])
            )
            assert not other or (float(other[0]) if other[0] else None) == held.get(int(step))
        assert {int(row[0]) for row in shown} >= written.keys()


def test_charts_zoom_together_and_back(page: "Page", address: str, folder: Path) -> None:
    page.goto(f"{address}#/run/toy-001?metrics=reward,entropy")
    plot = page.locator('[data-chart="entropy"] .u-over')
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 20, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Whole run").click()
    page.get_by_text("Drag over a curve").wait_for()


def test_heat_equals_what_the_journal_has(page: "Page", address: str, folder: Path) -> None:
    page.goto(f"{address}#/run/toy-001/group/3?sample=2")
    (segment,) = rollout(3, 2, 0.0, version=1).segments
    tokens = page.locator(".tokens [data-i]")
    tokens.first.wait_for()
    values = tokens.evaluate_all("all => all.map(token => Number(token.dataset.value))")
    assert values == list(segment.logprobs)
    shades = tokens.evaluate_all("all => all.map(token => getComputedStyle(token).backgroundColor)")
    assert len(set(shades)) > 1
    page.get_by_role("radio", name="version").click()
    page.locator('.tokens [data-i="0"][data-value="1"]').wait_for()
    assert tokens.evaluate_all("all => all.map(token => Number(token.dataset.value))") == list(segment.versions)
    tokens.nth(1).hover()
    assert f"id {segment.tokens[1]}" in page.locator(".token-facts").inner_text()


@pytest.mark.parametrize("place", ["rollouts", "group", "errors"])
def test_hostile_text_stays_text(page: "Page", address: str, folder: Path, place: str) -> None:
    page.goto(f"{address}{PAGES[place]}")
    page.get_by_text("<script>document.title=").first.wait_for()
    assert page.locator("#app script, #app img").count() == 0
    assert "broken in" not in page.title()


def test_a_search_finds_and_says_how_far_it_looked(page: "Page", address: str, folder: Path) -> None:
    page.goto(f"{address}#/run/toy-001/rollouts")
    page.get_by_label("text").fill("Reverse 4")
    page.get_by_text("4 found; all 24 looked through").wait_for()
    assert page.locator(".sample").count() == 4 and "text=Reverse+4" in page.url
    page.get_by_role("button", name="Clear").click()
    page.get_by_text("1–24 of 24").wait_for()


def test_a_running_run_updates_by_itself(page: "Page", serve: Serve, tmp_path: Path) -> None:
    made = WrittenRun(tmp_path).step([[0.0, 1.0]])
    page.goto(serve(tmp_path))
    row = page.locator('[data-run="toy-001"]')
    row.get_by_text("running").wait_for()
    page.get_by_text("live", exact=True).wait_for()
    made.step([[1.0, 1.0]])
    row.get_by_text("2/4").wait_for()
    row.get_by_text("1.000").wait_for()
    WrittenRun(tmp_path, "later").finish()
    page.locator('[data-run="later-001"]').wait_for()
    made.finish()
    row.get_by_text("finished").wait_for()


def test_a_killed_run_is_shown_as_such(page: "Page", serve: Serve, tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from written_runs import WrittenRun\n"
        "run = WrittenRun(pathlib.Path(sys.argv[1])).step([[0.5]]); print('ready', flush=True); time.sleep(600)"
    )
    places = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": places}) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        try:
            page.goto(f"{serve(tmp_path)}#/run/toy-001")
            page.locator(".status.running").wait_for()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        page.locator(".status.crashed").wait_for()


def visit(page: "Page", address: str) -> None:
    """From outside, so that the page is loaded anew, and until there is something on it."""
    from playwright.sync_api import expect

    page.goto("about:blank")
    page.goto(address)
    page.locator("main").get_by_text(re.compile(r"\w")).first.wait_for()
    expect(page.locator("[aria-busy]")).to_have_count(0)


def test_a_phone_needs_no_sideways_scrolling(page: "Page", address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for name, place in PAGES.items():
        visit(page, f"{address}{place}")
        assert page.evaluate("document.documentElement.scrollWidth") == 390, name


_FAINT = """() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const shine = ([r, g, b]) => {
    const line = (v) => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const [x, y, z] = [r, g, b].map(line);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    const shown = walk.currentNode.data.trim() && element.getClientRects().length;
    if (!shown || element.closest(":disabled, .hidden")) continue;
    const [a, b] = [shine(parse(getComputedStyle(element).color)), shine(ground(element))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    const text = walk.currentNode.data.slice(0, 40);
    if (contrast < 4.5) found.push(`${contrast.toFixed(2)} ${element.className}: ${text}`);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(page: "Page", address: str, folder: Path, scheme: str) -> None:
    """A contrast of 4.5 or more (WCAG AA), on every page."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    for place in PAGES.values():
        visit(page, f"{address}{place}")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.evaluate(_FAINT) == [], place


def test_everything_works_by_keyboard(page: "Page", address: str, folder: Path) -> None:
    page.goto(address)
    page.locator("[data-row]").first.wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("#/run/"))
    page.locator("nav.pages").wait_for()
    page.keyboard.press("2")
    page.wait_for_url(re.compile("/rollouts"))
    page.locator(".sample").first.wait_for()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.matches('[data-search]')")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/group/5"))
    page.locator(".tokens").wait_for()
    page.keyboard.press("[")
    page.wait_for_url(re.compile("/group/4"))
    page.keyboard.press("u")
    page.wait_for_url(re.compile("/rollouts"))
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")


@pytest.fixture(scope="module")
def seeds(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two runs that differ in their seed, and another one; steps of 60 seconds."""
    place = tmp_path_factory.mktemp("seeds")
    for name, seed, lr in (("one", 1, 1e-5), ("two", 2, 1e-5), ("far", 1, 2e-5)):
        made = WrittenRun(place, name, run={"seed": seed}, training={"lr": lr})
        for number in range(1, 4):
            made.step([[0.0, 0.1 * seed * number]], step_seconds=60.0, generated_tokens=500_000.0)
        made.finish()
    return serve(place)


def test_the_list_is_searched_sorted_and_tagged(page: "Page", seeds: str) -> None:
    page.goto(f"{seeds}#/run/two-001")
    page.get_by_role("button", name="add tags or a note").click()
    page.get_by_label("tags, with commas between them").fill("baseline")
    page.get_by_label("note", exact=True).fill("<b>mine</b>")
    page.get_by_role("button", name="Save").click()
    page.locator(".notes .chip", has_text="baseline").wait_for()
    assert page.locator(".notes b").count() == 0, "what a reader wrote is text too"
    page.goto(f"{seeds}#/?tag=baseline")
    page.locator('[data-run="two-001"]').wait_for()
    assert page.locator("[data-run]").count() == 1
    page.goto(f"{seeds}#/?sort=name&order=up")
    page.locator("[data-run]").nth(2).wait_for()
    assert page.locator("[data-run]").evaluate_all("rows => rows.map(row => row.dataset.run)") == [
        "far-001", "one-001", "two-001",
    ]  # fmt: skip
    page.get_by_label("search").fill("mine")
    page.locator("h1", has_text="1 of 3").wait_for()


def test_seeds_are_one_curve_over_minutes_that_can_be_downloaded(page: "Page", seeds: str) -> None:
    page.goto(f"{seeds}#/compare?runs=one-001,two-001,far-001&metrics=reward&over=time&seeds=together")
    chart = page.locator('[data-chart="reward"]')
    chart.locator(".legend b", has_text="0.225").wait_for()  # the numbers come after the frame
    with page.expect_download() as download:
        chart.get_by_role("button", name="Download reward").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("minutes,") and lines[0].count("low") == 1
    times, means, lows, highs = zip(*(map(float, line.split(",")[:4]) for line in lines[1:]), strict=True)
    assert times == (1.0, 2.0, 3.0)
    assert means == pytest.approx((0.075, 0.15, 0.225))  # of (0, 0.1 k) and (0, 0.2 k)
    assert (highs[2] - lows[2]) / 2 == pytest.approx(0.075 * 2**0.5)  # one standard deviation of 0.15 and 0.3


def test_a_run_that_does_not_exist_has_no_pages(browser: "Browser", seeds: str) -> None:
    page = browser.new_page()  # not `page`: the browser itself writes to the console what is not found
    page.goto(f"{seeds}#/run/none-001")
    page.get_by_text("no run 'none-001'").wait_for()
    assert page.locator("nav.pages").count() == 0
    page.close()


def test_filters_fold_on_a_phone_and_answers_have_their_reference(page: "Page", seeds: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{seeds}#/run/one-001/rollouts")
    page.locator(".reference", has_text="answer").first.wait_for()
    bar = page.locator("form.filters").bounding_box()
    assert bar is not None and bar["height"] < 160
    page.locator("summary", has_text="Filters").click()
    page.get_by_label("trained on?").select_option("dropped")
    page.get_by_text("Nothing passes these filters").wait_for()
