//! Images and sounds of requests become references; rendering decides whether the model takes them.

use super::fields::{Fields, Notes, wrong};
use crate::error::ApiError;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use sinew_types::{Content, Media, MediaSource, Part};

/// The `image_url` of OpenAI's dialects: an address, or the bytes as a `data:` URL.
pub(super) fn image(url: &str, path: &str) -> Result<Part, ApiError> {
    let expected = "an http or https URL, or data:image/TYPE;base64,BYTES";
    let refused = || wrong(path, &Value::String(shortened(url)), expected);
    let Some(data) = url.strip_prefix("data:") else {
        return if url.starts_with("https://") || url.starts_with("http://") {
            Ok(Part::Image(Media {
                source: MediaSource::Url(url.to_owned()),
                media_type: None,
            }))
        } else {
            Err(refused())
        };
    };
    let (media_type, bytes) = data.split_once(";base64,").ok_or_else(refused)?;
    inline(bytes, media_type, path).map(Part::Image)
}

/// Base64 in the usual alphabet, with its padding. Google's clients write the one of URLs, with or without.
pub(super) fn standard_base64(text: &str) -> String {
    let mut usual = text.replace('-', "+").replace('_', "/");
    while !usual.len().is_multiple_of(4) {
        usual.push('=');
    }
    usual
}

/// The text in base64, if the bytes are one.
///
/// # Errors
/// If it is not base64.
pub(super) fn inline_text(base64: &str, path: &str) -> Result<Option<String>, ApiError> {
    let bytes = STANDARD
        .decode(base64)
        .map_err(|_| wrong(path, &Value::String(shortened(base64)), "bytes in base64"))?;
    Ok(String::from_utf8(bytes).ok())
}

/// Bytes that the request holds in base64: named by their hash.
pub(super) fn inline(base64: &str, media_type: &str, path: &str) -> Result<Media, ApiError> {
    let bytes = STANDARD
        .decode(base64)
        .map_err(|_| wrong(path, &Value::String(shortened(base64)), "bytes in base64"))?;
    Ok(Media {
        source: MediaSource::Blake3(blake3::hash(&bytes).to_hex().to_string()),
        media_type: Some(media_type.to_owned()),
    })
}

/// The `input_audio` part of OpenAI's dialects.
pub(super) fn audio(part: &mut Fields<'_>) -> Result<Part, ApiError> {
    let mut sound = part.required_inner("input_audio")?;
    let path = sound.path("data");
    let data = sound.required_string("data")?;
    let format = sound.required_string("format")?;
    sound.end()?;
    inline(&data, &format!("audio/{format}"), &path).map(Part::Audio)
}

/// A part with a reference, as traces have it.
pub(super) fn reference(part: &mut Fields<'_>, kind: &str) -> Result<Part, ApiError> {
    let path = part.path("source");
    let given = part.required("source")?;
    let source = serde_json::from_value(given.clone())
        .map_err(|_| wrong(&path, &given, "{\"url\": ...} or {\"blake3\": ...}"))?;
    let media_type = part.string("media_type")?;
    let media = Media { source, media_type };
    Ok(match kind {
        "audio" => Part::Audio(media),
        _ => Part::Image(media),
    })
}

/// The `source` of Anthropic's image blocks.
pub(super) fn image_block(block: &mut Fields<'_>) -> Result<Part, ApiError> {
    let mut source = block.required_inner("source")?;
    let kind_path = source.path("type");
    let kind = source.required_string("type")?;
    let part = match kind.as_str() {
        "url" => {
            let path = source.path("url");
            image(&source.required_string("url")?, &path)?
        }
        "base64" => {
            let path = source.path("data");
            let media_type = source.required_string("media_type")?;
            inline(&source.required_string("data")?, &media_type, &path).map(Part::Image)?
        }
        _ => return Err(wrong(&kind_path, &Value::String(kind), "url or base64")),
    };
    source.end()?;
    Ok(part)
}

/// Reads Anthropic's `document`: returns its text, or a note that it is a file, since no supported model
/// reads files.
///
/// # Errors
/// If the source is wrong, or the gateway is strict and the file is not text.
pub(super) fn document_block(block: &mut Fields<'_>) -> Result<String, ApiError> {
    let title = block.string("title")?;
    let context = block.string("context")?;
    block.no_effects(&[("citations", "sources are not cited here")])?;
    let mut source = block.required_inner("source")?;
    let kind = source.required_string("type")?;
    let text = match kind.as_str() {
        "text" => source.required_string("data")?,
        "content" => match source.take("content") {
            Some(Value::String(text)) => text,
            Some(Value::Array(parts)) => {
                let path = source.path("content");
                let text = |part: &Value| match part["text"].as_str() {
                    Some(text) => Ok(text.to_owned()),
                    None => unread_file(&path, None, source.notes()),
                };
                let texts = parts.iter().map(text).collect::<Result<Vec<_>, _>>()?;
                texts.join("\n")
            }
            other => {
                let found = other.unwrap_or_default();
                return Err(wrong(&source.path("content"), &found, "a string or blocks"));
            }
        },
        _ => return unread_file(&source.path("data"), title.as_deref(), source.notes()),
    };
    source.ignore(&["media_type"]);
    source.end()?;
    let parts = [title, context, Some(text)];
    Ok(parts.into_iter().flatten().collect::<Vec<_>>().join("\n"))
}

/// The text in place of a file that no model here reads; it is counted.
///
/// # Errors
/// If the gateway is strict.
pub(super) fn unread_file(
    path: &str,
    name: Option<&str>,
    notes: &Notes,
) -> Result<String, ApiError> {
    notes.ignored(path, || {
        ApiError::unsupported(path, "no model here reads files: send their text")
    })?;
    let name = name.unwrap_or_default();
    let between = if name.is_empty() { "" } else { " " };
    Ok(format!("[file{between}{name}: this model reads text only]"))
}

/// Anthropic's blocks as one content: texts next to each other are lines.
#[derive(Default)]
pub(super) struct Blocks {
    /// Parts in their order.
    content: Content,
    /// Texts since the last picture or sound.
    texts: Vec<String>,
    any: bool,
}

impl Blocks {
    pub(super) fn text(&mut self, text: String) {
        self.any = true;
        self.texts.push(text);
    }

    pub(super) fn media(&mut self, part: Part) {
        self.any = true;
        self.join();
        self.content.push(part);
    }

    fn join(&mut self) {
        self.content.push_text(&self.texts.join("\n"));
        self.texts.clear();
    }

    /// Content since the last call, if there was a block.
    pub(super) fn take(&mut self) -> Option<Content> {
        self.join();
        let content = std::mem::take(&mut self.content);
        std::mem::take(&mut self.any).then_some(content)
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
