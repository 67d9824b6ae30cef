"""The page of `pirl label`: one HTML document without external resources."""


def page(nonce: str) -> str:
    """The document; its style and script carry the nonce that the server's policy allows."""
    return _DOCUMENT.replace("NONCE", nonce)


_STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #00805c; --bad: #c0392b; --open: #8888; --both: #b36b00 }
* { box-sizing: border-box }
body { margin: 0; font: 15px/1.45 system-ui, sans-serif; height: 100vh }
body { display: grid; grid-template-columns: 15rem 1fr }
nav { border-right: 1px solid var(--line); overflow: auto; padding: .8rem }
main { padding: .8rem 1.2rem; overflow: auto }
h1 { font-size: 1rem; margin: 0 0 .4rem; overflow-wrap: anywhere }
#list { display: grid; grid-template-columns: repeat(auto-fill, minmax(2.7rem, 1fr)); gap: .25rem; margin-top: .6rem }
#list button { padding: .2rem 0; border: 2px solid var(--open); border-radius: .3rem; background: none; color: inherit }
#list .success { border-color: var(--good); background: color-mix(in srgb, var(--good) 25%, transparent) }
#list .failure { border-color: var(--bad); background: color-mix(in srgb, var(--bad) 25%, transparent) }
#list .unsure { border-style: dashed }
#list .conflict { border-color: var(--both); border-style: double; border-width: 4px; padding: 0 }
#list .here { outline: 3px solid #3b82f6 }
#films { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: .5rem }
figure { margin: 0 } video, figure img { width: 100%; background: #000; display: block }
figcaption { font-size: .8rem; opacity: .75 }
#time { width: 100% }
.row { display: flex; flex-wrap: wrap; gap: .4rem; align-items: center; margin: .5rem 0 }
.row button { padding: .35rem .7rem; font: inherit }
.chosen { outline: 3px solid currentColor }
kbd { border: 1px solid var(--line); border-radius: .25rem; padding: 0 .3rem; font-size: .8rem }
#said { min-height: 1.4em } #problem { color: var(--bad); font-weight: 600; white-space: pre-wrap }
label input { font: inherit; width: 9rem }
"""

_BODY = """
<nav>
  <h1 id="dataset"></h1>
  <label>labelled by <input id="name" maxlength="80" autocomplete="off"></label>
  <div id="count"></div>
  <div id="list"></div>
</nav>
<main>
  <h1 id="title"></h1>
  <div id="films"></div>
  <input id="time" type="range" min="0" value="0" aria-label="frame">
  <div class="row">
    <button data-do="play"><kbd>space</kbd> play</button>
    <button data-do="back"><kbd>&larr;</kbd></button><span id="frame"></span>
    <button data-do="on"><kbd>&rarr;</kbd></button>
    <label>speed <select id="speed"><option>0.5</option><option selected>1</option><option>2</option><option>4</option>
    </select></label>
    <button data-do="end"><kbd>e</kbd> last frame</button>
  </div>
  <div class="row" id="outcomes">
    <button data-do="success"><kbd>s</kbd> success</button>
    <button data-do="failure"><kbd>f</kbd> failure</button>
    <button data-do="unsure"><kbd>u</kbd> unsure</button>
    <button data-do="moment"><kbd>m</kbd> success is reached at this frame</button>
  </div>
  <div class="row" id="qualities">quality <kbd>0</kbd>&ndash;<kbd>5</kbd></div>
  <div class="row">
    <button data-do="next"><kbd>n</kbd> next unlabelled</button>
    <button data-do="previous"><kbd>k</kbd> previous</button>
    <button data-do="following"><kbd>j</kbd> following</button>
    <button data-do="undo"><kbd>z</kbd> undo</button>
  </div>
  <div id="said"></div>
  <div id="problem" role="alert"></div>
</main>
"""

_SCRIPT = """
"use strict";
const $ = id => document.getElementById(id);
let facts, labels, here = 0, frame = 0, timer = null, waiting = [], sending = false;
let quality = null;  // said before the outcome
const done = [];  // for undo: episode, and my label before
const key = () => "pirl-label:" + facts.dataset;
const episode = () => facts.episodes[here];
const me = () => $("name").value.trim();
const mine = index => (labels[index] || []).find(one => one.by === me());
const video = () => facts.cameras.some(camera => camera.kind === "video");
function keep(name, value) { try { localStorage.setItem(name, value) } catch { /* private window */ } }
function kept(name) { try { return localStorage.getItem(name) } catch { return null } }

async function start() {
  facts = await (await fetch("facts")).json();
  labels = facts.labels;
  $("dataset").textContent = facts.dataset;
  $("name").value = kept("pirl-label-name") || facts.name;
  $("name").addEventListener("change", () => { keep("pirl-label-name", me()); draw() });
  for (const one of facts.episodes) {
    const button = document.createElement("button");
    button.textContent = one.index;
    button.addEventListener("click", () => show(facts.episodes.indexOf(one)));
    $("list").append(button);
  }
  for (let quality = 0; quality <= 5; quality++) {
    const button = document.createElement("button");
    button.textContent = quality; button.dataset.do = String(quality);
    $("qualities").append(button);
  }
  document.querySelectorAll("[data-do]").forEach(one => one.addEventListener("click", () => act(one.dataset.do)));
  waiting = JSON.parse(kept(key()) || "[]");  // given before the browser died, and not yet stored
  send();
  setInterval(refresh, 5000);
  const first = facts.episodes.findIndex(one => !mine(one.index));
  show(first < 0 ? 0 : first);
}

function show(number) {
  pause();
  here = number; frame = 0; quality = null;
  $("films").replaceChildren(...facts.cameras.map((camera, position) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const film = document.createElement(camera.kind === "video" ? "video" : "img");
    if (camera.kind === "video") {
      film.src = `film/${episode().index}/${position}`;
      film.muted = true; film.playsInline = true; film.preload = "auto";
      film.addEventListener("loadedmetadata", () => seek(frame));
      film.addEventListener("error", () => tell(`the film of ${camera.name} cannot be played by this browser`));
    }
    caption.textContent = camera.name;
    figure.append(film, caption);
    return figure;
  }));
  $("time").max = episode().length - 1;
  seek(0);
  draw();
}

const films = () => [...$("films").querySelectorAll("video, img")];
const begin = position => (episode().first[position] + 0.5) / facts.fps;  // the middle of the first frame
function seek(number) {
  frame = Math.max(0, Math.min(episode().length - 1, number));
  films().forEach((film, position) => {
    if (film.tagName === "IMG") film.src = `frame/${episode().index}/${position}/${frame}`;
    else if (film.readyState > 0) film.currentTime = begin(position) + frame / facts.fps;
  });
  mark();
}
function mark() {
  $("time").value = frame;
  $("frame").textContent = `frame ${frame} of ${episode().length - 1} (${(frame / facts.fps).toFixed(2)} s)`;
}
function play() {
  if (timer !== null) return pause();
  if (frame >= episode().length - 1) seek(0);
  const speed = Number($("speed").value);
  if (video()) films().forEach(film => { if (film.play) { film.playbackRate = speed; film.play().catch(() => {}) } });
  let started = performance.now(), from = frame;
  timer = setInterval(() => {
    const film = films()[0];
    const at = film.tagName === "VIDEO"
      ? Math.floor(film.currentTime * facts.fps + 0.01) - episode().first[0]
      : from + Math.floor((performance.now() - started) / 1000 * facts.fps * speed);
    if (at >= episode().length - 1) { pause(); return seek(episode().length - 1) }
    if (at === frame) return;
    frame = Math.max(0, at);
    films().forEach((one, position) => {
      if (one.tagName === "IMG") one.src = `frame/${episode().index}/${position}/${frame}`;
    });
    mark();
  }, 1000 / 30);
}
function pause() {
  if (timer !== null) clearInterval(timer);
  timer = null;
  films().forEach(film => { if (film.pause) film.pause() });
}

function draw() {
  let open = 0, conflicts = 0;
  facts.episodes.forEach((one, number) => {
    const said = labels[one.index] || [], button = $("list").children[number], own = mine(one.index);
    const words = new Set(said.map(label => label.outcome));
    const conflict = words.has("success") && words.has("failure");
    button.className = own ? own.outcome : "";
    if (conflict) { button.classList.add("conflict"); conflicts++ }
    if (number === here) button.classList.add("here");
    button.title = said.map(label => `${label.by}: ${label.outcome}`).join(", ") || "no label";
    if (!own) open++;
  });
  $("count").textContent = `${facts.episodes.length - open} of ${facts.episodes.length} labelled by you` +
    (conflicts ? `, ${conflicts} conflicts` : "");
  const own = mine(episode().index);
  $("title").textContent = `episode ${episode().index}: ${episode().task}`;
  document.querySelectorAll("#outcomes button, #qualities button").forEach(one => {
    const word = one.dataset.do;
    one.classList.toggle("chosen", String(own ? own.quality : quality) === word || Boolean(own) &&
      (own.outcome === word || (word === "moment" && own.moment !== null)));
  });
  $("said").textContent = (labels[episode().index] || []).map(one => `${one.by}: ${one.outcome}` +
    (one.moment === null ? "" : ` at frame ${one.moment}`) + (one.quality === null ? "" : `, quality ${one.quality}`) +
    (one.score == null ? "" : ` (score ${one.score})`)
  ).join(" · ") + (waiting.length ? ` (${waiting.length} not stored yet)` : "");
}
function tell(text) { $("problem").textContent = text }

function give(change, index = episode().index, undoing = false) {
  if (!me()) { tell("type your name first: it is stored with the label"); $("name").focus(); return false }
  tell("");
  const before = mine(index) || {outcome: null, moment: null, quality};
  const label = {...before, ...change, episode_index: index, by: me()};
  if (label.outcome !== "success") label.moment = null;
  if (!undoing) done.push({index, before: {...(mine(index) || {outcome: null, moment: null, quality: null})}});
  const others = (labels[index] || []).filter(one => one.by !== me());
  labels[index] = label.outcome === null ? others : [...others, label];
  waiting.push(label);
  keep(key(), JSON.stringify(waiting));
  draw();
  send();
  return true;
}
async function send() {
  if (sending) return;
  sending = true;
  try {
    while (waiting.length) {
      const body = JSON.stringify(waiting[0]);
      const answer = await fetch("labels", {method: "POST", headers: {"Content-Type": "application/json"}, body});
      const said = await answer.json();
      if (!answer.ok && answer.status !== 400) throw new Error(said.error);
      if (!answer.ok) tell(said.error);
      waiting.shift();
      keep(key(), JSON.stringify(waiting));
      if (!waiting.length) labels = said.error ? await (await fetch("labels")).json() : said;
    }
  } catch (error) {
    tell("not stored: is `pirl label` still running? Labels are kept in this browser and sent when it answers again.");
    setTimeout(send, 2000);
  } finally { sending = false; draw() }
}
async function refresh() {
  if (waiting.length || sending) return;
  try {
    const found = await (await fetch("labels")).json();
    if (!waiting.length && !found.error) { labels = found; draw() }
  } catch { /* told when the next label is sent */ }
}

function next() {
  const count = facts.episodes.length;
  for (let step = 1; step <= count; step++) {
    const number = (here + step) % count;
    if (!mine(facts.episodes[number].index)) return show(number);
  }
  tell("all episodes have your label");
}
function undo() {
  const last = done.pop();
  if (!last) return tell("nothing to undo");
  give(last.before, last.index, true);
  show(facts.episodes.findIndex(one => one.index === last.index));
}
function act(word) {
  if (["success", "failure", "unsure"].includes(word)) { if (give({outcome: word})) next() }
  else if (word === "moment") give({outcome: "success", moment: frame});
  else if (/^[0-5]$/.test(word)) {
    if (mine(episode().index)) give({quality: Number(word)}); else { quality = Number(word); draw() }
  } else if (word === "play") play();
  else if (word === "back") { pause(); seek(frame - 1) }
  else if (word === "on") { pause(); seek(frame + 1) }
  else if (word === "end") { pause(); seek(episode().length - 1) }
  else if (word === "next") next();
  else if (word === "previous") show(Math.max(0, here - 1));
  else if (word === "following") show(Math.min(facts.episodes.length - 1, here + 1));
  else if (word === "undo") undo();
}
const KEYS = {s: "success", f: "failure", u: "unsure", m: "moment", " ": "play", ArrowLeft: "back", ArrowRight: "on",
  e: "end", n: "next", k: "previous", j: "following", z: "undo", 0: "0", 1: "1", 2: "2", 3: "3", 4: "4", 5: "5"};
addEventListener("keydown", event => {
  const field = event.target.closest("input:not([type=range]), select");
  if (field || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  act(KEYS[event.key]);
});
$("time").addEventListener("input", () => { pause(); seek(Number($("time").value)) });
addEventListener("beforeunload", event => { if (waiting.length) event.preventDefault() });
start();
"""

_DOCUMENT = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pirl label</title><link rel="icon" href="data:,">
<style nonce="NONCE">{_STYLE}</style></head><body>{_BODY}<script nonce="NONCE">{_SCRIPT}</script></body></html>
"""
