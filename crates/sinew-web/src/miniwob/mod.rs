//! Pages of MiniWoB++ as tasks (Shi et al., World of Bits, 2017; Liu et al., 2018). The pages are plain files
//! of the package `miniwob`, under the MIT licence; they are not part of this program.
//!
//! A task is a page and a seed of `Math.seedrandom`. The reward is the page's own, without its decay over
//! time: it is 1 where the page gives its full raw reward, else 0. The page's clock never ends an episode.

mod families;
mod site;
mod tasks;

pub use families::FAMILIES;
#[cfg(feature = "browser")]
pub(crate) use site::site;
pub(crate) use tasks::MiniwobTasks;
