// What works and what waits: engine and trainer a step at a time, samples of the rollouts, phases of episodes.
import { chart } from "./chart.js";
import { card, duration, empty, get, h, link, num, patch, percent, s, seg, segment } from "./dom.js";

const ENGINE = [["engine_busy_s", "computes", "w-busy"], ["engine_tools_s", "waits for tools", "w-tools"], ["engine_trainer_s", "waits for the trainer", "w-trainer"], ["engine_empty_s", "has no episode", "w-empty"]];
const TRAINER = [["trainer_busy_s", "computes", "w-tbusy"], ["trainer_groups_s", "waits for groups", "w-groups"], ["trainer_other_s", "other waits: weights, commits, disk", "w-other"]];
/** Rows of episodes on a page. */
const MAX_EPISODES = 40;
const PHASES = ["boot", "model", "tool", "score"];

export async function timelinePage({ run, params, signal }) {
  const window_ = new URLSearchParams([...params].filter(([k]) => k === "from" || k === "to"));
  const [time, stored] = await Promise.all([get(`runs/${seg(run)}/timeline`, signal), get(`runs/${seg(run)}/phases?${window_}`, signal)]);
  if (!time.steps.length && !time.samples.length && !stored.kept) return empty("Nothing is recorded yet", "The timeline begins with the first step.");
  const last = params.get("last") ?? "60";
  const steps = last === "all" ? time.steps : time.steps.slice(-Number(last));
  return h("div", { class: "stack" },
    h("div", { class: "row" }, h("span", { class: "mute" }, time.left_out ? `${time.left_out} earlier steps are left out` : ""), h("span", { class: "grow" }),
      segment([["20", "20 steps"], ["60", "60 steps"], ["all", "all"]], last, (l) => patch({ last: l }))),
    steps.length > 0 && h("section", { class: "card lanes" }, h("h2", {}, "Engine and trainer, step by step"), lanes(steps)),
    h("div", { class: "grid three" }, total("Engine: where its time went", ENGINE, time.totals), total("Trainer: where its time went", TRAINER, time.totals), tools(time)),
    h("div", { class: "grid" }, stored.kept ? flight(stored) : time.samples.length > 2 && samples(time.samples), steps.length > 1 && rate(steps)),
    stored.kept && phases(stored, run, Number(params.get("row") ?? 0)));
}

function lanes(steps) {
  const names = ["engine", "trainer"], width = 1000, left = 70, top = 4, height = 40;
  const svg = s("svg", { viewBox: `0 0 ${width} 128`, role: "img", "aria-label": "Engine and trainer over time", preserveAspectRatio: "none", style: { height: "128px" } });
  const from = steps[0].from, to = Math.max(steps.at(-1).to, from + 1e-9);
  const x = (t) => left + (t - from) / (to - from) * (width - left);
  names.forEach((name, i) => {
    const y = top + i * (height + 10);
    svg.append(s("text", { x: 0, y: y + height / 2 + 4 }, name), s("rect", { class: "lane", x: left, y, width: width - left, height, rx: 4 }));
    for (const step of steps) {
      const parts = i ? TRAINER : ENGINE, sum = parts.reduce((a, [key]) => a + step.waits[key], 0) || 1;
      let at = step.from;
      for (const [key, text, kind] of parts) {
        const span = step.waits[key] / sum * (step.to - step.from);
        if (span <= 0) continue;
        const box = s("rect", { class: kind, x: x(at), y, width: Math.max(0.4, x(at + span) - x(at)), height });
        box.append(s("title", {}, `step ${step.step}, ${name} ${text}: ${duration(step.waits[key])} of ${duration(sum)}`));
        svg.append(box);
        at += span;
      }
    }
  });
  for (let i = 0; i <= 4; i++) {
    const t = from + (to - from) * i / 4;
    svg.append(s("text", { x: x(t), y: 122, "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle" }, duration(t)));
  }
  return h("div", { class: "scroll" }, h("div", { style: { "min-width": "640px" } }, svg),
    h("p", { class: "mute" }, "Within a step the causes stand one after another, as long as each took; their order is not that of the clock."));
}

function total(title, parts, totals) {
  const sum = parts.reduce((a, [key]) => a + totals[key], 0);
  return card(title, sum ? `${duration(sum)} in all steps` : null,
    h("div", { class: "split" }, parts.map(([key, text, kind]) => h("i", { class: kind, title: text, style: { flex: String(totals[key] || 0) } }))),
    h("div", { class: "keys" }, parts.map(([key, text, kind]) => [h("i", { class: kind }), h("span", {}, text), h("b", { class: "num right" }, sum ? percent(totals[key] / sum) : "–"), h("span", { class: "mute num right" }, duration(totals[key]))])));
}

/** Sums of the steps that the page has. What is added up over episodes that ran at once is kept apart from the wall time. */
function tools(time) {
  const sum = (key) => time.steps.reduce((a, r) => a + r[key], 0), waits = (key) => time.steps.reduce((a, r) => a + r.waits[key], 0);
  const wall = [["rollouts", sum("rollout_s")], ["training", sum("train_s")], ["publishing weights", sum("publish_s")], ["checkpoints", sum("checkpoint_s")]];
  const episodes = [["generation", sum("generate_s")], ["environments, tools and scores", sum("tool_s")], ["waits for sandboxes", waits("episodes_sandbox_s")], ["waits for the disk", waits("episodes_disk_s")]];
  const list = (rows) => h("dl", { class: "facts sums" }, rows.filter(([, v]) => v >= 0.0005).map(([name, v]) => [h("dt", {}, name), h("dd", { class: "num right" }, duration(v))]));
  const ages = Object.entries(time.staleness);
  return card("Where these steps spent time", `${num(sum("episodes"))} episodes in ${num(time.steps.length)} steps${time.left_out ? `; ${num(time.left_out)} earlier steps are not counted` : ""}`,
    h("h3", {}, "By the clock"), list(wall), h("h3", { style: { "margin-top": "10px" } }, "Added up over episodes, which run at once"), list(episodes),
    ages.length > 0 && h("p", { class: "mute" }, `Trained rows of all steps by updates behind: ${ages.map(([age, n]) => `${age}: ${num(n)}`).join(" · ")}`));
}

/** Rollouts as the process saw them each second, for runs that keep no phases. */
function samples(all) {
  const zero = all[0].at;
  const curve = (name, key, color) => ({ name, color, points: all.map((p) => [p.at - zero, p[key]]) });
  const wait = all.some((p) => p.waiting > 0);
  return chart([curve("in the model", "generating", 1), curve("in tools", "in_tool", 2), curve("in flight", "in_flight", 7), ...(wait ? [curve("waiting", "waiting", 3)] : [])],
    { xName: "at", xFormat: duration, title: "Rollouts over time", unit: "episodes, each second", id: "flight" });
}

/** Mean numbers of episodes in each phase over the window of the phases below. */
function flight(stored) {
  const zero = stored.kept[0], curve = (name, key, color) => ({ name, color, points: stored.flight.map((p) => [p.at - zero, p[key]]) });
  return chart([curve("in the model", "model", 1), curve("in tools and scores", "tool", 2), curve("starting", "boot", 7)],
    { xName: "at", xFormat: duration, title: "Rollouts over the window below", unit: "episodes, means", id: "flight" });
}

function rate(steps) {
  return chart([{ name: "tokens a second", color: 0, points: steps.map((r) => [r.to, r.sampled_tokens_per_s]) }],
    { xName: "at", xFormat: duration, title: "Sampling, step by step", unit: "tokens/s", id: "rate" });
}

/** Phases of episodes within a window of time, a row an episode; drawn across the window and not across what happens to be in it. */
function phases(stored, run, first) {
  const [from, to] = stored.window, zero = stored.kept[0], span = to - from || 1;
  const by = new Map();
  for (const row of stored.spans) {
    if (!by.has(row[0])) by.set(row[0], []);
    by.get(row[0]).push(row);
  }
  const begin = (list) => Math.min(...list.map(([, , end, length]) => end - length));
  const all = [...by].sort((a, b) => begin(a[1]) - begin(b[1])), shown = all.slice(first, first + MAX_EPISODES);
  const width = 1000, left = 150, x = (t) => left + Math.max(0, Math.min(1, (t - from) / span)) * (width - left);
  const svg = s("svg", { viewBox: `0 0 ${width} ${shown.length * 15 + 22}`, role: "img", "aria-label": "Phases of episodes", class: "phases" });
  shown.forEach(([episode, list], i) => {
    const y = i * 15;
    svg.append(s("a", { href: link("episode", { run, id: episode }) }, s("text", { x: 0, y: y + 10 }, episode.length > 22 ? `${episode.slice(0, 21)}…` : episode)), s("rect", { class: "lane", x: left, y: y + 5, width: width - left, height: 2 }));
    for (const [, phase, end, length] of list) {
      const box = s("rect", { class: `p-${phase}`, x: x(end - length), y: y + 1, width: Math.max(0.8, x(end) - x(end - length)), height: 10, rx: 1.5, "data-from": (end - length - zero).toFixed(4), "data-s": length });
      box.append(s("title", {}, `${episode}: ${phase} for ${duration(length)}, from ${duration(end - length - zero)}`));
      svg.append(box);
    }
  });
  for (let i = 0; i <= 4; i++) svg.append(s("text", { x: left + (width - left) * i / 4, y: shown.length * 15 + 18, "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle" }, duration(from - zero + span * i / 4)));
  const go = (a, b) => patch({ from: a.toFixed(3), to: b.toFixed(3), row: "" });
  const zoom = (k, at = (from + to) / 2) => go(at - (at - from) * k, at + (to - at) * k);
  // A part that is drawn over with the pointer becomes the window.
  const mark = s("rect", { class: "mark", y: 0, height: shown.length * 15, width: 0, hidden: true });
  svg.append(mark);
  const place = (e) => (e.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width * width;
  let began = null;
  svg.addEventListener("pointerdown", (e) => { if (place(e) > left && !e.target.closest("a")) { began = place(e); svg.setPointerCapture(e.pointerId); } });
  svg.addEventListener("pointermove", (e) => {
    if (began === null) return;
    mark.removeAttribute("hidden");
    mark.setAttribute("x", Math.min(began, place(e)));
    mark.setAttribute("width", Math.abs(place(e) - began));
  });
  svg.addEventListener("pointerup", (e) => {
    if (began === null) return;
    const [a, b] = [began, place(e)].sort((m, n) => m - n).map((p) => from + Math.max(0, Math.min(1, (p - left) / (width - left))) * span);
    began = null;
    if (b - a > span / 200) go(a, b); else mark.setAttribute("hidden", "");
  });
  const button = (name, text, act, off) => h("button", { class: "button", type: "button", title: name, "aria-label": name, disabled: off, onclick: act }, text);
  const cut = stored.count - stored.spans.length;
  return h("section", { class: "card lanes", id: "phases" },
    h("div", { class: "row" }, h("h2", {}, "Phases of episodes"), h("span", { class: "grow" }),
      button("Earlier", "←", () => go(from - span / 2, to - span / 2), from <= stored.kept[0]), button("Later", "→", () => go(from + span / 2, to + span / 2), to >= stored.kept[1]),
      button("Zoom in", "+", () => zoom(0.5)), button("Zoom out", "−", () => zoom(2)), button("All that is kept", "all", () => go(stored.kept[0], stored.kept[1])),
      h("a", { class: "button", href: `/api/runs/${seg(run)}/trace`, download: `${run}-trace.json`, title: "All phases that are kept, for ui.perfetto.dev or chrome://tracing" }, "Export for Perfetto")),
    h("p", { class: "mute" }, `${duration(from - zero)} to ${duration(to - zero)} of ${duration(stored.kept[1] - zero)}: ${num(stored.count)} phases, episodes ${shown.length ? `${first + 1} to ${first + shown.length}` : "0"} of ${num(all.length)}.${cut ? ` Only the first ${num(stored.spans.length)} phases are drawn: zoom in.` : ""}${stored.older_gone ? " Older phases are not kept." : ""} Draw over a part to zoom.`),
    h("div", { class: "row mute", style: { margin: "6px 0 10px" } }, PHASES.map((p) => h("span", { class: "row" }, h("i", { class: `p-${p}`, style: { width: "10px", height: "10px", "border-radius": "3px" } }), p)), h("span", { class: "grow" }),
      all.length > MAX_EPISODES && [button("Episodes before", "↑", () => patch({ row: Math.max(0, first - MAX_EPISODES) || "" }), first === 0), button("Episodes after", "↓", () => patch({ row: first + MAX_EPISODES }), first + MAX_EPISODES >= all.length)]),
    h("div", { class: "scroll" }, h("div", { style: { "min-width": "640px" } }, svg)));
}
