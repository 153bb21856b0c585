//! Kinds of columns for rewards that run code.

/// Decides whether code is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Tests in Python: a text, or a list of texts.
    Tests,
    /// A program in Python that ends with 0 if the code is right.
    Program,
}
