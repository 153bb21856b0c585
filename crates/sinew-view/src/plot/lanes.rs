//! Draws activity over time: one lane below the other.

use crate::error::ViewError;
use crate::plot::{COLORS, number};
use plotters::prelude::{
    ChartBuilder, Color, IntoDrawingArea, IntoFont, IntoTextStyle, Rectangle, SVGBackend,
    TRANSPARENT, Text, WHITE,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// A stretch of a lane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    pub from: f64,
    pub to: f64,
    /// Busy share of the lane in the span, 0 to 1: the height of the drawing.
    pub share: f64,
}

/// Activity of one part.
#[derive(Clone, Debug, PartialEq)]
pub struct Lane {
    /// Label in front of the lane.
    pub name: String,
    /// Spans in their order. Those that are not finite, or are empty, are ignored.
    pub spans: Vec<Span>,
}

/// Columns over the width: spans that are narrower are drawn as one.
const COLUMNS: usize = 400;

/// Height of a lane, of which a part is space, and of what is around all.
const LANE: u32 = 40;
const AROUND: u32 = 90;

/// Draws lanes as SVG, 760 pixels wide; `x` is the label of the axis that they share, with its unit. It
/// begins at 0. The names' first word, up to a colon, gives the color.
///
/// # Errors
/// If it cannot be drawn.
pub fn timeline(title: &str, x: &str, lanes: &[Lane]) -> Result<String, ViewError> {
    let mut svg = String::new();
    draw(&mut svg, title, x, lanes).map_err(|e| ViewError::plot(title, &*e))?;
    Ok(svg)
}

/// The mean of a lane in each of [`COLUMNS`] columns up to `end`.
fn columns(lane: &Lane, end: f64) -> Vec<f64> {
    let width = end / COLUMNS as f64;
    let mut out = vec![0.0; COLUMNS];
    let whole = |s: &&Span| s.share.is_finite() && s.from.is_finite() && s.to > s.from;
    for span in lane.spans.iter().filter(whole) {
        let first = ((span.from / width).max(0.0) as usize).min(COLUMNS - 1);
        let last = ((span.to / width).max(0.0) as usize).min(COLUMNS - 1);
        for (column, value) in out.iter_mut().enumerate().take(last + 1).skip(first) {
            let (from, to) = (column as f64 * width, (column + 1) as f64 * width);
            let covered = (span.to.min(to) - span.from.max(from)).max(0.0);
            *value += span.share.clamp(0.0, 1.0) * covered / width;
        }
    }
    out
}

fn draw(
    svg: &mut String,
    title: &str,
    x: &str,
    lanes: &[Lane],
) -> Result<(), Box<dyn std::error::Error>> {
    let ends = lanes.iter().flat_map(|l| &l.spans).map(|s| s.to);
    let end = ends.filter(|t| t.is_finite()).fold(0.0, f64::max).max(1e-6);
    let count = lanes.len();
    let area =
        SVGBackend::with_string(svg, (760, AROUND + LANE * count as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(34)
        .y_label_area_size(140)
        .build_cartesian_2d(0.0..end, 0.0..count as f64)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .disable_y_axis()
        .disable_y_mesh()
        .x_desc(x)
        .x_label_formatter(&|v| number(*v))
        .draw()?;
    let mut kinds: Vec<&str> = Vec::new();
    for (place, lane) in lanes.iter().enumerate() {
        let floor = (count - 1 - place) as f64 + 0.1;
        let kind = lane.name.split_once(':').map_or(&*lane.name, |(k, _)| k);
        let known = kinds.iter().position(|k| *k == kind);
        let at = known.unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        });
        let (color, width) = (COLORS[at % COLORS.len()], end / COLUMNS as f64);
        let bars = columns(lane, end).into_iter().enumerate();
        chart.draw_series(bars.filter(|(_, share)| *share > 0.0).map(|(n, share)| {
            let from = n as f64 * width;
            Rectangle::new(
                [(from, floor), (from + width, floor + 0.8 * share)],
                color.filled(),
            )
        }))?;
        let font = ("sans-serif", 13).into_font().into_text_style(&area);
        let (_, y) = chart.backend_coord(&(0.0, floor + 0.4));
        let style = font.pos(Pos::new(HPos::Right, VPos::Center));
        area.draw(&Text::new(lane.name.clone(), (142, y), style))?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(name: &str, spans: &[(f64, f64, f64)]) -> Lane {
        let span = |&(from, to, share): &(f64, f64, f64)| Span { from, to, share };
        Lane {
            name: name.into(),
            spans: spans.iter().map(span).collect(),
        }
    }

    #[test]
    fn columns_are_means_of_what_they_cover() {
        let seen = columns(&lane("l", &[(0.0, 200.0, 1.0), (200.5, 201.0, 0.5)]), 400.0);
        assert_eq!(
            (seen[0], seen[199], seen[200], seen[201]),
            (1.0, 1.0, 0.25, 0.0)
        );
        let odd = columns(&lane("l", &[(1.0, 0.0, 1.0), (0.0, 1.0, f64::NAN)]), 1.0);
        assert!(odd.iter().all(|share| *share == 0.0));
    }

    #[test]
    fn lanes_have_names_and_one_color_a_kind() {
        let lanes = [
            lane("sync: engine", &[(0.0, 1.0, 0.5)]),
            lane("sync: trainer", &[(1.0, 2.0, 1.0)]),
            lane("async: engine", &[(0.0, 2.0, 1.0)]),
        ];
        let svg = timeline("t", "s", &lanes).unwrap();
        for lane in &lanes {
            assert!(svg.contains(&lane.name), "{svg}");
        }
        for (color, drawn) in [("#0072B2", true), ("#E69F00", true), ("#009E73", false)] {
            assert_eq!(svg.contains(color), drawn, "{color}");
        }
        assert!(timeline("t", "s", &[]).unwrap().contains("</svg>"));
    }
}
