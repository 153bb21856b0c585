//! How long containers take, beside others.
