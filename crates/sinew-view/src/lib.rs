//! Views of runs for users: the terminal view, lines and JSON lines, the HTML report, episodes.
//!
//! A run's events are read from its bus: [`Printer`] and [`ReportFile`] record, [`LiveView`] looks on and may
//! miss some. Views of an ended episode or run come from its records.
//!
//! Invariants: nothing here changes or delays a run; text of a model or a program reaches a terminal without
//! control characters, and a page without markup.
//!
//! | output | read from | lossy |
//! |---|---|---|
//! | [`LiveView`] | the bus, by a bounded queue | yes |
//! | [`LiveFile`] | the bus, by a bounded queue | yes |
//! | [`Printer`], [`ReportFile`] | the bus, as recorders | no |
//! | [`RunSummary`] | files of the run's folder | no |
//! | [`text`], [`json`], [`html`] | a trace of the store | no |

mod comparison;
mod date;
mod episode;
mod error;
mod interference;
mod live;
mod live_file;
mod log;
mod page;
mod phases;
pub mod plot;
mod printer;
mod report;
mod run;
mod status;
mod summary;
mod token_text;
mod visible;

pub use date::date;
pub use episode::{ShowOptions, json, text};
pub use error::ViewError;
pub use live::LiveView;
pub use live_file::{LIVE_FILE, LiveFile, LiveRow, LiveState, Sample, TIMELINE_FILE, timeline};
pub use log::{say, writer};
pub use page::{Limits, html};
pub use phases::{Flight, PHASES_FILE, Phases, SpanRow, chrome_trace, flight, phases};
pub use printer::{OutputForm, Printer};
pub use report::{ReportFile, RunFacts};
pub use run::{RunSummary, WINDOW, lines, open_regular, smoothed};
pub use status::{Status, duration};
pub use summary::{Summary, collected, measured};
pub use token_text::pieces;
pub use visible::{json_line, visible};
