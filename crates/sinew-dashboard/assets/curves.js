// All curves of a run, with other runs laid over them: each as a curve of its own, or the runs that repeat each
// other with other seeds as one curve with a band.
import { Cross, chart } from "./chart.js";
import { card, duration, empty, get, h, link, num, patch, plural, seg, segment, verdictNotice } from "./dom.js";

const hidden = new Map();

/** The points of a series; what was not measured, and steps that are missing, are gaps. */
export function pointsOf(series, curves, by) {
  const x = by === "time" ? curves.wall_s : curves.step;
  if (series.points) {
    const at = (step) => {
      if (by !== "time") return step;
      const n = curves.step.findLastIndex((s) => s <= step);
      return n < 0 ? 0 : curves.wall_s[n];
    };
    return series.points.map(([step, y, spread]) => [at(step), y, spread]);
  }
  // A point may stand for several steps, always as many.
  const stride = Math.min(...curves.step.slice(1).map((s, n) => s - curves.step[n]));
  return series.values.flatMap((y, n) => {
    const point = [x[n], y, series.spreads?.[n]];
    const missing = n > 0 && curves.step[n] - curves.step[n - 1] > stride * 1.5 && n < series.values.length - 1;
    return missing ? [[x[n - 1], null], point] : [point];
  });
}

/** Opens the step that a point of a chart belongs to; before the first one there are only measurements. */
export function opener(run, curves, by) {
  return (x) => {
    const all = by === "time" ? curves.wall_s : curves.step;
    const n = all.reduce((best, v, i) => (Math.abs(v - x) < Math.abs(all[best] - x) ? i : best), 0);
    const first = !all.length || (by !== "time" && x < curves.step[0] - 0.5);
    location.hash = first ? link("episodes", { run, purpose: "eval-before" }) : link("step", { run, step: curves.step[n] });
  };
}

/** One curve over runs: at each place that all of them measured their mean, with a band from the lowest to the highest. */
function banded(name, all, dots) {
  const at = all.map((points) => new Map(points.filter(([, y]) => y !== null).map(([x, y]) => [x, y])));
  const shared = [...at[0].keys()].filter((x) => at.every((m) => m.has(x)));
  const values = (x) => at.map((m) => m.get(x));
  return {
    name, dots, points: shared.map((x) => [x, values(x).reduce((a, b) => a + b, 0) / at.length]),
    band: shared.map((x) => [x, Math.min(...values(x)), Math.max(...values(x))]),
  };
}

export async function curvesPage({ run, runs, params, signal }) {
  const also = (params.get("also") ?? "").split(",").filter((n) => n && n !== run && runs.some((r) => r.run === n)).slice(0, 9);
  const by = params.get("x") ?? "step", smoothing = Number(params.get("smooth") ?? 0.6), find = (params.get("find") ?? "").toLowerCase();
  const names = [run, ...also], seeds = params.get("seeds") === "band";
  const [all, recipes] = await Promise.all([
    Promise.all(names.map((n) => get(`runs/${seg(n)}/curves`, signal))),
    names.length > 1 ? get(`recipes?runs=${names.map(seg).join(",")}`, signal).catch((e) => ({ error: e.message })) : null,
  ]);
  const ids = [...new Map(all.flatMap((a) => a.charts).map((c) => [c.id, c])).values()];
  if (!all[0].step.length && !ids.length) return h("div", { class: "stack" }, empty("No step is recorded yet", "The first curves appear when a step or a measurement is done."));
  const row = (name) => runs.find((r) => r.run === name);
  const repeats = runs.filter((r) => r.repeats && r.repeats === row(run)?.repeats && r.run !== run).map((r) => r.run);
  // Runs in their sets: those that repeat each other, in the order of their first ones.
  const sets = [];
  names.forEach((name, i) => {
    const same = row(name)?.repeats, set = seeds && same && sets.find((s) => row(s[0].name)?.repeats === same);
    if (set) set.push({ name, i }); else sets.push([{ name, i }]);
  });
  const cross = new Cross(), open = opener(run, all[0], by);
  const unread = all.reduce((sum, a) => sum + a.unread, 0);
  const own = row(run);
  const out = h("div", { class: "stack" }, own?.bad && verdictNotice(own.verdict, true), controls(), unread > 0 && h("div", { class: "notice" }, `${plural(unread, "line")} of the records cannot be read and ${unread === 1 ? "is" : "are"} not drawn.`));
  let section = null, grid = null;
  for (const spec of ids.filter((c) => `${c.title} ${c.id}`.toLowerCase().includes(find))) {
    if (spec.section !== section) {
      section = spec.section;
      grid = h("div", { class: "grid" });
      out.append(h("h2", { class: "section" }, section), grid);
    }
    if (!hidden.has(spec.id)) hidden.set(spec.id, new Set());
    grid.append(chart(curvesOf(spec.id), {
      id: spec.id, title: spec.title, unit: spec.unit, smoothing, cross, hidden: hidden.get(spec.id), open,
      xName: by === "time" ? "at" : "step", xFormat: by === "time" ? duration : num,
    }));
  }
  out.append(...[recipes && differences(), recipe()].filter(Boolean));
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

  /** Where the recipes of the runs differ. */
  function differences() {
    if (recipes.error) return h("div", { class: "notice" }, `Recipes are not compared: ${recipes.error}`);
    return card("Where their recipes differ", `From ${run}`, h("div", { class: "scroll" }, h("table", { id: "recipes" },
      h("thead", {}, h("tr", {}, ["Run", "Key", run, "There"].map((t) => h("th", {}, t)))),
      h("tbody", {}, recipes.others.flatMap(({ run: other, changes }) => changes.length
        ? changes.map(([key, old, now]) => h("tr", {}, h("td", { class: "tight" }, other), h("td", { class: "mono" }, key), h("td", { class: "mono" }, old), h("td", { class: "mono" }, now)))
        : [h("tr", {}, h("td", { class: "tight" }, other), h("td", { class: "mute", colspan: 3 }, "equal"))])))));
  }

  function curvesOf(id) {
    const of = (i) => all[i].charts.find((c) => c.id === id)?.series ?? [];
    return sets.flatMap((set) => {
      const named = (name) => (set.length > 1 ? `${plural(set.length, "seed")} of ${set[0].name}: ${name}` : names.length > 1 ? `${set[0].name}: ${name}` : name);
      return of(set[0].i).map((first) => {
        const points = set.map(({ i }) => of(i).find((s) => s.name === first.name)).filter(Boolean).map((s, n) => pointsOf(s, all[set[n].i], by));
        const dots = Boolean(first.points);
        return set.length > 1 && points.length === set.length ? banded(named(first.name), points, dots) : { name: named(first.name), points: points[0], dots };
      });
    });
  }

  function controls() {
    const label = h("span", { class: "num" }, smoothing.toFixed(2));
    const more = repeats.filter((r) => !names.includes(r));
    return h("div", { class: "row" },
      h("input", { type: "search", placeholder: "Find a curve  /", "data-search": true, value: find, "aria-label": "Find a curve", onchange: (e) => patch({ find: e.target.value }) }),
      h("label", { class: "range" }, "smoothing", h("input", {
        type: "range", min: 0, max: 0.95, step: 0.05, value: smoothing,
        oninput: (e) => { label.textContent = Number(e.target.value).toFixed(2); }, onchange: (e) => { e.target.blur(); patch({ smooth: e.target.value }); },
      }), label),
      h("span", { class: "mute" }, "A click on a chart opens its step."), h("span", { class: "grow" }),
      more.length > 0 && h("button", { class: "button", type: "button", title: "The same recipe with other seeds, as one curve with a band from the lowest to the highest", onclick: () => patch({ also: [...also, ...more].slice(0, 9).join(","), seeds: "band", x: "step" }) }, `with ${plural(more.length, "other seed")}`),
      runs.length > 1 && h("select", { "aria-label": "Lay another run over it", onchange: (e) => patch({ also: [...also, e.target.value].join(",") }) },
        h("option", { value: "" }, "compare with …"), runs.filter((r) => !names.includes(r.run)).map((r) => h("option", { value: r.run }, r.run))),
      also.map((n) => h("button", { class: "button", type: "button", title: "Take it away", onclick: () => patch({ also: also.filter((a) => a !== n).join(",") }) }, n, " ×")),
      repeats.some((r) => names.includes(r)) && segment([["", "each run"], ["band", "seeds as a band"]], seeds ? "band" : "", (v) => patch({ seeds: v })),
      segment([["step", "by step"], ["time", "by time"]], by, (x) => patch({ x })));
  }
}
