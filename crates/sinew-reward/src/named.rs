//! The rewards that recipes can name.
//!
//! A reward is one [`Rule`]: it is made once, when the recipe is read, and holds no state. It compares the
//! output, the answer of the model's last turn, with a column of the task. `sinew-answer` defines the answer,
//! its number, its option and its JSON. Penalties measure the whole turn with its thoughts.
//!
//! Values lie in 0 to 1, those of penalties in -1 to 0. A wrong answer is 0. An expected value that cannot be
//! compared is [`Unscored`], because the task is at fault, not the model. An answer that may be read both as
//! right and as wrong is [`Unscored`], too.
//!
//! A new reward is a variant of [`Rule`], its arguments in [`rule`], its value in [`Rule::value`], and a row
//! of [`NAMES`].

use crate::kind::Kind;
use crate::spec::{Argument, RewardSpec, SpecError};
use futures::FutureExt;
use futures::future::BoxFuture;
use regex::Regex;
use serde_json::Value;
use sinew_answer::{
    Comparison, Mark, choice, citations, compare, expected_number, is_tags, json,
    number as number_of, option, repeated, stated,
};
use sinew_env::{Reward, RewardSample, Score, Unscored};
use sinew_types::MAX_REWARD;
use std::sync::Arc;

/// Length of the n-grams of `repetition`, unless set.
const NGRAM: f64 = 4.0;

/// Names with their arguments and meaning, for messages and documentation.
pub const NAMES: [(&str, &str); 13] = [
    (
        "exact(COLUMN)",
        "1 if the output is the column's text, without outer spaces and without a tag <answer> around it",
    ),
    (
        "contains(COLUMN)",
        "1 if the output contains the column's text",
    ),
    (
        "number(COLUMN, tolerance = T)",
        "1 if the number that the output states, else its last one, is the column's: whole numbers exactly, others within 1e-6, or all within a relative tolerance",
    ),
    (
        "choice(COLUMN)",
        "1 if the option letter that the output takes is the column's",
    ),
    (
        "regex(\"PATTERN\")",
        "1 if the pattern matches in the output; a column may hold it",
    ),
    (
        "format(\"TAG\", ...)",
        "1 if the turn is these tags in this order, each once, with nothing around them; a thought stands in its tag",
    ),
    (
        "math(COLUMN)",
        "1 if the last expression of the output is equal to the column's (package math-verify)",
    ),
    (
        "tests(COLUMN)",
        "share of the column's tests in Python that the output's code passes, in a sandbox",
    ),
    (
        "program(COLUMN)",
        "1 if the column's program in Python ends with 0, with the output's code as solution.py, in a sandbox",
    ),
    (
        "json_schema(COLUMN)",
        "1 if the output is JSON, alone or in a fenced block, that fits the schema",
    ),
    (
        "citations(COLUMN)",
        "F1 of the ids in square brackets against the column's list",
    ),
    (
        "length(max = N)",
        "0 up to N characters of the turn, then falling to -1 at twice as many",
    ),
    (
        "repetition(n = 4)",
        "minus the share of repeated n-grams of the turn's words, 0 to -1; of scripts without blanks, of its characters",
    ),
];

/// A reward that runs code, and the column that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    /// A function of this crate, in the workers of functions.
    Math,
    /// Code of the model, in sandboxes of the recipe.
    Code(Kind),
}

/// Program that a reward runs, by its name; `None` for a reward that is computed at once.
pub(crate) fn runs(name: &str) -> Option<Runs> {
    match name.split('(').next().map(str::trim) {
        Some("math") => Some(Runs::Math),
        Some("tests") => Some(Runs::Code(Kind::Tests)),
        Some("program") => Some(Runs::Code(Kind::Program)),
        _ => None,
    }
}

/// The column of a reward that runs code.
pub(crate) fn only_column(text: &str) -> Result<String, SpecError> {
    let spec = RewardSpec::parse(text)?;
    let one = spec.positional.len() == 1 && spec.named.is_empty();
    let column = if one {
        column(&spec)
    } else {
        Err(format!(
            "allowed: one column, such as {}(answer)",
            spec.name
        ))
    };
    column.map_err(|reason| SpecError {
        spec: text.into(),
        reason,
    })
}

/// Checks the name and the arguments of a reward, without making it.
///
/// # Errors
/// Fails as [`named`] does.
pub fn check(text: &str) -> Result<(), SpecError> {
    match runs(text) {
        Some(_) => only_column(text).map(drop),
        None => named(text).map(drop),
    }
}

/// Creates a reward by name that is computed at once, such as `exact(answer)`. Patterns are compiled here;
/// those of a column are compiled for each sample, and a wrong one makes that sample unscored.
///
/// # Errors
/// [`SpecError`] for an unknown name or wrong arguments, with those that are allowed.
pub fn named(text: &str) -> Result<Arc<dyn Reward>, SpecError> {
    let spec = RewardSpec::parse(text)?;
    let rule = rule(&spec).map_err(|reason| SpecError {
        spec: text.into(),
        reason,
    })?;
    let name = spec.name;
    Ok(Arc::new(NamedReward { name, rule }))
}

/// A reward by name.
#[derive(Debug)]
struct NamedReward {
    /// Name without arguments, such as `exact`.
    name: String,
    rule: Rule,
}

/// Comparison of an output with a task. Text in a variant is the name of a task column.
#[derive(Debug)]
enum Rule {
    /// Equal text. Numbers and truth values of the task are compared as JSON writes them.
    Exact(String),
    /// The column's text stands somewhere in the output.
    Contains(String),
    /// The number of the output. `tolerance` is relative to the expected number, and absolute for expected
    /// numbers below 1. `None`: whole numbers are compared exactly.
    Number {
        column: String,
        tolerance: Option<f64>,
    },
    /// The option that the output takes. Small letters in the column count as capitals.
    Choice(String),
    /// A pattern of the recipe, found anywhere in the output.
    Pattern(Regex),
    /// A pattern of the task.
    PatternColumn(String),
    /// Tags in this order, and nothing else.
    Tags(Vec<String>),
    /// A JSON Schema of the task, an object. The draft is that of its `$schema`, else 2020-12. References to
    /// other documents are not followed.
    JsonSchema(String),
    /// Ids in square brackets against a list of ids. Repeated ids count once.
    Citations(String),
    /// Characters of the turn: 0 up to `max`, -1 from twice as many on, linear between them.
    Length { max: f64 },
    /// Minus the share of n-grams of words that stood before.
    Repetition { n: usize },
}

/// Reads the arguments of a reward.
fn rule(spec: &RewardSpec) -> Result<Rule, String> {
    let rule = match spec.name.as_str() {
        "exact" => Rule::Exact(column(spec)?),
        "contains" => Rule::Contains(column(spec)?),
        "choice" => Rule::Choice(column(spec)?),
        "json_schema" => Rule::JsonSchema(column(spec)?),
        "citations" => Rule::Citations(column(spec)?),
        "number" => Rule::Number {
            column: column(spec)?,
            tolerance: if spec.named.iter().any(|(k, _)| k == "tolerance") {
                Some(number(spec, "tolerance", None, 0.0)?)
            } else {
                None
            },
        },
        "regex" => match spec.positional.as_slice() {
            [Argument::Text(pattern)] => {
                Rule::Pattern(Regex::new(pattern).map_err(|e| e.to_string())?)
            }
            [Argument::Column(name)] => Rule::PatternColumn(name.clone()),
            _ => return Err("allowed: one pattern in quotes, or one column".into()),
        },
        "format" => Rule::Tags(tags(spec)?),
        "length" => Rule::Length {
            max: number(spec, "max", None, 1.0)?,
        },
        "repetition" => Rule::Repetition {
            n: number(spec, "n", Some(NGRAM), 1.0)? as usize,
        },
        unknown => {
            let names: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
            return Err(format!(
                "no reward is named {unknown}; allowed: {}, or \"FILE.py:FUNCTION\"",
                names.join(", ")
            ));
        }
    };
    let keys: &[&str] = match rule {
        Rule::Number { .. } => &["tolerance"],
        Rule::Length { .. } => &["max"],
        Rule::Repetition { .. } => &["n"],
        _ => &[],
    };
    let unknown = spec.named.iter().find(|(k, _)| !keys.contains(&k.as_str()));
    if let Some((key, _)) = unknown {
        return Err(format!("`{key}` is no argument of {}", spec.name));
    }
    let positional = match &rule {
        Rule::Length { .. } | Rule::Repetition { .. } => 0,
        Rule::Tags(tags) => tags.len(),
        _ => 1,
    };
    if spec.positional.len() != positional {
        let found = spec.positional.len();
        return Err(format!(
            "{found} arguments without a name; allowed: {positional}"
        ));
    }
    Ok(rule)
}

/// The names of tags, in quotes.
fn tags(spec: &RewardSpec) -> Result<Vec<String>, String> {
    let word =
        |t: &&String| !t.is_empty() && t.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
    let name = |a: &Argument| match a {
        Argument::Text(tag) => Some(tag).filter(word).cloned(),
        _ => None,
    };
    let tags: Option<Vec<String>> = spec.positional.iter().map(name).collect();
    tags.filter(|t| !t.is_empty()).ok_or_else(|| {
        "allowed: names of tags in quotes, such as format(\"think\", \"answer\")".into()
    })
}

/// The column that a reward compares with.
fn column(spec: &RewardSpec) -> Result<String, String> {
    match spec.positional.first() {
        Some(Argument::Column(name)) => Ok(name.clone()),
        Some(other) => Err(format!(
            "{other} is no column; write the name of a task column without quotes, such as {}(answer)",
            spec.name
        )),
        None => Err(format!("name a task column, such as {}(answer)", spec.name)),
    }
}

/// A number by name, at least `low`.
fn number(spec: &RewardSpec, key: &str, default: Option<f64>, low: f64) -> Result<f64, String> {
    let given = spec.named.iter().find(|(k, _)| k == key);
    match (given.map(|(_, v)| v), default) {
        (Some(Argument::Number(value)), _) if *value >= low => Ok(*value),
        (Some(other), _) => Err(format!("{key} = {other}; allowed: a number from {low} on")),
        (None, Some(default)) => Ok(default),
        (None, None) => Err(format!("set {key}, such as {}({key} = 200)", spec.name)),
    }
}

impl Rule {
    /// Score of a sample, with what was read as parts.
    ///
    /// # Errors
    /// If the task has no such column, its value cannot be compared, or the answer may be read as right and
    /// as wrong.
    fn score(&self, sample: &RewardSample) -> Result<Score, Unscored> {
        let output = sample.output.trim();
        let is = |right: bool| Score::new(f64::from(u8::from(right)));
        match self {
            Self::Exact(column) => {
                let expected = expected_text(sample, column)?;
                let inside = stated(output).filter(|s| s.mark == Mark::Tag);
                is(output == expected || inside.is_some_and(|s| s.text == expected))
            }
            Self::Contains(column) => is(output.contains(&expected_text(sample, column)?)),
            Self::Number { column, tolerance } => number_score(sample, column, *tolerance),
            Self::Choice(column) => choice_score(sample, column),
            Self::Pattern(pattern) => is(pattern.is_match(output)),
            Self::PatternColumn(column) => {
                let pattern = expected_text(sample, column)?;
                let pattern = Regex::new(&pattern).map_err(|e| Unscored::new(e.to_string()))?;
                is(pattern.is_match(output))
            }
            Self::Tags(tags) => is(is_tags(&sample.turn().whole(), tags)),
            Self::JsonSchema(column) => {
                let schema = expected(sample, column)?;
                let schema = jsonschema::validator_for(schema)
                    .map_err(|e| wrong(column, &e.to_string(), "a JSON Schema"))?;
                is(json(output).is_some_and(|v| schema.is_valid(&v)))
            }
            Self::Citations(column) => {
                f1(output, expected(sample, column)?, column).and_then(Score::new)
            }
            Self::Length { max } => {
                let over = written(sample).chars().count() as f64 / max - 1.0;
                Score::new(-over.clamp(0.0, 1.0))
            }
            Self::Repetition { n } => Score::new(-repeated(&written(sample), *n)),
        }
    }
}

/// All that the model wrote in its last turn, without the tags of its thoughts.
fn written(sample: &RewardSample) -> String {
    match sample.reasoning.as_deref().map(str::trim) {
        None | Some("") => sample.output.trim().to_owned(),
        Some(thought) => format!("{thought}\n\n{}", sample.output).trim().to_owned(),
    }
}

/// Compares the number of an output. The part `read` is that number.
fn number_score(
    sample: &RewardSample,
    column: &str,
    tolerance: Option<f64>,
) -> Result<Score, Unscored> {
    let value = expected(sample, column)?;
    let right = expected_number(value).ok_or_else(|| {
        wrong(
            column,
            &value.to_string(),
            "a number, or a text that states one",
        )
    })?;
    // Digits may be missing from a number at the place where a limit cut.
    let given = number_of(&sample.output).filter(|n| !sample.truncated || !n.at_end);
    let Some(given) = given else {
        return Score::new(0.0);
    };
    let read = given.to_f64();
    let fits = read.is_finite() && read.abs() <= MAX_REWARD;
    let parts = fits
        .then(|| ("read".to_owned(), read))
        .into_iter()
        .collect();
    match compare(&given, &right, tolerance) {
        Comparison::Right => Score::with_parts(1.0, parts),
        Comparison::Wrong => Score::with_parts(0.0, parts),
        Comparison::Unclear => Err(Unscored::new(format!(
            "could not tell: the number of the output reads as {read} and as {}",
            right.to_f64()
        ))),
    }
}

/// Compares the option of an output. The part `read` is its letter as a number, 1 for A.
fn choice_score(sample: &RewardSample, column: &str) -> Result<Score, Unscored> {
    let expected = expected_text(sample, column)?;
    let right = option(&expected).ok_or_else(|| wrong(column, &expected, "one letter"))?;
    let given = choice(&sample.output);
    match given.letter {
        Some(letter) => {
            let read = u32::from(letter).wrapping_sub(u32::from('A')) + 1;
            let value = f64::from(u8::from(letter == right));
            Score::with_parts(value, [("read".to_owned(), f64::from(read))].into())
        }
        None if given.maybe.contains(&right) => {
            let all: Vec<String> = given.maybe.iter().map(char::to_string).collect();
            Err(Unscored::new(format!(
                "could not tell: the output names the options {} and takes none",
                all.join(", ")
            )))
        }
        None => Score::new(0.0),
    }
}

/// Harmonic mean of precision and recall of the cited ids. 0 if nothing is cited, or only others.
fn f1(output: &str, expected: &Value, column: &str) -> Result<f64, Unscored> {
    let list = expected.as_array();
    let ids = list.and_then(|l| l.iter().map(plain).collect::<Option<Vec<_>>>());
    let Some(ids) = ids.filter(|l| !l.is_empty()) else {
        return Err(wrong(column, &expected.to_string(), "a list of ids"));
    };
    let unique = |list: Vec<String>| list.into_iter().collect::<std::collections::BTreeSet<_>>();
    let (cited, ids) = (unique(citations(output)), unique(ids));
    let right = cited.intersection(&ids).count() as f64;
    Ok(2.0 * right / (cited.len() + ids.len()) as f64)
}

/// The value of a task column.
pub(crate) fn expected<'a>(sample: &'a RewardSample, column: &str) -> Result<&'a Value, Unscored> {
    let data = &sample.task.data;
    data.get(column).filter(|v| !v.is_null()).ok_or_else(|| {
        let names = data
            .as_object()
            .map(|o| o.keys().cloned().collect::<Vec<_>>());
        let names = names.unwrap_or_default().join(", ");
        Unscored::new(format!("the task has no column {column}; columns: {names}"))
    })
}

/// A value as text to compare: text itself, numbers and truth values as JSON writes them.
fn plain(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.trim().to_owned()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

pub(crate) fn expected_text(sample: &RewardSample, column: &str) -> Result<String, Unscored> {
    let value = expected(sample, column)?;
    let text = plain(value).filter(|text| !text.is_empty());
    text.ok_or_else(|| wrong(column, &value.to_string(), "text or a number"))
}

fn wrong(column: &str, value: &str, allowed: &str) -> Unscored {
    Unscored::new(format!("column {column} is {value}; allowed: {allowed}"))
}

impl Reward for NamedReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn is_penalty(&self) -> bool {
        matches!(self.rule, Rule::Length { .. } | Rule::Repetition { .. })
    }

    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        futures::future::ready(self.rule.score(sample)).boxed()
    }
}
