// A step: its numbers, what became of its episodes, and the way to them.
import { card, empty, get, h, interval, link, num, percent, plural, seg, duration } from "./dom.js";

export async function stepPage({ run, params, signal, keys, title }) {
  const step = params.get("step");
  if (!/^\d+$/.test(step ?? "")) return empty("No step is named", "A click on a chart opens its step.");
  const s = await get(`runs/${seg(run)}/steps/${step}`, signal), r = s.record;
  title(`Step ${step}`);
  const go = (to) => () => { if (to !== null) location.hash = link("step", { run, step: to }); };
  keys.n = go(s.after);
  keys.p = go(s.before);
  keys.u = () => { location.hash = link("curves", { run }); };
  const trains = r.rows > 0 && r.updates_applied > 0;
  const tiles = [
    [s.success ? percent(s.success[0]) : "–", s.success ? `success ${interval(s.success[1])}` : "success: no episode has a score"],
    [s.success ? num(r.rollout.reward) : "–", "mean reward"], [num(r.rollout.episodes), "episodes"],
    [num(s.trained), "trained on"], [num(s.dropped.length), "left out"],
    [num(r.rollout.failed), "failed by the system", r.rollout.failed > 0],
    [trains ? num(r.loss) : "–", "loss"], [trains ? num(r.grad_norm) : "–", "gradient norm"], [duration(r.wall_s), "of the run so far"],
  ];
  const all = numbers(r);
  return h("div", { class: "stack" },
    h("div", { class: "row" },
      h("button", { class: "button", type: "button", disabled: s.before === null, onclick: go(s.before) }, "Step before"),
      h("button", { class: "button", type: "button", disabled: s.after === null, onclick: go(s.after) }, "Next step"), h("span", { class: "grow" }),
      h("a", { class: "button", href: link("episodes", { run, of_step: step }) }, "Its episodes"),
      h("a", { class: "button", href: link("episodes", { run, step }) }, "Those it trained on")),
    h("div", { class: "tiles" }, tiles.map(([n, t, red]) => h("div", { class: "tile" }, h("b", { class: red ? "bad" : null }, n), h("span", {}, t)))),
    s.evals.length > 0 && card("Held-out measurements after it", null, h("table", {}, h("tbody", {}, s.evals.map((e) => h("tr", {},
      h("td", {}, h("a", { href: link("episodes", { run, purpose: e.when === "during" ? `eval-${String(e.step).padStart(5, "0")}` : `eval-${e.when}` }) }, e.when)), h("td", {}, measured(e.stats))))))),
    s.dropped.length > 0 && card("Left out", "Each with its reason", h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, s.dropped.map(([id, why]) => h("tr", {},
      h("td", { class: "tight mono" }, h("a", { href: link("episode", { run, id }) }, id)), h("td", { class: "wide" }, why))))))),
    h("details", { class: "card fold" }, h("summary", {}, `All ${all.length} numbers of its record`), h("div", {}, h("dl", { class: "facts" }, all.map(([k, v]) => [h("dt", {}, k), h("dd", { class: "num" }, v)])))));
}

/** Success with its interval, where an episode has a score. */
function measured(stats) {
  const n = stats.episodes - stats.failed - stats.unscored, i = stats.success_interval;
  if (n > 0) return `${percent(stats.success)} ${i ? interval({ ...i, n }) : `(n ${num(n)})`}`;
  return `${plural(stats.episodes, "episode")}, none with a score`;
}

/** Every number and text of a record, by its path. */
function numbers(value, path = "") {
  if (value === null) return [];
  if (typeof value !== "object") return [[path, String(value)]];
  return Object.entries(value).flatMap(([key, v]) => numbers(v, path ? `${path}.${key}` : key));
}
