//! Line plots and timelines as SVG, for reports and benches.
//!
//! Invariants: every set of points can be drawn, also an empty one. The legend is in the corner
//! with the fewest points. The same input gives the same text, so plots in documents change only
//! with their data.

mod lanes;

pub use lanes::{Lane, Span, timeline};

use crate::error::ViewError;
use plotters::prelude::{
    ChartBuilder, Circle, Color, IntoDrawingArea, LineSeries, PathElement, RGBColor, SVGBackend,
    SeriesLabelPosition, TRANSPARENT, WHITE,
};

/// A line or a set of marked points of a plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Name in the legend. A single curve has none: the title names it.
    pub name: String,
    /// Points as (x, y), connected in this order. One that is not finite was not measured: the line has a gap
    /// there.
    pub points: Vec<(f64, f64)>,
}

/// Draws a line plot as SVG with 520 x 300 pixels. `x` and `y` are the labels of the axes, with
/// units. Axes are linear and include y = 0.
///
/// # Errors
/// If the plot cannot be drawn.
pub fn plot(title: &str, x: &str, y: &str, curves: &[Curve]) -> Result<String, ViewError> {
    plot_with_points(title, x, y, curves, &[])
}

/// Draws like [`plot`], with the points of `marked` as separate dots.
///
/// # Errors
/// Same as [`plot`].
pub fn plot_with_points(
    title: &str,
    x: &str,
    y: &str,
    curves: &[Curve],
    marked: &[Curve],
) -> Result<String, ViewError> {
    let mut svg = String::new();
    let drawn = draw_plot(&mut svg, title, x, y, curves, marked);
    drawn.map_err(|e| ViewError::plot(title, &*e))?;
    Ok(svg)
}

/// Formats a number of an axis with three significant digits.
fn number(value: f64) -> String {
    let size = value.abs();
    if size < 1e-12 {
        return "0".into();
    }
    if !(1e-3..1e5).contains(&size) {
        return format!("{value:.1e}");
    }
    let decimals = (2.0 - size.log10().floor()).clamp(0.0, 6.0) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').into()
    } else {
        text
    }
}

/// Finite points of a curve. They bound its axes, and the legend keeps away from them.
fn finite(curve: &Curve) -> impl Iterator<Item = (f64, f64)> + '_ {
    let points = curve.points.iter().copied();
    points.filter(|p| p.0.is_finite() && p.1.is_finite())
}

/// The parts of a curve between its gaps, in order. None is empty; one of a single point is drawn as a dot,
/// since a line without length is not seen.
fn parts(curve: &Curve) -> impl Iterator<Item = &[(f64, f64)]> {
    let gap = |p: &(f64, f64)| !(p.0.is_finite() && p.1.is_finite());
    curve.points.split(gap).filter(|part| !part.is_empty())
}

/// Draws a plot into `svg`. Axes include y = 0 and all points; an empty plot has axes from 0 to
/// about 1.
fn draw_plot(
    svg: &mut String,
    title: &str,
    x: &str,
    y: &str,
    curves: &[Curve],
    marked: &[Curve],
) -> Result<(), Box<dyn std::error::Error>> {
    let all = || curves.iter().chain(marked).flat_map(finite);
    let bound = |pick: fn(&(f64, f64)) -> f64| {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in all().map(|p| pick(&p)) {
            (low, high) = (low.min(value), high.max(value));
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
        .x_label_formatter(&|v| number(*v))
        .y_label_formatter(&|v| number(*v))
        .draw()?;
    let mut colors = COLORS.iter().copied().cycle();
    for (curve, color) in curves.iter().zip(colors.by_ref()) {
        for part in parts(curve).filter(|part| part.len() > 1) {
            let line = LineSeries::new(part.iter().copied(), color.stroke_width(2));
            chart.draw_series(line)?;
        }
        let alone = parts(curve)
            .filter(|part| part.len() == 1)
            .map(|part| part[0]);
        chart.draw_series(alone.map(|p| Circle::new(p, 2, color.filled())))?;
        chart
            .draw_series(LineSeries::new([], color.stroke_width(2)))?
            .label(curve.name.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], color));
    }
    for (curve, color) in marked.iter().zip(colors) {
        chart
            .draw_series(finite(curve).map(|p| Circle::new(p, 4, color.filled())))?
            .label(curve.name.clone())
            .legend(move |(x, y)| Circle::new((x + 7, y), 4, color.filled()));
    }
    // A single curve needs no legend: the title is its name.
    if curves.len() + marked.len() < 2 {
        area.present()?;
        return Ok(());
    }
    chart
        .configure_series_labels()
        .position(emptiest_corner(all(), (x0, x1), (y0, y1)))
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    area.present()?;
    Ok(())
}

/// Colors that are distinct for readers with color blindness (Okabe and Ito 2008), one curve after
/// the other; the sixth curve has the first color again.
const COLORS: [RGBColor; 5] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
];

/// The corner with the fewest points in its 40 % of both axes; lower right wins between equals,
/// then upper right, upper left, lower left.
fn emptiest_corner(
    points: impl Iterator<Item = (f64, f64)>,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_and_non_finite_points_are_allowed() {
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
    fn what_was_not_measured_is_a_gap_in_the_line() {
        let points = vec![
            (1.0, 0.1),
            (2.0, 0.2),
            (3.0, f64::NAN),
            (4.0, 0.3),
            (5.0, 0.1),
        ];
        let of = |points: Vec<(f64, f64)>| {
            let name = "c".into();
            let svg = plot("t", "x", "y", &[Curve { name, points }]).unwrap();
            let line = |l: &&str| l.contains("<polyline") && l.contains("#0072B2");
            let lines = svg.lines().filter(line);
            let lengths: Vec<usize> = lines
                .map(|l| {
                    l.split("points=\"")
                        .nth(1)
                        .unwrap()
                        .split('"')
                        .next()
                        .unwrap()
                })
                .map(|points| points.split_whitespace().count())
                .filter(|n| *n > 0)
                .collect();
            (lengths, svg.matches("<circle").count())
        };
        assert_eq!(of(points.clone()), (vec![2, 2], 0));
        // A point between two gaps is a dot.
        assert_eq!(of(points[..3].to_vec()), (vec![2], 0));
        let alone = vec![(1.0, 0.1), (2.0, f64::NAN), (3.0, 0.2), (4.0, f64::NAN)];
        assert_eq!(of(alone), (vec![], 2));
    }

    #[test]
    fn marked_points_are_dots_with_a_legend() {
        let curve = |name: &str, points: &[(f64, f64)]| Curve {
            name: name.into(),
            points: points.into(),
        };
        let line = curve("training", &[(1.0, 0.1), (2.0, 0.2)]);
        let dots = curve("held out", &[(0.0, 0.5), (2.0, 0.9)]);
        let svg = plot_with_points("t", "x", "y", std::slice::from_ref(&line), &[dots]).unwrap();
        // Two points and the one of the legend.
        assert_eq!(svg.matches("<circle").count(), 3, "{svg}");
        assert!(svg.contains("held out"));
        assert_eq!(
            plot("t", "x", "y", &[line])
                .unwrap()
                .matches("<circle")
                .count(),
            0
        );
    }

    #[test]
    fn small_numbers_on_axes_differ_from_zero() {
        for (value, text) in [
            (0.0, "0"),
            (1e-17, "0"),
            (10.0, "10"),
            (0.5, "0.5"),
            (-0.25, "-0.25"),
            (0.0025, "0.0025"),
            (2.5e-7, "2.5e-7"),
            (1200.0, "1200"),
            (3e6, "3.0e6"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn legend_avoids_the_curves() {
        let line =
            |points: &[(f64, f64)]| emptiest_corner(points.iter().copied(), (0.0, 1.0), (0.0, 1.0));
        let rising = line(&[(0.0, 0.0), (0.1, 0.2), (0.9, 0.8), (1.0, 1.0)]);
        assert!(matches!(rising, SeriesLabelPosition::LowerRight));
        let falling = line(&[(0.0, 1.0), (0.1, 0.8), (0.9, 0.2), (1.0, 0.0)]);
        assert!(matches!(falling, SeriesLabelPosition::UpperRight));
    }
}
