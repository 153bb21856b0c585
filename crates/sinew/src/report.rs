//! The static HTML report of a run: plots, the end table, sample episodes before and after.

use crate::record::{EpisodeStats, StepRecord};
use plotters::prelude::{
    ChartBuilder, Color, IntoDrawingArea, LineSeries, PathElement, RGBColor, SVGBackend,
    SeriesLabelPosition, TRANSPARENT, WHITE,
};
use sinew_render::Renderer;
use sinew_types::{EpisodeEnd, TokenKind, Trace};
use std::fmt::Write;

/// One line of a plot.
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A line plot as SVG.
pub(crate) fn plot(title: &str, x: &str, y: &str, curves: &[Curve]) -> Result<String, String> {
    let mut svg = String::new();
    draw_plot(&mut svg, title, x, y, curves).map_err(|e| format!("plot {title}: {e}"))?;
    Ok(svg)
}

fn draw_plot(
    svg: &mut String,
    title: &str,
    x: &str,
    y: &str,
    curves: &[Curve],
) -> Result<(), Box<dyn std::error::Error>> {
    let finite = || {
        curves
            .iter()
            .flat_map(|c| &c.points)
            .filter(|p| p.0.is_finite() && p.1.is_finite())
    };
    let bound = |pick: fn(&(f64, f64)) -> f64| {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for p in finite() {
            low = low.min(pick(p));
            high = high.max(pick(p));
        }
        if low > high { (0.0, 1.0) } else { (low, high) }
    };
    let (x0, x1) = bound(|p| p.0);
    let (y0, y1) = bound(|p| p.1);
    let (y0, y1) = (y0.min(0.0), y1 + 0.05 * (y1 - y0.min(0.0)).max(1e-6));
    let area = SVGBackend::with_string(svg, (520, 300)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(34)
        .y_label_area_size(48)
        .build_cartesian_2d(x0..x1.max(x0 + 1e-6), y0..y1)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(x)
        .y_desc(y)
        .draw()?;
    for (curve, color) in curves.iter().zip(COLORS.iter().cycle()) {
        let points: Vec<_> = curve
            .points
            .iter()
            .copied()
            .filter(|p| p.0.is_finite() && p.1.is_finite())
            .collect();
        let color = *color;
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
            .label(curve.name.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], color));
    }
    // A curve alone is named by the title.
    if curves.len() < 2 {
        area.present()?;
        return Ok(());
    }
    chart
        .configure_series_labels()
        .position(emptiest_corner(finite(), (x0, x1), (y0, y1)))
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    area.present()?;
    Ok(())
}

/// Distinct for those who see red and green alike, too.
const COLORS: [RGBColor; 5] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
];

/// The corner in which fewest points lie.
fn emptiest_corner<'a>(
    points: impl Iterator<Item = &'a (f64, f64)>,
    (x0, x1): (f64, f64),
    (y0, y1): (f64, f64),
) -> SeriesLabelPosition {
    let mut counts = [0; 4];
    for (x, y) in points {
        let (right, low) = ((x - x0) / (x1 - x0), (y1 - y) / (y1 - y0));
        for (corner, count) in counts.iter_mut().enumerate() {
            let (at_right, at_low) = (corner % 2 == 1, corner >= 2);
            let inside = |share: f64, far: bool| if far { share > 0.6 } else { share < 0.4 };
            *count += usize::from(inside(right, at_right) && inside(low, at_low));
        }
    }
    let [upper_left, upper_right, _, lower_right] = counts;
    let fewest = counts.iter().min().copied().unwrap_or_default();
    match fewest {
        n if n == lower_right => SeriesLabelPosition::LowerRight,
        n if n == upper_right => SeriesLabelPosition::UpperRight,
        n if n == upper_left => SeriesLabelPosition::UpperLeft,
        _ => SeriesLabelPosition::LowerLeft,
    }
}

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
    fn plots_survive_no_points_and_non_finite_ones() {
        let empty = plot("t", "x", "y", &[]).unwrap();
        assert!(empty.starts_with("<svg"));
        let points = vec![(0.0, f64::NAN), (1.0, 2.0)];
        let one = plot(
            "t",
            "x",
            "y",
            &[Curve {
                name: "c".into(),
                points,
            }],
        )
        .unwrap();
        assert!(one.contains("</svg>"));
    }

    #[test]
    fn a_legend_keeps_off_the_curves() {
        let line = |points: &[(f64, f64)]| emptiest_corner(points.iter(), (0.0, 1.0), (0.0, 1.0));
        let rising = line(&[(0.0, 0.0), (0.1, 0.2), (0.9, 0.8), (1.0, 1.0)]);
        assert!(matches!(rising, SeriesLabelPosition::LowerRight));
        let falling = line(&[(0.0, 1.0), (0.1, 0.8), (0.9, 0.2), (1.0, 0.0)]);
        assert!(matches!(falling, SeriesLabelPosition::UpperRight));
    }

    #[test]
    fn markup_in_a_model_s_output_stays_text() {
        assert_eq!(escape("<script>&"), "&lt;script&gt;&amp;");
    }
}
