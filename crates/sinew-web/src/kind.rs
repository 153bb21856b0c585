//! The environment `web` in the registry: its tasks and its factory by its keys.

use crate::keys::{GIVES, Web, WebTasks};
use crate::miniwob::MiniwobTasks;
use crate::shop::ShopTasks;
use sinew_env::{
    EnvConfig, EnvError, EnvFactory, EnvKind, KeyError, Needs, Sandboxes, Taskset, TasksetError,
};
use sinew_types::Gives;
use std::sync::Arc;

/// The environment of the registry.
pub static KIND: EnvKind = EnvKind::new::<Web>(
    "web",
    "pages in real Chromium: a shop, or MiniWoB++",
    Needs {
        sandbox: false,
        alphabet: None,
        rows: false,
        tasks: false,
        reward: false,
    },
);

impl EnvConfig for Web {
    fn check(&self) -> Result<(), KeyError> {
        self.check_keys()
    }

    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        Ok(match self.tasks {
            WebTasks::Shop => Arc::new(ShopTasks::new(
                seed,
                self.levels(),
                self.train,
                self.held_out,
            )),
            WebTasks::Miniwob => Arc::new(MiniwobTasks::new(
                seed,
                self.families(),
                self.train,
                self.held_out,
            )),
        })
    }

    #[cfg(feature = "browser")]
    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Ok(Arc::new(crate::env::WebFactory::start(self)?))
    }

    #[cfg(not(feature = "browser"))]
    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Err(EnvError::Config {
            field: "type",
            value: "\"web\"".into(),
            allowed: "this program was built without the feature `web`".into(),
        })
    }

    fn gives(&self) -> Gives {
        GIVES
    }
}
