"""The page in a real browser: what a visitor does with a pointer, a keyboard, a file, and no patience."""

import io
import json
import shutil
import subprocess
import tarfile
import time

import pytest
import torch
from PIL import Image

from page_browser import CHROMIUM, DRIVER, open_browser, resize
from page_server import Server, wait, workers

pytest.importorskip("selenium")
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")

VIEWS = ("draw", "restore", "generate", "inside", "segment")
AXE = "axe-core@4.14.0"


class Page:
    """The page in a browser, at one of its views."""

    def __init__(self, browser, server):
        self.browser, self.server = browser, server
        browser.get_log("browser")
        browser.get(server.address)
        self.until(lambda: not self.all("#loading")[0].is_displayed())
        self.view = "draw"

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        (found,) = self.all(f"#view-{self.view} {selector}")
        return found

    def open(self, view):
        self.browser.find_element(By.ID, f"tab-{view}").click()
        self.view = view

    def until(self, condition, patience=30):
        wait(condition, patience)

    @property
    def status(self):
        return self.one(".status").text

    def settled(self):
        self.until(lambda: self.status.startswith(("Settled", "Not settled", "Done")))

    def played(self):
        """Wait until the last step is shown."""

        def at_end():
            step, _, last = self.one(".player output").text.split()
            return step == last

        self.until(at_end)

    def choose(self, name, value):
        select = self.one(f"[name={name}]")
        self.browser.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'));"
            "arguments[0].dispatchEvent(new Event('change'))",
            *(select, value),
        )

    def stroke(self, selector, *points):
        """Drag over an element; points are offsets from its middle, relative to its size."""
        element = self.one(selector)
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        width, height = element.size["width"], element.size["height"]
        places = [(int(x * width), int(y * height)) for x, y in points]
        actions = ActionChains(self.browser, duration=20).move_to_element_with_offset(element, *places[0])
        actions.click_and_hold()
        for (x, y), (before_x, before_y) in zip(places[1:], places, strict=False):
            actions.move_by_offset(x - before_x, y - before_y)
        actions.release().perform()

    def pixels(self, selector):
        """The gray levels of a canvas."""
        script = (
            "const c = arguments[0]; return [c.width, c.height,"
            "[...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].filter((_, i) => i % 4 === 0)]"
        )
        width, height, levels = self.browser.execute_script(script, self.one(selector))
        return torch.tensor(levels, dtype=torch.uint8).view(height, width)

    def problems(self):
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def browser():
    driver = open_browser()
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, server):
    resize(browser, 1200)
    found = Page(browser, server)
    yield found
    assert found.problems() == []
    browser.get("about:blank")
    wait(server.idle, 10)


SEVEN = ((-0.25, -0.3), (0.25, -0.3), (0.05, 0.0), (-0.05, 0.35))


def predicted(server, image):
    served = server.model("draw")
    with torch.no_grad():
        return int(served.original(served.prepared(image[None])).argmax(1))


def test_a_stroke_is_classified_and_its_residuals_are_drawn(page, server):
    page.settled()
    page.stroke(".sketch", *SEVEN)
    page.until(lambda: page.one(".status").text != "" and page.one(".player output").text)
    page.settled()
    seen = page.pixels(".seen")
    assert seen.shape == (28, 28)
    assert seen.max() == 255
    page.played()
    assert page.one(".bars .best").text == str(predicted(server, seen))
    steps = int(page.one(".player output").text.split()[-1])
    assert f"{steps} steps" in page.status
    curve = page.one(".residuals")
    assert len(curve.find_elements(By.CSS_SELECTOR, "circle")) == steps
    assert f"at step {steps}" in curve.get_attribute("aria-label")
    assert page.one(".maps0").get_property("width") > 2
    assert "Proven" in page.one(".certified").text or "Nothing is proven" in page.one(".certified").text


def test_solvers_can_be_changed_and_compared(page):
    page.settled()
    before = page.one(".player output").text
    page.choose("solver", "forward-backward")
    page.choose("second", "anderson")
    page.until(lambda: "Anderson: Settled" in page.status)
    assert "Forward–backward: " in page.status
    assert page.one(".player output").text != before
    assert page.one("figure.second").is_displayed()
    assert len(page.one(".residuals").find_elements(By.CSS_SELECTOR, "g.c1 circle")) > 2
    page.choose("solver", "broyden")
    assert not page.one("[data-control=step]").is_displayed()  # it has no step size


def test_the_keyboard_reaches_everything(page):
    page.settled()
    page.browser.find_element(By.ID, "tab-draw").send_keys(Keys.ARROW_LEFT)
    assert page.browser.find_element(By.ID, "tab-segment").get_attribute("aria-selected") == "true"
    page.browser.switch_to.active_element.send_keys(Keys.HOME)
    assert page.browser.switch_to.active_element.get_attribute("id") == "tab-draw"
    reached = set()
    for _ in range(60):
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
        active = page.browser.switch_to.active_element
        reached.add(active.get_attribute("aria-label") or active.get_attribute("name") or active.tag_name)
        if active.get_attribute("aria-label") == "Example: 7":
            active.send_keys(Keys.ENTER)
            page.settled()
    assert {"Example: 0", "Example: 9", "clear", "solver", "second", "tolerance", "steps", "Step", "radius"} <= reached


def test_an_attack_is_drawn_in_the_disc(page):
    page.settled()
    page.until(lambda: page.one(".attack").is_displayed())
    page.choose("radius", "2")
    page.until(lambda: "A change of length" in page.one(".verdict").text)
    assert len(page.one(".disc").find_elements(By.CSS_SELECTOR, "circle.dot")) == 22
    assert page.pixels(".attacked").float().std() > 0


def test_a_brushed_image_is_restored(page):
    page.open("restore")
    page.until(lambda: len(page.all("#view-restore .thumb")) == 6)
    page.choose("steps", "20")
    page.stroke(".brush", (-0.2, 0), (0.2, 0))
    page.one("[name=solve]").click()
    page.settled()
    page.played()
    given, restored, truth = (page.pixels(f".{name}") for name in ("given", "image0", "truth"))
    hidden = given != truth
    assert 20 < hidden.sum() < 300
    assert bool((restored[~hidden] == truth[~hidden]).all())
    assert "dB" in page.one(".psnr0").text
    assert "Adam" in page.one(".costs").get_attribute("aria-label")


def test_a_wrong_upload_gets_a_sentence_beside_its_control(page, tmp_path):
    page.open("restore")
    page.until(lambda: len(page.all("#view-restore .thumb")) == 6)
    (tmp_path / "notes.png").write_text("no image")
    field = page.one("[name=upload]")
    field.send_keys(str(tmp_path / "notes.png"))
    page.until(lambda: page.all("#view-restore .error"))
    error = page.one(".error")
    assert "not an image that can be read" in error.text
    assert error.get_attribute("role") == "alert"
    assert field.get_attribute("aria-describedby") == error.get_attribute("id")
    assert error.find_element(By.XPATH, "..").get_attribute("data-control") == "upload"
    Image.linear_gradient("L").save(tmp_path / "ramp.png")
    field.send_keys(str(tmp_path / "ramp.png"))
    page.until(lambda: page.one(".upload-note").text == "256 x 256 pixels, resized to 28 x 28.")
    assert page.all("#view-restore .error") == []
    assert page.pixels(".truth")[27, 14] > 200


def test_an_error_of_an_uploaded_image_is_beside_the_upload(page, tmp_path):
    page.open("segment")
    page.settled()
    Image.new("RGB", (500, 1)).save(tmp_path / "thin.png")
    page.one("[name=upload]").send_keys(str(tmp_path / "thin.png"))
    page.until(lambda: page.all("#view-segment .error"))
    error = page.one(".error")
    assert error.text.endswith("The image is smaller than 16 x 16 pixels.")
    assert error.find_element(By.XPATH, "..").get_attribute("data-control") == "upload"
    assert page.browser.get_log("browser")  # of the status 400
    page.all("#view-segment .thumb")[0].click()
    page.settled()
    assert page.all("#view-segment .error") == []


def test_samples_can_be_walked_between(page):
    page.open("generate")
    page.settled()
    page.until(lambda: page.one(".between").get_property("width") == 28)
    first = page.pixels(".between")
    page.choose("share", "1")
    page.until(lambda: not torch.equal(page.pixels(".between"), first))
    middle = "const s = arguments[0]; s.value = 0.5; s.dispatchEvent(new Event('input')); arguments[1].click()"
    end, tab = page.pixels(".between"), page.browser.find_element(By.ID, "tab-draw")
    page.browser.execute_script(middle, page.one("[name=share]"), tab)  # the view is left at once
    page.open("generate")
    page.until(lambda: not torch.equal(page.pixels(".between"), end))
    page.one("[name=sample]").click()
    page.until(lambda: page.one("[name=seed]").get_property("value") == "1")
    page.settled()


def test_inside_and_segment_show_their_curves(page):
    page.open("inside")
    page.settled()
    assert "without" in page.one(".objectives").get_attribute("aria-label")
    assert len(page.all("#view-inside .heat canvas")) == 6
    assert "λ = 0.01" in page.all("#view-inside .note")[0].text
    page.open("segment")
    page.settled()
    assert page.one(".overlay").get_property("width") == 64
    assert "scale 2" in page.one(".residuals").get_attribute("aria-label")
    assert page.all("#view-segment .legend li")


def test_the_solve_without_diversity_can_be_hidden(page):
    page.open("inside")
    page.settled()
    curve = page.one(".objectives")
    page.one("[name=off]").click()
    page.until(lambda: "without" not in curve.get_attribute("aria-label"))
    assert not page.one(".lane[data-lane='1']").is_displayed()
    page.one("[name=off]").click()
    page.until(lambda: "without" in curve.get_attribute("aria-label"))
    assert len(curve.find_elements(By.CSS_SELECTOR, "g.c1 circle")) > 1


def test_clear_leaves_nothing_of_the_digit(page):
    page.settled()
    page.one("[name=clear]").click()
    assert page.pixels(".seen").max() == 0
    assert page.pixels(".maps0").max() == 0
    assert page.status == ""


# Impatience


def test_twenty_quick_clicks_end_with_the_last(page, server):
    page.settled()
    buttons = page.all("#view-draw .examples button")
    page.browser.execute_script("for (let k = 0; k < 20; k++) arguments[0][k % 10].click()", buttons)
    page.until(lambda: server.idle() and page.status.startswith("Settled"))
    page.played()
    assert page.one(".bars .best").text == str(predicted(server, page.pixels(".seen")))
    assert workers() == 2


@pytest.mark.parametrize("slow", [0.12], indirect=True)  # the player is faster, and waits for each step
@pytest.mark.parametrize("view", ["segment", "inside"])
def test_a_solve_that_replaces_another_is_played_to_its_end(page, server, slow, view):
    page.open(view)
    page.until(lambda: len(page.all(f"#view-{view} .thumb")) == 6)
    first, second = page.all(f"#view-{view} .thumb")[1:3]
    first.click()
    page.until(lambda: server.page.queue.running)
    second.click()
    time.sleep(0.2)
    page.settled()
    page.played()
    shown, _, last = page.one(".player output").text.split()
    assert shown == last != "1"
    page.until(lambda: page.one(".player button").text == "Play", 5)


def test_the_last_step_of_a_player_is_the_last_step_of_the_solve(page):
    for view in ("generate", "segment"):
        page.open(view)
        page.settled()
        page.played()
        steps = page.one(".player output").text.split()[-1]
        assert f"ettled after {steps} step" in page.status


def test_a_view_that_was_left_in_mid_solve_says_so(page, server, slow):
    page.settled()
    page.choose("tolerance", "-7")
    page.choose("solver", "forward-backward")
    page.until(lambda: server.page.queue.running and page.one(".player output").text)
    page.open("segment")
    page.settled()
    page.open("draw")
    assert page.status == "Stopped, since another view was opened."
    page.until(lambda: page.one(".player button").text == "Play")


def test_a_view_that_was_left_before_its_examples_came_asks_for_them_again(page):
    script = "for (const name of ['restore', 'draw']) document.getElementById(`tab-${name}`).click()"
    page.browser.execute_script(script)
    page.open("restore")
    page.until(lambda: len(page.all("#view-restore .thumb")) == 6, 10)


@pytest.mark.parametrize("name", ["toString", "nothing", ""])
def test_an_unknown_view_in_the_address_opens_the_first(page, server, name):
    page.browser.get("about:blank")
    page.browser.get(f"{server.address.split('?')[0]}#{name}")
    page.until(lambda: page.one("h2").is_displayed(), 10)


def test_a_certified_radius_is_rounded_down(page):
    script = "const [given, done] = arguments; import('/static/draw.js').then(({ floor }) => done(given.map(floor)))"
    shown = page.browser.execute_async_script(script, [0.0999, 0.2461, 1.99, 12.7, 0, None])
    assert shown == ["0.099", "0.24", "1.9", "12", "0", "0"]


def test_stop_stops(page, server, slow):
    page.settled()
    page.choose("tolerance", "-7")
    page.choose("solver", "forward-backward")
    page.until(lambda: server.page.queue.running and page.one(".player output").text)
    page.one("[name=stop]").click()
    wait(server.idle, 5)
    assert page.status == "Stopped."
    assert not page.one("[name=stop]").is_enabled()


def test_a_reload_in_mid_solve_leaves_no_thread(page, server, slow):
    page.settled()
    page.choose("tolerance", "-7")
    page.choose("solver", "forward-backward")
    page.until(lambda: server.page.queue.running and page.one(".player output").text)
    (before,) = server.page.queue.running.values()
    page.browser.get("about:blank")
    wait(server.idle, 5)
    assert before.stopped.is_set()
    assert workers() == 2
    page.__init__(page.browser, server)
    page.settled()  # the page works again


def test_two_visitors_at_once(page, server, slow):
    other = open_browser()
    try:
        second = Page(other, server)
        for each in (page, second):
            each.settled()
            each.stroke(".sketch", *SEVEN)
            each.choose("tolerance", "-7")
            each.choose("solver", "forward-backward")
        page.until(lambda: len(server.page.queue.running) == 2)
        for each in (page, second):
            each.settled()
            assert each.one(".bars .best").text == str(predicted(server, each.pixels(".seen")))
    finally:
        other.quit()


def test_a_server_that_is_gone_gets_a_sentence(browser, runs):
    with Server(runs[:1]).running() as served:
        page = Page(browser, served)
        page.settled()
    page.choose("steps", "50")
    page.until(lambda: "The server does not answer" in page.status)
    browser.get("about:blank")


# Looks


def test_nothing_sticks_out_at_any_width(page):
    for view in VIEWS:
        page.open(view)
        page.settled() if view != "restore" else page.until(lambda: len(page.all("#view-restore .thumb")) == 6)
    for width in (360, 400, 820, 1600):
        resize(page.browser, width)
        for view in VIEWS:
            page.open(view)
            script = "const page = document.documentElement; return [page.scrollWidth, page.clientWidth]"
            inner, outer = page.browser.execute_script(script)
            assert inner <= outer, f"{view} at {width} pixels"


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """The source of axe-core."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("axe")
    packed = subprocess.run([npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=120)
    if packed.returncode:
        pytest.skip(f"npm pack {AXE} failed")
    with tarfile.open(folder / packed.stdout.strip().splitlines()[-1]) as archive:
        source = archive.extractfile("package/axe.min.js")
        assert source is not None
        return io.TextIOWrapper(source, "utf-8").read()


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_violation(page, axe, dark):
    resize(page.browser, 1200, dark=dark)
    page.browser.execute_script(axe)
    for view in VIEWS:
        page.open(view)
        page.until(lambda: page.server.idle() and page.one("form").is_displayed())
        time.sleep(0.1)
        script = "axe.run(document, {resultTypes: ['violations']}).then(arguments[0])"
        found = page.browser.execute_async_script(script)
        assert found["passes"], "nothing was checked"
        serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
        told = [(each["id"], [node["html"] for node in each["nodes"][:3]]) for each in serious]
        assert not told, f"{view}: {json.dumps(told, indent=1)}"
