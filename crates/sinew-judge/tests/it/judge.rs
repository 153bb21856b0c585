//! Judges: votes, retries, verdicts that are kept, budgets, groups.

use crate::support::{Scripted, asked, config, sample};
use futures::future::join_all;
use serde_json::json;
use sinew_env::{GroupReward, Reward};
use sinew_judge::{ChatError, ChatModel, Exhausted, Judge, JudgeConfig, Ledger, Limits, Mode};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn judge(config: JudgeConfig, model: &Arc<Scripted>) -> Judge {
    let model = Arc::clone(model) as Arc<dyn ChatModel>;
    Judge::new(config, model, Ledger::in_memory(), Exhausted::Unscored)
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
            Exhausted::Unscored,
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
    let on_end = Exhausted::Stop(Arc::new(move |why: &str| {
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
    // What is known costs nothing.
    assert!(judge.score(&sample("a")).await.is_ok());
    let measured = self::judge(limited, &model);
    for output in ["a", "b"] {
        assert!(measured.score(&sample(output)).await.is_ok());
    }
    let error = measured.score(&sample_c).await.unwrap_err();
    assert!(error.reason.contains("max_calls = 2"), "{error}");
}

#[tokio::test]
async fn a_group_is_ranked_in_both_orders() {
    // Prefers the longest answer, and the first of equal ones.
    let model = Scripted::new(|_, request| {
        let (id, data) = asked(request);
        let answers = data["answers"].as_object().unwrap();
        let length = |l: &&String| answers[*l]["output"].as_str().unwrap().len();
        let mut labels: Vec<&String> = answers.keys().collect();
        labels.sort_by_key(|l| std::cmp::Reverse(length(l)));
        Ok(json!({"id": id, "ranking": labels}).to_string())
    });
    let judge = judge(config(Mode::Compare), &model);
    let group = [sample("aa"), sample("a"), sample("bb"), sample("aaa")];
    let scores = judge.score_group(&group).await;
    let values: Vec<f64> = scores.into_iter().map(|s| s.unwrap().value).collect();
    // The two equal ones share their places.
    assert_eq!(values, [0.5, 0.0, 0.5, 1.0]);
    assert_eq!(model.calls(), 2);
    let alone = judge.score_group(&group[..1]).await;
    assert!(
        alone[0]
            .as_ref()
            .unwrap_err()
            .reason
            .contains("two answers")
    );
    let one = judge.score(&group[0]).await.unwrap_err();
    assert!(one.reason.contains("compare"), "{one}");
    let many: Vec<_> = (0..27).map(|i| sample(&i.to_string())).collect();
    let scores = judge.score_group(&many).await;
    assert!(
        scores
            .iter()
            .all(|s| s.as_ref().unwrap_err().reason.contains("up to 26"))
    );
}

#[tokio::test]
async fn a_member_that_cannot_be_seen_leaves_the_others_ranked() {
    let model = Scripted::new(|_, request| {
        let (id, data) = asked(request);
        let labels: Vec<&String> = data["answers"].as_object().unwrap().keys().collect();
        Ok(json!({"id": id, "ranking": labels}).to_string())
    });
    let mut with_column = config(Mode::Compare);
    with_column.columns = vec!["answer".into()];
    let judge = judge(with_column, &model);
    let mut group = [sample("a"), sample("b"), sample("c")];
    group[1].task.data = json!({});
    let scores = judge.score_group(&group).await;
    assert!(
        scores[1]
            .as_ref()
            .unwrap_err()
            .reason
            .contains("no column answer")
    );
    assert_eq!(
        (
            scores[0].as_ref().unwrap().value,
            scores[2].as_ref().unwrap().value
        ),
        (0.5, 0.5)
    );
}
