//! Decoder definition, weight loading and publishing.
