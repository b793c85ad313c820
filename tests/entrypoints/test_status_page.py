"""The status page: valid, self-contained, and filled by a real browser where there is one."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.entrypoints.gate_harness import GateState, gate, serving
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import HiddenStatesOptions
from vllm.entrypoints.openai import pages
from vllm.entrypoints.openai.api_server import EXAMPLES, build_app
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.hidden_states_store import HiddenStatesStore
from vllm.entrypoints.openai.server_load import ServerLoad
from vllm.utils.disk import free_bytes
from vllm.v1.engine.core_messages import EngineStats
from vllm.version import PRODUCT, VERSION

NAME = "org/<b>tiny</b>"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ERRORS = [
    ("HTTP 429", "/v1/completions", "1"),
    ("HTTP 429", "/v1/chat/completions", "1"),
    ("disk full", "the engine", "1"),
]
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
    state = GateState(ServerSettings(), [NAME], stats=STATS, load=ServerLoad([7]))
    state.metrics.finished["stop"] = 41
    state.metrics.count_failure("disk_full")
    state.metrics.count_response(429, "/v1/completions")
    state.metrics.count_response(429, "/v1/chat/completions")
    state.metrics.request_seconds.observe(1.5)
    return state


def make_app(state: GateState) -> FastAPI:
    app = FastAPI()
    app.state.server = state
    app.include_router(pages.router)

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": state.load.total}

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
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td[^>]*>([^<]*)</td>", page)
    assert sorted(rows) == sorted(ERRORS)


PAGE_IN_NODE = """
const elements = {}, bodies = %s;
const make = () => ({dataset: {}, children: [], setAttribute(name, value) { this[name] = value; },
  append(...nodes) { this.children.push(...nodes); },
  replaceChildren(...nodes) { this.children = nodes; }});
const node_of = id => elements[id] ??= make();
globalThis.document = {getElementById: node_of, createElement: make};
globalThis.setTimeout = () => {};
let tick = 0;
Object.defineProperty(globalThis, 'performance', {value: {now: () => 2000 * tick}});
Date.now = () => 1000 * (1e9 + 2 * tick);
globalThis.fetch = async path => ({ok: true, text: async () => bodies[tick],
  json: async () => ({server_load: 6})});
const poll = new Function('document', %s + '; return poll;')(document);
const shown = [];
for (; tick < bodies.length; tick++) {
  await poll();
  shown.push(Object.fromEntries(Object.entries(elements).map(([id, one]) => [id,
    {text: one.textContent, points: one.points,
     rows: one.children.map(row => row.children.map(cell => cell.textContent))}])));
}
console.log(JSON.stringify(shown));
"""


def shown_in_node(folder: Path, bodies: list[str]) -> list[dict[str, Any]]:
    """Return the texts that the page's script shows, by id, after each reading of ``/metrics``."""
    if shutil.which("node") is None:
        pytest.skip("there is no node here")
    page = (Path(pages.__file__).parent / "status_page.html").read_text()
    script = page.partition("<script>")[2].partition("</script>")[0].rsplit("poll();", 1)[0]
    program = folder / "page.mjs"
    program.write_text(PAGE_IN_NODE % (json.dumps(bodies), json.dumps(script)))
    variables = {**os.environ, "TZ": "UTC", "LC_ALL": "en_GB.UTF-8"}
    done = subprocess.run(
        ["node", program], capture_output=True, text=True, timeout=60, env=variables
    )
    assert done.returncode == 0, done.stderr
    looks: list[dict[str, Any]] = json.loads(done.stdout)
    assert all(look["connection"]["text"] == "Live" for look in looks), looks
    return looks


def test_rates_move_although_a_step_takes_longer_than_a_look(tmp_path: Path) -> None:
    """Prompt tokens are counted when their step ends: here every third look."""
    counts = [1000 * (look // 3) for look in range(12)]
    bodies = [f'vllm:prompt_tokens_total{{engine="0"}} {count}\n' for count in counts]
    looks = shown_in_node(tmp_path, bodies)
    rates = [int(look["prompt-rate"]["text"]) for look in looks]
    assert rates[:3] == [0, 0, 0]
    assert all(100 <= rate <= 200 for rate in rates[5:]), rates


def test_the_curve_has_axes_from_its_first_point_on(tmp_path: Path) -> None:
    counts = [0, 400, 1200, 1600]
    bodies = [f"vllm:generation_tokens_total {count}\n" for count in counts]
    looks = shown_in_node(tmp_path, bodies)
    assert looks[0]["y-most"]["text"] is None if "y-most" in looks[0] else True
    last = looks[-1]
    xs = [float(point.split(",")[0]) for point in last["curve"]["points"].split()]
    ys = [float(point.split(",")[1]) for point in last["curve"]["points"].split()]
    assert xs == [0, 150, 300], "from the left edge to the right one"
    assert ys[1] == 2 and ys[0] == 58 - 56 * 200 / 300, "200/s, 300/s, 267/s"
    assert (last["y-most"]["text"], last["y-half"]["text"]) == ("300/s", "150")
    start = {name: last[name]["text"] for name in ("x-first", "x-half", "x-last")}
    clock = [re.search(r"\d+:46:\d\d", text) for text in start.values()]
    assert [found and found[0][-2:] for found in clock] == ["42", "44", "46"], start
    assert start["x-first"].endswith(" (4 s ago)") and start["x-last"].endswith(" (now)")


def test_errors_and_storage_are_named(state: GateState, tmp_path: Path) -> None:
    """The numbers of a real answer of /metrics reach the page."""
    storage = HiddenStatesOptions(shared_storage_path=str(tmp_path))
    store = HiddenStatesStore(storage, ServerSettings(hidden_states_quota_gib=2.0))
    for number in range(2):
        path = tmp_path / f"cmpl-{number}.safetensors"
        path.write_bytes(bytes(1 << 20))
        store.add(str(path))
    state.metrics.store, state.storage_folder = store, str(tmp_path)
    state.metrics.start_time = 1e9 - (3 * 3600 + 7 * 60)  # the page's clock is at 1e9
    with gate(make_app, state) as server:
        (look,) = shown_in_node(tmp_path, [httpx.get(f"{server.url}/metrics").text])
    assert sorted(tuple(row[:3]) for row in look["errors"]["rows"]) == sorted(ERRORS)
    assert look["uptime"]["text"] == "3 h 7 min"
    assert look["kept-files"]["text"] == "2"
    assert look["kept"]["text"] == "2.0 MiB" and look["quota"]["text"] == "2.0 GiB"
    free, shown = free_bytes(tmp_path), look["disk"]["text"].split()
    unit = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[shown[1]]
    assert float(shown[0]) * unit == pytest.approx(free, rel=0.1)
    (look,) = shown_in_node(tmp_path, ["vllm:prompt_tokens_total 1\n"])
    assert look["disk"]["text"] == look["quota"]["text"] == "none"


def test_errors_count_for_the_endpoint_as_it_is_declared() -> None:
    state = GateState(ServerSettings(api_key=["key"]))
    with serving(build_app(state)) as port:  # type: ignore[arg-type]
        url, keyed = f"http://127.0.0.1:{port}", {"authorization": "Bearer key"}
        for path in ("/v1/models", "/v1/secret/42", "/v1/hidden_states/no-such-file"):
            assert httpx.get(f"{url}{path}").status_code == 401
        assert httpx.get(f"{url}/v1/nothing/17", headers=keyed).status_code == 404
        assert httpx.get(f"{url}/metrics").status_code == 200
    assert state.metrics.errors == {
        ("/v1/models", 401): 1,
        ("/v1/hidden_states/{file_id}", 401): 1,
        ("(no endpoint)", 401): 1,
        ("(no endpoint)", 404): 1,
    }


def test_facts_of_the_model(state: GateState) -> None:
    state.facts = [("model", "/data/<models>/tiny"), ("layers", "24 of hidden size 1,024")]
    rows = '<tr><th scope="row">layers</th><td>24 of hidden size 1,024</td></tr>'
    with gate(make_app, state) as server:
        text = httpx.get(server.url).text
    assert rows in text and "<td>/data/&lt;models&gt;/tiny</td>" in text
    state.settings = ServerSettings(api_key=["key"])
    state.facts[0] = ("files", "/data/hidden_states (kept 60 s)")
    with gate(make_app, state) as server:
        text = httpx.get(server.url).text
    assert "/data" not in text and "<td>&lt;path&gt; (kept 60 s)</td>" in text
    assert rows in text


def test_every_field_is_described_and_every_body_has_an_example(state: GateState) -> None:
    with gate(build_app, state) as server:
        described = httpx.get(f"{server.url}/openapi.json").json()
    models = {model.__name__: model for model in EXAMPLES}
    assert len(models) == 8
    for name, model in models.items():
        for field, schema in described["components"]["schemas"][name]["properties"].items():
            assert len(schema.get("description", "")) > 10, f"{name}.{field}"
        model.model_validate(EXAMPLES[model])
    posts = [methods["post"] for methods in described["paths"].values() if "post" in methods]
    assert len(posts) == 10
    for post in posts:
        content = post["requestBody"]["content"]["application/json"]
        model = models[content["schema"]["$ref"].rpartition("/")[2]]
        assert content["example"] == EXAMPLES[model]


def test_statuses_and_defaults_that_are_described_are_those_of_replies(state: GateState) -> None:
    with gate(build_app, state) as server:
        described = httpx.get(f"{server.url}/openapi.json").json()
        missing = httpx.get(f"{server.url}/v1/hidden_states/none")
    operations = [one for path in described["paths"].values() for one in path.values()]
    assert not any("422" in one["responses"] for one in operations)
    download = described["paths"]["/v1/hidden_states/{file_id}"]["get"]["responses"]
    assert str(missing.status_code) == "404" and "404" in download
    schemas = described["components"]["schemas"]
    for name, default in {
        "Embedding": "false",
        "Pooling": "false",
        "ChatCompletion": "true",
    }.items():
        field = schemas[f"{name}Request"]["properties"]["add_generation_prompt"]
        assert f"{default} by default" in field["description"]


def test_pages_fit_a_phone(state: GateState) -> None:
    """Long words wrap, and a row of the API's tables becomes a block of lines."""
    with gate(build_app, state) as server:
        api, status = (httpx.get(f"{server.url}{path}").text for path in ("/docs", "/"))
    for page in (api, status):
        assert 'name="viewport" content="width=device-width' in page
        assert re.search(r"th, td \{[^}]*overflow-wrap: anywhere", page)
    narrow = api.partition("@media (max-width: 42rem)")[2]
    assert "td { display: block" in narrow and "content: attr(title)" in narrow


def test_names_and_tiles(state: GateState) -> None:
    with gate(make_app, state) as server:
        text = httpx.get(server.url).text
    assert f"{PRODUCT} {VERSION}" in text
    assert "vLLM" not in text
    for tiles in re.findall(r"<dl.*?</dl>", text, re.DOTALL):
        per_row = 3 if tiles.startswith('<dl class="six">') else 4
        assert tiles.count("<dt") % per_row == 0, "no tile alone in its row"
    labels = re.findall(r"<dt[^>]*>([^<]+)<", text)
    assert len(labels) == len(set(labels)) == 18
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
    assert re.search("<td[^>]*>max_tokens</td>", page)
    assert "Most tokens to generate" in page
    assert re.search(r"<textarea[^>]*aria-label", page)


def test_in_a_browser_without_a_server(state: GateState, tmp_path: Path) -> None:
    """The page says so when its server does not answer, here at one of its two addresses."""

    def make_broken(state: GateState) -> FastAPI:
        app = FastAPI()
        app.state.server = state
        app.include_router(pages.router)
        return app

    with gate(make_broken, state) as server:
        page = browse(server.url, tmp_path)
    assert "No answer from the server: HTTP 200, 404" in page
    assert 'data-state="lost"' in page
