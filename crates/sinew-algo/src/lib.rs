//! Episodes in, per-token training signal out.
