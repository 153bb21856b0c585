//! What the pages ask for, below `/api`: JSON, read only. Work on files is done on threads for it, a few at a
//! time, so that a slow disk holds no connection up.

use crate::episode;
use crate::error::ViewError;
use crate::outcomes::{ListError, Outcomes, range};
use crate::runs::{Run, RunRow};
use crate::scaling;
use crate::series;
use crate::shared::Shared;
use crate::work;
use axum::Json;
use axum::extract::{Path, Query, State};
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_project::{TokenSignal, token_signals};
use sinew_store::{Cursor, EndKind, Filter};
use sinew_types::{EpisodeId, GroupId, Trace};
use sinew_view::{LIVE_FILE, LiveState};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// An answer.
type Answer = Result<Json<Value>, ViewError>;

/// Episodes of a page without `limit`, and at most.
const PAGE: usize = 100;
const MAX_PAGE: usize = 500;
/// Episodes whose failure is read from their traces.
const FAILURES: usize = 60;
/// Bytes of a state that a run wrote.
const MAX_LIVE_BYTES: u64 = 8 << 20;

/// Does blocking work for an answer.
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
    done.await.map_err(ViewError::system)?.map(Json)
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
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let run = runs.get(&run)?;
        Ok(json!(series::curves(&run.steps(), &run.evals())))
    })
    .await
}

/// `GET /api/runs/RUN/timeline`: what worked and what waited, step by step, and samples of the rollouts.
pub(crate) async fn timeline(State(shared): State<Shared>, Path(run): Path<String>) -> Answer {
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let run = runs.get(&run)?;
        Ok(work::timeline(&run.path, &run.steps()))
    })
    .await
}

/// `GET /api/runs/RUN/live`: what the process of the run last wrote, and whether it still runs.
pub(crate) async fn live(State(shared): State<Shared>, Path(run): Path<String>) -> Answer {
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let run = runs.get(&run)?;
        let (state, why) = run.state();
        let file = run.path.join(LIVE_FILE);
        let small = std::fs::metadata(&file).is_ok_and(|m| m.len() <= MAX_LIVE_BYTES);
        let text = small.then(|| std::fs::read(&file).ok()).flatten();
        let live: Option<LiveState> = text.and_then(|t| serde_json::from_slice(&t).ok());
        Ok(json!({ "state": state, "why": why, "live": live }))
    })
    .await
}

/// `GET /api/runs/RUN/recipe`: the recipe as it ran, with every default.
pub(crate) async fn recipe(State(shared): State<Shared>, Path(run): Path<String>) -> Answer {
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let run = runs.get(&run)?;
        let text = std::fs::read_to_string(run.path.join("recipe.toml"));
        Ok(json!({ "recipe": text.map_err(ViewError::system)? }))
    })
    .await
}

/// The filters of `sinew episodes`, by the names of its options.
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
            turns: turns.map_err(bad("turns"))?,
            at_turn: self.at_turn,
            versions: versions.map_err(bad("versions"))?,
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

/// A page of the listing.
fn listed(run: &Run, filter: &Filter) -> Result<Value, ViewError> {
    let store = run.store()?;
    let page = Outcomes::new(&store, run.late()).page(filter);
    let (rows, next) = page.map_err(list_error)?;
    let row = |(e, waits): (sinew_store::EpisodeSummary, bool)| {
        let mut row = json!(e);
        row["waits"] = json!(waits);
        row
    };
    let rows: Vec<Value> = rows.into_iter().map(row).collect();
    Ok(json!({ "episodes": rows, "next": next.map(|c| c.0) }))
}

/// `GET /api/runs/RUN/episodes?...`: a page of the listing, in the order of the commits. `next` is the
/// cursor that the following page begins after; `null`: there is none.
pub(crate) async fn episodes(
    State(shared): State<Shared>,
    Path(run): Path<String>,
    query: Result<Query<EpisodeQuery>, axum::extract::rejection::QueryRejection>,
) -> Answer {
    let Query(query) = query.map_err(|e| ViewError::request(e.body_text()))?;
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || listed(&*runs.get(&run)?, &query.filter()?)).await
}

/// `GET /api/runs/RUN/episodes/EPISODE`: an episode with its tokens and the outcome that counts, and a row
/// for each episode of its group.
pub(crate) async fn one_episode(
    State(shared): State<Shared>,
    Path((run, id)): Path<(String, String)>,
) -> Answer {
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let run = runs.get(&run)?;
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
        let renderer = renderer.as_ref().map(AsRef::as_ref).map_err(String::as_str);
        let mut view = episode::view(&trace, waits, renderer);
        let group = Filter {
            group: Some(trace.group.clone()),
            limit: MAX_PAGE,
            ..Filter::default()
        };
        view["siblings"] = listed(&run, &group)?["episodes"].take();
        view["signals"] = json!(signals(&run, &trace, &view["siblings"])?);
        Ok(view)
    })
    .await
}

/// What training gave the episode's tokens, for each node; `None` if it was not trained, or nothing was kept.
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
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let run = runs.get(&run)?;
        let mut errors = work::errors(&run.steps());
        let (state, why) = run.state();
        errors["state"] = json!(state);
        errors["why"] = json!(why);
        errors["failures"] = json!(failures(&run)?);
        Ok(errors)
    })
    .await
}

/// The first failed episodes, with what was said of each.
fn failures(run: &Run) -> Result<Vec<Value>, ViewError> {
    // A run without a store has no episodes to show.
    let Ok(store) = run.store() else {
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

/// What the page of scaling asks for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScalingQuery {
    /// Names of runs, separated by commas; left out: all.
    #[serde(default)]
    runs: String,
    /// What was spent.
    #[serde(default)]
    x: scaling::Compute,
    /// What was gained.
    #[serde(default)]
    y: scaling::Gain,
}

/// `GET /api/scaling?x=&y=&runs=`: points of each run, and fits with their uncertainty.
pub(crate) async fn scaling(
    State(shared): State<Shared>,
    query: Result<Query<ScalingQuery>, axum::extract::rejection::QueryRejection>,
) -> Answer {
    let Query(query) = query.map_err(|e| ViewError::request(e.body_text()))?;
    let runs = Arc::clone(&shared.runs);
    answer(&shared, move || {
        let names: Vec<&str> = query.runs.split(',').filter(|n| !n.is_empty()).collect();
        let chosen = match names.is_empty() {
            true => runs.all(),
            false => names
                .iter()
                .map(|n| runs.get(n))
                .collect::<Result<_, _>>()?,
        };
        let inputs: Vec<scaling::Input> = chosen
            .iter()
            .map(|run| scaling::points(&run.name, &run.steps(), &run.evals(), query.x, query.y))
            .collect();
        Ok(json!(scaling::study(&inputs)))
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
