//! Rubric of a judge: items with weights.

use serde::{Deserialize, Serialize};

/// One thing that a judge decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// A statement about the answer, such as `Cites a source`.
    pub text: String,
    /// Share of the score, above 0, relative to the weights of the other items.
    pub weight: f64,
}

/// One to [`Rubric::MAX_ITEMS`] items.
#[derive(Clone, Debug, PartialEq)]
pub struct Rubric {
    items: Vec<Item>,
}

/// Reason why something is not a rubric.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RubricError {
    /// The rubric has no items.
    #[error(
        "the rubric has no items; write what a good answer does, such as \"Answers the question\""
    )]
    Empty,
    /// More than a model decides reliably in one answer.
    #[error("the rubric has {0} items; allowed: up to 32")]
    TooMany(usize),
    /// An item is empty or too long.
    #[error("item {0} of the rubric has {1} characters; allowed: 1 to 2000")]
    Text(usize, usize),
    /// A weight that cannot be one.
    #[error("item {0} of the rubric has the weight {1}; allowed: a finite number above 0")]
    Weight(usize, f64),
}

impl Rubric {
    /// Maximum number of items.
    pub const MAX_ITEMS: usize = 32;
    /// Maximum number of characters of an item.
    pub const MAX_CHARS: usize = 2000;

    /// Checks items.
    ///
    /// # Errors
    /// The first item that is none, or their number.
    pub fn new(items: Vec<Item>) -> Result<Self, RubricError> {
        if items.is_empty() {
            return Err(RubricError::Empty);
        }
        if items.len() > Self::MAX_ITEMS {
            return Err(RubricError::TooMany(items.len()));
        }
        for (i, item) in items.iter().enumerate() {
            let chars = item.text.trim().chars().count();
            if chars == 0 || chars > Self::MAX_CHARS {
                return Err(RubricError::Text(i + 1, chars));
            }
            if !(item.weight.is_finite() && item.weight > 0.0) {
                return Err(RubricError::Weight(i + 1, item.weight));
            }
        }
        Ok(Self { items })
    }

    /// Reads a Markdown list: each line that begins with `- ` or `* ` is an item, of weight 1 unless it ends
    /// with such as `(weight 2)`. Other lines are for users.
    ///
    /// # Errors
    /// Fails as [`Rubric::new`] does.
    pub fn from_markdown(text: &str) -> Result<Self, RubricError> {
        let bullet = |line: &str| {
            let line = line.trim_start();
            let item = line.strip_prefix("- ").or(line.strip_prefix("* "))?.trim();
            let weighted = item
                .strip_suffix(')')
                .and_then(|item| item.rsplit_once("(weight "))
                .and_then(|(text, weight)| Some((text.trim(), weight.trim().parse().ok()?)));
            let (text, weight) = weighted.unwrap_or((item, 1.0));
            Some(Item {
                text: text.to_owned(),
                weight,
            })
        };
        Self::new(text.lines().filter_map(bullet).collect())
    }

    /// The items, in order.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Weighted mean of one value for each item.
    pub fn mean(&self, values: &[f64]) -> f64 {
        let weights: f64 = self.items.iter().map(|i| i.weight).sum();
        let pairs = self.items.iter().zip(values);
        pairs
            .map(|(item, value)| item.weight / weights * value)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(text: &str, weight: f64) -> Item {
        Item {
            text: text.to_owned(),
            weight,
        }
    }

    #[test]
    fn lists_are_read_with_their_weights() {
        let text = "# What is good\n\nSome words.\n- Answers the question\n* Cites a source (weight 2)\n  - (weight x)\n";
        let rubric = Rubric::from_markdown(text).unwrap();
        let expected = [
            item("Answers the question", 1.0),
            item("Cites a source", 2.0),
            item("(weight x)", 1.0),
        ];
        assert_eq!(rubric.items(), expected);
        assert_eq!(rubric.mean(&[1.0, 0.5, 0.0]), 0.5);
    }

    #[test]
    fn what_cannot_be_judged_is_refused() {
        let new = |items: &[Item]| Rubric::new(items.to_vec()).unwrap_err().to_string();
        assert!(new(&[]).contains("no items"));
        assert!(new(&[item("a", 1.0), item("  ", 1.0)]).contains("item 2"));
        assert!(new(&[item("a", 0.0)]).contains("weight 0"));
        assert!(new(&[item("a", f64::NAN)]).contains("NaN"));
        assert!(new(&vec![item("a", 1.0); 33]).contains("33 items"));
        assert!(new(&[item(&"a".repeat(2001), 1.0)]).contains("2001"));
        assert_eq!(Rubric::from_markdown("no list"), Err(RubricError::Empty));
    }
}
