//! Tokenizers from `tokenizer.json` or from the vocabulary of a GGUF file.
//!
//! | source | supported |
//! |---|---|
//! | `tokenizer.json` | everything that the `tokenizers` crate can read |
//! | GGUF | byte-level BPE with a known pre-tokenizer |
//!
//! Other GGUF vocabularies are errors: use a model folder with `tokenizer.json`.

use crate::error::RenderError;
use sinew_types::TokenId;
use std::collections::BTreeMap;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// Tokenizer data of a GGUF file (`tokenizer.ggml.*`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`. Only byte-level BPE (`gpt2`) is supported.
    pub model: String,
    /// `tokenizer.ggml.pre`: name of the pre-tokenizer.
    pub pre: String,
    /// Tokens by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`: 1 normal, 3 control, 4 user-defined, 5 unused.
    pub token_types: Vec<i32>,
    /// Merges: two tokens separated by a space, in order of priority.
    pub merges: Vec<String>,
}

/// Token type of control tokens.
const GGUF_CONTROL: i32 = 3;
/// Token type of user-defined tokens, which are text.
const GGUF_USER_DEFINED: i32 = 4;

/// Pre-tokenizer pattern of the GPT-4 family: contractions, words, up to three digits, punctuation,
/// whitespace.
const LLAMA3_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// The same pattern with single digits.
const QWEN2_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// A tokenizer.
///
/// Only [`Tokenizer::encode`] recognizes control tokens in text.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    /// Tokenizer of the `tokenizers` crate.
    inner: tokenizers::Tokenizer,
    /// Bytes by id. `None` for unused ids.
    bytes: Vec<Option<Box<[u8]>>>,
    /// Control tokens by id.
    special: BTreeMap<TokenId, String>,
    /// Other added tokens with the form of a mark, such as `<think>` and `</tool_response>`.
    marks: Vec<String>,
    /// Bytes of the longest token.
    longest: usize,
}

impl Tokenizer {
    /// Parses a `tokenizer.json`. Errors contain `source_name`.
    pub fn from_json(json: &[u8], source_name: &str) -> Result<Self, RenderError> {
        let inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| failed(source_name, &e))?;
        Self::build(inner)
    }

    /// Serializes the tokenizer as `tokenizer.json`.
    pub fn to_json(&self) -> Result<Vec<u8>, RenderError> {
        let text = self.inner.to_string(false);
        text.map(String::into_bytes)
            .map_err(|e| failed("tokenizer.json", &e))
    }

    /// Creates a tokenizer from GGUF data.
    ///
    /// # Errors
    /// [`RenderError::Tokenizer`] if the model or pre-tokenizer is not supported, or the data is
    /// inconsistent.
    pub fn from_gguf(vocab: &GgufVocab) -> Result<Self, RenderError> {
        /// Name of the source in errors.
        const SOURCE: &str = "GGUF vocabulary";
        let fail = |message: String| failed(SOURCE, &message);
        if vocab.model != "gpt2" {
            return Err(fail(format!(
                "tokenizer.ggml.model is {:?}, only byte-level BPE (\"gpt2\") can be built; use a \
                 model folder with tokenizer.json",
                vocab.model
            )));
        }
        if vocab.tokens.len() != vocab.token_types.len() {
            return Err(fail(format!(
                "{} tokens but {} token types",
                vocab.tokens.len(),
                vocab.token_types.len()
            )));
        }
        let merges = vocab
            .merges
            .iter()
            .enumerate()
            .map(|(i, merge)| {
                merge
                    .split_once(' ')
                    .map(|(a, b)| (a.to_owned(), b.to_owned()))
                    .ok_or_else(|| fail(format!("merge {i} is {merge:?}, expected two tokens")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let ids: Vocab = vocab.tokens.iter().cloned().zip(0u32..).collect();
        let cuts = pre_tokenizer(&vocab.pre).map_err(fail)?;
        let model = BPE::builder()
            .vocab_and_merges(ids, merges)
            .ignore_merges(cuts.ignore_merges)
            .build()
            .map_err(|e| failed(SOURCE, &e))?;
        let mut inner = tokenizers::Tokenizer::new(model);
        inner.with_pre_tokenizer(Some(cuts.pre_tokenizer));
        inner.with_decoder(Some(ByteLevel::default()));
        if cuts.nfc {
            inner
                .with_normalizer(Some(NFC))
                .map_err(|e| failed(SOURCE, &e))?;
        }
        let of_type = |wanted: i32, special: bool| {
            vocab
                .tokens
                .iter()
                .zip(&vocab.token_types)
                .filter(move |(_, kind)| **kind == wanted)
                .map(move |(token, _)| AddedToken::from(token.clone(), special).normalized(false))
                .collect::<Vec<_>>()
        };
        inner
            .add_special_tokens(of_type(GGUF_CONTROL, true))
            .and_then(|_| inner.add_tokens(of_type(GGUF_USER_DEFINED, false)))
            .map_err(|e| failed(SOURCE, &e))?;
        Self::build(inner)
    }

    /// Collects the bytes and control tokens of a vocabulary.
    fn build(inner: tokenizers::Tokenizer) -> Result<Self, RenderError> {
        let vocab = inner.get_vocab(true);
        let size = vocab.values().max().map_or(0, |&id| id as usize + 1);
        let added = inner.get_added_tokens_decoder();
        let byte_level = is_byte_level(&inner);
        let mut bytes = vec![None; size];
        for (token, &id) in &vocab {
            let content = match added.get(&id) {
                Some(added) => added.content.clone().into_bytes(),
                None if byte_level => byte_level_bytes(token),
                None => sentencepiece_bytes(token),
            };
            bytes[id as usize] = Some(content.into_boxed_slice());
        }
        let special = added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, token)| (id, token.content.clone()))
            .collect();
        let is_mark = |text: &str| text.starts_with('<') && text.ends_with('>') && text.len() > 2;
        let marks = added
            .values()
            .filter(|token| !token.special && is_mark(&token.content))
            .map(|token| token.content.clone())
            .collect();
        let longest = bytes.iter().flatten().map(|b| b.len()).max().unwrap_or(0);
        Ok(Self {
            inner,
            bytes,
            special,
            marks,
            longest,
        })
    }

    /// Encodes text, including names of control tokens. Adds no tokens at the start or end.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, RenderError> {
        self.inner
            .encode_fast(text, false)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|e| failed("encoding", &e))
    }

    /// Number of ids: the largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// Id of a token with exactly this text.
    pub fn id(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token)
    }

    /// Bytes of a token. `None` outside of the vocabulary.
    pub fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.bytes.get(id as usize)?.as_deref()
    }

    /// Bytes of the longest token.
    pub fn longest_token_bytes(&self) -> usize {
        self.longest
    }

    /// True for control tokens.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.special.contains_key(&id)
    }

    /// Inserts a space after the first character of each control token's name, so that text cannot start or
    /// end a turn.
    pub(crate) fn neutralize(&self, text: &str) -> String {
        split_names(text, self.special.values())
    }

    /// Works like [`Tokenizer::neutralize`], for the other marks too: the output of a tool can neither end
    /// its own place nor begin the model's reasoning.
    pub(crate) fn neutralize_marks(&self, text: &str) -> String {
        split_names(text, self.special.values().chain(&self.marks))
    }
}

/// A text with a space after the first character of each of these names.
fn split_names<'n>(text: &str, names: impl Iterator<Item = &'n String>) -> String {
    let mut text = text.to_owned();
    for name in names {
        let mut chars = name.chars();
        if let (true, Some(first)) = (text.contains(name.as_str()), chars.next()) {
            text = text.replace(name.as_str(), &format!("{first} {}", chars.as_str()));
        }
    }
    text
}

/// Error with the source of the tokenizer.
fn failed(source_name: &str, message: &dyn std::fmt::Display) -> RenderError {
    RenderError::Tokenizer {
        source_name: source_name.to_owned(),
        message: message.to_string(),
    }
}

/// Text segmentation before merges.
struct Cuts {
    /// Split of text into words.
    pre_tokenizer: PreTokenizerWrapper,
    /// Use words that are in the vocabulary without merges.
    ignore_merges: bool,
    /// Normalize to NFC.
    nfc: bool,
}

/// Pre-tokenizer for a name of `tokenizer.ggml.pre`. An unknown name is an error, because a wrong
/// pre-tokenizer gives plausible but different ids.
fn pre_tokenizer(name: &str) -> Result<Cuts, String> {
    let byte_level = |use_regex| ByteLevel::new(false, true, use_regex).into();
    let split = |pattern: &str| -> Result<PreTokenizerWrapper, String> {
        let pattern = SplitPattern::Regex(pattern.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
            .map_err(|e| e.to_string())?;
        Ok(Sequence::new(vec![split.into(), byte_level(false)]).into())
    };
    let (pre_tokenizer, ignore_merges, nfc) = match name {
        "gpt-2" | "gpt2" | "default" => (byte_level(true), false, false),
        "smollm" | "starcoder" | "refact" | "command-r" => {
            let parts = vec![Digits::new(true).into(), byte_level(true)];
            (Sequence::new(parts).into(), false, false)
        }
        "llama-bpe" | "llama3" | "llama-v3" => (split(LLAMA3_SPLIT)?, true, false),
        "qwen2" => (split(QWEN2_SPLIT)?, false, true),
        other => {
            return Err(format!(
                "tokenizer.ggml.pre is {other:?}, known are gpt-2, default, smollm, starcoder, \
                 refact, command-r, llama-bpe and qwen2; use a model folder with tokenizer.json"
            ));
        }
    };
    Ok(Cuts {
        pre_tokenizer,
        ignore_merges,
        nfc,
    })
}

/// True if the decoder is byte-level.
fn is_byte_level(inner: &tokenizers::Tokenizer) -> bool {
    use tokenizers::decoders::DecoderWrapper;
    match inner.get_decoder() {
        Some(DecoderWrapper::ByteLevel(_)) => true,
        Some(other) => serde_json::to_string(other).is_ok_and(|s| s.contains("\"ByteLevel\"")),
        None => false,
    }
}

/// Bytes of a token in a byte-level vocabulary, which represents bytes without a printable Latin-1 character
/// by characters from U+0100 on (Radford et al., GPT-2 `encoder.py`).
fn byte_level_bytes(token: &str) -> Vec<u8> {
    let printable = |b: u8| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let shifted: Vec<u8> = (0..=255).filter(|&b| !printable(b)).collect();
    let mut bytes = Vec::with_capacity(token.len());
    for c in token.chars() {
        let code = c as u32;
        match u8::try_from(code) {
            Ok(b) if printable(b) => bytes.push(b),
            _ => match shifted.get(code.wrapping_sub(0x100) as usize) {
                Some(&b) => bytes.push(b),
                // The character is outside of the byte alphabet: merges never produce this token.
                None => bytes.extend(c.to_string().into_bytes()),
            },
        }
    }
    bytes
}

/// Bytes of a SentencePiece token, which represents a space by U+2581 and bytes as `<0x0A>`.
fn sentencepiece_bytes(token: &str) -> Vec<u8> {
    let hex = token
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'))
        .filter(|hex| hex.len() == 2);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('\u{2581}', " ").into_bytes(),
    }
}

/// Streaming decoder. A character that spans several tokens is returned with the last one.
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    /// Bytes of an incomplete character.
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// Adds the bytes of the next token and returns the complete text.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(all) => {
                    text.push_str(all);
                    self.pending.clear();
                    return text;
                }
                Err(e) => {
                    let valid = e.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.pending[..valid]));
                    let bad = e.error_len();
                    if bad.is_some() {
                        text.push(char::REPLACEMENT_CHARACTER);
                    }
                    self.pending.drain(..valid + bad.unwrap_or(0));
                    if bad.is_none() {
                        return text;
                    }
                }
            }
        }
    }

    /// Returns the rest. An incomplete character becomes the replacement character.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes as tokens, and a few merges.
    pub(crate) fn toy_vocab() -> GgufVocab {
        let mut tokens = vec!["<|im_start|>".to_owned(), "<|im_end|>".to_owned()];
        let mut types = vec![GGUF_CONTROL, GGUF_CONTROL];
        for token in ["a", "b", "c", "1", "2", "Ġ", "Ċ", "ab", "Ġa", "<tool>"] {
            tokens.push(token.to_owned());
            types.push(if token == "<tool>" {
                GGUF_USER_DEFINED
            } else {
                1
            });
        }
        GgufVocab {
            model: "gpt2".into(),
            pre: "smollm".into(),
            tokens,
            token_types: types,
            merges: vec!["a b".into(), "Ġ a".into()],
        }
    }

    #[test]
    fn merges_and_control_tokens_apply() {
        let tokenizer = Tokenizer::from_gguf(&toy_vocab()).unwrap();
        let ids = tokenizer
            .encode("<|im_start|>ab a12<tool><|im_end|>")
            .unwrap();
        assert_eq!(ids, [0, 9, 10, 5, 6, 11, 1]);
        assert_eq!(tokenizer.token_bytes(10).unwrap(), b" a");
        assert_eq!(tokenizer.token_bytes(8).unwrap(), b"\n");
        assert!(tokenizer.is_special(0) && !tokenizer.is_special(11));
        assert_eq!(tokenizer.token_bytes(99), None);
        assert_eq!(tokenizer.vocab_size(), 12);
    }

    #[test]
    fn control_tokens_in_contents_are_neutralized() {
        let tokenizer = Tokenizer::from_gguf(&toy_vocab()).unwrap();
        let text = tokenizer.neutralize("x<|im_end|>y");
        assert_eq!(text, "x< |im_end|>y");
        assert_eq!(tokenizer.neutralize("plain"), "plain");
        // The model's own marks are text, except for the output of a tool.
        assert_eq!(tokenizer.neutralize("<tool>"), "<tool>");
        assert_eq!(
            tokenizer.neutralize_marks("<tool><|im_end|>"),
            "< tool>< |im_end|>"
        );
    }

    #[test]
    fn broken_vocabularies_are_refused() {
        let refused = |change: fn(&mut GgufVocab)| {
            let mut vocab = toy_vocab();
            change(&mut vocab);
            Tokenizer::from_gguf(&vocab).unwrap_err().to_string()
        };
        assert!(refused(|v| v.model = "llama".into()).contains("tokenizer.ggml.model"));
        assert!(refused(|v| v.pre = "unheard-of".into()).contains("unheard-of"));
        assert!(refused(|v| v.merges[0] = "ab".into()).contains("merge 0"));
        assert!(refused(|v| v.token_types.truncate(3)).contains("3 token types"));
        refused(|v| v.merges[0] = "x y".into());
        assert!(Tokenizer::from_json(b"{}", "x.json").is_err());
    }

    #[test]
    fn sentencepiece_tokens_give_their_bytes() {
        assert_eq!(sentencepiece_bytes("<0x0A>"), b"\n");
        assert_eq!(sentencepiece_bytes("\u{2581}the"), b" the");
        assert_eq!(sentencepiece_bytes("<0xZZ>"), b"<0xZZ>");
    }

    #[test]
    fn streams_join_split_characters() {
        let mut decoder = StreamDecoder::default();
        let euro = "€".as_bytes();
        assert_eq!(decoder.push(&euro[..1]), "");
        assert_eq!(decoder.push(&euro[1..]), "€");
        assert_eq!(decoder.push(b"a\xFFb\xE2"), "a\u{FFFD}b");
        assert_eq!(decoder.finish(), "\u{FFFD}");
        assert_eq!(decoder.finish(), "");
    }
}
