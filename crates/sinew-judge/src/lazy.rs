//! Models that are loaded when they are first asked, so that commands that judge nothing start at once.

use crate::chat::{ChatAnswer, ChatError, ChatModel, ChatRequest};
use crate::engine::EngineChat;
use futures::FutureExt;
use futures::future::BoxFuture;
use std::sync::Arc;
use tokio::sync::OnceCell;

/// Loads a model; blocks meanwhile.
pub type LoadChat = Arc<dyn Fn() -> Result<EngineChat, ChatError> + Send + Sync>;

/// A model in this process that is loaded with the first question.
pub struct LazyChat {
    name: String,
    load: LoadChat,
    cell: OnceCell<EngineChat>,
}

sinew_types::debug_fields!(LazyChat, name);

impl LazyChat {
    /// A model with the name `name`. A load that fails is tried again with the next question.
    pub fn new(name: String, load: LoadChat) -> Self {
        let cell = OnceCell::new();
        Self { name, load, cell }
    }
}

impl ChatModel for LazyChat {
    fn identity(&self) -> String {
        self.name.clone()
    }

    fn ask<'a>(&'a self, request: &'a ChatRequest) -> BoxFuture<'a, Result<ChatAnswer, ChatError>> {
        let load = || async {
            let load = Arc::clone(&self.load);
            let loading = tokio::task::spawn_blocking(move || load());
            loading
                .await
                .map_err(|e| ChatError::Lasting(e.to_string()))?
        };
        async move {
            let loaded = self.cell.get_or_try_init(load).await;
            let chat = loaded.map_err(|e| ChatError::Lasting(format!("{}: {e}", self.name)))?;
            chat.ask(request).await
        }
        .boxed()
    }
}
