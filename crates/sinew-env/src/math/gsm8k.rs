//! Grade-school word problems (GSM8K, MIT licence, see `data/README.md`).

use super::answer::parse_number;
use crate::taskset::{Split, Taskset, TasksetError};
use serde::Deserialize;
use sinew_types::{Task, TaskId};

/// JSON lines with 200 rows of the data set.
const SHIPPED: &str = include_str!("../../../../data/gsm8k-200.jsonl");

/// One of this many rows is held out.
const HELD_OUT_EVERY: usize = 4;

/// A line of the data set.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    question: String,
    answer: String,
}

/// Taskset of questions with worked answers.
#[derive(Clone, Debug)]
pub struct Gsm8k {
    /// Three of four rows.
    train: Vec<Task>,
    /// Every fourth row.
    held_out: Vec<Task>,
}

impl Gsm8k {
    /// Returns the 200 rows that ship with the program: 150 for training, 50 held out.
    pub fn shipped() -> Result<Self, TasksetError> {
        Self::parse(SHIPPED)
    }

    /// Parses JSON lines with `question` and `answer`, whose last line is `#### NUMBER`. Every fourth row is
    /// held out.
    ///
    /// # Errors
    /// [`TasksetError::Row`] for an invalid row, a repeated question, or fewer than four rows.
    pub fn parse(jsonl: &str) -> Result<Self, TasksetError> {
        let mut tasks = Self {
            train: Vec::new(),
            held_out: Vec::new(),
        };
        let mut seen = std::collections::BTreeMap::new();
        let rows = jsonl
            .lines()
            .enumerate()
            .filter(|(_, l)| !l.trim().is_empty());
        for (count, (at, line)) in rows.enumerate() {
            let split = if count % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 {
                Split::HeldOut
            } else {
                Split::Train
            };
            let task = task(at + 1, line, count, split)?;
            if let Some(earlier) = seen.insert(task.prompt.clone(), at + 1) {
                return Err(row_error(
                    at + 1,
                    format!("repeats the question of line {earlier}"),
                ));
            }
            match split {
                Split::Train => tasks.train.push(task),
                Split::HeldOut => tasks.held_out.push(task),
            }
        }
        if tasks.held_out.is_empty() {
            return Err(row_error(
                0,
                "fewer than 4 rows: no split can be made".into(),
            ));
        }
        Ok(tasks)
    }

    /// Tasks of a split.
    fn split(&self, split: Split) -> &[Task] {
        match split {
            Split::Train => &self.train,
            Split::HeldOut => &self.held_out,
        }
    }
}

/// Error for a line, counted from 1.
fn row_error(line: usize, message: String) -> TasksetError {
    TasksetError::Row {
        taskset: "gsm8k".into(),
        line,
        message,
    }
}

/// Parses a line. `count` is the index of the row in the data set.
fn task(line: usize, text: &str, count: usize, split: Split) -> Result<Task, TasksetError> {
    let row: Row = serde_json::from_str(text).map_err(|e| row_error(line, e.to_string()))?;
    let answer = row
        .answer
        .rsplit_once("####")
        .and_then(|(_, number)| parse_number(number))
        .ok_or_else(|| row_error(line, "the answer does not end with `#### NUMBER`".into()))?;
    Ok(Task {
        id: TaskId::new(format!("gsm8k/{}/{count}", split.as_str())),
        kind: "gsm8k".into(),
        preamble: Vec::new(),
        prompt: row.question,
        // The gold policy computes the answer from `solution`. Here it is the number itself.
        data: serde_json::json!({ "answer": answer, "solution": answer.to_string() }),
        seed: count as u64,
    })
}

impl Taskset for Gsm8k {
    fn name(&self) -> &str {
        "gsm8k"
    }

    fn len(&self, split: Split) -> usize {
        self.split(split).len()
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let tasks = self.split(split);
        tasks.get(index).cloned().ok_or(TasksetError::Index {
            taskset: self.name().to_owned(),
            split,
            index,
            len: tasks.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_rows_are_split_150_to_50() {
        let tasks = Gsm8k::shipped().unwrap();
        assert_eq!(
            (tasks.len(Split::Train), tasks.len(Split::HeldOut)),
            (150, 50)
        );
        let first = tasks.get(Split::Train, 0).unwrap();
        assert!(first.prompt.starts_with("Natalia sold clips"));
        assert_eq!(first.data["answer"], 72.0);
    }

    #[test]
    fn errors_name_the_line() {
        let row = |n: usize, a: &str| format!("{{\"question\":\"q{n}\",\"answer\":\"{a}\"}}\n");
        let good: String = (0..4).map(|n| row(n, "#### 1,000")).collect();
        assert_eq!(Gsm8k::parse(&good).unwrap().len(Split::Train), 3);
        let error = |text: String| Gsm8k::parse(&text).unwrap_err().to_string();
        assert!(error(good.clone() + &row(9, "no number")).contains("line 5"));
        assert!(error(good.clone() + &row(2, "#### 1")).contains("line 3"));
        assert!(error(good + "{}").contains("question"));
        assert!(error(row(1, "#### 1")).contains("fewer than 4 rows"));
    }
}
