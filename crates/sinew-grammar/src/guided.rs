//! Masks for every format, compiled by `llguidance`.
//!
//! Forced text has one tokenization, that of the model's tokenizer (the "canonical" flag of `llguidance`):
//! the mask allows a single token there. The policy is the softmax over the tokens of the mask.

use crate::bounds;
use crate::cache::Cache;
use crate::lark;
use crate::{CompileError, Encode, GrammarError, Grammars, Mask, Matcher, Vocabulary, format_hash};
use llguidance::ParserFactory;
use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::toktrie::{
    InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenizerEnv,
};
use sinew_types::{Format, TokenId};
use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Versions of the mask implementation, as pinned in `Cargo.lock`. A trace of another version is not
/// replayed, because releases have changed the masks.
pub const IMPLEMENTATION: &str = "llguidance 1.9.1, toktrie 1.9.1, derivre 0.3.13";

/// Maximum number of lexer states for one output. A state takes 1 to 2 kB.
const MAX_LEXER_STATES: usize = 50_000;

/// Settings that affect masks, in addition to [`Vocabulary`]. They are part of the environment hash.
const SETTINGS: &str = "sinew guided 1, canonical, lexer states 50000, items in row 2000, \
                        step fuel 200000, step items 50000";

/// Compiler that uses `llguidance` and caches the most recently used formats.
///
/// The first format builds the vocabulary tables: a few tenths of a second, and about 35 MB for 50,000
/// tokens. Construction itself is cheap.
pub struct GuidedGrammars {
    vocabulary: Vocabulary,
    built: OnceLock<Result<Built, GrammarError>>,
    shared: Arc<Shared>,
    environment: String,
    cache: Mutex<Cache<Compiled>>,
}

/// Tables derived from the vocabulary.
struct Built {
    factory: ParserFactory,
    /// Text and id of each control token.
    specials: Vec<(String, TokenId)>,
}

/// Vocabulary data shared by all matchers.
#[derive(Debug)]
struct Shared {
    /// Id of the end token.
    end: TokenId,
    /// Columns of a mask.
    columns: usize,
}

/// Compiled format, positioned before the first token.
#[derive(Clone)]
pub(crate) struct Compiled(Arc<Mutex<llguidance::Matcher>>);

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compiled")
    }
}

sinew_types::debug_fields!(GuidedGrammars, environment);

/// The vocabulary in the form that `toktrie` reads.
struct Env {
    trie: TokTrie,
    encode: Encode,
    special: HashSet<TokenId>,
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Tokenizes forced text with the model's tokenizer. If its tokens do not decode to the same bytes (text
    /// that spells a control token, or a tokenizer that adds spaces), uses the longest match from the left.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let canonical = |text: &str| {
            let tokens = (self.encode)(text);
            let plain = tokens.iter().all(|t| !self.special.contains(t));
            if plain && self.trie.decode_raw(&tokens) == text.as_bytes() {
                tokens
            } else {
                self.trie.greedy_tokenize(text.as_bytes())
            }
        };
        self.trie.tokenize_with_greedy_fallback(bytes, canonical)
    }
}

fn vocabulary(why: impl fmt::Display) -> GrammarError {
    GrammarError::Vocabulary(why.to_string())
}

impl Built {
    /// Builds the token trie and the parser factory.
    fn new(v: &Vocabulary) -> Result<Self, GrammarError> {
        let mut special: HashSet<TokenId> = v.special.iter().copied().collect();
        special.insert(v.end);
        let mut specials = Vec::new();
        let mut words = Vec::with_capacity(v.columns);
        for (token, id) in v.tokens.iter().zip(0..) {
            let bytes = token.as_deref().unwrap_or(&[]);
            if !special.contains(&id) {
                words.push(bytes.to_vec());
                continue;
            }
            if let Ok(text) = std::str::from_utf8(bytes)
                && !text.is_empty()
            {
                specials.push((text.to_owned(), id));
            }
            words.push([&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat());
        }
        words.resize(v.columns, Vec::new());
        let columns = u32::try_from(v.columns).map_err(vocabulary)?;
        let env: TokEnv = Arc::new(Env {
            trie: TokTrie::from(&TokRxInfo::new(columns, v.end), &words),
            encode: Arc::clone(&v.encode),
            special,
        });
        let capabilities = InferenceCapabilities::default();
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, capabilities, &slices).map_err(vocabulary)?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.verbose_errors = false;
        Ok(Self { factory, specials })
    }
}

impl GuidedGrammars {
    /// Creates a compiler for `vocabulary`.
    ///
    /// # Errors
    /// Returns an error if there are more tokens than columns, or the end token has no bytes.
    pub fn new(vocabulary: Vocabulary) -> Result<Self, GrammarError> {
        vocabulary.validate()?;
        Ok(Self {
            environment: vocabulary.hash(SETTINGS),
            shared: Arc::new(Shared {
                end: vocabulary.end,
                columns: vocabulary.columns,
            }),
            vocabulary,
            built: OnceLock::new(),
            cache: Mutex::default(),
        })
    }

    /// The vocabulary tables, built by the first call.
    fn built(&self) -> Result<&Built, GrammarError> {
        let built = self.built.get_or_init(|| Built::new(&self.vocabulary));
        built.as_ref().map_err(Clone::clone)
    }

    /// Compiles a format without the cache.
    fn compile(&self, format: &Format) -> Result<Compiled, GrammarError> {
        let kind = format.grammar.name();
        let wrong = |why| GrammarError::Compile { kind, why };
        bounds::check(format).map_err(wrong)?;
        let built = self.built()?;
        let grammar: TopLevelGrammar = lark::grammar(format, &built.specials).map_err(wrong)?;
        let parser = built.factory.create_parser(grammar);
        let matcher = llguidance::Matcher::new(parser);
        match matcher.get_error() {
            Some(why) => Err(wrong(CompileError::Compiler(first_lines(&why)))),
            None => Ok(Compiled(Arc::new(Mutex::new(matcher)))),
        }
    }

    /// Returns the cached format, or compiles and caches it.
    fn compiled(&self, format: &Format) -> Result<Compiled, GrammarError> {
        let hash = format_hash(format);
        // No invariant spans a panic while the lock is held.
        let cache = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(compiled) = cache().get(&hash) {
            return Ok(compiled);
        }
        let compiled = self.compile(format)?;
        cache().put(hash, compiled.clone());
        Ok(compiled)
    }

    /// Checks that the whole `text` belongs to the format's language. Its tokenization does not matter.
    ///
    /// # Errors
    /// Returns an error if the format is invalid, or the first position where the text violates it.
    pub fn check_text(&self, format: &Format, text: &str) -> Result<(), GrammarError> {
        self.check_bytes(format, text.as_bytes())
    }

    fn check_bytes(&self, format: &Format, text: &[u8]) -> Result<(), GrammarError> {
        format.validate()?;
        let compiled = self.compiled(format)?;
        let mut matcher = deep_clone(&compiled);
        let tokens = self.built()?.factory.tok_env().tokenize_bytes(text);
        for (position, &token) in tokens.iter().enumerate() {
            let taken = matcher.try_consume_tokens(&[token]);
            let taken = taken.map_err(|e| limit(position, &e))?;
            if taken == 0 {
                return Err(GrammarError::Barred { token, position });
            }
        }
        let position = tokens.len();
        let complete =
            matcher.is_stopped() || matcher.is_accepting().map_err(|e| limit(position, &e))?;
        if complete {
            Ok(())
        } else {
            Err(GrammarError::Incomplete { position })
        }
    }

    #[cfg(test)]
    pub(crate) fn cached(&self) -> usize {
        self.cache
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }
}

/// Copies a compiled format into an independent matcher.
fn deep_clone(compiled: &Compiled) -> llguidance::Matcher {
    let matcher = compiled.0.lock().unwrap_or_else(PoisonError::into_inner);
    matcher.deep_clone()
}

/// The first four lines of an error, at most 600 characters. The rest quotes grammars and stacks.
fn first_lines(why: &str) -> String {
    let lines = why.lines().take_while(|l| !l.starts_with("<backtrace>"));
    let text = lines.take(4).collect::<Vec<_>>().join("; ");
    text.chars().take(600).collect()
}

/// Error for a limit reached after `position` tokens.
fn limit(position: usize, why: &dyn fmt::Display) -> GrammarError {
    GrammarError::Limit {
        position,
        why: first_lines(&why.to_string()),
    }
}

impl Grammars for GuidedGrammars {
    fn implementation(&self) -> &str {
        IMPLEMENTATION
    }

    fn environment(&self) -> &str {
        &self.environment
    }

    fn columns(&self) -> usize {
        self.shared.columns
    }

    fn check(&self, format: &Arc<Format>, tokens: &[TokenId]) -> Result<(), GrammarError> {
        let mut text = Vec::new();
        let ended = tokens.last() == Some(&self.shared.end);
        for (position, &token) in tokens[..tokens.len() - usize::from(ended)]
            .iter()
            .enumerate()
        {
            let special = token == self.shared.end || self.vocabulary.special.contains(&token);
            let bytes = self.vocabulary.tokens.get(token as usize);
            match bytes.and_then(Option::as_deref) {
                Some(bytes) if !special => text.extend_from_slice(bytes),
                _ => return Err(GrammarError::Barred { token, position }),
            }
        }
        self.check_bytes(format, &text)
    }

    fn start(&self, format: &Arc<Format>) -> Result<Box<dyn Matcher>, GrammarError> {
        format.validate()?;
        let compiled = self.compiled(format)?;
        Ok(Box::new(GuidedMatcher {
            inner: deep_clone(&compiled),
            shared: Arc::clone(&self.shared),
            next: None,
            position: 0,
            ended: false,
        }))
    }
}

/// Matcher of one output.
struct GuidedMatcher {
    inner: llguidance::Matcher,
    shared: Arc<Shared>,
    /// The current mask, once computed.
    next: Option<Arc<Mask>>,
    /// Number of tokens so far.
    position: usize,
    ended: bool,
}

sinew_types::debug_fields!(GuidedMatcher, position, ended);

impl GuidedMatcher {
    /// Computes the mask for the current position.
    fn make(&mut self) -> Result<Mask, GrammarError> {
        let (position, columns) = (self.position, self.shared.columns);
        if self.inner.is_stopped() && self.inner.stop_reason().is_ok() {
            return Ok(Mask::of([self.shared.end], columns));
        }
        let bits: SimpleVob = match self.inner.compute_mask() {
            Ok(bits) => bits,
            Err(_) if self.inner.stop_reason() == StopReason::NoExtensionBias => {
                return Err(GrammarError::DeadEnd { position });
            }
            Err(why) => return Err(limit(position, &why)),
        };
        let mask = Mask::new(bits.into(), columns);
        match mask.allowed() {
            0 => Err(GrammarError::DeadEnd { position }),
            _ => Ok(mask),
        }
    }
}

impl Matcher for GuidedMatcher {
    fn mask(&mut self) -> Result<Arc<Mask>, GrammarError> {
        if self.ended {
            let position = self.position;
            return Err(GrammarError::Ended { position });
        }
        if let Some(mask) = &self.next {
            return Ok(Arc::clone(mask));
        }
        let mask = Arc::new(self.make()?);
        self.next = Some(Arc::clone(&mask));
        Ok(mask)
    }

    fn advance(&mut self, token: TokenId) -> Result<(), GrammarError> {
        let position = self.position;
        // `llguidance` accepts more tokens than its mask allows.
        if !self.mask()?.allows(token) {
            return Err(GrammarError::Barred { token, position });
        }
        self.next = None;
        self.position += 1;
        if token == self.shared.end {
            self.ended = true;
            return Ok(());
        }
        let consumed = self.inner.consume_token(token);
        consumed.map_err(|e| limit(self.position, &e))
    }

    fn ended(&self) -> bool {
        self.ended
    }

    fn fork(&self) -> Box<dyn Matcher> {
        Box::new(Self {
            inner: self.inner.deep_clone(),
            shared: Arc::clone(&self.shared),
            next: self.next.clone(),
            position: self.position,
            ended: self.ended,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::Grammar;

    /// A vocabulary of all 256 bytes and an end token.
    fn bytes() -> GuidedGrammars {
        let mut tokens: Vec<Option<Box<[u8]>>> = (0..=255).map(|b| Some([b].into())).collect();
        tokens.push(Some(b"<end>".as_slice().into()));
        let encode = |text: &str| text.bytes().map(TokenId::from).collect();
        GuidedGrammars::new(Vocabulary {
            columns: tokens.len(),
            tokens,
            special: vec![256],
            end: 256,
            encode: Arc::new(encode),
            source: Vec::new(),
        })
        .unwrap()
    }

    #[test]
    fn least_recently_used_formats_are_compiled_again() {
        let grammars = bytes();
        let format = |n: u32| {
            let pattern = format!("{n}[a-f]{{2}}");
            Arc::new(Format::new(Grammar::Regex { pattern }))
        };
        let mask = |n| grammars.start(&format(n)).unwrap().mask().unwrap();
        let first = mask(1);
        (2..200).for_each(|n| drop(mask(n)));
        assert_eq!(grammars.cached(), 64);
        assert_eq!(mask(1), first);
    }

    #[test]
    fn forced_text_that_spells_the_end_token_stays_text() {
        let grammars = bytes();
        let texts = vec!["a<end>b".to_owned()];
        let format = Arc::new(Format::new(Grammar::Choice { texts }));
        let mut matcher = grammars.start(&format).unwrap();
        let mut output = Vec::new();
        while !matcher.ended() {
            let token = matcher.mask().unwrap().only().unwrap();
            matcher.advance(token).unwrap();
            output.push(token);
        }
        let expected: Vec<TokenId> = b"a<end>b".iter().map(|&b| b.into()).chain([256]).collect();
        assert_eq!(output, expected);
    }

    #[test]
    fn recorded_version_matches_cargo_lock() {
        let lock = include_str!("../../../Cargo.lock");
        for part in IMPLEMENTATION.split(", ") {
            let (name, version) = part.split_once(' ').unwrap();
            let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
            assert!(lock.contains(&entry), "{part} is not pinned in Cargo.lock");
        }
    }
}
