//! Content of a message or an observation: text, and media by reference.

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;

/// One part of a [`Content`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Part {
    /// Text that follows the part before it without a separator.
    Text {
        /// Characters of the part, not empty inside a [`Content`].
        text: String,
    },
    /// A picture, by reference.
    Image(Media),
    /// A sound, by reference.
    Audio(Media),
}

impl Part {
    /// `text`, `image` or `audio`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Text { .. } => "text",
            Self::Image(_) => "image",
            Self::Audio(_) => "audio",
        }
    }
}

/// An image or a sound, by reference: a trace never holds its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Media {
    /// Location of the bytes.
    pub source: MediaSource,
    /// Media type as in HTTP (`image/png`), if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
}

/// Location of the bytes of a [`Media`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MediaSource {
    /// Address as it was given, which nothing here opens.
    Url(String),
    /// BLAKE3 of the bytes, hexadecimal.
    Blake3(String),
}

impl fmt::Display for MediaSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(url) => f.write_str(url),
            Self::Blake3(hash) => write!(f, "blake3:{hash}"),
        }
    }
}

/// Parts in their order.
///
/// Invariants: no text part is empty, and no two text parts are adjacent, so that equal contents have equal
/// parts. Content of only text is serialized as a string, anything else as a list of parts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Content(Vec<Part>);

impl Content {
    /// No parts.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// The parts.
    pub fn parts(&self) -> &[Part] {
        &self.0
    }

    /// Whether it has no parts.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends a part; text is appended to a text part before it.
    pub fn push(&mut self, part: Part) {
        match part {
            Part::Text { text } => self.push_text(&text),
            media => self.0.push(media),
        }
    }

    /// Appends text.
    pub fn push_text(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Text { text: last }) => last.push_str(text),
            _ => self.0.push(Part::Text { text: text.into() }),
        }
    }

    /// The text, if there is nothing else.
    pub fn as_text(&self) -> Option<&str> {
        match self.0.as_slice() {
            [] => Some(""),
            [Part::Text { text }] => Some(text),
            _ => None,
        }
    }

    /// The text parts.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Text { text } => Some(text.as_str()),
            Part::Image(_) | Part::Audio(_) => None,
        })
    }

    /// The text parts as one text.
    pub fn text(&self) -> Cow<'_, str> {
        match self.as_text() {
            Some(text) => Cow::Borrowed(text),
            None => Cow::Owned(self.texts().collect()),
        }
    }

    /// Bytes of all text parts.
    pub fn text_len(&self) -> usize {
        self.texts().map(str::len).sum()
    }

    /// The first part that is not text, with its index.
    pub fn first_media(&self) -> Option<(usize, &Part)> {
        let media = |(_, part): &(usize, &Part)| !matches!(part, Part::Text { .. });
        self.0.iter().enumerate().find(media)
    }
}

/// The text, with media shown as `[image https://...]`.
impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|part| match part {
            Part::Text { text } => f.write_str(text),
            Part::Image(media) | Part::Audio(media) => {
                write!(f, "[{} {}]", part.kind(), media.source)
            }
        })
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        if text.is_empty() {
            Self::new()
        } else {
            Self(vec![Part::Text { text }])
        }
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<&String> for Content {
    fn from(text: &String) -> Self {
        text.clone().into()
    }
}

impl FromIterator<Part> for Content {
    fn from_iter<I: IntoIterator<Item = Part>>(parts: I) -> Self {
        let mut content = Self::new();
        parts.into_iter().for_each(|part| content.push(part));
        content
    }
}

impl PartialEq<str> for Content {
    fn eq(&self, text: &str) -> bool {
        self.as_text() == Some(text)
    }
}

impl PartialEq<&str> for Content {
    fn eq(&self, text: &&str) -> bool {
        self == *text
    }
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.as_text() {
            Some(text) => serializer.serialize_str(text),
            None => self.0.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Parts;

        impl<'de> Visitor<'de> for Parts {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of parts of type text, image or audio")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
                Ok(text.into())
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Content, E> {
                Ok(text.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
                let mut content = Content::new();
                while let Some(part) = parts.next_element()? {
                    content.push(part);
                }
                Ok(content)
            }
        }

        deserializer.deserialize_any(Parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Part {
        Part::Image(Media {
            source: MediaSource::Url("https://example.org/cat.png".into()),
            media_type: Some("image/png".into()),
        })
    }

    #[test]
    fn text_is_a_string_and_media_are_references() {
        let plain = Content::from("hello");
        assert_eq!(serde_json::to_string(&plain).unwrap(), "\"hello\"");
        let mut mixed = plain;
        mixed.push(image());
        mixed.push_text("what is this?");
        let json = serde_json::to_value(&mixed).unwrap();
        let expected = serde_json::json!([
            {"type": "text", "text": "hello"},
            {
                "type": "image",
                "source": {"url": "https://example.org/cat.png"},
                "media_type": "image/png"
            },
            {"type": "text", "text": "what is this?"},
        ]);
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_value::<Content>(json).unwrap(), mixed);
        assert_eq!(mixed.as_text(), None);
        assert_eq!(mixed.text(), "hellowhat is this?");
        assert_eq!(mixed.first_media(), Some((1, &image())));
        let shown = "hello[image https://example.org/cat.png]what is this?";
        assert_eq!(mixed.to_string(), shown);
    }

    #[test]
    fn equal_contents_have_equal_parts() {
        let text = |text: &str| Part::Text { text: text.into() };
        let cut: Content = [text(""), text("a"), text(""), text("b")]
            .into_iter()
            .collect();
        assert_eq!(cut, Content::from("ab"));
        assert!(Content::from("").is_empty());
        let list =
            serde_json::json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(serde_json::from_value::<Content>(list).unwrap(), cut);
    }

    #[test]
    fn parts_of_unknown_types_are_refused_by_name() {
        let cases = [
            (serde_json::json!(7), "a text or a list of parts"),
            (serde_json::json!([{"type": "smell"}]), "smell"),
            (serde_json::json!([{"type": "image"}]), "source"),
            (
                serde_json::json!([{"type": "image", "source": {"path": "/tmp/x"}}]),
                "path",
            ),
        ];
        for (value, named) in cases {
            let error = serde_json::from_value::<Content>(value).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
        }
    }
}
