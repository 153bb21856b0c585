//! Rewards as a recipe writes them: `name`, `name(column)`, `name("text", key = 1.5)`.
//!
//! The notation is that of a call with constant arguments. Arguments without a name come first. Spaces
//! between the parts have no meaning. A message of an error names the column of the first character that
//! does not fit.

use sinew_types::is_reward;
use std::fmt;

/// A reward by name with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardSpec {
    /// Name of the reward.
    pub name: String,
    /// Arguments without a name, in order.
    pub positional: Vec<Argument>,
    /// Arguments with a name, in order.
    pub named: Vec<(String, Argument)>,
}

/// Value of an argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// A word without quotes: the name of a task column.
    Column(String),
    /// Text in quotes; `\"` and `\\` are escapes.
    Text(String),
    /// A number.
    Number(f64),
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Column(name) => f.write_str(name),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Number(number) => write!(f, "{number}"),
        }
    }
}

/// Reason why a reward is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{spec:?}: {reason}")]
pub struct SpecError {
    /// The reward as written.
    pub spec: String,
    /// Fault of the text, and the allowed forms.
    pub reason: String,
}

impl RewardSpec {
    /// Parses a reward.
    ///
    /// # Errors
    /// [`SpecError`] with the place of the first character that does not fit.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        Parser { text, at: 0 }.spec()
    }
}

/// A reader of one reward, from left to right without going back.
struct Parser<'a> {
    text: &'a str,
    /// Bytes read.
    at: usize,
}

impl Parser<'_> {
    fn spec(&mut self) -> Result<RewardSpec, SpecError> {
        let name = self.word().ok_or_else(|| self.expected("a name"))?;
        let mut spec = RewardSpec {
            name,
            positional: Vec::new(),
            named: Vec::new(),
        };
        if self.takes('(') && !self.takes(')') {
            loop {
                self.argument(&mut spec)?;
                if self.takes(')') {
                    break;
                }
                if !self.takes(',') {
                    return Err(self.expected("`,` or `)`"));
                }
            }
        }
        self.skip();
        if self.rest().is_empty() {
            Ok(spec)
        } else {
            Err(self.expected("the end"))
        }
    }

    /// One argument, with or without a name. A name is given once.
    fn argument(&mut self, spec: &mut RewardSpec) -> Result<(), SpecError> {
        let value = self.value()?;
        if !self.takes('=') {
            if !spec.named.is_empty() {
                return Err(self.expected("arguments without a name before those with one"));
            }
            spec.positional.push(value);
            return Ok(());
        }
        let Argument::Column(key) = value else {
            return Err(self.wrong(format!("{value} before `=` is no name")));
        };
        if spec.named.iter().any(|(k, _)| *k == key) {
            return Err(self.wrong(format!("`{key}` is given twice")));
        }
        let value = self.value()?;
        spec.named.push((key, value));
        Ok(())
    }

    /// A number, text in quotes, or a column.
    fn value(&mut self) -> Result<Argument, SpecError> {
        self.skip();
        if self.rest().starts_with(['"', '\'']) {
            return self.quoted();
        }
        let len =
            |keep: fn(char) -> bool, rest: &str| rest.find(|c| !keep(c)).unwrap_or(rest.len());
        let number = len(
            |c| c.is_ascii_alphanumeric() || "+-._".contains(c),
            self.rest(),
        );
        let text = &self.rest()[..number];
        if text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c)) {
            let value: f64 = text.parse().map_err(|_| self.expected("a number"))?;
            if !is_reward(value) {
                return Err(self.expected("a finite number up to 1e30"));
            }
            self.at += number;
            return Ok(Argument::Number(value));
        }
        let word = self.word();
        word.map(Argument::Column)
            .ok_or_else(|| self.expected("a column, a number or text in quotes"))
    }

    /// Text in double or single quotes.
    fn quoted(&mut self) -> Result<Argument, SpecError> {
        let mut chars = self.rest().char_indices();
        let quote = chars.next().map_or('"', |(_, c)| c);
        let (mut text, mut escaped) = (String::new(), false);
        for (i, c) in chars {
            match c {
                _ if escaped => {
                    // A backslash before another character stays: patterns are full of them.
                    if c != quote && c != '\\' {
                        text.push('\\');
                    }
                    text.push(c);
                    escaped = false;
                }
                '\\' => escaped = true,
                _ if c == quote => {
                    self.at += i + c.len_utf8();
                    return Ok(Argument::Text(text));
                }
                _ => text.push(c),
            }
        }
        Err(self.wrong(format!("the text that starts with {quote} has no end")))
    }

    /// A word of letters, digits and `_` that starts with no digit.
    fn word(&mut self) -> Option<String> {
        self.skip();
        let rest = self.rest();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
        let word = &rest[..end.unwrap_or(rest.len())];
        if word.is_empty() || word.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
        let word = word.to_owned();
        self.at += word.len();
        Some(word)
    }

    /// Reads `c` if it is next, after spaces.
    fn takes(&mut self, c: char) -> bool {
        self.skip();
        let found = self.rest().starts_with(c);
        if found {
            self.at += c.len_utf8();
        }
        found
    }

    fn skip(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn expected(&self, what: &str) -> SpecError {
        let column = self.text[..self.at].chars().count() + 1;
        self.wrong(format!("column {column}: expected {what}"))
    }

    fn wrong(&self, reason: String) -> SpecError {
        SpecError {
            spec: self.text.into(),
            reason,
        }
    }
}
