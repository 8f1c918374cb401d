"""The page of `sm-launch timeline`, in Chromium: with a mouse, keys, a small and a dark screen."""

import pytest
from timelines import HOSTILE, RUNNING, large, line, write

from launcher_tools import timeline as tool

RANKS = "#inner .rank .label:visible"
HOSTS = "#inner .host:visible"
WORDS = "#words"
CAUSE = HOSTILE.replace("\x1b", "\\x1b")


@pytest.fixture
def opened(visit, tmp_path):
    """Return what opens the page of some hosts' files, which loads nothing else."""

    def open_page(files, *how):
        folder = write(tmp_path / "logs", files)
        tool.write(tool.read(str(folder)), str(folder / "timeline.html"))
        return visit(folder / "timeline.html", *how, loads=())

    return open_page


def small(job="small"):
    text = line(0, "began", job=job, attempt=0) + line(1, "attempt")
    for rank in range(2):
        text += line(4, "started", rank=rank) + line(5 + rank, "runs", rank=rank)
    failed = {"cause": f"rank 1 {HOSTILE}", "exit_code": 1, "text": f"Traceback\n  {HOSTILE}"}
    text += line(9, "failed", rank=1, **failed) + line(9, "ended", rank=1, exit_code=1)
    text += line(9.5, "ending", cause=HOSTILE) + line(10, "ended", cause=HOSTILE, exit_code=1)
    return {"algo-1": text}


def size(page, selector):
    return page.locator(selector).first.bounding_box()


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen_and_names_of_hosts_are_whole(opened, width):
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent)"
    for files in (small(), large()):
        page = opened(files, width)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator(".host .label").evaluate_all(cut) == []
    assert page.get_by_text("1 restart, the last at 16:06:40: attempt 1 of 2 failed").is_visible()


def test_bars_of_a_lane_fill_it(opened):
    page = opened(small())
    track = size(page, ".rank .ticks, .rank .track")
    for lane in page.locator("#inner .rank").all():
        boxes = [bar.bounding_box() for bar in lane.locator(".bar").all()]
        assert sum(box["width"] for box in boxes) == pytest.approx(track["width"], abs=3)


def test_of_many_ranks_hosts_are_folded_and_unfold_one_by_one_or_all(opened):
    page = opened(large())
    assert page.locator(RANKS).count() == 0 and page.locator(HOSTS).count() == 16
    # All hosts on one screen, each with a strip for each of its ranks.
    assert page.locator(HOSTS).last.bounding_box()["y"] < 800
    strips = page.locator(".host").first.locator(".rank .track").all()
    assert [strip.bounding_box()["height"] for strip in strips] == [3] * 8
    page.get_by_text("algo-2 8 ranks").click()
    assert page.locator(RANKS).count() == 8
    page.get_by_role("button", name="Fold all").click()
    assert page.locator(RANKS).count() == 0
    page.get_by_role("button", name="Fold all").click()
    assert page.locator(RANKS).count() == 128


def test_the_filter(opened):
    page = opened(large())
    counts = {"3": 1, "0-7": 8, "rank 37": 1, "algo-1": 8, "algo-12 failed": 1, "waiting": 127}
    for text, count in {**counts, "absent": 1, "nothing": 0}.items():
        page.locator("#filter").fill(text)
        assert page.locator(RANKS).count() == count, text
        assert page.locator("#count").text_content() == f"{count} of 128 ranks"
    page.locator("#filter").clear()
    assert page.locator("#count").text_content() == ""


def test_words_are_shown_where_the_mouse_points(opened):
    page = opened(small())
    page.locator(".rank .bar.training").first.hover()
    assert page.locator(WORDS).text_content() == (
        "algo-1, rank 0: training for 4.5 s, from 16:00:05 to 16:00:09 UTC, attempt 1."
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_what_has_happened_is_a_list_with_what_belongs_to_it(opened, width):
    """The traceback, which rank, when: by UTC, without pointing at anything."""
    page = opened(small(), width)
    failed, ended = page.locator("#list li").all()
    text = failed.inner_text()
    assert text.startswith("16:00:09") and "failed algo-1, rank 1: rank 1 </script>" in text
    assert f"Traceback\n  {CAUSE}" in text
    assert ended.inner_text().split() == ["16:00:10", "ended", "algo-1:", "exit", "code", "1"]
    assert page.locator(".rank.root .label").inner_text() == "rank 1 \u00b7 exit 1"
    assert ", exit code 1, 2026-11-22 16:00:00 to 16:00:10 UTC, 10 s, 1 host, 2 ranks" in (
        page.locator("#how").inner_text()
    )
    assert "on SageMaker the log stream small/algo-1-" in page.locator("#output").inner_text()
    page.locator(".rank .icon.failed").click()
    assert page.locator("#list li.on").inner_text() == text
    ended.click()
    assert page.locator("#list li.on").inner_text() == ended.inner_text()


def test_the_traceback_of_a_rank_that_only_followed_is_folded(opened):
    follows = {"cause": "rank 0 failed with RuntimeError", "exit_code": 1, "text": "Traceback\n  y"}
    *rows, ended = small()["algo-1"].splitlines(keepends=True)
    rows += [line(9.2, "failed", rank=0, **follows), ended]
    page = opened({"algo-1": "".join(rows)}, 390)
    shown = page.locator("pre").evaluate_all("all => all.map(item => item.checkVisibility())")
    assert shown == [True, False, False]  # the reason, too
    assert page.locator("#list li").nth(1).inner_text().startswith("16:00:09 also failed algo-1, r")
    assert page.locator("#list li .icon").count() == 1
    page.locator("#list details").click()
    assert page.locator("pre").last.is_visible()


@pytest.mark.parametrize(
    ("last", "label"), [(2, "rank 0 \u00b7 failed once"), (1, "rank 0 \u00b7 exit 1")]
)
def test_a_rank_that_failed_before_a_restart_and_the_reason_are_in_sight(opened, last, label):
    """The job succeeded: its end says nothing of it. The label stays in its column."""
    text = RUNNING.replace('"job": "x"', '"job": "local-x"')
    text += line(5, "failed", rank=0, cause="algo-1, rank 0 failed: bad", exit_code=1)
    text += line(5, "ended", rank=0, exit_code=1)
    if last == 2:
        text += line(5.1, "restart", cause="attempt 1 of 2 failed: bad")
        text += line(6, "attempt", attempt=2) + line(7, "runs", rank=0, attempt=2)
        text += line(9, "ended", rank=0, attempt=2, exit_code=0)
    page = opened({"algo-1": text + line(9, "ended", attempt=last, exit_code=2 - last)}, 390)
    assert page.locator(".rank.root .label").inner_text() == label
    assert page.locator(".rank .label").evaluate("one => one.scrollWidth <= one.clientWidth")
    assert page.get_by_text("1 restart, the last at 16:00:05: attempt 1").count() == last - 1
    output = page.locator("#output").inner_text()
    assert output.startswith("Output of the last failure, algo-1, rank 0:")
    assert "SageMaker" not in output  # of a local job


@pytest.mark.parametrize("width", [1280, 390])
def test_the_axis_has_two_times_or_more_and_each_is_whole(opened, width):
    for seconds in (11, 14, 16, 31, 75, 200, 1000, 3000):
        for begin in (0, 3.3):
            text = line(begin, "began", job="x") + line(begin + seconds, "ended", exit_code=0)
            page = opened({"algo-1": text}, width)
            boxes = [tick.bounding_box() for tick in page.locator(".ticks span").all()]
            assert len(boxes) >= 2, (seconds, begin)
            ends = [box["x"] + box["width"] for box in boxes]
            assert all(end <= box["x"] for end, box in zip(ends, boxes[1:])), (seconds, begin)
            assert ends[-1] <= size(page, ".ticks")["x"] + size(page, ".ticks")["width"]
            assert "" not in page.locator(".ticks span").all_text_contents()
            page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_of_folded_hosts_a_failure_and_its_restart_can_be_told_apart(opened, width):
    page = opened(large(), width)
    host = page.locator(".host").nth(11)
    failed, restart = (size(host, f".icon.{kind}") for kind in ("failed", "restart"))
    assert restart["x"] - failed["x"] >= 12


@pytest.mark.parametrize("width", [1280, 390])
def test_no_mark_is_cut_off(opened, width):
    """Of a rank that saves in a job's last moment, too."""
    text = RUNNING + line(8, "stop", cause="SIGTERM") + line(10, "saved", rank=0)
    page = opened({"algo-1": text + line(10, "ended", exit_code=143)}, width)
    mark, chart = size(page, ".rank .icon.saved"), size(page, "#chart")
    assert mark["x"] + mark["width"] <= chart["x"] + chart["width"]


def test_a_mark_leads_to_its_own_event_of_several_with_the_same_words(opened):
    text = line(0, "began", job="x")
    for attempt in (1, 2, 3):
        at = {"attempt": attempt}
        text += line(10 * attempt, "attempt", **at) + line(10 * attempt + 1, "runs", rank=0, **at)
        text += line(10 * attempt + 5, "failed", rank=0, cause="rank 0 failed", **at)
    page = opened({"algo-1": text})
    page.locator(".rank .icon.failed").nth(1).click()
    (chosen,) = page.locator("#list li.on").all()
    assert chosen.inner_text().startswith("16:00:25")
    assert page.locator(".rank .icon.failed.on").count() == 1


def test_all_of_it_by_keys(opened):
    page = opened(large())
    page.locator(".host button").first.focus()  # as Tab does
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator(RANKS).count() == 8
    for _ in range(6):
        page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
        "algo-5, rank 37 \u00b7 exit 0: "
    )
    seen = []
    for _ in range(20):
        page.keyboard.press("ArrowRight")
        seen.append(page.locator(WORDS).text_content())
    assert seen[0].startswith("algo-5, rank 37: unknown for") and "training" in seen[3]
    assert any(words.startswith("16:03:09 UTC (190 s after the start): stalled") for words in seen)
    assert seen[-1] == seen[-2]  # the last one


def test_a_larger_scale_keeps_labels_in_sight(opened):
    page = opened(large())
    before = size(page, ".host .bar.training")["width"]
    for _ in range(3):
        page.locator("#in").click()
    assert size(page, ".host .bar.training")["width"] == pytest.approx(8 * before, rel=0.01)
    page.evaluate("document.getElementById('chart').scrollLeft = 3000")
    assert size(page, ".host .label")["x"] == size(page, "#chart")["x"]
    assert page.locator(".ticks span").all_text_contents()[0].startswith("16:00")
    for _ in range(4):
        page.locator("#out").click()
    assert size(page, ".host .bar.training")["width"] == pytest.approx(before, rel=0.01)


def test_what_comes_from_the_job_is_text(opened):
    page = opened(small(HOSTILE))
    assert page.title().startswith(f"{CAUSE} (1 host, 2 ranks) failed, 10 s: </script><script>")
    assert page.locator("#cause").text_content() == CAUSE
    assert page.locator("img").count() == 0 and "default-src 'none'" in page.content()


@pytest.mark.parametrize("width", [1280, 390])
def test_on_a_dark_screen_it_is_dark_and_can_be_read(opened, width):
    """Text on its background has the contrast that WCAG asks for (AA: 4.5)."""
    for scheme, is_dark in (("light", False), ("dark", True)):
        page = opened(small(), width, scheme)
        for selector in ("#how span", "#cause", ".rank .label", "#words", "#how b"):
            ink, ground = page.evaluate(CONTRAST, selector)
            assert (ground < 0.2) is is_dark, selector
            assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, selector


# The luminance of an element's text, and of what is behind it.
CONTRAST = """selector => {
  const luminance = color => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
  };
  let one = document.querySelector(selector);
  const ink = getComputedStyle(one).color;
  while (/, 0\\)$|transparent/.test(getComputedStyle(one).backgroundColor)) one = one.parentElement;
  return [luminance(ink), luminance(getComputedStyle(one).backgroundColor)];
}"""


def test_without_scripts_bars_and_events_are_there(browser, opened, tmp_path):
    opened(small())
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"file://{tmp_path}/logs/timeline.html")
    assert page.locator(".rank .bar.training:visible").count() == 2
    assert page.locator("#list li").first.inner_text().startswith("16:00:09")
    context.close()
