//! Durable traces and the transfer queue.
