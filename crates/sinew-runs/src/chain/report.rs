//! Report of a chain: a table at its end, and a page over all stages.
//!
//! The page is one file without scripts. It links to the reports of the stages, which lie below it.

use crate::chain::folder::{ChainDir, ChainError, StageEnd};
use sinew_orchestrator::{EvalRecord, StepRecord};
use sinew_recipe::ChainPlan;
use sinew_view::plot::{Curve, plot, plot_with_points};
use sinew_view::{ViewError, duration, lines, smoothed};
use std::fmt::Write;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:.8em 0}td,th{padding:.2em .9em;text-align:right;border-bottom:1px solid #ddd}\
td:first-child,th:first-child{text-align:left}.plots{display:flex;flex-wrap:wrap;gap:12px}code{color:#666}";

/// One measured value of a stage, such as `eval.before.success`, in percent.
fn percent(end: &StageEnd, when: &str) -> String {
    let success = end.last["eval"][when]["success"].as_f64();
    success.map_or_else(|| "-".into(), |s| format!("{:.1} %", 100.0 * s))
}

/// Seconds of a stage.
fn wall_s(end: &StageEnd) -> f64 {
    end.last["wall_s"].as_f64().unwrap_or_default()
}

/// The end of a chain for users: each stage, the whole, and what to do next.
pub fn table(dir: &ChainDir) -> String {
    let ended = dir.ended();
    let wide = ended
        .iter()
        .map(|e| e.name.len())
        .max()
        .unwrap_or(0)
        .max(11);
    let mut text = format!(
        "\n{:wide$}  {:>6}  {:>8}  {:>8}  {:>8}  weights\n",
        "stage", "steps", "before", "after", "time"
    );
    for end in ended {
        let _ = writeln!(
            text,
            "{:wide$}  {:>6}  {:>8}  {:>8}  {:>8}  {}",
            end.name,
            end.steps,
            percent(end, "before"),
            percent(end, "after"),
            duration(wall_s(end)),
            end.weights.get(..12).unwrap_or_default(),
        );
    }
    if let (Some(first), Some(last)) = (ended.first(), ended.last()) {
        let _ = writeln!(
            text,
            "{:wide$}  {:>6}  {:>8}  {:>8}  {:>8}",
            "whole chain",
            ended.iter().map(|e| e.steps).sum::<u64>(),
            percent(first, "before"),
            percent(last, "after"),
            duration(ended.iter().map(wall_s).sum()),
        );
    }
    let folder = dir.path().display();
    let _ = write!(
        text,
        "\nnext\n  open {folder}/report.html\n  sinew serve --engine embedded --model {folder}\n  sinew export \
         {folder} model    # the trained model as one folder\n"
    );
    text
}

/// Records of a stage, with the steps of the stages before it.
struct StageRecords {
    name: String,
    before: u64,
    steps: Vec<StepRecord>,
    evals: Vec<EvalRecord>,
    /// Whether it samples the episodes that it trains.
    samples: bool,
}

/// Writes `report.html` of the stages so far.
///
/// # Errors
/// If a record cannot be read, or the page cannot be written.
pub fn write_report(chain: &ChainPlan, dir: &ChainDir) -> Result<(), ChainError> {
    let mut stages = Vec::new();
    let mut before = 0;
    for stage in &chain.stages {
        let folder = dir.stage(&stage.name);
        let unreadable = |error: ViewError| ChainError::Damaged {
            path: folder.clone(),
            message: error.to_string(),
        };
        let recorded = StageRecords {
            name: stage.name.clone(),
            before,
            steps: lines(&folder.join("metrics.jsonl")).map_err(unreadable)?,
            evals: lines(&folder.join("evals.jsonl")).map_err(unreadable)?,
            samples: stage.plan.data.is_none(),
        };
        before += recorded.steps.last().map_or(0, |s| s.step);
        stages.push(recorded);
    }
    let plots = plots(&stages).map_err(|e| ChainError::Damaged {
        path: dir.path().join("report.html"),
        message: e.to_string(),
    })?;
    dir.write("report.html", page(chain, dir, &plots).as_bytes())
}

/// Held-out success and the success of training episodes, over the steps of all stages; a curve a stage.
fn plots(stages: &[StageRecords]) -> Result<Vec<String>, ViewError> {
    let held_out = |s: &StageRecords| Curve {
        name: s.name.clone(),
        points: s
            .evals
            .iter()
            .map(|e| ((s.before + e.step) as f64, e.stats.success))
            .collect(),
    };
    let held_out: Vec<Curve> = stages.iter().map(held_out).collect();
    let ends = Curve {
        name: "end of a stage".into(),
        points: held_out
            .iter()
            .filter_map(|c| c.points.last().copied())
            .collect(),
    };
    let training = stages.iter().filter(|s| s.samples).map(|s| Curve {
        name: s.name.clone(),
        points: smoothed(&s.steps)
            .into_iter()
            .map(|(step, success)| (s.before as f64 + step, success))
            .collect(),
    });
    let training: Vec<Curve> = training.collect();
    let x = "step over all stages";
    let mut all = vec![plot_with_points(
        "Held-out success",
        x,
        "share",
        &held_out,
        &[ends],
    )?];
    if !training.is_empty() {
        all.push(plot("Success of training episodes", x, "share", &training)?);
    }
    Ok(all)
}

fn page(chain: &ChainPlan, dir: &ChainDir, plots: &[String]) -> String {
    // Names of recipes have no mark-up: letters, digits, `.`, `_`, `-` and spaces.
    let name = &chain.name;
    let mut page = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Sinew chain: {name}</title><style>{STYLE}</style>\
         <h1>Sinew chain: {name}</h1><p>{} of {} stages have ended.</p><table><tr><th>stage<th>algorithm<th>steps\
         <th>held-out before<th>after<th>time<th>weights at its end",
        dir.ended().len(),
        chain.stages.len()
    );
    for (at, stage) in chain.stages.iter().enumerate() {
        let (name, algorithm) = (&stage.name, stage.plan.algorithm.kind);
        let _ = write!(
            page,
            "<tr><td><a href=\"{name}/report.html\">{name}</a><td>{algorithm}<td>{}",
            stage.plan.train.steps
        );
        if let Some(end) = dir.ended().get(at) {
            let _ = write!(
                page,
                "<td>{}<td>{}<td>{}<td><code>{}</code>",
                percent(end, "before"),
                percent(end, "after"),
                duration(wall_s(end)),
                end.weights.get(..16).unwrap_or_default()
            );
        }
    }
    page.push_str("</table><h2>Curves</h2><div class=plots>");
    page.push_str(&plots.concat());
    page.push_str("</div>");
    page
}
