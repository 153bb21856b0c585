// Elements, numbers for people, requests, and the state in the URL. Text is always set as text: nothing that a
// model or a program wrote becomes markup.

/** Makes an element. `class`, `on*` and plain attributes; `null` and `false` leave an attribute out. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

/** Asks the server; an error has its text. */
export async function get(path, signal) {
  const response = await fetch(`/api/${path}`, { signal });
  if (response.status === 401) throw new Error("The token is not right any more. Open the link that `sinew view` printed.");
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? `status ${response.status}`);
  return body;
}

export const seg = encodeURIComponent;

/** Seconds as people say them. */
export function duration(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  if (x === 0) return "0 s";
  if (x < 0.995) return `${Math.round(x * 1000)} ms`;
  if (x < 9.95) return `${x.toFixed(1)} s`;
  const t = Math.round(x);
  if (t < 60) return `${t} s`;
  if (t < 3600) return `${Math.floor(t / 60)}m ${String(t % 60).padStart(2, "0")}s`;
  if (t < 172800) return `${Math.floor(t / 3600)}h ${String(Math.floor((t % 3600) / 60)).padStart(2, "0")}m`;
  return `${(t / 86400).toFixed(1)} d`;
}

/** A number with three or four figures. */
export function num(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const a = Math.abs(x);
  if (a === 0) return "0";
  if (a >= 1e9) return `${(x / 1e9).toFixed(1)}G`;
  if (a >= 1e6) return `${(x / 1e6).toFixed(1)}M`;
  if (a >= 1e4) return `${(x / 1e3).toFixed(a >= 1e5 ? 0 : 1)}k`;
  if (a >= 100 || Number.isInteger(x)) return String(Math.round(x * 10) / 10);
  if (a >= 1) return x.toFixed(2);
  if (a >= 0.001) return String(Number(x.toPrecision(3)));
  return x.toExponential(1);
}

/** How sure a share is: its interval of 95 % and the episodes that it counts. */
export const interval = ({ low, high, n }) => `(95 %: ${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)}, n ${num(n)})`;
export const percent = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(1)} %`);
export const plural = (n, word) => `${num(n)} ${word}${n === 1 ? "" : "s"}`;

/** The page and its parameters: `#/page?key=value`. */
export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: path || "runs", params: new URLSearchParams(query ?? "") };
}

/** A link to a page. Parameters without a value are left out. */
export function link(page, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "" && value !== false) query.set(key, value);
  }
  const text = query.toString();
  return `#/${page}${text ? `?${text}` : ""}`;
}

/** Changes parameters of this page. `quiet` does not draw the page again. */
export function patch(changes, quiet = false) {
  const { page, params } = here();
  const next = link(page, { ...Object.fromEntries(params), ...changes });
  if (quiet) history.replaceState(null, "", next);
  else location.hash = next;
}

export const chip = (kind, text = kind) => h("span", { class: `chip ${kind}` }, text);

/** The state of a process. That one ended says nothing of how its run went. */
export const stateChip = (state) => chip(state === "ended" ? "plain" : state, state);

const VERDICTS = { learning: "ok", solved: "ok", healthy: "ok", starting: "plain", stalled: "interrupted" };

/** The verdict on a run; what it rests on is its title. */
export function verdictChip({ verdict, why }) {
  const shown = chip(VERDICTS[verdict] ?? "failed", verdict);
  shown.title = why;
  return shown;
}

/** The verdict in words, with what to change. */
export function verdictNotice(v, bad) {
  return h("div", { class: `notice ${bad ? "bad" : "calm"}`, id: "verdict" }, h("b", {}, v.verdict), [v.why, v.change].filter(Boolean).join("; "));
}

/** A choice of a few. */
export function segment(options, value, chosen) {
  return h("div", { class: "segment", role: "group" }, options.map(([key, text]) =>
    h("button", { type: "button", "aria-pressed": String(key === value), onclick: () => chosen(key) }, text)));
}

export function empty(title, text) {
  return h("div", { class: "card empty" }, h("b", {}, title), text);
}

/** A card with a heading. */
export function card(title, sub, ...body) {
  return h("section", { class: "card" }, h("h2", {}, title), sub && h("p", { class: "sub" }, sub), ...body);
}

export function bar(share, kind = "") {
  const fill = h("i", { style: { width: `${Math.max(0, Math.min(1, share || 0)) * 100}%` } });
  return h("div", { class: `bar ${kind}` }, fill);
}
