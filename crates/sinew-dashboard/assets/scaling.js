// Reward against compute over a set of runs, with a fit and its uncertainty.
import { chart } from "./chart.js";
import { card, duration, empty, get, h, num, patch, percent, seg, segment } from "./dom.js";

const X = [["busy_seconds", "busy seconds"], ["tokens", "tokens"], ["episodes", "episodes"], ["wall_seconds", "wall time"]];
const Y = [["success", "success"], ["reward", "reward"], ["held_out", "held-out success"]];

const capital = (text) => text[0].toUpperCase() + text.slice(1);

export async function scalingPage({ runs, params, signal }) {
  const x = params.get("x") ?? "busy_seconds", y = params.get("y") ?? "success";
  const chosen = (params.get("runs") ?? "").split(",").filter(Boolean);
  const study = await get(`scaling?x=${x}&y=${y}${chosen.length ? `&runs=${chosen.map(seg).join(",")}` : ""}`, signal);
  const with_ = study.runs.filter((r) => r.points.length > 1);
  const controls = h("div", { class: "row" }, segment(Y, y, (v) => patch({ y: v })), h("span", { class: "mute" }, "against"), segment(X, x, (v) => patch({ x: v })));
  const pick = runs.length > 1 && h("div", { class: "row" }, runs.map((r) => {
    const on = !chosen.length || chosen.includes(r.run);
    const base = chosen.length ? chosen : runs.map((o) => o.run);
    return h("label", { class: "chip plain" }, h("input", { type: "checkbox", checked: on, onchange: () => patch({ runs: (on ? base.filter((n) => n !== r.run) : [...base, r.run]).join(",") }) }), r.run);
  }));
  if (!with_.length) return h("div", { class: "stack" }, controls, pick, empty("No points yet", "A run gives a point a step, or a point a measurement."));
  const format = x === "busy_seconds" || x === "wall_seconds" ? duration : num;
  const curves = [], together = new Set(study.together.flatMap((t) => t.runs));
  const line = (name, fit, color) => ({ name, points: fit.curve.map((p) => [p[0], p[1]]), band: fit.curve.map((p) => [p[0], p[2], p[3]]), color });
  with_.forEach((r, i) => {
    curves.push({ name: r.run, points: r.points, dots: "only", color: i });
    if (r.fit && !together.has(r.run)) curves.push(line(`${r.run}, fit`, r.fit, i));
  });
  study.together.forEach((t, i) => curves.push(line(`fit over ${t.runs.join(", ")}`, t.fit, with_.length + i)));
  const fits = [...with_.filter((r) => r.fit).map((r) => [r.run, r.fit]), ...study.together.map((t) => [t.runs.join(", "), t.fit])];
  const value = y === "reward" ? num : percent;
  return h("div", { class: "stack" }, controls, pick,
    study.worlds > 1 && h("div", { class: "notice" }, `These runs have ${study.worlds} different sets of tasks and rewards: their values are not of the same thing. Only runs that repeat each other with other seeds are fitted together.`),
    chart(curves, { title: `${capital(Y.find((o) => o[0] === y)[1])} against ${X.find((o) => o[0] === x)[1]}`, unit: y === "reward" ? "mean" : "share", log: true, xName: "at", xFormat: format, id: "scaling", height: 320 }),
    fits.length ? card("Fits", "low + (high − low) / (1 + (middle / x)^slope), within 0 to 100 % for a share; the interval holds 90 % of a bootstrap",
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "comes near to", "90 % between", "half way at", "slope", "variance explained", "bootstrap over"].map((t) => h("th", {}, t)))),
        h("tbody", {}, fits.map(([name, f]) => h("tr", {}, h("td", {}, h("b", {}, name)), ...(f.reached
          ? [h("td", {}, value(f.high)), h("td", { class: "tight" }, `${value(f.high_between[0])} to ${value(f.high_between[1])}`), h("td", { class: "tight" }, format(f.middle))]
          : [h("td", { class: "mute", colspan: 3 }, "not determined: half of the way lies beyond the points")]), h("td", {}, num(f.slope)), h("td", {}, `${(100 * f.r2).toFixed(0)} %`), h("td", {}, f.over)))))))
      : h("div", { class: "notice calm" }, "A fit needs six points over a factor of 1.5 of compute."));
}
