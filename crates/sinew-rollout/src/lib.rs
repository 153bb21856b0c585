//! Agent loop, groups, admission, back-pressure.
