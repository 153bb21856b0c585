// All curves of a run, with other runs laid over them.
import { Cross, chart } from "./chart.js";
import { duration, empty, get, h, num, patch, seg, segment } from "./dom.js";

const hidden = new Map();

export async function curvesPage({ run, runs, params, signal }) {
  const also = (params.get("also") ?? "").split(",").filter((n) => n && n !== run && runs.some((r) => r.run === n)).slice(0, 4);
  const by = params.get("x") ?? "step", smoothing = Number(params.get("smooth") ?? 0.6), find = (params.get("find") ?? "").toLowerCase();
  const names = [run, ...also];
  const all = await Promise.all(names.map((n) => get(`runs/${seg(n)}/curves`, signal)));
  const ids = [...new Map(all.flatMap((a) => a.charts).map((c) => [c.id, c])).values()];
  if (!all[0].step.length && !ids.length) return h("div", { class: "stack" }, empty("No step is recorded yet", "The first curves appear when a step or a measurement is done."));
  const cross = new Cross();
  const out = h("div", { class: "stack" }, controls());
  let section = null, grid = null;
  for (const spec of ids.filter((c) => `${c.title} ${c.id}`.toLowerCase().includes(find))) {
    if (spec.section !== section) {
      section = spec.section;
      grid = h("div", { class: "grid" });
      out.append(h("h2", { class: "section" }, section), grid);
    }
    if (!hidden.has(spec.id)) hidden.set(spec.id, new Set());
    grid.append(chart(curvesOf(spec.id), {
      id: spec.id, title: spec.title, unit: spec.unit, smoothing, cross, hidden: hidden.get(spec.id),
      xName: by === "time" ? "at" : "step", xFormat: by === "time" ? duration : num,
    }));
  }
  out.append(recipe());
  return out;

  /** The recipe as it ran, asked for when it is opened. */
  function recipe() {
    const text = h("pre", {}, "…");
    const load = async (e) => {
      if (!e.target.open || text.dataset.there) return;
      try { text.textContent = (await get(`runs/${seg(run)}/recipe`)).recipe; text.dataset.there = "yes"; } catch (error) { text.textContent = error.message; }
    };
    return h("details", { class: "card fold", ontoggle: load }, h("summary", {}, "Recipe as it ran"), h("div", {}, text));
  }

  function curvesOf(id) {
    const curves = [];
    names.forEach((name, i) => {
      const x = by === "time" ? all[i].wall_s : all[i].step;
      const at = (step) => {
        if (by !== "time") return step;
        const n = all[i].step.findLastIndex((s) => s <= step);
        return n < 0 ? 0 : all[i].wall_s[n];
      };
      for (const series of all[i].charts.find((c) => c.id === id)?.series ?? []) {
        const points = series.points?.map(([step, y]) => [at(step), y]) ?? series.values.map((y, n) => [x[n], y]).filter(([, y]) => y !== null);
        curves.push({ name: names.length > 1 ? `${name}: ${series.name}` : series.name, points, dots: Boolean(series.points) });
      }
    });
    return curves;
  }

  function controls() {
    const label = h("span", { class: "num" }, smoothing.toFixed(2));
    return h("div", { class: "row" },
      h("input", { type: "search", placeholder: "Find a curve  /", "data-search": true, value: find, "aria-label": "Find a curve", onchange: (e) => patch({ find: e.target.value }) }),
      h("label", { class: "range" }, "smoothing", h("input", {
        type: "range", min: 0, max: 0.95, step: 0.05, value: smoothing,
        oninput: (e) => { label.textContent = Number(e.target.value).toFixed(2); }, onchange: (e) => { e.target.blur(); patch({ smooth: e.target.value }); },
      }), label),
      h("span", { class: "grow" }),
      runs.length > 1 && h("select", { "aria-label": "Lay another run over it", onchange: (e) => patch({ also: [...also, e.target.value].join(",") }) },
        h("option", { value: "" }, "compare with …"), runs.filter((r) => !names.includes(r.run)).map((r) => h("option", { value: r.run }, r.run))),
      also.map((n) => h("button", { class: "button", type: "button", title: "Take it away", onclick: () => patch({ also: also.filter((a) => a !== n).join(",") }) }, n, " ×")),
      segment([["step", "by step"], ["time", "by time"]], by, (x) => patch({ x })));
  }
}
