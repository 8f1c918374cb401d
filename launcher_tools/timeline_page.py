"""The page of `sm-launch timeline`: one file that needs nothing else, and no network.

What comes from the job is in one block of JSON, and gets into the page as text alone (textContent);
its Content-Security-Policy lets it load nothing.
"""

from __future__ import annotations

import html
import json

from launcher_tools.timeline_lanes import KINDS, Timeline

_STYLE = """
:root { color-scheme: light dark; --label: clamp(9rem, var(--chars) * .6rem + 6rem, 18rem);
  --page: #fff; --ink: #1b2530; --soft: #586472; --line: #d5dbe1; --grid: #eef1f4; --panel: #f5f7f9;
  --focus: #0b57d0; --failed: #c5221f; --joining: #b9c2cc; --start: #8fbfe6; --training: #2f78b7;
  --waiting: #f0a202; --waits: #9c6500; --saving: #2e9e6b; --ending: #d98880; --restart: #a887d1;
  --ended: #e4e8ec; --unknown: #fff; --edge: #c3cbd3; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14191f; --ink: #e4e9ee; --soft: #9eabb8; --line: #36414d; --grid: #202830;
  --panel: #1c232b; --focus: #8ab4f8; --failed: #ff6b62; --joining: #616d79; --start: #4d7ea8;
  --training: #62a8e0; --waiting: #f5b335; --waits: #8a5a00; --saving: #4fc08d; --ending: #b0615a;
  --restart: #a387d0; --ended: #2b343d; --unknown: #14191f; --edge: #46525f; } }
* { box-sizing: border-box; }
body { margin: 0; display: flex; flex-direction: column; height: 100vh;
  background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
header, .tools, .legend, main, aside { padding: 0 1rem; }
h1 { font-size: 1.15rem; margin: .8rem 0 .2rem; overflow-wrap: anywhere; }
p { margin: .2rem 0; }
.soft, .legend, .ticks { color: var(--soft); }
.cause { overflow-wrap: anywhere; max-width: 70rem; }
.failed b { color: var(--failed); }
.tools { display: flex; flex-wrap: wrap; gap: .4rem; align-items: center; margin-top: .6rem; }
input, button { font: inherit; color: inherit; background: var(--page);
  border: 1px solid var(--line); border-radius: 4px; padding: .2rem .6rem; min-height: 2rem; }
input { flex: 0 1 19rem; min-width: 8rem; }
button { cursor: pointer; } button:hover { background: var(--panel); }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 1px; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .5rem 0; padding-left: 1rem;
  list-style: none; }
.legend svg { width: 14px; height: 14px; vertical-align: -2px; margin-right: .3rem; }
.legend b { color: var(--ink); font-weight: 600; }
main { overflow: auto; flex: 1 1 0; min-height: 8rem; padding-left: 0; }
.inner { width: calc(var(--label) + (100% - var(--label)) * var(--zoom, 1)); }
.row { display: grid; grid-template-columns: var(--label) 1fr; align-items: center; }
.label { position: sticky; left: 0; z-index: 2; background: var(--page); padding: 0 .5rem 0 1rem;
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis; height: 100%;
  line-height: 20px; }
.rank .label { padding-left: 2.2rem; color: var(--soft); font-size: 13px; }
.host { border-top: 1px solid var(--line); }
.host .label { font-weight: 600; display: flex; align-items: center; padding-left: .6rem; }
.host button { border: 0; padding: 0 .35rem; min-height: 1.6rem; background: none; color: inherit;
  font-weight: 600; overflow: hidden; text-overflow: ellipsis; text-align: left; }
.host small { font-weight: 400; color: var(--soft); }
.row.at .label { background: var(--panel); color: var(--ink); }
.track { position: relative; min-height: 20px;
  background: repeating-linear-gradient(90deg, var(--grid) 0 1px, transparent 1px var(--tick)); }
.track > svg { display: block; width: 100%; height: 20px; overflow: visible; }
.track > svg.thin { height: var(--thin, 5px); overflow: hidden; margin-bottom: 1px; }
.track > svg.over { position: absolute; top: 50%; left: 0; margin-top: -10px; }
.axis { position: sticky; top: 0; z-index: 3; background: var(--page);
  border-bottom: 1px solid var(--line); }
.axis .label { z-index: 4; }
.ticks { position: relative; height: 1.5rem; overflow: hidden; font-size: 12px; }
.ticks span { position: absolute; padding-left: 3px; border-left: 1px solid var(--line);
  white-space: nowrap; }
rect, .mark { cursor: pointer; }
.bar { stroke: var(--page); stroke-width: .5px; }
.unknown, .ended { stroke: var(--edge); }
.unknown { stroke-dasharray: 3 2; }
.on { stroke: var(--ink); stroke-width: 2px; stroke-dasharray: none; }
.mark path { stroke: var(--page); stroke-width: 5px; paint-order: stroke; fill: none; }
.mark .ink { stroke-width: 2.6px; stroke: var(--ink); }
.stalled path, .stop path, .lost path { fill: var(--page); }
.mark.failed .ink { stroke: var(--failed); }
.mark.on .ink { stroke-width: 4px; }
aside { z-index: 5; background: var(--panel); border-top: 1px solid var(--line);
  padding: .45rem 1rem; height: 4.6rem; flex: none; overflow: auto; }
aside p { margin: 0; overflow-wrap: anywhere; }
.none { padding: 1rem; }
noscript pre { overflow: auto; padding: 1rem; }
[hidden] { display: none !important; }
@media (max-width: 640px), (max-height: 480px) {
  :root { --label: clamp(4.6rem, var(--chars) * .58rem + 1.7rem, 8rem); }
  body { display: block; height: auto; padding-bottom: 7rem; }
  header, .tools, .legend, aside { padding-left: .6rem; padding-right: .6rem; }
  main { padding-right: .6rem; overflow-x: auto; }
  .label { padding-left: .6rem; } .rank .label { padding-left: .9rem; }
  .host .label { padding: 0; } .host button { padding: 0 .2rem; } .host small { display: none; }
  .legend { gap: .1rem .7rem; font-size: 13px; } input { flex: 1 1 100%; }
  aside { position: fixed; left: 0; right: 0; bottom: 0; height: 6.6rem; font-size: 13px; }
}
@media (prefers-reduced-motion: no-preference) { .on { transition: stroke-width .1s; } }
"""

_BODY = """
<header>
<h1 id="job"></h1><p id="how"></p><p class="cause" id="cause"></p><div id="notes"></div>
</header>
<div class="tools">
<input id="filter" type="search" placeholder="Filter: 3  0-7  algo-2  failed" autocomplete="off"
 aria-label="Show only ranks that match" spellcheck="false">
<button id="fold" type="button">Fold all</button>
<button id="out" type="button" aria-label="Show more time">&minus;</button>
<button id="in" type="button" aria-label="Show less time, larger">+</button>
<span class="soft" id="count" role="status"></span>
</div>
<ul class="legend" id="legend" aria-label="Seconds per rank, on average"></ul>
<main id="chart" aria-label="What each rank did when"><div class="inner" id="inner"></div></main>
<aside aria-live="polite"><p id="words"></p></aside>
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
const paths = { failed: "M-5,-5L5,5M5,-5L-5,5", stalled: "M0,-6L6,5H-6Z", stop: "M-5,-5H5V5H-5Z",
  restart: "M4.5,-3A5.5,5.5 0 1 0 5.5,1.5M5,-7V-2.6H.6", lost: "M0,-7L6,0L0,7L-6,0Z" };
const names = { stalled: "others are waiting for this rank", lost: "host lost" };
function el(parent, tag, text, cls) {
  const one = document.createElement(tag);
  if (text) one.textContent = text;
  if (cls) one.className = cls;
  return parent.appendChild(one);
}
function draw(parent, tag, attributes) {
  const one = document.createElementNS(SVG, tag);
  for (const key in attributes) one.setAttribute(key, attributes[key]);
  return parent.appendChild(one);
}
function lasted(s) {
  if (s < 600) return (s < 9.95 ? s.toFixed(1) : s.toFixed(0)) + " s";
  const minutes = Math.floor(s / 60), hours = Math.floor(minutes / 60);
  return hours ? hours + " h " + minutes % 60 + " min" : minutes + " min";
}
function clock(s, step) {
  if (total < 600) return +s.toFixed(step < 1 ? 1 : 0) + " s";
  const two = n => String(Math.floor(n)).padStart(2, "0");
  return Math.floor(s / 3600) + ":" + two(s / 60 % 60) + (step % 60 ? ":" + two(s % 60) : "");
}
const percent = s => (100 * Math.min(1, Math.max(0, s / total))).toFixed(4) + "%";
const at = s => total < 600 ? s.toFixed(1) + " s" : clock(s, 1);
const counted = (n, word) => n + " " + word + (n === 1 ? "" : "s");

// Bars and marks: each knows its words, and is one of its row's items, in order of time.
let chosen = null, row = null;
function item(shape, start, words, items) {
  const one = { shape, start, words };
  if (items) items.push(one);
  shape.addEventListener("pointerenter", () => { if (!chosen) $("words").textContent = words; });
  shape.addEventListener("click", event => { event.stopPropagation(); choose(one); });
}
function choose(one) {
  if (chosen) chosen.shape.classList.remove("on");
  chosen = chosen === one ? null : one;
  if (chosen) {
    chosen.shape.classList.add("on");
    $("words").textContent = chosen.words;
    chosen.shape.scrollIntoView({ block: "nearest", inline: "nearest" });
  } else hint();
}
function hint() {
  const has_keys = !matchMedia("(pointer: coarse)").matches;
  $("words").textContent = "Point at a bar or a mark for details; click to keep them." +
    (has_keys ? " Keys: \u2191 \u2193 rows, \u2190 \u2192 bars, Enter folds a host, " +
    "/ filter, + \u2212 zoom, Esc back." : "");
}
function bars(svg, lane, who, height, items) {
  for (const [kind, start, seconds, attempt, words] of lane.bars) {
    const shape = draw(svg, "rect", { class: "bar " + kind, x: percent(start), y: 2,
      width: percent(seconds), height: height - 4 });
    if (height < 8) { shape.setAttribute("y", 0); shape.setAttribute("height", height); }
    shape.style.fill = kind === "waiting" ? "url(#hatch)" : "var(--" + kind + ")";
    item(shape, start, who + ": " + kind + " for " + lasted(seconds) + ", from " + at(start) +
      " to " + at(start + seconds) + (attempt ? ", attempt " + attempt : "") +
      (words ? ": " + words : "."), items);
  }
}
function marks(svg, list, who, items) {
  for (const [kind, when, words] of list) {
    const shape = draw(svg, "svg", { class: "mark " + kind, x: percent(when), y: 10,
      overflow: "visible" });
    draw(shape, "rect", { x: -10, y: -10, width: 20, height: 20, fill: "transparent" });
    draw(shape, "path", { d: paths[kind] });
    draw(shape, "path", { d: paths[kind], class: "ink" });
    item(shape, when, who + ": " + (names[kind] || kind) + " at " + at(when) +
      (words ? ": " + words : "."), items);
  }
}
function newRow(cls, host) {
  const one = el($("inner"), "div", "", "row " + cls), label = el(one, "div", "", "label");
  one.items = []; one.host = host;
  one.tabIndex = -1;
  one.addEventListener("focus", () => goTo(one));
  return [one, label, el(one, "div", "", "track")];
}
function goTo(one) {
  if (row) { row.tabIndex = -1; row.classList.remove("at"); }
  row = one; row.tabIndex = 0; row.classList.add("at");
}

const longest = Math.max(6, ...job.hosts.map(host => host.name.length));
document.documentElement.style.setProperty("--chars", longest);

// The rows: of each host, and of each of its ranks.
const axis = el($("inner"), "div", "", "row axis");
el(axis, "div", "", "label");
const ticks = el(axis, "div", "", "ticks"), hosts = [], lanes = [];
for (const host of job.hosts) {
  const [top, label, track] = newRow("host", null), mine = [];
  label.title = host.name;
  const button = el(label, "button", "", "");
  button.type = "button"; button.tabIndex = -1;
  const sign = el(button, "span", "", ""), size = host.lanes.filter(l => l.rank !== null).length;
  el(button, "span", " " + host.name + " ", ""); el(button, "small", counted(size, "rank"), "");
  top.setAttribute("aria-label", host.name + ", " + counted(size, "rank"));
  const thin = el(track, "div", "", ""), all = [...host.marks];
  thin.className = "track"; thin.style.background = "none"; thin.style.minHeight = "0";
  for (const lane of host.lanes) {
    const who = host.name + (lane.rank === null ? "" : ", rank " + lane.rank);
    bars(draw(thin, "svg", { class: "thin" }), lane, who, 5, null);
    const [one, name, place] = newRow("rank", top), svg = draw(place, "svg", {});
    name.textContent = lane.rank === null ? "no rank" : "rank " + lane.rank;
    bars(svg, lane, who, 20, one.items); marks(svg, lane.marks, who, one.items);
    one.items.sort((a, b) => a.start - b.start);
    const sums = {};
    for (const [kind, , seconds] of lane.bars) sums[kind] = (sums[kind] || 0) + seconds;
    one.setAttribute("aria-label", who + ": " + Object.keys(sums).map(kind => kind + " " +
      lasted(sums[kind])).concat(lane.marks.map(m => m[0])).join(", "));
    one.text = [who, ...lane.bars.map(bar => bar[0]), ...lane.marks.flatMap(m => [m[0], m[2]])]
      .join(" ").toLowerCase();
    one.bars = lane.bars; one.rank = lane.rank; one.of = host.name.toLowerCase();
    mine.push(one); lanes.push(one); all.push(...lane.marks);
  }
  const over = draw(track, "svg", { class: "over" }), group = draw(over, "g", {});
  marks(group, host.marks, host.name, top.items);
  const folded = draw(over, "g", {});
  for (const lane of host.lanes) marks(folded, lane.marks, host.name + ", rank " + lane.rank, null);
  const one = { top, mine, thin, folded, sign, button, isFolded: false };
  button.addEventListener("click", () => { one.isFolded = !one.isFolded; show(); });
  top.fold = () => button.click();
  hosts.push(one);
}
const none = el($("inner"), "p", "No rank matches.", "none soft");

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
  let seen = 0;
  for (const host of hosts) {
    const isFolded = host.isFolded && !words.length;
    let here = 0;
    for (const lane of host.mine) {
      const isHere = !words.length || matches(lane, words);
      here += isHere; lane.hidden = isFolded || !isHere;
    }
    seen += here;
    host.top.hidden = words.length > 0 && !here;
    host.thin.hidden = !isFolded;
    host.folded.style.display = isFolded ? "" : "none";
    host.sign.textContent = isFolded ? "\u25b8" : "\u25be";
    host.button.setAttribute("aria-expanded", String(!isFolded));
  }
  none.hidden = seen > 0;
  $("count").textContent = words.length ? seen + " of " + counted(lanes.length, "rank") : "";
  $("fold").textContent = hosts.every(host => host.isFolded) ? "Unfold all" : "Fold all";
  $("fold").disabled = words.length > 0;
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
  const width = ticks.clientWidth, wanted = total * 84 / Math.max(1, width);
  const steps = [.1, .2, .5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400,
    43200, 86400];
  const step = steps.find(s => s >= wanted) || Math.ceil(wanted / 86400) * 86400;
  ticks.textContent = "";
  for (let s = 0; s < total && ticks.childElementCount < 4000; s += step) {
    const fits = width * (total - s) / total > 44;
    el(ticks, "span", fits ? clock(s, step) : "\u00a0", "").style.left = percent(s);
  }
  $("inner").style.setProperty("--tick", width * step / total + "px");
}

// The keyboard.
function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target === $("filter");
  if (event.key === "Escape") {
    if (isTyping && !$("filter").value) { $("filter").blur(); (row || hosts[0].top).focus(); }
    else if (isTyping) { $("filter").value = ""; show(); }
    else if (chosen) choose(chosen);
    return;
  }
  if (isTyping) return;
  const rows = [...document.querySelectorAll(".row:not(.axis)")].filter(one => !one.hidden);
  const here = rows.indexOf(row), press = event.key, onRow = event.target.classList.contains("row");
  if (press === "/") $("filter").focus();
  else if (press === "+" || press === "=") scale(2);
  else if (press === "-") scale(.5);
  else if (press === "ArrowDown" || press === "ArrowUp") {
    const to = here + (press === "ArrowUp" ? -1 : 1);
    const next = rows[Math.max(0, Math.min(rows.length - 1, to))];
    if (next) { next.focus({ preventScroll: true }); next.scrollIntoView({ block: "nearest" }); }
  } else if ((press === "ArrowRight" || press === "ArrowLeft") && row && row.items.length) {
    const by = press === "ArrowRight" ? 1 : -1, count = row.items.length;
    const now = row.items.indexOf(chosen);
    const next = now < 0 ? (by > 0 ? 0 : count - 1) : Math.max(0, Math.min(count - 1, now + by));
    if (next !== now) choose(row.items[next]);
  } else if (press === "Enter" && onRow && row) (row.fold || row.host.fold)();
  else return;
  event.preventDefault();
}

// The head of the page.
const ranks = lanes.filter(lane => lane.rank !== null).length;
$("job").textContent = job.job || "A job";
$("how").className = job.how === "failed" ? "failed" : "";
el($("how"), "b", job.how, "");
const code = job.exit_code === null ? "" : ", exit code " + job.exit_code;
const more = job.attempts > 1 ? ", " + counted(job.attempts - 1, "restart") : "";
el($("how"), "span", code + ", " + lasted(job.seconds) + ", " + counted(job.hosts.length, "host") +
  ", " + counted(ranks, "rank") + more, "soft");
$("cause").textContent = job.cause;
for (const note of job.notes) el($("notes"), "p", "Note: " + note + ".", "soft");
el($("legend"), "li", "Average per rank:", "");
for (const [kind, meaning] of Object.entries(job.kinds)) {
  const longest = Math.max(0, ...lanes.flatMap(lane => lane.bars)
    .filter(bar => bar[0] === kind).map(bar => bar[2]));
  if (longest < total / 200) continue;
  const entry = el($("legend"), "li", "", ""), svg = draw(entry, "svg", {});
  const shape = draw(svg, "rect", { class: "bar " + kind, x: 1, y: 1, width: 12, height: 12 });
  shape.style.fill = kind === "waiting" ? "url(#hatch)" : "var(--" + kind + ")";
  entry.title = meaning;
  el(entry, "span", kind + " ", ""); el(entry, "b", lasted(job.means[kind]), "");
}
const used = new Set(job.hosts.flatMap(h => h.marks.concat(h.lanes.flatMap(l => l.marks)))
  .map(mark => mark[0]));
for (const kind of Object.keys(paths).filter(kind => used.has(kind))) {
  const entry = el($("legend"), "li", "", "");
  const svg = draw(entry, "svg", { viewBox: "-8 -8 16 16" });
  draw(draw(svg, "g", { class: "mark " + kind }), "path", { d: paths[kind], class: "ink" });
  el(entry, "span", names[kind] || kind, "");
}
if (lanes.length > 64) $("inner").style.setProperty("--thin", "3px");
if (lanes.length > 32) for (const host of hosts) host.isFolded = true;
$("filter").addEventListener("input", show);
$("fold").addEventListener("click", () => {
  const isFolded = !hosts.every(host => host.isFolded);
  for (const host of hosts) host.isFolded = isFolded;
  show();
});
$("in").addEventListener("click", () => scale(2));
$("out").addEventListener("click", () => scale(.5));
document.addEventListener("keydown", keys);
addEventListener("resize", grid);
hint(); show(); grid();
if (hosts.length) goTo(hosts[0].top);
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(found: Timeline, title: str, text: str) -> str:
    """Return the page; `text` is what a browser without scripts shows."""
    # "<" is written so that nothing in the data can end its block.
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
    """Return what the script reads; times to the millisecond."""

    def rounded(values: tuple[object, ...]) -> list[object]:
        return [round(one, 3) if isinstance(one, float) else one for one in values]

    hosts = [
        {
            "name": host.name,
            "marks": [rounded(mark) for mark in host.marks],
            "lanes": [
                {
                    "rank": lane.rank,
                    "bars": [rounded(bar) for bar in lane.bars],
                    "marks": [rounded(mark) for mark in lane.marks],
                }
                for lane in host.lanes
            ],
        }
        for host in found.hosts
    ]
    return {**found._asdict(), "hosts": hosts, "kinds": dict(KINDS), "means": found.means()}
