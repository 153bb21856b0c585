//! `sinew worker --role engine`: the newest weights of a run, for its rollout workers by tokens, and for
//! other clients behind the APIs of model providers.

use super::presence::{Beats, RolePresence};
use super::{WorkerArgs, begin, no_address, refused};
use crate::output;
use serde_json::json;
use sinew_assembly::{Failure, FollowedEngine, follow_engine, reached_at};
use sinew_gateway::{Gateway, GatewayConfig, GatewayParts, Secret, Server, SessionLimits};
use sinew_store::MemoryStore;
use sinew_types::Engine;
use sinew_workers::{DeskClient, EngineRoutes, Loaded, WorkerStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Capacity for the traces of clients.
const STORE_BYTES: u64 = 1 << 30;
/// Interval of checks whether the role is asked to end.
const LOOK: Duration = Duration::from_millis(200);

pub(super) fn run(args: &WorkerArgs) -> Result<(), Failure> {
    let listen = args.listen.ok_or_else(|| no_address("engine"))?;
    let endpoint = args.tls.endpoint("--listen", listen)?;
    let (runtime, _signals, stop) = begin(args)?;
    let token = args.token()?;
    let owner = Arc::new(DeskClient::new(&args.owner, &token).map_err(refused)?);
    let Some(terms) = args.terms(&owner, &stop)? else {
        return Ok(());
    };
    let options = args.options(runtime.handle().clone(), &stop)?;
    let Some(made) = follow_engine(&owner, &terms, &options)? else {
        return Ok(());
    };
    let scheme = endpoint.scheme();
    let (gateway, public) = (gateway(&made, &terms.run, &token), args.advertise.clone());
    let routes = Arc::new(routes(&made));
    let more = Some(routes.router());
    let server = Server::start_with(gateway, endpoint, &token, public.clone(), more);
    let server = runtime.block_on(server);
    let server = server.map_err(|e| Failure::input(format!("--listen: {e}")))?;
    let url = public.unwrap_or_else(|| format!("{scheme}://{}", reached_at(server.address())));
    let capacity = made.recipe.engine.max_num_seqs;
    let presence = RolePresence::register(args, capacity, Some(url.clone()))?;
    if args.json {
        output::print_json(&json!({"engine": {"url": url, "name": presence.id()}}));
    } else {
        output::print(&format!(
            "{}: the model of {} at {url}/v1\n",
            presence.id(),
            terms.run
        ));
    }
    let (engine, loaded) = (Arc::clone(&made.engine), made.loaded.clone());
    let status = move || status(engine.as_ref(), &loaded);
    let (beats, ends) = Beats::start(presence, status, stop)?;
    while !ends() {
        std::thread::sleep(LOOK);
    }
    // The registry names it no more, so that only generations which run already are waited for.
    let end = Instant::now() + Duration::from_secs(args.notice_s);
    while routes.running() > 0 && Instant::now() < end {
        std::thread::sleep(LOOK);
    }
    let cut = routes.running();
    let left = end.saturating_duration_since(Instant::now());
    runtime.block_on(server.stop_within(async { tokio::time::sleep(left).await }));
    drop(beats);
    ended(args, cut);
    Ok(())
}

/// Says how many generations were cut. Workers repeat them on other engines, from the tokens that came.
fn ended(args: &WorkerArgs, cut: usize) {
    if args.json {
        output::print_json(&json!({"ended": "asked to end", "generations_cut": cut}));
    } else {
        output::print(&format!("asked to end: {cut} generations go on elsewhere\n"));
    }
}

/// The engine by tokens, for the rollout workers of the run.
fn routes(made: &FollowedEngine) -> EngineRoutes {
    let context = made.recipe.rollout.max_context_tokens as usize;
    let (engine, loaded) = (Arc::clone(&made.engine), made.loaded.clone());
    EngineRoutes::new(engine, loaded, context, made.vocab)
}

/// The gateway of an engine; the token of the run is the key of its clients.
fn gateway(made: &FollowedEngine, run: &str, token: &str) -> Gateway {
    let config = GatewayConfig {
        model: run.to_owned(),
        session: SessionLimits {
            max_context_tokens: made.recipe.rollout.max_context_tokens,
            ..SessionLimits::default()
        },
        format: made.renderer.turn_format(),
        api_key: Some(Secret::new(token)),
        ..GatewayConfig::default()
    };
    let parts = GatewayParts {
        engine: Arc::clone(&made.engine),
        renderer: Arc::clone(&made.renderer),
        store: Some(Arc::new(MemoryStore::new(STORE_BYTES))),
        requests: Arc::default(),
        capacity: None,
        hooks: None,
    };
    Gateway::new(config, parts)
}

fn status(engine: &dyn Engine, loaded: &Loaded) -> WorkerStatus {
    let status = engine.status();
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    WorkerStatus {
        version: loaded.get().map(|id| id.version.0),
        checksum: loaded.mark().map(|(_, manifest)| manifest),
        busy: count(status.running),
        queued: count(status.waiting),
        idle_s: 0.0,
        cause: loaded.cause(),
    }
}
