//! Training speed from one to five hundred million weights and 128 to 8192 tokens of context, against the
//! time of only the arithmetic at the machine's peak.

use super::machine::{CpuTime, Floors};
use super::row::{Better, Row, Summary};
use super::train::{sequences, step_seconds, trainer};
use super::{Bench, shapes};
use crate::BenchError;
use serde::Deserialize;
use sinew_model::{Keep, ModelConfig, ParamLayout};
use sinew_types::Surrogate;
use sinew_view::plot::{Curve, plot};
use std::path::Path;

/// Tokens of each sequence.
const CONTEXTS: [usize; 4] = [128, 512, 2048, 8192];
/// Tokens of a step at least: short contexts are batched, as in training.
const STEP_TOKENS: usize = 1024;
/// Share of the peak that is expected, to tell beforehand what takes too long.
const EXPECTED: f64 = 0.5;

/// Operations of a step of `rows` sequences of `length` tokens: twice the forward work for the
/// backward pass, and the forward work of the layers again where activations are recomputed. Logits count
/// once: computing those again for which there is no memory is the step's loss.
fn step_operations(c: &ModelConfig, rows: usize, length: usize, recompute: bool) -> f64 {
    let layer = c.d_model * (c.qkv_dim() + c.q_dim() + 3 * c.d_ff);
    let tokens = (rows * length) as f64;
    let linear = 2.0 * tokens * (layer * c.layers) as f64;
    // Causal: each token attends to half of the others on average, products with keys and values.
    let pairs = rows as f64 * (length as f64 * (length as f64 + 1.0) / 2.0);
    let attention = 4.0 * pairs * (c.q_dim() * c.layers) as f64;
    let head = 2.0 * tokens * (c.vocab * c.d_model) as f64;
    let passes = if recompute { 4.0 } else { 3.0 };
    passes * (linear + attention) + 3.0 * head
}

/// One cell: prints a row, and answers it where it was measured.
fn cell(
    bench: &Bench,
    floors: Floors,
    name: &str,
    config: &ModelConfig,
    length: usize,
) -> Result<Option<Row>, BenchError> {
    let rows = STEP_TOKENS.div_ceil(length);
    let tokens = rows * length;
    let weights = ParamLayout::new(config).weights();
    // Activations of a token that are kept, roughly: 8 values of the width, 4 of the feed-forward.
    let kept = 4 * tokens * config.layers * (8 * config.d_model + 4 * config.d_ff);
    let recompute = kept > 2 << 30;
    let floor_s = step_operations(config, rows, length, recompute) / floors.peak;
    let row_name = row_name(name, length);
    let expected = 2.0 * floor_s / EXPECTED;
    if expected > bench.cell_limit_s {
        let why = format!(
            "two steps take about {expected:.0} s, the limit is {} s: see --cell-limit",
            bench.cell_limit_s
        );
        bench.printer.row(&Row {
            met: None,
            ..Row::missing(row_name, "tok/s", why)
        });
        return Ok(None);
    }
    let keep = if recompute {
        Keep::LayerInputs
    } else {
        Keep::All
    };
    let cpu = CpuTime::now();
    let steps = ((0.3 * bench.cell_limit_s / expected) as usize).clamp(1, 5);
    let mut trainer = trainer(&bench.dev, config, keep, length + 1, tokens)?;
    let batch = sequences(config, rows, length);
    let (times, _) = step_seconds(&mut trainer, &batch, Surrogate::CrossEntropy, steps)?;
    let rates = times.iter().map(|s| tokens as f64 / s).collect();
    let ours = Summary::of(rates, Better::More).unwrap_or_default();
    let floor = tokens as f64 / floor_s;
    let row = Row::new(row_name, "tok/s", ours);
    let peer = format!("arithmetic floor, {:.1} M weights", weights as f64 / 1e6);
    let row = row.against(&peer, floor, Better::More);
    let row = row.others(CpuTime::others_since(cpu));
    bench.printer.row(&row);
    Ok(Some(row))
}

/// Name of a cell.
fn row_name(size: &str, length: usize) -> String {
    format!("train {size}, context {length}")
}

/// Names of all model sizes.
pub(super) fn sizes() -> Vec<String> {
    let scale = shapes::scale();
    scale.iter().map(|(name, _)| (*name).to_owned()).collect()
}

/// Path of the plot, and the rows that it shows in addition to this run's cells.
pub(super) struct Plot<'a> {
    /// An SVG file.
    pub(super) out: Option<&'a Path>,
    /// Printed rows of another run, drawn for comparison.
    pub(super) earlier: Option<&'a Path>,
}

/// The part of a printed row that the plot needs.
#[derive(Deserialize)]
struct Share {
    /// Name of the row.
    name: String,
    /// Share of the peak.
    ratio: Option<f64>,
}

/// `scaling`: all cells of `wanted` sizes, and the plot if one is wanted.
pub(super) fn run(
    bench: &Bench,
    floors: Floors,
    wanted: &[String],
    to: &Plot<'_>,
) -> Result<(), BenchError> {
    let known = sizes();
    if let Some(bad) = wanted.iter().find(|name| !known.contains(name)) {
        let known = known.join(", ");
        return Err(BenchError::input(format!(
            "--sizes {bad}: allowed: {known}"
        )));
    }
    let mut shares = match to.earlier {
        Some(path) => {
            let text = std::fs::read_to_string(path);
            read_shares(&text.map_err(|e| BenchError::input(format!("{}: {e}", path.display())))?)?
        }
        None => Vec::new(),
    };
    for (name, config) in shapes::scale() {
        if !wanted.iter().any(|size| size == name) {
            continue;
        }
        for length in CONTEXTS {
            let row = cell(bench, floors, name, &config, length)?;
            // The row follows those of earlier runs and replaces the earlier one of its name.
            shares.extend(row.map(|row| Share {
                name: row.name,
                ratio: row.ratio,
            }));
        }
    }
    if let Some(out) = to.out {
        let title = "Training speed as a share of the arithmetic floor";
        let svg = plot(title, "log2(context)", "share of floor", &curves(&shares));
        let svg = svg.map_err(BenchError::system)?;
        std::fs::write(out, svg)
            .map_err(|e| BenchError::system(format!("{}: {e}", out.display())))?;
    }
    Ok(())
}

/// Rows from the lines of `--json`.
fn read_shares(text: &str) -> Result<Vec<Share>, BenchError> {
    let lines = text.lines().filter(|line| line.starts_with('{'));
    let rows: Result<Vec<Share>, _> = lines.map(serde_json::from_str).collect();
    rows.map_err(|e| BenchError::input(format!("--earlier: {e}: give the --json output")))
}

/// A curve for each size with a measured cell; of several rows of a cell the last one counts.
fn curves(shares: &[Share]) -> Vec<Curve> {
    let share = |size: &str, length: usize| {
        let name = row_name(size, length);
        let row = shares.iter().rev().find(|share| share.name == name);
        row.and_then(|row| row.ratio)
            .map(|share| ((length as f64).log2(), share))
    };
    let curve = |name: String| Curve {
        points: CONTEXTS
            .iter()
            .filter_map(|&length| share(&name, length))
            .collect(),
        name,
    };
    let curves = sizes().into_iter().map(curve);
    curves.filter(|curve| !curve.points.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_follow_the_usual_six_per_weight_and_token() {
        let c = shapes::smollm2();
        let head = c.vocab * c.d_model;
        let weights = (ParamLayout::new(&c).weights() - head) as f64;
        let tokens = 1024.0;
        let operations = step_operations(&c, 8, 128, false);
        let expected = 6.0 * weights * tokens + 6.0 * head as f64 * tokens;
        assert!((operations / expected - 1.0).abs() < 0.05);
        assert!(step_operations(&c, 8, 128, true) > 1.1 * operations);
    }

    #[test]
    fn a_plot_shows_the_last_row_of_each_cell_of_several_runs() {
        let text = r#"{"name":"floor: memory read","value":1.0}
{"name":"train 10M, context 512","value":3.0,"ratio":0.5,"unit":"tok/s"}
{"name":"train 10M, context 512","value":4.0,"ratio":0.6}
{"name":"train 10M, context 128","value":5.0,"ratio":0.7}
{"name":"train 1M, context 8192","value":null,"why":"too long"}"#;
        let curves = curves(&read_shares(text).unwrap());
        assert_eq!(curves.len(), 1);
        assert_eq!(curves[0].name, "10M");
        assert_eq!(curves[0].points, [(7.0, 0.7), (9.0, 0.6)]);
        assert!(read_shares("{broken").is_err());
    }
}
