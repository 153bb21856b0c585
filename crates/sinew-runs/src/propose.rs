//! `sinew init --from FILE`: proposes a recipe for existing rows, from their columns.
//!
//! The proposal is a start that people read and change. It contains only facts that the rows show, and rows
//! without an answer to compare with are refused.

use serde_json::{Map, Value};
use sinew_tasks::Row;
use std::collections::BTreeSet;
use std::path::Path;

/// Names of columns that hold what the model is asked, the likeliest first.
const QUESTIONS: [&str; 12] = [
    "prompt",
    "question",
    "problem",
    "instruction",
    "query",
    "messages",
    "input",
    "task",
    "text",
    "sentence",
    "title",
    "document",
];
/// Names of columns that hold what it is to answer.
const ANSWERS: [&str; 13] = [
    "answer",
    "final_answer",
    "solution",
    "target",
    "label",
    "expected",
    "gold",
    "output",
    "response",
    "completion",
    "result",
    "category",
    "class",
];
/// Names of further columns that may show the way to an answer.
const WAYS: [&str; 5] = ["rationale", "reasoning", "explanation", "cot", "steps"];
/// Rows that are examined.
const LOOKED_AT: usize = 1000;
/// Maximum distinct answers of a classification, and maximum characters of an answer to repeat exactly.
const CLASSES: usize = 12;
const SHORT: usize = 80;

/// Reason why nothing can be proposed.
#[derive(Debug, thiserror::Error)]
pub enum ProposeError {
    /// The rows cannot be read.
    #[error(transparent)]
    Rows(#[from] sinew_tasks::TasksError),
    /// There are too few for a held-out split.
    #[error("{path}: {rows} rows; a run needs at least {LEAST}: some are held out")]
    Few { path: String, rows: usize },
    /// No column looks like one that is needed.
    #[error(
        "{path}: no column looks like {what} (looked for: {looked_for}); columns: {columns}\n  hint: rename one, or \
         start with `sinew init NAME` and write the prompt and the reward yourself"
    )]
    Column {
        path: String,
        what: &'static str,
        looked_for: String,
        columns: String,
    },
}

/// Rows of which a quarter is held out and a step draws six.
const LEAST: usize = 12;

/// A recipe's part for rows of a user's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// The prompt template; `None`: the column `prompt` is used unchanged.
    pub prompt: Option<String>,
    /// The reward by name, such as `number(answer)`.
    pub reward: String,
    /// Text of `score.py`, if the reward is a Python function.
    pub code: Option<String>,
    /// The reason, for users.
    pub because: String,
    /// Rows that there are.
    pub rows: usize,
    /// Column with the question.
    pub question: String,
    /// Column with the answer.
    pub answer: String,
    /// Bytes of the longest question, with its options, and of the longest answer, among the rows that were
    /// examined.
    pub longest: (usize, usize),
}

impl Proposal {
    /// Name of the reward without its column; that of a function for answers that end with `#### NUMBER`.
    pub fn reward_kind(&self) -> &str {
        self.reward.split('(').next().unwrap_or_default()
    }
}

/// The texts of a row that hold an answer, or the way to one, by the names of their columns.
pub fn answers_of(row: &Map<String, Value>) -> impl Iterator<Item = &str> {
    let holds = |name: &str| {
        let mut names = ANSWERS.iter().chain(&WAYS);
        names.any(|known| name.eq_ignore_ascii_case(known))
    };
    row.iter()
        .filter_map(move |(name, value)| value.as_str().filter(|_| holds(name)))
}

/// Proposes prompt and reward for the rows of a file or folder.
///
/// # Errors
/// If the rows cannot be read, are too few, or have no column that looks like a question or an answer.
pub fn propose(path: &Path) -> Result<Proposal, ProposeError> {
    let rows = sinew_tasks::read_rows(path)?;
    let shown = || path.display().to_string();
    if rows.len() < LEAST {
        let rows = rows.len();
        return Err(ProposeError::Few {
            path: shown(),
            rows,
        });
    }
    let looked = &rows[..rows.len().min(LOOKED_AT)];
    let find = |names: &[&str], what: &'static str, taken: Option<&str>| {
        column(looked, names, taken).ok_or_else(|| ProposeError::Column {
            path: shown(),
            what,
            looked_for: names.join(", "),
            columns: columns(looked).into_iter().collect::<Vec<_>>().join(", "),
        })
    };
    let question = find(&QUESTIONS, "a question", None)?;
    let answer = find(&ANSWERS, "an answer", Some(&question))?;
    let (kind, because) = reward(looked, &answer);
    let code = match kind {
        Kind::Named(_) => None,
        Kind::Code(code) => Some(code.replace("{answer}", &answer)),
    };
    let length = |r: &Row| {
        let parts = [question.as_str(), "choices", "options"].into_iter();
        parts
            .filter_map(|c| r.columns.get(c))
            .map(|v| text(v).len())
            .sum()
    };
    let answered = |r: &Row| answers_of(&r.columns).map(str::len).max().unwrap_or(0);
    let longest = (
        looked.iter().map(length).max().unwrap_or(0),
        looked.iter().map(answered).max().unwrap_or(0),
    );
    let template = format!("{{{{ {question} }}}}{}", options(looked));
    Ok(Proposal {
        prompt: (template != "{{ prompt }}").then_some(template),
        code,
        reward: match kind {
            Kind::Named(name) => format!("{name}({answer})"),
            Kind::Code(_) => "score.py:score".to_owned(),
        },
        because: format!("`{question}` is asked; {because}"),
        rows: rows.len(),
        question,
        answer,
        longest,
    })
}

/// The first of `names` that every row has and that is not `taken`, in any case of letters.
fn column(rows: &[Row], names: &[&str], taken: Option<&str>) -> Option<String> {
    let all = columns(rows);
    let everywhere = |c: &&String| {
        rows.iter()
            .all(|r| r.columns.get(*c).is_some_and(|v| !v.is_null()))
    };
    let named = |name: &&str| {
        let mut same = all.iter().filter(|c| c.eq_ignore_ascii_case(name));
        same.find(|c| Some(c.as_str()) != taken && everywhere(c))
            .cloned()
    };
    // A template names columns as they are: one with a space in it cannot be named.
    let plain = |c: &String| c.chars().all(|x| x.is_ascii_alphanumeric() || x == '_');
    names.iter().filter_map(named).find(plain)
}

fn columns(rows: &[Row]) -> BTreeSet<String> {
    rows.iter()
        .flat_map(|r| r.columns.keys().cloned())
        .collect()
}

/// Lines with the options of a question, where every row has them as a list under a usual name.
fn options(rows: &[Row]) -> String {
    let listed = ["choices", "options"].into_iter().find(|name| {
        rows.iter()
            .all(|r| r.columns.get(*name).is_some_and(Value::is_array))
    });
    listed.map_or_else(String::new, |name| {
        format!("\n{{% for option in {name} %}}{{{{ \"ABCDEFGHIJ\"[loop.index0] }}}}) {{{{ option }}}}\n{{% endfor %}}")
    })
}

/// A reward before its column is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One by name.
    Named(&'static str),
    /// A function in Python, which is written to `score.py`.
    Code(&'static str),
}

/// Shared words: nobody repeats a long text to the letter.
const OVERLAP: Kind = Kind::Code(include_str!("../templates/overlap.py"));

/// The reward for the values of a column, and why.
fn reward(rows: &[Row], answer: &str) -> (Kind, String) {
    let texts: Vec<String> = rows
        .iter()
        .filter_map(|r| r.columns.get(answer))
        .map(text)
        .collect();
    let all = |holds: fn(&str) -> bool| texts.iter().all(|t| holds(t.trim()));
    let distinct: BTreeSet<&str> = texts.iter().map(|t| t.trim()).collect();
    // Nobody repeats an answer of several lines to the letter.
    let is_long = |t: &&String| t.len() > SHORT || t.trim().contains('\n');
    let long = texts.iter().filter(is_long).count();
    let (kind, because) = if all(|t| !t.contains("\\boxed{") && states_number(t)) {
        (
            Kind::Named("number"),
            format!("`{answer}` states a number, compared with the one that the output states"),
        )
    } else if all(|t| t.contains("\\boxed{")) {
        (
            Kind::Named("math"),
            format!(
                "`{answer}` has its result in `\\boxed{{}}`, compared as mathematics (needs the package math-verify)"
            ),
        )
    } else if all(|t| t.len() == 1 && t.chars().all(|c| c.is_ascii_uppercase())) {
        (
            Kind::Named("choice"),
            format!("`{answer}` is the letter of an option"),
        )
    } else if distinct.len() <= CLASSES && long == 0 {
        (
            Kind::Named("contains"),
            format!(
                "`{answer}` is one of {} values, which the output must have",
                distinct.len()
            ),
        )
    } else if long * 2 > texts.len() {
        (
            OVERLAP,
            format!(
                "`{answer}` is long, so the words that the output shares with it count; a judge or a function of \
                 yours may fit better"
            ),
        )
    } else {
        (
            Kind::Named("exact"),
            format!("the output must be `{answer}`"),
        )
    };
    (kind, because)
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Whether a value is a number, or a worked answer that states one, as after `####`.
fn states_number(text: &str) -> bool {
    sinew_answer::expected_number(&Value::from(text)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposed(rows: &[&str]) -> Result<Proposal, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.jsonl");
        let rows: Vec<&str> = rows.iter().copied().cycle().take(LEAST).collect();
        std::fs::write(&path, rows.join("\n")).unwrap();
        propose(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn columns_and_values_choose_prompt_and_reward() {
        for (rows, prompt, reward) in [
            (
                &[r#"{"question": "1 + 1", "answer": 2}"#] as &[&str],
                "{{ question }}",
                "number(answer)",
            ),
            (
                &[r#"{"Question": "q", "Answer": "1,234.5"}"#],
                "{{ Question }}",
                "number(Answer)",
            ),
            (
                &[r##"{"question": "q", "answer": "1 + 1 = 2\n#### 2"}"##],
                "{{ question }}",
                "number(answer)",
            ),
            (
                &[r#"{"question": "q", "answer": "Twice 21. The answer is 42."}"#],
                "{{ question }}",
                "number(answer)",
            ),
            (
                &[
                    r#"{"question": "q", "answer": "Let x be 2.\nThen y is x."}"#,
                    r#"{"question": "q", "answer": "Let x be 3.\nThen y is x."}"#,
                ],
                "{{ question }}",
                "score.py:score",
            ),
            (
                &[r#"{"prompt": "p", "label": "B", "id": 3}"#],
                "",
                "choice(label)",
            ),
            (
                &[
                    r#"{"text": "t", "label": "good"}"#,
                    r#"{"text": "u", "label": "bad"}"#,
                ],
                "{{ text }}",
                "contains(label)",
            ),
            (
                &[r#"{"instruction": "i", "input": "x", "output": "o"}"#],
                "{{ instruction }}",
                "contains(output)",
            ),
        ] {
            let found = proposed(rows).unwrap();
            assert_eq!(found.reward, reward, "{found:?}");
            assert_eq!(found.prompt.unwrap_or_default(), prompt, "{rows:?}");
        }
        let long = format!(r#"{{"question": "q", "answer": "{}"}}"#, "word ".repeat(30));
        let found = proposed(&[&long]).unwrap();
        assert_eq!(found.reward, "score.py:score");
        assert!(
            found.code.unwrap().contains("F1 of the words"),
            "not repeated to the letter"
        );
        let boxed = r#"{"problem": "q", "solution": "so it is \\boxed{2}"}"#;
        assert_eq!(proposed(&[boxed]).unwrap().reward, "math(solution)");
        let options = r#"{"question": "q", "choices": ["x", "y"], "answer": "A"}"#;
        let found = proposed(&[options]).unwrap();
        assert!(
            found.prompt.unwrap().contains("for option in choices")
                && found.reward == "choice(answer)"
        );
    }

    #[test]
    fn rows_without_a_question_or_an_answer_are_refused_with_their_columns() {
        for (row, needle) in [
            (r#"{"a": 1, "b": 2}"#, "looks like a question"),
            (r#"{"question": "q", "hint": 2}"#, "columns: hint, question"),
            (
                r#"{"question": "q", "answer": null}"#,
                "looks like an answer",
            ),
            (
                r#"{"question": "q", "the answer": 1}"#,
                "looks like an answer",
            ),
        ] {
            let refused = proposed(&[row]).unwrap_err();
            assert!(refused.contains(needle), "{refused}");
        }
        let missing = propose(Path::new("no/such.jsonl")).unwrap_err().to_string();
        assert!(missing.contains("no/such.jsonl"), "{missing}");
    }
}
