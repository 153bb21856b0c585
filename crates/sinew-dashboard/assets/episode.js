// An episode as a conversation or token by token, with its branches; and two of them side by side.
import { rows } from "./app.js";
import { difference } from "./diff.js";
import { outcome } from "./episodes.js";
import { chip, duration, get, h, here, link, num, patch, plural, s, seg, segment } from "./dom.js";

const NAMES = { prompt: "Prompt", sampled: "Model", forced: "Closing tokens", observation: "Environment" };
/** Log-probs at which the colour changes: probabilities 0.9, 0.5, 0.2, 0.05, 0.01. */
const LIMITS = [-0.105, -0.693, -1.609, -2.996, -4.605];
/** Limits between the colours of advantages, relative to the largest of the episode, and of probability ratios. */
const SIGNS = [-0.5, -0.05, 0.05, 0.5], RATIOS = [0.5, 0.9, 1.11, 2];
/** Ends of a turn that are worth a word. */
const CUT = { length: "cut at its limit of tokens", context_full: "context full", aborted: "aborted" };
const finish = (node) => node.finish?.type ?? node.finish;
/** Characters of a text that are shown at once. */
const LONG = 6000;

export async function episodePage({ run, params, signal, keys, title }) {
  const id = params.get("id"), e = await get(`runs/${seg(run)}/episodes/${seg(id)}`, signal);
  title(id);
  const view = params.get("view") ?? "text", color = params.get("color") ?? "logprob";
  const path = chosenPath(e, params.get("leaf")), ink = h("div", { class: "ink" }, h("span", { class: "mute" }, "Point at a token to see what was recorded of it."));
  learned(e);
  const turns = path.map((n) => turn(e.nodes[n], { view, color, ink, largest: e.largest }));
  rows(keys, () => turns);
  keys.v = () => patch({ view: view === "text" ? "tokens" : "text" });
  keys.u = () => { location.hash = link("episodes", { run }); };
  const at = e.siblings.findIndex((x) => x.episode === id), next = e.siblings[(at + 1) % e.siblings.length];
  if (next) keys.n = () => { location.hash = link("episode", { ...Object.fromEntries(params), id: next.episode }); };
  return h("div", { class: "two" },
    h("div", { class: "stack" }, toolbar(e, view, color), failure(e), unknown(e), noText(e), turns,
      e.cut > 0 && h("div", { class: "notice" }, `${num(e.cut)} more tokens are not shown.`)),
    h("aside", { class: "stack aside" }, facts(e, run), view === "tokens" && h("section", { class: "card" }, h("h2", {}, "Token"), scale(color, e), ink), branches(e, path), siblings(e, run)));
}

export async function comparePage({ run, params, signal, keys, title }) {
  const ids = [params.get("a"), params.get("b")];
  const both = await Promise.all(ids.map((id) => get(`runs/${seg(run)}/episodes/${seg(id)}`, signal)));
  title("Side by side");
  const view = params.get("view") ?? "text", color = params.get("color") ?? "logprob";
  keys.v = () => patch({ view: view === "text" ? "tokens" : "text" });
  keys.u = () => { location.hash = link("episodes", { run, group: both[0].group }); };
  const ink = h("div", { class: "ink" }, h("span", { class: "mute" }, "Point at a token to see what was recorded of it."));
  both.forEach(learned);
  const paths = both.map((e) => chosenPath(e, null).map((n) => e.nodes[n]));
  let same = 0;
  while (equal(paths[0][same], paths[1][same])) same++;
  const task = both[0].task === both[1].task && both[0].env === both[1].env;
  const note = task ? `Both are of task ${both[0].task}.` : "These are different tasks.";
  const columns = both.map((e, i) => paths[i].map((node, n) => turn(node, { view, color, ink, same: n < same, largest: e.largest })));
  if (view === "words") mark(paths, columns, same);
  return h("div", { class: "stack" },
    h("div", { class: "row" }, segment([["text", "text"], ["words", "words that differ"], ["tokens", "tokens"]], view, (v) => patch({ view: v })), h("span", { class: "mute" }, `${note} ${same ? `The first ${plural(same, "node")} are equal, token by token.` : "They differ from the first node on."}`)),
    both.map(unknown).find(Boolean), noText(both[0]),
    view === "tokens" && h("section", { class: "card" }, h("div", { class: "row" }, colours(color, both.some((e) => e.signals))), scale(color, both.find((e) => e.signals) ?? both[0]), ink),
    h("div", { class: "pair" }, both.map((e, i) => h("div", { class: "stack" },
      h("section", { class: "card" }, h("div", { class: "row" }, h("a", { class: "mono", href: link("episode", { run, id: ids[i] }) }, ids[i]), outcome(summary(e)), h("b", { class: "num" }, e.reward === null ? "" : `reward ${num(e.reward)}`)),
        h("div", { class: "mute" }, `${plural(e.sampled, "sampled token")} · ${duration(e.timing.total_s)} · ${e.end_text}`)),
      failure(e), columns[i]))));
}

/** Marks the words by which nodes of the same place differ. */
function mark(paths, columns, same) {
  for (let n = same; n < Math.min(paths[0].length, paths[1].length); n++) {
    const sides = difference(textOf(paths[0][n]), textOf(paths[1][n]));
    columns.forEach((turns, i) => turns[n].querySelector(".body").replaceChildren(sides[i]));
  }
}

/** All that a node says, as one text. */
function textOf(node) {
  if (!node.messages.length) return node.pieces ? node.pieces.join("") : node.ids.join(" ");
  return node.messages.map((m) => [m.reasoning, plain(m.content), ...(m.tool_calls ?? []).map((c) => `${c.name} ${c.arguments}`)].filter(Boolean).join("\n")).join("\n");
}

const unknown = (e) => e.provenance.logprobs_unknown && h("div", { class: "notice" }, "Log-probabilities are unknown: the server reports none, and its tokens are read again from its text.");
const noText = (e) => e.no_text && h("div", { class: "notice" }, `The tokenizer is not there, so that tokens are shown as numbers: ${e.no_text}`);

/** Pictures stand in tokens as places that say nothing of them. */
const media = (n) => JSON.stringify(n.messages.flatMap((m) => (typeof m.content === "string" ? [] : m.content.filter((p) => p.type !== "text"))));

/** Whether two nodes are known to be equal: all of their tokens are here, and are the same. */
function equal(a, b) {
  const whole = (n) => n.ids.length === n.count;
  return Boolean(a && b) && a.kind === b.kind && whole(a) && whole(b) && a.count === b.count && a.ids.every((id, i) => id === b.ids[i]) && media(a) === media(b);
}

const summary = (e) => ({ end: e.end.type, waits: e.waits, unscored: e.outcome.unscored, success: e.outcome.success });

function toolbar(e, view, color) {
  return h("div", { class: "row" }, segment([["text", "text"], ["tokens", "tokens"]], view, (v) => patch({ view: v })), view === "tokens" && colours(color, e.signals), h("span", { class: "grow" }), outcome(summary(e)));
}

const colours = (color, trained) => segment([["logprob", "log-prob"], ["kind", "kind"], ["version", "version"], ...(trained ? [["advantage", "advantage"], ["ratio", "ratio"]] : [])], color, (c) => patch({ color: c }));

/** Gives each node what training gave its tokens, by place; and the episode its largest advantage. */
function learned(e) {
  const all = (e.signals ?? []).flat();
  e.largest = Math.max(0, ...all.map((t) => Math.abs(t.advantage)));
  e.nodes.forEach((node, n) => { node.signals = new Map((e.signals?.[n] ?? []).map((t) => [t.at, t])); });
}

function failure(e) {
  if (e.end.type === "failed") return h("div", { class: "notice bad" }, e.end_text);
  if (e.outcome.unscored) return h("div", { class: "notice" }, `No reward: ${e.outcome.unscored_reason ?? "none was given"}`);
  return null;
}

/** The nodes from the root to a leaf. */
function chosenPath(e, asked) {
  const leaf = asked !== null && e.leaves.includes(Number(asked)) ? Number(asked) : e.leaves.at(-1);
  const path = [];
  for (let n = leaf; n !== null && n !== undefined; n = e.nodes[n].parent) path.unshift(n);
  return path;
}

function turn(node, o) {
  const versions = [...new Set(node.versions.map((v) => v[2]))];
  const mean = node.logprobs.length ? node.logprobs.reduce((a, b) => a + b, 0) / node.logprobs.length : null;
  const words = [node.turn > 0 && `turn ${node.turn}`, plural(node.count, "token"), versions.length > 0 && `weights ${versions.join(", ")}`,
    mean !== null && `mean log-prob ${mean.toFixed(3)}`, node.temperature !== 1 && `temperature ${num(node.temperature)}`];
  const head = h("header", {}, h("b", {}, NAMES[node.kind] ?? node.kind), words.filter(Boolean).map((w) => h("span", {}, w)),
    node.process_reward !== 0 && chip("plain", `process reward ${num(node.process_reward)}`), CUT[finish(node)] && chip("cut", CUT[finish(node)]),
    o.same && h("span", { class: "grow" }, "equal in both"));
  const text = o.view === "tokens";
  const body = h("div", { class: "body" }, text ? tokens(node, o) : said(node));
  return h("article", { class: `turn ${node.kind}` }, head, o.same && !text ? h("details", {}, h("summary", {}, h("span", { class: "peek" }, peek(node))), h("div", {}, body)) : body);
}

const plain = (content) => typeof content === "string" ? content : content.map((p) => p.text ?? `[${p.type}]`).join("");
const peek = (node) => (node.pieces?.join("") ?? textOf(node)).slice(0, 160);

function said(node) {
  if (!node.messages.length) return long(textOf(node), "said code");
  return node.messages.map((m) => h("div", { class: "stack", style: { gap: "8px" } },
    h("span", { class: "role" }, m.role === "tool" && m.name ? `tool ${m.name}` : m.role),
    m.reasoning && h("details", {}, h("summary", {}, "reasoning", h("span", { class: "peek" }, m.reasoning.slice(0, 120))), h("div", { class: "said" }, m.reasoning)),
    m.role === "tool" ? fold(m) : parts(m.content, m.role),
    (m.tool_calls ?? []).map((c) => h("details", {}, h("summary", {}, "calls ", h("b", { class: "mono" }, c.name), h("span", { class: "peek" }, c.arguments)), h("div", {}, h("pre", {}, c.arguments))))));
}

function fold(m) {
  const text = plain(m.content);
  const media = typeof m.content !== "string" && m.content.some((p) => p.type !== "text");
  if (text.length < 240 && !media) return long(text, "said code");
  return h("details", { open: media }, h("summary", {}, "answers", h("span", { class: "peek" }, text.slice(0, 120))), h("div", {}, parts(m.content, "tool")));
}

function parts(content, role) {
  const kind = role === "tool" ? "said code" : "said";
  if (typeof content === "string") return content ? long(content, kind) : null;
  return content.map((p) => p.type === "text" ? long(p.text, kind) : medium(p));
}

/** Only images that the trace itself holds are loaded: a page makes no request to elsewhere. */
function medium(p) {
  const url = p.source.url;
  if (p.type === "image" && url?.startsWith("data:image/")) return h("img", { class: "media", src: url, alt: "image of the episode", loading: "lazy" });
  return h("div", { class: "notice calm mono" }, `${p.type} ${url ?? `blake3:${p.source.blake3}`}`);
}

function long(text, kind) {
  if (text.length <= LONG) return h("div", { class: kind }, text);
  const box = h("div", { class: kind }, text.slice(0, LONG));
  return [box, h("button", { class: "button", type: "button", onclick: (e) => { box.textContent = text; e.target.remove(); } }, `show ${num(text.length - LONG)} more characters`)];
}

function tokens(node, o) {
  const pieces = node.pieces ?? node.ids.map((id) => `${id} `);
  const box = h("div", { class: "tokens" }), forced = new Set(node.forced), version = new Array(pieces.length).fill(null);
  for (const [start, len, v] of node.versions) for (let i = start; i < Math.min(start + len, version.length); i++) version[i] = v;
  pieces.forEach((piece, i) => {
    const lp = node.logprobs[i], kind = forced.has(i) ? "forced" : node.kind;
    box.append(h("span", { class: trained(o, node.signals.get(i)) ?? paint(o.color, kind, lp, version[i]), "data-i": i }, piece));
  });
  box.addEventListener("pointerover", (e) => {
    const i = e.target.dataset.i;
    if (i === undefined) return;
    const lp = node.logprobs[i], kind = forced.has(Number(i)) ? "forced" : node.kind, t = node.signals.get(Number(i));
    o.ink.replaceChildren(h("b", {}, node.pieces ? JSON.stringify(pieces[i]) : `token ${pieces[i]}`), ` ${kind}`, lp === undefined ? "" : ` · log-prob ${lp.toFixed(4)} · probability ${(100 * Math.exp(lp)).toFixed(1)} %`,
      version[i] === null ? "" : ` · weights ${version[i]}`, t ? ` · advantage ${num(t.advantage)}` : "", t && t.ratio !== null ? ` · ratio ${t.ratio.toFixed(4)}` : "",
      node.temperature === 1 ? "" : ` · temperature ${num(node.temperature)}`, ` · node ${node.id}, token ${i}`);
  });
  return box;
}

/** The colour of what training gave a token; null: another colour is chosen, or there is nothing. */
function trained(o, t) {
  if (o.color !== "advantage" && o.color !== "ratio") return null;
  const [value, limits] = o.color === "ratio" ? [t?.ratio, RATIOS] : [t && t.advantage / (o.largest || 1), SIGNS];
  return value === undefined || value === null ? "" : `sg${limits.filter((limit) => value >= limit).length}`;
}

function paint(color, kind, lp, version) {
  if (color === "kind") return `k-${kind}`;
  if (color === "version") return version === null ? null : `v${version % 6}`;
  if (lp === undefined) return null;
  const bin = LIMITS.findIndex((limit) => lp >= limit);
  return `lp${bin < 0 ? 5 : bin}`;
}

function scale(color, e) {
  if (color === "kind") return h("div", { class: "scale" }, ["prompt", "sampled", "forced", "observation"].map((k) => h("span", { class: `k-${k}` }, k)));
  if (color === "version") {
    const all = [...new Set(e.nodes.flatMap((n) => n.versions.map((v) => v[2])))].sort((a, b) => a - b);
    return h("div", { class: "scale" }, "weights", all.slice(0, 12).map((v) => h("span", { class: `v${v % 6}` }, String(v))));
  }
  const signs = color === "ratio" ? ["< 0.5", "< 0.9", "about 1", "≥ 1.11", "≥ 2"] : color === "advantage" ? ["much worse", "worse", "about 0", "better", "much better"] : null;
  if (signs) return h("div", { class: "scale" }, color === "ratio" ? "trained over sampled" : `of ±${num(e.largest)}`, signs.map((t, i) => h("span", { class: `sg${i}` }, t)));
  return h("div", { class: "scale" }, "probability", ["≥ 0.9", "≥ 0.5", "≥ 0.2", "≥ 0.05", "≥ 0.01", "below"].map((t, i) => h("span", { class: `lp${i}` }, t)));
}

function facts(e, run) {
  const p = e.provenance, sampling = p.sampling;
  const list = [["reward", e.reward === null ? "none" : num(e.reward)], ["success", e.reward === null ? "–" : e.outcome.success ? "yes" : "no"], ["ended", e.end_text], ["task", e.task], ["type", e.task_kind], ["environment", e.env],
    ["purpose", `${e.origin.purpose}, draw ${e.origin.draw}`], ["tokens", `${num(e.sampled)} sampled of ${num(e.tokens)}`],
    ["time", `${duration(e.timing.total_s)}: model ${duration(e.timing.generate_s)}, tools ${duration(e.timing.tool_s)}, queued ${duration(e.timing.queue_s)}`],
    ["sampling", sampling && `temperature ${num(sampling.temperature)}, top_p ${num(sampling.top_p)}, at most ${num(sampling.max_tokens)} tokens`], ["sandbox", p.sandbox], ["seed", p.seed]];
  const metrics = Object.entries(e.outcome.metrics);
  return h("section", { class: "card" }, h("h2", {}, "Episode"),
    h("dl", { class: "facts" }, list.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => [h("dt", {}, k), h("dd", {}, String(v))]), h("dt", {}, "group"), h("dd", {}, h("a", { href: link("episodes", { run, group: e.group }) }, e.group))),
    metrics.length > 0 && h("details", { open: metrics.length < 9, style: { "margin-top": "10px" } }, h("summary", {}, `${plural(metrics.length, "measurement")}`), h("div", {}, h("dl", { class: "facts" }, metrics.map(([k, v]) => [h("dt", {}, k), h("dd", { class: "num" }, num(v))])))));
}

/** The tree of nodes, where there are branches: a column a step, a row a branch. */
function branches(e, path) {
  if (e.leaves.length < 2) return null;
  const on = new Set(path), depth = [], lane = [], children = new Map();
  e.nodes.forEach((n, i) => { depth[i] = n.parent === null ? 0 : depth[n.parent] + 1; if (!children.has(n.parent)) children.set(n.parent, []); children.get(n.parent).push(i); });
  let lanes = 0;
  const stack = [...(children.get(null) ?? [])].reverse().map((n) => [n, null]);
  while (stack.length) {
    const [n, from] = stack.pop();
    lane[n] = from ?? lanes++;
    (children.get(n) ?? []).map((c, i) => [c, i === 0 ? lane[n] : null]).reverse().forEach((c) => stack.push(c));
  }
  const x = (n) => 12 + depth[n] * 22, y = (n) => 12 + lane[n] * 24;
  const svg = s("svg", { width: 24 + Math.max(...depth) * 22, height: lanes * 24, role: "img", "aria-label": "Branches" });
  e.nodes.forEach((n, i) => { if (n.parent !== null) svg.append(s("line", { class: on.has(i) ? "on" : null, x1: x(n.parent), y1: y(n.parent), x2: x(i), y2: y(i) })); });
  const fill = { prompt: "f7", sampled: "f1", forced: "f2", observation: "f4" };
  e.nodes.forEach((n, i) => {
    const leaf = e.leaves.find((l) => { for (let a = l; a !== null; a = e.nodes[a].parent) if (a === i) return true; return false; });
    const dot = s("circle", { class: `${fill[n.kind]}${on.has(i) ? " on" : ""}`, cx: x(i), cy: y(i), r: 7, onclick: () => patch({ leaf }) });
    dot.append(s("title", {}, `node ${i}: ${n.kind}, ${n.count} tokens${n.branch ? `, branch: ${n.branch}` : ""}`));
    svg.append(dot);
  });
  const leaf = path.at(-1);
  const why = (l) => { for (let a = l; a !== null; a = e.nodes[a].parent) if (e.nodes[a].branch) return `, ${e.nodes[a].branch}`; return ""; };
  return h("section", { class: "card" }, h("h2", {}, plural(e.leaves.length, "branch").replace("branchs", "branches")), h("div", { class: "tree" }, svg),
    h("label", { class: "field" }, "shown", h("select", { onchange: (x_) => patch({ leaf: x_.target.value }) }, e.leaves.map((l, i) => h("option", { value: l, selected: l === leaf }, `branch ${i + 1}, to node ${l}${why(l)}`)))));
}

function siblings(e, run) {
  if (e.siblings.length < 2) return null;
  return h("section", { class: "card flush" }, h("h2", { style: { padding: "14px 16px 6px" } }, "Its group"), h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, e.siblings.map((x) => h("tr", { class: x.episode === e.episode ? "at" : null },
    h("td", { class: "mono" }, h("a", { href: link("episode", { ...Object.fromEntries(here().params), id: x.episode }) }, x.episode)), h("td", { class: "right num" }, x.unscored || x.end === "failed" ? "–" : num(x.reward)),
    h("td", {}, x.episode !== e.episode && h("a", { href: link("compare", { run, a: e.episode, b: x.episode }), title: "Side by side" }, "compare"))))))));
}
