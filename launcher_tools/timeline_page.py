"""The page of `sm-launch timeline`: one file that needs no other file, and no network.

What comes from the job is in one block of JSON, and gets into the page as text alone (textContent);
its Content-Security-Policy lets it load nothing.
"""

from __future__ import annotations

import html
import json

from launcher_tools.timeline_lanes import KINDS, Timeline

_STYLE = """
:root { color-scheme: light dark; --label: clamp(9.6rem, var(--chars) * .6rem + 5.5rem, 18rem);
  --page: #fff; --ink: #1b2530; --soft: #586472; --line: #d5dbe1; --panel: #f5f7f9;
  --focus: #0b57d0; --failed: #c5221f; --joining: #b9c2cc; --start: #8fbfe6; --training: #2f78b7;
  --waiting: #f0a202; --waits: #9c6500; --saving: #2e9e6b; --ending: #d98880; --restart: #a887d1;
  --ended: #e4e8ec; --unknown: #fff; --edge: #c3cbd3; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14191f; --ink: #e4e9ee; --soft: #9eabb8; --line: #36414d; --panel: #1c232b;
  --focus: #8ab4f8; --failed: #ff6b62; --joining: #616d79; --start: #4d7ea8; --training: #62a8e0;
  --waiting: #f5b335; --waits: #8a5a00; --saving: #4fc08d; --ending: #b0615a; --restart: #a387d0;
  --ended: #2b343d; --unknown: #14191f; --edge: #46525f; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 0 1rem 3.4rem; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1, h2 { font-size: 1.15rem; margin: .8rem 0 .2rem; overflow-wrap: anywhere; }
p { margin: .2rem 0; overflow-wrap: anywhere; max-width: 75rem; }
.soft, .legend, .ticks { color: var(--soft); }
.failed > b { color: var(--failed); }
.tools, .legend { display: flex; flex-wrap: wrap; gap: .3rem .9rem; align-items: center;
  margin: .5rem 0; padding: 0; list-style: none; }
input, button { font: inherit; color: inherit; background: var(--page);
  border: 1px solid var(--line); border-radius: 4px; padding: .2rem .6rem; min-height: 2rem; }
input { flex: 0 1 19rem; min-width: 8rem; }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 1px; }
svg.key { width: 14px; height: 14px; vertical-align: -2px; margin-right: .3rem; flex: none; }
.both { display: grid; grid-template-columns: minmax(0, 1fr) 26rem; gap: 1rem; }
#chart { overflow-x: auto; }
#inner { width: calc(var(--label) + (100% - var(--label)) * var(--zoom, 1)); }
.row { display: grid; grid-template-columns: var(--label) 1fr; align-items: center; }
.label { position: sticky; left: 0; z-index: 2; background: var(--page); padding: 0 .5rem;
  white-space: nowrap; min-height: 22px; }
.rank .label { color: var(--soft); font-size: 13px; padding-left: 1.2rem; }
.rank.root .label { color: var(--failed); font-weight: 700; }
summary { cursor: pointer; border-top: 1px solid var(--line); font-weight: 600; }
summary .label::before { content: "\\25b8\\00a0"; }
[open] > summary .label::before { content: "\\25be\\00a0"; }
[open] > summary .thin { display: none; }
.track { position: relative; min-height: 20px; }
.track > svg { display: block; width: 100%; height: 20px; overflow: visible; }
.track > svg.thin { height: var(--thin, 5px); overflow: hidden; margin-bottom: 1px; }
.track > svg.over { position: absolute; top: 50%; left: 0; margin-top: -10px; }
.ticks { position: relative; height: 1.5rem; overflow: hidden; font-size: 12px; }
.ticks span { position: absolute; padding-left: 3px; border-left: 1px solid var(--line);
  white-space: nowrap; }
rect, .mark { cursor: pointer; }
.bar { stroke: var(--page); stroke-width: .5px; }
.unknown, .ended { stroke: var(--edge); }
.unknown { stroke-dasharray: 3 2; }
.mark path { stroke: var(--page); stroke-width: 5px; paint-order: stroke; fill: none; }
.mark .ink { stroke-width: 2.6px; stroke: var(--ink); }
.mark.failed .ink { stroke: var(--failed); }
.mark.on .ink { stroke-width: 4.5px; }
#list { list-style: none; margin: 0; padding: 0; }
#list li { border-top: 1px solid var(--line); padding: .3rem .4rem; overflow-wrap: anywhere; }
#list li.on { background: var(--panel); }
#list .root { color: var(--failed); }
time { color: var(--soft); font-variant-numeric: tabular-nums; margin-right: .5rem; }
pre { overflow: auto; font-size: 12px; margin: .2rem 0; white-space: pre-wrap; max-height: 24rem; }
#words { position: fixed; left: 0; right: 0; bottom: 0; z-index: 5; max-width: none; margin: 0;
  padding: .45rem 1rem; min-height: 2.2rem; background: var(--panel);
  border-top: 1px solid var(--line); }
[hidden] { display: none !important; }
@media (max-width: 1000px) {
  .both { grid-template-columns: minmax(0, 1fr); }
  :root { --label: clamp(8.2rem, var(--chars) * .58rem + 3.2rem, 9rem); }
  body { padding: 0 .6rem 5rem; } summary small { display: none; }
  .rank .label { padding-left: .2rem; font-size: 12px; } input { flex: 1 1 100%; }
}
"""

_BODY = """
<header><h1 id="job"></h1><p id="how"></p><p id="cause"></p><div id="notes"></div></header>
<div class="tools">
<input id="filter" type="search" placeholder="Filter: 3  0-7  algo-2  failed" autocomplete="off"
 aria-label="Show only ranks that match" spellcheck="false">
<button id="fold" type="button">Fold all</button>
<button id="out" type="button" aria-label="Show more time">&minus;</button>
<button id="in" type="button" aria-label="Show less time, larger">+</button>
<span class="soft" id="count" role="status"></span>
</div>
<ul class="legend" id="legend" aria-label="Seconds per rank, on average"></ul>
<div class="both">
<main id="chart" aria-label="What each rank did when"><div id="inner"></div></main>
<section aria-label="Events"><h2>Events</h2><ol id="list"></ol></section>
</div>
<p id="words" aria-live="polite">Point at a bar or a mark, or tap it, to read what it is.</p>
<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><rect width="6" height="6" style="fill:var(--waiting)"/>
<rect width="2" height="6" style="fill:var(--waits)"/></pattern></defs></svg>
"""

_SCRIPT = r"""
"use strict";
const job = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const total = Math.max(job.seconds, 1e-3), SVG = "http://www.w3.org/2000/svg";
const paths = { failed: "M-5,-5L5,5M5,-5L-5,5", stalled: "M0,-6L6,5H-6Z", saved: "M-5,0L-1,5L6,-5",
  stop: "M-5,-5H5V5H-5Z", restart: "M4.5,-3A5.5,5.5 0 1 0 5.5,1.5M5,-7V-2.6H.6",
  lost: "M0,-7L6,0L0,7L-6,0Z" };
const names = { stalled: "others are waiting for this rank", lost: "host lost" };
function el(parent, tag, text, cls) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (cls) made.className = cls;
  return parent.appendChild(made);
}
function draw(parent, tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return parent.appendChild(made);
}
function lasted(s) {
  if (s < 600) return (s < 9.95 ? s.toFixed(1) : s.toFixed(0)) + " s";
  const minutes = Math.floor(s / 60), hours = Math.floor(minutes / 60);
  return hours ? hours + " h " + minutes % 60 + " min" : minutes + " min";
}
// The time of day (UTC) of a second of the job; if that is not known, the second.
const iso = s => new Date((job.utc + s) * 1000).toISOString();
const clock = (s, end = 19) => job.utc ? iso(s).slice(11, end) : lasted(s);
const percent = s => (100 * Math.min(1, Math.max(0, s / total))).toFixed(4) + "%";
const at = s => clock(s) + (job.utc ? " UTC (" + lasted(s) + " after the begin)" : "");
const counted = (n, word) => n + " " + word + (n === 1 ? "" : "s");

// Bars and marks. A mark and its entry in the list of events are chosen together.
// An attempt may fail as the one before: then the entry counts that is nearest in time.
const entries = {}, shapes = {};
const nearest = (key, when) => [...(entries[key] || [])].sort((a, b) =>
  Math.abs(a.when - when) - Math.abs(b.when - when))[0];
function choose(key, when) {
  const entry = nearest(key, when);
  for (const on of document.querySelectorAll(".on")) on.classList.remove("on");
  for (const shape of shapes[key] || [])
    if (nearest(key, shape.when) === entry) shape.classList.add("on");
  if (entry) { entry.classList.add("on"); entry.scrollIntoView({ block: "nearest" }); }
}
function item(shape, words, key, when) {
  for (const name of ["pointerenter", "click"])
    shape.addEventListener(name, () => { $("words").textContent = words; });
  if (key) shape.addEventListener("click", event => { event.preventDefault(); choose(key, when); });
}
function fill(shape, kind) {
  shape.style.fill = kind === "waiting" ? "url(#hatch)" : "var(--" + kind + ")";
  return shape;
}
function bars(svg, lane, who, height) {
  return lane.bars.map(([kind, start, seconds, attempt, words]) => {
    const shape = draw(svg, "rect", { class: "bar " + kind, x: percent(start), y: 0,
      width: percent(seconds), height: height });
    const said = who + ": " + kind + " for " + lasted(seconds) + ", from " + clock(start) + " to " +
      at(start + seconds) + (attempt ? ", attempt " + attempt : "") + (words ? ": " + words : ".");
    item(fill(shape, kind), said);
    return [start, said];
  });
}
function marks(svg, list, who) {
  return list.map(([kind, when, words]) => {
    const shape = draw(svg, "svg", { class: "mark " + kind, x: percent(when), y: 10,
      overflow: "visible" });
    draw(shape, "rect", { x: -10, y: -10, width: 20, height: 20, fill: "transparent" });
    draw(shape, "path", { d: paths[kind] });
    draw(shape, "path", { d: paths[kind], class: "ink" });
    const key = kind + words;
    const said = who + ": " + (names[kind] || kind) + " at " + at(when) +
      (words ? ": " + words : ".");
    item(shape, said, key, when);
    shape.when = when;
    (shapes[key] = shapes[key] || []).push(shape);
    return [when, said];
  });
}
const ended = lane => lane.ended && " \u00b7 " + lane.ended;

// The rows: of each host, and of each of its ranks.
const longest = Math.max(6, ...job.hosts.map(host => host.name.length));
document.documentElement.style.setProperty("--chars", longest);
const axis = el($("inner"), "div", "", "row");
el(axis, "div", job.utc ? "UTC" : "", "label soft");
const ticks = el(axis, "div", "", "ticks"), hosts = [], lanes = [];
for (const host of job.hosts) {
  const box = el($("inner"), "details", "", "host"), top = el(box, "summary", "", "row");
  const label = el(top, "div", host.name + " ", "label"), track = el(top, "div", "", "track");
  el(label, "small", counted(host.lanes.filter(lane => lane.rank !== null).length, "rank"), "soft");
  for (const lane of host.lanes) {
    const who = host.name + (lane.rank === null ? "" : ", rank " + lane.rank);
    bars(draw(track, "svg", { class: "thin" }), lane, who, 5);
    const isRoot = lane.marks.some(mark => mark[0] === "failed" || mark[0] === "stalled");
    const row = el(box, "div", "", "row rank" + (isRoot ? " root" : ""));
    el(row, "div", (lane.rank === null ? "no rank" : "rank " + lane.rank) + ended(lane), "label");
    const svg = draw(el(row, "div", "", "track"), "svg", {});
    const said = [...bars(svg, lane, who, 18), ...marks(svg, lane.marks, who)];
    row.items = said.sort((a, b) => a[0] - b[0]).map(each => each[1]);
    row.tabIndex = -1; row.at = -1;
    row.setAttribute("aria-label", who + ended(lane) + ": " + lane.bars.map(bar => bar[0] + " " +
      lasted(bar[2])).concat(lane.marks.map(mark => mark[0])).join(", "));
    row.text = [who, ended(lane), ...lane.bars.map(bar => bar[0]),
      ...lane.marks.flatMap(mark => [mark[0], mark[2]])].join(" ").toLowerCase();
    row.rank = lane.rank; row.of = host.name.toLowerCase();
    lanes.push(row);
  }
  const over = draw(track, "svg", { class: "over" });
  marks(over, host.marks, host.name);
  const folded = draw(over, "g", { class: "thin" });
  for (const lane of host.lanes) marks(folded, lane.marks, host.name + ", rank " + lane.rank);
  box.open = job.hosts.length * host.lanes.length <= 32;
  hosts.push(box);
}
const none = el($("inner"), "p", "No rank matches.", "soft");
if (lanes.length > 64) $("inner").style.setProperty("--thin", "3px");

// What is shown.
function matches(lane, words) {
  return words.every(word => {
    const range = /^(\d+)(?:-(\d+))?$/.exec(word);
    if (range) return lane.rank !== null && lane.rank >= +range[1] &&
      lane.rank <= +(range[2] || range[1]);
    if (job.hosts.some(host => host.name.toLowerCase() === word)) return lane.of === word;
    return word === "rank" || lane.text.includes(word);
  });
}
function show() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const lane of lanes) lane.hidden = !matches(lane, words);
  const seen = lanes.filter(lane => !lane.hidden).length;
  for (const box of hosts) {
    box.hidden = ![...box.querySelectorAll(".rank")].some(lane => !lane.hidden);
    if (words.length) box.open = true;
  }
  none.hidden = seen > 0;
  $("count").textContent = words.length ? seen + " of " + counted(lanes.length, "rank") : "";
}
let zoom = 1;
function scale(by) {
  const chart = $("chart"), before = $("inner").clientWidth;
  const middle = (chart.scrollLeft + chart.clientWidth / 2) / before;
  zoom = Math.min(256, Math.max(1, zoom * by));
  $("inner").style.setProperty("--zoom", zoom);
  chart.scrollLeft = middle * $("inner").clientWidth - chart.clientWidth / 2;
  grid();
}
function grid() {
  const wanted = total * 84 / Math.max(1, ticks.clientWidth);
  const steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200];
  const step = steps.find(s => s >= wanted) || Math.ceil(wanted / 86400) * 86400;
  ticks.textContent = "";
  const count = Math.min(4000, Math.ceil(total / step));
  for (let n = 0, s = (step - job.utc % step) % step; n < count; n += 1, s += step) {
    const fits = ticks.clientWidth * (total - s) / total > 56;
    const text = step < 43200 ? clock(s, step % 60 ? 19 : 16) : iso(s).slice(5, 16);
    el(ticks, "span", fits ? text : "\u00a0", "").style.left = percent(s);
  }
}
function fold(isOpen) { for (const box of hosts) box.open = isOpen; }
function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key, here = document.activeElement;
  if (here === $("filter")) {
    if (key === "Escape") { $("filter").value = ""; show(); }
    return;
  }
  const rows = [...document.querySelectorAll(".host:not([hidden]) > summary, [open] > .rank")]
    .filter(row => !row.hidden);
  const next = rows[rows.indexOf(here) + { ArrowDown: 1, ArrowUp: -1 }[key]];
  const by = { ArrowRight: 1, ArrowLeft: -1 }[key];
  if (key === "/") $("filter").focus();
  else if (key === "+" || key === "=") scale(2);
  else if (key === "-") scale(.5);
  else if (next) next.focus();
  else if (by && here.items) {
    here.at = Math.min(here.items.length - 1, Math.max(0, here.at + by));
    $("words").textContent = here.items[here.at];
  } else return;
  event.preventDefault();
}

// The head of the page, the legend, the events.
const ranks = lanes.filter(lane => lane.rank !== null).length;
$("job").textContent = job.job || "A job";
$("how").className = job.how === "failed" ? "failed" : "";
el($("how"), "b", job.how, "");
const code = job.exit_code === null ? "" : ", exit code " + job.exit_code;
const day = job.utc ? iso(0).slice(0, 10) + " " + clock(0) + " to " + clock(total) + " UTC, " : "";
el($("how"), "span", code + ", " + day + lasted(job.seconds) + ", " +
  counted(job.hosts.length, "host") + ", " + counted(ranks, "rank"), "soft");
$("cause").textContent = job.cause;
const again = job.events.filter(event => event.kind === "restart").map(event => clock(event.at));
if (job.attempts > 1) el($("notes"), "p", counted(job.attempts - 1, "restart") +
  (again.length ? ": at " + again.join(", ") : ""));
const last = job.events.filter(event => event.is_root).pop();
if (last) el($("notes"), "p", "Output of " + last.where + ": " + [...last.files.slice(0, 1),
  "on SageMaker the log stream " + job.job + "/" + last.host + "-\u2026"].join("; "), "soft");
for (const note of job.notes) el($("notes"), "p", "Note: " + note + ".", "soft");
el($("legend"), "li", "Average per rank:", "");
const all = job.hosts.flatMap(host => host.lanes);
for (const [kind, meaning] of Object.entries(job.kinds)) {
  if (!all.some(lane => lane.bars.some(bar => bar[0] === kind && bar[2] > total / 200))) continue;
  const entry = el($("legend"), "li", "", ""), svg = draw(entry, "svg", { class: "key" });
  fill(draw(svg, "rect", { class: "bar " + kind, x: 1, y: 1, width: 12, height: 12 }), kind);
  entry.title = meaning;
  el(entry, "span", kind + " " + lasted(job.means[kind]), "");
}
for (const event of job.events) {
  const key = event.kind + event.words, entry = el($("list"), "li", "", "");
  el(entry, "time", clock(event.at) + " ", "");
  if (paths[event.kind]) {
    const svg = draw(entry, "svg", { class: "key", viewBox: "-8 -8 16 16" });
    const mark = draw(svg, "g", { class: "mark " + event.kind });
    draw(mark, "path", { d: paths[event.kind], class: "ink" });
  }
  el(entry, "b", event.kind, event.is_root ? "root" : "");
  const who = event.words.startsWith(event.where) ? "" : event.where + (event.words && ": ");
  el(entry, "span", " " + who + event.words, "");
  if (event.text) el(entry, "pre", event.text, "");
  if (event.kind === "failed") for (const file of event.files.slice(0, 1))
    el(entry, "div", "output: " + file, "soft");
  entry.addEventListener("click", () => choose(key, event.at));
  entry.when = event.at;
  (entries[key] = entries[key] || []).push(entry);
}
$("filter").addEventListener("input", show);
$("fold").addEventListener("click", () => fold(!hosts.some(box => box.open)));
$("in").addEventListener("click", () => scale(2));
$("out").addEventListener("click", () => scale(.5));
document.addEventListener("keydown", keys);
addEventListener("resize", grid);
show(); grid();
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(found: Timeline, title: str, text: str) -> str:
    """Return the page; a browser without scripts shows `text`."""
    # Escape "<", so that no text in the data can end its block.
    data = json.dumps(_data(found)).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title[:200])}</title>\n<style>{_STYLE}</style></head><body>"
        f"<noscript><pre>{html.escape(text)}</pre></noscript>{_BODY}"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _data(found: Timeline) -> dict[str, object]:
    """Return the data for the page's script."""
    hosts = [
        {**host._asdict(), "lanes": [lane._asdict() for lane in host.lanes]} for host in found.hosts
    ]
    events = [event._asdict() for event in found.events]
    more = {"hosts": hosts, "events": events, "kinds": dict(KINDS), "means": found.means()}
    return {**found._asdict(), **more}
