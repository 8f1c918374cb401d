"""The page of `sm-launch timeline`: one file that needs no other file, and no network.

It is whole without its script, which filters, folds, enlarges and explains. What comes from the job
is escaped by ElementTree, and its Content-Security-Policy lets the page load nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from launcher.text.words import lasted, plural
from launcher_tools.timeline_lanes import KINDS, Event, Lane, Timeline

_MOST_UNFOLDED = 32  # ranks
_SHAPES = {
    "failed": "M-5,-5L5,5M5,-5L-5,5",
    "stalled": "M0,-6L6,5H-6Z",
    "saved": "M-5,0L-1,5L6,-5",
    "stop": "M-5,-5H5V5H-5Z",
    "restart": "M4.5,-3A5.5,5.5 0 1 0 5.5,1.5M5,-7V-2.6H.6",
    "lost": "M0,-7L6,0L0,7L-6,0Z",
}

_STYLE = """
:root { color-scheme: light dark; --page: light-dark(#fff, #14191f);
  --ink: light-dark(#1b2530, #e4e9ee); --soft: light-dark(#586472, #9eabb8);
  --line: light-dark(#d5dbe1, #36414d); --panel: light-dark(#f5f7f9, #1c232b);
  --edge: light-dark(#c3cbd3, #46525f); --bad: light-dark(#c5221f, #ff6b62); }
* { box-sizing: border-box; }
body { --label: clamp(9.6rem, var(--chars) * .6rem + 5.5rem, 18rem);
  --thin: clamp(3px, 320px / var(--ranks), 5px); margin: 0; padding: 0 1rem 3.4rem;
  background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1, h2 { font-size: 1.15rem; margin: .8rem 0 .2rem; overflow-wrap: anywhere; }
p { margin: .2rem 0; overflow-wrap: anywhere; max-width: 75rem; }
.soft, .legend, .ticks, .rank .label, time { color: var(--soft); }
p.failed b, li[class=failed] b, .rank.root .label { color: var(--bad); }
.tools, .legend { display: flex; flex-wrap: wrap; gap: .3rem .9rem; align-items: center;
  margin: .5rem 0; padding: 0; list-style: none; }
.tools > * { font: inherit; color: inherit; background: var(--page); border: 1px solid var(--line);
  border-radius: 4px; padding: .2rem .6rem; min-height: 2rem; }
#filter { flex: 0 1 19rem; min-width: 8rem; } #count { border: 0; }
.icon { width: 20px; height: 20px; fill: none; stroke: var(--ink); stroke-width: 2.6px; }
.icon .edge { stroke: var(--page); stroke-width: 5px; } .icon.failed { stroke: var(--bad); }
li .icon { width: 16px; height: 16px; vertical-align: -3px; margin-right: .3rem; }
.key { display: inline-block; width: 12px; height: 12px; margin-right: .3rem; }
.both { display: grid; grid-template-columns: minmax(0, 1fr) 26rem; gap: 1rem; }
#chart { overflow-x: auto; align-self: start; } [hidden] { display: none !important; }
#inner { padding-right: 11px; /* for a mark at the end */
  width: calc(var(--label) + 11px + (100% - var(--label) - 11px) * var(--zoom, 1)); }
.row { display: grid; grid-template-columns: var(--label) 1fr; align-items: center; }
.label { position: sticky; left: 0; z-index: 3; background: var(--page); padding: 0 .5rem;
  white-space: nowrap; min-height: 22px; }
.rank .label { font-size: 13px; padding-left: 1.2rem; }
.host { position: relative; min-height: 23px; border-top: 1px solid var(--line); }
button.label { border: 0; font: inherit; font-weight: 600; color: inherit; text-align: left;
  cursor: pointer; } button.label::before { content: "\\25be\\00a0"; }
.folded button.label::before { content: "\\25b8\\00a0"; }
.track { position: relative; height: 20px; grid-column: 2; } .folded .rank .label { display: none; }
.bar { position: absolute; top: 1px; bottom: 1px; border-right: .5px solid var(--page); }
i.ended, i.unknown { border: 1px solid var(--edge); } i.unknown { border-style: dashed; }
i.waiting, i.absent { --dark: light-dark(#9c6500, #8a5a00);
  background: repeating-linear-gradient(135deg, var(--dark) 0 2px, transparent 2px 6px); }
i.absent { --dark: var(--page); } .folded .icon.restart { translate: 14px; /* beside a failure */ }
.bar, .track .icon, #list li { cursor: pointer; } .icon.on { stroke-width: 4.5px; }
.track .icon { position: absolute; top: 50%; margin: -10px; z-index: 2; }
.folded .head { position: absolute; inset: 0; pointer-events: none; }
.folded .head > .label, .head .icon { pointer-events: auto; }
.folded .rank .track { height: var(--thin); margin-bottom: 1px; } .folded .bar { inset-block: 0; }
.folded .rank .icon { top: calc(50% + var(--up) * (var(--thin) + 1px)); }
.ticks { position: relative; height: 2em; overflow: hidden; font-size: 12px; white-space: nowrap; }
.ticks span { position: absolute; padding-left: 3px; border-left: 1px solid var(--line); }
#list { list-style: none; margin: 0; padding: 0; } #list li.on { background: var(--panel); }
#list li { border-top: 1px solid var(--line); padding: .3rem .4rem; overflow-wrap: anywhere; }
time { font-variant-numeric: tabular-nums; margin-right: .5rem; }
pre { overflow: auto; font-size: 12px; margin: .2rem 0; white-space: pre-wrap; max-height: 24rem; }
#words { position: fixed; inset: auto 0 0; z-index: 5; max-width: none; min-height: 2.2rem;
  padding: .45rem 1rem; background: var(--panel); border-top: 1px solid var(--line); margin: 0; }
@media (min-width: 1001px) { #chart { position: sticky; top: 0; max-height: calc(100vh - 3rem); } }
@media (max-width: 1000px) {
  .both { grid-template-columns: minmax(0, 1fr); } .head small { display: none; }
  body { --label: clamp(8.2rem, var(--chars) * .58rem + 3.2rem, 9rem); padding: 0 .6rem 5rem; }
  .rank .label { padding-left: .2rem; font-size: 12px; } #filter { flex: 1 1 100%; }
}
"""

_PAGE = """<html lang="en"><head><meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/><title/><style/></head>
<body><header/>
<div class="tools">
<input id="filter" type="search" placeholder="Filter: 3  0-7  algo-2  failed" autocomplete="off"
 aria-label="Show only ranks that match" spellcheck="false"/>
<button id="fold">Fold all</button><button id="out" aria-label="Zoom out">\u2212</button>
<button id="in" aria-label="Zoom in">+</button>
<span class="soft" id="count" role="status"></span></div>
<ul class="legend" id="legend"><li>Average per rank:</li></ul>
<div class="both"><main id="chart" aria-label="Ranks"><div id="inner">
<div class="row"><div class="label soft">UTC</div><div class="ticks" id="ticks"/></div>
</div></main><section><h2>Events</h2><ol id="list"/></section></div>
<p id="words" aria-live="polite">Point at a bar or a mark, or tap it, to read what it is.</p>
<script/></body></html>"""

_SCRIPT = r"""
"use strict";
const $ = id => document.getElementById(id);
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const inner = $("inner"), total = Math.max(+inner.dataset.seconds, 1e-3), utc = +inner.dataset.utc;
const hosts = all(".host"), lanes = all(".rank"), ticks = $("ticks");
function choose(number) {
  for (const item of all("[data-event]"))
    item.classList.toggle("on", item.dataset.event === number);
  $("event-" + number).scrollIntoView({ block: "nearest" });
}
function point(event) {
  const item = event.target.closest("[data-words]");
  if (item) $("words").textContent = item.dataset.words;
}
function fold(host, isFolded) {
  host.classList.toggle("folded", isFolded);
  host.querySelector("button").setAttribute("aria-expanded", !isFolded);
}
function clicked(event) {
  point(event);
  const item = event.target.closest("[data-event]"), button = event.target.closest(".host button");
  if (item) choose(item.dataset.event);
  if (button) fold(button.closest(".host"), !button.closest(".folded"));
}
function matches(lane, word) {
  const range = /^(\d+)(?:-(\d+))?$/.exec(word), rank = lane.dataset.rank;
  if (range) return rank !== "" && +rank >= +range[1] && +rank <= +(range[2] || range[1]);
  const text = lane.getAttribute("aria-label").toLowerCase();
  return /\d$/.test(word) ? text.split(/[\s,:]+/).includes(word) : text.includes(word);
}
function show() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const lane of lanes) lane.hidden = !words.every(word => matches(lane, word));
  const seen = lanes.filter(lane => !lane.hidden).length;
  for (const host of hosts) {
    host.hidden = !host.querySelector(".rank:not([hidden])");
    if (words.length) fold(host, false);
  }
  $("count").textContent = words.length ? `${seen} of ${lanes.length} ranks` : "";
}
let zoom = 1;
function scale(by) {
  const chart = $("chart"), middle = (chart.scrollLeft + chart.clientWidth / 2) / inner.clientWidth;
  zoom = Math.min(256, Math.max(1, zoom * by));
  inner.style.setProperty("--zoom", zoom);
  chart.scrollLeft = middle * inner.clientWidth - chart.clientWidth / 2;
  grid();
}
function grid() {
  const width = ticks.clientWidth, room = s => s >= 43200 ? 82 : s % 60 ? 60 : 42;
  const steps = [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 45, 60, 120, 240, 300, 600, 1200, 1800,
    3600, 7200, 14400, 43200, 86400, 604800];
  const step = steps.find(s => s * width / total >= room(s) * (width > 400 ? 1.5 : 1)) || total;
  const [from, to] = step >= 43200 ? [5, 16] : step % 60 ? [11, 19] : [11, 16];
  ticks.textContent = "";
  for (let s = (step - utc % step) % step; s < total - total * room(step) / width; s += step) {
    const tick = ticks.appendChild(document.createElement("span"));
    tick.style.left = 100 * s / total + "%";
    tick.textContent = new Date((utc + s) * 1000).toISOString().slice(from, to).replace("T", " ");
  }
}
function pressed(event) {
  const here = document.activeElement;
  const rows = all(".host:not([hidden]) button, .host:not(.folded) .rank:not([hidden])");
  const next = rows[rows.indexOf(here) + { ArrowDown: 1, ArrowUp: -1 }[event.key]];
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (next) next.focus();
  else if (by && lanes.includes(here)) {
    const items = all("[data-words]", here)
      .sort((a, b) => parseFloat(a.style.left) - parseFloat(b.style.left));
    here.at = Math.min(items.length - 1, Math.max(0, (here.at ?? -1) + by));
    $("words").textContent = items[here.at].dataset.words;
  } else return;
  event.preventDefault();
}
$("filter").addEventListener("input", show);
$("fold").addEventListener("click", () => {
  const isFolded = hosts.some(host => !host.matches(".folded"));
  for (const host of hosts) fold(host, isFolded);
});
$("in").addEventListener("click", () => scale(2));
$("out").addEventListener("click", () => scale(.5));
document.addEventListener("pointerover", point);
document.addEventListener("click", clicked);
document.addEventListener("keydown", pressed);
addEventListener("resize", grid);
grid();
"""


def page(found: Timeline, title: str) -> str:
    """Return the page."""
    html = fromstring(_PAGE)
    parts = {part.get("id", part.tag): part for part in html.iter()}
    parts["title"].text = title[:200]
    fills = [
        f"i.{name} {{ background-color: light-dark({kind.light}, {kind.dark}); }}\n"
        for name, kind in KINDS.items()
    ]
    parts["style"].text = "".join([_STYLE, *fills])
    parts["script"].text = _SCRIPT
    sizes = f"--chars: {max(6, *map(len, found.hosts))}; --ranks: {len(found.lanes)}"
    parts["body"].set("style", sizes)
    _add_head(parts["header"], found)
    _add_legend(parts["legend"], found)
    _add_chart(parts["inner"], found)
    _add_events(parts["list"], found)
    return "<!doctype html>\n" + tostring(html, "unicode", method="html")


def _add(parent: Element, tag: str, text: str, kind: str = "", **more: str) -> Element:
    made = SubElement(parent, tag, {"class": kind, **more} if kind else more)
    made.text = text
    return made


def _add_head(header: Element, found: Timeline) -> None:
    _add(header, "h1", found.job or "A job")
    how = _add(header, "p", "", found.how.replace(" ", "-"), id="how")
    _add(how, "b", found.how)
    code = "" if found.exit_code is None else f", exit code {found.exit_code}"
    when = f"{found.clock(0, '%Y-%m-%d %H:%M:%S')} to {found.clock(found.seconds)} UTC"
    _add(how, "span", f"{code}, {when}, {lasted(found.seconds)}, {found.size}", "soft")
    _add(header, "p", found.cause, id="cause")
    restarts = [event.line for event in found.events if event.kind == "restart"]
    for line in restarts[-1:]:
        at = f"{plural(len(restarts), 'restart')}, the last at {found.clock(line.seconds)}"
        _add(header, "p", f"{at}: {line.cause}")
    for event in [event for event in found.events if event.kind == "failed"][-1:]:
        stream = f"on SageMaker the log stream {found.job}/{event.line.host}-\u2026"
        places = [event.output, "" if found.job.startswith("local-") else stream]
        words = f"Output of the last failure, {event.where}: {'; '.join(filter(None, places))}"
        _add(header, "p", words, "soft", id="output")
    for note in found.notes:
        _add(header, "p", f"Note: {note}.", "soft")


def _add_legend(legend: Element, found: Timeline) -> None:
    for name, seconds in found.means().items():
        entry = _add(legend, "li", "", title=KINDS[name].meaning)
        _add(entry, "i", "", f"key {name}")
        _add(entry, "span", f"{name} {lasted(seconds)}")


def _add_chart(inner: Element, found: Timeline) -> None:
    inner.attrib |= {"data-seconds": str(found.seconds), "data-utc": str(found.utc)}
    folded = "" if len(found.lanes) <= _MOST_UNFOLDED else " folded"
    for host, lanes in found.hosts.items():
        box = _add(inner, "div", "", f"host{folded}")
        row = _add(box, "div", "", "row head")
        label = _add(row, "button", f"{host} ", "label")
        label.set("aria-expanded", str(not folded).lower())
        _add(label, "small", plural(sum(lane.rank is not None for lane in lanes), "rank"), "soft")
        _add_marks(_add(row, "div", "", "track"), found, found.marks[host, None])
        for number, lane in enumerate(lanes):
            _add_lane(box, found, lane).set("style", f"--up: {(len(lanes) - 1) / 2 - number}")


def _add_lane(box: Element, found: Timeline, lane: Lane) -> Element:
    ended = f" \u00b7 {lane.ended}" if lane.ended else ""
    marks = found.marks[lane.host, lane.rank]
    marked = [found.events[number] for _, number in marks]
    roots = [event for event in marked if event.kind in ("failed", "stalled")]
    row = _add(box, "div", "", "row rank root" if roots else "row rank", tabindex="-1")
    spent = [f"{bar.kind} {lasted(bar.seconds)}" for bar in lane.bars]
    spent += [event.kind for event in marked]
    row.set("aria-label", f"{lane.name}{ended}: {', '.join(spent)}")  # the filter reads it, too
    row.set("data-rank", "" if lane.rank is None else str(lane.rank))
    if roots and (lane.ended == "exit 0" or roots[-1].line.attempt < found.attempts):
        times = [event.kind for event in roots].count(roots[-1].kind)
        ended = f" \u00b7 {roots[-1].kind} {'once' if times == 1 else f'{times} times'}"
    _add(row, "div", ("no rank" if lane.rank is None else f"rank {lane.rank}") + ended, "label")
    track = _add(row, "div", "", "track")
    for bar in lane.bars:
        attempt = f", attempt {bar.attempt}" if bar.attempt else ""
        words = f"{lane.name}: {bar.kind} for {lasted(bar.seconds)}, from "
        words += f"{found.clock(bar.start)} to {found.clock(bar.start + bar.seconds)} UTC{attempt}"
        made = _add(track, "i", "", f"bar {bar.kind}", style=_place(found, bar.start, bar.seconds))
        made.set("data-words", f"{words}: {bar.words}" if bar.words else f"{words}.")
    _add_marks(track, found, marks)
    return row


def _add_marks(track: Element, found: Timeline, marks: Sequence[tuple[float, int]]) -> None:
    for at, number in marks:
        event = found.events[number]
        icon = _add_icon(track, event)
        icon.set("style", _place(found, at))
        when = f"{found.clock(at)} UTC ({lasted(at)} after the start)"
        icon.set("data-words", f"{when}: {event.kind}: {event.summary}")
        icon.set("data-event", str(number))


def _place(found: Timeline, at: float, seconds: float | None = None) -> str:
    unit = 100 / max(found.seconds, 1e-3)
    width = "" if seconds is None else f"; width: {seconds * unit:.4f}%"
    return f"left: {at * unit:.4f}%{width}"


def _add_icon(parent: Element, event: Event) -> Element:
    icon = _add(parent, "svg", "", f"icon {event.kind}", viewBox="-10 -10 20 20")
    for kind in ("edge", "ink"):
        _add(icon, "path", "", kind, d=_SHAPES[event.kind])
    return icon


def _add_events(entries: Element, found: Timeline) -> None:
    for number, event in enumerate(found.events):
        entry = _add(entries, "li", "", event.kind, id=f"event-{number}")
        entry.set("data-event", str(number))
        _add(entry, "time", f"{found.clock(event.line.seconds)} ")
        if event.kind in _SHAPES:
            _add_icon(entry, event)
        is_also = event.kind == "also failed"  # most often because of the first
        _add(entry, "b", event.kind).tail = f" {event.where if is_also else event.summary}"
        inside = SubElement(entry, "details") if is_also else entry
        for text in filter(None, [event.line.words if is_also else "", event.line.text]):
            _add(inside, "pre", text)
