#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The status page, rendered by headless Chromium at 400 pixels in light and dark mode: the page of a real daemon, and
one with all its parts, written by FILLED (daemon_http_test).

usage: status_page_test.py ASHLARD FILLED
"""

import html
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

ASHLARD, FILLED = sys.argv.pop(1), sys.argv.pop(1)
PATIENCE = 60.0
WIDTH = 400
CONTRAST = 4.5  # WCAG 2, level AA
# Measures the page that contains it, and replaces the surrounding frame by the results. Contrast is of each text
# against its background.
PROBE = """<script>
const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
const light = (colour) => {
  const [r, g, b] = parts(colour).slice(0, 3).map((c) => c / 255).map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (parts(colour)[3] !== 0) return colour;
  }
  return "rgb(255, 255, 255)";
};
let least = 99, texts = 0;
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const element = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || element.tagName === "SCRIPT") continue;
  const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
  least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  ++texts;
}
const root = document.documentElement;
const found = {width: innerWidth, scroll: root.scrollWidth, ground: getComputedStyle(document.body).backgroundColor, texts,
  contrast: least, landmarks: ["header", "main", "footer"].map((name) => document.querySelectorAll("body > " + name).length),
  headings: document.querySelectorAll("h1").length, unnamed: document.querySelectorAll("svg:not([aria-label])").length,
  language: root.lang, links: [...document.links].every((link) => link.tabIndex === 0 && link.textContent.trim())};
parent.document.body.innerHTML = "<pre>FOUND" + JSON.stringify(found) + "END</pre>";
</script>"""


@unittest.skipUnless(shutil.which("chromium"), "Chromium is not installed (Debian: chromium)")
class StatusPage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = pathlib.Path(cls.folder.name, "ashlard.yaml")
        config.write_text(
            f"listen: {{rpc_socket: {cls.folder.name}/rpc, session_socket: {cls.folder.name}/session, "
            f'metrics_address: "127.0.0.1:{port}"}}\ndram: {{capacity_bytes: 16MiB, arena_bytes: 1MiB}}\n'
            f"ssd: {{folder: {cls.folder.name}/disk, capacity_bytes: 16MiB}}\n"
        )
        daemon = subprocess.Popen([ASHLARD, "--config", config], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        cls.addClassCleanup(daemon.wait)
        cls.addClassCleanup(daemon.kill)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as reply:
                    cls.page = reply.read().decode()
                break
            except OSError:
                if time.monotonic() > deadline or daemon.poll() is not None:
                    raise
                time.sleep(0.1)

    def laid_out(self, page, *options):
        """Returns the probe's results from the page, and the lines of Chromium's console."""
        file = pathlib.Path(self.folder.name, "page.html")
        page = re.sub(r'<meta http-equiv="refresh"[^>]*>', "", page).replace("</body>", PROBE + "</body>")
        # A frame, because Chromium's own window is 500 pixels wide at least.
        file.write_text(
            f'<!DOCTYPE html><meta charset="utf-8"><body><iframe width="{WIDTH}" height="800" frameborder="0" '
            f'srcdoc="{html.escape(page)}"></iframe></body>'
        )
        done = subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--enable-logging=stderr",
                f"--user-data-dir={self.folder.name}/profile",
                "--window-size=600,900",
                *options,
                "--dump-dom",
                file.as_uri(),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "HOME": self.folder.name},
        )
        found = re.search(r"FOUND(.*?)END</pre>", done.stdout, re.S)
        self.assertIsNotNone(found, done.stdout + done.stderr)
        return json.loads(found[1]), re.findall(r"CONSOLE.*", done.stderr)

    def check(self, found, console):
        self.assertEqual(console, [])
        self.assertLessEqual(found["scroll"], found["width"], "the page needs no horizontal scrolling")
        self.assertEqual(found["width"], WIDTH)
        self.assertEqual(found["landmarks"], [1, 1, 1])
        self.assertEqual((found["headings"], found["unnamed"], found["language"], found["links"]), (1, 0, "en", True))
        self.assertGreater(found["texts"], 10)
        self.assertGreaterEqual(found["contrast"], CONTRAST)

    def test_light_theme(self):
        found, console = self.laid_out(self.page)
        self.check(found, console)
        self.assertEqual(found["ground"], "rgb(255, 255, 255)")

    def test_dark_theme(self):
        found, console = self.laid_out(self.page, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
        self.check(found, console)
        self.assertEqual(found["ground"], "rgb(22, 22, 22)")

    def test_with_all_its_parts(self):
        file = pathlib.Path(self.folder.name, "filled.html")
        subprocess.run(
            [FILLED, "--gtest_filter=StatusBoard.WritesACompletePageForTheBrowserTest"],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "ASHLAR_STATUS_PAGE": str(file)},
        )
        page = file.read_text()
        for part in (
            "degraded:",
            "namespace_differs",
            "evicted by price",
            "transfers do not use RDMA",
            "of 299 connected",
        ):
            self.assertIn(part, page)
        self.check(*self.laid_out(page))

    def test_errors_of_a_page_are_found(self):
        wide = self.page.replace(
            "</main>",
            '<p style="white-space:nowrap;color:#999">' + 40 * "wide " + "</p></main><script>nonsense()</script>",
        )
        found, console = self.laid_out(wide)
        self.assertGreater(found["scroll"], found["width"])
        self.assertLess(found["contrast"], CONTRAST)
        self.assertEqual(len(console), 1)


if __name__ == "__main__":
    unittest.main()
