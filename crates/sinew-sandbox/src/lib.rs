//! Isolated places in which hostile code runs.
