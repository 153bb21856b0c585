//! Masks for a list of fixed texts. A token is allowed if a text continues with its bytes.

use crate::{GrammarError, Grammars, Mask, Matcher, Vocabulary};
use sinew_types::{Format, Grammar, TokenId};
use std::sync::Arc;

/// Recorded in traces. Changes with the meaning of the masks.
const IMPLEMENTATION: &str = "sinew list 1";

/// Compiler for [`Grammar::Choice`] only. Every other format is an error. Any tokenization of a text is
/// allowed.
#[derive(Debug)]
pub struct ListGrammars {
    table: Arc<Table>,
    environment: String,
}

#[derive(Debug)]
/// Vocabulary data shared by all matchers.
struct Table {
    /// Bytes by token id. `None` for control tokens and unused ids.
    tokens: Vec<Option<Box<[u8]>>>,
    end: TokenId,
    columns: usize,
}

impl ListGrammars {
    /// Creates a compiler for `vocabulary`. Control tokens never match text.
    ///
    /// # Errors
    /// Returns an error if there are more tokens than columns, or the end token has no bytes.
    pub fn new(mut vocabulary: Vocabulary) -> Result<Self, GrammarError> {
        vocabulary.validate()?;
        let environment = vocabulary.hash(IMPLEMENTATION);
        let ends = std::iter::once(vocabulary.end);
        for id in vocabulary.special.iter().copied().chain(ends) {
            if let Some(token) = vocabulary.tokens.get_mut(id as usize) {
                *token = None;
            }
        }
        Ok(Self {
            table: Arc::new(Table {
                tokens: vocabulary.tokens,
                end: vocabulary.end,
                columns: vocabulary.columns,
            }),
            environment,
        })
    }
}

impl Grammars for ListGrammars {
    fn implementation(&self) -> &str {
        IMPLEMENTATION
    }

    fn environment(&self) -> &str {
        &self.environment
    }

    fn columns(&self) -> usize {
        self.table.columns
    }

    fn check(&self, format: &Arc<Format>, tokens: &[TokenId]) -> Result<(), GrammarError> {
        let mut matcher = self.start(format)?;
        tokens
            .iter()
            .try_for_each(|&token| matcher.advance(token))?;
        let position = tokens.len();
        if matcher.ended() || matcher.mask()?.allows(self.table.end) {
            Ok(())
        } else {
            Err(GrammarError::Incomplete { position })
        }
    }

    fn start(&self, format: &Arc<Format>) -> Result<Box<dyn Matcher>, GrammarError> {
        format.validate()?;
        if !matches!(format.grammar, Grammar::Choice { .. }) {
            let kind = format.grammar.name();
            return Err(GrammarError::Unsupported { kind });
        }
        Ok(Box::new(ListMatcher {
            table: Arc::clone(&self.table),
            format: Arc::clone(format),
            output: Vec::new(),
            tokens: 0,
            ended: false,
        }))
    }
}

#[derive(Clone, Debug)]
/// Matcher of one output.
struct ListMatcher {
    table: Arc<Table>,
    format: Arc<Format>,
    /// Bytes of the output so far.
    output: Vec<u8>,
    /// Number of tokens so far.
    tokens: usize,
    ended: bool,
}

impl ListMatcher {
    /// The rest of each text that starts with the output so far.
    fn rests(&self) -> impl Iterator<Item = &[u8]> {
        let texts = match &self.format.grammar {
            Grammar::Choice { texts } => &texts[..],
            _ => &[],
        };
        texts
            .iter()
            .filter_map(|t| t.as_bytes().strip_prefix(&self.output[..]))
    }
}

impl Matcher for ListMatcher {
    fn mask(&mut self) -> Result<Arc<Mask>, GrammarError> {
        let position = self.tokens;
        if self.ended {
            return Err(GrammarError::Ended { position });
        }
        let rests: Vec<&[u8]> = self.rests().collect();
        let continues = |token: &Option<Box<[u8]>>| {
            let bytes = token.as_deref().filter(|b| !b.is_empty());
            bytes.is_some_and(|b| rests.iter().any(|r| r.starts_with(b)))
        };
        let tokens = self.table.tokens.iter().zip(0..);
        let texts = tokens.filter(|(t, _)| continues(t)).map(|(_, id)| id);
        let end = rests.iter().any(|r| r.is_empty()).then_some(self.table.end);
        let mask = Mask::of(texts.chain(end), self.table.columns);
        match mask.allowed() {
            0 => Err(GrammarError::DeadEnd { position }),
            _ => Ok(Arc::new(mask)),
        }
    }

    fn advance(&mut self, token: TokenId) -> Result<(), GrammarError> {
        let position = self.tokens;
        if !self.mask()?.allows(token) {
            return Err(GrammarError::Barred { token, position });
        }
        self.tokens += 1;
        if token == self.table.end {
            self.ended = true;
        } else if let Some(Some(bytes)) = self.table.tokens.get(token as usize) {
            self.output.extend_from_slice(bytes);
        }
        Ok(())
    }

    fn ended(&self) -> bool {
        self.ended
    }

    fn fork(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}
