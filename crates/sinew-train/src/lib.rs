//! Rows in, better weights out. Knows loss specifications, no algorithm.
pub mod loss;
pub mod pack;
