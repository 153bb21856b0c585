//! Data for the pages, below `/api`: JSON, read only. Work on files is done on threads for it, a few at a
//! time, so that a slow disk delays no connection.

use crate::activity;
use crate::episode;
use crate::error::ViewError;
use crate::outcomes::{ListError, Outcomes, Row, range};
use crate::runs::{Run, RunRow};
use crate::scaling;
use crate::series;
use crate::shared::Shared;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_recipe::RunPlan;
use sinew_runs::{TokenSignal, token_signals};
use sinew_store::{Cursor, EndKind, Filter, TrainedBatch};
use sinew_types::{EpisodeId, GroupId, Trace};
use sinew_view::{LIVE_FILE, LiveState};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// An answer.
type Answer = Result<Json<Value>, ViewError>;

/// Episodes of a page without `limit`, and at most.
const PAGE: usize = 100;
const MAX_PAGE: usize = 500;
/// Traces that a search reads for a page.
const SEARCHED: usize = 2000;
/// Episodes whose failure is read from their traces.
const FAILURES: usize = 60;
/// Bytes of a state that a run wrote.
const MAX_LIVE_BYTES: u64 = 8 << 20;

/// Runs blocking work for an answer.
///
/// # Errors
/// Those of the work, or if it panicked.
async fn answer(
    shared: &Shared,
    job: impl FnOnce() -> Result<Value, ViewError> + Send + 'static,
) -> Answer {
    let permit = Arc::clone(&shared.places).acquire_owned().await;
    let permit = permit.map_err(ViewError::system)?;
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        job()
    });
    let mut value = done.await.map_err(ViewError::system)??;
    exact(&mut value);
    Ok(Json(value))
}

/// Runs blocking work on the run of a name for an answer.
///
/// # Errors
/// If there is no such run, and those of [`answer`].
async fn of_run(
    shared: &Shared,
    name: String,
    job: impl FnOnce(&Run) -> Result<Value, ViewError> + Send + 'static,
) -> Answer {
    let runs = Arc::clone(&shared.runs);
    answer(shared, move || {
        let run = runs.get(&name)?;
        job(&run)
    })
    .await
}

/// Makes integers text that a page would round: its numbers have 53 bits. Seeds have 64.
fn exact(value: &mut Value) {
    const MOST: u64 = (1 << 53) - 1;
    match value {
        Value::Number(n) => {
            let size = n.as_u64().or_else(|| n.as_i64().map(i64::unsigned_abs));
            if size.is_some_and(|size| size > MOST) {
                *value = Value::String(n.to_string());
            }
        }
        Value::Array(all) => all.iter_mut().for_each(exact),
        Value::Object(all) => all.values_mut().for_each(exact),
        _ => {}
    }
}

/// `GET /api/runs`: every run with its state and what it gained.
pub(crate) async fn runs(State(shared): State<Shared>) -> Answer {
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let rows: Vec<RunRow> = runs.all().iter().map(|run| run.row()).collect();
        Ok(json!({ "runs": rows, "version": env!("CARGO_PKG_VERSION") }))
    })
    .await
}

/// `GET /api/runs/RUN/curves`: curves by step, thinned to what a screen can show.
pub(crate) async fn curves(State(shared): State<Shared>, Path(run): Path<String>) -> Answer {
    of_run(&shared, run, move |run| {
        let mut curves = json!(series::curves(&run.steps(), &run.evals()));
        curves["unread"] = run.unread().into();
        Ok(curves)
    })
    .await
}

/// `GET /api/runs/RUN/timeline`: what worked and what waited, step by step, and samples of the rollouts.
pub(crate) async fn timeline(State(shared): State<Shared>, Path(run): Path<String>) -> Answer {
    of_run(&shared, run, move |run| {
        Ok(activity::timeline(&run.path, &run.steps()))
    })
    .await
}

/// `GET /api/runs/RUN/live`: what the process of the run last wrote, and whether it still runs.
pub(crate) async fn live(State(shared): State<Shared>, Path(run): Path<String>) -> Answer {
    of_run(&shared, run, move |run| {
        let (state, why) = run.state();
        let file = run.path.join(LIVE_FILE);
        let small = std::fs::metadata(&file).is_ok_and(|m| m.len() <= MAX_LIVE_BYTES);
        let text = small.then(|| std::fs::read(&file).ok()).flatten();
        let live: Option<LiveState> = text.and_then(|t| serde_json::from_slice(&t).ok());
        Ok(json!({ "state": state, "why": why, "verdict": run.verdict(), "live": live }))
    })
    .await
}

/// `GET /api/runs/RUN/recipe`: the recipe as it ran, with every default.
pub(crate) async fn recipe(State(shared): State<Shared>, Path(run): Path<String>) -> Answer {
    of_run(&shared, run, move |run| {
        let text = std::fs::read_to_string(run.path.join("recipe.toml"));
        Ok(json!({ "recipe": text.map_err(ViewError::system)? }))
    })
    .await
}

/// `GET /api/runs/RUN/steps/STEP`: the record of a step, measurements after it, and the fate of the episodes
/// that its commit names.
pub(crate) async fn step(
    State(shared): State<Shared>,
    Path((run, step)): Path<(String, u64)>,
) -> Answer {
    of_run(&shared, run, move |run| {
        let steps = run.steps();
        let at = steps.iter().position(|r| r.step == step).ok_or_else(|| {
            ViewError::missing(format!("run {} has no record of step {step}", run.name))
        })?;
        let beside = |i: Option<usize>| i.and_then(|i| steps.get(i)).map(|r| r.step);
        let evals = run.evals();
        let evals: Vec<_> = evals.iter().filter(|e| e.step == step).collect();
        // A run without a store has no episodes to show.
        let batches = run.kept_store()?.map(|store| store.batches_of(step));
        let batches = batches.transpose().map_err(ViewError::system)?;
        let (mut trained, mut dropped) = (0, Vec::new());
        for batch in batches.unwrap_or_default() {
            trained += batch.episodes.len();
            dropped.extend(batch.dropped);
        }
        Ok(json!({
            "record": steps[at], "evals": evals, "trained": trained, "dropped": dropped,
            "success": series::pooled([&steps[at].rollout]),
            "before": beside(at.checked_sub(1)), "after": beside(Some(at + 1)),
        }))
    })
    .await
}

/// A window of time, in seconds since 1970.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Window {
    from: Option<f64>,
    to: Option<f64>,
}

/// `GET /api/runs/RUN/phases?from=&to=`: phases of episodes within a window; left out: the last minute.
pub(crate) async fn phases(
    State(shared): State<Shared>,
    Path(run): Path<String>,
    query: Result<Query<Window>, QueryRejection>,
) -> Answer {
    let Query(window) = query?;
    of_run(&shared, run, move |run| {
        activity::phases(&run.path, (window.from, window.to))
    })
    .await
}

/// `GET /api/runs/RUN/trace`: all phases that the run keeps, for Perfetto and Chrome's tracing.
pub(crate) async fn trace(State(shared): State<Shared>, Path(run): Path<String>) -> Answer {
    of_run(&shared, run, move |run| {
        Ok(sinew_view::chrome_trace(&run.path, &run.name))
    })
    .await
}

/// Names of runs, separated by commas.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Names {
    runs: String,
}

/// `GET /api/recipes?runs=a,b`: the keys by which the recipes of runs differ from that of the first.
pub(crate) async fn recipes(
    State(shared): State<Shared>,
    query: Result<Query<Names>, QueryRejection>,
) -> Answer {
    let Query(names) = query?;
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let names = names.runs.split(',').filter(|n| !n.is_empty());
        let plans = names.map(|n| runs.get(n)?.recipe().map(|plan| (n.to_owned(), plan)));
        let plans = plans.collect::<Result<Vec<_>, _>>()?;
        let (Some((_, first)), others) = (plans.first(), plans.iter().skip(1)) else {
            return Err(ViewError::request("runs: allowed: at least one name"));
        };
        let against = |(run, plan): &(String, RunPlan)| {
            let changes = sinew_recipe::changes(first, plan);
            let row = |c: &sinew_recipe::Change| json!([c.key, c.old, c.new]);
            let mut rows: Vec<Value> = changes.iter().map(row).collect();
            // Bounds are not a change for a run that continues, and one for two that are compared.
            let (a, b) = (&first.train, &plan.train);
            if a.steps != b.steps {
                rows.push(json!([
                    "train.steps",
                    a.steps.to_string(),
                    b.steps.to_string()
                ]));
            }
            if a.max_wall_s != b.max_wall_s {
                let shown = |s: f64| s.to_string();
                rows.push(json!([
                    "train.max_wall_s",
                    shown(a.max_wall_s),
                    shown(b.max_wall_s)
                ]));
            }
            json!({ "run": run, "changes": rows })
        };
        Ok(json!({ "others": others.map(against).collect::<Vec<_>>() }))
    })
    .await
}

/// The filters of `sinew episodes`, by the names of its options, and two of the pages' own: `of_step` keeps
/// the episodes that the commit of a step names, trained or left out, and `text` those that hold a text.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EpisodeQuery {
    purpose: Option<String>,
    draw: Option<u64>,
    step: Option<u64>,
    end: Option<EndKind>,
    #[serde(rename = "type")]
    kind: Option<String>,
    env: Option<String>,
    group: Option<String>,
    failed: Option<bool>,
    turns: Option<String>,
    at_turn: Option<u32>,
    versions: Option<String>,
    success: Option<bool>,
    min_reward: Option<f64>,
    max_reward: Option<f64>,
    of_step: Option<u64>,
    text: Option<String>,
    after: Option<u64>,
    limit: Option<usize>,
}

impl EpisodeQuery {
    /// # Errors
    /// If a value is not allowed; the message names the parameter.
    pub(crate) fn filter(self) -> Result<Filter, ViewError> {
        let bad =
            |name: &'static str| move |why: String| ViewError::request(format!("{name}: {why}"));
        let limit = self.limit.unwrap_or(PAGE);
        if !(1..=MAX_PAGE).contains(&limit) {
            return Err(bad("limit")(format!("{limit}; allowed: 1 to {MAX_PAGE}")));
        }
        let (least, most) = (self.min_reward, self.max_reward);
        let reward = (least.is_some() || most.is_some())
            .then(|| least.unwrap_or(f64::NEG_INFINITY)..=most.unwrap_or(f64::INFINITY));
        // NaN is above and below nothing.
        if reward.as_ref().is_some_and(RangeInclusive::is_empty) {
            let why = "the least reward is above the most, or no number";
            return Err(bad("min_reward")(why.to_owned()));
        }
        if self.failed == Some(true) && self.success.is_some() {
            let why = "give either it or `success`";
            return Err(bad("failed")(why.to_owned()));
        }
        let turns = self.turns.as_deref().map(range::<u32>).transpose();
        let versions = self.versions.as_deref().map(range::<u64>).transpose();
        Ok(Filter {
            task_kind: self.kind,
            env: self.env,
            failed: self.failed == Some(true),
            turns: turns.map_err(|e| bad("turns")(e.to_string()))?,
            at_turn: self.at_turn,
            versions: versions.map_err(|e| bad("versions")(e.to_string()))?,
            draws: self.draw.map(|d| d..=d),
            updates: self.step.map(|s| s..=s),
            purpose: self.purpose,
            success: self.success,
            end: self.end,
            group: self.group.map(GroupId::new),
            reward,
            after: self.after.map(Cursor),
            limit,
            ..Filter::default()
        })
    }
}

/// The filter was wrong, or the store cannot be read.
fn list_error(e: ListError) -> ViewError {
    match e {
        ListError::Filter(e) => ViewError::request(e),
        ListError::Store(e) => ViewError::system(e),
    }
}

/// A row of the listing.
fn row((e, waits): Row) -> Value {
    let mut row = json!(e);
    row["waits"] = json!(waits);
    row
}

/// A page of the listing.
fn listed(run: &Run, filter: &Filter) -> Result<Value, ViewError> {
    let store = run.store()?;
    let page = Outcomes::new(&store, run.late()).page(filter);
    let (rows, next) = page.map_err(list_error)?;
    let rows: Vec<Value> = rows.into_iter().map(row).collect();
    Ok(json!({ "episodes": rows, "next": next.map(|c| c.0) }))
}

/// Episodes that the commit of a step names, trained or left out.
fn of_step(run: &Run, step: u64) -> Result<BTreeSet<EpisodeId>, ViewError> {
    let batches = run.store()?.batches_of(step).map_err(ViewError::system)?;
    let ids = |b: TrainedBatch| b.episodes.into_iter().chain(b.dropped.into_keys());
    Ok(batches.into_iter().flat_map(ids).collect())
}

/// A page of the episodes of a filter that hold a text, each with the place where it stands. Every trace must
/// be read, so a page looks at a limited number and reports it: `next` continues behind the last one.
fn searched(run: &Run, filter: &Filter, text: &str) -> Result<Value, ViewError> {
    let store = run.store()?;
    let renderer = run.renderer().ok();
    let outcomes = Outcomes::new(&store, run.late());
    let (mut found, mut looked) = (Vec::new(), 0);
    let mut page = Filter {
        limit: SEARCHED / 4,
        ..filter.clone()
    };
    loop {
        let (rows, next) = outcomes.page(&page).map_err(list_error)?;
        for (e, waits) in rows {
            let trace = store.get(&e.episode).map_err(ViewError::system)?;
            let place = trace.and_then(|t| episode::found(&t, text, renderer.as_deref()));
            let cursor = e.cursor;
            looked += 1;
            if let Some(place) = place {
                let mut row = row((e, waits));
                row["found"] = place.into();
                found.push(row);
            }
            if found.len() == filter.limit {
                return Ok(json!({ "episodes": found, "looked": looked, "next": cursor.0 }));
            }
        }
        match next {
            Some(next) if looked < SEARCHED => page.after = Some(next),
            next => {
                let next = next.map(|c| c.0);
                return Ok(json!({ "episodes": found, "looked": looked, "next": next }));
            }
        }
    }
}

/// `GET /api/runs/RUN/episodes?...`: a page of the listing, in the order of the commits. `next` is the
/// cursor that the following page begins after; `null`: there is none.
pub(crate) async fn episodes(
    State(shared): State<Shared>,
    Path(run): Path<String>,
    query: Result<Query<EpisodeQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    of_run(&shared, run, move |run| {
        let (step, text) = (query.of_step, query.text.clone());
        let mut filter = query.filter()?;
        filter.among = step.map(|step| of_step(run, step)).transpose()?;
        match text.filter(|t| !t.is_empty()) {
            Some(text) => searched(run, &filter, &text),
            None => listed(run, &filter),
        }
    })
    .await
}

/// `GET /api/runs/RUN/episodes/EPISODE`: an episode with its tokens and the outcome that counts, and a row
/// for each episode of its group.
pub(crate) async fn one_episode(
    State(shared): State<Shared>,
    Path((run, id)): Path<(String, String)>,
) -> Answer {
    of_run(&shared, run, move |run| {
        let store = run.store()?;
        let id = EpisodeId::new(id);
        let found = store.get(&id).map_err(ViewError::system)?;
        let mut trace = found.ok_or_else(|| {
            ViewError::missing(format!(
                "episode {id} is not in run {}, or gc freed it",
                run.name
            ))
        })?;
        let outcomes = Outcomes::new(&store, run.late());
        let waits = outcomes.settle(&mut trace).map_err(list_error)?;
        let renderer = run.renderer();
        let renderer = renderer.as_ref().map(AsRef::as_ref);
        let renderer = renderer.map_err(|e| e.0.as_str());
        let mut view = episode::view(&trace, waits, renderer);
        let group = Filter {
            group: Some(trace.group.clone()),
            limit: MAX_PAGE,
            ..Filter::default()
        };
        view["siblings"] = listed(run, &group)?["episodes"].take();
        view["signals"] = json!(signals(run, &trace, &view["siblings"])?);
        Ok(view)
    })
    .await
}

/// Training signals of the episode's tokens, for each node; `None` if it was not trained, or nothing was
/// kept.
fn signals(
    run: &Run,
    trace: &Trace,
    group: &Value,
) -> Result<Option<Vec<Vec<TokenSignal>>>, ViewError> {
    let mut rows = group.as_array().into_iter().flatten();
    let own = rows.find(|row| row["episode"] == json!(trace.episode));
    let Some(step) = own.and_then(|row| row["update"].as_u64()) else {
        return Ok(None);
    };
    token_signals(&run.path, step, trace).map_err(ViewError::system)
}

/// `GET /api/runs/RUN/errors`: what went wrong, with causes.
pub(crate) async fn errors(State(shared): State<Shared>, Path(run): Path<String>) -> Answer {
    of_run(&shared, run, move |run| {
        let mut errors = activity::errors(&run.steps());
        let (state, why) = run.state();
        errors["state"] = json!(state);
        errors["why"] = json!(why);
        errors["verdict"] = json!(run.verdict());
        errors["failures"] = json!(failures(run)?);
        Ok(errors)
    })
    .await
}

/// The first failed episodes, each with its reason.
fn failures(run: &Run) -> Result<Vec<Value>, ViewError> {
    // A run without a store has no episodes to show.
    let Some(store) = run.kept_store()? else {
        return Ok(Vec::new());
    };
    let filter = Filter {
        end: Some(EndKind::Failed),
        limit: FAILURES,
        ..Filter::default()
    };
    let page = store.list(&filter).map_err(ViewError::system)?;
    let mut failures = Vec::new();
    for e in page.episodes {
        let trace = store.get(&e.episode).map_err(ViewError::system)?;
        let why = trace.map(|t| episode::end_text(&t.end));
        failures.push(json!({
            "episode": e.episode, "purpose": e.purpose, "task": e.task, "turns": e.turns,
            "draw": e.draw, "seconds": e.total_s, "why": why,
        }));
    }
    Ok(failures)
}

/// Query of the scaling page.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScalingQuery {
    /// Names of runs, separated by commas; left out: all.
    #[serde(default)]
    runs: String,
    /// Measure of compute.
    #[serde(default)]
    x: scaling::Compute,
    /// Measure of gain.
    #[serde(default)]
    y: scaling::Gain,
}

/// `GET /api/scaling?x=&y=&runs=`: points of each run, and fits with their uncertainty.
pub(crate) async fn scaling(
    State(shared): State<Shared>,
    query: Result<Query<ScalingQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let names: Vec<&str> = query.runs.split(',').filter(|n| !n.is_empty()).collect();
        let chosen = if names.is_empty() {
            runs.all()
        } else {
            let named = names.iter().map(|n| runs.get(n));
            named.collect::<Result<_, _>>()?
        };
        let input = |run: &Arc<Run>| scaling::Input {
            world: run.world(),
            repeats: run.repeats(),
            ..scaling::points(&run.name, &run.steps(), &run.evals(), query.x, query.y)
        };
        let inputs: Vec<scaling::Input> = chosen.iter().map(input).collect();
        Ok(json!(scaling::study(&inputs, query.y)))
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(query: &str) -> Result<Filter, String> {
        let uri: axum::http::Uri = format!("http://x/?{query}").parse().unwrap();
        let query = Query::<EpisodeQuery>::try_from_uri(&uri).map_err(|e| e.body_text())?;
        query.0.filter().map_err(|e| e.to_string())
    }

    #[test]
    fn integers_that_a_page_would_round_are_text() {
        let mut value = json!({ "a": [u64::MAX, 9_007_199_254_740_991_u64, i64::MIN, 0.5] });
        exact(&mut value);
        let exact = json!([
            "18446744073709551615",
            9_007_199_254_740_991_u64,
            "-9223372036854775808",
            0.5
        ]);
        assert_eq!(value["a"], exact);
    }

    #[test]
    fn a_query_is_the_filter_of_the_command() {
        let f = filter("purpose=train&turns=2..5&versions=3&type=add&min_reward=0.5&end=failed")
            .unwrap();
        assert_eq!(f.purpose.as_deref(), Some("train"));
        assert_eq!((f.turns, f.versions), (Some(2..=5), Some(3..=3)));
        assert_eq!(f.task_kind.as_deref(), Some("add"));
        assert_eq!(f.reward, Some(0.5..=f64::INFINITY));
        assert_eq!((f.end, f.limit), (Some(EndKind::Failed), PAGE));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (query, named) in [
            ("purpos=train", "purpos"),
            ("turns=x", "turns"),
            ("versions=5..2", "versions"),
            ("limit=0", "limit"),
            ("min_reward=2&max_reward=1", "min_reward"),
            ("min_reward=NaN", "min_reward"),
            ("failed=true&success=true", "failed"),
        ] {
            let error = filter(query).unwrap_err();
            assert!(error.contains(named), "{query}: {error}");
        }
    }
}
