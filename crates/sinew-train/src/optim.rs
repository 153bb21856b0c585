//! AdamW over flat parameters, learning-rate schedules, clipping of the gradient's global norm.
