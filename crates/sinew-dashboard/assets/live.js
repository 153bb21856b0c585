// What a run does now: phase, queues and pools, and every live rollout. What hangs comes first and is red.
import { bar, chip, duration, empty, get, h, link, num, patch, percent, seg, segment, verdictNotice } from "./dom.js";

/** Seconds in a phase that has no deadline, after which it is shown as slow, and as hung. */
const SLOW_S = 30, HUNG_S = 120;
/** Seconds without a word of the process, after which it is said. */
const SILENT_S = 10;
const WORDS = { boot: "starts", model: "in the model", tool: "in a tool", score: "is scored", wait: "waits" };

export async function livePage({ run, runs, params, signal }) {
  const { state, why, verdict, live } = await get(`runs/${seg(run)}/live`, signal);
  if (!live) return empty("This run wrote no live state", "Runs write it from this version on, while they work.");
  const running = state === "running", silent = Date.now() / 1000 - live.written_unix_s;
  const only = params.get("phase") ?? "all";
  const board = live.board.map((r) => ({ ...r, level: level(r) })).sort((a, b) => order(b) - order(a));
  const hung = board.filter((r) => r.level === "hung").length;
  const shown = board.filter((r) => only === "all" || r.phase === only || (only === "hung" && r.level !== ""));
  return h("div", { class: "stack" },
    (running || state === "ended") && runs.find((r) => r.run === run)?.bad && verdictNotice(verdict, true),
    !running && h("div", { class: `notice ${state === "ended" ? "calm" : "bad"}` }, `The run has ${state === "ended" ? "ended" : `stopped (${state})`}${why ? `: ${why}` : ""}. ${live.in_flight ? "Nothing is live any more: this is what it was at when it was last heard." : "Nothing is live any more."}`),
    running && silent > SILENT_S && h("div", { class: "notice bad" }, `The run has said nothing for ${duration(silent)}.`),
    live.alarm && h("div", { class: "notice" }, live.alarm),
    running && hung > 0 && h("div", { class: "notice bad" }, `${hung} of ${board.length} live rollouts ${hung === 1 ? "hangs" : "hang"}: longest ${duration(Math.max(...board.filter((r) => r.level === "hung").map((r) => r.phase_s)))}.`),
    h("section", { class: "card" },
      h("div", { class: "row" }, chip(running ? "running" : state, live.phase), h("b", {}, live.steps ? `step ${live.step} of ${live.steps}` : ""), h("span", { class: "mute grow num" }, duration(live.wall_s))),
      running && live.total > 0 && h("div", { class: "row", style: { "margin-top": "10px" } }, h("div", { style: { flex: "1" } }, bar(live.done / live.total)), h("span", { class: "mute num" }, `${live.done} of ${live.total}`))),
    h("div", { class: "tiles" },
      tile(live.in_flight, running ? "live rollouts" : "rollouts when last heard"), tile(live.generating, "in the model"), tile(live.in_tool, "in tools and scores"), tile(live.booting, "starting"),
      tile(Math.round(live.tokens_per_s), "sampled tokens a second"), tile(live.finished, "episodes ended"),
      h("div", { class: "tile" }, h("b", { class: live.failed ? "bad" : "" }, num(live.failed)), h("span", {}, "failed by the system")),
      tile(`${live.waiting_turns} + ${live.waiting_new}`, "turns and episodes that wait"), tile(live.limit, "may hold KV capacity"),
      h("div", { class: "tile" }, h("b", {}, live.kv_tokens ? percent(live.held_tokens / live.kv_tokens) : "–"), h("span", {}, "of KV capacity held"), live.kv_tokens > 0 && bar(live.held_tokens / live.kv_tokens))),
    h("section", { class: "card" },
      h("div", { class: "row" }, h("h2", {}, running ? "Live rollouts" : "Rollouts when the run was last heard"), h("span", { class: "mute" }, board.length ? `${shown.length} of ${num(live.in_flight)}, longest in their phase first` : ""),
        h("span", { class: "grow" }), segment([["all", "all"], ["hung", "slow"], ["model", "model"], ["tool", "tools"], ["wait", "waiting"]], only, (phase) => patch({ phase }))),
      shown.length ? h("div", { class: "board" }, shown.map((r) => roll(r, run))) : h("p", { class: "mute" }, board.length ? "None of this kind." : running ? "No rollout is live." : "None was live when the run ended.")));
}

/** How bad it is: near its deadline, or long in a phase without one. */
function level(r) {
  if (r.left_s !== null) {
    const used = r.phase_s / Math.max(1e-9, r.phase_s + r.left_s);
    return r.phase_s > SLOW_S && used > 0.8 ? "hung" : r.phase_s > SLOW_S / 3 && used > 0.5 ? "slow" : "";
  }
  return r.phase_s > HUNG_S ? "hung" : r.phase_s > SLOW_S ? "slow" : "";
}

/** The group of a live episode, which is not in the store yet. */
const group = (episode) => episode.replace(/-e\d+$/, "");
const order = (r) => ({ hung: 2e9, slow: 1e9, "": 0 })[r.level] + r.phase_s;
const tile = (value, name) => h("div", { class: "tile" }, h("b", {}, typeof value === "number" ? num(value) : value), h("span", {}, name));

function roll(r, run) {
  const all = r.left_s === null ? null : r.phase_s + r.left_s;
  return h("div", { class: `roll ${r.level}` },
    h("a", { class: "name", href: link("episodes", { run, group: group(r.episode) }), title: `${r.episode}: episodes of its group that have ended` }, r.episode),
    h("div", { class: "what" }, h("i", { class: `p-${r.phase}` }), WORDS[r.phase] ?? r.phase, h("b", {}, duration(r.phase_s))),
    all !== null && bar(r.phase_s / all, r.level === "hung" ? "bad" : r.level === "slow" ? "warn" : "good"),
    h("div", { class: "mute num" }, all === null ? "no deadline of its own" : `its episode is cut in ${duration(r.left_s)}`));
}
