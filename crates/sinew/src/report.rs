//! The static HTML report of a run: plots, the end table, sample episodes before and after.

use crate::record::{EpisodeStats, StepRecord};
use sinew_plot::{Curve, plot};
use sinew_render::Renderer;
use sinew_types::{EpisodeEnd, TokenKind, Trace};
use std::fmt::Write;

/// All that a report shows.
pub(crate) struct Report<'a> {
    pub(crate) title: &'a str,
    pub(crate) recipe_toml: &'a str,
    pub(crate) steps: &'a [StepRecord],
    pub(crate) before: &'a EpisodeStats,
    pub(crate) after: &'a EpisodeStats,
    pub(crate) episodes_before: &'a [Trace],
    pub(crate) episodes_after: &'a [Trace],
    pub(crate) renderer: &'a dyn Renderer,
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse}td,th{padding:.2em .9em;text-align:right;border-bottom:1px solid #ddd}\
td:first-child,th:first-child{text-align:left}.plots{display:flex;flex-wrap:wrap;gap:12px}\
.ep{border:1px solid #ddd;border-radius:6px;padding:.6em;margin:.6em 0;white-space:pre-wrap;font:13px/1.5 ui-monospace,monospace}\
.prompt{color:#888}.sampled{background:#d9f2d9}.forced{background:#ffe3b3}.observation{background:#dde8ff}\
.cols{display:grid;grid-template-columns:1fr 1fr;gap:16px}";

impl Report<'_> {
    /// The whole page, with nothing outside it.
    pub(crate) fn html(&self) -> Result<String, String> {
        let mut page = format!(
            "<!doctype html><html lang=en><meta charset=utf-8><title>{0}</title><style>{STYLE}</style><h1>{0}</h1>",
            escape(self.title)
        );
        page.push_str(&self.table());
        page.push_str("<h2>Curves</h2><div class=plots>");
        for svg in self.plots()? {
            page.push_str(&svg);
        }
        page.push_str("</div><h2>Held-out episodes, same task before and after</h2><p>");
        for kind in ["prompt", "sampled", "forced", "observation"] {
            let _ = write!(page, "<span class={kind}>{kind}</span> ");
        }
        page.push_str("tokens; only <span class=sampled>sampled</span> ones are trained on.</p>");
        self.episodes(&mut page);
        let _ = write!(
            page,
            "<h2>Recipe as it ran</h2><pre class=ep>{}</pre>",
            escape(self.recipe_toml)
        );
        Ok(page)
    }

    fn table(&self) -> String {
        let mut html = String::from("<table><tr><th>held-out<th>before<th>after");
        for (name, before, after) in comparison(self.before, self.after) {
            let _ = write!(html, "<tr><td>{}<td>{before}<td>{after}", escape(&name));
        }
        html + "</table>"
    }

    fn plots(&self) -> Result<Vec<String>, String> {
        let curve = |name: &str, value: fn(&StepRecord) -> f64| Curve {
            name: name.into(),
            points: self
                .steps
                .iter()
                .map(|r| (r.step as f64, value(r)))
                .collect(),
        };
        let by = |title, y, curves: Vec<Curve>| plot(title, "step", y, &curves);
        Ok(vec![
            by(
                "Training episodes",
                "mean",
                vec![
                    curve("success", |r| r.rollout.success),
                    curve("reward", |r| r.rollout.reward),
                ],
            )?,
            by(
                "Entropy",
                "nats",
                vec![curve("entropy", |r| r.entropy().unwrap_or(f64::NAN))],
            )?,
            by(
                "Gradient norm, before clipping",
                "norm",
                vec![curve("norm", |r| r.grad_norm)],
            )?,
            by(
                "Sampled tokens an episode",
                "tokens",
                vec![curve("tokens", |r| r.rollout.sampled_tokens)],
            )?,
            by(
                "Seconds a step",
                "s",
                vec![
                    curve("rollout", |r| r.rollout_s),
                    curve("training", |r| r.train_s),
                    curve("engine busy", |r| r.engine_busy_s),
                ],
            )?,
            by(
                "Engine and trainer log-probs",
                "largest gap",
                vec![curve("gap", |r| r.logprob_gap_max)],
            )?,
        ])
    }

    fn episodes(&self, page: &mut String) {
        for before in self.episodes_before.iter().take(8) {
            let after = self.episodes_after.iter().find(|t| t.task == before.task);
            page.push_str("<div class=cols>");
            for trace in [Some(before), after].into_iter().flatten() {
                let _ = writeln!(
                    page,
                    "<div class=ep><b>{}</b> reward {:.2} {}",
                    escape(trace.episode.as_str()),
                    trace.total_reward(),
                    escape(&end_text(&trace.end))
                );
                for node in &trace.nodes {
                    let text = self.renderer.decode_with_special(&node.tokens);
                    let class = kind_name(node.kind);
                    let _ = write!(page, "<span class={class}>{}</span>", escape(&text));
                }
                page.push_str("</div>");
            }
            page.push_str("</div>");
        }
    }
}

/// Rows of the table before/after: name and both values as text.
pub(crate) fn comparison(
    before: &EpisodeStats,
    after: &EpisodeStats,
) -> Vec<(String, String, String)> {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let number = |x: f64| format!("{x:.2}");
    let mut rows = vec![
        (
            "success".into(),
            percent(before.success),
            percent(after.success),
        ),
        ("reward".into(), number(before.reward), number(after.reward)),
    ];
    if let (Some(b), Some(a)) = (before.greedy_success, after.greedy_success) {
        rows.insert(1, ("success, greedy".into(), percent(b), percent(a)));
    }
    for (kind, b) in &before.success_by_kind {
        let a = after.success_by_kind.get(kind).copied().unwrap_or_default();
        rows.push((format!("success: {kind}"), percent(*b), percent(a)));
    }
    for (name, b) in &before.metrics {
        let a = after.metrics.get(name).copied().unwrap_or_default();
        rows.push((name.clone(), number(*b), number(a)));
    }
    rows.push(("turns".into(), number(before.turns), number(after.turns)));
    rows.push((
        "sampled tokens".into(),
        number(before.sampled_tokens),
        number(after.sampled_tokens),
    ));
    let count = |n: usize| n.to_string();
    rows.push((
        "truncated".into(),
        count(before.truncated),
        count(after.truncated),
    ));
    rows.push(("failed".into(), count(before.failed), count(after.failed)));
    rows
}

/// How an episode ended, in words.
pub(crate) fn end_text(end: &EpisodeEnd) -> String {
    match end {
        EpisodeEnd::Terminated => "terminated".into(),
        EpisodeEnd::Truncated { limit } => format!("truncated ({limit:?})"),
        EpisodeEnd::Failed { kind, message } => format!("failed ({kind:?}): {message}"),
    }
}

/// The name of a token kind.
pub(crate) fn kind_name(kind: TokenKind) -> &'static str {
    match kind {
        TokenKind::Prompt => "prompt",
        TokenKind::Sampled => "sampled",
        TokenKind::Forced => "forced",
        TokenKind::Observation => "observation",
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_a_model_s_output_stays_text() {
        assert_eq!(escape("<script>&"), "&lt;script&gt;&amp;");
    }
}
