//! The dashboard of runs: a small HTTP server with its pages, over the folders of runs.
//!
//! It reads what runs write anyway: records of steps, held-out measurements, the store of episodes, which may
//! be in a database, and the live state. So it shows runs of this process, of others and of last week in the
//! same way, and needs no service. The pages are files in the binary, without a build step and without
//! outside requests.
//!
//! Invariants:
//! - Nothing here writes, and a run is never held up: the store is opened for reading.
//! - Requests without the token get only a refusal.
//! - Unrecorded values are not shown, and text of models and programs is never markup.
//! - Pages, lists, listeners and the threads that read are bounded.
//!
//! | path | answers |
//! |---|---|
//! | `/api/runs` | the runs, how far they are, what they gained |
//! | `/api/runs/RUN/curves` | curves of its steps and held-out measurements |
//! | `/api/runs/RUN/timeline` | what engine and trainer did and waited for |
//! | `/api/runs/RUN/steps/STEP` | a step: its record, and what became of its episodes |
//! | `/api/runs/RUN/phases` | phases of episodes within a window of time |
//! | `/api/runs/RUN/trace` | all of them, as Perfetto opens them |
//! | `/api/runs/RUN/live` | what its process last wrote: phases, board, queues |
//! | `/api/runs/RUN/episodes` | a page of episodes; the filters of `sinew episodes` as parameters |
//! | `/api/runs/RUN/episodes/EPISODE` | an episode with its tokens |
//! | `/api/runs/RUN/errors` | failures and left-out episodes with causes |
//! | `/api/runs/RUN/recipe` | the recipe as it ran |
//! | `/api/recipes` | keys by which recipes differ |
//! | `/api/scaling` | gain against compute over runs, with fits |
//! | `/api/events` | server-sent events: `change` with `run` and `what`, `resync` |

mod access;
mod activity;
mod api;
mod assets;
mod episode;
mod error;
mod events;
mod outcomes;
mod runs;
mod scaling;
mod series;
mod server;
mod shared;

pub use error::{NoRenderer, NoStore};
pub use outcomes::{Flagged, ListError, Outcomes, RangeError, Row, WAITS, range};
pub use runs::{LateOf, OpenRenderer, OpenStore, Ports};
pub use server::Dashboard;
pub use sinew_algo::trust::Suspicion;
