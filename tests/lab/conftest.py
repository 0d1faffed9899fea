"""Fixtures of tests that read a page in Chromium, without a window and without a network."""

import pytest

from lab.studies.browser import CHROMIUM, FLAGS


@pytest.fixture(scope="module")
def browser():
    from playwright import sync_api

    # Without a window, and with a fresh profile: both are playwright's own defaults.
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Open a page; at the end nothing may have been logged, thrown or asked of the network."""
    contexts, complaints = [], []

    def requested(request):
        if not request.url.startswith(("file:", "data:")):
            complaints.append(request.url)

    def visit(address, *, width=1280, height=900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url))
        page.on("request", requested)
        page.goto(address)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []
