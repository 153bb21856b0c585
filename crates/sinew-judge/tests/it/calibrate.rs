//! Judges against labels: published and hand-computed figures, and labels that are none.

use crate::support::{Scripted, asked, config};
use serde_json::json;
use sinew_env::Unscored;
use sinew_judge::{
    BudgetEnd, Calibration, ChatModel, Item, Judge, LabelledAnswer, Ledger, Mode, Rubric,
    read_labels,
};
use std::sync::Arc;

fn one_item() -> Rubric {
    let text = "good".to_owned();
    Rubric::new(vec![Item { text, weight: 1.0 }]).unwrap()
}

/// Rows of one item, with the grades of people.
fn rows(mode: Mode, grades: &[i64]) -> Vec<LabelledAnswer> {
    let line = |grade: &i64| {
        let label = if mode == Mode::Each {
            json!(*grade == 1)
        } else {
            json!(grade)
        };
        json!({"prompt": "p", "output": "o", "label": label}).to_string() + "\n"
    };
    let text: String = grades.iter().map(line).collect();
    read_labels(&text, mode, &one_item()).unwrap()
}

/// Cohen's kappa of the usual example, 50 proposals by two readers: 20 both yes, 15 both no, 5 and 10
/// apart. It is 0.4.
#[test]
fn figures_are_those_of_the_published_example() {
    let counts = [(1, 1, 20), (1, 0, 5), (0, 1, 10), (0, 0, 15)];
    let pairs = counts.iter().flat_map(|(p, j, n)| vec![(*p, *j); *n]);
    let (people, judge): (Vec<i64>, Vec<i64>) = pairs.unzip();
    let verdicts = judge.iter().map(|j| Ok(vec![*j as f64])).collect();
    let table = Calibration::compare(
        &one_item(),
        Mode::Each,
        &rows(Mode::Each, &people),
        verdicts,
    );
    let item = &table.items[0];
    let close = |a: Option<f64>, b: f64| assert!((a.unwrap() - b).abs() < 1e-12, "{a:?} {b}");
    close(item.agreement, 0.7);
    close(item.kappa, 0.4);
    close(item.precision, 20.0 / 30.0);
    close(item.recall, 20.0 / 25.0);
    assert_eq!(
        item.confusion,
        [(0, 0, 15), (0, 1, 10), (1, 0, 5), (1, 1, 20)]
    );
    assert_eq!(table.means, [(0.0, 0.4, 25), (1.0, 0.8, 25)]);
    let text = table.text();
    assert!(
        text.contains("    0.700      0.667   0.800   0.400  good\n"),
        "{text}"
    );
}

/// Values computed by hand: observed agreement 4/6, by chance (2·1 + 2·3 + 2·2) / 36 = 1/3, so kappa is 1/2.
#[test]
fn grades_of_a_scale_have_kappa_without_precision() {
    let mode = Mode::Scale { low: 1, high: 3 };
    let (people, judge) = ([1, 2, 3, 3, 2, 1], [1, 2, 3, 2, 2, 3]);
    let share = |j: &i64| Ok(vec![(*j - 1) as f64 / 2.0]);
    let mut verdicts: Vec<Result<Vec<f64>, Unscored>> = judge.iter().map(share).collect();
    let table = Calibration::compare(&one_item(), mode, &rows(mode, &people), verdicts.clone());
    let item = &table.items[0];
    assert!((item.kappa.unwrap() - 0.5).abs() < 1e-12);
    assert_eq!((item.precision, item.recall), (None, None));
    assert_eq!(table.means, [(0.0, 0.5, 2), (0.5, 0.5, 2), (1.0, 0.75, 2)]);
    // Rows without a verdict are counted with their cause, and do not count as a grade.
    verdicts[1] = Err(Unscored::new("down"));
    let table = Calibration::compare(&one_item(), mode, &rows(mode, &people), verdicts);
    assert_eq!((table.rows, table.unscored), (5, 1));
    assert_eq!(table.first_cause.as_deref(), Some("down"));
    assert_eq!(table.items[0].agreement, Some(0.6));
}

#[test]
fn one_grade_alone_has_no_kappa() {
    let verdicts = vec![Ok(vec![1.0]), Ok(vec![1.0])];
    let table = Calibration::compare(
        &one_item(),
        Mode::Each,
        &rows(Mode::Each, &[1, 1]),
        verdicts,
    );
    assert_eq!(
        (table.items[0].kappa, table.items[0].agreement),
        (None, Some(1.0))
    );
}

#[tokio::test]
async fn a_judge_is_run_on_labelled_rows() {
    let model = Scripted::new(|_, request| {
        let (id, data) = asked(request);
        let good = data["output"] == data["source"];
        Ok(json!({"id": id, "item_1": good, "item_2": false}).to_string())
    });
    let mut asked_for = config(Mode::Each);
    asked_for.columns = vec!["source".into()];
    let judge = Judge::new(
        asked_for,
        Arc::clone(&model) as Arc<dyn ChatModel>,
        Ledger::in_memory(),
        BudgetEnd::Unscored,
    );
    let text = "{\"prompt\": \"p\", \"output\": \"a\", \"source\": \"a\", \"label\": [true, false]}\n\n\
                {\"prompt\": \"p\", \"output\": \"a\", \"source\": \"b\", \"label\": [true, true]}\n";
    let rows = read_labels(text, Mode::Each, &judge.config().rubric).unwrap();
    let table = Calibration::of(&judge, &rows).await;
    assert_eq!((table.rows, model.calls()), (2, 2));
    assert_eq!(table.items[0].agreement, Some(0.5));
    assert_eq!(table.items[1].recall, Some(0.0));
}

#[test]
fn wrong_labels_are_refused_with_their_line() {
    let read = |row: &str, mode| {
        let text = format!("{{\"prompt\": \"p\", \"output\": \"o\", \"label\": true}}\n{row}\n");
        read_labels(&text, mode, &one_item())
            .unwrap_err()
            .to_string()
    };
    for (row, expected) in [
        ("{", "line 2"),
        ("[]", "line 2"),
        ("{\"prompt\": \"p\", \"output\": \"o\"}", "no \"label\""),
        ("{\"prompt\": \"p\", \"label\": true}", "no \"output\""),
        (
            "{\"output\": \"o\", \"label\": true}",
            "neither \"prompt\" nor",
        ),
        (
            "{\"prompt\": \"p\", \"output\": \"o\", \"label\": [true, true]}",
            "2 grades for 1 items",
        ),
        (
            "{\"prompt\": \"p\", \"output\": \"o\", \"label\": 1}",
            "neither true nor false",
        ),
        (
            "{\"messages\": 3, \"output\": \"o\", \"label\": true}",
            "messages is 3",
        ),
    ] {
        let why = read(row, Mode::Each);
        assert!(
            why.starts_with("line 2") && why.contains(expected),
            "{row}: {why}"
        );
    }
    let scaled = "{\"prompt\": \"p\", \"output\": \"o\", \"label\": 4}";
    let why = read_labels(scaled, Mode::Scale { low: 1, high: 3 }, &one_item()).unwrap_err();
    assert!(why.to_string().contains("from 1 to 3"), "{why}");
}
