"""The page at /, in a real browser: the chat, the dashboard, and that it asks nobody else.

Needs Chromium (Debian: apt install chromium); without one these tests are skipped, unless
INFLIGHT_REQUIRE_TOOLS is set, as it is in CI.
"""

import os
import re
import shutil

import pytest
from inflight import TINY_MODEL, Server
from playwright.sync_api import expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def needed(*names):
    """The path of the first of these programs; skips the test if there is none."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None and not os.environ.get("INFLIGHT_REQUIRE_TOOLS"):
        pytest.skip(f"needs {names[0]}")
    assert found, f"needs one of {names}"
    return found


@pytest.fixture(scope="module")
def browser():
    path = needed(*BROWSERS)
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not work for root, whom CI runs as.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def page(browser, server, request):
    """The page, which must neither complain nor ask anybody but its server."""
    size = {"width": 900, "height": 700}
    context = browser.new_context(color_scheme=request.param, viewport=size)
    page = context.new_page()
    complaints, asked = [], []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else 0)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    yield page
    context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith((server.url, "data:"))] == []


def set_parameters(page, **values):
    page.get_by_text("Parameters").click()
    for name, value in values.items():
        page.fill(f"#{name}", str(value))


def metric(server, name):
    text = server.request("GET", "/metrics")[2]
    return sum(float(line.split()[-1]) for line in re.findall(rf"^{name}\{{.*$", text, re.M))


def test_chat_streams_an_answer_and_tells_how_fast(page, server):
    set_parameters(page, max_tokens=24, temperature=0)
    before = metric(server, "inflight_generated_tokens_total")
    page.fill("#prompt", "Name the colours of the rainbow, one after the other.")
    page.keyboard.press("Enter")
    facts = page.locator(".message.assistant .facts")
    expect(facts).to_contain_text("tokens/s", timeout=60_000)
    num_tokens = int(re.match(r"(\d+) tokens", facts.text_content())[1])
    assert 1 < num_tokens <= 24
    assert metric(server, "inflight_generated_tokens_total") == before + num_tokens
    assert len(page.locator(".message.assistant").text_content()) > len(facts.text_content())
    # The next turn knows the one before: a longer prompt.
    page.fill("#prompt", "Again.")
    page.click("#send")
    expect(page.locator(".message.assistant .facts")).to_have_count(2, timeout=60_000)


def test_escape_stops_an_answer(page, server):
    set_parameters(page, max_tokens=4000, temperature=1, top_p=1)
    page.fill("#prompt", "Tell a very long story about a very long road. Never stop telling.")
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator(".message.assistant")).not_to_be_empty(timeout=60_000)
    page.keyboard.press("Escape")
    expect(page.locator(".message.assistant .facts")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    page.wait_for_function(
        "fetch('/metrics').then(r => r.text()).then(t => /requests_running\\{.*\\} 0\\n/.test(t))"
    )


def test_dashboard_moves_and_equals_the_metrics(page, server, client, model):
    page.click("#tab-dashboard")
    generated = page.locator("#generated")
    value = lambda: f"{metric(server, 'inflight_generated_tokens_total'):.0f}"
    expect(generated).to_have_text(value(), timeout=10_000)
    before = generated.text_content()
    client.completions.create(
        model=model, prompt="On the road", max_tokens=20, extra_body={"ignore_eos": True}
    )
    expect(generated).to_have_text(value(), timeout=10_000)
    assert int(generated.text_content()) == int(before) + 20
    expect(page.locator("#blocks")).to_have_text(
        f"{metric(server, 'inflight_kv_cache_blocks'):.0f}"
    )
    expect(page.locator("#inter")).to_contain_text("ms")
    # Something is drawn: not all pixels of the timeline are alike.
    drawn = page.evaluate(
        """() => {
            const canvas = document.getElementById("timeline");
            const { data } = canvas.getContext("2d")
                .getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )
    assert drawn > 3


def test_views_are_reached_by_keyboard(page):
    page.locator("#tab-chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#dashboard")).to_be_visible()
    expect(page.locator("#tab-dashboard")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#prompt")).to_be_visible()


def test_the_page_asks_for_a_key_that_the_server_wants(browser):
    with Server(TINY_MODEL, "--api-key", "sk-page") as guarded:
        page = browser.new_page()
        page.goto(guarded.url)
        expect(page.locator("#key")).to_be_visible()
        page.fill("#api_key", "sk-wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key_refused")).to_have_text("refused")
        page.fill("#api_key", "sk-page")
        page.keyboard.press("Enter")
        expect(page.locator("#key")).to_be_hidden()
        expect(page.locator("#model")).not_to_be_empty()
        set_parameters(page, max_tokens=2)
        page.fill("#prompt", "a")
        page.click("#send")
        expect(page.locator(".message.assistant .facts")).to_have_count(1, timeout=60_000)
        page.click("#tab-dashboard")
        expect(page.locator("#generated")).not_to_have_text("0", timeout=10_000)
        # It lives as long as the tab, and in no cookie.
        page.reload()
        expect(page.locator("#model")).not_to_be_empty()
        assert page.context.cookies() == []
        page.close()


def test_the_docs_list_every_endpoint(browser, tmp_path):
    # With a folder for files: then there are the most endpoints, and one that takes a form.
    with Server(TINY_MODEL, "--files-dir", tmp_path) as running:
        check_docs(browser, running)


def check_docs(browser, server):
    page, complaints = browser.new_page(), []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else 0)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{server.url}/docs")
    paths = server.request("GET", "/openapi.json")[2]["paths"]
    operations = page.locator("#operations > details")
    expect(operations).to_have_count(sum(len(methods) for methods in paths.values()))
    page.get_by_text("POST /v1/files").click()
    expect(page.locator("#createFile")).to_contain_text("purpose (required)")
    page.get_by_text("POST /v1/chat/completions").click()
    chat = page.locator("#createChatCompletion")
    expect(chat).to_contain_text("temperature")
    expect(chat.get_by_text("messages", exact=True)).to_be_visible()
    chat.get_by_role("link", name="ChatMessage").first.click()
    expect(page.locator("#schema-ChatMessage")).to_have_attribute("open", "")
    page.close()
    assert complaints == []


def test_the_page_is_small_and_whole(tiny):
    text, size = tiny.request("GET", "/")[2], 0
    parts = re.findall(r'(?:src|href)="(/web/[^"]+)"', text)
    assert len(parts) == 3
    for part in ["/", "/docs", "/web/docs.js", *parts]:
        status, _, text = tiny.request("GET", part)
        assert status == 200
        size += len(text.encode())
    assert size < 200_000, "what the binary carries should not grow beyond that"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(browser, tiny, width):
    page, complaints = browser.new_page(viewport={"width": width, "height": 800}), []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else 0)
    tiny.post("/v1/completions", {"prompt": [9] * 30, "max_tokens": 5})
    for path in ["/", "/#dashboard", "/docs", "/debug/timeline?format=html"]:
        page.goto(f"{tiny.url}{path}")
        page.wait_for_load_state("load" if "dashboard" in path else "networkidle")
        for summary in page.locator("main > details > summary, #operations summary").all()[:3]:
            if summary.is_visible():
                summary.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    page.close()
    assert complaints == []


def test_a_timeline_tells_a_stranger_why_the_device_was_idle(browser, tiny):
    tiny.post("/v1/completions", {"prompt": [9] * 30, "max_tokens": 20})
    state = tiny.request("GET", "/debug/state")[2]
    page = browser.new_page()
    page.goto(f"{tiny.url}/debug/timeline?seconds=5&format=html")
    expect(page.locator("svg .bubble")).not_to_have_count(0)
    meanings = {cause["name"]: cause["meaning"] for cause in state["steps"]["causes"].values()}
    told = page.locator("li").all_text_contents()
    assert told
    for text in told:
        name = max((name for name in meanings if text.startswith(name)), key=len)
        assert meanings[name] in text
    page.close()
