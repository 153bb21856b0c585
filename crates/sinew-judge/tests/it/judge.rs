//! Judges: votes, retries, verdicts that are kept, budgets, groups.

use crate::support::{Scripted, asked, config, sample};
use futures::future::join_all;
use serde_json::json;
use sinew_env::{Preference, Reward};
use sinew_judge::{
    Bench, BudgetEnd, ChatError, ChatModel, Judge, JudgeConfig, Ledger, Limits, Mode,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn judge(config: JudgeConfig, model: &Arc<Scripted>) -> Judge {
    let model = Arc::clone(model) as Arc<dyn ChatModel>;
    Judge::new(config, model, Ledger::in_memory(), BudgetEnd::Unscored)
}

/// A model that finds every answer good, and "x" short.
fn fair() -> Arc<Scripted> {
    Scripted::new(|_, request| {
        let (id, data) = asked(request);
        Ok(json!({"id": id, "item_1": true, "item_2": data["output"] == "x"}).to_string())
    })
}

#[tokio::test]
async fn a_score_is_the_weighted_mean_of_the_items() {
    let judge = judge(config(Mode::Each), &fair());
    let short = judge.score(&sample("x")).await.unwrap();
    assert_eq!((short.value, short.is_success()), (1.0, true));
    let long = judge.score(&sample("xxx")).await.unwrap();
    assert_eq!((long.value, long.is_success()), (0.25, false));
    assert_eq!((long.parts["item_1"], long.parts["item_2"]), (1.0, 0.0));
}

#[tokio::test]
async fn votes_are_separate_questions_and_their_mean_counts() {
    let model = Scripted::new(|call, request| {
        let (id, _) = asked(request);
        let value = [1, 5, 3][call];
        Ok(json!({"id": id, "item_1": value, "item_2": value}).to_string())
    });
    let mut asked_thrice = config(Mode::Scale { low: 1, high: 5 });
    asked_thrice.votes = 3;
    let judge = judge(asked_thrice, &model);
    assert_eq!(judge.score(&sample("x")).await.unwrap().value, 0.5);
    assert_eq!(model.calls(), 3);
    assert_eq!(judge.spent().usage.input, 30);
}

#[tokio::test]
async fn a_verdict_is_asked_for_again_and_then_missing_never_0() {
    let model = Scripted::new(|call, request| {
        let (id, _) = asked(request);
        Ok(match call {
            0 => "Great work!".to_owned(),
            1 => json!({"id": id, "item_1": false}).to_string(),
            _ => json!({"id": id, "item_1": true, "item_2": true}).to_string(),
        })
    });
    let judge_of = |retries| {
        let mut config = config(Mode::Each);
        config.retries = retries;
        judge(config, &model)
    };
    assert_eq!(judge_of(2).score(&sample("x")).await.unwrap().value, 1.0);
    assert_eq!(model.calls(), 3);
    let silent = Scripted::new(|_, _| Ok(String::new()));
    let mut once = config(Mode::Each);
    once.retries = 1;
    let error = judge(once, &silent).score(&sample("x")).await.unwrap_err();
    assert!(
        error.reason.contains("no verdict") && error.reason.contains("asked 2 times"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn outages_are_waited_for_and_wrong_keys_are_not() {
    let model = Scripted::new(|call, request| match call {
        0 | 1 => Err(ChatError::Passing("down".into())),
        _ => Ok(json!({"id": asked(request).0, "item_1": true, "item_2": true}).to_string()),
    });
    assert!(
        judge(config(Mode::Each), &model)
            .score(&sample("x"))
            .await
            .is_ok()
    );
    let refused = Scripted::new(|_, _| Err(ChatError::Lasting("status 401".into())));
    let error = judge(config(Mode::Each), &refused)
        .score(&sample("x"))
        .await;
    assert_eq!(error.unwrap_err().reason, "status 401");
    assert_eq!(refused.calls(), 1);
}

#[tokio::test]
async fn equal_questions_are_asked_once_also_at_the_same_time_and_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (path, model) = (dir.path().join("quality.jsonl"), fair());
    let open = |config| {
        let model = Arc::clone(&model) as Arc<dyn ChatModel>;
        Judge::new(
            config,
            model,
            Ledger::open(&path).unwrap(),
            BudgetEnd::Unscored,
        )
    };
    let first = open(config(Mode::Each));
    let same = [sample("x"), sample("x"), sample("x"), sample("y")];
    let scores = join_all(same.iter().map(|s| first.score(s))).await;
    assert!(scores.iter().all(Result::is_ok));
    assert_eq!(model.calls(), 2);
    let again = open(config(Mode::Each));
    assert_eq!(again.score(&same[0]).await, scores[0]);
    assert_eq!((model.calls(), again.spent().calls), (2, 2));
    // Another temperature is another question; without the cache every one is asked.
    let mut warmer = config(Mode::Each);
    warmer.temperature = 0.5;
    open(warmer).score(&same[0]).await.unwrap();
    let mut uncached = config(Mode::Each);
    uncached.cache = false;
    open(uncached).score(&same[0]).await.unwrap();
    assert_eq!(model.calls(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_spent_budget_stops_and_scores_nothing() {
    let said = Arc::new(Mutex::new(Vec::new()));
    let stop = Arc::clone(&said);
    let mut limited = config(Mode::Each);
    limited.limits = Limits {
        calls: Some(2),
        ..Limits::default()
    };
    let model = fair();
    let on_end = BudgetEnd::Stop(Arc::new(move |why: &str| {
        stop.lock().unwrap().push(why.to_owned());
    }));
    let asked = Arc::clone(&model) as Arc<dyn ChatModel>;
    let judge = Judge::new(limited.clone(), asked, Ledger::in_memory(), on_end);
    for output in ["a", "b"] {
        assert!(judge.score(&sample(output)).await.is_ok());
    }
    // The third sample gets no score, not even a missing one: it waits for the end of the run.
    let sample_c = sample("c");
    let third = tokio::time::timeout(Duration::from_secs(3600), judge.score(&sample_c));
    assert!(third.await.is_err());
    assert!(said.lock().unwrap()[0].contains("judge.quality: the budget is spent: max_calls = 2"));
    assert_eq!(model.calls(), 2);
    // A known answer costs nothing.
    assert!(judge.score(&sample("a")).await.is_ok());
    let measured = self::judge(limited, &model);
    for output in ["a", "b"] {
        assert!(measured.score(&sample(output)).await.is_ok());
    }
    let error = measured.score(&sample_c).await.unwrap_err();
    assert!(error.reason.contains("max_calls = 2"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn what_was_asked_counts_where_no_answer_was_heard() {
    let mut once = config(Mode::Each);
    once.retries = 0;
    let spent_of = async |error: ChatError| {
        let model = Scripted::new(move |_, _| Err(error.clone()));
        let judge = judge(once.clone(), &model);
        assert!(judge.score(&sample("x")).await.is_err());
        judge.spent()
    };
    let unheard = spent_of(ChatError::Unheard("no answer within 1 s".into())).await;
    assert_eq!((unheard.calls, unheard.usage.output), (1, 64));
    assert!(unheard.usage.input > 400, "{unheard:?}");
    for error in [
        ChatError::Passing("status 429".into()),
        ChatError::Lasting("status 401".into()),
    ] {
        let spent = spent_of(error).await;
        assert_eq!((spent.calls, spent.usage.input), (1, 0));
    }
    // An episode that ends meanwhile has asked as well, and the next question finds the budget spent.
    once.limits.tokens = Some(unheard.usage.input);
    let silent = judge_of_silence(once);
    let sample = sample("x");
    let ended = tokio::time::timeout(Duration::from_secs(1), silent.score(&sample)).await;
    assert!(ended.is_err());
    assert_eq!(silent.spent(), unheard);
    let error = silent.score(&sample).await.unwrap_err();
    assert!(error.reason.contains("max_total_tokens"), "{error}");
}

/// A judge whose model never answers.
fn judge_of_silence(config: JudgeConfig) -> Judge {
    struct Silent;
    impl ChatModel for Silent {
        fn identity(&self) -> String {
            "silent".into()
        }

        fn ask<'a>(
            &'a self,
            _: &'a sinew_judge::ChatRequest,
        ) -> futures::future::BoxFuture<'a, Result<sinew_judge::ChatAnswer, ChatError>> {
            Box::pin(std::future::pending())
        }
    }
    Judge::new(
        config,
        Arc::new(Silent),
        Ledger::in_memory(),
        BudgetEnd::Unscored,
    )
}

#[tokio::test]
async fn environments_share_a_judge_and_its_budget() {
    let (bench, made) = (Bench::default(), Mutex::new(0));
    let mut limited = config(Mode::Each);
    limited.limits.calls = Some(1);
    let of_env = || {
        let judge = bench.judge("quality", || {
            *made.lock().unwrap() += 1;
            Ok::<_, ()>(judge(limited.clone(), &fair()))
        });
        judge.unwrap()
    };
    assert!(of_env().score(&sample("a")).await.is_ok());
    assert!(of_env().score(&sample("b")).await.is_err());
    assert_eq!((*made.lock().unwrap(), of_env().spent().calls), (1, 1));
    assert!(bench.judge("other", || Err("no key")).is_err());
}

/// A model that finds the longer answer better, and the first of equally long ones.
fn prefers_length() -> Arc<Scripted> {
    Scripted::new(|_, request| {
        let (id, data) = asked(request);
        let length = |label: &str| data["answers"][label]["output"].as_str().unwrap().len();
        let better = if length("A") >= length("B") { "A" } else { "B" };
        Ok(json!({"id": id, "better": better}).to_string())
    })
}

#[tokio::test]
async fn a_judge_says_which_of_two_is_better_in_the_order_of_asking() {
    let model = prefers_length();
    let judge = judge(config(Mode::Compare), &model);
    let [short, long, other] = ["a", "aaa", "bbb"].map(sample);
    assert_eq!(judge.prefer(&long, &short).await, Ok(1.0));
    assert_eq!(judge.prefer(&short, &long).await, Ok(0.0));
    // The first place wins in both orders: callers make a tie of it.
    assert_eq!(judge.prefer(&long, &other).await, Ok(1.0));
    assert_eq!(judge.prefer(&other, &long).await, Ok(1.0));
    assert_eq!(model.calls(), 4);
    // Equal answers are a tie, and known ones are not asked about again.
    assert_eq!(judge.prefer(&long, &long.clone()).await, Ok(0.5));
    assert_eq!(judge.prefer(&long, &short).await, Ok(1.0));
    assert_eq!(model.calls(), 4);
    let one = judge.score(&short).await.unwrap_err();
    assert!(one.reason.contains("compare"), "{one}");
}

#[tokio::test]
async fn a_comparison_without_a_verdict_or_a_column_is_missing() {
    let silent = Scripted::new(|_, _| Ok(json!({"better": "A"}).to_string()));
    let mut once = config(Mode::Compare);
    once.retries = 0;
    let (a, mut b) = (sample("a"), sample("b"));
    let error = judge(once.clone(), &silent).prefer(&a, &b).await;
    assert!(error.unwrap_err().reason.contains("no verdict"));
    once.columns = vec!["answer".into()];
    b.task.data = json!({});
    let error = judge(once, &prefers_length()).prefer(&a, &b).await;
    assert!(error.unwrap_err().reason.contains("no column answer"));
}
