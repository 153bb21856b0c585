//! Environments that ask a simulated user.

use crate::support::{Sizes, folder, task};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::json;
use sinew_bridge::{
    PythonCode, PythonEnvFactory, PythonWorkers, Target, TargetKind, WorkersConfig,
};
use sinew_env::{Action, EnvFactory, SimulatedUser, UserError};
use sinew_types::{Message, Role};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// A user that asks once more, then is content, and keeps what it was asked.
#[derive(Default)]
struct Scripted {
    heard: Mutex<Vec<(Vec<Message>, u64)>>,
}

impl SimulatedUser for Scripted {
    fn say<'a>(
        &'a self,
        messages: &'a [Message],
        seed: u64,
    ) -> BoxFuture<'a, Result<String, UserError>> {
        let mut heard = self.heard.lock().unwrap();
        heard.push((messages.to_vec(), seed));
        let said = match heard.len() {
            1 => Ok("Two teas, please. ☕".to_owned()),
            2 => Ok("END".to_owned()),
            _ => Err(UserError::Failed("it went home".to_owned())),
        };
        std::future::ready(said).boxed()
    }
}

const SOURCE: &str = r#"
from sinew import Done, Env, ask_user

class E(Env):
    def start(self, task):
        self.heard = [{"role": "system", "content": "You buy tea."}]
        return [{"role": "user", "content": self.said("Hello?")}]

    def said(self, text):
        self.heard.append({"role": "user", "content": text})
        answer = ask_user(self.heard, seed=len(self.heard))
        self.heard.append({"role": "assistant", "content": answer})
        return answer

    def step(self, text):
        answer = self.said(text)
        return Done("") if answer == "END" else answer

    def reward(self):
        return len(self.heard) == 5
"#;

fn factory(user: Option<Arc<dyn SimulatedUser>>) -> (PythonEnvFactory, TempDir) {
    let dir = folder();
    std::fs::write(dir.path().join("user.py"), SOURCE).unwrap();
    let target = Target::parse("user.py:E", TargetKind::Env, dir.path()).unwrap();
    let search = std::env::var("PATH").unwrap();
    let code = PythonCode::find(&[target], "python3", &search).unwrap();
    let sizes = Sizes::default();
    let mut config = WorkersConfig::new(code.process_provider(2).unwrap());
    config.workers = sizes.workers;
    config.user = user;
    let workers = PythonWorkers::start(config, code).unwrap();
    let factory = PythonEnvFactory::new(workers, 0, "user.py:E").unwrap();
    (factory, dir)
}

#[tokio::test]
async fn a_conversation_is_held_with_the_user() {
    let user = Arc::new(Scripted::default());
    let (factory, _dir) = factory(Some(Arc::clone(&user) as Arc<dyn SimulatedUser>));
    let mut env = factory.create(&task(json!({}))).unwrap();
    let begun = env.reset().await.unwrap();
    let shown = begun.messages.last().unwrap();
    assert_eq!(
        (shown.role, shown.content.text().as_ref()),
        (Role::User, "Two teas, please. ☕")
    );
    let step = env.step(Action::say("Here they are.")).await.unwrap();
    assert!(step.done && step.outcome.unwrap().success);
    env.close().await.unwrap();
    let heard = user.heard.lock().unwrap();
    let (last, seed) = &heard[1];
    let roles: Vec<Role> = last.iter().map(|m| m.role).collect();
    assert_eq!(
        roles,
        [Role::System, Role::User, Role::Assistant, Role::User]
    );
    assert_eq!(
        (last[3].content.text().as_ref(), *seed),
        ("Here they are.", 4)
    );
}

#[tokio::test]
async fn an_episode_without_an_answer_fails_with_the_reason() {
    let user = Arc::new(Scripted::default());
    let (factory, _dir) = factory(Some(Arc::clone(&user) as Arc<dyn SimulatedUser>));
    user.heard.lock().unwrap().resize(2, (Vec::new(), 0));
    let mut env = factory.create(&task(json!({}))).unwrap();
    let error = env.reset().await.unwrap_err().to_string();
    assert!(error.contains("it went home"), "{error}");
    env.close().await.unwrap();
}

#[tokio::test]
async fn a_recipe_without_a_user_is_named() {
    let (factory, _dir) = factory(None);
    let mut env = factory.create(&task(json!({}))).unwrap();
    let error = env.reset().await.unwrap_err().to_string();
    assert!(error.contains("add [user]"), "{error}");
    env.close().await.unwrap();
}
