//! Lower bounds for the number of prompt tokens, without a full render. Pure.
//!
//! A gateway that receives a prompt far above the context refuses it here: rendering and tokenizing
//! megabytes first would cost seconds of CPU for each such request.

use crate::error::RenderError;
use crate::renderer::Renderer;
use sinew_types::{Message, Role, TokenId, ToolSpec};

/// Normalization (NFC, NFKC) makes a text at most this many times shorter.
const SHRINKING: usize = 4;

/// A template writes at least one of this many messages.
const DROPPED: usize = 4;

/// A text is tokenized in slices of this many bytes to see whether it fits.
const SLICE_BYTES: usize = 64 << 10;

/// Maximum tokens that a cut between two slices adds.
const CUT_TOKENS: usize = 64;

/// Prompts with more bytes than this for each allowed token rarely fit: they are checked first.
const RARE_BYTES: usize = 8;

/// A lower bound for the tokens of the messages, if it is at least `limit`. `None`: only rendering shows the
/// number. Tokenizes at most about `limit` tokens, and only for long messages.
///
/// # Errors
/// If a text cannot be tokenized.
pub fn exceeds(
    renderer: &dyn Renderer,
    messages: &[Message],
    limit: usize,
) -> Result<Option<usize>, RenderError> {
    let bytes = messages.iter().map(|m| m.content.text_len()).sum();
    let least = least_tokens(renderer, bytes).max(messages.len() / DROPPED);
    if least >= limit {
        return Ok(Some(least));
    }
    // Templates may omit parts of the model's own turns.
    let given = messages.iter().filter(|m| m.role != Role::Assistant);
    counted(
        renderer,
        given.flat_map(|m| m.content.texts()).collect(),
        limit,
    )
}

/// Works like [`exceeds`], for a text without a template.
///
/// # Errors
/// If the text cannot be tokenized.
pub fn text_exceeds(
    renderer: &dyn Renderer,
    text: &str,
    limit: usize,
) -> Result<Option<usize>, RenderError> {
    match least_tokens(renderer, text.len()) {
        least if least >= limit => Ok(Some(least)),
        _ => counted(renderer, vec![text], limit),
    }
}

/// Returns the minimum number of tokens for `bytes` bytes, from the longest token of the vocabulary.
fn least_tokens(renderer: &dyn Renderer, bytes: usize) -> usize {
    bytes / (SHRINKING * renderer.longest_token_bytes().max(1))
}

/// Tokenizes texts slice by slice until the limit is reached.
fn counted(
    renderer: &dyn Renderer,
    texts: Vec<&str>,
    limit: usize,
) -> Result<Option<usize>, RenderError> {
    let bytes: usize = texts.iter().map(|t| t.len()).sum();
    if bytes <= SLICE_BYTES.max(RARE_BYTES * limit) {
        return Ok(None);
    }
    let mut count = 0usize;
    for slice in texts.into_iter().flat_map(slices) {
        let tokens = renderer.encode_text(slice)?.len();
        count += tokens.saturating_sub(CUT_TOKENS);
        if count >= limit {
            return Ok(Some(count));
        }
    }
    Ok(None)
}

/// A text in parts of at most [`SLICE_BYTES`], cut after white space where there is some.
fn slices(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        if text.is_empty() {
            return None;
        }
        let limit = text.floor_char_boundary(SLICE_BYTES);
        let end = match text[..limit].rfind(char::is_whitespace) {
            _ if limit == text.len() => limit,
            Some(at) if at > 0 => at,
            _ => limit,
        };
        let (slice, rest) = text.split_at(end);
        text = rest;
        Some(slice)
    })
}

/// Ids of `messages` as the template writes them after a point where the model speaks: the first
/// one is an assistant's that the model did not sample. Found as the difference of two renders;
/// `None` if the template does not only append.
///
/// # Errors
/// If the messages cannot be rendered.
pub fn render_after(
    renderer: &dyn Renderer,
    messages: &[Message],
    tools: &[ToolSpec],
) -> Result<Option<Vec<TokenId>>, RenderError> {
    let mut conversation = vec![Message::new(Role::User, "x")];
    let before = renderer.render_prompt(&conversation, tools)?;
    conversation.extend_from_slice(messages);
    let mut all = renderer.render_prompt(&conversation, tools)?;
    if !all.starts_with(&before) {
        return Ok(None);
    }
    Ok(Some(all.split_off(before.len())))
}
