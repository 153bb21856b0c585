//! Arithmetic and word problems with a Python tool.

mod answer;
mod arithmetic;
mod config;
mod env;
mod expr;
mod generated;
mod gsm8k;
mod mixed;
mod prompt;
mod python;
mod templates;
mod word;

pub use answer::{final_answer, parse_number, same_number};
pub use arithmetic::Arithmetic;
pub use config::KIND;
use env::MAX_PROCESS_REWARD;
pub use env::{ToolMathConfig, ToolMathFactory};
pub use generated::MathTaskConfig;
pub use gsm8k::Gsm8k;
pub use mixed::Mixed;
pub use prompt::{Calls, PromptConfig, WorkedExample};
pub use word::Word;
