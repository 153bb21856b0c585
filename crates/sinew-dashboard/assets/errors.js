// What went wrong in a run, with causes: failed episodes, steps with failures, samples that were left out.
import { bar, card, duration, get, h, link, num, plural, seg, verdictNotice } from "./dom.js";

export async function errorsPage({ run, runs, signal }) {
  const e = await get(`runs/${seg(run)}/errors`, signal);
  const most = Math.max(1, ...e.dropped.map(([, n]) => n));
  const bad = e.state === "failed" || e.state === "killed", judged = runs.find((r) => r.run === run)?.bad;
  const calm = !e.failures.length && !e.causes.length && !e.dropped.length && !bad && !judged;
  return h("div", { class: "stack" },
    judged && verdictNotice(e.verdict, true),
    bad && h("div", { class: "notice bad" }, e.state === "killed" ? "The process of this run was killed: it said nothing of its end. `sinew train --resume` goes on." : `The run failed: ${e.why ?? "no reason was noted"}`),
    calm && h("div", { class: "notice calm" }, "Nothing went wrong so far."),
    h("div", { class: "tiles" }, [[e.episodes, "training episodes"], [e.failed, "failed by the system", e.failed > 0], [e.retried, "run again"], [e.recovered, "of these went well"], [e.skipped_updates, "updates without a finite gradient", e.skipped_updates > 0]]
      .map(([n, t, red]) => h("div", { class: "tile" }, h("b", { class: red ? "bad" : null }, num(n)), h("span", {}, t)))),
    h("div", { class: "grid" },
      card("Left out of training", e.dropped.length ? "Episodes that gave no row, by reason" : "No episode was left out.",
        h("table", {}, h("tbody", {}, e.dropped.map(([reason, n]) => h("tr", {}, h("td", { class: "wide" }, reason, bar(n / most, "warn")), h("td", { class: "right" }, num(n))))))),
      card("Samples", "Over all steps, with the first cause of each number",
        h("table", {}, h("tbody", {}, e.samples.map((x) => h("tr", {}, h("td", { class: "tight" }, x.name), h("td", { class: "right" }, num(x.count)), h("td", { class: "wide mute" }, x.first ?? ""))))))),
    e.causes.length > 0 && h("section", { class: "card flush" }, h("h2", { style: { padding: "14px 16px 6px" } }, "Steps with failures, newest first"), h("div", { class: "scroll" }, h("table", {}, h("tbody", {},
      e.causes.map((c) => h("tr", {}, h("td", { class: "tight" }, h("a", { href: link("episodes", { run, of_step: c.step, end: "failed" }), title: "The episodes of this step that the system failed" }, `step ${c.step}`)), h("td", { class: "tight" }, `${c.failed} of ${c.of}`), h("td", { class: "wide mono" }, c.cause))))))),
    e.failures.length > 0 && h("section", { class: "card flush" }, h("h2", { style: { padding: "14px 16px 6px" } }, plural(e.failures.length, "failed episode")), h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Episode", "Purpose", "After", "Cause"].map((t) => h("th", {}, t)))), h("tbody", {}, e.failures.map((f) => h("tr", {},
        h("td", { class: "tight mono" }, h("a", { href: link("episode", { run, id: f.episode }) }, f.episode)), h("td", { class: "tight" }, f.purpose), h("td", { class: "tight" }, `${plural(f.turns, "turn")}, ${duration(f.seconds)}`), h("td", { class: "wide mono" }, f.why ?? "its trace is gone"))))))));
}
