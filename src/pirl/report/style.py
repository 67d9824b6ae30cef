"""Style sheet (light and dark) and script of the page: values at the pointer, videos that pause on a click."""

LIGHT = {
    "--page": "#f4f6f8",
    "--card": "#ffffff",
    "--text": "#18202b",
    "--soft": "#5b6675",
    "--line": "#dfe4ea",
    "--good": "#00704f",
    "--bad": "#b3261e",
    "--c0": "#0b6bb0",
    "--c1": "#cc4a00",
    "--c2": "#00805c",
    "--c3": "#a2508a",
    "--c4": "#946700",
    "--c5": "#55606e",
}
DARK = {
    "--page": "#12161c",
    "--card": "#1b2028",
    "--text": "#e8ecf1",
    "--soft": "#a3adb9",
    "--line": "#333b46",
    "--good": "#57d3a8",
    "--bad": "#ff9a90",
    "--c0": "#5eb3f0",
    "--c1": "#ff8a4c",
    "--c2": "#3fc79a",
    "--c3": "#e39acb",
    "--c4": "#e9b949",
    "--c5": "#aab4c0",
}
"""Colour-blind-safe colours (after Okabe and Ito), adjusted for contrast with the background: text at least 4.5 : 1,
lines at least 3 : 1."""


def style(runs: int) -> str:
    """The style sheet, with rules by which checkboxes hide each of `runs` runs."""

    def variables(colours: dict[str, str]) -> str:
        return ":root{" + ";".join(f"{name}:{value}" for name, value in colours.items()) + "}"

    hidden = "".join(f"body:has(#show{i}:not(:checked)) .r{i}{{display:none}}" for i in range(runs))
    return f"{variables(LIGHT)}@media(prefers-color-scheme:dark){{{variables(DARK)}}}{_RULES}{hidden}"


_RULES = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
 overflow-wrap:anywhere}
main{max-width:1400px;margin:0 auto;padding:1rem clamp(.75rem,3vw,2rem) 3rem}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0 .25rem}
section{scroll-margin-top:3rem}
h2{font-size:1.2rem;margin:2.4rem 0 .2rem}
h3{font-size:1rem;margin:1rem 0 .5rem}
p{margin:.2rem 0 .8rem;max-width:90ch}
p,small,.soft,dt{color:var(--soft)}
a{color:var(--c0)}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.8rem 0 1rem}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Consolas,monospace}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,210px),1fr));gap:.75rem;margin:1rem 0}
.card,.chart,.box{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.8rem 1rem}
.card b{display:block;font-size:1.45rem;line-height:1.25;font-variant-numeric:tabular-nums}
.card span{display:block;color:var(--soft);font-size:.85rem}
.card .range{margin:.5rem 0 .25rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0;font-size:.9rem}
dd{margin:0}
.runs{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;position:sticky;top:0;z-index:2;padding:.5rem 0;
 background:var(--page)}
.runs label{display:flex;align-items:center;gap:.4rem;cursor:pointer}
.runs input{accent-color:var(--c);width:1.05rem;height:1.05rem;margin:0;flex:none}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr));gap:.75rem}
.chart{margin:0;position:relative;min-width:0;padding-bottom:.6rem}
.large{grid-column:1/-1}
figcaption{display:flex;flex-wrap:wrap;align-items:baseline;justify-content:space-between;gap:0 .6rem}
figcaption b{font-size:.95rem}
figcaption small{flex-basis:100%;font-size:.8rem;min-height:1.2rem}
output{color:var(--c);font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.plot{display:grid;grid-template-columns:2.9rem 1fr;grid-template-rows:160px 1.5rem;margin:.5rem .5rem 0 0}
.large .plot{grid-template-rows:clamp(220px,32vw,360px) 1.5rem}
.ylabels,.xlabels,.canvas{position:relative}
.ylabels span,.xlabels span{position:absolute;font-size:11.5px;line-height:1;color:var(--soft);white-space:nowrap;
 font-variant-numeric:tabular-nums}
.ylabels span{right:.45rem;transform:translateY(50%)}
.xlabels{grid-column:2}
.xlabels span{top:.4rem;transform:translateX(-50%)}
.canvas{border-left:1px solid var(--line);border-bottom:1px solid var(--line);touch-action:pan-y}
.canvas svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.grid{stroke:var(--line);stroke-width:1}
.zero{stroke:var(--soft);stroke-width:1}
.line{stroke:var(--c);stroke-width:1.7}
.thin{stroke-width:1.1;opacity:.85}
.smooth{stroke:var(--c);stroke-width:6;opacity:.2;stroke-linecap:round}
.dense{stroke-width:1;opacity:.4}
.dense+.smooth{stroke-width:2.5;opacity:1}
.dot{stroke:var(--c);stroke-width:6;stroke-linecap:round}
.band{fill:var(--c);opacity:.16}
.d1{stroke-dasharray:6 4}.d2{stroke-dasharray:2 3}.d3{stroke-dasharray:9 3 2 3}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.key{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;margin:.35rem 0 0;padding:0;font-size:.82rem}
.key li{display:flex;align-items:center;gap:.35rem}
.swatch{width:22px;height:10px;flex:none}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);pointer-events:none}
.tip{position:absolute;top:0;z-index:3;pointer-events:none;background:var(--card);border:1px solid var(--soft);
 border-radius:6px;padding:.25rem .5rem;font-size:.8rem;white-space:nowrap;box-shadow:0 2px 8px #0003}
.tip b{display:block;color:var(--soft);font-weight:400}
.tip span{display:block;color:var(--c)}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.4rem .8rem .4rem 0;border-bottom:1px solid var(--line)}
tr:last-child>*{border-bottom:0}
thead th{color:var(--soft);font-weight:500}
td,thead th{overflow-wrap:break-word}
td small,td b{white-space:nowrap}
td code{overflow-wrap:anywhere}
tbody th{font-weight:600}
td{font-variant-numeric:tabular-nums}
.range{position:relative;display:block;height:6px;min-width:90px;border-radius:3px;background:var(--line);
 margin:.3rem 0}
.range i{position:absolute;top:0;bottom:0;border-radius:3px;background:var(--c);opacity:.45;min-width:2px}
.range em{position:absolute;top:-3px;width:4px;height:12px;margin-left:-2px;border-radius:2px;background:var(--c)}
.box+p{margin-top:.8rem}
.good{color:var(--good)}.bad{color:var(--bad)}
.reel{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(46%,160px),1fr));gap:.75rem}
.film{margin:0;min-width:0}
.film video{width:100%;display:block;border-radius:8px;background:var(--line);image-rendering:pixelated}
.film figcaption{display:block;font-size:.85rem;margin-top:.3rem}
.film .whose,.badge{display:block}
.badge{font-weight:600}.success{color:var(--good)}.failure{color:var(--bad)}
.rows{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,560px),1fr));gap:1.2rem 2rem}
.row{min-width:0}
.row.alone{grid-column:1/-1}
img{max-width:100%;height:auto;border-radius:6px}
.wide img{width:100%;image-rendering:pixelated}
details{margin:.6rem 0}
summary{cursor:pointer;font-weight:600}
details>*+*{margin-top:.6rem}
@media(max-width:640px){
 thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
 tr{display:block;padding:.5rem 0;border-bottom:1px solid var(--line)}
 tr:last-child{border-bottom:0}
 tbody th,td{display:block;border:0;padding:.1rem 0}
 td[data-label]{display:grid;grid-template-columns:minmax(6rem,38%) 1fr;gap:.6rem}
 td[data-label]::before{content:attr(data-label);color:var(--soft)}
 dl{grid-template-columns:1fr}
 dd{margin-bottom:.35rem}
}
"""

SCRIPT = """
"use strict";
for (const chart of document.querySelectorAll(".chart")) {
  const canvas = chart.querySelector(".canvas"), data = JSON.parse(chart.dataset.tips);
  let tip, cursor;
  const hide = () => { tip?.remove(); cursor?.remove(); tip = cursor = null; };
  const shown = run => { const box = document.getElementById("show" + run); return !box || box.checked; };
  const nearest = (xs, ys, at) => {
    let best = -1;
    for (let i = 0; i < xs.length; i++)
      if (ys[i] !== null && (best < 0 || Math.abs(xs[i] - at) < Math.abs(xs[best] - at))) best = i;
    return best;
  };
  const show = event => {
    const area = canvas.getBoundingClientRect(), at = (event.clientX - area.left) / area.width;
    const lines = data.lines.filter(line => shown(line[2])).map(line => [line, nearest(line[3], line[5], at)])
      .filter(found => found[1] >= 0);
    if (!lines.length) return hide();
    const x = lines.map(([line, i]) => line[3][i]).reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a);
    if (!tip) {
      tip = canvas.appendChild(document.createElement("div")); tip.className = "tip";
      cursor = canvas.appendChild(document.createElement("div")); cursor.className = "cursor";
    }
    tip.replaceChildren();
    let step = null;
    for (const [line, i] of lines) {
      if (Math.abs(line[3][i] - x) > 0.03) continue;
      if (line[4][i] !== step) {
        step = line[4][i];
        tip.appendChild(document.createElement("b")).textContent = data.word + " " + step.toLocaleString("en");
      }
      const entry = tip.appendChild(document.createElement("span"));
      entry.className = "c" + line[1];
      entry.textContent = (data.lines.length > 1 ? line[0] + " " : "") + line[5][i] + data.unit;
    }
    cursor.style.left = 100 * x + "%";
    const left = x * area.width + (x > 0.5 ? -tip.offsetWidth - 10 : 10);
    tip.style.left = Math.min(Math.max(left, 0), Math.max(area.width - tip.offsetWidth, 0)) + "px";
  };
  canvas.addEventListener("pointermove", show);
  canvas.addEventListener("pointerdown", show);
  canvas.addEventListener("pointerleave", hide);
}
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
for (const film of document.querySelectorAll("video")) {
  film.muted = true;
  if (still) { film.autoplay = false; film.pause(); continue; }
  film.controls = false;
  film.title = "click to stop or go on";
  film.style.cursor = "pointer";
  film.addEventListener("click", () => film.paused ? film.play() : film.pause());
}
"""
