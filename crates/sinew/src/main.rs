//! The command line: the only place where concrete parts meet.
fn main() {}
