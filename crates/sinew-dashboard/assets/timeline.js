// What works and what waits: engine and trainer a step at a time, samples of the rollouts, phases of episodes.
import { chart } from "./chart.js";
import { card, duration, empty, get, h, link, num, patch, percent, s, seg, segment } from "./dom.js";

const ENGINE = [["engine_busy_s", "computes", "w-busy"], ["engine_tools_s", "waits for tools", "w-tools"], ["engine_trainer_s", "waits for the trainer", "w-trainer"], ["engine_empty_s", "has no episode", "w-empty"]];
const TRAINER = [["trainer_busy_s", "computes", "w-tbusy"], ["trainer_groups_s", "waits for groups", "w-groups"], ["trainer_other_s", "other waits: weights, commits, disk", "w-other"]];
/** Rows of episodes. */
const MAX_EPISODES = 40;

export async function timelinePage({ run, params, signal }) {
  const [time, { live }] = await Promise.all([get(`runs/${seg(run)}/timeline`, signal), get(`runs/${seg(run)}/live`, signal)]);
  if (!time.steps.length && !time.samples.length) return empty("Nothing is recorded yet", "The timeline begins with the first step.");
  const last = params.get("last") ?? "60";
  const steps = last === "all" ? time.steps : time.steps.slice(-Number(last));
  return h("div", { class: "stack" },
    h("div", { class: "row" }, h("span", { class: "mute" }, time.left_out ? `${time.left_out} earlier steps are left out` : ""), h("span", { class: "grow" }),
      segment([["20", "20 steps"], ["60", "60 steps"], ["all", "all"]], last, (l) => patch({ last: l }))),
    steps.length > 0 && h("section", { class: "card lanes" }, h("h2", {}, "Engine and trainer, step by step"), lanes(steps)),
    h("div", { class: "grid three" }, total("Engine: where its time went", ENGINE, time.totals), total("Trainer: where its time went", TRAINER, time.totals), tools(time)),
    time.samples.length > 2 && samples(time.samples),
    live?.spans.length > 0 && phases(live.spans, run));
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
  return card(title, sum ? `${duration(sum)} in steps` : null,
    h("div", { class: "split" }, parts.map(([key, text, kind]) => h("i", { class: kind, title: text, style: { flex: String(totals[key] || 0) } }))),
    h("div", { class: "keys" }, parts.map(([key, text, kind]) => [h("i", { class: kind }), h("span", {}, text), h("b", { class: "num right" }, sum ? percent(totals[key] / sum) : "–"), h("span", { class: "mute num right" }, duration(totals[key]))])));
}

function tools(time) {
  const sum = (key) => time.steps.reduce((a, r) => a + r[key], 0);
  const rows = [["generation, summed over episodes", sum("generate_s")], ["environments, tools and scores, summed over episodes", sum("tool_s")], ["rollouts, wall time", sum("rollout_s")], ["training, wall time", sum("train_s")], ["publishing weights", sum("publish_s")], ["checkpoints", sum("checkpoint_s")]];
  const sandboxes = time.steps.reduce((a, r) => a + r.waits.episodes_sandbox_s, 0);
  if (sandboxes >= 0.05) rows.splice(2, 0, ["of it, waits for sandboxes", sandboxes]);
  const ages = Object.entries(time.staleness);
  return card("Episodes, weights and disk", `${num(sum("episodes"))} episodes in these steps`,
    h("dl", { class: "facts sums" }, rows.map(([name, v]) => [h("dt", {}, name), h("dd", { class: "num right" }, duration(v))])),
    ages.length > 0 && h("p", { class: "mute" }, `Trained rows by updates behind: ${ages.map(([age, n]) => `${age}: ${num(n)}`).join(" · ")}`));
}

function samples(all) {
  const zero = all[0].at;
  const curve = (name, key, color) => ({ name, color, points: all.map((p) => [p.at - zero, p[key]]) });
  const options = { smoothing: 0, xName: "at", xFormat: duration };
  const wait = all.some((p) => p.waiting > 0);
  return h("div", { class: "grid" },
    chart([curve("in the model", "generating", 1), curve("in tools", "in_tool", 2), curve("in flight", "in_flight", 7), ...(wait ? [curve("waiting", "waiting", 3)] : [])], { ...options, title: "Rollouts over time", unit: "episodes", id: "flight" }),
    chart([curve("tokens a second", "tokens_per_s", 0)], { ...options, title: "Sampling over time", unit: "tokens/s", id: "rate" }));
}

function phases(spans, run) {
  const by = new Map();
  for (const span of spans) {
    if (!by.has(span[0])) by.set(span[0], []);
    by.get(span[0]).push(span);
  }
  const newest = [...by].sort((a, b) => b[1].at(-1)[2] - a[1].at(-1)[2]).slice(0, MAX_EPISODES).reverse();
  const all = newest.flatMap(([, list]) => list);
  const from = Math.min(...all.map(([, , end, length]) => end - length)), to = Math.max(...all.map((p) => p[2]), from + 1e-9);
  const width = 1000, left = 150, x = (t) => left + (t - from) / (to - from) * (width - left);
  const svg = s("svg", { viewBox: `0 0 ${width} ${newest.length * 15 + 22}`, role: "img", "aria-label": "Phases of episodes" });
  newest.forEach(([episode, list], i) => {
    const y = i * 15;
    svg.append(s("a", { href: link("episode", { run, id: episode }) }, s("text", { x: 0, y: y + 10 }, episode.length > 22 ? `${episode.slice(0, 21)}…` : episode)), s("rect", { class: "lane", x: left, y: y + 5, width: width - left, height: 2 }));
    for (const [, phase, end, length] of list) {
      const box = s("rect", { class: `p-${phase}`, x: x(end - length), y: y + 1, width: Math.max(0.8, x(end) - x(end - length)), height: 10, rx: 1.5 });
      box.append(s("title", {}, `${episode}: ${phase} for ${duration(length)}`));
      svg.append(box);
    }
  });
  for (let i = 0; i <= 4; i++) svg.append(s("text", { x: left + (width - left) * i / 4, y: newest.length * 15 + 18, "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle" }, duration((to - from) * i / 4)));
  return h("section", { class: "card lanes" }, h("h2", {}, "Phases of the newest episodes"),
    h("div", { class: "row mute", style: { margin: "6px 0 10px" } }, ["boot", "model", "tool", "score"].map((p) => h("span", { class: "row" }, h("i", { class: `p-${p}`, style: { width: "10px", height: "10px", "border-radius": "3px" } }), p))),
    h("div", { class: "scroll" }, h("div", { style: { "min-width": "640px" } }, svg)));
}
