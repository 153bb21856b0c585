// Line charts as SVG: smoothing, a legend that hides curves, and one cross-hair for all charts of a page.
//
// A chart draws every point that it is given. What was not measured is a gap in the line, and numbers in the
// legend are those that were measured, never the smoothed ones.
import { h, interval, num, percent, s } from "./dom.js";

const LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 22;

/** Moves the cross-hair of all charts that have the same axis. */
export class Cross {
  constructor() { this.charts = new Set(); }
  show(x) { for (const chart of this.charts) chart.cross(x); }
}

/** Exponential smoothing, corrected for its start; 0 leaves the curve as it is. A gap stays a gap. */
export function smooth(points, weight) {
  let sum = 0, norm = 0;
  return points.map(([x, y]) => {
    if (y === null) return [x, null];
    sum = sum * weight + y * (1 - weight);
    norm = norm * weight + (1 - weight);
    return [x, sum / norm];
  });
}

/** Round numbers between two values. */
export function ticks(low, high, most) {
  const raw = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= raw);
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}

/**
 * A chart. `curves` are `{name, points, dots, band: [[x, low, high]], thin}`. A point is `[x, y, spread]`: `y` is
 * `null` where nothing was measured, `spread` is `{low, high, n}` of a share and may be left out. `options` have
 * `title`, `unit`, `smoothing`, `log`, `height`, `xName`, `cross`, `format`, `open`, which gets the x of a point
 * that is clicked, and `hidden`, a set of names that the page keeps.
 */
export function chart(curves, options) {
  const smoothing = options.smoothing ?? 0, hidden = options.hidden ?? new Set();
  const share = options.unit?.startsWith("share"), format = options.format ?? (share ? percent : num);
  const tick = options.format ?? (share ? (y) => `${num(100 * y)} %` : num);
  const HEIGHT = options.height ?? 190;
  const drawn = curves.map((c, i) => ({ ...c, color: (c.color ?? i) % 8, known: c.points.filter(([, y]) => y !== null), line: c.dots ? c.points : smooth(c.points, smoothing) }));
  const smoothed = (c) => !c.dots && smoothing > 0 && c.known.length > 2;
  const say = (point) => point ? `${format(point[1])}${point[2] ? ` ${interval(point[2])}` : ""}` : "";
  const at = h("span", { class: "at" }), svg = s("svg", { role: "img", "aria-label": options.title, class: options.open ? "open" : null, style: { height: `${HEIGHT}px` } });
  const values = new Map();
  const legend = h("div", { class: "legend" }, drawn.map((c) => {
    const value = h("b", {}, say(c.known.at(-1)));
    values.set(c.name, value);
    return h("button", {
      type: "button", "aria-pressed": String(!hidden.has(c.name)), title: "Show or hide this curve",
      onclick: (e) => {
        hidden.has(c.name) ? hidden.delete(c.name) : hidden.add(c.name);
        e.currentTarget.setAttribute("aria-pressed", String(!hidden.has(c.name)));
        draw();
      },
    }, h("i", { class: `f${c.color}` }), c.name, value);
  }));
  const unit = [options.unit, drawn.some(smoothed) && "thick: smoothed, thin: measured"].filter(Boolean).join(" · ");
  const box = h("section", { class: "card chart", id: options.id && `chart-${options.id}` },
    h("div", { class: "head" }, h("h3", {}, options.title), h("span", { class: "unit" }, unit), at), svg, legend);
  let scale = null, width = 0;

  function bounds(shown) {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const c of shown) {
      for (const [x, y, spread] of c.known) {
        x0 = Math.min(x0, x); x1 = Math.max(x1, x);
        y0 = Math.min(y0, y); y1 = Math.max(y1, y);
        if (spread && c.dots) { y0 = Math.min(y0, spread.low); y1 = Math.max(y1, spread.high); }
      }
      for (const [x, low, high] of c.band ?? []) { x1 = Math.max(x1, x); y0 = Math.min(y0, low); y1 = Math.max(y1, high); }
    }
    if (!Number.isFinite(x0)) return null;
    if (share && y0 >= 0 && y1 <= 1) { y0 = 0; y1 = Math.max(y1 * 1.08, 0.05); }
    else if (y0 >= 0 && y0 < y1 * 0.5) { y0 = 0; y1 *= 1.06; }
    if (y1 - y0 < 1e-12) { const pad = Math.abs(y1) * 0.1 || 0.5; y0 -= pad; y1 += pad; }
    if (x1 === x0) { x0 -= 0.5; x1 += 0.5; }
    return { x0, x1, y0, y1 };
  }

  function draw() {
    width = svg.clientWidth || 380;
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren();
    const shown = drawn.filter((c) => !hidden.has(c.name));
    const b = bounds(shown);
    if (!b) { scale = null; return; }
    const fx = options.log ? Math.log10 : (x) => x;
    const px = (x) => LEFT + (fx(x) - fx(b.x0)) / (fx(b.x1) - fx(b.x0)) * (width - LEFT - RIGHT);
    const py = (y) => HEIGHT - BOTTOM - (y - b.y0) / (b.y1 - b.y0) * (HEIGHT - TOP - BOTTOM);
    scale = { ...b, px, py, shown };
    for (const y of ticks(b.y0, b.y1, 4)) {
      svg.append(s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: py(y), y2: py(y) }),
        s("text", { x: LEFT - 7, y: py(y) + 4, "text-anchor": "end" }, tick(y)));
    }
    const xs = options.log ? decades(b.x0, b.x1) : ticks(b.x0, b.x1, Math.min(6, Math.floor(width / 80)));
    for (const x of xs) {
      svg.append(s("text", { x: px(x), y: HEIGHT - 5, "text-anchor": "middle" }, (options.xFormat ?? num)(x)));
    }
    const place = ([x, y]) => `${px(x).toFixed(1)} ${py(y).toFixed(1)}`;
    const path = (points) => points.map((point, i) => {
      if (point[1] === null) return "";
      const begins = !i || points[i - 1][1] === null, ends = (points[i + 1]?.[1] ?? null) === null;
      // A point between two gaps is a line without length, whose round ends are a dot.
      return `${begins ? "M" : "L"}${place(point)}${begins && ends ? `L${place(point)}` : ""}`;
    }).join("");
    for (const c of shown) {
      if (c.band?.length) {
        const back = [...c.band].reverse();
        const line = path([...c.band.map(([x, , high]) => [x, high]), ...back.map(([x, low]) => [x, low])]);
        svg.append(s("path", { class: `band f${c.color}`, d: `${line}Z`, style: { fill: `var(--c${c.color})` } }));
      }
      if (c.dots) {
        if (c.dots !== "only") svg.append(s("path", { class: `s${c.color}`, d: path(c.known), "stroke-dasharray": "5 4" }));
        for (const [x, y, spread] of c.known) {
          if (spread) svg.append(s("line", { class: `spread s${c.color}`, x1: px(x), x2: px(x), y1: py(spread.low), y2: py(spread.high) }));
          svg.append(s("circle", { class: `f${c.color}`, cx: px(x), cy: py(y), r: c.dots === "only" ? 2 : 3.5, opacity: c.dots === "only" ? 0.5 : 1 }));
        }
        continue;
      }
      if (smoothed(c)) svg.append(s("path", { class: `raw s${c.color}`, "data-curve": c.name, d: path(c.points) }));
      svg.append(s("path", { class: `s${c.color}${c.thin ? " raw" : ""}`, "data-curve": c.name, d: path(c.line) }));
    }
    hover.replaceChildren();
    svg.append(hover);
  }

  const hover = s("g");
  const self = {
    cross(x) {
      hover.replaceChildren();
      at.textContent = "";
      if (!scale) return;
      let line = null;
      for (const c of scale.shown) {
        const near = x === null ? c.known.at(-1) : nearest(c.known, x);
        if (near) values.get(c.name).textContent = say(near);
        if (x === null || !near) continue;
        line ??= near[0];
        hover.append(s("circle", { class: `f${c.color}`, cx: scale.px(near[0]), cy: scale.py(near[1]), r: 4 }));
      }
      if (line === null) return;
      hover.prepend(s("line", { class: "cross", x1: scale.px(line), x2: scale.px(line), y1: TOP, y2: HEIGHT - BOTTOM }));
      at.textContent = `${options.xName ?? "step"} ${(options.xFormat ?? num)(line)}`;
    },
  };
  const cross = options.cross ?? new Cross();
  cross.charts.add(self);
  const under = (e) => {
    const t = (e.clientX - svg.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT);
    const k = Math.max(0, Math.min(1, t));
    return options.log ? scale.x0 * (scale.x1 / scale.x0) ** k : scale.x0 + k * (scale.x1 - scale.x0);
  };
  svg.addEventListener("pointermove", (e) => { if (scale) cross.show(under(e)); });
  if (options.open) svg.addEventListener("click", (e) => {
    if (!scale) return;
    const x = under(e), points = scale.shown.map((c) => nearest(c.known, x)).filter(Boolean);
    const best = points.sort((a, b) => Math.abs(a[0] - x) - Math.abs(b[0] - x))[0];
    if (best) options.open(best[0]);
  });
  svg.addEventListener("pointerleave", () => cross.show(null));
  new ResizeObserver(() => { if (svg.clientWidth !== width) draw(); }).observe(svg);
  draw();
  return box;
}

function decades(low, high) {
  const all = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) {
    for (const m of [1, 3]) if (m * 10 ** p >= low && m * 10 ** p <= high) all.push([m, m * 10 ** p]);
  }
  return all.filter(([m]) => all.length <= 7 || m === 1).map(([, x]) => x);
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  if (high < 0) return null;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (points[mid][0] < x) low = mid + 1; else high = mid;
  }
  const before = points[low - 1];
  return before && x - before[0] < points[low][0] - x ? before : points[low];
}

/** Shares from 0 to 1 as a small curve without axes; `null` is a gap. */
export function spark(values) {
  const svg = s("svg", { class: "spark", viewBox: "0 0 96 26", role: "img", "aria-label": "Success of training episodes, 0 to 100 %" });
  const place = (v, i) => `${(2 + (values.length > 1 ? i / (values.length - 1) : 0.5) * 92).toFixed(1)} ${(23 - v * 20).toFixed(1)}`;
  const gap = (i) => (values[i] ?? null) === null;
  svg.append(s("line", { x1: 2, x2: 94, y1: 23, y2: 23 }), s("path", {
    d: values.map((v, i) => (gap(i) ? "" : `${gap(i - 1) ? "M" : "L"}${place(v, i)}${gap(i - 1) && gap(i + 1) ? `L${place(v, i)}` : ""}`)).join(""),
  }));
  return svg;
}
