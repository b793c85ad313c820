"""The status page: valid, self-contained, and filled by a real browser where there is one."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.entrypoints.gate_harness import GateState, gate
from vllm.entrypoints.openai import pages
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.v1.engine.core_messages import EngineStats
from vllm.version import PRODUCT, VERSION

NAME = "org/<b>tiny</b>"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    kv_cache_usage=0.255,
    num_prompt_tokens=12345,
    files_written=1234,
    rows_written=98765,
    bytes_written=3 << 20,
    prefix_cache_queries=200,
    prefix_cache_hits=50,
)


@pytest.fixture
def state() -> GateState:
    state = GateState(ServerSettings(), [NAME], stats=STATS, server_load=7)
    state.metrics.finished["stop"] = 41
    state.metrics.count_failure("disk_full")
    state.metrics.count_response(429)
    state.metrics.request_seconds.observe(1.5)
    return state


def make_app(state: GateState) -> FastAPI:
    app = FastAPI()
    app.state.server = state
    app.include_router(pages.router)

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": state.server_load}

    return app


class Document(html.parser.HTMLParser):
    """Ids, links to elsewhere, and the headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.labels: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            elif name == "aria-labelledby":
                self.labels.add(str(value))
            elif name in ("href", "src"):
                self.addresses.append(str(value))


def test_the_document(state: GateState) -> None:
    with gate(make_app, state) as server:
        answer = httpx.get(server.url)
    text = answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "&lt;b&gt;tiny&lt;/b&gt;" in text and "<b>" not in text
    assert '<html lang="en">' in text
    document = Document(text)
    assert len(document.ids) == len(set(document.ids))
    assert document.labels <= set(document.ids)
    assert set(document.addresses) == {"data:,", "docs", "metrics"}, "nothing from elsewhere"
    used = set(re.findall(r"(?:text|getElementById)\('([\w-]+)'", text))
    assert used <= set(document.ids)
    names = set(re.findall(r"'(\w+_(?:total|perc|running|waiting|flight|seconds))'", text))
    served = {sample.name for family in state.metrics.collect() for sample in family.samples}
    assert {f"vllm:{name}" for name in names} <= served | {
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:last_failure_timestamp_seconds",
        "vllm:request_failures_total",
        "vllm:http_responses_total",
    }


def browse(url: str, folder: Path) -> str:
    """The document after its script ran for a while, as a browser has it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder}"]
    flags += ["--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([browser, *flags, url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_a_browser(state: GateState, tmp_path: Path) -> None:
    with gate(make_app, state) as server:
        page = browse(server.url, tmp_path)

    def shown(element: str) -> str:
        found = re.search(rf'id="{element}"[^>]*>([^<]*)<', page)
        assert found is not None, element
        return found[1]

    expected = {
        "connection": "Live",
        "load": "7",
        "running": "3",
        "waiting": "2",
        "done": "41",
        "pool": "25.5 %",
        "hits": "25.0 %",
        "whole-request": "1.5 s",
        "first-token": "–",
        "files": "1,234",
        "rows": "98,765",
        "bytes": "3.0 MiB",
        "prompt-rate": "0",
    }
    assert {element: shown(element) for element in expected} == expected
    rows = re.findall(r"<tr><td>([^<]*)</td><td[^>]*>([^<]*)</td>", page)
    assert rows == [("HTTP 429", "1"), ("disk full", "1")]


PAGE_IN_NODE = """
const elements = {}, series = %s;
const node_of = id => elements[id] ??= {dataset: {}, setAttribute() {}, replaceChildren() {}};
globalThis.document = {getElementById: node_of};
globalThis.setTimeout = () => {};
let tick = 0;
Object.defineProperty(globalThis, 'performance', {value: {now: () => 2000 * tick}});
const body = () => `vllm:prompt_tokens_total{engine="0"} ${series[tick]}\\n`;
globalThis.fetch = async path => ({ok: true, text: async () => body(),
  json: async () => ({server_load: 6})});
const poll = new Function('document', %s + '; return poll;')(document);
const shown = [];
for (; tick < series.length; tick++) {
  await poll();
  shown.push(elements['prompt-rate'].textContent);
}
console.log(JSON.stringify(shown));
"""


def test_rates_move_although_a_step_takes_longer_than_a_look(tmp_path: Path) -> None:
    """Prompt tokens are counted when their step ends: here every third look."""
    if shutil.which("node") is None:
        pytest.skip("there is no node here")
    page = (Path(pages.__file__).parent / "status_page.html").read_text()
    script = page.partition("<script>")[2].partition("</script>")[0].rsplit("poll();", 1)[0]
    counts = [1000 * (look // 3) for look in range(12)]
    program = tmp_path / "page.mjs"
    program.write_text(PAGE_IN_NODE % (json.dumps(counts), json.dumps(script)))
    done = subprocess.run(["node", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rates = [int(rate) for rate in json.loads(done.stdout)]
    assert rates[:3] == [0, 0, 0]
    assert all(100 <= rate <= 200 for rate in rates[5:]), rates


def test_names_and_tiles(state: GateState) -> None:
    with gate(make_app, state) as server:
        text = httpx.get(server.url).text
    assert f"{PRODUCT} {VERSION}" in text
    assert "vLLM" not in text
    for tiles in re.findall(r"<dl.*?</dl>", text, re.DOTALL):
        per_row = 3 if tiles.startswith('<dl class="six">') else 4
        assert tiles.count("<dt") % per_row == 0, "no tile alone in its row"
    labels = re.findall(r"<dt[^>]*>([^<]+)<", text)
    assert len(labels) == len(set(labels)) == 14
    assert not {"Running", "Under way", "To the end", "Written"} & set(labels)


def test_the_page_of_the_api_needs_no_internet(state: GateState, tmp_path: Path) -> None:
    with gate(build_app, state) as server:
        answer = httpx.get(f"{server.url}/docs")
        assert httpx.get(f"{server.url}/redoc").status_code == 404
        described = httpx.get(f"{server.url}/openapi.json").json()
        document = Document(answer.text)
        assert set(document.addresses) == {"data:,", "openapi.json", "./"}, "nothing from elsewhere"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert described["info"]["title"] == PRODUCT
        page = browse(f"{server.url}/docs", tmp_path)
    for path in described["paths"]:
        assert path in page
    assert "<td>max_tokens</td>" in page


def test_in_a_browser_without_a_server(state: GateState, tmp_path: Path) -> None:
    """The page says so when its server does not answer."""

    def make_broken(state: GateState) -> FastAPI:
        app = FastAPI()
        app.state.server = state
        app.include_router(pages.router)
        return app

    with gate(make_broken, state) as server:
        page = browse(server.url, tmp_path)
    assert "No answer from the server: HTTP 404, 404" in page
    assert 'data-state="lost"' in page
