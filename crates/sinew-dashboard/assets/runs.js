// Runs compared: a table, and the curves of those that are chosen over each other.
import { rows } from "./app.js";
import { Cross, chart, spark } from "./chart.js";
import { opener, pointsOf } from "./curves.js";
import { bar, duration, empty, get, h, interval, link, num, patch, percent, seg, segment, stateChip, verdictChip } from "./dom.js";

const MAX_COMPARED = 8;

export async function runsPage({ runs, params, signal, keys }) {
  if (!runs.length) return empty("No run is here yet", "`sinew train RECIPE` makes one in runs/NAME; it appears here as it begins.");
  const by = params.get("x") ?? "step";
  const asked = params.get("pick")?.split(",").filter(Boolean);
  const picked = (asked ?? runs.filter((r) => r.steps > 0).map((r) => r.run)).slice(0, MAX_COMPARED);
  const find = params.get("find") ?? "";
  const shown = runs.filter((r) => `${r.run} ${r.title} ${r.model} ${r.algorithm} ${r.env}`.toLowerCase().includes(find.toLowerCase()));
  const pick = (run, on) => patch({ pick: on ? [...picked, run].join(",") : picked.filter((p) => p !== run).join(",") || "-" });
  const open = (r) => { location.hash = link("curves", { run: r.run }); };
  const body = h("tbody", {}, shown.map((r) => h("tr", { class: "link", "data-run": r.run, onclick: (e) => { if (!e.target.closest("input, a")) open(r); } },
    h("td", {}, h("input", { type: "checkbox", checked: picked.includes(r.run), "aria-label": `Compare ${r.run}`, onchange: (e) => pick(r.run, e.target.checked) })),
    h("td", {}, h("a", { href: link("curves", { run: r.run }) }, h("b", {}, r.run)), h("div", { class: "under" }, [r.algorithm, r.mode, r.env].filter(Boolean).join(" · "))),
    h("td", {}, h("div", { class: "row", style: { gap: "4px" } }, stateChip(r.state), verdictChip(r.verdict)), h("div", { class: "under short", title: r.verdict.why }, r.verdict.why)),
    h("td", { class: "tight" }, `${num(r.steps)} of ${num(r.of_steps)}`, bar(r.of_steps ? r.steps / r.of_steps : 0, r.bad ? "bad" : r.state === "running" ? "" : r.state === "ended" ? "good" : "bad")),
    h("td", { class: "tight" }, gained(r)),
    h("td", {}, spark(r.spark)),
    h("td", { class: "right tight" }, share(r.success)), h("td", { class: "right" }, num(r.reward)), h("td", { class: "right" }, num(r.entropy)),
    h("td", { class: "right" }, num(r.episodes)), h("td", { class: "right tight" }, duration(r.wall_s)))));
  rows(keys, () => [...body.children], (row) => open({ run: row.dataset.run }));
  const head = ["", "Run", "State", "Step", "Held-out success", "Training", "Success", "Reward", "Entropy", "Episodes", "Time"];
  const right = new Set(["Success", "Reward", "Entropy", "Episodes", "Time"]);
  return h("div", { class: "stack" },
    h("div", { class: "row" },
      h("input", { type: "search", placeholder: "Find a run  /", "data-search": true, value: find, "aria-label": "Find a run", onchange: (e) => patch({ find: e.target.value }) }),
      h("span", { class: "mute" }, "Tick runs to compare them."),
      h("span", { class: "grow" }), segment([["step", "by step"], ["time", "by time"]], by, (x) => patch({ x }))),
    h("section", { class: "card flush" }, h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, head.map((t) => h("th", { class: right.has(t) ? "right" : null }, t)))), body))),
    await compared(picked.filter((p) => runs.some((r) => r.run === p)), by, signal));
}

/** A share with its interval and the episodes that it counts below it. */
function share(s, kind) {
  return s === null ? "–" : h("span", {}, h("span", { class: kind }, percent(s.share)), h("div", { class: "under whole" }, interval(s)));
}

/** Success before and after. It is called a gain or a loss only where the intervals of both lie apart. */
function gained(r) {
  if (r.before === null) return h("span", { class: "mute" }, "not measured yet");
  if (r.after === null) return share(r.before);
  const kind = r.after.low > r.before.high ? "good" : r.after.high < r.before.low ? "bad" : "mute";
  return h("span", { title: kind === "mute" ? "Their intervals overlap: the difference may be chance." : null },
    h("span", {}, `${percent(r.before.share)} → `, h("b", { class: kind }, percent(r.after.share))),
    h("div", { class: "under whole" }, `${interval(r.before)} →`, h("br"), interval(r.after)));
}

async function compared(names, by, signal) {
  if (!names.length) return "";
  const all = await Promise.all(names.map((run) => get(`runs/${seg(run)}/curves`, signal)));
  const cross = new Cross();
  const over = (id, series, dots) => names.map((name, i) => {
    const curves = all[i];
    const found = curves.charts.find((c) => c.id === id)?.series.find((c) => c.name === series);
    if (!found) return null;
    return { name, points: pointsOf(found, curves, by), dots, color: i };
  }).filter((c) => c?.points.length);
  const options = { smoothing: 0.7, cross, open: names.length === 1 ? opener(names[0], all[0], by) : null, xName: by === "time" ? "at" : "step", xFormat: by === "time" ? duration : num };
  const charts = [
    ["success", "training", "Success of training episodes", "share"], ["heldout", "held out", "Held-out success", "share", true],
    ["reward", "reward", "Reward", "mean"], ["entropy", "entropy", "Entropy", "nats"],
  ].map(([id, series, title, unit, dots]) => [over(id, series, dots), { ...options, title, unit, id }]);
  return h("div", { class: "grid" }, charts.filter(([curves]) => curves.length).map(([curves, o]) => chart(curves, o)));
}
