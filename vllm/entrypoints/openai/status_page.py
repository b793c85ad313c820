"""The page at ``/``: how the server does, from ``/metrics`` and ``/load``, every two seconds.

One document without external parts; its policy lets it talk to this server only.
"""

from __future__ import annotations

import base64
import hashlib
import html
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.entrypoints.openai.state import ServerState

STYLE = """
:root { color-scheme: light dark; --back: #f5f6f8; --card: #fff; --ink: #1b1f24; --soft: #57606a;
  --line: #d8dee4; --mark: #0a5cc2; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --card: #191f27; --ink: #e8edf2;
  --soft: #a3adb8; --line: #303843; --mark: #6cb0ff; --bad: #ff8a7a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
main, header { max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.35rem; margin: .5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .6rem; }
p { margin: .2rem 0; color: var(--soft); }
a { color: var(--mark); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .8rem;
  margin: 0; }
dl > div, .card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .7rem .9rem; }
dt { color: var(--soft); font-size: .875rem; }
dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
meter { width: 100%; height: .8rem; }
svg { display: block; width: 100%; height: 4.5rem; }
polyline { fill: none; stroke: var(--mark); stroke-width: 2; vector-effect: non-scaling-stroke; }
table { width: 100%; border-collapse: collapse; }
th, td { text-align: left; padding: .35rem .5rem; border-bottom: 1px solid var(--line); }
th { font-weight: 600; font-size: .875rem; color: var(--soft); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
#connection[data-state="lost"] { color: var(--bad); font-weight: 600; }
"""

SCRIPT = r"""
'use strict';
const PERIOD = 2000, KEPT = 60, history = [];
let before = null;
const text = (id, value) => {
  const node = document.getElementById(id);
  if (node.textContent !== value) node.textContent = value;
};
const count = value => Math.round(value).toLocaleString('en');
const bytes = value => {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  while (value >= 1024 && i < units.length - 1) { value /= 1024; i += 1; }
  return (i ? value.toFixed(1) : Math.round(value)) + ' ' + units[i];
};
const time = value => value === null ? '–'
  : value < 1 ? Math.round(value * 1000) + ' ms' : value.toFixed(1) + ' s';
function parse(body) {
  const series = [];
  for (const line of body.split('\n')) {
    const found = line.match(/^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/);
    if (!found) continue;
    const labels = {};
    for (const pair of (found[2] || '').matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g))
      labels[pair[1]] = pair[2];
    series.push({name: found[1], labels, value: Number(found[3])});
  }
  return series;
}
function look(series) {
  const total = name => series.filter(one => one.name === 'vllm:' + name)
    .reduce((sum, one) => sum + one.value, 0);
  const by = (name, label) => new Map(series.filter(one => one.name === 'vllm:' + name)
    .map(one => [one.labels[label], one.value]));
  const mean = name => {
    const times = total(name + '_count');
    return times ? total(name + '_sum') / times : null;
  };
  return {total, by, mean, at: performance.now() / 1000};
}
function rate(now, name) {
  if (!before) return 0;
  return Math.max(0, now.total(name) - before.total(name)) / Math.max(.001, now.at - before.at);
}
function showTokens(now) {
  const prompt = rate(now, 'prompt_tokens_total'), output = rate(now, 'generation_tokens_total');
  text('prompt-rate', count(prompt));
  text('output-rate', count(output));
  if (before) history.push(prompt + output);
  if (history.length > KEPT) history.shift();
  const most = Math.max(0, ...history);
  const points = history.map((value, i) =>
    (KEPT - history.length + i) / (KEPT - 1) * 300 + ',' + (58 - 54 * value / Math.max(1, most)));
  document.getElementById('curve').setAttribute('points', points.join(' '));
  text('most', 'Most in the last two minutes: ' + count(most) + ' tokens/s');
}
function showErrors(now) {
  const failures = now.by('request_failures_total', 'reason');
  const responses = now.by('http_responses_total', 'status');
  const rows = [...now.by('last_failure_timestamp_seconds', 'reason')].sort((a, b) => b[1] - a[1]);
  const body = document.getElementById('errors');
  body.replaceChildren(...rows.slice(0, 10).map(([reason, at]) => {
    const row = document.createElement('tr');
    const isStatus = reason.startsWith('http_');
    const times = isStatus ? responses.get(reason.slice(5)) : failures.get(reason);
    const cells = [reason.replace('http_', 'HTTP ').replaceAll('_', ' '), count(times || 0),
      new Date(at * 1000).toLocaleTimeString()];
    row.append(...cells.map((value, i) => {
      const cell = document.createElement('td');
      cell.textContent = value;
      if (i === 1) cell.className = 'number';
      return cell;
    }));
    return row;
  }));
  document.getElementById('no-errors').hidden = rows.length > 0;
  document.getElementById('error-table').hidden = rows.length === 0;
}
function show(now, load) {
  const usage = 100 * now.total('kv_cache_usage_perc');
  text('load', count(load));
  text('running', count(now.total('num_requests_running')));
  text('waiting', count(now.total('num_requests_waiting')));
  text('done', count([...now.by('request_success_total', 'finished_reason')]
    .reduce((sum, [reason, value]) => sum + (reason === 'abort' ? 0 : value), 0)));
  text('pool', usage.toFixed(1) + ' %');
  document.getElementById('pool-meter').value = usage;
  const queries = now.total('prefix_cache_queries_total');
  const hits = 100 * now.total('prefix_cache_hits_total') / queries;
  text('hits', queries ? hits.toFixed(1) + ' %' : '–');
  text('first-token', time(now.mean('time_to_first_token_seconds')));
  text('whole-request', time(now.mean('e2e_request_latency_seconds')));
  text('files', count(now.total('hidden_states_files_written_total')));
  text('rows', count(now.total('hidden_states_rows_written_total')));
  text('bytes', bytes(now.total('hidden_states_bytes_written_total')));
  text('flight', bytes(now.total('hidden_states_bytes_in_flight')));
  showTokens(now);
  showErrors(now);
}
function say(state, words) {
  document.getElementById('connection').dataset.state = state;
  text('connection', words);
}
async function poll() {
  try {
    const wait = {cache: 'no-store', signal: AbortSignal.timeout(5000)};
    const [metrics, load] = await Promise.all([fetch('metrics', wait), fetch('load', wait)]);
    if (!metrics.ok || !load.ok) throw new Error('HTTP ' + metrics.status + ', ' + load.status);
    const now = look(parse(await metrics.text()));
    show(now, (await load.json()).server_load);
    before = now;
    say('live', 'Live');
  } catch (error) {
    say('lost', 'No answer from the server: ' + error.message);
  }
  setTimeout(poll, PERIOD);
}
poll();
"""


def _figure(name: str, about: str) -> str:
    return f'<div><dt>{about}</dt><dd id="{name}">–</dd></div>'


_REQUESTS = (
    ("load", "Under way"),
    ("running", "Running"),
    ("waiting", "Waiting"),
    ("done", "Finished"),
    ("first-token", "To the first token"),
    ("whole-request", "To the end"),
)
_TOKENS = (("prompt-rate", "Prompt tokens/s"), ("output-rate", "Generated tokens/s"))
_FILES = (
    ("files", "Files"),
    ("rows", "Rows"),
    ("bytes", "Written"),
    ("flight", "On their way"),
)


def _figures(figures: tuple[tuple[str, str], ...], more: str = "") -> str:
    return f"<dl>{''.join(_figure(name, about) for name, about in figures)}{more}</dl>"


def render_page(model_name: str) -> str:
    """The whole document."""
    name = html.escape(model_name)
    pool = (
        '<div><dt id="pool-name">Pool in use</dt><dd id="pool">–</dd>'
        '<meter id="pool-meter" aria-labelledby="pool-name" min="0" max="100" high="95"></meter>'
        "</div>"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{name} – vLLM</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{name}</h1>
<p>vLLM {__version__} · <span id="connection" role="status" data-state="wait">Connecting</span> ·
<a href="docs">API</a> · <a href="metrics">Metrics</a></p>
</header>
<main>
<section aria-labelledby="requests-head"><h2 id="requests-head">Requests</h2>
{_figures(_REQUESTS)}</section>
<section aria-labelledby="tokens-head"><h2 id="tokens-head">Tokens</h2>
{_figures(_TOKENS, pool + _figure("hits", "Found in the prefix cache"))}
<div class="card" style="margin-top:.8rem"><p id="most">Most in the last two minutes: –</p>
<svg viewBox="0 0 300 60" preserveAspectRatio="none" role="img"
aria-label="Tokens per second over the last two minutes"><polyline id="curve" points=""/></svg>
</div></section>
<section aria-labelledby="files-head"><h2 id="files-head">Hidden states</h2>
{_figures(_FILES)}</section>
<section aria-labelledby="errors-head"><h2 id="errors-head">Recent errors</h2>
<div class="card"><p id="no-errors">None.</p>
<table id="error-table" hidden><thead><tr><th scope="col">What</th>
<th scope="col" class="number">Times</th><th scope="col">Last</th></tr></thead>
<tbody id="errors"></tbody></table></div></section>
<noscript><p>This page needs JavaScript; <a href="metrics">the metrics</a> do not.</p></noscript>
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _policy() -> str:
    """Content-Security-Policy: our own script, this server, nothing else."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
    )


def make_router(state: ServerState) -> APIRouter:
    """``/``: the status page."""
    router = APIRouter()
    page = render_page(state.served_model_names[0])
    headers = {
        "content-security-policy": _policy(),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def get_status_page() -> HTMLResponse:
        """How the server does."""
        return HTMLResponse(page, headers=headers)

    return router


__all__ = ["make_router", "render_page"]
