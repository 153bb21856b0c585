//! Simulated users: what they are asked, and what ends them.

use crate::support::Scripted;
use sinew_env::{SimulatedUser, UserError};
use sinew_judge::{
    BudgetEnd, ChatError, ChatModel, Ledger, Limits, ModelUser, UserConfig, user_spent,
};
use sinew_types::{Message, Role};
use std::sync::Arc;

fn config(limits: Limits) -> UserConfig {
    UserConfig {
        retries: 1,
        temperature: 0.5,
        max_tokens: 32,
        concurrency: 2,
        limits,
    }
}

fn user(model: &Arc<Scripted>, limits: Limits, ledger: Ledger) -> ModelUser {
    let model = Arc::clone(model) as Arc<dyn ChatModel>;
    ModelUser::new(config(limits), model, ledger, BudgetEnd::Unscored)
}

fn asked() -> Vec<Message> {
    vec![
        Message::new(Role::System, "You buy tea."),
        Message::new(Role::User, "Hello?"),
    ]
}

#[tokio::test(start_paused = true)]
async fn a_user_says_text_and_is_asked_again_after_an_outage() {
    let model = Scripted::new(|call, request| {
        assert_eq!((request.messages.len(), request.max_tokens), (2, 32));
        assert!(request.schema.is_none());
        match call {
            0 => Err(ChatError::Passing("503".into())),
            _ => Ok(format!("  Tea, seed {}. \n", request.seed)),
        }
    });
    let user = user(&model, Limits::default(), Ledger::in_memory());
    let said = user.say(&asked(), 7).await;
    assert_eq!(said, Ok("Tea, seed 8.".to_owned()));
    assert_eq!(user.spent().calls, 2);
    assert_eq!(user.spent().usage.input, 10);
}

#[tokio::test(start_paused = true)]
async fn silence_a_wrong_key_and_a_spent_budget_are_no_answers() {
    let silent = Scripted::new(|_, _| Ok(" ".to_owned()));
    let refused = user(&silent, Limits::default(), Ledger::in_memory());
    let error = refused.say(&asked(), 0).await.unwrap_err();
    assert_eq!(
        error,
        UserError::Failed("the answer has no text (asked 2 times)".into())
    );
    let wrong = Scripted::new(|_, _| Err(ChatError::Lasting("wrong key".into())));
    let refused = user(&wrong, Limits::default(), Ledger::in_memory());
    let error = refused.say(&asked(), 0).await.unwrap_err().to_string();
    assert!(error.contains("wrong key") && wrong.calls() == 1, "{error}");
    let good = Scripted::new(|_, _| Ok("Tea.".to_owned()));
    let limits = Limits {
        calls: Some(1),
        ..Limits::default()
    };
    let bounded = user(&good, limits, Ledger::in_memory());
    assert!(bounded.say(&asked(), 0).await.is_ok());
    let error = bounded.say(&asked(), 0).await.unwrap_err().to_string();
    assert!(
        error.contains("the budget is spent: max_calls = 1"),
        "{error}"
    );
}

#[tokio::test]
async fn what_a_user_spent_is_read_from_the_folder_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(user_spent(dir.path()).unwrap(), None);
    let good = Scripted::new(|_, _| Ok("Tea.".to_owned()));
    let (stop, _) = tokio::sync::watch::channel(false);
    let bench = sinew_judge::Bench::of_run(dir.path(), stop);
    let made = bench.user(|| {
        let ledger = bench.user_ledger()?;
        Ok::<_, std::io::Error>(user(&good, Limits::default(), ledger))
    });
    made.unwrap().say(&asked(), 0).await.unwrap();
    let again = bench.user(|| Err("it is made once"));
    assert_eq!(again.unwrap().spent().calls, 1);
    let spent = user_spent(dir.path()).unwrap().unwrap();
    assert_eq!((spent.calls, spent.usage.output), (1, 2));
}
