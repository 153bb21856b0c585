//! Messages to tokens and back: tokenizer, chat templates, joins between turns, tool calls.
