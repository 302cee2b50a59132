"""The page in a real browser: it renders, says no error, asks for nothing, answers hover and tap.

Skipped without a browser; .ci/run installs Debian's headless Chromium.
"""

from __future__ import annotations

import pytest
from browser import Browser, find_browser
from page_runs import hostile_words, trained_run

from gnnpipe.cli.main import main

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium (apt-get install chromium-headless-shell)"
)

PHONE, DESK = (390, 800), (1200, 900)
BAR = "document.querySelector('#gantt rect.span[data-tip^=\"F \"]')"


@pytest.fixture(scope="module")
def page_url(tmp_path_factory):
    run = trained_run(tmp_path_factory.mktemp("run") / "run", predicted=True)
    assert main(["report", str(run)]) == 0
    return (run / "report.html").as_uri()


def middle(browser, what):
    browser.run(f"{what}.scrollIntoView({{block: 'center', inline: 'center'}})")
    # Scrolling hides the tip; that event comes with the next frame.
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    box = browser.run(
        f"(({{x, y, width, height}}) => [x, y, width, height])({what}.getBoundingClientRect())"
    )
    return box[0] + box[2] / 2, box[1] + box[3] / 2


def tip(browser):
    return browser.run("document.getElementById('tip').hidden ? null : tip.textContent")


@pytest.mark.slow
@pytest.mark.parametrize("screen", [PHONE, DESK], ids=["phone", "desk"])
def test_it_renders_without_error_and_asks_for_nothing(page_url, tmp_path, screen):
    with Browser(tmp_path / "profile", *screen) as browser:
        browser.open(page_url)
        assert browser.run("document.querySelectorAll('section').length") == 8
        assert browser.run("document.querySelectorAll('polyline').length") >= 4
        # Every figure and the timeline have a size, and nothing is wider than the screen.
        sizes = browser.run(
            "[...document.querySelectorAll('figure > svg, #gantt')].map(e => e.clientWidth || "
            "e.getBoundingClientRect().width)"
        )
        assert min(sizes) > 200
        assert browser.run("document.documentElement.scrollWidth") <= screen[0]
        assert browser.complaints() == []
        assert [url for url in browser.requests() if not url.startswith("data:")] == [page_url]


@pytest.mark.slow
def test_the_timeline_answers_hover(page_url, tmp_path):
    with Browser(tmp_path / "profile", *DESK) as browser:
        browser.open(page_url)
        assert tip(browser) is None
        browser.mouse("mouseMoved", *middle(browser, BAR))
        words = tip(browser)
        assert words is not None
        for part in ("F ", "rank 0", "chunk ", "start ", "duration "):
            assert part in words
        browser.mouse("mouseMoved", 5, 5)
        assert tip(browser) is None
        assert browser.complaints() == []


@pytest.mark.slow
def test_the_timeline_answers_a_tap_and_the_slider(page_url, tmp_path):
    with Browser(tmp_path / "profile", *PHONE) as browser:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
        browser.open(page_url)
        width = browser.run("gantt.getBoundingClientRect().width")
        browser.run("wide.value = 8; wide.dispatchEvent(new Event('input'))")
        assert browser.run("gantt.getBoundingClientRect().width") == pytest.approx(8 * width)
        # The chart scrolls in its own box; the page stays as wide as the screen.
        assert browser.run("document.documentElement.scrollWidth") <= PHONE[0]
        browser.tap(*middle(browser, BAR))
        assert "duration " in (tip(browser) or "")
        assert browser.complaints() == []


@pytest.mark.slow
def test_words_from_the_folder_do_not_run(tmp_path):
    run = hostile_words(trained_run(tmp_path / "<img src=x onerror=window.ran=1>"))
    assert main(["report", str(run)]) == 0
    with Browser(tmp_path / "profile", *DESK) as browser:
        browser.open((run / "report.html").as_uri())
        assert browser.run("window.ran === undefined")
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.body.innerText.includes('<script>')")
        # Even a word that got through the escaping could not run: the policy refuses it.
        browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=ran=1>')")
        script = "s = document.createElement('script'); s.textContent = 'window.ran = 1'"
        browser.run(f"{script}; document.body.append(s); 0")
        assert browser.run("window.ran === undefined")
        assert browser.complaints() != []
