// Episodes of a run, by the filters of `sinew episodes`, a page at a time.
import { rows } from "./app.js";
import { chip, duration, empty, get, h, link, num, patch, seg } from "./dom.js";

const TEXT = [["type", "task type"], ["env", "environment"], ["group", "group"]];
const NUMBERS = [["step", "trained in step"], ["of_step", "of step, left out too"], ["draw", "draw"], ["at_turn", "last turn"], ["min_reward", "reward from"], ["max_reward", "reward to"]];
const RANGES = [["turns", "turns", "2..5"], ["versions", "versions", "3..9"]];
const NAMES = ["purpose", "success", "failed", "end", "text", "after", ...TEXT.map((f) => f[0]), ...NUMBERS.map((f) => f[0]), ...RANGES.map((f) => f[0])];

export async function episodesPage({ run, params, signal, keys }) {
  const query = new URLSearchParams();
  for (const name of NAMES) if (params.get(name)) query.set(name, params.get(name));
  query.set("limit", "100");
  const set = (name) => (e) => patch({ [name]: e.target.value.trim(), after: "" });
  const choice = (name, label, options) => h("label", { class: "field" }, label, h("select", { onchange: set(name) },
    [["", "any"], ...options].map(([v, t]) => h("option", { value: v, selected: (params.get(name) ?? "") === v }, t))));
  const text = (name, label, hint, type = "text") => h("label", { class: "field" }, label, h("input", { type, step: "any", value: params.get(name) ?? "", placeholder: hint ?? "any", onchange: set(name) }));
  const some = NAMES.some((n) => params.get(n));
  const filters = h("details", { class: "card fold", open: some || innerWidth > 760 }, h("summary", {}, "Filters"), h("div", { class: "filters" },
    h("label", { class: "field" }, "purpose", h("input", { type: "text", list: "purposes", "data-search": true, value: params.get("purpose") ?? "", placeholder: "any  /", onchange: set("purpose") }),
      h("datalist", { id: "purposes" }, ["train", "eval-before", "eval-after"].map((p) => h("option", { value: p })))),
    text("text", "holds the text"),
    choice("success", "success", [["true", "yes"], ["false", "no"]]),
    choice("end", "ended", [["terminated", "task ended"], ["truncated", "by a limit"], ["failed", "system failed"]]),
    choice("failed", "went wrong", [["true", "only these"]]),
    TEXT.map(([n, l]) => text(n, l)), NUMBERS.map(([n, l]) => text(n, l, null, "number")), RANGES.map(([n, l, hint]) => text(n, l, hint)),
    h("label", { class: "field" }, "open an episode", h("input", { type: "text", placeholder: "its id", value: params.get("find") ?? "", onchange: (e) => { if (e.target.value.trim()) location.hash = link("episode", { run, id: e.target.value.trim() }); } }))));
  let page;
  try { page = await get(`runs/${seg(run)}/episodes?${query}`, signal); } catch (error) {
    if (error.name === "AbortError") throw error;
    return h("div", { class: "stack" }, filters, h("div", { class: "notice bad" }, error.message));
  }
  const chosen = new Set();
  const compare = h("button", { class: "button", type: "button", disabled: true, onclick: () => { const [a, b] = chosen; location.hash = link("compare", { run, a, b }); } }, "Side by side");
  const pick = (id) => (e) => { if (e.target.checked) chosen.add(id); else chosen.delete(id); compare.disabled = chosen.size !== 2; };
  const open = (id) => { location.hash = link("episode", { run, id }); };
  const body = h("tbody", {}, page.episodes.map((e) => h("tr", { class: "link", "data-id": e.episode, onclick: (x) => { if (!x.target.closest("input, a")) open(e.episode); } },
    h("td", {}, h("input", { type: "checkbox", "aria-label": `Choose ${e.episode}`, onchange: pick(e.episode) })),
    h("td", { class: "tight mono" }, h("a", { href: link("episode", { run, id: e.episode }) }, e.episode)),
    page.looked !== undefined && h("td", { class: "wide found" }, marked(e.found, params.get("text"))),
    h("td", { class: "tight" }, outcome(e)),
    h("td", { class: "right" }, e.unscored || e.end === "failed" ? "–" : num(e.reward)),
    h("td", { class: "tight" }, e.purpose), h("td", { class: "tight" }, e.task_kind),
    h("td", { class: "right" }, num(e.draw)), h("td", { class: "right" }, e.update === null ? "–" : num(e.update)),
    h("td", { class: "right" }, num(e.turns)), h("td", { class: "right" }, num(e.sampled_tokens)), h("td", { class: "right tight" }, duration(e.total_s)),
    h("td", { class: "tight" }, h("a", { href: link("episodes", { run, group: e.group }), title: "Episodes of its group" }, e.group)))));
  rows(keys, () => [...body.children], (row) => open(row.dataset.id));
  if (page.next !== null) keys.n = () => patch({ after: page.next });
  keys.p = () => history.back();
  const head = [["", ""], ["Episode", ""], ...(page.looked === undefined ? [] : [["Where", ""]]), ["Outcome", ""], ["Reward", "right"], ["Purpose", ""], ["Type", ""], ["Draw", "right"], ["Step", "right"], ["Turns", "right"], ["Tokens", "right"], ["Time", "right"], ["Group", ""]];
  return h("div", { class: "stack" }, filters,
    h("div", { class: "row" }, h("span", { class: "mute" }, counted(page)),
      some && h("a", { href: link("episodes", { run }) }, "clear the filters"), h("span", { class: "grow" }), compare,
      h("button", { class: "button", type: "button", disabled: !params.get("after"), onclick: () => history.back() }, "Back"),
      h("button", { class: "button", type: "button", disabled: page.next === null, onclick: () => patch({ after: page.next }) }, page.looked === undefined ? "Next page" : "Search on")),
    page.episodes.length
      ? h("section", { class: "card flush" }, h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map(([t, c]) => h("th", { class: c || null }, t)))), body)))
      : page.looked !== undefined && page.next !== null ? empty("None so far", "Search on looks at the episodes that follow.")
        : empty("No episode fits", "Clear a filter, or wait until the run has committed some."));
}

/** How many there are, and of a search how many were read. */
function counted(page) {
  const more = page.next === null ? "" : ", more follow";
  if (page.looked !== undefined) return `${num(page.episodes.length)} of ${num(page.looked)} episodes that were read hold it${more}`;
  return page.episodes.length ? `${num(page.episodes.length)} in the order of their commits${more}` : "";
}

/** A text with the part that was looked for. */
function marked(text, wanted) {
  const at = text.toLowerCase().indexOf(wanted.toLowerCase());
  return at < 0 ? [text] : [text.slice(0, at), h("mark", {}, text.slice(at, at + wanted.length)), text.slice(at + wanted.length)];
}

export function outcome(e) {
  if (e.end === "failed") return chip("failed", "system failed");
  if (e.waits) return chip("interrupted", "waits for reward");
  if (e.unscored) return chip("plain", "no reward");
  const cut = e.end === "truncated" ? ", cut" : "";
  return e.success ? chip("ok", `success${cut}`) : chip(cut ? "cut" : "no", `no success${cut}`);
}
