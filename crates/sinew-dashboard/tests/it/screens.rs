//! Tests read the drawn SVG and DOM back and compare them with the data.

use crate::browser::{open, show};
use crate::chromium::Browser;
use crate::{data, serve, serve_with};
use serde_json::{Value, json};
use sinew_dashboard::{NoRenderer, Ports};
use sinew_store::{DiskStore, StoreOptions, TraceStore};
use sinew_types::{EpisodeId, Message, Node, Role, TokenKind};
use std::path::Path;
use std::sync::Arc;

/// Changes every line of a file of records.
fn edit(path: &Path, change: impl Fn(usize, &mut Value)) {
    let text = std::fs::read_to_string(path).unwrap();
    let line = |(i, line): (usize, &str)| {
        let mut record: Value = serde_json::from_str(line).unwrap();
        change(i, &mut record);
        record.to_string() + "\n"
    };
    let edited: String = text.lines().enumerate().map(line).collect();
    std::fs::write(path, edited).unwrap();
}

/// Points of a curve of a chart as they are drawn: x and y in the units of the axes, from the labels of
/// those. A point that begins a part of the line has `true`.
fn drawn(browser: &mut Browser, chart: &str, selector: &str) -> Vec<(f64, f64, bool)> {
    let read = format!(
        "(() => {{ const svg = document.querySelector('#chart-{chart} svg');
          const number = (t) => t.includes('%') ? parseFloat(t) / 100 : parseFloat(t);
          const texts = [...svg.querySelectorAll('text')].map((t) => [t.getAttribute('text-anchor'), +t.getAttribute('x'), +t.getAttribute('y'), number(t.textContent)]);
          const ys = texts.filter((t) => t[0] === 'end').map((t) => [t[2] - 4, t[3]]), xs = texts.filter((t) => t[0] === 'middle').map((t) => [t[1], t[3]]);
          const scale = (all) => (p) => all[0][1] + (p - all[0][0]) / (all.at(-1)[0] - all[0][0]) * (all.at(-1)[1] - all[0][1]);
          const path = svg.querySelector('{selector}').getAttribute('d');
          return [...path.matchAll(/([ML])([-\\d.]+) ([-\\d.]+)/g)].map((m) => [scale(xs)(+m[2]), scale(ys)(+m[3]), m[1] === 'M']); }})()"
    );
    serde_json::from_value(browser.eval(&read)).unwrap()
}

fn text(browser: &mut Browser, selector: &str) -> String {
    let read = format!("document.querySelector({selector:?}).innerText");
    browser.eval(&read).as_str().unwrap().to_owned()
}

#[test]
fn a_curve_goes_through_every_measured_point_and_through_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a");
    data::run(&run, 9, 2, 0.0);
    // A step whose episodes all failed was not measured, and one is missing.
    let rewards = [0.6, 0.3, 0.6, 0.6, 0.3, 0.69, 0.3, 0.0, 0.65];
    edit(&run.join("metrics.jsonl"), |i, r| {
        r["rollout"]["reward"] = rewards[i].into();
        r["rollout"]["failed"] = if i == 7 { 8 } else { 0 }.into();
        if i > 3 {
            r["step"] = (i + 2).into();
        }
    });
    let served = serve(dir.path());
    let mut browser = open(dir.path(), &served);
    show(&mut browser, "curves", "?run=a&smooth=0.95");
    let points = drawn(&mut browser, "reward", "path.raw");
    let measured = [
        (1.0, 0.6, true),
        (2.0, 0.3, false),
        (3.0, 0.6, false),
        (4.0, 0.6, false),
        (6.0, 0.3, true),
        (7.0, 0.69, false),
        (8.0, 0.3, false),
        (10.0, 0.65, true),
        // A single point is a line to itself.
        (10.0, 0.65, false),
    ];
    assert_eq!(points.len(), measured.len(), "{points:?}");
    for (drawn, measured) in points.iter().zip(measured) {
        assert!((drawn.0 - measured.0).abs() < 0.05, "{points:?}");
        assert!((drawn.1 - measured.1).abs() < 0.01, "{points:?}");
        assert_eq!(drawn.2, measured.2, "{points:?}");
    }
    // The legend has what was measured, and not what was smoothed.
    assert_eq!(text(&mut browser, "#chart-reward .legend b"), "0.65");
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}

#[test]
fn every_success_has_its_interval_and_two_episodes_are_no_gain() {
    let dir = tempfile::tempdir().unwrap();
    for (name, n) in [("few", 2), ("many", 64)] {
        let run = dir.path().join(name);
        data::run(&run, 4, 2, 0.0);
        edit(&run.join("evals.jsonl"), |i, r| {
            r["stats"]["episodes"] = n.into();
            r["stats"]["success"] = if i == 4 { 1.0 } else { 0.0 }.into();
        });
    }
    let served = serve(dir.path());
    let mut browser = open(dir.path(), &served);
    let kind = |browser: &mut Browser, run: &str| {
        let of = format!(
            "document.querySelector('tr[data-run={run}] b.good, tr[data-run={run}] b.mute').className"
        );
        browser.eval(&of)
    };
    // Wilson's interval of 0 and of 2 in 2, and of 64 in 64.
    let few = text(&mut browser, "tr[data-run=few]");
    assert!(few.contains("0.0 % → 100.0 %"), "{few}");
    assert!(few.contains("95 %: 0.0 to 65.8, n 2"), "{few}");
    assert!(few.contains("95 %: 34.2 to 100.0, n 2"), "{few}");
    assert_eq!(kind(&mut browser, "few"), "mute");
    let many = text(&mut browser, "tr[data-run=many]");
    assert!(many.contains("95 %: 94.3 to 100.0, n 64"), "{many}");
    assert_eq!(kind(&mut browser, "many"), "good");
    // Training success of the last steps counts its episodes, too.
    let runs = served.get("/api/runs").1;
    let share = &runs["runs"][0]["success"];
    let shown = format!("n {}", share["n"]);
    assert!(few.contains(&shown), "{shown} not in {few}");
    // Charts show the interval as a line through each point.
    show(&mut browser, "curves", "?run=few");
    let ends = browser.eval("[...document.querySelectorAll('#chart-heldout line.spread')].map((l) => l.getAttribute('y1') !== l.getAttribute('y2'))");
    assert_eq!(ends, json!(vec![true; 5]));
    let legend = text(&mut browser, "#chart-success .legend");
    assert_eq!(legend.matches("95 %").count(), 2, "{legend}");
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}

#[test]
fn a_point_leads_to_its_step_and_to_its_episodes() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a");
    data::run(&run, 8, 2, 0.0);
    let served = serve(dir.path());
    let mut browser = open(dir.path(), &served);
    show(&mut browser, "curves", "?run=a");
    let place = browser.eval(
        "(() => { const svg = document.querySelector('#chart-reward svg'), box = svg.getBoundingClientRect();
           const ticks = [...svg.querySelectorAll('text')].filter((t) => t.getAttribute('text-anchor') === 'middle').map((t) => [+t.getAttribute('x'), +t.textContent]);
           const [from, to] = [ticks[0], ticks.at(-1)], x = from[0] + (7 - from[1]) / (to[1] - from[1]) * (to[0] - from[0]);
           return [box.left + +x, box.top + 60]; })()",
    );
    for kind in ["mousePressed", "mouseReleased"] {
        let at = json!({ "type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1 });
        browser.call("Input.dispatchMouseEvent", at);
    }
    browser.until("document.documentElement.dataset.ready === 'step'");
    assert_eq!(browser.eval("location.hash"), "#/step?run=a&step=7");
    let step = served.get("/api/runs/a/steps/7").1;
    let main = text(&mut browser, "#main");
    let success = step["record"]["rollout"]["success"].as_f64().unwrap();
    assert!(
        main.contains(&format!("{:.1} %", 100.0 * success)),
        "{main}"
    );
    // Its commit names eight episodes, of which the system failed two.
    let (trained, dropped) = (&step["trained"], step["dropped"].as_array().unwrap());
    assert_eq!((trained, dropped.len()), (&json!(6), 2));
    browser.eval("[...document.querySelectorAll('a.button')].find((a) => a.innerText === 'Its episodes').click()");
    browser.until("document.documentElement.dataset.ready === 'episodes'");
    let ids = browser.eval("[...document.querySelectorAll('tbody tr')].map((r) => r.dataset.id)");
    let of_step: Vec<String> = (12..14)
        .flat_map(|draw| (0..4).map(move |e| format!("d{draw:08}-e{e}")))
        .collect();
    assert_eq!(ids, json!(of_step));
    assert_eq!(served.get("/api/runs/a/steps/99").0, 404);
    // The page of errors leads to the episodes that failed, and to no others.
    show(&mut browser, "errors", "?run=a");
    browser
        .eval("[...document.querySelectorAll('a')].find((a) => a.innerText === 'step 7').click()");
    browser.until("document.documentElement.dataset.ready === 'episodes'");
    let outcomes =
        browser.eval("[...document.querySelectorAll('tbody .chip')].map((c) => c.innerText)");
    assert_eq!(outcomes, json!(["system failed", "system failed"]));
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}

/// A run with two episodes of one group whose nodes have tokens and no messages; the first two of them are
/// equal.
fn wordless(run: &Path) {
    let store = DiskStore::open(&run.join("store"), StoreOptions::default()).unwrap();
    let first = store.get(&EpisodeId::new("d00000001-e0")).unwrap().unwrap();
    let traces = [3, 4].map(|last| {
        let mut trace = first.clone();
        trace.episode = EpisodeId::new(format!("wordless-e{last}"));
        trace.provenance.seed = Some(u64::MAX - last);
        let mut nodes = trace.nodes.iter().take(3).cloned().collect::<Vec<Node>>();
        for node in &mut nodes {
            node.messages.clear();
        }
        let tokens = vec![70, 71, 70 + last as u32];
        nodes[2] = Node::given(1, 1, TokenKind::Observation, tokens, Vec::new());
        trace.nodes = nodes;
        trace
    });
    store.commit_batch(&traces).unwrap();
}

#[test]
fn episodes_are_compared_by_their_tokens_with_and_without_the_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a");
    data::run(&run, 2, 2, 0.0);
    wordless(&run);
    let none = Ports {
        store: Arc::new(data::open_store),
        renderer: Arc::new(|_, _| Err(NoRenderer("it was never here".into()))),
        environments: sinew_env::Registry::new(&sinew_env::BUILT_IN),
        late: Arc::new(|_| None),
    };
    for served in [serve(dir.path()), serve_with(dir.path(), none)] {
        let folder = tempfile::tempdir().unwrap();
        let mut browser = open(folder.path(), &served);
        show(
            &mut browser,
            "compare",
            "?run=a&a=wordless-e3&b=wordless-e4",
        );
        let main = text(&mut browser, "#main");
        assert!(main.contains("The first 2 nodes are equal"), "{main}");
        // The difference is shown as text, or as the numbers of the tokens.
        let bodies = browser.eval("[...document.querySelectorAll('.pair > .stack')].map((s) => [...s.querySelectorAll('.body')].at(-1).textContent)");
        assert_ne!(bodies[0], bodies[1]);
        // A seed of 64 bits has all of its digits.
        show(&mut browser, "episode", "?run=a&id=wordless-e3");
        let main = text(&mut browser, "#main");
        assert!(main.contains(&(u64::MAX - 3).to_string()), "{main}");
        assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
    }
}

#[test]
fn texts_are_found_and_two_episodes_are_compared_word_by_word() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a");
    data::run(&run, 3, 2, 0.0);
    let store = DiskStore::open(&run.join("store"), StoreOptions::default()).unwrap();
    let first = store.get(&EpisodeId::new("d00000001-e0")).unwrap().unwrap();
    let said = ["the cat sat on the mat", "the dog sat on a mat"];
    let traces = [0, 1].map(|i| {
        let mut trace = first.clone();
        trace.episode = EpisodeId::new(format!("pets-e{i}"));
        let last = trace.nodes.last_mut().unwrap();
        last.messages = vec![Message::new(Role::Assistant, said[i])];
        last.tokens[0] += i as u32 + 1;
        trace
    });
    store.commit_batch(&traces).unwrap();
    drop(store);
    let served = serve(dir.path());
    let mut browser = open(dir.path(), &served);
    show(&mut browser, "episodes", "?run=a&text=CAT+sat");
    let ids = browser.eval("[...document.querySelectorAll('tbody tr')].map((r) => r.dataset.id)");
    assert_eq!(ids, json!(["pets-e0"]));
    assert_eq!(text(&mut browser, "mark"), "cat sat");
    let main = text(&mut browser, "#main");
    assert!(
        main.contains("1 of 26 episodes that were read hold it"),
        "{main}"
    );
    show(
        &mut browser,
        "compare",
        "?run=a&a=pets-e0&b=pets-e1&view=words",
    );
    let marked = browser.eval("[...document.querySelectorAll('.diff del, .diff ins')].map((e) => [e.tagName, e.innerText.trim()])");
    let expected = json!([["DEL", "cat"], ["DEL", "the"], ["INS", "dog"], ["INS", "a"]]);
    assert_eq!(marked, expected);
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}

#[test]
fn phases_stand_where_they_were_zoom_and_are_exported() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a");
    data::run(&run, 2, 2, 0.0);
    // One after another, the last ones without length: what is drawn is a window of time.
    let mut lines = String::new();
    for i in 0..30 {
        let end = 1000.0 + f64::from(i);
        lines += &format!("{}\n", json!([format!("e{i:02}"), "model", end, 0.5]));
        lines += &format!("{}\n", json!([format!("e{i:02}"), "score", end, 0.0]));
    }
    std::fs::write(run.join(sinew_view::PHASES_FILE), lines).unwrap();
    let served = serve(dir.path());
    let mut browser = open(dir.path(), &served);
    show(&mut browser, "timeline", "?run=a");
    let drawn = |browser: &mut Browser| -> Vec<(String, f64, f64)> {
        let read = "[...document.querySelectorAll('#phases svg rect.p-model')].map((r) => [r.textContent.split(':')[0], +r.getAttribute('x'), +r.getAttribute('width')])";
        serde_json::from_value(browser.eval(read)).unwrap()
    };
    let all = drawn(&mut browser);
    assert_eq!(all.len(), 30);
    // 29.5 seconds over 850 units, from 150 on.
    for (i, (episode, x, width)) in all.iter().enumerate() {
        assert_eq!(*episode, format!("e{i:02}"));
        let from = 150.0 + i as f64 / 29.5 * 850.0;
        assert!((x - from).abs() < 0.1 && (width - 0.5 / 29.5 * 850.0).abs() < 0.1);
    }
    browser.eval("delete document.documentElement.dataset.ready; document.querySelector('[aria-label=\"Zoom in\"]').click()");
    browser.until("document.documentElement.dataset.ready === 'timeline'");
    let zoomed = drawn(&mut browser);
    assert!((13..=17).contains(&zoomed.len()), "{zoomed:?}");
    assert!(zoomed[5].2 > 1.9 * all[5].2);
    let link = browser.eval("document.querySelector('a[download]').getAttribute('href')");
    let trace = served.get(link.as_str().unwrap()).1;
    let slices = trace["traceEvents"].as_array().unwrap();
    assert_eq!(slices.iter().filter(|e| e["ph"] == "X").count(), 60);
    assert_eq!(served.get("/api/runs/a/phases?from=2&to=1").0, 400);
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}

#[test]
fn a_run_that_ended_has_nothing_live_and_a_page_that_follows_keeps_the_keyboard() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a");
    data::run(&run, 2, 2, 0.0);
    let served = serve(dir.path());
    let mut browser = open(dir.path(), &served);
    show(&mut browser, "live", "?run=a");
    let main = text(&mut browser, "#main");
    assert!(main.contains("Nothing is live any more"), "{main}");
    assert!(!main.to_lowercase().contains("live rollouts"), "{main}");
    // Its process writes on: the page is drawn anew, and what has the keyboard keeps it.
    browser.eval("[...document.querySelectorAll('.segment button')].find((b) => b.innerText === 'tools').focus()");
    let text = std::fs::read_to_string(run.join("live.json")).unwrap();
    let mut state: Value = serde_json::from_str(&text).unwrap();
    for finished in 5000.. {
        state["finished"] = finished.into();
        std::fs::write(run.join("live.json"), state.to_string()).unwrap();
        let seen = browser.eval("new Promise((done) => { let n = 0; const look = () => /5[.,]?0\\d\\d|5\\.0k/.test(document.getElementById('main').innerText) ? done(true) : n++ > 100 ? done(false) : setTimeout(look, 20); look(); })");
        if seen == true {
            break;
        }
        assert!(finished < 5050, "the page did not follow");
    }
    assert_eq!(browser.eval("document.activeElement.innerText"), "tools");
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}

#[test]
fn seeds_are_one_curve_with_a_band_and_recipes_show_where_they_differ() {
    let dir = tempfile::tempdir().unwrap();
    for (name, lift, seed) in [("a", 0.0, "1"), ("b", 0.1, "2"), ("c", 0.2, "3")] {
        let run = dir.path().join(name);
        data::run(&run, 6, 2, lift);
        let recipe = std::fs::read_to_string(run.join("recipe.toml")).unwrap();
        let recipe = recipe.replace("seed = 7", &format!("seed = {seed}"));
        let recipe = match name {
            "c" => recipe.replace("[train]\n", "[train]\nlearning_rate = 0.5\n"),
            _ => recipe,
        };
        std::fs::write(run.join("recipe.toml"), recipe).unwrap();
    }
    let served = serve(dir.path());
    let rewards = |run: &str| -> Vec<f64> {
        let curves = served.get(&format!("/api/runs/{run}/curves")).1;
        let charts = curves["charts"].as_array().unwrap().clone();
        let chart = charts.into_iter().find(|c| c["id"] == "reward").unwrap();
        serde_json::from_value(chart["series"][0]["values"].clone()).unwrap()
    };
    let (a, b) = (rewards("a"), rewards("b"));
    let mut browser = open(dir.path(), &served);
    show(
        &mut browser,
        "curves",
        "?run=a&also=b,c&seeds=band&smooth=0",
    );
    let legend = text(&mut browser, "#chart-reward .legend");
    assert!(
        legend.contains("2 seeds of a: reward") && legend.contains("c: reward"),
        "{legend}"
    );
    let line = drawn(&mut browser, "reward", "path[data-curve^=\"2 seeds\"]");
    for (point, (a, b)) in line.iter().zip(a.iter().zip(&b)) {
        assert!((point.1 - (a + b) / 2.0).abs() < 0.01, "{line:?} {a} {b}");
    }
    // The band goes along the highest values, and back along the lowest.
    let band = drawn(&mut browser, "reward", "path.band");
    assert_eq!((line.len(), band.len()), (6, 12));
    for i in 0..6 {
        assert!((band[i].1 - a[i].max(b[i])).abs() < 0.01, "{band:?}");
        assert!((band[11 - i].1 - a[i].min(b[i])).abs() < 0.01, "{band:?}");
    }
    let table = browser.eval("[...document.querySelectorAll('#recipes tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))");
    let rows: Vec<Vec<String>> = serde_json::from_value(table).unwrap();
    let has = |row: [&str; 4]| rows.iter().any(|r| *r == row);
    assert!(has(["b", "seed", "1", "2"]), "{rows:?}");
    assert!(
        rows.iter()
            .any(|r| r[0] == "c" && r[1] == "train.learning_rate" && r[3] == "0.5")
    );
    assert!(
        !rows
            .iter()
            .any(|r| r[0] == "b" && r[1] == "train.learning_rate")
    );
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}

#[test]
fn a_fit_of_a_share_stays_a_share() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a");
    data::run(&run, 14, 2, 0.0);
    edit(&run.join("metrics.jsonl"), |i, r| {
        r["rollout"]["success"] = (0.01 * 1.35_f64.powi(i as i32)).into();
    });
    let served = serve(dir.path());
    let mut browser = open(dir.path(), &served);
    show(&mut browser, "scaling", "?x=episodes");
    let fit = &served.get("/api/scaling?x=episodes&y=success").1["runs"][0]["fit"];
    let highs = fit["curve"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p[3].as_f64().unwrap());
    assert!(highs.fold(0.0, f64::max) <= 1.0, "{fit}");
    assert!(fit["high"].as_f64().unwrap() <= 1.0, "{fit}");
    let row = text(&mut browser, "tbody tr");
    let shown = if fit["reached"].as_bool().unwrap() {
        format!("{:.1} %", 100.0 * fit["high"].as_f64().unwrap())
    } else {
        "not determined".into()
    };
    assert!(row.contains(&shown), "{shown} not in {row}");
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}

#[test]
fn a_collapsed_run_is_not_shown_as_one_that_went_well() {
    let dir = tempfile::tempdir().unwrap();
    for (name, collapsed) in [("good", false), ("bad", true)] {
        let run = dir.path().join(name);
        data::run(&run, 12, 4, 0.0);
        edit(&run.join("metrics.jsonl"), |i, r| {
            r["rollout"]["failed"] = 0.into();
            r["rollout"]["success"] = if collapsed == (i > 5) { 0.05 } else { 0.9 }.into();
        });
        edit(&run.join("evals.jsonl"), |i, r| {
            r["stats"]["success"] = if collapsed == (i > 2) { 0.0 } else { 0.9 }.into();
        });
    }
    let served = serve(dir.path());
    let runs = served.get("/api/runs").1["runs"]
        .as_array()
        .unwrap()
        .clone();
    let verdict = |name: &str| {
        let row = runs.iter().find(|r| r["run"] == name).unwrap();
        (row["verdict"]["verdict"].clone(), row["bad"] == true)
    };
    assert_eq!(verdict("bad"), (json!("collapsed"), true));
    assert_eq!(verdict("good"), (json!("learning"), false));
    let mut browser = open(dir.path(), &served);
    for (name, kind) in [("bad", "chip failed"), ("good", "chip ok")] {
        let read =
            format!("[...document.querySelectorAll('tr[data-run={name}] .chip')].at(-1).className");
        assert_eq!(browser.eval(&read), kind);
    }
    let bars = browser.eval("document.querySelectorAll('tr[data-run=bad] .good').length");
    assert_eq!(bars, 0);
    for page in ["curves", "errors", "live"] {
        show(&mut browser, page, "?run=bad");
        let said = text(&mut browser, "#verdict");
        assert!(said.contains("collapsed"), "{page}: {said}");
    }
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}
