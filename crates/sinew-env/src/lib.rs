//! The `Env` port, tools, rewards and built-in environments.
