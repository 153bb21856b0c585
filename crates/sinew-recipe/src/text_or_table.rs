//! Keys whose value is a table, or a text that stands for one.

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;

/// Accepts both forms of a value.
struct Either<T> {
    /// Both forms in words, for messages.
    expected: &'static str,
    /// Makes the value of a text.
    of: fn(&str) -> T,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E>(self, text: &str) -> Result<T, E> {
        Ok((self.of)(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}

/// Parses a table, or a text by `of`.
pub(crate) fn text_or_table<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
    expected: &'static str,
    of: fn(&str) -> T,
) -> Result<T, D::Error> {
    deserializer.deserialize_any(Either { expected, of })
}
