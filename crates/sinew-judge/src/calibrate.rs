//! Agreement of a judge with labels of people.
//!
//! A row of labels is a JSON object: `prompt` (text, or `messages` as a list), `output`, `label`, and columns
//! of the task. `label` is one grade for each item of the rubric, in order: true or false, or a number of the
//! scale; a single grade if there is one item.

use crate::error::{LabelError, LabelsError};
use crate::frame::Mode;
use crate::judge::Judge;
use crate::rubric::Rubric;
use futures::StreamExt;
use serde::Serialize;
use serde_json::{Map, Value};
use sinew_dialect::conversation::strictly;
use sinew_env::{RewardSample, Unscored};
use sinew_types::{Message, Role, Task, TaskId, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// An answer with the grades that people gave it.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelledAnswer {
    /// The answer.
    pub sample: RewardSample,
    /// One grade for each item: 0 or 1, or a number of the scale.
    pub grades: Vec<i64>,
}

/// Reads rows of labels, JSON lines.
///
/// # Errors
/// The first row that is none, with its line; any of [`Mode::Compare`], which grades no single answer.
pub fn read_labels(
    text: &str,
    mode: Mode,
    rubric: &Rubric,
) -> Result<Vec<LabelledAnswer>, LabelsError> {
    if mode == Mode::Compare {
        return Err(LabelsError::Compare);
    }
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, l)| !l.trim().is_empty());
    let read = |(i, line): (usize, &str)| {
        let row = json::from_str(line).map_err(LabelError::from);
        let row = row.and_then(|row| labelled(row, i, mode, rubric.items().len()));
        row.map_err(|reason| LabelsError::Row {
            line: i + 1,
            reason,
        })
    };
    lines.map(read).collect()
}

fn labelled(
    mut row: Map<String, Value>,
    at: usize,
    mode: Mode,
    items: usize,
) -> Result<LabelledAnswer, LabelError> {
    let wrong = LabelError::Field;
    let mut take = |key: &str| {
        let value = row.remove(key);
        value.ok_or_else(|| wrong(format!("there is no {key:?}")))
    };
    let label = take("label")?;
    let output = match take("output")? {
        Value::String(text) => text,
        _ => return Err(wrong("\"output\" is no text".to_owned())),
    };
    let prompt = row
        .remove("prompt")
        .and_then(|p| p.as_str().map(str::to_owned));
    let mut messages = match (row.remove("messages"), &prompt) {
        (Some(list), _) => {
            let said = strictly(|reader| reader.messages(&list, "messages"))?;
            said.into_iter().map(|s| s.message).collect()
        }
        (None, Some(text)) => vec![Message::new(Role::User, text.clone())],
        (None, None) => {
            let why = "there is neither \"prompt\" nor \"messages\"";
            return Err(wrong(why.to_owned()));
        }
    };
    messages.push(Message::new(Role::Assistant, output.clone()));
    let grades = match label {
        Value::Array(list) => list,
        one => vec![one],
    };
    if grades.len() != items {
        return Err(wrong(format!(
            "{} grades for {items} items of the rubric",
            grades.len()
        )));
    }
    let grades = grades.iter().map(|g| grade(g, mode));
    let grades = grades.collect::<Option<_>>().ok_or_else(|| match mode {
        Mode::Scale { low, high } => {
            wrong(format!("a grade is no whole number from {low} to {high}"))
        }
        _ => wrong("a grade is neither true nor false".to_owned()),
    })?;
    let task = Task {
        id: TaskId::new(format!("label/{}", at + 1)),
        kind: "label".into(),
        preamble: Vec::new(),
        prompt: prompt.unwrap_or_default(),
        data: Value::Object(row),
        seed: 0,
    };
    let sample = RewardSample {
        messages,
        ..RewardSample::new(task, output)
    };
    Ok(LabelledAnswer { sample, grades })
}

/// A grade as a category.
fn grade(grade: &Value, mode: Mode) -> Option<i64> {
    match mode {
        Mode::Scale { low, high } => grade.as_i64().filter(|g| (low..=high).contains(g)),
        _ => grade.as_bool().map(i64::from),
    }
}

/// Agreement of one item. Shares are `None` where nothing stands below the line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ItemAgreement {
    /// The item's text.
    pub item: String,
    /// Share of rows with the same grade.
    pub agreement: Option<f64>,
    /// Share of the judge's yes that people agree with; only for yes and no.
    pub precision: Option<f64>,
    /// Share of the people's yes that the judge finds; only for yes and no.
    pub recall: Option<f64>,
    /// Cohen's kappa, unweighted: agreement beyond chance, 1 at most.
    pub kappa: Option<f64>,
    /// Rows by grades of people and judge: `[people, judge, rows]`.
    pub confusion: Vec<(i64, i64, usize)>,
}

/// Agreement of a judge with labels.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// Rows with a verdict.
    pub rows: usize,
    /// Rows without one.
    pub unscored: usize,
    /// Reason why the first of them has none.
    pub first_cause: Option<String>,
    /// Each item of the rubric.
    pub items: Vec<ItemAgreement>,
    /// Mean score of the judge by the score of the people, ascending: `[people, judge, rows]`.
    pub means: Vec<(f64, f64, usize)>,
}

impl Calibration {
    /// Runs `judge` on all rows, up to its own number of calls at once.
    pub async fn of(judge: &Judge, rows: &[LabelledAnswer]) -> Self {
        let asked = rows.iter().map(|row| judge.items(&row.sample));
        let at_once = judge.config().concurrency.max(1);
        let verdicts: Vec<_> = futures::stream::iter(asked)
            .buffered(at_once)
            .collect()
            .await;
        Self::compare(&judge.config().rubric, judge.config().mode, rows, verdicts)
    }

    /// Compares verdicts, one for each row, with the labels.
    pub fn compare(
        rubric: &Rubric,
        mode: Mode,
        rows: &[LabelledAnswer],
        verdicts: Vec<Result<Vec<f64>, Unscored>>,
    ) -> Self {
        let (low, high) = match mode {
            Mode::Scale { low, high } => (low, high),
            _ => (0, 1),
        };
        let width = (high - low).max(1) as f64;
        let (mut pairs, mut causes) = (Vec::new(), Vec::new());
        for (row, verdict) in rows.iter().zip(verdicts) {
            match verdict {
                Ok(values) => pairs.push((&row.grades, values)),
                Err(e) => causes.push(e.reason),
            }
        }
        let items = rubric.items().iter().enumerate().map(|(i, item)| {
            // The mean of several votes is the nearest grade, upwards from the middle.
            let judged = |value: f64| low + (value * width + 0.5).floor() as i64;
            let pairs = pairs
                .iter()
                .map(|(grades, values)| (grades[i], judged(values[i])));
            agreement(&item.text, mode, &pairs.collect::<Vec<_>>())
        });
        let items = items.collect();
        let mut means: Vec<(f64, f64, usize)> = Vec::new();
        for (grades, values) in &pairs {
            let shares: Vec<f64> = grades.iter().map(|g| (g - low) as f64 / width).collect();
            let (people, judge) = (rubric.mean(&shares), rubric.mean(values));
            match means.iter_mut().find(|m| (m.0 - people).abs() < 1e-9) {
                Some(mean) => (mean.1, mean.2) = (mean.1 + judge, mean.2 + 1),
                None => means.push((people, judge, 1)),
            }
        }
        means.iter_mut().for_each(|m| m.1 /= m.2 as f64);
        means.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self {
            rows: pairs.len(),
            unscored: causes.len(),
            first_cause: causes.into_iter().next(),
            items,
            means,
        }
    }

    /// The tables for users.
    pub fn text(&self) -> String {
        let share = |s: Option<f64>| s.map_or("-".to_owned(), |s| format!("{s:.3}"));
        let mut out = format!("{} rows judged", self.rows);
        if let Some(cause) = &self.first_cause {
            let _ = write!(out, ", {} unscored; the first: {cause}", self.unscored);
        }
        out.push_str("\n\nagreement  precision  recall   kappa  item\n");
        for item in &self.items {
            let _ = writeln!(
                out,
                "{:>9}  {:>9}  {:>6}  {:>6}  {}",
                share(item.agreement),
                share(item.precision),
                share(item.recall),
                share(item.kappa),
                item.item
            );
        }
        out.push_str("\npeople  judge  rows  item\n");
        for (i, item) in self.items.iter().enumerate() {
            for (people, judge, rows) in &item.confusion {
                let _ = writeln!(out, "{people:>6}  {judge:>5}  {rows:>4}  item_{}", i + 1);
            }
        }
        out.push_str("\npeople's score  mean score of the judge  rows\n");
        for (people, judge, rows) in &self.means {
            let _ = writeln!(out, "{people:>14.3}  {judge:>23.3}  {rows:>4}");
        }
        out
    }
}

/// Agreement of pairs of grades: of people, of the judge.
fn agreement(item: &str, mode: Mode, pairs: &[(i64, i64)]) -> ItemAgreement {
    let share = |part: usize, of: usize| (of > 0).then(|| part as f64 / of as f64);
    let count =
        |fits: &dyn Fn(i64, i64) -> bool| pairs.iter().filter(|(p, j)| fits(*p, *j)).count();
    let n = pairs.len();
    let agreement = share(count(&|p, j| p == j), n);
    let mut confusion: BTreeMap<(i64, i64), usize> = BTreeMap::new();
    let (mut people, mut judge) = (BTreeMap::new(), BTreeMap::new());
    for (p, j) in pairs {
        *confusion.entry((*p, *j)).or_default() += 1;
        *people.entry(*p).or_insert(0usize) += 1;
        *judge.entry(*j).or_insert(0usize) += 1;
    }
    let by_chance = people.iter().map(|(grade, count)| {
        let other = judge.get(grade).copied().unwrap_or_default();
        *count as f64 * other as f64
    });
    let by_chance = by_chance.sum::<f64>() / (n as f64 * n as f64);
    let yes_no = matches!(mode, Mode::Each);
    let both = count(&|p, j| p == 1 && j == 1);
    ItemAgreement {
        item: item.to_owned(),
        agreement,
        precision: share(both, count(&|_, j| j == 1)).filter(|_| yes_no),
        recall: share(both, count(&|p, _| p == 1)).filter(|_| yes_no),
        kappa: agreement
            .filter(|_| by_chance < 1.0)
            .map(|observed| (observed - by_chance) / (1.0 - by_chance)),
        confusion: confusion.into_iter().map(|((p, j), n)| (p, j, n)).collect(),
    }
}
