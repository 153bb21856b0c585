//! Time as an argument: pure parts receive a clock instead of reading one.

/// Returns seconds since a fixed moment of the caller's choice.
pub type Clock = Box<dyn Fn() -> f64 + Send>;
