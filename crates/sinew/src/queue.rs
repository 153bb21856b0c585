//! `sinew queue`: a queue of episodes between processes: served, looked into, scored.

use crate::output;
use crate::runtime;
use crate::signals::{self, StopSignals};
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::{Endpoint, Failure, FeedPlan, TlsArgs};
use sinew_gateway::Secret;
use sinew_queue::{
    MAX_PAGE, Place, QUEUE_NAME, QueueServer, QueueServerConfig, ScoredCounts, ScorerConfig, bury,
    listed, score_rows, system_clock,
};
use sinew_recipe::{DataSection, RunPlan};
use sinew_store::queue::{
    ConsumerStats, DiskQueue, Order, Queue, QueueLimits, QueueStats, RowState, RowView,
};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Interval of sweeps of a queue that is served: leases that ended are taken back.
const SWEEP: Duration = Duration::from_secs(2);

/// Arguments of `sinew queue`.
#[derive(Debug, Args)]
pub(crate) struct QueueArgs {
    #[command(subcommand)]
    command: QueueCommand,
}

#[derive(Debug, Subcommand)]
enum QueueCommand {
    /// Serve the queue in a folder to other processes, until Ctrl-C
    #[command(
        after_help = "Example: sinew queue serve --store episodes --listen 127.0.0.1:8090 --token-file token"
    )]
    Serve(ServeArgs),
    /// Count the rows: by consumer, waiting, ready, leased, acked, dead
    #[command(
        after_help = "Example: sinew queue stats http://127.0.0.1:8090 --token-file token --json"
    )]
    Stats(PlaceArgs),
    /// List rows in the order in which they were put, with their state for each consumer
    #[command(
        after_help = "Example: sinew queue rows http://127.0.0.1:8090 --token-file token --dead"
    )]
    Rows(RowsArgs),
    /// Put rows out of a consumer's way, with the reason, until they are revived
    #[command(
        after_help = "Example: sinew queue fail http://127.0.0.1:8090 --token-file token --consumer trainer --reason 'wrong task' KEY"
    )]
    Fail(FailArgs),
    /// Make dead rows of a consumer ready again, as if never delivered
    #[command(
        after_help = "Example: sinew queue revive http://127.0.0.1:8090 --token-file token --consumer scorer --all"
    )]
    Revive(ReviveArgs),
    /// Forget rows that nothing holds and that are not done: their keys would be new again
    #[command(
        after_help = "Example: sinew queue remove http://127.0.0.1:8090 --token-file token KEY"
    )]
    Remove(RemoveArgs),
    /// Score rows without a reward by the reward of a recipe, apart from the run that made them
    #[command(
        after_help = "Example: sinew queue score recipe.toml --queue http://127.0.0.1:8090 --token-file token"
    )]
    Score(ScoreArgs),
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// Folder that the queue lies in; made if it is missing
    #[arg(long)]
    store: PathBuf,
    /// Name of the queue in the folder
    #[arg(long, default_value = QUEUE_NAME)]
    name: String,
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8090")]
    listen: SocketAddr,
    #[command(flatten)]
    tls: TlsArgs,
    /// File with the token that every call must bring; without it one is made up and printed
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// Maximum rows that are not done; producers wait above it
    #[arg(long, default_value_t = 65_536, value_parser = crate::at_least_one)]
    max_rows: usize,
    /// Maximum bytes of their fields
    #[arg(long, default_value_t = 1 << 30, value_parser = clap::value_parser!(u64).range(1..))]
    max_bytes: u64,
    /// Deliveries of a row to one consumer without an ack, after which it is dead
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    max_attempts: u32,
    /// Rows that are done and whose keys stay known, so that none is put again
    #[arg(long, default_value_t = 262_144)]
    keep: usize,
    /// Begin an empty queue where the file is damaged; the damaged one is put aside
    #[arg(long)]
    accept_loss: bool,
    /// JSON lines on standard output
    #[arg(long)]
    json: bool,
}

/// The queue.
#[derive(Debug, Args)]
struct PlaceArgs {
    /// Address of `sinew queue serve` or of a database, or the folder of a store while nothing else uses it
    #[arg(value_name = "URL|DIR")]
    queue: String,
    /// File with the token of the server, or the password of the database
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// Name of the queue in a folder or a database
    #[arg(long, default_value = QUEUE_NAME)]
    name: String,
    /// JSON on standard output
    #[arg(long)]
    json: bool,
}

impl PlaceArgs {
    fn open(&self) -> Result<Arc<dyn Queue>, Failure> {
        let place =
            sinew_assembly::queue_place(&self.queue, &self.name, self.token_file.as_deref())?;
        sinew_assembly::open_queue(&place)
    }
}

/// State of a row with a consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum State {
    Waiting,
    Ready,
    Leased,
    Acked,
    Dead,
}

#[derive(Debug, Args)]
struct RowsArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Only rows in this state for a consumer: --consumer, or any of them
    #[arg(long)]
    state: Option<State>,
    /// Only rows that are dead for a consumer
    #[arg(long, conflicts_with = "state")]
    dead: bool,
    /// The consumer whose state is meant
    #[arg(long)]
    consumer: Option<String>,
    /// Maximum number of rows
    #[arg(long, default_value_t = 50, value_parser = crate::at_least_one)]
    limit: usize,
    /// Start after this one: the number that the last page ended with (`seq` in JSON)
    #[arg(long, value_name = "SEQ")]
    after: Option<u64>,
}

#[derive(Debug, Args)]
struct FailArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Keys, as `sinew queue rows` lists them
    #[arg(required = true)]
    keys: Vec<String>,
    /// The consumer
    #[arg(long)]
    consumer: String,
    /// Shown by `sinew queue rows`
    #[arg(long)]
    reason: String,
}

#[derive(Debug, Args)]
struct ReviveArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Keys, as `sinew queue rows` lists them
    #[arg(required_unless_present = "all")]
    keys: Vec<String>,
    /// The consumer
    #[arg(long)]
    consumer: String,
    /// All of its dead rows
    #[arg(long, conflicts_with = "keys")]
    all: bool,
}

#[derive(Debug, Args)]
struct RemoveArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Keys, as `sinew queue rows` lists them
    #[arg(required = true)]
    keys: Vec<String>,
}

#[derive(Debug, Args)]
struct ScoreArgs {
    /// Recipe (TOML) with the tasks of the episodes and the `[reward]`
    recipe: PathBuf,
    /// Address of `sinew queue serve`, or the folder of its store while nothing else uses it; left out:
    /// that of the recipe's `[data]`
    #[arg(long, value_name = "URL|DIR")]
    queue: Option<String>,
    /// File with the token of the server
    #[arg(long, requires = "queue")]
    token_file: Option<PathBuf>,
    /// Name of the queue in a folder
    #[arg(long, default_value = QUEUE_NAME)]
    name: String,
    /// Name of this scorer in reports; default: its process number
    #[arg(long)]
    holder: Option<String>,
    /// Rows of one lease
    #[arg(long, default_value_t = 32, value_parser = crate::at_least_one)]
    rows: usize,
    /// Sampled tokens of one lease, but for its first row
    #[arg(long, default_value_t = 1 << 20)]
    tokens: u64,
    /// Newest weights first, in place of oldest rows first
    #[arg(long)]
    freshest: bool,
    /// Seconds after which the rows of a scorer that died go to another
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    lease_s: u64,
    /// Attempts at a row before it goes on without a reward, for the last reason
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    attempts: u32,
    /// End once no row waits for a reward
    #[arg(long)]
    until_empty: bool,
    /// Stop, as by Ctrl-C, when standard input ends
    #[arg(long)]
    stop_on_eof: bool,
    /// JSON lines on standard output: counts after each lease
    #[arg(long)]
    json: bool,
}

/// Options of commands that put episodes into a queue.
#[derive(Clone, Debug, Args)]
pub(crate) struct FeedArgs {
    /// Put ended episodes into this queue too: the address of `sinew queue serve`, or a folder that nothing
    /// else uses
    #[arg(long, value_name = "URL|DIR")]
    queue: Option<String>,
    /// File with the token of the queue's server
    #[arg(long, value_name = "FILE", requires = "queue")]
    queue_token_file: Option<PathBuf>,
    /// Name of this producer; its keys in the queue begin with it
    #[arg(long, value_name = "NAME")]
    queue_source: Option<String>,
}

impl FeedArgs {
    /// The queue of the command line, or else `own`, with a name for the producer where it has none.
    ///
    /// # Errors
    /// If the file of the token cannot be read.
    pub(crate) fn plan(
        &self,
        own: Option<Place>,
        source: &str,
        apart: bool,
    ) -> Result<Option<FeedPlan>, Failure> {
        let token = self.queue_token_file.as_deref();
        let typed = self.queue.as_ref();
        let typed = typed.map(|queue| sinew_assembly::queue_place(queue, QUEUE_NAME, token));
        let Some(place) = typed.transpose()?.or(own) else {
            return Ok(None);
        };
        let source = self.queue_source.as_deref().unwrap_or(source);
        if source.is_empty() || source.len() > 128 || source.contains(':') {
            return Err(Failure::input(format!(
                "--queue-source {source:?}: allowed: 1 to 128 bytes without a colon"
            )));
        }
        Ok(Some(FeedPlan {
            place,
            source: source.to_owned(),
            apart,
        }))
    }

    /// The options as typed, for the hint how to resume; `own` replaces a queue that was not typed.
    pub(crate) fn typed(&self, own: &str) -> String {
        let path = |p: &PathBuf| p.display().to_string();
        let options = [
            ("--queue", self.queue.clone()),
            (
                "--queue-token-file",
                self.queue_token_file.as_ref().map(path),
            ),
            ("--queue-source", self.queue_source.clone()),
        ];
        let given = options.into_iter().filter_map(|(name, value)| {
            let value = value?;
            Some(format!(" {name} {value}"))
        });
        let given: String = given.collect();
        match self.queue {
            None => own.to_owned() + &given,
            Some(_) => given,
        }
    }
}

/// The queue of a recipe as options of a command, where it has one: a run's own copy of a recipe that
/// filled a queue has no `[data]`.
pub(crate) fn typed_of(data: &Option<DataSection>) -> String {
    let Some(DataSection::Queue {
        queue, token_file, ..
    }) = data
    else {
        return String::new();
    };
    let token = token_file.as_ref();
    let token = token.map_or_else(String::new, |t| format!(" --queue-token-file {t}"));
    format!(" --queue {queue}{token}")
}

/// `sinew queue`.
///
/// # Errors
/// If the queue cannot be opened or reached, or refuses the call.
pub(crate) fn run(args: &QueueArgs) -> Result<(), Failure> {
    match &args.command {
        QueueCommand::Serve(args) => serve(args),
        QueueCommand::Stats(place) => {
            let stats = place.open()?.stats().map_err(Failure::outside)?;
            show_stats(&stats, place.json);
            Ok(())
        }
        QueueCommand::Rows(args) => rows(args),
        QueueCommand::Fail(args) => {
            let queue = args.place.open()?;
            let count = bury(queue.as_ref(), &args.consumer, &args.keys, &args.reason);
            counted("failed", count.map_err(Failure::input)?, args.place.json);
            Ok(())
        }
        QueueCommand::Revive(args) => revive(args),
        QueueCommand::Remove(args) => {
            let count = args.place.open()?.remove(&args.keys);
            counted("removed", count.map_err(Failure::input)?, args.place.json);
            Ok(())
        }
        QueueCommand::Score(args) => score(args),
    }
}

/// Says how many rows a command changed.
fn counted(what: &str, count: usize, json: bool) {
    if json {
        output::print_json(&json!({ what: count }))
    } else {
        output::print(&format!("{count} rows {what}\n"))
    }
}

/// Serves until Ctrl-C, TERM or HUP.
fn serve(args: &ServeArgs) -> Result<(), Failure> {
    let token = match &args.token_file {
        Some(path) => sinew_assembly::token_of("--token-file", path)?,
        None if args.listen.ip().is_loopback() => {
            Secret::random_hex(24).map_err(Failure::system)?
        }
        None => {
            return Err(Failure::input(format!(
                "--listen {}: other hosts can reach it, so it needs --token-file\n  \
                 hint: head -c 24 /dev/urandom | base64 > token",
                args.listen
            )));
        }
    };
    let endpoint = args.tls.endpoint("--listen", args.listen)?;
    let limits = QueueLimits {
        max_rows: args.max_rows,
        max_bytes: args.max_bytes,
        max_attempts: args.max_attempts,
    };
    let queue = DiskQueue::in_store(&args.store, &args.name, limits, args.accept_loss);
    let queue: Arc<dyn Queue> =
        Arc::new(queue.map_err(|e| Failure::input(format!("--store: {e}")))?);
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    runtime.block_on(listen(args, endpoint, queue, token))
}

/// Listens, prints the address, and waits for a signal.
async fn listen(
    args: &ServeArgs,
    endpoint: Endpoint,
    queue: Arc<dyn Queue>,
    token: String,
) -> Result<(), Failure> {
    // A script may send one as soon as it reads the address.
    let mut signals = StopSignals::new()?;
    let shown = args.token_file.is_none().then(|| token.clone());
    let scheme = endpoint.scheme();
    let serving = QueueServerConfig {
        listen: endpoint,
        token,
        clock: system_clock(),
        sweep: Some((SWEEP, args.keep)),
    };
    let server = QueueServer::start(Arc::clone(&queue), serving)
        .await
        .map_err(|e| Failure::input(format!("--listen {}: {e}", args.listen)))?;
    let url = format!("{scheme}://{}", server.address());
    let rows = queue.stats().map_err(Failure::system)?.rows;
    if args.json {
        output::print_json(&json!({"url": url, "token": shown, "rows": rows}))
    } else {
        let token = shown.as_deref().unwrap_or("in --token-file");
        output::print(&format!(
            "listening on {url}\ntoken: {token}\n{rows} rows are not done\n"
        ));
    }
    signals.next().await;
    tokio::select! {
        () = server.stop() => {}
        () = signals.next() => {}
    }
    let stats = queue.stats().map_err(Failure::system)?;
    if args.json {
        output::print_json(&json!({ "stopped": stats }))
    } else {
        output::print(&format!("stopped: {} rows are not done\n", stats.rows))
    }
    Ok(())
}

fn show_stats(stats: &QueueStats, json: bool) {
    if json {
        output::print_json(&json!(stats));
        return;
    }
    let QueueStats {
        rows, done, bytes, ..
    } = stats;
    let mut text = format!("{rows} rows of {bytes} bytes, {done} done ones are known\n");
    if !stats.consumers.is_empty() {
        text += &format!(
            "{:<24} {:>9} {:>9} {:>9} {:>9} {:>9}\n",
            "consumer", "waiting", "ready", "leased", "acked", "dead"
        );
    }
    for of in &stats.consumers {
        let ConsumerStats {
            name,
            waiting,
            ready,
            leased,
            acked,
            dead,
        } = of;
        let name = sinew_view::visible(name);
        text += &format!("{name:<24} {waiting:>9} {ready:>9} {leased:>9} {acked:>9} {dead:>9}\n");
    }
    output::print(&text);
}

impl State {
    fn of(state: &RowState) -> Self {
        match state {
            RowState::Waiting => Self::Waiting,
            RowState::Ready => Self::Ready,
            RowState::Leased { .. } => Self::Leased,
            RowState::Acked => Self::Acked,
            RowState::Dead { .. } => Self::Dead,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Ready => "ready",
            Self::Leased => "leased",
            Self::Acked => "acked",
            Self::Dead => "dead",
        }
    }
}

/// Lists rows, one JSON object or line each.
fn rows(args: &RowsArgs) -> Result<(), Failure> {
    let queue = args.place.open()?;
    let wanted = args.dead.then_some(State::Dead).or(args.state);
    let consumer = args.consumer.as_deref();
    let fits = |row: &RowView| {
        let mut states = row
            .states
            .iter()
            .filter(|(name, _)| consumer.is_none_or(|c| c == name));
        wanted.is_none_or(|wanted| states.any(|(_, state)| State::of(state) == wanted))
    };
    let limit = args.limit.min(MAX_PAGE);
    let rows = listed(queue.as_ref(), args.after, limit, &fits).map_err(Failure::outside)?;
    for row in &rows {
        if args.place.json {
            output::print_json(&row_json(row))
        } else {
            output::print(&row_text(row))
        }
    }
    Ok(())
}

fn row_json(row: &RowView) -> Value {
    let state = |state: &RowState| match state {
        RowState::Leased { until_ms, holder } => {
            json!({"state": "leased", "until_ms": until_ms, "holder": holder})
        }
        RowState::Dead { reason } => json!({"state": "dead", "reason": reason}),
        other => json!({"state": State::of(other).name()}),
    };
    let states = row.states.iter().map(|(name, s)| (name.clone(), state(s)));
    json!({
        "seq": row.seq, "key": row.key, "group": row.group, "fields": row.fields, "done": row.done,
        "states": states.collect::<serde_json::Map<_, _>>(),
    })
}

fn row_text(row: &RowView) -> String {
    let state = |(name, state): &(String, RowState)| {
        let more = match state {
            RowState::Leased { holder, .. } => format!(" ({holder})"),
            RowState::Dead { reason } => format!(" ({reason})"),
            _ => String::new(),
        };
        format!("{name}: {}{more}", State::of(state).name())
    };
    let states: Vec<String> = row.states.iter().map(state).collect();
    let fields = if row.done {
        "done".to_owned()
    } else {
        row.fields.join(",")
    };
    let text = format!(
        "{:>8} {}  [{fields}]  {}",
        row.seq,
        row.key,
        states.join("  ")
    );
    sinew_view::visible(&text) + "\n"
}

fn revive(args: &ReviveArgs) -> Result<(), Failure> {
    let queue = args.place.open()?;
    let keys = if args.all {
        let dead = |row: &RowView| {
            let state = row.state(&args.consumer);
            matches!(state, Some(RowState::Dead { .. }))
        };
        let rows = listed(queue.as_ref(), None, usize::MAX, &dead);
        let rows = rows.map_err(Failure::outside)?;
        rows.into_iter().map(|row| row.key).collect()
    } else {
        args.keys.clone()
    };
    let mut count = 0;
    for keys in keys.chunks(MAX_PAGE) {
        let revived = queue.revive(&args.consumer, keys);
        count += revived.map_err(Failure::input)?;
    }
    counted("revived", count, args.place.json);
    Ok(())
}

/// Scores until Ctrl-C, or until nothing is left. Rows that are not done go back at once.
fn score(args: &ScoreArgs) -> Result<(), Failure> {
    let recipe = RunPlan::load(&args.recipe, ENVIRONMENTS).map_err(Failure::input)?;
    let place = match &args.queue {
        Some(queue) => sinew_assembly::queue_place(queue, &args.name, args.token_file.as_deref())?,
        None => sinew_assembly::data_queue(&recipe)?.ok_or_else(|| {
            Failure::input("--queue: the recipe has no [data] type = \"queue\", so name a queue")
        })?,
    };
    let score = sinew_assembly::recipe_score(&recipe, &sinew_assembly::tasks(&recipe)?)?;
    let queue = sinew_assembly::open_queue(&place)?;
    let runtime = runtime::with_threads(1)?;
    let signals = signals::count(&runtime, args.stop_on_eof)?;
    let config = ScorerConfig {
        holder: args
            .holder
            .clone()
            .unwrap_or_else(|| format!("process {}", std::process::id())),
        rows: args.rows,
        tokens: args.tokens,
        order: if args.freshest {
            Order::Freshest
        } else {
            Order::Oldest
        },
        lease: Duration::from_secs(args.lease_s),
        attempts: args.attempts,
        until_empty: args.until_empty,
    };
    let mut report = |so_far: ScoredCounts| {
        if args.json {
            output::print_json(&json!({ "scoring": so_far }));
        }
    };
    let stop = || *signals.borrow() > 0;
    let done = score_rows(queue.as_ref(), &score, &config, &stop, &mut report);
    let done = done.map_err(|e| Failure::outside(format!("--queue: {e}")))?;
    if args.json {
        output::print_json(&json!({ "scored": done }))
    } else {
        output::print(&format!(
            "{} rows scored, {} left without a reward, {} given back, {} went to others\n",
            done.scored, done.unscored, done.failed, done.lost
        ))
    }
    Ok(())
}
