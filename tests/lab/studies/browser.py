"""What tests need that read a page in Chromium; the fixtures are in conftest.py."""

import importlib.util
import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="Chromium or playwright is not installed here",
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


# WCAG's contrast of every visible text against the first opaque ground behind it.
CONTRASTS = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = channels(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  return [...document.body.querySelectorAll("*")]
    .filter((e) => own(e) && e.checkVisibility() && !["SCRIPT", "OPTION"].includes(e.tagName))
    .map((e) => {
      const style = getComputedStyle(e);
      const ink = channels(e.namespaceURI.endsWith("svg") ? style.fill : style.color);
      const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.textContent.slice(0, 40)];
    });
}"""
