// The frame of all pages: which page is shown, which run, keys, theme, and changes as they come.
import { empty, get, h, here, link, s, stateChip, verdictChip } from "./dom.js";
import { curvesPage } from "./curves.js";
import { comparePage, episodePage } from "./episode.js";
import { episodesPage } from "./episodes.js";
import { errorsPage } from "./errors.js";
import { livePage } from "./live.js";
import { runsPage } from "./runs.js";
import { scalingPage } from "./scaling.js";
import { stepPage } from "./step.js";
import { timelinePage } from "./timeline.js";

// Page, name, drawing, letter of `g LETTER`, needs a run, which changes it wants.
const PAGES = {
  runs: { name: "Runs", draw: runsPage, key: "r", icon: "M4 6h16M4 12h16M4 18h10", wants: ["runs", "steps"] },
  scaling: { name: "Scaling", draw: scalingPage, key: "s", icon: "M4 20V4M4 20h16M7 16c4-1 4-8 12-9", wants: [] },
  curves: { name: "Curves", draw: curvesPage, key: "c", run: true, icon: "M3 17l5-6 4 3 8-9M3 21h18", wants: ["steps"] },
  live: { name: "Live", draw: livePage, key: "l", run: true, icon: "M12 12m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0M7 7a7 7 0 0 0 0 10M17 7a7 7 0 0 1 0 10", wants: ["live", "runs"] },
  timeline: { name: "Timeline", draw: timelinePage, key: "t", run: true, icon: "M4 6h9M8 12h12M4 18h7", wants: ["steps", "live"] },
  episodes: { name: "Episodes", draw: episodesPage, key: "e", run: true, icon: "M4 5h16v11H9l-5 4z", wants: [] },
  errors: { name: "Errors", draw: errorsPage, key: "x", run: true, icon: "M12 4l9 16H3zM12 10v4M12 17v.5", wants: ["steps", "runs"] },
  episode: { name: "Episode", draw: episodePage, run: true, under: "episodes", wants: [] },
  step: { name: "Step", draw: stepPage, run: true, under: "curves", wants: ["steps"] },
  compare: { name: "Side by side", draw: comparePage, run: true, under: "episodes", wants: [] },
};
const ORDER = ["runs", "scaling", null, "curves", "live", "timeline", "episodes", "errors"];

const state = { runs: [], abort: new AbortController(), page: null, keys: {}, drawn: "" };
const nav = document.getElementById("nav"), top_ = document.getElementById("top"), main = document.getElementById("main");
const overlay = document.getElementById("overlay");

const icon = (d) => s("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, s("path", { d }));

function theme(next) {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  if (next) { try { localStorage.setItem("sinew-theme", next); } catch { /* Without storage the choice lasts until the page is closed. */ } }
  let chosen = next;
  try { chosen ??= localStorage.getItem("sinew-theme"); } catch { /* The same. */ }
  const now = ["dark", "light"].includes(chosen) ? chosen : system;
  document.documentElement.dataset.theme = now;
  return now;
}

function drawNav(page) {
  const run = chosenRun();
  const current = PAGES[page]?.under ?? page;
  nav.replaceChildren(
    h("a", { class: "brand", href: "#/runs" }, s("svg", { viewBox: "0 0 32 32", "aria-hidden": "true" },
      s("rect", { width: 32, height: 32, rx: 8, fill: "#4f46e5" }),
      s("path", { d: "M7 21c3.5 0 4-10 8-10s4 10 8 10", fill: "none", stroke: "#fff", "stroke-width": 3, "stroke-linecap": "round" }),
      s("circle", { cx: 25, cy: 10, r: 2.6, fill: "#a5f3d0" })), "Sinew"),
    ...ORDER.map((id) => id === null
      ? h("div", { class: "part" }, "This run")
      : h("a", { class: "item", href: link(id, PAGES[id].run ? { run } : {}), "aria-current": id === current ? "page" : null }, icon(PAGES[id].icon), PAGES[id].name)),
    h("div", { class: "foot" }, h("span", { class: "kbd" }, "?"), "keys"));
}

/** The run of the URL, or the one at work, or the first. */
function chosenRun() {
  const asked = here().params.get("run");
  return asked ?? (state.runs.find((r) => r.state === "running") ?? state.runs[0])?.run ?? null;
}

function drawTop(page, title) {
  const spec = PAGES[page], run = chosenRun();
  const row = state.runs.find((r) => r.run === run);
  const select = spec.run && h("select", { "aria-label": "Run", onchange: (e) => { location.hash = link(PAGES[page].under ?? page, { run: e.target.value }); } },
    state.runs.map((r) => h("option", { value: r.run, selected: r.run === run }, r.run)));
  const dark = document.documentElement.dataset.theme === "dark";
  top_.replaceChildren(h("h1", {}, title ?? spec.name), ...[
    spec.run && row && stateChip(row.state), spec.run && row && verdictChip(row.verdict), select,
    h("button", { class: "button icon", type: "button", title: "Light or dark (d)", "aria-label": "Light or dark", onclick: flip },
      icon(dark ? "M12 7a5 5 0 1 0 0 10a5 5 0 1 0 0-10M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5" : "M20 14A8 8 0 0 1 10 4a8 8 0 1 0 10 10z")),
  ].filter(Boolean));
}

function flip() {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  drawTop(state.page, document.title.replace(/ · Sinew$/, ""));
}

async function loadRuns() {
  state.runs = (await get("runs")).runs;
}

/** Draws the page of the URL. A page that is drawn again because something changed keeps its place. */
async function show(again = false) {
  const { page: asked, params } = here();
  const page = PAGES[asked] ? asked : "runs";
  const spec = PAGES[page];
  state.abort.abort();
  state.abort = new AbortController();
  const signal = state.abort.signal;
  try {
    if (!again || spec.wants.includes("runs")) await loadRuns();
    if (signal.aborted) return;
    state.page = page;
    drawNav(page);
    drawTop(page);
    document.title = `${spec.name} · Sinew`;
    const run = chosenRun();
    if (spec.run && !run) {
      main.replaceChildren(empty("No run is here yet", "`sinew train RECIPE` makes one in runs/NAME; it appears here as it begins."));
      return;
    }
    state.keys = {};
    const context = {
      run, runs: state.runs, params, signal, keys: state.keys, again,
      title: (text) => { if (!signal.aborted) { document.title = `${text} · Sinew`; drawTop(page, text); } },
    };
    const body = await spec.draw(context);
    if (signal.aborted) return;
    const back = again ? focused() : null;
    main.replaceChildren(body);
    back?.();
    state.keys.ready?.();
    if (!again && state.drawn !== location.hash) { window.scrollTo(0, 0); main.focus({ preventScroll: true }); }
    state.drawn = location.hash;
    document.documentElement.dataset.ready = page;
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    main.replaceChildren(h("div", { class: "notice bad" }, error.message));
    document.documentElement.dataset.ready = "error";
  }
}

/** Remembers what of the page has the keyboard, by what it is and says, and gives it back on the page that is drawn next. */
function focused() {
  const last = document.activeElement;
  if (!last || last === main || !main.contains(last)) return null;
  const tag = last.tagName, name = (e) => e.getAttribute("href") ?? e.getAttribute("aria-label") ?? e.textContent;
  const alike = () => [...main.querySelectorAll(tag)].filter((e) => name(e) === name(last));
  const before = alike().indexOf(last), at = [...main.querySelectorAll(tag)].indexOf(last);
  return () => (alike()[before] ?? alike().at(-1) ?? main.querySelectorAll(tag)[at] ?? main).focus({ preventScroll: true });
}

/** Changes come at most every so often; a hidden page waits. */
function follow() {
  let due = null, last = 0;
  const wanted = (what, run) => {
    const spec = PAGES[state.page];
    if (!spec || document.hidden) return false;
    const own = !spec.run || run === chosenRun() || here().params.get("also")?.split(",").includes(run);
    return own && what.some((w) => spec.wants.includes(w));
  };
  const later = () => {
    if (due) return;
    const pause = PAGES[state.page].wants.includes("live") ? 900 : 2500;
    due = setTimeout(() => { due = null; last = Date.now(); if (!busy()) show(true); }, Math.max(0, last + pause - Date.now()));
  };
  const source = new EventSource("/api/events");
  source.addEventListener("change", (e) => {
    const { run, what } = JSON.parse(e.data);
    if (wanted(what, run)) later();
  });
  source.addEventListener("resync", later);
  document.addEventListener("visibilitychange", () => { if (!document.hidden && PAGES[state.page]?.wants.length) later(); });
}

/** A page is not drawn again under a pointer that reads a chart, or a field that is typed in. */
function busy() {
  return document.activeElement?.matches("main input, main select") || document.querySelector(".chart svg:hover") !== null;
}

const KEYS = [
  ["j / k", "next / previous row or turn"], ["Enter", "open the row"], ["/", "filter or search"], ["n / p", "next page, episode or step / back"],
  ["g r", "runs"], ["g s", "scaling"], ["g c", "curves"], ["g l", "live"], ["g t", "timeline"], ["g e", "episodes"], ["g x", "errors"],
  ["v", "text or tokens of an episode"], ["u", "up: from an episode to the list"], ["d", "light or dark"], ["?", "these keys"], ["Esc", "close"],
];

function help(open) {
  overlay.hidden = !open;
  overlay.replaceChildren(h("div", { class: "card", role: "dialog", "aria-label": "Keys" }, h("h2", {}, "Keys"),
    h("table", {}, h("tbody", {}, KEYS.map(([keys, text]) => h("tr", {}, h("td", {}, h("span", { class: "kbd" }, keys)), h("td", {}, text)))))));
}

let prefix = false;
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const typing = e.target.matches("input, select, textarea");
  if (e.key === "Escape") { if (!overlay.hidden) help(false); else if (typing) e.target.blur(); return; }
  if (typing) return;
  if (prefix) {
    prefix = false;
    const found = Object.entries(PAGES).find(([, p]) => p.key === e.key);
    if (found) { location.hash = link(found[0], found[1].run ? { run: chosenRun() } : {}); e.preventDefault(); }
    return;
  }
  const own = state.keys[e.key];
  if (e.key === "g") prefix = true;
  else if (e.key === "?") help(overlay.hidden);
  else if (e.key === "d") flip();
  else if (e.key === "/" && main.querySelector("[data-search]")) { main.querySelector("details.fold")?.setAttribute("open", ""); main.querySelector("[data-search]").focus(); e.preventDefault(); }
  else if (own) { own(e); e.preventDefault(); }
});
overlay.addEventListener("click", () => help(false));
addEventListener("hashchange", () => show());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { theme(); drawTop(state.page); });

/** Rows that j and k go through. */
export function rows(keys, elements, open) {
  let at = -1;
  const move = (by) => {
    const all = elements();
    if (!all.length) return;
    all[at]?.classList.remove("at");
    at = Math.max(0, Math.min(all.length - 1, at + by));
    all[at].classList.add("at");
    all[at].scrollIntoView({ block: "nearest" });
  };
  keys.j = () => move(1);
  keys.k = () => move(-1);
  if (open) keys.Enter = () => { const row = elements()[at]; if (row) open(row); };
}

theme();
show();
follow();
