#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`treeattn reproduce` and `treeattn report`, from outside: the data, the page and the SVG files; and the page in a real
browser, where every figure must be drawn.

Usage: report_test.py TREEATTN [--browser]; with --browser only that part: exit status 77 where there is no Chromium
(scripts/deps.sh browser).
"""

import concurrent.futures
import fcntl
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml

from terminal import Terminal

KEYS = ["name", "title", "paper", "command", "figures", "tables", "comparisons", "targets", "notes"]
SOURCES = {"measured", "simulated", "closed form", "paper"}
failures = []


def expect(holds, what):
    if not holds:
        failures.append(what)


def run(*command, timeout=300):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def check_outcome(outcome):
    name = outcome["name"]
    expect(list(outcome) == KEYS, f"{name}: keys {list(outcome)}")
    expect(outcome["figures"] and outcome["tables"], f"{name}: no figure, or no table")
    expect(f"reproduce {name}" in outcome["command"], f"{name}: command {outcome['command']}")
    for figure in outcome["figures"]:
        for series in figure["series"]:
            where = f"{name}, {figure['id']}, {series['name']}"
            expect(series["source"] in SOURCES, f"{where}: source {series['source']}")
            expect(len(series["x"]) == len(series["y"]) > 0, f"{where}: no points")
            expect(all(y > 0 for y in series["y"]), f"{where}: values {series['y']}")
    for table in outcome["tables"]:  # memory and volume are always measured
        expect(name in ("memory", "volume") or table["columns"][-1] == "source", f"{name}: no source: {table['title']}")
    for line in outcome["comparisons"]:
        expect(abs(line["ratio"] - line["ours"] / line["paper"]) < 1e-9 and line["why"], f"{name}: {line}")
    for target in outcome["targets"]:
        expect(target["holds"], f"{name}: missed: {target}")


def make_report(treeattn, folder):
    """All experiments in small, by the closed form where time is asked for: quick, and the same on every machine."""
    done = run(treeattn, "reproduce", "all", "--quick", "--closed-form", "--json", "--out", str(folder / "data"))
    expect(done.returncode == 0, f"reproduce: exit code {done.returncode}: {done.stderr}")
    expect("skipped uneven" in done.stderr, f"uneven needs a simulator, and nothing says so: {done.stderr}")
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    for outcome in outcomes:
        check_outcome(outcome)
        written = json.loads((folder / "data" / f"{outcome['name']}.json").read_text())
        expect(written == outcome, f"{outcome['name']}: the file differs from stdout")
    done = run(treeattn, "report", "--data", str(folder / "data"), "--out", str(folder / "report.html"), "--figures",
               str(folder / "figures"))
    expect(done.returncode == 0, f"report: exit code {done.returncode}: {done.stderr}")
    return outcomes


def check_findings(outcomes):
    """What the experiments are there to show, where small sizes show it too."""
    lines = {figure["id"]: {series["name"]: dict(zip(series["x"], series["y"])) for series in figure["series"]}
             for outcome in outcomes for figure in outcome["figures"]}
    flat, levels = lines["two-level-batch-8"]["flat (butterfly)"], lines["two-level-batch-8"]["two levels"]
    expect(levels[4] < flat[4] and levels[1] > flat[1], f"one adapter: butterfly {flat}, two levels {levels}")
    merge, levels = lines["two-level-batch-6"]["flat (merge)"], lines["two-level-batch-6"]["two levels"]
    expect(all(levels[x] < merge[x] for x in merge), f"nodes of 6: merge {merge}, two levels {levels}")
    ring, three = lines["short-2"]["ring"], lines["short-2"]["tree, three collectives"]
    one = lines["short-2"]["tree, one (merge)"]
    expect(all(one[x] < ring[x] < three[x] for x in ring), f"short: ring {ring}, three {three}, one {one}")
    factor = {target["what"]: target["value"] for outcome in outcomes for target in outcome["targets"]}
    expect(8 <= factor["ring / tree at 128 GPUs, 5.12M, overhead on"] < 12, f"{factor}")


def check_closed_form(treeattn):
    """The closed form is that of what would be simulated: products count, and merging takes no time."""
    done = run(treeattn, "reproduce", "links", "queries", "--closed-form", "--json")
    lines = {figure["id"]: {series["name"]: dict(zip(series["x"], series["y"])) for series in figure["series"]}
             for outcome in map(json.loads, done.stdout.splitlines()) for figure in outcome["figures"]}
    largest, rate = max(lines["links-rate"]["in a node"].items())
    expect(abs(rate / (largest / (2e-6 + largest / 450e9) / 1e9) - 1) < 1e-6, f"NVLink gives {rate} GB/s")
    products_us = 4 * 4096 * 32 * 128 * 32768 / 989e12 * 1e6
    ring = lines["queries"]["ring"][4096]
    expect(products_us < ring < 1.05 * products_us, f"ring, 4096 queries: {ring} us, products {products_us}")


def check_llama(outcomes):
    """Llama 3.1 8B on 8 H100, 32k tokens, by hand. Ten tokens are a prefill, which needs the last matrix once, and nine
    steps."""
    llama, = (outcome for outcome in outcomes if outcome["name"] == "llama")
    tokens, devices, layers, heads, kv_heads, head_dim = 32768, 8, 32, 32, 8, 128
    weights, last_matrix = 8030261248, 128256 * 4096  # all of them, and one of two such tables, the other looked up in
    operations = 2 * (weights - 2 * last_matrix) * tokens + 4 * layers * heads * head_dim * tokens**2 / 2
    steps = 9
    same = operations / (devices * 989e12) + steps * 2 * (weights - last_matrix) / 3.35e12

    def ring_layer(kv_heads):
        share = tokens / devices * 2 * kv_heads * head_dim * 2
        return 5e-6 + share / 3.35e12 + (devices - 1) * (2e-6 + share / 450e9)

    def tree_layer(kv_heads):  # three allreduces of three rounds up and three down; their bytes are next to nothing
        return 5e-6 + tokens / devices * 2 * kv_heads * head_dim * 2 / 3.35e12 + 3 * 6 * 2e-6

    figure, = (figure for figure in llama["figures"] if figure["id"] == "llama-8b-h100")
    ours = {series["name"]: series["y"][0] for series in figure["series"] if series["source"] != "paper"}
    ring, tree = (same + steps * layers * layer(kv_heads) for layer in (ring_layer, tree_layer))
    expect(abs(ours["ring"] / ring - 1) < 1e-9, f"ring, Llama 3.1 8B: {ours['ring']} s, by hand {ring}")
    expect(abs(ours["tree"] / tree - 1) < 2e-3, f"tree, Llama 3.1 8B: {ours['tree']} s, by hand {tree}")
    table = llama["tables"][0]
    repeated = float(table["rows"][0][table["columns"].index("K and V repeated")])
    gap = steps * layers * (ring_layer(heads) - tree_layer(heads))
    expect(abs(repeated / gap - 1) < 2e-3, f"ring less tree, K and V repeated: {repeated} s, by hand {gap}")


def check_files(outcomes, folder):
    """Well-formed XML throughout, every figure once, nothing from outside."""
    ids = {"reduction-tree", "ring"} | {figure["id"] for outcome in outcomes for figure in outcome["figures"]}
    expect({path.stem for path in (folder / "figures").glob("*.svg")} == ids, "SVG files: others than the figures")
    for path in (folder / "figures").glob("*.svg"):
        figure = xml.parse(path).getroot()
        expect(figure.get("data-figure") == path.stem, f"{path.name}: another figure")
        looks = [(line.get("style"), line.get("opacity"), line[0].get("class")) for line in figure
                 if line.get("data-name")]
        expect(len(set(looks)) == len(looks), f"{path.name}: lines that look alike: {looks}")
    page = (folder / "report.html").read_text()
    expect(not re.search(r'(?:src|href)="(?!#)', page), "the page names another file or address")
    root = xml.fromstring(page.replace("<!DOCTYPE html>", ""))
    drawn = [node.get("data-figure") for node in root.iter("{http://www.w3.org/2000/svg}svg")]
    expect(sorted(drawn) == sorted(ids), f"the page has the figures {drawn}")
    for outcome in outcomes:
        expect(outcome["command"] in page, f"the page does not say: {outcome['command']}")


def check_usage(treeattn, folder):
    listed = [line.split()[0] for line in run(treeattn, "reproduce", "--list").stdout.splitlines()[1:]]
    expect("latency" in listed and "memory" in listed and len(set(listed)) == len(listed), f"listed: {listed}")
    (folder / "broken").mkdir()
    (folder / "broken" / "latency.json").write_text('{"name": "latency"}')
    for command, part in [(["reproduce", "nothing"], "latency"), (["reproduce"], "--list"),
                          (["reproduce", "all", "nothing"], "nothing"),
                          (["reproduce", "latency", "--out", "/dev/null/here"], "--out: /dev/null/here"),
                          (["reproduce", "latency", "--simulator", "/nowhere"], "/nowhere"),
                          (["reproduce", "latency", "--simulator", str(folder)], "the program treeattn-sim"),
                          (["reproduce", "--list", "fused"], '--list with "fused"'),
                          (["reproduce", "latency", "--simulator", treeattn, "--closed-form"], "--closed-form"),
                          (["report"], "--data"), (["report", "--data", "/nowhere"], "/nowhere"),
                          (["report", "--data", "n" * 5000], '--data is "nn'),
                          (["report", "--data", str(folder)], "no data")]:
        done = run(treeattn, *command)
        expect(done.returncode == 2 and part in done.stderr, f"{command}: {done.returncode}, {done.stderr}")
    (folder / "whole").mkdir()
    (folder / "whole" / "fused.json").write_text(run(treeattn, "reproduce", "fused", "--closed-form", "--json").stdout)
    page = str(folder / "page.html")
    for options in [["--out", "/dev/null/here"], ["--out", page, "--figures", "/dev/null/here"]]:
        done = run(treeattn, "report", "--data", str(folder / "whole"), *options)
        expect(done.returncode == 2 and f"{options[-2]}: /dev/null/here: cannot" in done.stderr,
               f"{options}: {done.returncode}, {done.stderr}")
    done = run(treeattn, "report", "--data", str(folder / "broken"))
    expect(done.returncode in (1, 2) and "latency.json" in done.stderr, f"broken data: {done.returncode}, {done.stderr}")
    # A figure's name becomes that of a file, which must not lie elsewhere.
    outcome = json.loads((folder / "whole" / "fused.json").read_text())
    outcome["figures"][0]["id"] = "../elsewhere"
    (folder / "whole" / "fused.json").write_text(json.dumps(outcome))
    done = run(treeattn, "report", "--data", str(folder / "whole"), "--out", page, "--figures", str(folder / "names"))
    expect(done.returncode == 2 and "../elsewhere" in done.stderr, f"figure's name: {done.returncode}, {done.stderr}")
    expect(not (folder / "elsewhere.svg").exists(), "a figure was written outside of --figures")
    for names in [["uneven"], ["uneven", "uneven"]]:
        done = run(treeattn, "reproduce", *names, "--closed-form")
        expect(done.returncode == 3, f"{names} without a simulator: exit code {done.returncode}")
    # A simulator that gets no memory says so itself and ends with 3.
    short = folder / "short-of-memory"
    short.write_text("#!/bin/sh\ncat > /dev/null\nexit 3\n")
    short.chmod(0o755)
    done = run(treeattn, "reproduce", "fused", "--quick", "--simulator", str(short))
    expect(done.returncode == 3 and "memory" in done.stderr, f"no memory: {done.returncode}, {done.stderr}")
    done = subprocess.run([treeattn, "reproduce", "fused", "--simulator", str(short)], capture_output=True, timeout=60,
                          preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    expect(done.returncode == 3, f"no memory, where children leave no status: {done.returncode}, {done.stderr}")
    done = run(treeattn, "reproduce", "fused", "volume", "--quick", "--json", "--simulator", str(short))
    expect(done.returncode == 0 and "skipped fused: " in done.stderr and '"name":"volume"' in done.stdout,
           f"no memory for one of two: {done.returncode}, {done.stderr}")


def check_output(treeattn, folder):
    """Where more than a buffer cannot be printed: that it is standard output, whatever the reason."""
    longer = [treeattn, "reproduce", "scaling", "--closed-form", "--json"]
    unread, nobody_waits = os.pipe()
    fcntl.fcntl(nobody_waits, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(nobody_waits, False)
    full = os.open("/dev/full", os.O_WRONLY)
    for name, stdout in [("a full disk", full), ("a full pipe", nobody_waits)]:
        done = subprocess.run(longer, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
        expect((done.returncode, done.stderr) == (1, "treeattn: standard output cannot be written\n"), f"{name}: {done}")
    for end in (unread, nobody_waits, full):
        os.close(end)
    # A file that may not grow is refused by name; what was there stays, and no part of the new one.
    pages = folder / "pages"
    pages.mkdir()
    page, link = pages / "page.html", pages / "link.html"

    def report(out, most=None):
        grow = None if most is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        return subprocess.run([treeattn, "report", "--data", str(folder / "data"), "--out", str(out)],
                              capture_output=True, text=True, timeout=60, preexec_fn=grow)

    done = report(page, 4096)
    expect(done.returncode == 2 and f"--out: {page}: cannot write" in done.stderr, f"a file that may not grow: {done}")
    expect(not list(pages.iterdir()), f"a part of a page was left: {list(pages.iterdir())}")
    page.write_text("the one before")
    page.chmod(0o640)
    link.symlink_to("page.html")
    for out in (page, link):
        expect(report(out, 4096).returncode == 2 and page.read_text() == "the one before", f"lost: what was at {out}")
    expect(report(link).returncode == 0 and page.read_text().startswith("<!DOCTYPE html>"), "no page behind a link")
    expect(link.is_symlink() and page.stat().st_mode & 0o777 == 0o640, "another link, or other readers than before")
    expect(sorted(pages.iterdir()) == [link, page], f"more than a page: {list(pages.iterdir())}")
    # Where standard output is a file, that is written, not replaced.
    with open(pages / "out.html", "w+") as out:
        subprocess.run([treeattn, "report", "--data", str(folder / "data"), "--out", "/dev/stdout"], stdout=out,
                       timeout=60, check=True)
        out.seek(0)
        expect("</html>" in out.read(), "no page on standard output")


def check_progress(treeattn, folder):
    """On a terminal also of one experiment, while it simulates; gone before anything else is said, and after Ctrl-C."""
    slow = folder / "slow"
    slow.write_text("#!/bin/sh\ncat > /dev/null\nfor i in $(seq 30); do echo 0.5; sleep 0.1; done\nexit 3\n")
    slow.chmod(0o755)

    def status_and_lines(end):
        terminal = Terminal()
        child = subprocess.Popen([treeattn, "reproduce", "fused", "--simulator", str(slow)], stdout=subprocess.DEVNULL,
                                 stderr=terminal.its, env={**os.environ, "TERM": "xterm"})
        said = terminal.said(*[(b"reproduce 1/1", lambda: child.send_signal(end))] if end else [])
        return child.wait(timeout=60), said.split(b"\r\x1b[K")

    with concurrent.futures.ThreadPoolExecutor() as at_once:
        (status, lines), *ended = at_once.map(status_and_lines, [None, signal.SIGINT, signal.SIGTERM])
    expect(status == 3 and lines[-1].startswith(b"treeattn: ") and
           re.fullmatch(rb"reproduce 1/1  fused: \w+ on \d+ ranks  \d+ s", lines[len(lines) // 2]), f"on a terminal: {lines}")
    for how, (status, lines) in zip([signal.SIGINT, signal.SIGTERM], ended):
        expect(status == -how and len(lines) > 2 and lines[-1] == b"", f"on a terminal, {how}: {status}, {lines}")


# What the page must show, looked up by the browser itself after layout.
PROBE = """
<script>
const seen = [];
for (const svg of document.querySelectorAll('svg[data-figure]')) {
  const lines = [...svg.querySelectorAll('.ta-line:not(.ta-key)')];
  const marks = [...svg.querySelectorAll('.ta-mark:not(.ta-key)')];
  const box = svg.getBoundingClientRect();
  const inside = node => { const b = node.getBoundingClientRect();
    return b.left >= box.left - 1 && b.right <= box.right + 1 && b.top >= box.top - 1 && b.bottom <= box.bottom + 1; };
  seen.push({id: svg.dataset.figure, wide: box.width, high: box.height,
    series: +svg.dataset.series, points: +svg.dataset.points, lines: lines.length, marks: marks.length,
    drawn: marks.filter(m => m.getBBox().width > 0 && inside(m) &&
      getComputedStyle(m).stroke !== 'none' && getComputedStyle(m).stroke !== getComputedStyle(svg).backgroundColor).length,
    texts: [...svg.querySelectorAll('text')].filter(inside).length, all_texts: svg.querySelectorAll('text').length});
}
document.title = 'probed';
const out = document.createElement('pre');
out.id = 'probe';
out.textContent = JSON.stringify({figures: seen, back: getComputedStyle(document.body).backgroundColor});
document.body.appendChild(out);
</script>
"""


def probe(browser, page, *flags):
    done = run(browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,2000", *flags, "--dump-dom",
               f"file://{page}", timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    expect(found, f"the browser shows no page: {done.stderr[-500:]}")
    return json.loads(found[1]) if found else {"figures": [], "back": ""}


def check_browser(browser, outcomes, folder):
    page = folder / "probe.html"
    page.write_text((folder / "report.html").read_text().replace("</body>", PROBE + "</body>"))
    wanted = 2 + sum(len(outcome["figures"]) for outcome in outcomes)
    light, dark = probe(browser, page), probe(browser, page, "--blink-settings=preferredColorScheme=0")
    expect(light["back"] != dark["back"], f"light and dark have the same background, {light['back']}")
    for theme, seen in [("light", light), ("dark", dark)]:
        expect(len(seen["figures"]) == wanted, f"{theme}: {len(seen['figures'])} figures, {wanted} wanted")
        for figure in seen["figures"]:
            whole = (figure["lines"] == figure["series"] > 0 and figure["marks"] == figure["drawn"] == figure["points"] > 0
                     and figure["texts"] == figure["all_texts"] and figure["wide"] > 300 and figure["high"] > 200)
            expect(whole, f"{theme}: not all of {figure['id']} is drawn: {figure}")


def main():
    treeattn = sys.argv[1]
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    browser_only = "--browser" in sys.argv
    if browser_only and not browser:
        print("SKIPPED: no Chromium on this machine (scripts/deps.sh browser installs it): the page was not looked at")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        outcomes = make_report(treeattn, folder)
        if browser_only:
            check_browser(browser, outcomes, folder)
        else:
            check_findings(outcomes)
            check_llama(outcomes)
            check_closed_form(treeattn)
            check_files(outcomes, folder)
            check_usage(treeattn, folder)
            check_output(treeattn, folder)
            check_progress(treeattn, folder)
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(1 if failures else 0)


main()
